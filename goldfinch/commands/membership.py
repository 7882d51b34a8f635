"""The operator's commands: ``goldfinch devices`` with ``certificates``, ``enrol`` and ``dismiss``."""

from collections.abc import Sequence
from pathlib import Path

from common.errors import ConfigError
from goldfinch.trackers.wait_lines import wait_lines
from server.admission.certificates import ensure
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
    for line in ensure(folder, hosts, nodes, days):
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
        outcomes = enrolment_of(folder, connection).enrol(list(chosen), list(chosen.values()))
    for name, outcome in outcomes.items():
        print(f"{name:20} {outcome}")


def make_kit(folder: Path, name: str, path: Path, server: str) -> Path:
    """Write the start-up kit of an enrolled device; return its path.

    Args:
        folder: the folder that ``goldfinch devices certificates`` was given.
        name: the device.
        path: the archive.
        server: ``host:port`` by which the device reaches the server.

    Raises:
        ConfigError: the device's key is not here, it is not enrolled, or ``server`` has no port.
    """
    enrolment_of(folder, None).write_kit(name, path, server)
    return path


def enrol_again(folder: Path, connection: str | None = None) -> None:
    """Enrol the devices again that a SuperLink has forgotten, each as the client that it was.

    Args:
        folder: the folder that ``goldfinch devices certificates`` was given, or its ``operator/``.
        connection: the SuperLink's name in Flower's configuration.

    Raises:
        GoldfinchError: the SuperLink refused, or did not answer.
    """
    with wait_lines(WAITING):
        outcomes = enrolment_of(folder, connection).restore()
    for name, outcome in outcomes.items():
        print(f"{name:20} {outcome}")
    if not outcomes:
        print("nothing to restore: the SuperLink knows every device that was enrolled from here")


def dismiss(folder: Path, nodes: Sequence[str], connection: str | None = None) -> None:
    """Remove the keys of ``nodes``, devices that are lost or leave, from the SuperLink.

    Raises:
        GoldfinchError: no device is named, one is not known, or the SuperLink refused; the others are dismissed.
    """
    if not nodes:
        raise ConfigError("goldfinch devices dismiss needs a device: --node NAME")
    enrolment = enrolment_of(folder, connection)
    with wait_lines(WAITING):
        outcomes = enrolment.dismiss_all(nodes)
    for name, outcome in outcomes.items():
        print(f"{name:20} {outcome}")


def enrolment_of(folder: Path, connection: str | None) -> Enrolment:
    """Return the operator's folder in or at ``folder``, with the SuperLink.

    Raises:
        ConfigError: it is not a folder.
    """
    folder = folder.expanduser()
    if (folder / "operator" / "nodes").is_dir():
        folder = folder / "operator"  # the folder that goldfinch devices certificates was given
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; name the one that goldfinch devices certificates was given")
    return Enrolment(folder, connection, flower_environment(flower_home()))
