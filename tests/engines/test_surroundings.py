"""What a machine's environment has that would break a simulation: proxies, Ray's variables, long paths, blanks."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.proxies import no_proxy
from goldfinch.commands import doctor
from server.flower import submit
from server.flower.processes import Processes, flower_environment, free_port, wait_healthy
from server.flower.submit import check_ray


def test_a_proxy_is_not_asked_for_programs_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "intranet.example")
    monkeypatch.delenv("NO_PROXY", raising=False)
    found = flower_environment(tmp_path)
    assert found["http_proxy"] == "http://proxy.example:3128"
    assert found["no_proxy"] == "intranet.example,127.0.0.1,localhost,::1"
    assert found["NO_PROXY"] == "127.0.0.1,localhost,::1"
    assert no_proxy({"NO_PROXY": "fl.example.org"})["no_proxy"] == "fl.example.org,127.0.0.1,localhost,::1"


def test_a_program_s_health_is_not_asked_of_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Processes(tmp_path, tmp_path / "logs") as programs:
        port = free_port()
        command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
        wait_healthy(programs.start("server", command, dict(os.environ)), f"http://127.0.0.1:{port}/", 20)


def test_a_free_port_is_kept_for_the_server_that_starts_next() -> None:
    """A SuperLink takes seconds to listen, in which another program would be given the port."""
    address = ("127.0.0.1", free_port())
    with socket.socket() as program, pytest.raises(OSError, match="in use"):
        program.bind(address)
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen()


def test_a_simulation_does_not_join_the_cluster_of_another_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert "RAY_ADDRESS" not in flower_environment(tmp_path)
    assert "engine.address=auto joins 10.0.0.1:6379" in doctor._ray()[0].result


@pytest.mark.parametrize(("length", "moved"), [(10, False), (110, True)])
def test_ray_s_sockets_stay_within_the_system_s_limit(
    length: int, moved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/" + "t" * length)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    assert ("RAY_TMPDIR" in flower_environment(tmp_path)) == moved
    monkeypatch.setenv("RAY_TMPDIR", "/" + "r" * length)
    assert (flower_environment(tmp_path)["RAY_TMPDIR"] == "/tmp") == moved


def test_an_environment_below_a_blank_is_refused_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my house"
    folder.mkdir()
    monkeypatch.setattr(sys, "prefix", str(folder))
    with pytest.raises(ConfigError, match=r"my house.*make setup.*engine=inline"):
        check_ray()
    assert [finding.state for finding in doctor._ray()] == [doctor.NOTE]
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "link"))
    with pytest.raises(ConfigError, match="my house"):
        check_ray()


def test_the_programs_of_an_environment_behind_a_link_are_called_by_its_own_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tmp_path / "real" / "bin"
    real.mkdir(parents=True)
    (tmp_path / "my house").symlink_to(tmp_path / "real")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "my house" / "bin" / "python"))
    assert flower_environment(tmp_path)["PATH"].split(os.pathsep)[0] == str(real)


def test_a_machine_without_ray_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"engine=ray needs Ray: .*\[simulation\].*engine=inline"):
        submit.check_ray()


def test_doctor_says_that_a_service_s_user_cannot_start_this_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "closed" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.touch()
    (tmp_path / "closed").chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    found = doctor._interpreter()
    assert found.state == doctor.NOTE
    assert "other users of this machine cannot enter" in found.result


def test_doctor_looks_up_no_server_that_nobody_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "connections", lambda _: {"supergrid": "api.flower.ai:443"})
    monkeypatch.setattr("socket.create_connection", lambda *_, **__: pytest.fail("a call outward"))
    assert doctor._connections() == []


def test_a_device_without_the_extras_of_servers_is_whole() -> None:
    assert doctor._package("finch-clust", {}).state == doctor.NOTE
    assert "[clustering]" in doctor._package("finch-clust", {}).remedy
    assert doctor._package("torch", {}).state == doctor.FAIL
