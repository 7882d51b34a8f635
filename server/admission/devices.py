"""The devices of a federation over time: who has contact, and what each has contributed to which run.

Contact comes from the SuperLink, names and clients from the operator's folder, contributions from the records of runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from common.errors import EngineError
from common.wire.messages import UNUSED_STATUSES
from server.admission.enrolment import Enrolment
from server.run.files import RunFiles

NOT_COUNTED = (*UNUSED_STATUSES, "late")
"""Statuses of replies that did not count."""

NO_DATE = "N/A"
"""What Flower's command line writes for a time that there is none of."""


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
        epsilon_left: what that run's ``privacy.max_epsilon`` left; ``None`` without a limit.
    """

    last_reply: float | None = None
    last_run: str = ""
    missed: int = 0
    version: str = ""
    clock_ahead: float | None = None
    epsilon: float | None = None
    epsilon_left: float | None = None


@dataclass(frozen=True)
class Device:
    """A device of the operator's folder.

    Args:
        name: name of its key.
        client: the client that the key is enrolled for; empty before it is enrolled.
        status: ``online``, ``offline``, ``registered`` (enrolled, and never seen), ``new`` (not enrolled),
            ``dismissed``, or ``unknown`` (the SuperLink did not answer, or does not know it).
        online_since: when it connected, in seconds since 1970; ``None`` while it is not online.
        last_contact: when the SuperLink last knew it online, in seconds since 1970; ``None`` if never.
        dismissed: when it was dismissed, likewise.
        contribution: what its client has contributed.
    """

    name: str
    client: str
    status: str
    online_since: float | None = None
    last_contact: float | None = None
    dismissed: float | None = None
    contribution: Contribution = Contribution()

    def as_row(self) -> dict[str, Any]:
        """Return its fields and those of its contribution, flat."""
        row = asdict(self)
        return row | row.pop("contribution")


def contributions(runs: Iterable[RunFiles]) -> dict[str, Contribution]:
    """Return what each client has contributed to ``runs``, by client."""
    found: dict[str, Contribution] = {}
    for run in sorted(runs, key=_began):
        for client, entry in run.facts.registrations.items():
            found[client] = _registered(found.get(client, Contribution()), entry)
        for client, rounds in _rounds_by_client(run).items():
            found[client] = _replied(found.get(client, Contribution()), rounds, run.folder.name)
        for client, epsilons in _epsilons(run).items():
            epsilon, left = epsilons
            found[client] = replace(found.get(client, Contribution()), epsilon=epsilon, epsilon_left=left)
    return dict(sorted(found.items()))


def devices(enrolment: Enrolment, runs: Iterable[RunFiles], now: float) -> tuple[list[Device], str]:
    """Return the devices of the operator's folder, and why the SuperLink could not be asked, empty if it was.

    Args:
        enrolment: the operator's folder and the SuperLink.
        runs: the runs whose records are read.
        now: the present time, in seconds since 1970.
    """
    by_client = contributions(runs)
    nodes: Mapping[str, Mapping[str, Any]] = {}
    problem = ""
    try:
        nodes = enrolment.nodes()
    except EngineError as error:
        problem = str(error)
    found = []
    for name in enrolment.known:
        found.append(_known_device(name, enrolment.enrolled(name), nodes, now, asked=not problem))
    for name, (client, when) in enrolment.dismissed.items():
        found.append(Device(name, client, "dismissed", dismissed=when))
    with_contributions = []
    for device in found:
        with_contributions.append(replace(device, contribution=by_client.get(device.client, Contribution())))
    return with_contributions, problem


def _known_device(
    name: str, kept: tuple[str, str] | None, nodes: Mapping[str, Mapping[str, Any]], now: float, *, asked: bool
) -> Device:
    if kept is None:
        return Device(name, "", "new")
    number, client = kept
    if not asked or number not in nodes:
        return Device(name, client, "unknown")
    node = nodes[number]
    status = str(node["status"])
    if status == "online":
        return Device(name, client, status, online_since=_seconds(node.get("online-at")), last_contact=now)
    return Device(name, client, status, last_contact=_seconds(node.get("offline-at")))


def _seconds(text: object) -> float | None:
    """Return a time of Flower's, such as ``2026-11-27 13:00:00Z``, in seconds since 1970."""
    if not isinstance(text, str) or text == NO_DATE:
        return None
    when = datetime.fromisoformat(text)
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return when.timestamp()


def _began(run: RunFiles) -> float:
    if not run.events:
        return 0.0
    return float(run.events[0]["time"])


def _registered(before: Contribution, entry: Mapping[str, Any]) -> Contribution:
    version = str(entry.get("versions", {}).get("goldfinch", ""))
    return replace(before, version=version, clock_ahead=entry.get("clock_ahead"))


def _rounds_by_client(run: RunFiles) -> dict[str, dict[int, float | None]]:
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


def _epsilons(run: RunFiles) -> dict[str, tuple[float | None, float | None]]:
    """Return each client's epsilon in a private run and what its limit left, from the run's last event of both."""
    limit = run.config["privacy"].get("max_epsilon")
    for entry in reversed(run.events):
        if "privacy" not in entry:
            continue
        found: dict[str, tuple[float | None, float | None]] = {}
        for client, epsilon in entry["privacy"]["epsilon"].items():
            left = None
            if epsilon is not None and limit is not None:
                left = max(0.0, float(limit) - epsilon)
            found[client] = (epsilon, left)
        return found
    return {}
