"""What each client has contributed to runs over time: its last reply that counted, and the rounds that it missed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from common.wire.messages import UNUSED_STATUSES
from goldfinch.record import RunRecord

NOT_COUNTED = (*UNUSED_STATUSES, "late")
"""Statuses of replies that did not count."""


@dataclass(frozen=True)
class Contribution:
    """What a client has contributed to runs.

    Args:
        last_reply: when its last reply that counted arrived, in seconds since 1970; ``None`` without one.
        last_run: name of that run's folder.
        missed: rounds in a row, up to now, in which it was asked and did not count.
        version: Goldfinch's version on its device, at its last registration.
        clock_ahead: seconds by which its clock was ahead of the server's then; see
            :class:`common.wire.messages.Registration`.
        epsilon: the privacy budget that it has spent in its last private run; ``None`` without one, or if parts of its
            updates carried no noise.
    """

    last_reply: float | None = None
    last_run: str = ""
    missed: int = 0
    version: str = ""
    clock_ahead: float | None = None
    epsilon: float | None = None

    def cells(self) -> dict[str, str]:
        """Return the texts of its columns in a table."""
        return {
            "last reply": time_text(self.last_reply),
            "of run": self.last_run or "-",
            "missed": str(self.missed),
            "version": self.version or "-",
            "clock": _number(self.clock_ahead, "+.0f", " s"),
            "epsilon": _number(self.epsilon, ""),
        }


def contributions(runs: Iterable[RunRecord]) -> dict[str, Contribution]:
    """Return what each client has contributed to ``runs``, by client."""
    by_client: dict[str, Contribution] = {}
    for run in sorted(runs, key=_began):
        for client, entry in run.facts.registrations.items():
            by_client[client] = _registered(by_client.get(client, Contribution()), entry)
        for client, rounds in _rounds_by_client(run).items():
            by_client[client] = _replied(by_client.get(client, Contribution()), rounds, run.folder.name)
        for client, epsilon in _epsilons(run).items():
            by_client[client] = replace(by_client.get(client, Contribution()), epsilon=epsilon)
    return dict(sorted(by_client.items()))


def is_deployed(run: RunRecord) -> bool:
    """Return whether the run's clients were devices, which state their clocks and starts."""
    return any("start_seconds" in entry or "clock_ahead" in entry for entry in run.facts.registrations.values())


def time_text(seconds: float | None) -> str:
    """Return a time in UTC; ``-`` without one."""
    if not seconds:
        return "-"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _number(value: float | None, form: str, unit: str = "") -> str:
    if value is None:
        return "-"
    return f"{value:{form}}{unit}"


def _began(run: RunRecord) -> float:
    if not run.events:
        return 0.0
    return float(run.events[0]["time"])


def _registered(before: Contribution, entry: Mapping[str, Any]) -> Contribution:
    version = str(entry.get("versions", {}).get("goldfinch", ""))
    return replace(before, version=version, clock_ahead=entry.get("clock_ahead"))


def _rounds_by_client(run: RunRecord) -> dict[str, dict[int, float | None]]:
    """Return by client, for each round in which it was asked, when its reply that counted arrived; ``None`` without."""
    rounds: dict[str, dict[int, float | None]] = {}
    for line in run.replies:
        by_round = rounds.setdefault(str(line["client"]), {})
        number = int(line["round"])
        by_round.setdefault(number, None)
        if line["status"] not in NOT_COUNTED:
            by_round[number] = float(line.get("time", 0.0))
    return rounds


def _replied(before: Contribution, rounds: Mapping[int, float | None], run: str) -> Contribution:
    after = before
    for _, arrived in sorted(rounds.items()):
        if arrived is None:
            after = replace(after, missed=after.missed + 1)
        else:
            after = replace(after, missed=0, last_reply=arrived or None, last_run=run)
    return after


def _epsilons(run: RunRecord) -> dict[str, float | None]:
    """Return each client's epsilon in a private run, from the run's last event of it."""
    for entry in reversed(run.events):
        if "privacy" in entry:
            return dict(entry["privacy"]["epsilon"])
    return {}
