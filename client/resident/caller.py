"""The thin ClientApp's side: finds the node's resident trainer, starts it when there is none, and asks it.

Imports neither torch nor flwr, so that a message costs little more than Flower's own start.
"""

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from client.resident.frames import LEAVE, Question, Reply, read, receive_frame, send, send_frame
from client.resident.place import Process, peer, remove_left_overs, socket_of
from common.errors import EngineError, PayloadError
from common.versions import code_sha256

ROOT = Path(__file__).resolve().parent.parent.parent
IDLE_SECONDS = 900.0
START_SECONDS = 120.0
TRIES = 2


class Caller:
    """Asks the resident trainer of one node.

    Args:
        node: the SuperNode whose life the trainer shares.
        configuration: the node's configuration; a trainer that was started for another one is replaced.
        idle_seconds: a trainer that is started leaves after so long without a question.

    Raises:
        OSError: there is no private folder for its socket.
    """

    def __init__(self, node: Process, configuration: Mapping[str, Any], idle_seconds: float = IDLE_SECONDS) -> None:
        self.node, self.idle_seconds = node, idle_seconds
        self.path = socket_of(node)
        text = json.dumps(configuration, sort_keys=True, default=str)
        self.identity = {"code": code_sha256(), "configuration": hashlib.sha256(text.encode()).hexdigest()[:16]}

    def ask(self, question: Question) -> Reply:
        """The trainer's reply. One that dies over the question is replaced once.

        Raises:
            EngineError: it died again, or could not be started.
            PayloadError: question or reply are too large, or the reply is none.
        """
        for _ in range(TRIES):
            with self._connection() as connection, contextlib.suppress(ConnectionError):
                send(connection, question)
                return read(Reply, *receive_frame(connection))
        raise EngineError(
            f"the resident trainer died {TRIES} times over one message, most likely for want of memory: see the log of "
            "the node, and the kernel's; resident=false in --node-config trains without one"
        )

    @contextlib.contextmanager
    def _connection(self) -> Iterator[socket.socket]:
        """A connection to a trainer of this code and configuration; the lock lets only one process start one."""
        with _locked(self.path.with_suffix(".lock")):
            connection = self._reach()
            if connection is None:
                remove_left_overs(self.path.parent)
                connection = self._start()
        with connection:
            yield connection

    def _reach(self) -> socket.socket | None:
        """A connection to the trainer that runs; ``None`` if none does. One of another kind is asked to leave."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(os.fspath(self.path))
            pid, user = peer(connection)
            if user != os.getuid():
                raise EngineError(f"{self.path} belongs to user {user}; remove it")
            connection.settimeout(START_SECONDS)
            try:
                identity, _ = receive_frame(connection)
            except (TimeoutError, PayloadError):
                _end(pid)  # it hangs, or is of a release that speaks otherwise
                connection.close()
                return None
            connection.settimeout(None)
            if identity == self.identity:
                return connection
            send_frame(connection, LEAVE)
            with contextlib.suppress(PayloadError):
                receive_frame(connection)  # returns when it is gone: it says nothing
        except (FileNotFoundError, ConnectionError):
            pass
        connection.close()
        return None

    def _start(self) -> socket.socket:
        command = [sys.executable, "-P", "-m", "client.resident", os.fspath(self.path), str(self.node.pid)]
        command += [str(self.node.started), self.identity["configuration"], f"{self.idle_seconds:g}"]
        # the code beside this file, before the working folder (-P) and before anything that is installed
        path = os.pathsep.join(filter(None, [os.fspath(ROOT), os.environ.get("PYTHONPATH", "")]))
        child = subprocess.Popen(  # noqa: S603  # our own command, no shell
            command, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL
        )
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            code = child.poll()
            if code is not None:
                why = "the code under it is being changed" if code == 0 else "see the log of the node"
                raise EngineError(f"the resident trainer ended with code {code} as it started: {why}")
            connection = self._reach()
            if connection is not None:
                return connection
            time.sleep(0.02)
        _end(child.pid)
        raise EngineError(f"the resident trainer did not answer within {START_SECONDS:g} s: see the log of the node")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl  # where there is no SuperNode to work for, this need not exist

    with path.open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
