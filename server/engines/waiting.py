"""Reports of an engine that waits: for which clients, and for how long already."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

WAIT_SECONDS = 5.0
"""Shortest time between two reports of a wait."""

OnWaiting = Callable[[Sequence[str], float, int | None], None]
"""Called with the clients that are waited for, since how many seconds, and the round; ``None`` is registration."""


class WaitReport:
    """Reports one wait: after five seconds, when other clients are waited for, and when the wait has doubled.

    Args:
        listener: gets each report; ``None`` leaves them out.
        number: the round; ``None`` while clients register.
    """

    def __init__(self, listener: OnWaiting | None, number: int | None = None) -> None:
        self._listener = listener
        self._number = number
        self._began = time.monotonic()
        self._reported = 0.0
        self._names: Sequence[str] = ()

    def __call__(self, names: Sequence[str]) -> None:
        """Report that ``names`` are waited for, if it is time to."""
        if self._listener is None or not names:
            return
        seconds = time.monotonic() - self._began
        if seconds - self._reported < WAIT_SECONDS:
            return
        if names == self._names and seconds < 2 * self._reported:
            return
        self._reported = seconds
        self._names = names
        self._listener(names, seconds, self._number)
