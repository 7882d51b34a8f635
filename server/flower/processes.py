"""Flower's programs as child processes: start them from an empty folder, watch them, and stop all that they started."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import tomllib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from common.errors import ConfigError, EngineError
from common.log_lines import STREAM, filtered, streams
from common.proxies import no_proxy

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONUNBUFFERED": "1",
}
"""Set for every program of Flower's that we start: it sends, fetches and installs nothing unasked."""

MARK = "GOLDFINCH_STARTED_BY"
"""Environment variable that marks all processes that a group of programs has started."""

NOT_REACHED = "Connection to the SuperLink is unavailable"
"""What Flower's command line prints if no SuperLink listens, or if none answers within its 30 seconds."""

EXPIRED = "certificate has expired"
"""OpenSSL's message."""

CONNECT_SECONDS = 10.0
"""Seconds that a TLS handshake with a SuperLink may take that Flower did not reach."""

MAX_TEMPORARY = 40
"""Characters of the temporary folder's path with which Ray's sockets below it stay within the system's 107."""

ADD_CONNECTION = (
    "Add a connection with the SuperLink's address (docs/deploy.md) and name it by engine.connection=NAME; to simulate "
    "on this machine, choose engine=ray"
)

STOP_SECONDS = 15.0
"""Seconds that a program has to end after SIGTERM, before SIGKILL."""


def flower_environment(home: Path, **more: str) -> dict[str, str]:
    """Return this process's environment with Flower's home at ``home`` and this Python's programs first on the PATH.

    Flower starts its own programs by name, so that it could start those of another Python otherwise. Paths are made
    absolute, because the programs have other working folders. Programs on this machine are not asked through a proxy,
    and Ray neither joins a cluster that ``RAY_ADDRESS`` names nor makes sockets below a folder with a long path.

    Args:
        home: Flower's home.
        more: further variables.
    """
    environment = {**os.environ, **QUIET, "FLWR_HOME": str(home)}
    for name in ("GOLDFINCH_DATA", "GOLDFINCH_CACHE"):
        folder = os.environ.get(name)
        if folder:
            environment[name] = str(Path(folder).absolute())
    modules = os.environ.get("PYTHONPATH")
    if modules:
        folders = [str(Path(folder).absolute()) for folder in modules.split(os.pathsep)]
        environment["PYTHONPATH"] = os.pathsep.join(folders)
    programs = str(Path(sys.executable).parent.resolve())  # a link may stand in for a path with a blank
    environment["PATH"] = os.pathsep.join([programs, os.environ.get("PATH", "")])
    environment |= no_proxy(os.environ)
    environment.pop("RAY_ADDRESS", None)
    if len(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) > MAX_TEMPORARY:
        environment["RAY_TMPDIR"] = "/tmp"  # noqa: S108  # Ray makes a folder of its own in it
    environment.update(more)
    return environment


def flower_home() -> Path:
    """Return the folder of Flower's configuration, which need not exist."""
    return Path(os.environ.get("FLWR_HOME", Path.home() / ".flwr"))


def connections(path: Path) -> dict[str, str]:
    """Return the addresses of the SuperLinks in Flower's ``config.toml`` by name, without Flower's simulations.

    Args:
        path: the file. A file that is missing or cannot be read has no SuperLinks.
    """
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8")).get("superlink", {})
    except (OSError, ValueError):
        return {}
    addresses: dict[str, str] = {}
    if not isinstance(entries, dict):
        return addresses
    for name, entry in entries.items():
        address = None
        if isinstance(entry, dict):
            address = entry.get("address")
        if isinstance(address, str) and address and not address.startswith(":"):
            addresses[name] = address
    return addresses


def check_connection(path: Path, name: str | None, remedy: str = ADD_CONNECTION) -> None:
    """Check that a connection leads to a SuperLink that is running already.

    Without such a connection, ``flwr run`` starts a SuperLink, simulates on this machine, and leaves it running.

    Args:
        path: Flower's ``config.toml``.
        name: the connection's name; ``None`` is the default one.
        remedy: what the message advises.

    Raises:
        ConfigError: the connection is missing, or is Flower's local simulation.
    """
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8")).get("superlink", {})
        chosen = name or entries.get("default", "local")
    except FileNotFoundError:
        entries, chosen = {}, name or "local"
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    connection = entries.get(chosen)
    address = None
    if isinstance(connection, dict):
        address = connection.get("address")
    if isinstance(address, str) and address and not address.startswith(":local"):
        return
    problem = "names no SuperLink"
    if address:
        problem = f"is Flower's local simulation, {address}"
    raise ConfigError(f"the connection {chosen!r} in {path} {problem}. {remedy}")


