"""One ClientApp per message, however long a ClientApp takes to start, and an end of all processes with their SuperNode.

Flower 1.41 loses sight of slow ClientApps. Its SuperExec claims a message for 30 seconds
(``HEARTBEAT_DEFAULT_INTERVAL``). The ClientApp's first heartbeat extends the claim, and that heartbeat comes after
Python and Flower are imported. Where these imports take longer, the claim expires, the message is claimed again, and a
second ClientApp starts for it. The first goes on: ``SubprocessExecutor.launch`` keeps no reference to the process. Its
token is refused, and it tries again. So ClientApps pile up until the device has no memory, and none of them replies.
Processes that are still importing do not watch their parent yet, so they also outlive a SuperNode that is stopped.
Flower keeps no reference to the SuperExec either: where it dies, the node stays online and answers nothing.

:class:`Supervisor` runs in the SuperNode's process. It keeps the claim of a ClientApp that lives, and ends a ClientApp
that has none. It uses two public functions of Flower's node state, ``get_task_by_token`` and
``acknowledge_task_heartbeat``. A Flower whose SuperExec keeps its processes, extends the claims of those that live and
ends the others makes this module superfluous: remove it and its call in :mod:`client.supernode`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from subprocess import Popen
from typing import Any, Protocol

import psutil
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, Status

CLIENT_APP, TOKEN = "flwr-clientapp", "--token"
"""The program that Flower starts per message, and the argument before its token."""

TRAINER = "client.resident"
"""Module of the resident trainer, which is no descendant of the SuperNode: the ClientApp that started it has ended."""

POLL_SECONDS = 2.0
"""Time between two checks of the ClientApps, far below the claim's 30 seconds."""

START_SECONDS = 600.0
"""A ClientApp that has not begun after this time is ended. Then its claim expires, and Flower starts another."""

LEAVE_SECONDS = 15.0
"""Time that a ClientApp without a claim has to end by itself: it has replied, and signs off."""

TERM_SECONDS = 3.0
"""Time between SIGTERM and SIGKILL."""

KILL_SECONDS = 2.0
"""Time to wait until killed processes have gone."""


class Claims(Protocol):
    """The part of Flower's node state that is used here."""

    def get_task_by_token(self, token: str) -> Any:
        """Return the task that a token claims, or ``None``."""

    def acknowledge_task_heartbeat(self, task_id: int) -> bool:
        """Extend the claim of a task."""


@dataclass
class WatchedApp:
    """A ClientApp.

    Args:
        process: the process.
        token: the token of its claim.
        unclaimed_since: when its claim was first seen to be gone, on the monotonic clock; ``None`` while it has one.
        terminated_at: when it was sent SIGTERM, on the monotonic clock; ``None`` before.
        began: whether it has begun to work on its message.
    """

    process: psutil.Process
    token: str
    unclaimed_since: float | None = None
    terminated_at: float | None = None
    began: bool = False


