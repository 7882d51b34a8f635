"""The condition of a SuperNode for those who watch it: a file of numbers, and systemd's notifications.

The numbers are noted where Flower's SuperNode calls its server, so a node without contact is seen to have none. Its own
port says nothing of that.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from common.accounting import DELTA
from common.errors import ConfigError
from common.gauges import gauge
from common.regular_files import read_small
from common.text import printable

WRITE_SECONDS = 10.0
"""Time between two writes of the file."""

CERTIFICATE_SECONDS = 6 * 3600.0
"""Time between two looks at the server's certificate; a tenth of it after one that failed."""

CONNECT_SECONDS, SECONDS_OF_DAY = 20.0, 86_400

HEARTBEAT_SECONDS = 60.0
"""A node whose last heartbeat is older than this has no contact. Flower sends one every 18 to 23 seconds."""

LEDGERS = ".privacy/*/ledger.json"
"""The ledgers of releases in a state folder; see :mod:`client.ledger`, which imports torch."""


@dataclass
class Condition:
    """What is known of the SuperNode that runs in this process.

    Args:
        path: the file for a node exporter; ``None`` writes none.
        server: ``host:port`` of the server; empty if its certificate is not looked at.
        authority: certificate of the authority that the server's is verified with.
        state: the state folder; ``None`` leaves its numbers out.
        max_releases, max_epsilon: the device's own limits; ``None`` without one.
        delta: delta of ``max_epsilon``.
        slowest_start: returns the seconds of the slowest start of a ClientApp.
    """

    path: Path | None = None
    server: str = ""
    authority: Path | None = None
    state: Path | None = None
    max_releases: float | None = None
    max_epsilon: float | None = None
    delta: float = DELTA
    slowest_start: Callable[[], float] = float
    _heartbeat: float | None = None
    _reply: float | None = None
    _replies: int = 0
    _works: bool = False
    _missed: int = 0
    _days: float | None = None
    _certificate_due: float = 0.0
    _ready: bool = False
    _began: float = field(default_factory=time.time)

    def start(self) -> None:
        """Write the file every :data:`WRITE_SECONDS`, in a thread that ends with the process."""
        threading.Thread(target=self._run, daemon=True, name="condition").start()

    def note_heartbeat(self) -> None:
        """Note that the server has accepted a heartbeat."""
        self._heartbeat = time.time()
        if not self._ready:
            self._ready = True
            notify("READY=1")

    def note_request(self) -> None:
        """Note that a request of the server has arrived."""
        if self._works:
            self._missed += 1
        self._works = True

    def note_reply(self, *, failed: bool = False) -> None:
        """Note that the server has accepted a reply, or that the ClientApp failed."""
        self._works = False
        if failed:
            self._missed += 1
            return
        self._missed = 0
        self._reply = time.time()
        self._replies += 1

    def _run(self) -> None:
        reported = ""
        while True:
            problem = ""
            try:
                self.write()
            except Exception as error:  # such as a full disk: the node goes on
                problem = f"{self.path} is not written: {error}"
                if problem != reported:
                    print(f"goldfinch-supernode: {problem}", flush=True)
            reported = problem
            notify(f"STATUS={self.status()}")
            time.sleep(WRITE_SECONDS)

    def status(self) -> str:
        """Return one line about the contact with the server."""
        if self._heartbeat is None:
            return "no contact with the server yet"
        seconds = time.time() - self._heartbeat
        if seconds > HEARTBEAT_SECONDS:
            return f"no contact with the server for {seconds:.0f} s"
        return f"in contact with the server; {self._replies} replies sent"

    def write(self) -> None:
        """Write the file.

        Raises:
            OSError: it cannot be written.
        """
        if self.path is None:
            return
        self._look_at_certificate()
        new = self.path.with_name(f".{self.path.name}.new")  # exporters read names that end in .prom
        new.write_text("\n".join(self.lines()) + "\n")
        new.chmod(0o644)  # an exporter is another user
        new.replace(self.path)

    def lines(self) -> list[str]:
        """Return the lines of the file."""
        free = None
        if self.state is not None:
            with contextlib.suppress(OSError):
                free = float(shutil.disk_usage(self.state).free)
        numbers: list[tuple[str, str, float | None]] = [
            ("written_timestamp_seconds", "When this file was written.", time.time()),
            ("started_timestamp_seconds", "When the SuperNode started.", self._began),
            ("last_heartbeat_timestamp_seconds", "When the server last took a heartbeat.", self._heartbeat),
            ("last_reply_timestamp_seconds", "When the server last took a reply.", self._reply),
            ("replies", "Replies that the server took since the start.", self._replies),
            ("missed_requests", "Requests in a row, up to now, without a reply that the server took.", self._missed),
            ("slowest_start_seconds", "The slowest start of a ClientApp since the start.", self.slowest_start()),
            ("certificate_days", "Days until the server's certificate ends.", self._days),
            ("disk_free_bytes", "Free space of the state folder.", free),
        ]
        lines: list[str] = []
        for name, meaning, value in numbers:
            lines += gauge(name, meaning, {"": value})
        return lines + self._budget_lines()

    def _budget_lines(self) -> list[str]:
        """Return the lines about what left this device, by data set, because each has a ledger."""
        releases: dict[str, float | None] = {}
        releases_left: dict[str, float | None] = {}
        epsilon: dict[str, float | None] = {}
        epsilon_left: dict[str, float | None] = {}
        for ledger in _ledgers(self.state, self.delta):
            releases[ledger.data] = ledger.releases
            if self.max_releases is not None:
                releases_left[ledger.data] = max(0.0, self.max_releases - ledger.releases)
            if self.max_epsilon is not None and ledger.epsilon is not None:
                epsilon[ledger.data] = ledger.epsilon
                epsilon_left[ledger.data] = max(0.0, self.max_epsilon - ledger.epsilon)
        return [
            *gauge("privacy_releases", "Updates that left this device, over all runs.", releases, "data"),
            *gauge("privacy_releases_left", "Updates that its own limit still allows.", releases_left, "data"),
            *gauge("privacy_epsilon", "Epsilon used of this device's own budget.", epsilon, "data"),
            *gauge("privacy_epsilon_left", "Epsilon that its own budget still allows.", epsilon_left, "data"),
        ]

    def _look_at_certificate(self) -> None:
        """Note the days that the server's certificate is valid, from time to time."""
        if not self.server or self.authority is None or time.monotonic() < self._certificate_due:
            return
        self._certificate_due = time.monotonic() + CERTIFICATE_SECONDS
        try:
            self._days = certificate_days(self.server, self.authority)
        except (OSError, ValueError):
            self._certificate_due = time.monotonic() + CERTIFICATE_SECONDS / 10


