"""The inline engine: all clients in this process, one after another or on several threads."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Protocol, TypeVar

from hydra.utils import get_method

from common.choices import trusted
from common.config import Count, build, checked
from common.data.protocols import ClientSpec
from common.errors import ConfigError, GoldfinchError
from common.settings import RunSettings
from common.wire.messages import Answer, Registration, Request, read_header
from common.wire.payload import Payload, decode, encode, encoded_size
from server.run.engine import Admit, Failure, Keep, as_it_is, without_the_late
from server.run.signals import uninterrupted
from strategies.core.federation import Closing, Reply

Item = TypeVar("Item")
Result = TypeVar("Result")

SIGNAL_SECONDS = 0.2
"""Seconds that a signal waits at most while clients train on several threads."""


class LocalDevice(Protocol):
    """What the engine needs of a device; ``client.device`` implements it."""

    def register(self) -> Registration:
        """Return the device's registration."""

    def answer(self, request: Request, message: Payload) -> Payload:
        """Return the answer to a request; its header is an :class:`~common.wire.messages.Answer`."""


@checked
class InlineSettings:
    """conf/engine/inline.yaml.

    Args:
        name: ``inline``.
        device: dotted name of ``function(settings, spec) -> device``, so that server/ does not import client/.
        wire: encode and decode every message, as the other engines do.
        workers: clients that train at the same time, each with ``train.threads`` threads, >= 1. The result does not
            depend on it, unless networks draw from PyTorch's generators in training, as dropout does.
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
        self.devices = {spec.id: make(settings, spec) for spec in settings.clients}
        self._pool: ThreadPoolExecutor | None = None
        if self.options.workers > 1:
            self._pool = ThreadPoolExecutor(self.options.workers, thread_name_prefix="client")

    def register(
        self,
        expected: Sequence[str],
        admit: Admit,
        seconds: float,  # noqa: ARG002  # nothing here waits on a network
    ) -> list[Failure]:
        """Register the clients. See :class:`server.run.engine.Engine`.

        A client's own error is raised, since it can be fixed on this machine.
        """
        registrations = self._each(lambda client: self.devices[client].register(), expected)
        failures = []
        for registration in registrations:
            reason = admit(registration)
            if reason:
                failures.append(Failure(registration.client, "refused", reason))
        return failures

    def exchange(
        self,
        message: Payload,
        requests: Mapping[str, Request],
        seconds: float,  # noqa: ARG002  # nothing here waits on a network
        *,
        keep: Keep = as_it_is,
        closing: Closing | None = None,
    ) -> tuple[list[Reply], list[Failure]]:
        """Exchange one message with the clients. See :class:`server.run.engine.Engine`."""
        blob = encode(message) if self.options.wire else None
        replies: list[Reply] = []
        failures: list[Failure] = []
        outcomes = self._each(lambda request: self._ask(request, message, blob, keep), list(requests.values()))
        for outcome in outcomes:
            if isinstance(outcome, Failure):
                failures.append(outcome)
            else:
                replies.append(outcome)
        if closing is None:
            return replies, failures
        return without_the_late(replies, failures, closing)

    def _ask(self, request: Request, message: Payload, blob: bytes | None, keep: Keep) -> Reply | Failure:
        """Return a client's reply, or its failure. With ``blob``, both directions are encoded and decoded."""
        device = self.devices[request.client]
        try:
            if blob is None:
                answer = device.answer(request, message)
                bytes_up = encoded_size(answer)
            else:
                uploaded = encode(device.answer(request, decode(blob)))
                bytes_up = len(uploaded)
                answer = decode(uploaded)
            header = read_header(Answer, answer.header)
        except GoldfinchError as error:
            return Failure(request.client, "failed", str(error), traceback.format_exc())
        except Exception as error:  # a method can raise any type on a client
            return Failure(request.client, "failed", f"{type(error).__name__}: {error}", traceback.format_exc())
        return Reply(
            request.client, header, keep(answer), bytes_up
        )  # not in the try: a full disk is the server's error

    def close(self) -> None:
        """End the threads; clients that have not begun are not asked any more."""
        if self._pool is not None:
            with uninterrupted():
                self._pool.shutdown(cancel_futures=True)

    def _each(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Return the results of ``work`` in the order of ``items``, in this thread or in those of the pool."""
        if self._pool is None:
            return [work(item) for item in items]
        with uninterrupted():
            futures = [self._pool.submit(work, item) for item in items]
        pending = set(futures)
        while pending:
            with uninterrupted():  # a signal waits this long at most
                pending = wait(pending, SIGNAL_SECONDS).not_done
        return [future.result() for future in futures]
