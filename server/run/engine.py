"""The interface of an engine: how the round loop reaches clients, independent of the transport."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from common.errors import reason_of, traceback_of
from common.numerics import generator
from common.wire.messages import Registration, Request
from common.wire.payload import Payload
from strategies.core.federation import Closing, Reply

ENOUGH = "enough others had answered"
"""Why a client is late."""


@dataclass(frozen=True)
class Failure:
    """Why a client's reply does not count as it was sent, or did not come; the text is cut, and made printable.

    The record of a reply, its event, and the event of its missing score take status and reason from one such object.

    Args:
        status: ``failed`` (its own error), ``lost`` (no answer in time), ``late`` (enough others had answered),
            ``refused`` (the reply was not accepted), or ``scaled`` (a filter scaled its update down).
        reason: one line.
        traceback: the client's own traceback, if it sent one.
        sent: whether the request left at all.
        bytes_up: size of an answer that came and could not be read.
        time: when it was known, in seconds since 1970 (UTC).
    """

    client: str
    status: str
    reason: str
    traceback: str = ""
    sent: bool = True
    bytes_up: int = 0
    time: float = field(default_factory=time.time, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", reason_of(self.reason))
        object.__setattr__(self, "traceback", traceback_of(self.traceback))


Admit = Callable[[Registration], str | None]
"""Registers a client; returns why the client cannot take part, ``None`` if it can."""


Keep = Callable[[Payload], Payload]
"""What becomes of an answer's tensors until the last has come."""


def as_it_is(payload: Payload) -> Payload:
    """The answer stays where it is, in memory."""
    return payload


def without_the_late(
    replies: Sequence[Reply], failures: Sequence[Failure], closing: Closing
) -> tuple[list[Reply], list[Failure]]:
    """Return the replies that arrive before a simulated exchange closes, and the failures with the late clients.

    How long a simulated client takes says nothing of a device, so its delay is drawn: from the seed, the round and its
    id, so that all simulations agree.

    Args:
        replies: the replies of all clients.
        failures: clients without one.
        closing: when the exchange closes.
    """

    def delay(reply: Reply) -> float:
        draws = generator(closing.seed, "delay", closing.round, reply.client)
        return float(torch.rand(1, generator=draws))

    pending = sorted(replies, key=lambda reply: (delay(reply), reply.client))
    arrived: list[Reply] = []
    updates = 0
    while pending and not closing.reached(updates, [reply.client for reply in pending]):
        reply = pending.pop(0)
        arrived.append(reply)
        updates += reply.answer.trained
    return arrived, [*failures, *(Failure(reply.client, "late", ENOUGH) for reply in pending)]


class Engine(Protocol):
    """Reaches the clients of a federation.

    Attributes:
        simulated: whether all clients are on this machine, with all data, and none is a device.
    """

    simulated: bool

    def register(self, expected: Sequence[str], admit: Admit, seconds: float) -> list[Failure]:
        """Wait up to ``seconds`` for all of ``expected``, and call ``admit`` with each new registration.

        A client that was registered before comes again when it returns on another node. Failures are registrations
        that could not be read, with the node's message, that the node may not make, or that ``admit`` refused. A
        refused client is sent nothing and takes no place.
        """

    def exchange(
        self,
        message: Payload,
        requests: Mapping[str, Request],
        seconds: float,
        *,
        keep: Keep = as_it_is,
        closing: Closing | None = None,
    ) -> tuple[list[Reply], list[Failure]]:
        """Send ``message`` with each client's request; collect what comes back within ``seconds``.

        Each answer's tensors go through ``keep`` as soon as they are read. ``closing`` says when the exchange closes
        before all have replied. A simulation waits for everybody, and draws who would have been late
        (:func:`without_the_late`).
        """

    def close(self) -> None:
        """Release what the engine holds."""
