"""The shipped reverse proxy in front of a server that takes everything."""

from __future__ import annotations

import contextlib
import http.server
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.federation import ROOT, start_nginx

from server.admission.certificates import Certificates, ensure
from server.flower.processes import Processes

SHIPPED = (ROOT / "docker" / "proxy" / "nginx.conf").read_text()
SILENCE = "client_body_timeout 10s;"


class Upstream(http.server.BaseHTTPRequestHandler):
    """Takes everything, as a SuperLink takes what is well-formed."""

    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        assert isinstance(self.server, UpstreamServer)
        self.server.connections += 1

    def do_GET(self) -> None:  # the library's name
        assert isinstance(self.server, UpstreamServer)
        self.server.requests += 1
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


class UpstreamServer(http.server.ThreadingHTTPServer):
    """Counts the connections and requests of the proxy."""

    connections = 0
    requests = 0


@contextlib.contextmanager
def started_upstream(files: Certificates, address: str = "127.0.0.1", port: int = 0) -> Iterator[UpstreamServer]:
    """A server with a SuperLink's certificate."""
    listening = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    listening.load_cert_chain(files.server, files.server_key)
    upstream = UpstreamServer((address, port), Upstream)
    upstream.socket = listening.wrap_socket(upstream.socket, server_side=True)
    threading.Thread(target=upstream.serve_forever, daemon=True).start()
    try:
        yield upstream
    finally:
        upstream.shutdown()
        upstream.server_close()


@dataclass
class Proxy:
    port: int
    context: ssl.SSLContext
    upstream: UpstreamServer

    def connect(self, source: str = "127.0.0.1") -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=40, source_address=(source, 0))
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
def started_proxy(folder: Path, superlink: str = "127.0.0.1", silence: int = 3, **environment: str) -> Iterator[Proxy]:
    """The shipped proxy in front of an upstream; ``superlink`` is the upstream's name for the proxy.

    It ends an upload after ``silence`` seconds without data, since a test should not wait for ten.
    """
    files = Certificates(folder / "certificates")
    ensure(files.folder, [])
    trust = ssl.create_default_context(cafile=str(files.authority))
    assert SILENCE in SHIPPED
    configuration = folder / "nginx.conf"
    configuration.write_text(SHIPPED.replace(SILENCE, f"client_body_timeout {silence}s;"))
    environment["GOLDFINCH_PROXY_CONFIGURATION"] = str(configuration)
    with started_upstream(files) as upstream, Processes(folder / "cwd", folder / "logs") as processes:
        _, place = start_nginx(processes, files, f"{superlink}:{upstream.server_port}", **environment)
        yield Proxy(int(place.rpartition(":")[2]), trust, upstream)
