"""Flower's programs as child processes: started from a neutral folder, watched, and stopped with all they started."""

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
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from common.errors import EngineError

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONUNBUFFERED": "1",
}
"""Set for every program of Flower's that we start: nothing is sent, fetched or installed behind the user's back."""


MARK = "GOLDFINCH_STARTED_BY"
"""Environment variable by which everything that a group of programs has started is known."""


def flower_environment(home: Path, **more: str) -> dict[str, str]:
    """This process's environment with Flower's home at ``home`` and this Python's programs first on the PATH.

    Flower starts its own programs by bare name, so those of another environment could be taken otherwise.
    """
    programs = str(Path(sys.executable).parent)
    path = os.pathsep.join([programs, os.environ.get("PATH", "")])
    folders = {
        name: str(Path(os.environ[name]).absolute())  # the programs run elsewhere, where a relative path is another
        for name in ("GOLDFINCH_DATA", "GOLDFINCH_CACHE")
        if os.environ.get(name)
    }
    if modules := os.environ.get("PYTHONPATH"):
        folders["PYTHONPATH"] = os.pathsep.join(str(Path(each).absolute()) for each in modules.split(os.pathsep))
    return {**os.environ, **folders, **QUIET, "FLWR_HOME": str(home), "PATH": path, **more}


def program(name: str) -> str:
    """The path of one of Flower's programs beside this Python.

    Raises:
        EngineError: it is not installed there.
    """
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise EngineError(f"{name} is not installed beside {sys.executable}; install requirements.txt into this Python")
    return str(path)


def ask_flower(words: Sequence[str], environment: Mapping[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """What ``flwr`` says to ``words``, asked for JSON; its exit code is no matter."""
    return subprocess.run(  # noqa: S603  # our own command, no shell
        [program("flwr"), *words, "--format", "json"],
        env=dict(environment),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def answer_in(output: str, otherwise: str) -> dict[str, Any]:
    """The JSON object in what :func:`ask_flower` was told; notices may stand around it.

    Raises:
        EngineError: there is none, ``otherwise`` in words.
    """
    try:
        answer: dict[str, Any] = json.loads(output[output.find("{") : output.rfind("}") + 1])
    except ValueError as error:
        raise EngineError(f"{otherwise}: {in_one_line(output)}") from error
    return answer


def in_one_line(output: str) -> str:
    """A command's output without colours and frames."""
    bare = re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", output)
    return " ".join(bare.split())[-600:]


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Child:
    """One started program.

    Args:
        name: what it is, for messages.
        process: the process; it leads a session of its own, so that all it starts can be stopped with it.
        log: where its output goes.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def tail(self, lines: int = 15) -> str:
        """The end of its output."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""


@dataclass
class Processes:
    """A group of programs that end together.

    Args:
        folder: a neutral working folder for all of them; logs go to ``folder/logs`` unless ``logs`` says otherwise.
        logs: folder of the logs.
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
        """Start ``command`` from the neutral folder; its output goes to ``<logs>/<name>.log``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{name}.log"
        with log.open("ab") as stream:
            process = subprocess.Popen(  # noqa: S603  # our own commands, no shell
                list(command),
                cwd=self.folder,
                env={**environment, MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        child = Child(name, process, log)
        self.children.append(child)
        return child

    def stop(self, seconds: float = 15.0) -> None:
        """End all programs and what they started: ask first, insist after ``seconds``."""
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
        self.children.clear()

    def _stop_marked(self, end: float) -> None:
        """End what is in a session of its own: Flower's ServerApp outlives its SuperLink and calls it for minutes."""
        for process in marked(self.mark):
            _signal(process, signal.SIGTERM)
        while (left := marked(self.mark)) and time.monotonic() < end:
            time.sleep(0.1)
        for process in left:
            _signal(process, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """Processes that live and were started, at whatever remove, by the group with this mark."""
    return [each.pid for each in psutil.process_iter(["environ"]) if (each.info["environ"] or {}).get(MARK) == mark]


def _signal(process: int, number: int) -> None:
    """Send a signal to a process, or, by its leader's number with a minus, to a group of them."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


def wait_healthy(
    child: Child,
    url: str,
    seconds: float = 60.0,
    verify: ssl.SSLContext | bool = True,
    log: Path | None = None,
) -> None:
    """Wait until ``url`` answers; an error names ``log`` if that is where the program's log will be kept.

    Raises:
        EngineError: the program ended, or did not answer in time; the message has the end of its log.
    """
    end, kept = time.monotonic() + seconds, log or child.log
    while time.monotonic() < end:
        if child.process.poll() is not None:
            raise EngineError(f"{child.name} ended with code {child.process.returncode}:\n{child.tail()}\n(see {kept})")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=2.0, verify=verify).is_success:
                return
        time.sleep(0.2)
    raise EngineError(f"{child.name} did not answer at {url} within {seconds:g} s:\n{child.tail()}\n(see {kept})")
