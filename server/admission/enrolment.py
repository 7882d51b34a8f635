"""Which devices may take part, and as which client: their public keys, enrolled with a SuperLink or dismissed.

Flower keeps the list in the SuperLink's store: each key with a number and a name. The name is the only client that the
key may be (:mod:`server.engines.flower`). A device is dismissed by its number, so both are kept next to the key, in the
operator's folder that :mod:`server.admission.certificates` makes. A SuperLink that keeps its store in memory forgets
the list when it ends. :meth:`Enrolment.restore` enrols the same devices again, each as the client that it was.
"""

import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common.errors import ConfigError, EngineError, GoldfinchError, nearest
from common.regular_files import read_small
from server.admission.certificates import Certificates, days_left, hand_over
from server.admission.kit import check_kit, check_place, write_kit
from server.flower.processes import NOT_REACHED, answer_in, ask_flower, check_connection, in_one_line

UNREGISTERED = "unregistered"
"""Flower's status of a device that was taken off the list, such as by a dismissal that was interrupted."""

ALREADY_ENROLLED, NO_ANSWER = "already in use", "the SuperLink did not answer"
TAKEN_OFF = "since it was taken off the SuperLink's list, and Flower takes no such key back"
DISMISS = "goldfinch devices dismiss FOLDER --node {name}"
NEW_KEY = "for a new key, delete its folder of nodes/, then: goldfinch devices certificates FOLDER --node {name}"
NO_CONNECTION = (
    "Add a connection with the SuperLink's address (docs/deploy.md), or export FLWR_HOME as in the terminal where it "
    "was added; --connection NAME chooses another"
)

RESTORE_SECONDS = 180.0
"""How long :meth:`Enrolment.restore` waits for a SuperLink that is starting."""

ENROL_SECONDS = 30.0
"""How long :meth:`Enrolment.enrol` does."""

DISMISSED = ".dismissed-device"
"""Ending of the file that a dismissed device leaves until it is enrolled again: its number, its client, the date."""

CLIENT = re.compile(r"\S(.*\S)?-(0|[1-9][0-9]*)")
"""A client's id: its domain and its number there, as Goldfinch writes them."""


