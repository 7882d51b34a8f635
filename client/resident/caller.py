"""The ClientApp's side: find the node's resident trainer, start it when there is none, and ask it a question.

This module imports neither torch nor flwr, because a process imports it again for every message.
"""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from client.resident.messages import Question, TrainerReply, receive, receive_header, send
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
        node: the SuperNode; the trainer ends when it ends.
        configuration: the node's configuration; a trainer that was started for another one is replaced.
        idle_seconds: a trainer that this caller starts ends after this many seconds without a question.

    Raises:
        OSError: there is no private folder for the socket.
    """

    def __init__(self, node: Process, configuration: Mapping[str, Any], idle_seconds: float = IDLE_SECONDS) -> None:
        self.node, self.idle_seconds = node, idle_seconds
        self.path = socket_of(node)
        text = json.dumps(configuration, sort_keys=True, default=str)
        self.identity = {"code": code_sha256(), "configuration": hashlib.sha256(text.encode()).hexdigest()[:16]}

    def ask(self, question: Question) -> TrainerReply:
        """Return the trainer's reply. A trainer that dies while it works on the question is replaced once.

        Raises:
            EngineError: the second trainer died too, or no trainer could be started.
            PayloadError: the question or the reply is too large, or the message is not a reply.
        """
        for _ in range(TRIES):
            with self._connection() as connection, contextlib.suppress(ConnectionError):
                send(connection, question)
                return receive(connection, TrainerReply)
        raise EngineError(
            f"the resident trainer died {TRIES} times over one message, most likely for want of memory: see the log of "
            "the node, and the kernel's; resident=false in --node-config trains without one"
        )

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Connection]:
        """A connection to a trainer of this code and configuration. Under the lock, only one process starts one."""
        with _locked(self.path.with_suffix(".lock")):
            connection = self._reach()
            if connection is None:
                remove_left_overs(self.path.parent)
                connection = self._start()
        with connection:
            yield connection

    def _reach(self) -> Connection | None:
        """Return a connection to the running trainer, or ``None`` if none runs that this caller can use."""
        try:
            connection = Client(os.fspath(self.path), "AF_UNIX")
        except (FileNotFoundError, ConnectionError):
            return None
        process_id, user_id = peer(connection)
        if user_id != os.getuid():
            connection.close()
            raise EngineError(f"{self.path} belongs to user {user_id}; remove it")
        with contextlib.suppress(ConnectionError):
            if self._is_usable(connection, process_id):
                return connection
        connection.close()
        return None

    def _is_usable(self, connection: Connection, process_id: int) -> bool:
        """Return whether the trainer has this code and configuration; end a trainer that does not.

        A trainer that does not complete its identity within ``START_SECONDS`` is killed, which ends the connection.

        Raises:
            ConnectionError: the trainer ended.
        """
        watchdog = threading.Timer(START_SECONDS, _end, [process_id])
        watchdog.start()
        try:
            identity = receive_header(connection)
        except PayloadError:  # a trainer of another release, which sends other messages
            identity = None
        finally:
            watchdog.cancel()
        if identity is None:
            _end(process_id)
            return False
        if identity == self.identity:
            return True
        send(connection, Question("leave"))
        connection.poll(None)  # the trainer sends nothing more: this returns when it has ended
        return False

    def _start(self) -> Connection:
        """Start a trainer, and return a connection to it."""
        command = [sys.executable, "-P", "-m", "client.resident", os.fspath(self.path), str(self.node.pid)]
        command += [str(self.node.started), self.identity["configuration"], f"{self.idle_seconds:g}"]
        # import this checkout, not the working folder (-P) and not an installed package
        path = os.pathsep.join(filter(None, [os.fspath(ROOT), os.environ.get("PYTHONPATH", "")]))
        child = subprocess.Popen(  # noqa: S603  # a fixed command, no shell
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
    import fcntl  # not on Windows, which imports this module and never calls this function

    with path.open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
