"""The operator's commands: ``goldfinch devices`` with ``certificates``, ``enrol``, ``dismiss`` and ``list``."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.gauges import Gauge, gauge, write_gauges
from goldfinch.record import find_runs
from goldfinch.trackers.wait_lines import wait_lines
from server.admission.certificates import SERVER_DAYS, days_left, ensure
from server.admission.devices import Device, devices
from server.admission.enrolment import Enrolment
from server.flower.processes import flower_environment, flower_home

WAITING = "waiting for the SuperLink to answer"
"""What these commands say while they wait."""


def certificates(folder: Path, hosts: Sequence[str], nodes: Sequence[str], days: int | None = None) -> None:
    """Make or renew what ``folder`` lacks: certificates of the server's names ``hosts``, and a key for each node.

    Raises:
        ConfigError: a name or the number of days cannot be used.
    """
    folder = folder.expanduser()
    for line in ensure(folder, hosts, nodes, SERVER_DAYS if days is None else days):
        print(line)
    print(f"keep {folder / 'authority'} to yourself; give the server server/, and each device its folder of nodes/")


def enrol(folder: Path, nodes: Sequence[str], clients: Sequence[str], connection: str | None = None) -> None:
    """Register the keys of ``nodes`` with the SuperLink; of all in the folder if no node and no client is named.

    Args:
        folder: the folder that ``goldfinch devices certificates`` was given, or its ``operator/``.
        nodes: devices that are the client of their name.
        clients: other devices, each with its client: ``NODE=ID``.
        connection: the SuperLink's name in Flower's configuration.

    Raises:
        GoldfinchError: a device is not known or named twice, or the SuperLink refused.
    """
    chosen = dict.fromkeys(nodes, "")
    for pair in clients:
        node, _, client = pair.partition("=")
        if not node or not client:
            raise ConfigError(
                f"--client {pair}: a device and its client are written NODE=ID, such as ward-a=radiology-0"
            )
        if chosen.get(node):
            raise ConfigError(f"--client {pair}: {node} is given {chosen[node]} as well, and a key has one client")
        chosen[node] = client
    with wait_lines(WAITING):
        outcomes = _enrolment(folder, connection).enrol(list(chosen), list(chosen.values()))
    for name, outcome in outcomes.items():
        print(f"{name:20} {outcome}")


def enrol_again(folder: Path, connection: str | None = None) -> None:
    """Enrol the devices again that a SuperLink has forgotten, each as the client that it was.

    Args:
        folder: the folder that ``goldfinch devices certificates`` was given, or its ``operator/``.
        connection: the SuperLink's name in Flower's configuration.

    Raises:
        GoldfinchError: the SuperLink refused, or did not answer.
    """
    with wait_lines(WAITING):
        outcomes = _enrolment(folder, connection).restore()
    for name, outcome in outcomes.items():
        print(f"{name:20} {outcome}")
    if not outcomes:
        print("nothing to restore: the SuperLink knows every device that was enrolled from here")


def dismiss(folder: Path, nodes: Sequence[str], connection: str | None = None) -> None:
    """Remove the keys of ``nodes``, devices that are lost or leave, from the SuperLink.

    Raises:
        GoldfinchError: no device is named, one is not known, or the SuperLink refused.
    """
    if not nodes:
        raise ConfigError("goldfinch devices dismiss needs a device: --node NAME")
    enrolment = _enrolment(folder, connection)
    for name in nodes:
        with wait_lines(WAITING):
            outcome = enrolment.dismiss(name)
        print(f"{name:20} {outcome}")


def list_devices(
    folder: Path,
    runs: Sequence[str],
    *,
    as_json: bool = False,
    metrics: Path | None = None,
    connection: str | None = None,
) -> None:
    """Print who has contact, and what each device has contributed.

    Args:
        folder: the folder that ``goldfinch devices certificates`` was given, or its ``operator/``.
        runs: folders with runs, whose records are read.
        as_json: print one JSON object in place of the table.
        metrics: a file for a node exporter, written besides.
        connection: the SuperLink's name in Flower's configuration.

    Raises:
        GoldfinchError: the folder holds no devices, or a run cannot be read.
    """
    enrolment = _enrolment(folder, connection)
    now = time.time()
    found, problem = devices(enrolment, find_runs(runs, finished=False), now)
    if not found:
        raise ConfigError(f"{enrolment.folder / 'nodes'} holds no devices; make keys: goldfinch devices certificates")
    certificate = enrolment.folder.parent / "server" / "server.pem"
    days = days_left(certificate) if certificate.exists() else None
    if metrics is not None:
        write_gauges(metrics, _gauges(found, days, now))
    if problem:
        print(f"contact is not known: {problem}", file=sys.stderr)
    if as_json:
        print(json.dumps({"certificate_days": days, "devices": [device.as_row() for device in found]}, indent=2))
        return
    print("\n".join(_table([_cells(device) for device in found])))
    if days is not None:
        print(f"\nthe server's certificate ends in {days} days")


def _cells(device: Device) -> dict[str, str]:
    """Return the texts of a device's line in the table."""
    done = device.contribution
    status = device.status
    if device.dismissed is not None:
        status += f" {_time(device.dismissed)}"
    return {
        "device": device.name,
        "client": device.client or "-",
        "status": status,
        "online since": _time(device.online_since),
        "last contact": _time(device.last_contact),
        "last reply": _time(done.last_reply),
        "of run": done.last_run or "-",
        "missed": str(done.missed),
        "version": done.version or "-",
        "clock": _number(done.clock_ahead, "+.0f", " s"),
        "epsilon": _number(done.epsilon, ".3g"),
        "left": _number(done.epsilon_left, ".3g"),
    }


