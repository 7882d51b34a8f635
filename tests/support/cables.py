"""A network cable that can be cut, and a slow one: TCP forwarders between a node and its SuperLink."""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
import time
from math import inf


class Cable:
    """Forwards connections to ``target``, a ``host:port``, until it is cut. Then it refuses all until it is mended.

    ``delay`` is how many seconds it holds each piece back, as a network that loses packets does.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self.delay = 0.0
        self.target = host, int(port)
        self._open: set[socket.socket] = set()
        self._cuts = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self._port}"
        self._listen()

    def cut(self) -> None:
        """End all connections, those that are being made too, and refuse new ones."""
        self._cuts += 1
        for end in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
        self._listener.close()

    def mend(self) -> None:
        """Forward again."""
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._listen()

    def close(self) -> None:
        """Cut it for good."""
        self.cut()

    def _listen(self) -> None:
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # until it is cut
            while True:
                near, _ = listener.accept()
                threading.Thread(target=self._forward, args=(near, self._cuts), daemon=True).start()

    def _forward(self, near: socket.socket, cuts: int) -> None:
        with near, contextlib.suppress(OSError), socket.create_connection(self.target) as far:
            ends = {near: far, far: near}
            self._open |= ends.keys()
            if cuts != self._cuts:  # cut before it was among those that are open
                self._open -= ends.keys()
                return
            with selectors.DefaultSelector() as ready:
                for end in ends:
                    ready.register(end, selectors.EVENT_READ)
                try:
                    while self._pass(ready, ends):
                        pass
                finally:
                    self._open -= ends.keys()

    def _pass(self, ready: selectors.BaseSelector, ends: dict[socket.socket, socket.socket]) -> bool:
        """Forward what has arrived; return whether both ends are open."""
        for key, _ in ready.select():
            source = key.fileobj
            assert isinstance(source, socket.socket)
            content = source.recv(65536)
            if not content:
                return False
            time.sleep(self.delay)
            ends[source].sendall(content)
        return True


class SlowCable(Cable):
    """One slow link for all connections.

    ``rate`` is the bytes a second that it carries each way, ``latency`` the seconds that a byte is under way.
    """

    def __init__(self, target: str, rate: float = inf, latency: float = 0.0) -> None:
        self.rate, self.latency = rate, latency
        self._turn, self._free_at = threading.Lock(), {"up": 0.0, "down": 0.0}
        super().__init__(target)

    def _forward(self, near: socket.socket, cuts: int) -> None:
        with near, contextlib.suppress(OSError), socket.create_connection(self.target) as far:
            self._open |= {near, far}
            if cuts != self._cuts:
                self._open -= {near, far}
                return
            down = threading.Thread(target=self._carry, args=(far, near, "down"), daemon=True)
            down.start()
            self._carry(near, far, "up")
            down.join()
            self._open -= {near, far}

    def _carry(self, source: socket.socket, target: socket.socket, way: str) -> None:
        """Pass on what comes from ``source``, until its end."""
        under_way: queue.Queue[tuple[float, bytes]] = queue.Queue()
        arrival = threading.Thread(target=self._arrive, args=(under_way, target), daemon=True)
        arrival.start()
        content = b"."
        while content:
            content = b""
            with contextlib.suppress(OSError):
                content = source.recv(1024)
            with self._turn:
                passed = max(time.monotonic(), self._free_at[way]) + len(content) / self.rate
                self._free_at[way] = passed
            under_way.put((passed + self.latency, content))
            time.sleep(max(0.0, passed - time.monotonic()))
        arrival.join()

    def _arrive(self, under_way: queue.Queue[tuple[float, bytes]], target: socket.socket) -> None:
        content = b"."
        while content:
            due, content = under_way.get()
            time.sleep(max(0.0, due - time.monotonic()))
            with contextlib.suppress(OSError):  # the other end has gone
                target.sendall(content)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