def program(name: str) -> str:
    """Return the path of one of Flower's programs next to this Python.

    Args:
        name: the program's file name, such as ``flwr``.

    Raises:
        EngineError: the program is not installed there.
    """
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise EngineError(
            f"{name} is not installed next to {sys.executable}; install requirements.txt into this Python"
        )
    return str(path)


class NotTrustedError(EngineError):
    """A SuperLink answers, but its certificate is not accepted."""


def ask_flower(
    arguments: Sequence[str], environment: Mapping[str, str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run ``flwr`` and ask it for JSON. Return the process and its output; the exit code is ignored.

    Args:
        arguments: of ``flwr``.
        environment: the program's environment, with ``FLWR_HOME``.
        folder: the program's working folder.

    Raises:
        NotTrustedError: the SuperLink's certificate is not accepted, which Flower reports as a SuperLink that is not
            there.
    """
    done = subprocess.run(  # noqa: S603  # our own command, no shell
        [program("flwr"), *arguments, "--format", "json"],
        env=dict(environment),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if NOT_REACHED in done.stdout + done.stderr:
        _check_certificate(Path(environment["FLWR_HOME"], "config.toml"), arguments)
    return done


def is_address(text: str) -> bool:
    """Return whether ``text`` is ``host:port`` without a scheme, with a port from 1 to 65,535.

    An IPv6 address is in brackets, as in ``[::1]:8443``: without them, its end would be taken for a port.
    """
    host, _, port = text.rpartition(":")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        return False
    if not host or "/" in host or not (port.isascii() and port.isdigit()):
        return False
    return 1 <= int(port) <= 65_535


def _check_certificate(path: Path, arguments: Sequence[str]) -> None:
    """Check the certificate of the SuperLink that Flower's arguments name, if one answers.

    Args:
        path: Flower's ``config.toml``.
        arguments: of ``flwr``; without a connection's name the default one is meant.

    Raises:
        NotTrustedError: it is not accepted.
    """
    address = ""
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))["superlink"]
        name = entries.get("default")
        for word in arguments:
            if isinstance(entries.get(word), dict):
                name = word
        address = entries[name]["address"]
        host, _, port = address.rpartition(":")
        context = ssl.create_default_context(cafile=entries[name].get("root-certificates"))
        host = host.strip("[]")  # of an IPv6 address
        with socket.create_connection((host, int(port)), CONNECT_SECONDS) as plain:
            context.wrap_socket(plain, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        remedy = f"compare address and root-certificates in {path} with the server's certificate"
        if error.verify_message == EXPIRED:
            remedy = (
                "renew it (goldfinch devices certificates) and restart the SuperLink, which ends an active run: "
                "resume=true continues it. If the certificate is valid, set this machine's clock"
            )
        raise NotTrustedError(
            f"the SuperLink at {address} answers, but its certificate is not accepted: {error.verify_message}; {remedy}"
        ) from error
    except (OSError, ValueError, KeyError):  # none answers, or one without TLS: Flower's own message is right
        return


def answer_in(output: str, otherwise: str) -> dict[str, Any]:
    """Return the JSON object in the output of :func:`ask_flower`, which can have notices before and after it.

    Args:
        output: what ``flwr`` printed.
        otherwise: the error's text if there is no JSON object.

    Raises:
        EngineError: there is no JSON object.
    """
    try:
        answer: dict[str, Any] = json.loads(output[output.find("{") : output.rfind("}") + 1])
    except ValueError as error:
        raise EngineError(f"{otherwise}: {in_one_line(output)}") from error
    return answer


def in_one_line(output: str) -> str:
    """Return the last 600 characters of a command's output in one line, without colours and frames."""
    bare = re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", output)
    return " ".join(bare.split())[-600:]


def free_port() -> int:
    """Return a TCP port of the loopback interface that no program listens on now.

    The system gives it to no other program for a minute, in which a server, which reuses addresses, can listen on it: a
    connection that was closed at the port's end leaves it in ``TIME_WAIT``.
    """
    with socket.socket() as listener, socket.socket() as caller:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        caller.connect(listener.getsockname())
        accepted, _ = listener.accept()
        accepted.close()  # first, so that the port and not the caller's waits
        return listener.getsockname()[1]


@dataclass
class Child:
    """One started program.

    Args:
        name: the program's name in messages.
        process: the process; it leads a session of its own, so that all it starts can be stopped with it.
        log: file with its output.
        copying: the process that copies its lines to the log (:mod:`common.log_lines`).
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    copying: subprocess.Popen[bytes]

    def tail(self, lines: int = 15) -> str:
        """Return the last ``lines`` lines of its output; empty without a log."""
        if self.process.poll() is not None:
            self.wait_for_log()
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Stop the program and its session: SIGTERM first, SIGKILL after ``seconds``.

        A SuperLink with open connections does not end at SIGTERM: it closes its port and waits for minutes.

        Args:
            seconds: how long the program has to end.
        """
        _signal(-self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        _signal(-self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)

    def wait_for_log(self, seconds: float = 1.0) -> None:
        """Wait until the log is complete, which it is not while a process that it started still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.copying.wait(seconds)


@dataclass
class Processes:
    """A group of programs that end together.

    Args:
        folder: an empty working folder for all programs; made if it is missing.
        logs: folder of the logs; made if it is missing.
        children: the programs that run.
        mark: the group's value of :data:`MARK`.
    """

    folder: Path
    logs: Path
    children: list[Child] = field(default_factory=list)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Start a program, with its output in ``<logs>/<name>.log``, each line plain and with its time (UTC).

        Args:
            name: the program's name in messages.
            command: the program and its arguments.
            environment: the program's environment.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{name}.log"
        with log.open("ab") as stream:
            copying, (end,) = filtered([stream.fileno()])
        try:
            process = subprocess.Popen(  # noqa: S603  # our own commands, no shell
                list(command),
                cwd=self.folder,
                env={**environment, MARK: self.mark, STREAM: streams([end])},
                stdin=subprocess.DEVNULL,
                stdout=end,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            os.close(end)
        child = Child(name, process, log, copying)
        self.children.append(child)
        return child

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Stop all programs and what they started: SIGTERM first, SIGKILL after ``seconds``."""
        for child in reversed(self.children):
            _signal(-child.process.pid, signal.SIGTERM)
        end = time.monotonic() + seconds
        for child in reversed(self.children):
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.1, end - time.monotonic()))
        for child in reversed(self.children):
            _signal(-child.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(5)
        self._stop_marked(end)
        for child in self.children:
            child.wait_for_log()
        self.children.clear()

    def _stop_marked(self, end: float) -> None:
        """Stop processes in sessions of their own: Flower's ServerApp outlives its SuperLink and calls it for minutes.

        Args:
            end: when SIGKILL follows, on the monotonic clock.
        """
        for process in marked(self.mark):
            _signal(process, signal.SIGTERM)
        left = marked(self.mark)
        while left and time.monotonic() < end:
            time.sleep(0.1)
            left = marked(self.mark)
        for process in left:
            _signal(process, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """Return the ids of the running processes that the group with this mark started, directly or indirectly."""
    pids = []
    for process in psutil.process_iter(["environ"]):
        environment = process.info["environ"] or {}
        if environment.get(MARK) == mark:
            pids.append(process.pid)
    return pids


def _signal(process: int, number: int) -> None:
    """Send a signal to a process, or to a group by its leader's negative id. A process that has ended is ignored."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


def wait_healthy(
    child: Child,
    url: str,
    seconds: float = 60.0,
    verify: ssl.SSLContext | bool = True,
    log: Path | None = None,
) -> None:
    """Wait until ``url``, which is on this machine and asked without a proxy, answers.

    Args:
        child: the program.
        url: the program's health check.
        seconds: how long to wait.
        verify: how to verify the server's certificate.
        log: where the program's log will be kept, for the error's text; ``None`` is where it is now.

    Raises:
        EngineError: the program ended, or did not answer in time; the message has the end of its log.
    """
    end = time.monotonic() + seconds
    kept = log or child.log
    while time.monotonic() < end:
        if child.process.poll() is not None:
            raise EngineError(f"{child.name} ended with code {child.process.returncode}:\n{child.tail()}\n(see {kept})")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=2.0, verify=verify, trust_env=False).is_success:
                return
        time.sleep(0.2)
    raise EngineError(f"{child.name} did not answer at {url} within {seconds:g} s:\n{child.tail()}\n(see {kept})")