@dataclass(frozen=True)
class Enrolment:
    """The operator's folder and the SuperLink that it speaks to.

    Args:
        folder: the operator's folder: ``nodes/<name>.pub``.
        connection: name of the SuperLink in Flower's ``config.toml``; ``None`` is its default.
        environment: of Flower's command line, with ``FLWR_HOME``.
    """

    folder: Path
    connection: str | None
    environment: Mapping[str, str]

    @property
    def known(self) -> list[str]:
        """Names of the devices with a public key in the folder."""
        return sorted(path.stem for path in self.folder.glob("nodes/*.pub"))

    def enrol(self, names: Sequence[str] = (), clients: Sequence[str] = ()) -> dict[str, str]:
        """Enrol devices, by default all known ones; return what happened, by name. Enrolling again is no error.

        Args:
            names: the devices.
            clients: the client that each of ``names`` may be, such as ``webcam-0``. Where it is empty or left out, the
                device stays the client that it was, before it was dismissed, too. The name of a new one says it:
                ``webcam-1`` is that client, ``webcam`` the first of its domain.

        Raises:
            ConfigError: there is no such key or client, the key was enrolled for another, or was taken off the list.
            EngineError: the SuperLink refused, or cannot be reached.
        """
        for client in clients:
            if client and not CLIENT.fullmatch(client):
                raise ConfigError(f"--client {client} is not a domain and a number from 0, such as webcam-0")
        names = list(names) or self.known
        if not names:
            raise ConfigError(
                f"{self.folder / 'nodes'} holds no public keys (*.pub); make them: goldfinch devices certificates"
            )
        for name in names:
            self._check(name)
        wanted = [*clients, *[""] * (len(names) - len(clients))]
        with ThreadPoolExecutor(min(4, len(names)), thread_name_prefix="enrol") as pool:
            outcomes = pool.map(self._tried, names, wanted)
        return outcomes_of(dict(zip(names, outcomes, strict=True)))

    def restore(self, seconds: float = RESTORE_SECONDS) -> dict[str, str]:
        """Enrol the devices again that were enrolled from this folder and that the SuperLink does not know.

        Each device is enrolled for its earlier client. Devices that were dismissed, and keys that were never enrolled,
        are left out.

        Args:
            seconds: how long to wait for the SuperLink, which may be starting.

        Returns:
            What happened, by name; empty if the SuperLink knows all devices. One that was taken off its list stays so.

        Raises:
            EngineError: the SuperLink refused, or did not answer in time.
        """
        kept = {name: self._kept(name) for name in self.known}
        if not any(kept.values()):
            return {}
        registered = self.nodes(seconds)
        lost: list[str] = []
        outcomes: dict[str, str] = {}
        for name, parts in kept.items():
            if parts and parts[0] not in registered:
                lost.append(name)
            elif parts and registered[parts[0]].get("status") == UNREGISTERED:
                outcomes[name] = f"its key is refused, {TAKEN_OFF}; {DISMISS.format(name=name)}"
        if lost:
            outcomes |= self.enrol(lost)
        return outcomes

    def nodes(self, seconds: float = 0.0) -> dict[str, dict[str, Any]]:
        """Return what the SuperLink says of each device that it knows, by number.

        Args:
            seconds: how long to wait while no SuperLink listens.

        Raises:
            EngineError: the SuperLink refused, or does not answer.
        """
        listing = ["supernode", "list", *self._target, "--verbose"]  # with those that were unregistered by hand
        output = self._call_until_reached(listing, seconds)
        answer = answer_in(output, NO_ANSWER)
        if not answer.get("success"):
            raise EngineError(
                f"the enrolled devices cannot be listed: {answer.get('error-message') or in_one_line(output)}"
            )
        return {str(node["node-id"]): node for node in answer["nodes"]}

    def enrolled(self, name: str) -> tuple[str, str] | None:
        """Return a device's number and client as it was enrolled from this folder; ``None`` if it was not."""
        kept = self._kept(name)
        if len(kept) < 2:
            return None
        return kept[0], kept[1]

    @property
    def dismissed(self) -> dict[str, tuple[str, float]]:
        """The devices that were dismissed: client, and when, in seconds since 1970, by name."""
        devices = {}
        for path in sorted(self.folder.glob(f"nodes/*{DISMISSED}")):
            client, when = _client_and_date(path)
            if client:
                devices[path.name.removesuffix(DISMISSED)] = (client, datetime.fromisoformat(when).timestamp())
        return devices

    def check_kit(self, name: str, path: Path, server: str) -> None:
        """Check that the kit of a device can be made; see :func:`server.admission.kit.check_kit`.

        Raises:
            ConfigError: the device's key is not here, ``server`` has no port, or ``path`` cannot be written.
        """
        self._check(name)
        check_kit(path, Certificates(self.folder.parent), name, server)

    def write_kit(self, name: str, path: Path, server: str) -> None:
        """Write the start-up kit of an enrolled device; see :func:`server.admission.kit.write_kit`.

        Raises:
            ConfigError: the device's key is not here, it is not enrolled, or ``server`` has no port.
        """
        self._check(name)
        kept = self.enrolled(name)
        if kept is None:
            raise ConfigError(f"{name} is not enrolled from {self.folder}, so its client is not known here")
        write_kit(path, Certificates(self.folder.parent), name, kept[1], server)

    @property
    def certificate_days(self) -> int | None:
        """Days until the server's certificate ends; ``None`` if it is not next to the operator's folder."""
        path = self.folder.parent / "server" / "server.pem"
        if not path.exists():
            return None
        return days_left(path)

    def dismiss(self, name: str) -> str:
        """Take a device off the list, so that its key is refused; return what happened. Once more is no error.

        Raises:
            ConfigError: the device was not enrolled from this folder.
            EngineError: the SuperLink refused, or cannot be reached.
        """
        if self._is_dismissed(name):
            return f"dismissed already; {NEW_KEY.format(name=name)}"
        self._check(name)
        number = self._number_file(name)
        kept = self._kept(name)
        if not kept:
            raise ConfigError(
                f"{name} was not enrolled from {self.folder}, so its number is not known here; "
                "find it with: flwr supernode list, and: flwr supernode unregister NUMBER; then delete "
                f"{name}.pub and the folder nodes/{name}, so that no one enrols this key again"
            )
        key = self.folder / "nodes" / f"{name}.pub"
        kept_key = key.with_suffix(".pub.dismissed")
        for path in (self._dismissal(name), kept_key):
            check_place(path)
        output = self._call(["supernode", "unregister", kept[0], *self._target])
        if not answer_in(output, NO_ANSWER).get("success"):
            node = self.nodes().get(kept[0], {})
            if not node:
                output += f"; one that lost its store learns of {name} by: goldfinch devices enrol FOLDER --restore"
            if node.get("status") != UNREGISTERED:
                raise EngineError(f"{name} could not be dismissed: {in_one_line(output)}")
        when = datetime.now(UTC).isoformat(timespec="seconds")
        client = kept[1] if len(kept) > 1 else name
        hand_over(self._dismissal(name), f"{kept[0]} {client} {when}\n".encode(), private=False)
        keys: list[str] = []
        if kept_key.exists():  # of earlier dismissals
            keys = _text(kept_key).splitlines()
        if _text(key).strip() not in keys:
            keys.append(_text(key).strip())
        lines = "\n".join(keys) + "\n"
        hand_over(kept_key, lines.encode(), private=False)
        key.unlink()  # so that enrolling all does not bring it back
        number.unlink()  # last: without it, an interrupted dismissal could not be repeated
        return f"dismissed; its key is refused from now on, and kept as {kept_key.name}"

    def dismiss_all(self, names: Sequence[str]) -> dict[str, str]:
        """Take devices off the list, those after one that fails, too; return what happened, by name.

        Raises:
            ConfigError, EngineError: as :meth:`dismiss`, of the first that failed.
        """
        tried: dict[str, str | GoldfinchError] = {}
        for name in names:
            try:
                tried[name] = self.dismiss(name)
            except GoldfinchError as error:
                tried[name] = error
        return outcomes_of(tried)

    def _enrol(self, name: str, wanted: str) -> str:
        kept = self._kept(name)
        client = wanted or self._earlier(name, kept)
        key = self.folder / "nodes" / f"{name}.pub"
        _text(key)  # Flower would wait for ever for what a pipe says
        check_place(self._number_file(name))
        command = ["supernode", "register", str(key.absolute()), *self._target, "--name", client]
        output = self._call_until_reached(command, ENROL_SECONDS)
        answer = answer_in(output, NO_ANSWER)
        if answer.get("success"):
            hand_over(self._number_file(name), f"{answer['node-id']} {client}\n".encode(), private=False)
            self._dismissal(name).unlink(missing_ok=True)
            return f"enrolled as {answer['node-id']}, for {client}"
        if ALREADY_ENROLLED in str(answer):
            return self._enrolled_already(name, wanted, kept)
        raise EngineError(f"{name} could not be enrolled: {answer.get('error-message') or in_one_line(output)}")

    def _enrolled_already(self, name: str, wanted: str, kept: Sequence[str]) -> str:
        """Return what is known here of a key that the SuperLink has.

        Raises:
            ConfigError: its client is not known here, or is another than ``wanted``, or the key is refused.
        """
        another = "give the device a new key (docs/deploy.md, Rotating certificates and keys)"
        if not kept:
            raise ConfigError(
                f"the key of {name} was enrolled before, but {self._number_file(name).name} is missing, so its client "
                f"is not known here: restore the file, or {another}"
            )
        if self.nodes().get(kept[0], {}).get("status") == UNREGISTERED:
            raise ConfigError(f"the key of {name} is refused, {TAKEN_OFF}; {DISMISS.format(name=name)}, then {another}")
        enrolled = kept[-1]
        if wanted not in ("", enrolled):
            raise ConfigError(
                f"the key of {name} is enrolled for {enrolled}, and a key keeps its client: to be {wanted}, {another}"
            )
        return f"enrolled already for {enrolled}"

    def _tried(self, name: str, wanted: str) -> str | GoldfinchError:
        """Enrol a device; return what happened."""
        try:
            return self._enrol(name, wanted)
        except GoldfinchError as error:
            return error

    def _earlier(self, name: str, kept: Sequence[str]) -> str:
        """Return the client that a device was before, also one that was dismissed; of a new one, that of its name."""
        if len(kept) > 1:
            return kept[1]  # the SuperLink may have lost its store since
        clients = [name]
        if self._dismissal(name).exists():
            clients.insert(0, _client_and_date(self._dismissal(name))[0])
        for client in clients:
            if CLIENT.fullmatch(client):
                return client
        return f"{name}-0"

    def _kept(self, name: str) -> list[str]:
        """Return a device's number and client as they were enrolled from this folder; empty if it was not."""
        path = self._number_file(name)
        if not path.exists():
            return []
        return _text(path).rstrip().split(maxsplit=1)  # a client's name may have spaces

    def _check(self, name: str) -> None:
        if name in self.known:
            return
        if self._is_dismissed(name):
            raise ConfigError(f"--node {name}: it is dismissed already; {NEW_KEY.format(name=name)}")
        raise ConfigError(f"--node {name}: {self.folder / 'nodes'} has no such key; {nearest(name, self.known)}")

    def _is_dismissed(self, name: str) -> bool:
        return name not in self.known and self._dismissal(name).exists()

    def _dismissal(self, name: str) -> Path:
        return self.folder / "nodes" / (name + DISMISSED)

    def _number_file(self, name: str) -> Path:
        return self.folder / "nodes" / f"{name}.number"

    @property
    def _target(self) -> list[str]:
        return [self.connection] if self.connection else []

    def _call_until_reached(self, arguments: Sequence[str], seconds: float) -> str:
        """Return the output of a call; while no SuperLink listens, call again, for ``seconds``."""
        end = time.monotonic() + seconds
        output = self._call(arguments)
        while NOT_REACHED in output and time.monotonic() < end:
            time.sleep(1.0)
            output = self._call(arguments)
        return output

    def _call(self, arguments: Sequence[str]) -> str:
        """Return the output of Flower's command line, which starts a SuperLink of its own if it finds none named."""
        check_connection(Path(self.environment["FLWR_HOME"]) / "config.toml", self.connection, NO_CONNECTION)
        result = ask_flower(arguments, self.environment, self.folder)
        return result.stdout + result.stderr


def outcomes_of(tried: Mapping[str, str | GoldfinchError]) -> dict[str, str]:
    """Return what happened to several devices, by name.

    Args:
        tried: what happened, or why it failed, by name.

    Raises:
        GoldfinchError: that of the first device that failed; its text has what happened to the others as well.
    """
    outcomes: dict[str, str] = {}
    failures: dict[str, GoldfinchError] = {}
    for name, outcome in tried.items():
        if isinstance(outcome, GoldfinchError):
            failures[name] = outcome
        else:
            outcomes[name] = outcome
    if not failures:
        return outcomes
    first, error = next(iter(failures.items()))
    lines = [str(error)]
    for name, outcome in tried.items():
        if name != first:
            lines.append(f"{name}: {outcome}")
    raise type(error)("\n".join(lines)) from error


def _text(path: Path) -> str:
    """Return the text of a file of the operator's folder.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return read_small(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; correct its rights, or restore it from a backup") from error


def _client_and_date(path: Path) -> tuple[str, str]:
    """Return what a dismissed device's file says besides its number; the client is empty if it says none."""
    _, _, rest = _text(path).strip().partition(" ")
    client, _, when = rest.rpartition(" ")  # a client's name may have spaces
    return client, when
