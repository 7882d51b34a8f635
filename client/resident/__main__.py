"""The resident trainer: ``python -m client.resident SOCKET NODE STARTED CONFIGURATION IDLE``, started by its callers.

The trainer listens before it imports torch, so that a caller can send its tensors meanwhile. The main thread keeps net
and data, and works on one question at a time. The trainer ends when its SuperNode has ended, when a caller with other
code or another configuration asks it to, and after a time without a question. The trainer also ends when the caller
that it works for has ended: nobody would read the answer, and a client's state is written atomically.
"""

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import NoReturn

from client.reasons import says_private
from client.resident.messages import Question, TrainerReply, receive, send, send_header
from client.resident.place import Process, peer, remove_files
from common.errors import PayloadError
from common.versions import code_sha256

WATCH_SECONDS = 0.5
"""Time between two polls of the SuperNode."""

CALLER_SECONDS = 0.05
"""Time between two polls of the caller of the current question."""

LONGEST_QUEUE = 16
"""The number of callers that may wait to be connected."""


@dataclass
class Task:
    """A caller's question.

    Args:
        question: the question.
        reply: the answer, once ``answered`` is set.
        begun: set when work on the question begins.
        answered: set when there is an answer.
        finished: set when the caller's thread needs nothing more from the main thread.
        abandoned: whether the caller ended before work began.
    """

    question: Question
    reply: TrainerReply | None = None
    begun: threading.Event = field(default_factory=threading.Event)
    answered: threading.Event = field(default_factory=threading.Event)
    finished: threading.Event = field(default_factory=threading.Event)
    abandoned: bool = False


class Resident:
    """The trainer of one node.

    Args:
        path: the socket that it listens on.
        node: the SuperNode; the trainer ends when it ends.
        configuration: hash of the node's configuration.
        idle_seconds: the trainer ends after this many seconds without a question.
    """

    def __init__(self, path: Path, node: Process, configuration: str, idle_seconds: float) -> None:
        self.path = path
        self.node = node
        self.idle_seconds = idle_seconds
        self.identity = {"code": code_sha256(), "configuration": configuration}
        self._tasks: queue.Queue[Task] = queue.Queue()
        self._callers = 0
        self._inode = 0
        self._last = time.monotonic()
        self._lock = threading.Lock()

    def run(self) -> NoReturn:
        """Answer questions until it is time to end."""
        self.path.unlink(missing_ok=True)  # only the caller that holds the lock starts a trainer
        before = os.umask(0o177)
        listener = Listener(os.fspath(self.path), "AF_UNIX", LONGEST_QUEUE)
        os.umask(before)
        self._inode = self.path.stat().st_ino
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.leave())
        threading.Thread(target=self._watch, daemon=True).start()
        threading.Thread(target=self._accept, args=[listener], daemon=True).start()
        while True:
            self._work_on(self._tasks.get())

    def _work_on(self, task: Task) -> None:
        """Answer one question, and wait until its caller has the reply."""
        task.begun.set()
        if task.abandoned:
            return
        if task.question.kind == "leave":
            self.leave()
        task.reply = _answer(task.question)
        task.answered.set()
        task.finished.wait()

    def leave(self, code: int = 0) -> NoReturn:
        """End at once, from any thread. The socket is removed first, so that no further caller connects."""
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _accept(self, listener: Listener) -> None:
        while True:
            connection = listener.accept()
            threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        """Serve one caller: send the identity, receive the question, and send the reply."""
        with connection:
            if peer(connection)[1] != os.getuid():
                return
            with self._counted(), contextlib.suppress(OSError):
                send_header(connection, self.identity)
                try:
                    task = Task(receive(connection, Question))
                except PayloadError as error:
                    send(connection, TrainerReply.of(error, private=True))  # whether it is private was in the question
                    return
                self._tasks.put(task)
                try:
                    self._wait_for_answer(connection, task)
                    _send(connection, task)
                finally:
                    task.finished.set()

    def _wait_for_answer(self, connection: Connection, task: Task) -> None:
        """Return when the question is answered, or when its caller ended before work on it began.

        When the caller ends while its question is worked on, the whole trainer ends.
        """
        while not task.answered.wait(CALLER_SECONDS):
            if not connection.poll():
                continue
            # a caller sends nothing after its question, so this is the end of the connection
            task.abandoned = True
            if task.begun.is_set() and not task.answered.is_set():
                print("the caller of the resident trainer is gone; it leaves", file=sys.stderr)
                self.leave(1)
            return

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
                    self.leave()
        remove_files(self.node)
        self.leave()


def _answer(question: Question) -> TrainerReply:
    try:
        from client.node import answer_question  # imports torch

        return answer_question(question)
    except Exception as error:  # any error, such as a missing package, goes to the server
        return TrainerReply.of(error, private=_is_private(question))


def _is_private(question: Question) -> bool:
    return says_private(question.run_config, question.configuration)


def _send(connection: Connection, task: Task) -> None:
    if task.reply is None:
        return
    try:
        send(connection, task.reply)
    except PayloadError as error:
        send(connection, TrainerReply.of(error, private=_is_private(task.question)))


def main() -> NoReturn:
    """Run a resident trainer with the arguments of the command line."""
    path, pid, started, configuration, idle_seconds = sys.argv[1:]
    Resident(Path(path), Process(int(pid), int(started)), configuration, float(idle_seconds)).run()


if __name__ == "__main__":
    main()
