"""A SuperNode that meets an error ends, so that a restart policy starts it again."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.cables import Cable
from support.faults import wait_until
from support.federation import wait_until_ended
from support.logs import without_time

from client.resident.place import running_process, socket_of
from goldfinch.commands.deployment import LocalDeployment

pytestmark = [pytest.mark.processes, pytest.mark.long]

SECONDS = 60


@pytest.fixture
def hangs_up() -> Iterator[str]:
    """Address of a server that ends each connection in the middle of its TLS handshake."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.recv(1 << 16)  # all of it: with bytes left unread, the end of the connection would be a reset
            connection.close()

    threading.Thread(target=serve, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_a_cable_that_is_cut_ends_a_connection_that_is_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a connection would last, and the handshake below would never be tried."""
    connect = socket.create_connection
    with socket.create_server(("127.0.0.1", 0)) as server:
        cable = Cable(f"127.0.0.1:{server.getsockname()[1]}")

        def cut_meanwhile(target: tuple[str, int]) -> socket.socket:
            far = connect(target)
            cable.cut()
            return far

        monkeypatch.setattr(socket, "create_connection", cut_meanwhile)
        with connect(("127.0.0.1", int(cable.address.rpartition(":")[2])), timeout=20) as near:
            assert near.recv(1) == b""


def test_a_handshake_that_is_cut_ends_the_supernode(tmp_path: Path, hangs_up: str) -> None:
    """Flower's own program would go on, fetch no message, and say that it is healthy."""
    deployment = LocalDeployment(tmp_path, {"here": {"domain": "sketch"}})
    cable = Cable(deployment.address)
    deployment.node_address = cable.address
    try:
        with deployment:
            node = deployment.children["here"]
            wait_until(lambda: "SuperNode ID" in node.log.read_text(), "admission")
            own = running_process(node.process.pid)
            assert own is not None
            lock = socket_of(own).with_suffix(".lock")
            lock.touch()  # as a ClientApp of it does
            cable.cut()
            host, _, port = hangs_up.rpartition(":")
            cable.target = host, int(port)
            cable.mend()
            wait_until_ended([node], SECONDS)
            assert node.process.poll() == 1, node.tail()
            assert "the SuperNode failed, see above, and ends; start it again" in node.tail()
            assert not lock.exists()
            assert without_time(node.log.read_text().splitlines()) == []
    finally:
        cable.close()


def test_a_node_whose_superexec_is_killed_signs_off_and_ends(tmp_path: Path) -> None:
    """As the system does when memory runs out. Flower's own program would stay online and answer nothing."""
    with LocalDeployment(tmp_path, {"here": {"domain": "sketch"}}) as deployment:
        node = deployment.children["here"]
        wait_until(lambda: "SuperNode ID" in node.log.read_text(), "admission")
        for process in psutil.Process(node.process.pid).children():
            if any(Path(word).name == "flower-superexec" for word in process.cmdline()):
                process.kill()
        wait_until_ended([node], SECONDS)
        assert node.process.poll() == 1, node.tail()
        assert "flower-superexec has ended (-9), without which no message is answered" in node.tail()
        assert "and ends; start it again" in node.tail()
        again = deployment.start_node("here")
        wait_until(lambda: node.log.read_text().count("SuperNode ID") == 2, "admission at once, as it has signed off")
        assert again.process.poll() is None
