"""Uploads of strangers, who are known to be none only when their body is complete: the shipped proxy holds few of them,
and not for long."""

from __future__ import annotations

import contextlib
import http.server
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.federation import NGINX, ROOT, start_nginx

from server.admission.certificates import Certificates, ensure
from server.flower.processes import Processes

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed (apt install nginx)"),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has more than one loopback address"),
]

PIECE = 5 * 2**20 + 1000
"""A part of an honest upload, as Flower cuts it."""

HELD = 64
"""Uploads of one address at a time."""

SHIPPED = (ROOT / "docker" / "proxy" / "nginx.conf").read_text()
SILENCE = "client_body_timeout 10s;"


class Upstream(http.server.BaseHTTPRequestHandler):
    """Takes everything, as a SuperLink takes what is well-formed."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:  # the library's name
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:  # the library's name
        left = int(self.headers["Content-Length"])
        while left:
            left -= len(self.rfile.read(min(left, 65536)))
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@dataclass
class Proxy:
    port: int
    context: ssl.SSLContext

    def connect(self, source: str = "127.0.0.1") -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=20, source_address=(source, 0))
        return self.context.wrap_socket(plain, server_hostname="localhost")

    def begin(self, size: int, source: str = "127.0.0.1", path: str = "push-object") -> ssl.SSLSocket:
        """A request whose body is yet to come."""
        secure = self.connect(source)
        head = (
            f"POST /v1/fleet/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\nConnection: close\r\n\r\n"
        )
        secure.sendall(head.encode())
        return secure

    def post(self, size: int, source: str = "127.0.0.1", path: str = "push-object") -> int:
        """The status of an honest request."""
        with self.begin(size, source, path) as secure:
            secure.sendall(bytes(size))
            return status(secure)


def status(secure: ssl.SSLSocket) -> int:
    return int(secure.recv(100).split()[1])


@contextlib.contextmanager
def started_proxy(folder: Path, **environment: str) -> Iterator[Proxy]:
    files = Certificates(folder / "certificates")
    ensure(files.folder, [])
    listening = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    listening.load_cert_chain(files.server, files.server_key)
    upstream = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    upstream.socket = listening.wrap_socket(upstream.socket, server_side=True)
    threading.Thread(target=upstream.serve_forever, daemon=True).start()
    trust = ssl.create_default_context(cafile=str(files.authority))
    assert SILENCE in SHIPPED
    configuration = folder / "nginx.conf"
    configuration.write_text(SHIPPED.replace(SILENCE, "client_body_timeout 3s;"))  # a test should not wait for ten
    environment["GOLDFINCH_PROXY_CONFIGURATION"] = str(configuration)
    try:
        with Processes(folder / "cwd", folder / "logs") as processes:
            superlink = f"127.0.0.1:{upstream.server_port}"
            _, place = start_nginx(processes, files, superlink, **environment)
            yield Proxy(int(place.rpartition(":")[2]), trust)
    finally:
        upstream.shutdown()
        upstream.server_close()


def test_uploads_that_are_held_leave_room_for_honest_ones_and_silence_ends_them(tmp_path: Path) -> None:
    with started_proxy(tmp_path) as proxy, contextlib.ExitStack() as held:
        strangers = []
        for _ in range(HELD - 1):
            strangers.append(held.enter_context(proxy.begin(PIECE)))
            strangers[-1].sendall(bytes(30_000))  # more than stays in memory
        assert proxy.post(PIECE) == 200, "the same address has room for one more"
        last = held.enter_context(proxy.begin(PIECE))
        last.sendall(bytes(30_000))
        assert [proxy.post(100_000) for _ in range(3)] == [503] * 3, "which a SuperNode takes for: try again"
        assert proxy.post(500, path="pull-messages") == 200, "small calls are not counted"
        assert proxy.post(PIECE, "127.0.0.2") == 200, "another address does not notice"
        assert proxy.post(7 * 2**20) == 413
        for secure in [*strangers, last]:
            assert secure.recv(100) == b""
        assert proxy.post(PIECE) == 200


def test_a_slow_upload_is_cut_at_any_pace(tmp_path: Path) -> None:
    with started_proxy(tmp_path, GOLDFINCH_PATIENCE="1") as proxy, proxy.begin(PIECE) as drip:
        drip.settimeout(0.05)
        end = time.monotonic() + 12
        ended = False
        while not ended and time.monotonic() < end:
            try:
                drip.sendall(b"\0")
                ended = drip.recv(100) == b""
            except TimeoutError:
                assert proxy.post(1000) == 200
            except OSError:
                ended = True
        assert ended
        assert proxy.post(PIECE) == 200
