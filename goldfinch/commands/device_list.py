"""``goldfinch devices list``: who has contact, and what each device has contributed to which run.

Contact comes from the SuperLink, names and clients from the operator's folder, contributions from the records of runs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common.errors import ConfigError, EngineError
from common.gauges import gauge
from common.storage import write_text
from goldfinch.record import RunRecord, find_runs
from goldfinch.results.contributions import Contribution, contributions, is_deployed, time_text
from goldfinch.results.sheets import Sheet
from server.admission.enrolment import Enrolment

NO_DATE = "N/A"
"""What Flower's command line writes for a time that there is none of."""


NOTHING = Contribution()
"""The contribution of a device to no run."""


@dataclass(frozen=True)
class ListedDevice:
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
    contribution: Contribution = NOTHING

    def as_row(self) -> dict[str, Any]:
        """Return its fields and those of its contribution, flat."""
        row = asdict(self)
        return row | row.pop("contribution")


def devices(enrolment: Enrolment, runs: Iterable[RunRecord], now: float) -> tuple[list[ListedDevice], str]:
    """Return the devices of the operator's folder, and why the SuperLink could not be asked, empty if it was.

    Args:
        enrolment: the operator's folder and the SuperLink.
        runs: the runs whose records are read.
        now: the present time, in seconds since 1970.
    """
    by_client = contributions(filter(is_deployed, runs))  # a simulation has clients of the same names
    nodes: Mapping[str, Mapping[str, Any]] = {}
    problem = ""
    try:
        nodes = enrolment.nodes()
    except EngineError as error:
        problem = str(error)
    listed = []
    for name in enrolment.known:
        listed.append(_known_device(name, enrolment.enrolled(name), nodes, now, asked=not problem))
    for name, (client, when) in enrolment.dismissed.items():
        listed.append(ListedDevice(name, client, "dismissed", dismissed=when))
    successors = {device.client for device in listed if device.dismissed is None}
    with_contributions = []
    for device in listed:
        contribution = by_client.get(device.client, NOTHING)
        if device.dismissed is not None and device.client in successors:
            contribution = NOTHING  # another device is this client now, and records name clients
        with_contributions.append(replace(device, contribution=contribution))
    return with_contributions, problem


def _known_device(
    name: str, kept: tuple[str, str] | None, nodes: Mapping[str, Mapping[str, Any]], now: float, *, asked: bool
) -> ListedDevice:
    if kept is None:
        return ListedDevice(name, "", "new")
    number, client = kept
    if not asked or number not in nodes:
        return ListedDevice(name, client, "unknown")
    node = nodes[number]
    status = str(node["status"])
    if status == "online":
        return ListedDevice(name, client, status, online_since=_seconds(node.get("online-at")), last_contact=now)
    return ListedDevice(name, client, status, last_contact=_seconds(node.get("offline-at")))


def _seconds(text: object) -> float | None:
    """Return a time of Flower's, such as ``2026-11-27 13:00:00Z``, in seconds since 1970."""
    if not isinstance(text, str) or text == NO_DATE:
        return None
    when = datetime.fromisoformat(text)
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return when.timestamp()


def list_devices(
    enrolment: Enrolment,
    runs: Sequence[str],
    *,
    as_json: bool = False,
    metrics: Path | None = None,
) -> None:
    """Print who has contact, and what each device has contributed.

    Args:
        enrolment: the operator's folder and the SuperLink.
        runs: folders with runs, whose records are read.
        as_json: print one JSON object in place of the table.
        metrics: a file for a node exporter, written besides.

    Raises:
        GoldfinchError: the folder holds no devices, or a run cannot be read.
    """
    now = time.time()
    listed, problem = devices(enrolment, find_runs(runs, finished=False), now)
    if not listed:
        raise ConfigError(f"{enrolment.folder / 'nodes'} holds no devices; make keys: goldfinch devices certificates")
    days = enrolment.certificate_days
    if metrics is not None:
        write_text(metrics, _metrics(listed, days, now, asked=not problem))
        metrics.chmod(0o644)  # an exporter is another user
    if problem:
        print(f"contact is not known: {problem}", file=sys.stderr)
    if as_json:
        print(json.dumps({"certificate_days": days, "devices": [device.as_row() for device in listed]}, indent=2))
        return
    rows = [_cells(device) for device in listed]
    Sheet("", list(rows[0]), [list(row.values()) for row in rows]).show()
    if days is not None:
        print(f"\nthe server's certificate ends in {days} days")


def _cells(device: ListedDevice) -> dict[str, str]:
    """Return the texts of a device's line in the table."""
    status = device.status
    if device.dismissed is not None:
        status += f" {time_text(device.dismissed)}"
    return {
        "device": device.name,
        "client": device.client or "-",
        "status": status,
        "online since": time_text(device.online_since),
        "last contact": time_text(device.last_contact),
        **device.contribution.cells(),
    }


def _metrics(listed: Sequence[ListedDevice], days: int | None, now: float, *, asked: bool) -> str:
    """Return what a monitor reads of the devices that were not dismissed; who is online if the SuperLink answered."""

    def online(device: ListedDevice) -> float | None:
        if not asked:
            return None
        return float(device.status == "online")

    lines = gauge("written_timestamp_seconds", "When this file was written.", {"": now})
    lines += gauge("certificate_days", "Days until the server's certificate ends.", {"": days})
    columns: list[tuple[str, str, Callable[[ListedDevice], float | None]]] = [
        ("online", "1 if the device is online.", online),
        (
            "last_contact_timestamp_seconds",
            "When the device was last known online.",
            lambda device: device.last_contact,
        ),
        (
            "last_reply_timestamp_seconds",
            "When the device's last reply that counted arrived.",
            lambda device: device.contribution.last_reply,
        ),
        (
            "missed_rounds",
            "Rounds in a row in which the device was asked and did not count.",
            lambda device: device.contribution.missed,
        ),
    ]
    for name, meaning, value in columns:
        values = {device.name: value(device) for device in listed if device.dismissed is None}
        lines += gauge(f"device_{name}", meaning, values, "device")
    return "\n".join(lines) + "\n"
