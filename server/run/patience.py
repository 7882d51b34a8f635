"""How long the server waits for an exchange: ``rounds.deadline``, or what the rounds so far suggest in a deployment."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from strategies.core.federation import Reply

FIRST_SECONDS = 3600.0
"""Seconds without ``rounds.deadline``, and the most that a deployment waits then."""

FACTOR, EXCHANGES, LEAST_SECONDS = 10.0, 3, 120.0
"""A deployment waits ten times the median of the exchanges so far, from three of them on, and at least two minutes."""


class ExchangePatience:
    """The seconds that an exchange may take.

    Without ``rounds.deadline``, one device that hangs would hold every round of a deployment for an hour. So from the
    fourth exchange on the server waits ten times the median exchange. An exchange counts up to its last reply, so
    clients that never reply do not lengthen it.

    Args:
        deadline: ``rounds.deadline``.
        simulated: whether the clients are simulated; nothing is derived then.
        event: called with the name and the content of an event.
    """

    def __init__(self, deadline: float | None, *, simulated: bool, event: Callable[..., Any]) -> None:
        self.deadline, self.simulated, self.event = deadline, simulated, event
        self._took: list[float] = []
        self._said = False

    def seconds(self, number: int) -> float:
        """Return the seconds that the next exchange may take; report once that they were derived.

        Args:
            number: the round.
        """
        if self.deadline is not None:
            return self.deadline
        if self.simulated or len(self._took) < EXCHANGES:
            return FIRST_SECONDS
        seconds = min(FIRST_SECONDS, max(LEAST_SECONDS, FACTOR * statistics.median(self._took)))
        if not self._said:
            self._said = True
            self.event("deadline derived", round=number, seconds=round(seconds, 1))
        return seconds

    def note(self, began: float, replies: Sequence[Reply]) -> None:
        """Note an exchange.

        Args:
            began: when it began, in seconds since 1970.
            replies: the replies that arrived.
        """
        if replies:
            self._took.append(max(reply.time for reply in replies) - began)
