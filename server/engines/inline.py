"""The inline engine: all clients in this process, one after another or on a few threads."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from hydra.utils import get_method

from common.choices import trusted
from common.config import Count, build, checked
from common.data.protocols import ClientSpec
from common.errors import ConfigError, GoldfinchError
from common.settings import RunSettings
from common.wire.messages import Answer, Registration, Request, read_header
from common.wire.payload import Payload, decode, encode, encoded_size
from server.run.engine import Admit, Failure, Keep, as_it_is
from strategies.core.federation import Closing, Reply


class LocalDevice(Protocol):
    """What the engine needs of a device; the client's room implements it."""

    def register(self) -> Registration:
        """What the device says of itself."""

    def answer(self, request: Request, message: Payload) -> Payload:
        """The answer to a request; its header is an :class:`~common.wire.messages.Answer`."""


@checked
class InlineSettings:
    """conf/engine/inline.yaml.

    Args:
        name: ``inline``.
        device: dotted name of ``function(settings, spec) -> device``, named here so that the server's room does not
            import the client's.
        wire: send every message through the codec, as the other engines do.
        workers: clients that train at the same time, each with ``train.threads`` threads, >= 1. The result does not
            depend on it.
    """

    name: str
    device: str
    wire: bool = False
    workers: Count = 1


class InlineEngine:
    """All clients of the protocol as objects of this process.

    Args:
        settings: the run's settings; ``settings.engine`` is read as :class:`InlineSettings`.
    """

    simulated = True

    def __init__(self, settings: RunSettings) -> None:
        self.options: InlineSettings = build(settings.engine, "engine", InlineSettings)
        if not trusted(self.options.device, "engine"):
            raise ConfigError(f"engine.device={self.options.device} is not Goldfinch's own: name it yourself")
        make: Callable[[RunSettings, ClientSpec], LocalDevice] = get_method(self.options.device)
        self.devices = {spec.id: make(settings, spec) for spec in settings.protocol.clients(settings.data)}
        self._pool = ThreadPoolExecutor(self.options.workers, thread_name_prefix="client")

    def register(
        self,
        expected: Sequence[str],
        admit: Admit,
        seconds: float,  # noqa: ARG002  # nothing here waits on a network
    ) -> list[Failure]:
        """See :class:`server.run.engine.Engine`; bad data raises, since every client is here to be mended."""
        found = list(self._pool.map(lambda client: self.devices[client].register(), expected))
        reasons = [(registration.client, admit(registration)) for registration in found]
        return [Failure(client, "refused", reason) for client, reason in reasons if reason]

    def exchange(
        self,
        message: Payload,
        requests: Mapping[str, Request],
        seconds: float,  # noqa: ARG002  # nothing here waits on a network
        *,
        keep: Keep = as_it_is,
        closing: Closing | None = None,  # noqa: ARG002
    ) -> tuple[list[Reply], list[Failure]]:
        """See :class:`server.run.engine.Engine`."""
        blob = encode(message) if self.options.wire else b""
        outcomes = list(self._pool.map(lambda request: self._ask(request, message, blob, keep), requests.values()))
        replies = [outcome for outcome in outcomes if isinstance(outcome, Reply)]
        return replies, [outcome for outcome in outcomes if isinstance(outcome, Failure)]

    def _ask(self, request: Request, message: Payload, blob: bytes, keep: Keep) -> Reply | Failure:
        try:
            answer = self.devices[request.client].answer(request, decode(blob) if blob else message)
            if self.options.wire:
                uploaded = encode(answer)
                size_up = len(uploaded)
                answer = decode(uploaded)
            else:
                size_up = encoded_size(answer)
            header = read_header(Answer, answer.header)
        except GoldfinchError as error:
            return Failure(request.client, "failed", str(error), traceback.format_exc())
        except Exception as error:  # whatever a client's half raises is that client's failure
            return Failure(request.client, "failed", f"{type(error).__name__}: {error}", traceback.format_exc())
        return Reply(request.client, header, keep(answer), size_up)  # outside of the try: a full disk is the server's

    def close(self) -> None:
        """See :class:`server.run.engine.Engine`."""
        self._pool.shutdown()