def _table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return rows of equal columns as aligned lines below a line of names."""
    names = list(rows[0])
    lines = [dict(zip(names, names, strict=True)), *rows]
    widths = {name: max(len(line[name]) for line in lines) for name in names}
    return ["  ".join(f"{line[name]:{widths[name]}}" for name in names).rstrip() for line in lines]


def _time(seconds: float | None) -> str:
    """Return a time in UTC."""
    if not seconds:
        return "-"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _number(value: float | None, form: str, unit: str = "") -> str:
    if value is None:
        return "-"
    return f"{value:{form}}{unit}"


def _gauges(found: Sequence[Device], days: int | None, now: float) -> list[Gauge]:
    """Return what a monitor reads of the devices that were not dismissed."""
    present = [device for device in found if device.dismissed is None]

    def by_device(name: str, meaning: str, values: Mapping[str, Any]) -> Gauge:
        return Gauge(name, meaning, "device", {key: float(value) for key, value in values.items() if value is not None})

    return [
        gauge("written_timestamp_seconds", "When this file was written.", now),
        gauge("certificate_days", "Days until the server's certificate ends.", days),
        by_device("device_online", "1 if the device is online.", {d.name: d.status == "online" for d in present}),
        by_device(
            "device_last_contact_timestamp_seconds",
            "When the device was last known online.",
            {d.name: d.last_contact for d in present},
        ),
        by_device(
            "device_last_reply_timestamp_seconds",
            "When the device's last reply that counted arrived.",
            {d.name: d.contribution.last_reply for d in present},
        ),
        by_device(
            "device_missed_rounds",
            "Rounds in a row in which the device was asked and did not count.",
            {d.name: d.contribution.missed for d in present},
        ),
        by_device(
            "device_epsilon_left",
            "What the last private run's limit left of epsilon.",
            {d.name: d.contribution.epsilon_left for d in present},
        ),
    ]


def _enrolment(folder: Path, connection: str | None) -> Enrolment:
    folder = folder.expanduser()
    if (folder / "operator" / "nodes").is_dir():
        folder = folder / "operator"  # the folder that goldfinch devices certificates was given
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; name the one that goldfinch devices certificates was given")
    return Enrolment(folder, connection, flower_environment(flower_home()))
