"""Where the shipped reverse proxy writes: a folder of its own, and whatever standard output its supervisor gives it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import stat
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from support.faults import wait_until
from support.federation import NGINX, ROOT

from server.admission.certificates import Certificates, ensure
from server.flower.processes import free_port

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed (apt install nginx)"),
]


@dataclass
class Started:
    process: subprocess.Popen[bytes]
    address: str
    trust: ssl.SSLContext
    temporary: Path

    def refused(self) -> bool:
        """Whether a request that devices may not make was answered, which the log then tells."""
        try:
            answer = httpx.get(f"https://{self.address}/refused", verify=self.trust)
        except httpx.TransportError:
            return False
        return answer.status_code == 403


@contextlib.contextmanager
def started(folder: Path, output: int) -> Iterator[Started]:
    """The proxy without a SuperLink, which refuses all the same; ``output`` is closed here."""
    files = Certificates(folder / "certificates")
    ensure(files.folder, [])
    temporary = folder / ("temporary-" + "x" * 100)  # longer than a Unix socket's path may be
    temporary.mkdir()
    address = f"127.0.0.1:{free_port()}"
    environment = {
        "PATH": f"{Path(str(NGINX)).parent}:{os.environ['PATH']}",
        "TMPDIR": str(temporary),
        "GOLDFINCH_CERTIFICATES": str(files.folder),
        "GOLDFINCH_LISTEN": address,
        "GOLDFINCH_SUPERLINK": "127.0.0.1:1",
        "GOLDFINCH_PROXY_CONFIGURATION": str(ROOT / "docker" / "proxy" / "nginx.conf"),
    }
    (temporary / "nginx.conf").write_text("load_module /tmp/hostile.so;")
    command = [str(ROOT / "docker" / "entrypoint.sh"), "proxy"]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
    os.close(output)
    proxy = Started(process, address, ssl.create_default_context(cafile=files.authority), temporary)
    try:
        wait_until(proxy.refused, "the proxy")
        yield proxy
    finally:
        process.terminate()
        process.wait(20)


def output_of(kind: str, folder: Path) -> tuple[int, int]:
    """What is read, and what a program gets as its standard output and error."""
    if kind == "socket":  # of systemd's journal
        ours, theirs = socket.socketpair()
        return ours.detach(), theirs.detach()
    if kind == "pipe":  # of Docker
        return os.pipe()
    path = folder / "log"
    written = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    return os.open(path, os.O_RDONLY), written


@pytest.mark.parametrize("kind", ["socket", "pipe", "file"])
def test_the_proxy_logs_to_any_standard_output_reads_its_configuration_again_and_ends(
    kind: str, tmp_path: Path
) -> None:
    reading, writing = output_of(kind, tmp_path)
    with started(tmp_path, writing) as proxy:
        for _ in range(2):
            assert proxy.refused()
            proxy.process.send_signal(signal.SIGHUP)
            time.sleep(0.5)
        assert proxy.refused()
        proxy.process.terminate()
        assert proxy.process.wait(10) == 0
        wait_until(
            lambda: [path.name for path in proxy.temporary.iterdir()] == ["nginx.conf"], "its folder is removed", 10
        )
    with os.fdopen(reading) as lines:  # a socket and a pipe end when the last process of the proxy has ended
        text = lines.read()
    assert text.count(" 127.0.0.1 GET /refused 403") >= 4, text
    assert "emerg" not in text


def test_what_others_put_into_the_shared_folder_is_not_the_proxy_s_configuration(tmp_path: Path) -> None:
    with started(tmp_path, os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)) as proxy:
        (own,) = [path for path in proxy.temporary.iterdir() if path.is_dir()]
        assert (own / "nginx.conf").exists()
        assert own.stat().st_uid == os.getuid()
        assert stat.S_IMODE(own.stat().st_mode) & 0o066 == 0, "nobody else reads or writes it"
        assert (proxy.temporary / "nginx.conf").read_text() == "load_module /tmp/hostile.so;"


def test_a_proxy_that_is_told_to_end_with_all_of_its_service_ends_and_leaves_nothing(tmp_path: Path) -> None:
    """systemd sends SIGTERM to every process at once."""
    log = tmp_path / "log"
    with started(tmp_path, os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)) as proxy:
        os.killpg(proxy.process.pid, signal.SIGTERM)
        assert proxy.process.wait(10) == 0
        wait_until(
            lambda: [path.name for path in proxy.temporary.iterdir()] == ["nginx.conf"], "its folder is removed", 10
        )
