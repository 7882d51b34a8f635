"""A network cable that can be cut: a TCP forwarder between a node and its SuperLink."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading


class Cable:
    """Forwards connections to ``target``, a ``host:port``, until it is cut; then it refuses all until it is mended."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self.target = host, int(port)
        self.intact = True
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End all connections, and every new one at once."""
        self.intact = False
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Forward again."""
        self.intact = True

    def close(self) -> None:
        """Cut it for good."""
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._forward, args=(near,), daemon=True).start()

    def _forward(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError):
            if not self.intact:
                return
            with socket.create_connection(self.target) as far, selectors.DefaultSelector() as ready:
                ends = {near: far, far: near}
                self._open |= ends.keys()
                for end in ends:
                    ready.register(end, selectors.EVENT_READ)
                try:
                    while self._pass(ready, ends):
                        pass
                finally:
                    self._open -= ends.keys()

    @staticmethod
    def _pass(ready: selectors.BaseSelector, ends: dict[socket.socket, socket.socket]) -> bool:
        for key, _ in ready.select():
            source = key.fileobj
            assert isinstance(source, socket.socket)
            content = source.recv(65536)
            if not content:
                return False
            ends[source].sendall(content)
        return True
