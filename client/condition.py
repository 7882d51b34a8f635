"""The condition of a SuperNode for those who watch it: a file of numbers, and systemd's notifications.

The numbers are noted where Flower's SuperNode calls its server, so a node without contact is seen to have none. Its own
port says nothing of that.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.gauges import gauge

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
        state: the state folder; ``None`` if the node configuration names none.
        max_releases: the device's own limit of releases; ``None`` without one.
        slowest_start: returns the seconds of the slowest start of a ClientApp.
    """

    path: Path | None = None
    server: str = ""
    authority: Path | None = None
    state: Path | None = None
    max_releases: float | None = None
    slowest_start: Callable[[], float] = float
    _heartbeat: float | None = None
    _reply: float | None = None
    _replies: int = 0
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

    def note_reply(self) -> None:
        """Note that the server has accepted a reply."""
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
        releases, free = None, None
        if self.state is not None:
            releases = float(_releases(self.state))
            with contextlib.suppress(OSError):
                free = float(shutil.disk_usage(self.state).free)
        left = None
        if releases is not None and self.max_releases is not None:
            left = max(0.0, self.max_releases - releases)
        numbers: list[tuple[str, str, float | None]] = [
            ("written_timestamp_seconds", "When this file was written.", time.time()),
            ("started_timestamp_seconds", "When the SuperNode started.", self._began),
            ("last_heartbeat_timestamp_seconds", "When the server last took a heartbeat.", self._heartbeat),
            ("last_reply_timestamp_seconds", "When the server last took a reply.", self._reply),
            ("replies", "Replies that the server took since the start.", self._replies),
            ("slowest_start_seconds", "The slowest start of a ClientApp since the start.", self.slowest_start()),
            ("certificate_days", "Days until the server's certificate ends.", self._days),
            ("disk_free_bytes", "Free space of the state folder.", free),
            ("privacy_releases", "Updates that left this device, over all runs.", releases),
            ("privacy_releases_left", "Updates that its own limit still allows.", left),
        ]
        lines: list[str] = []
        for name, meaning, value in numbers:
            lines += gauge(name, meaning, {"": value})
        return lines

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
    state = configuration.get("state-dir")
    releases = configuration.get("privacy-max-releases")
    return Condition(
        path,
        server if authority else "",
        Path(authority).expanduser() if authority else None,
        Path(str(state)) if state else None,
        float(releases) if isinstance(releases, int | float) else None,
    )


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


def _releases(state: Path) -> int:
    """Return the releases in all ledgers of a state folder; a ledger that cannot be read counts none."""
    count = 0
    for path in state.glob(LEDGERS):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            count += sum(entry["count"] for entry in json.loads(path.read_text())["releases"])
    return count