@dataclass
class Supervisor:
    """Watches the ClientApps of the SuperNode that runs in this process.

    Args:
        claims: Flower's node state; ``None`` until there is one.
        lost: called once if the SuperExec has ended.
        start_seconds: see :data:`START_SECONDS`.
        leave_seconds: see :data:`LEAVE_SECONDS`.

    Attributes:
        slowest_start: the most seconds that a ClientApp took from its start to its message; 0 before the first.
        superexec: Flower's SuperExec, which starts the ClientApps; ``None`` if this process did not start one.
    """

    claims: Callable[[], Claims | None]
    lost: Callable[[], None] = lambda: None
    start_seconds: float = START_SECONDS
    leave_seconds: float = LEAVE_SECONDS
    slowest_start: float = 0.0
    superexec: Popen[bytes] | None = None
    _gone: bool = False
    _watched: dict[tuple[int, float], WatchedApp] = field(default_factory=dict)
    _reported_slow: bool = False

    def start(self) -> None:
        """Check the ClientApps every :data:`POLL_SECONDS`, in a thread that ends with the process."""
        threading.Thread(target=self._run, daemon=True, name="supervisor").start()

    def start_superexec(self, command: Sequence[str]) -> None:
        """Start Flower's SuperExec, and keep the reference to it that Flower does not keep."""
        self.superexec = Popen(list(command))  # noqa: S603  # Flower's own command, no shell

    def _run(self) -> None:
        failed = False
        while True:
            try:
                self.check()
            except Exception as error:  # such as another release of Flower: the SuperNode goes on
                if not failed:
                    failed = True
                    _report(f"ClientApps are not supervised: {error!r}")
            time.sleep(POLL_SECONDS)

    def check(self) -> None:
        """Check the SuperExec and every ClientApp once: keep its claim while it starts; end it if it has none."""
        self._check_superexec()
        claims = self.claims()
        if claims is None:
            return
        running = dict(_client_apps())
        for key in self._watched.keys() - running.keys():
            del self._watched[key]
        for key, watched in running.items():
            with contextlib.suppress(psutil.Error):  # it has just ended
                self._check_one(self._watched.setdefault(key, watched), claims)

    def _check_superexec(self) -> None:
        """Call :attr:`lost` at the second check that finds no SuperExec: what ended it may be ending this process."""
        if self.superexec is None or self.superexec.poll() is None:
            return
        if self._gone:
            status = self.superexec.returncode
            self.superexec = None
            _report(f"flower-superexec has ended ({status}), without which no message is answered")
            self.lost()
        self._gone = True

    def _check_one(self, watched: WatchedApp, claims: Claims) -> None:
        task = claims.get_task_by_token(watched.token)
        now = time.monotonic()
        if watched.terminated_at is not None:
            if now - watched.terminated_at > TERM_SECONDS:
                _signal(watched.process.kill)
            return
        if task is None:
            if watched.unclaimed_since is None:
                watched.unclaimed_since = now
            if now - watched.unclaimed_since >= self.leave_seconds:
                _report(f"ending ClientApp {watched.process.pid}, whose token has expired")
                self._terminate(watched, now)
            return
        created = watched.process.create_time()
        if task.status.status != Status.STARTING:
            if task.running_at:
                self._note_start(watched, datetime.fromisoformat(task.running_at).timestamp() - created)
        elif time.time() - created > self.start_seconds:
            _report(f"ending ClientApp {watched.process.pid}, which did not start within {self.start_seconds:g} s")
            self._terminate(watched, now)
        else:
            claims.acknowledge_task_heartbeat(task.task_id)

    def _note_start(self, watched: WatchedApp, seconds: float) -> None:
        """Note how long a ClientApp took to start; report once that it was longer than Flower waits."""
        if watched.began:
            return
        watched.began = True
        self.slowest_start = max(self.slowest_start, seconds)
        if seconds > HEARTBEAT_DEFAULT_INTERVAL and not self._reported_slow:
            self._reported_slow = True
            _report(
                f"a ClientApp took {seconds:.0f} s to start; every message to this device takes that much longer. "
                f"Flower alone would start another ClientApp after {HEARTBEAT_DEFAULT_INTERVAL} s. rounds.deadline of "
                "a run must allow for the start; a faster disk, more memory or fewer programs shorten it"
            )

    def _terminate(self, watched: WatchedApp, now: float) -> None:
        watched.terminated_at = now
        _signal(watched.process.terminate)


def end_processes(seconds: float = TERM_SECONDS, spared: int | None = None) -> None:
    """End everything that this process started: SIGTERM, and SIGKILL for what lives ``seconds`` later.

    The resident trainer belongs to it, although the ClientApp that started it has ended.

    Args:
        seconds: time between the two signals.
        spared: id of a process that goes on.
    """
    own = psutil.Process()
    processes = [process for process in own.children(recursive=True) if process.pid != spared]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if _node_of(words) == str(own.pid) and process not in processes:
                processes.append(process)
    for process in processes:
        _signal(process.terminate)
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    for process in alive:
        _signal(process.kill)
    psutil.wait_procs(alive, timeout=KILL_SECONDS)


def _node_of(words: Sequence[str]) -> str:
    """Return the process id of a resident trainer's SuperNode, as :mod:`client.resident.caller` starts it; or empty."""
    if TRAINER not in words[:-2]:
        return ""
    return words[words.index(TRAINER) + 2]


def _client_apps() -> Iterator[tuple[tuple[int, float], WatchedApp]]:
    """Yield the ClientApps that this process started, each with its process id and the time of its start."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            names = [Path(word).name for word in words[:3]]
            if CLIENT_APP in names and TOKEN in words[:-1]:
                token = words[words.index(TOKEN) + 1]
                yield (process.pid, process.create_time()), WatchedApp(process, token)


def _signal(send: Callable[[], None]) -> None:
    with contextlib.suppress(psutil.Error):  # it has ended
        send()


def _report(text: str) -> None:
    print(f"goldfinch-supernode: {text}", file=sys.stderr, flush=True)
