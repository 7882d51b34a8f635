"""A network cable that can be cut: a TCP forwarder between a node and its SuperLink."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time


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
