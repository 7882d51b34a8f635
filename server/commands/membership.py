"""The operator's commands: ``goldfinch certificates``, ``goldfinch enrol``, ``goldfinch dismiss``."""

import os
from collections.abc import Sequence
from pathlib import Path

from common.errors import ConfigError, nearest
from server.admission.certificates import SERVER_DAYS, ensure
from server.admission.enrolment import Enrolment
from server.flower.processes import flower_environment


def certificates(arguments: Sequence[str]) -> None:
    """``goldfinch certificates FOLDER [host=NAME ...] [node=NAME ...] [days=N]``.

    Raises:
        ConfigError: an argument cannot be used.
    """
    folder, given = _parse("certificates", arguments, ("host", "node", "days"))
    days = given["days"][-1] if given["days"] else str(SERVER_DAYS)
    if not days.isdecimal():
        raise ConfigError(f"days={days} is not a number of days")
    for line in ensure(folder, given["host"], given["node"], int(days)):
        print(line)
    print(f"keep {folder / 'authority'} to yourself; give the server server/, and each device its folder of nodes/")


def enrol(arguments: Sequence[str]) -> None:
    """``goldfinch enrol FOLDER [node=NAME [client=ID] ...] [connection=NAME]``: all devices of the folder unless named.

    Raises:
        GoldfinchError: a device is not known, or the SuperLink refused.
    """
    enrolment, given = _enrolment("enrol", arguments, "client")
    for name, outcome in enrolment.enrol(given["node"], given["client"]).items():
        print(f"{name:20} {outcome}")


def dismiss(arguments: Sequence[str]) -> None:
    """``goldfinch dismiss FOLDER node=NAME [connection=NAME]``: a device that is lost or leaves.

    Raises:
        GoldfinchError: the device is not known, or the SuperLink refused.
    """
    enrolment, given = _enrolment("dismiss", arguments)
    if not given["node"]:
        raise ConfigError("goldfinch dismiss needs node=NAME")
    for name in given["node"]:
        print(f"{name:20} {enrolment.dismiss(name)}")


def _enrolment(command: str, arguments: Sequence[str], *more: str) -> tuple[Enrolment, dict[str, list[str]]]:
    folder, given = _parse(command, arguments, ("node", *more, "connection"))
    if (folder / "operator" / "nodes").is_dir():
        folder = folder / "operator"  # the folder that goldfinch certificates was given
    home = Path(os.environ.get("FLWR_HOME", Path.home() / ".flwr"))
    connection = given["connection"][-1] if given["connection"] else None
    return Enrolment(folder, connection, flower_environment(home)), given


def _parse(command: str, arguments: Sequence[str], keys: Sequence[str]) -> tuple[Path, dict[str, list[str]]]:
    """A folder and ``key=value`` arguments, which may be given several times."""
    if not arguments or "=" in arguments[0]:
        raise ConfigError(f"goldfinch {command} needs a folder first, then {', '.join(f'{key}=...' for key in keys)}")
    given: dict[str, list[str]] = {key: [] for key in keys}
    for argument in arguments[1:]:
        key, equals, value = argument.partition("=")
        if key not in given or not equals or not value:
            raise ConfigError(f"goldfinch {command}: {argument}: {nearest(key, keys)}; written as key=value")
        if key == "client":
            before = len(given["node"]) - len(given[key]) - 1
            if before < 0:
                raise ConfigError(f"goldfinch {command}: {argument} must follow the node= that it is of")
            given[key] += [""] * before
        given[key].append(value)
    return Path(arguments[0]).expanduser(), given