def condition_of(configuration: dict[str, Any], path: Path | None, server: str, authority: str | None) -> Condition:
    """Return the condition of a node with this configuration, as in ``--node-config``."""
    delta = _number(configuration.get("privacy-delta"))
    return Condition(
        path,
        server if authority else "",
        Path(authority).expanduser() if authority else None,
        state_folder(configuration),
        _number(configuration.get("privacy-max-releases")),
        _number(configuration.get("privacy-max-epsilon")),
        DELTA if delta is None else delta,
    )


def state_folder(configuration: Mapping[str, Any]) -> Path:
    """Return the folder of a node's state: ``state-dir``, or one in Flower's or the user's home.

    Raises:
        ConfigError: ``state-dir``, or the home without it, is no whole path: started in another folder, the node would
            find no ledger.
    """
    home = os.environ.get("FLWR_HOME")
    if "state-dir" in configuration:
        key, folder = "--node-config: state-dir", str(configuration["state-dir"])
    elif home:
        key, folder = "FLWR_HOME, if --node-config names no state-dir,", str(Path(home, "goldfinch-state"))
    else:
        key, folder = "HOME", str(Path.home() / ".goldfinch" / "state")
    if not Path(folder).is_absolute():
        raise ConfigError(f"{key} must be a whole path, from / on; got {printable(folder)[:100]!r}")
    return Path(folder)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def certificate_days(server: str, authority: Path) -> float:
    """Return the days until the certificate of ``server``, a ``host:port``, ends.

    Raises:
        OSError: the server cannot be reached, or its certificate is not one of ``authority``.
        ValueError: ``server`` has no port.
    """
    host, _, port = server.rpartition(":")
    name = host.strip("[]")
    context = ssl.create_default_context(cafile=str(authority))
    with (
        socket.create_connection((name, int(port)), timeout=CONNECT_SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=name) as secure,
    ):
        certificate = secure.getpeercert() or {}
    return (ssl.cert_time_to_seconds(str(certificate["notAfter"])) - time.time()) / SECONDS_OF_DAY


def notify(text: str) -> None:
    """Notify systemd, if it has started this process and expects notifications (``Type=notify``)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stream:
        stream.sendto(text.encode(), address)


class Used(NamedTuple):
    """What a ledger says of a data set: its folder's name, the updates, and epsilon; ``None`` is not known."""

    data: str
    releases: float
    epsilon: float | None


def _ledgers(state: Path | None, delta: float) -> Iterator[Used]:
    """Yield what the ledgers in a state folder say; one that cannot be read is left out."""
    if state is None:
        return
    for path in sorted(state.glob(LEDGERS)):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            ledger = json.loads(read_small(path))
            used = float(ledger["epsilon"]) if ledger.get("delta") == delta else None
            releases = 0
            for entry in ledger["releases"]:
                releases += entry["count"]
                if min(entry["multipliers"].values(), default=0.0) <= 0:
                    used = math.inf
            yield Used(path.parent.name, float(releases), used)
