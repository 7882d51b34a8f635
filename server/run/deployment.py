"""What a deployment's server does besides: it waits as devices need, and shares its folder with a group."""

from __future__ import annotations

import os
import stat
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.wire.messages import Registration
from server.run.schema import EVENTS, REPLIES, SCORES
from strategies.core.federation import Reply

DEADLINE_SECONDS = 3600.0
"""Seconds that an exchange may take without ``rounds.deadline``, and the most that a deployment derives."""

FACTOR, EXCHANGES, LEAST_SECONDS = 10.0, 3, 120.0
"""What a deployment waits as a multiple of the median exchange, after how many exchanges, and at least."""

SLOW_START_SECONDS = 30.0
"""A device whose processes take longer to start is reported, because each of its replies takes longer."""


def exchange_seconds(deadline: float | None, took: Sequence[float]) -> float:
    """Return the seconds that an exchange may take.

    Without ``rounds.deadline``, one device that hangs would hold every round of a deployment for an hour. So from the
    fourth exchange on a deployment waits ten times the median exchange, and two minutes at least.

    Args:
        deadline: ``rounds.deadline``.
        took: the seconds of each exchange so far up to its last reply, so that clients that never reply do not count.
    """
    if deadline is not None:
        return deadline
    if len(took) < EXCHANGES:
        return DEADLINE_SECONDS
    return min(DEADLINE_SECONDS, max(LEAST_SECONDS, FACTOR * statistics.median(took)))


class ExchangePatience:
    """The seconds that each exchange of a deployment may take; see :func:`exchange_seconds`.

    Args:
        deadline: ``rounds.deadline``.
        event: called with the name and the content of an event.
    """

    def __init__(self, deadline: float | None, event: Callable[..., Any]) -> None:
        self.deadline, self.event = deadline, event
        self._took: list[float] = []
        self._reported = False

    def seconds(self, number: int) -> float:
        """Return the seconds that an exchange of round ``number`` may take; report once that they are derived."""
        seconds = exchange_seconds(self.deadline, self._took)
        if self.deadline is None and len(self._took) >= EXCHANGES and not self._reported:
            self._reported = True
            self.event("deadline derived", round=number, seconds=round(seconds, 1))
        return seconds

    def note(self, began: float, replies: Sequence[Reply]) -> None:
        """Note the replies of an exchange that began at ``began``, in seconds since 1970."""
        if replies:
            self._took.append(max(reply.time for reply in replies) - began)


def slow_start(registration: Registration, deadline: float | None) -> str:
    """Return the report of a device whose processes start slowly, with the time that the server waits; empty if not."""
    seconds = registration.start_seconds
    if seconds <= SLOW_START_SECONDS:
        return ""
    reason = f"its process takes {seconds:.0f} s to start, and so does that of every message"
    if deadline is not None:
        reason += f"; the server waits {deadline:.0f} s for an exchange (rounds.deadline)"
    return reason


def check_writable(folder: Path) -> None:
    """Refuse a folder in which this user cannot write, such as one that another user has submitted a run to.

    Raises:
        ConfigError: it cannot be written.
    """
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return  # the first file that is written says so
    for path in (folder, folder / EVENTS, folder / SCORES, folder / REPLIES):
        if path.exists() and not os.access(path, os.W_OK, effective_ids=True):
            raise ConfigError(
                f"user {os.geteuid()} cannot write to {path}: choose another output=. In a deployment, who submits "
                "runs and the user of the SuperLink need one group and a results folder of that group (docs/deploy.md)"
            )


def share_with_group(folder: Path) -> None:
    """Let the group write in a new folder, if it may write in the folder above, whose group new files get."""
    above = folder.parent.stat().st_mode
    if above & stat.S_ISGID and above & stat.S_IWGRP:
        folder.chmod(folder.stat().st_mode | stat.S_IWGRP)
