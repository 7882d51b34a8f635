"""The containers' health check against a server of the standard library, plain and with TLS."""

from __future__ import annotations

import http.server
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.federation import ROOT

from server.admission.certificates import Certificates, ensure


class Answering(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:  # the library's name
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, Path, Path]]:
    folder = tmp_path_factory.mktemp("health")
    ensure(folder / "ours", [])
    ensure(folder / "theirs", [])
    files = Certificates(folder / "ours")
    plain = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    secure = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.server, files.server_key)
    secure.socket = context.wrap_socket(secure.socket, server_side=True)
    for server in (plain, secure):
        threading.Thread(target=server.serve_forever, daemon=True).start()
    theirs = Certificates(folder / "theirs").authority
    yield (
        f"http://127.0.0.1:{plain.server_port}",
        f"https://127.0.0.1:{secure.server_port}",
        files.authority,
        theirs,
    )
    for server in (plain, secure):
        server.shutdown()


def check(*arguments: str) -> tuple[int, str]:
    script = str(ROOT / "docker" / "health.py")
    result = subprocess.run(
        [sys.executable, "-IS", script, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    return result.returncode, result.stderr


def test_healthy_and_unhealthy_are_distinguished(servers: tuple[str, str, Path, Path]) -> None:
    plain, secure, ours, theirs = servers
    assert check(f"{plain}/health") == (0, "")
    assert check(f"{secure}/health", str(ours)) == (0, "")
    assert check(f"{plain}/broken")[0] == 1
    assert check("http://127.0.0.1:9/health")[0] == 1
    code, message = check(f"{secure}/health", str(theirs))
    assert code == 1
    assert "CERTIFICATE_VERIFY_FAILED" in message
