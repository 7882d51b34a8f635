"""The resident trainer: ``python -m client.resident SOCKET NODE STARTED CONFIGURATION IDLE``, started by its callers.

It listens before it imports torch, so that a caller need not wait for that to send its tensors. One question is worked
on at a time, always in the main thread, where net and data are kept. It leaves when its SuperNode is gone, when a
caller with other code or configuration asks it to, when nobody asked anything for a while, and at once when the caller
whose question it works on is gone: nobody would take the answer, and what a client keeps is written atomically.
"""

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from client.resident.frames import LEAVE, Question, Reply, read, receive_frame, send, send_frame
from client.resident.place import Process, peer
from common.errors import PayloadError
from common.versions import code_sha256

WATCH_SECONDS = 0.5


@dataclass
class Task:
    """A caller's question.

    Args:
        begun, done: set when work on it begins, and when there is an answer.
        abandoned: the caller left before work began.
    """

    connection: socket.socket
    question: Question
    begun: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    abandoned: bool = False


class Resident:
    """The trainer of one node.

    Args:
        path: where it listens.
        node: the SuperNode whose life it shares.
        configuration: hash of the node's configuration it was started for.
        idle_seconds: it leaves after so long without a question.
    """

    def __init__(self, path: Path, node: Process, configuration: str, idle_seconds: float) -> None:
        self.path, self.node, self.idle_seconds = path, node, idle_seconds
        self.identity = {"code": code_sha256(), "configuration": configuration}
        self._tasks: queue.Queue[Task | None] = queue.Queue()
        self._callers = 0
        self._inode = 0
        self._last = time.monotonic()
        self._lock = threading.Lock()

    def run(self) -> NoReturn:
        """Answer questions until it is time to leave."""
        listener = socket.socket(socket.AF_UNIX)
        self.path.unlink(missing_ok=True)  # only the caller that holds the lock starts a trainer
        before = os.umask(0o177)
        listener.bind(os.fspath(self.path))
        os.umask(before)
        listener.listen(16)
        self._inode = self.path.stat().st_ino
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.leave())
        threading.Thread(target=self._watch, daemon=True).start()
        threading.Thread(target=self._accept, args=[listener], daemon=True).start()
        while True:
            task = self._tasks.get()
            if task is None:
                self.leave()
            task.begun.set()
            if task.abandoned:
                continue
            reply = _work(task.question)
            task.done.set()
            with contextlib.suppress(OSError):
                _send(task.connection, reply)
                task.connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that watches the caller
            del task, reply  # not to hold two messages' tensors until the next one comes

    def leave(self, code: int = 0) -> NoReturn:
        """End at once, from any thread; the socket goes first, so that no caller comes too late."""
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """One caller: who we are, its question, and whether it is still there while its question is worked on."""
        with connection:
            if peer(connection)[1] != os.getuid():
                return
            with self._counted(), contextlib.suppress(OSError):
                send_frame(connection, self.identity)
                try:
                    header, blob = receive_frame(connection)
                    if header == LEAVE:
                        self._tasks.put(None)  # after the work in hand
                        connection.recv(1)  # the caller waits for the connection's end
                        return
                    task = Task(connection, read(Question, header, blob))
                except PayloadError as error:
                    send(connection, Reply.of(error))
                    return
                del header, blob
                self._tasks.put(task)
                self._mind(task)

    def _mind(self, task: Task) -> None:
        """Return when the question was answered; when its caller is gone before that, nobody needs the work."""
        with contextlib.suppress(OSError):
            task.connection.recv(1)  # a caller says nothing more, so this returns at the connection's end
        if not task.done.is_set():
            task.abandoned = True
            if task.begun.is_set():
                print("the caller of the resident trainer is gone; it leaves", file=sys.stderr)
                self.leave(1)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self._callers += 1
        try:
            yield
        finally:
            with self._lock:
                self._callers -= 1
                self._last = time.monotonic()

    def _watch(self) -> None:
        while self.node.alive:
            time.sleep(WATCH_SECONDS)
            with self._lock:
                if not self._callers and time.monotonic() - self._last > self.idle_seconds:
                    break
        self.leave()


def _work(question: Question) -> Reply:
    try:
        from client.node import answer_question  # torch, and all else that the first question needs

        return answer_question(question)
    except Exception as error:  # such as a package that cannot be imported; the server must learn why
        return Reply.of(error)


def _send(connection: socket.socket, reply: Reply) -> None:
    try:
        send(connection, reply)
    except PayloadError as error:
        send(connection, Reply.of(error))


def main() -> NoReturn:
    """The command line; see the module."""
    path, pid, started, configuration, idle_seconds = sys.argv[1:]
    Resident(Path(path), Process(int(pid), int(started)), configuration, float(idle_seconds)).run()


if __name__ == "__main__":
    main()
