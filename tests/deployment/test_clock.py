"""Devices with a wrong clock: Flower refuses them without a message, ``goldfinch doctor`` names the reason."""

from __future__ import annotations

import http.server
import re
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.faults import wait_until
from support.federation import ROOT, wait_until_ended

from common.errors import EngineError
from goldfinch.cli import main
from goldfinch.commands.deployment import LocalDeployment
from goldfinch.commands.doctor import clock_difference, what_is_wrong
from server.admission import certificates
from server.admission.certificates import Certificates, ensure
from server.flower.processes import flower_environment, program

CLOCKS = {"ahead": 3600, "behind": -3600, "late": -120}
"""Seconds; the last is within what Flower lets in."""


class Answering(http.server.BaseHTTPRequestHandler):
    status, timely = 200, True

    def do_GET(self) -> None:  # the library's name
        self.send_response_only(self.status)
        if self.timely:
            self.send_header("Date", self.date_time_string())
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Answering, "status", 200)
    monkeypatch.setattr(Answering, "timely", True)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("seconds", [0, 3600, -3600, 5.9, -301])
def test_the_difference_is_known_to_some_seconds(server: str, seconds: float) -> None:
    found = clock_difference(server, None, lambda: datetime.now(UTC) + timedelta(seconds=seconds))
    assert found == pytest.approx(seconds, abs=3)  # to a second where nothing else runs


def test_what_keeps_a_device_out() -> None:
    assert what_is_wrong(5) is None
    assert what_is_wrong(-300) is None
    assert "3,600 s ahead of the server's clock" in str(what_is_wrong(3600))
    assert "301 s behind the server's clock" in str(what_is_wrong(-301))


def test_a_server_that_is_none_is_named(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--server", server]) == 0
    assert "it admits a device whose key is enrolled" in capsys.readouterr().out
    monkeypatch.setattr(Answering, "timely", False)
    with pytest.raises(EngineError, match="sends no time"):
        clock_difference(server, None)
    monkeypatch.setattr(Answering, "status", 404)
    assert main(["doctor", "--server", server]) == 1
    assert "answers 404" in capsys.readouterr().out
    with pytest.raises(EngineError, match=r"--ca .*no certificate can be read"):
        clock_difference(server, tmp_path / "ca.crt")
    with pytest.raises(EngineError, match="not a host:"):
        clock_difference("not a host:port", None)


@pytest.fixture
def secure_server(server: str, tmp_path: Path) -> Iterator[str]:
    """Another server, with TLS; its authority is below ``keys``."""
    ensure(tmp_path / "keys", [])
    with secure(Certificates(tmp_path / "keys")) as address:
        yield address


@contextmanager
def secure(files: Certificates) -> Iterator[str]:
    """The address of a server with TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.server, files.server_key)
    other = http.server.ThreadingHTTPServer(("", 0), Answering)  # 127.0.0.2, too, which the certificate lacks
    other.socket = context.wrap_socket(other.socket, server_side=True)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{other.server_port}"
    other.shutdown()
    other.server_close()


def test_each_failure_names_its_way_on_and_obeyed_it_ends(
    server: str,
    secure_server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    authority = tmp_path / "keys" / "authority" / "ca.crt"
    ensure(tmp_path / "others", [])
    theirs, key = tmp_path / "others" / "authority" / "ca.crt", tmp_path / "keys" / "server" / "server.key"

    def said(*words: object) -> str:
        assert main(["doctor", "--server", *map(str, words)]) == 1
        return capsys.readouterr().out

    assert "start the SuperLink or its proxy there" in said("127.0.0.1:1", "--ca", authority)
    assert "leave --ca out" in said(server, "--ca", authority)
    assert "--ca FILE" in said(secure_server)
    assert "give this device the federation's ca.crt" in said(secure_server, "--ca", theirs)
    other_name = secure_server.replace("127.0.0.1", "127.0.0.2")
    assert "devices certificates with every --host NAME" in said(other_name, "--ca", authority)
    assert "correct HOST, or this machine's DNS" in said("nowhere.invalid:1", "--ca", authority)
    assert "nodes/, and in its kit" in said(secure_server, "--ca", key)
    assert "nodes/, and in its kit" in said(secure_server, "--ca", tmp_path / "nothing")
    for status, words in ((412, "--ca FILE"), (502, "SuperLink behind it does not"), (404, "correct HOST:PORT")):
        monkeypatch.setattr(Answering, "status", status)
        assert words in said(server)
    monkeypatch.setattr(Answering, "status", 502)
    assert "or with a certificate that has ended: start it, restart it after a renewal" in said(server)
    monkeypatch.setattr(Answering, "status", 412)
    assert "neither a SuperLink nor its proxy" in said(secure_server, "--ca", authority)
    monkeypatch.setattr(Answering, "status", 200)
    assert main(["doctor", "--server", server]) == 0
    assert main(["doctor", "--server", secure_server, "--ca", str(authority)]) == 0
    assert main(["doctor", "--server", secure_server, "--ca", str(tmp_path / "keys" / "operator" / "ca.crt")]) == 0


def test_a_proxy_is_named_only_where_it_is_asked(
    server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The words that the message gives lead past the proxy."""
    for name in ("no_proxy", "NO_PROXY", "all_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://user:secret@127.0.0.1:1")
    assert main(["doctor", "--server", server]) == 1
    shown = capsys.readouterr().out
    assert "(by the proxy 127.0.0.1:1 of http_proxy or all_proxy; no_proxy=127.0.0.1 leaves it out)" in shown
    assert "secret" not in shown
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert main(["doctor", "--server", server]) == 0
    assert main(["doctor", "--server", "127.0.0.1:1"]) == 1
    assert "proxy" not in capsys.readouterr().out.replace("or its proxy", "")


def test_an_ended_certificate_is_renewed_by_what_doctor_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ensure(tmp_path, ["127.0.0.1"])
    files = Certificates(tmp_path)
    certificates._make_server(files, ["127.0.0.1"], -0.01)  # type: ignore[arg-type]  # a part of a day
    with secure(files) as address:
        assert main(["doctor", "--server", address, "--ca", str(files.authority)]) == 1
    assert "-> goldfinch devices certificates, where the authority is kept; or set" in capsys.readouterr().out
    assert main(["devices", "certificates", str(tmp_path)]) == 0
    with secure(files) as address:
        assert main(["doctor", "--server", address, "--ca", str(files.authority)]) == 0


@pytest.mark.parametrize(
    "address", ["fl.example.org", "localhost:", "localhost:99999", "http://localhost:1", "a:b", "::1:1"]
)
def test_an_address_without_a_port_is_refused_before_anything_is_asked(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--server", address]) == 1
    assert f"--server {address} is not HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--ca", "file"], ["server=HOST:PORT"]], ids=["ca", "setting"])
def test_doctor_takes_no_other_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) != 0
    assert "--server HOST:PORT" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.long
def test_devices_with_a_wrong_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module").mkdir()
    (tmp_path / "module" / "sitecustomize.py").write_bytes(
        (ROOT / "tests" / "support" / "skewed_clock.py").read_bytes()
    )
    with LocalDeployment(tmp_path / "flower", {}) as deployment:
        ensure(deployment.certificates.folder, [], list(CLOCKS))
        deployment.enrolment.enrol(list(CLOCKS))
        deployment.nodes = {name: {"domain": "printed"} for name in CLOCKS}
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'module'}:{ROOT}")
        results = {}
        for name, seconds in CLOCKS.items():
            monkeypatch.setenv("SKEWED_BY", str(seconds))
            deployment.start_node(name)
            authority = deployment.certificates.node(name) / "ca.crt"
            command = [program("goldfinch"), "doctor", "--server", deployment.address, "--ca", str(authority)]
            environment = flower_environment(tmp_path / name)
            results[name] = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        wait_until_ended([deployment.children["ahead"], deployment.children["behind"]], 60)
        wait_until(lambda: "SuperNode ID:" in deployment.children["late"].log.read_text(), "the late node's entry", 60)
        for name in ("ahead", "behind"):
            assert deployment.children[name].process.poll() is not None
            assert "SuperNode ID:" not in deployment.children[name].log.read_text()
            assert results[name].returncode == 1
    # The question itself takes time on a busy machine, and the answer is only known to about a second.
    for name in ("ahead", "behind"):
        figure = re.search(rf"([\d,]+) s {name}(?: of)? the server's clock", results[name].stdout)
        assert figure is not None, results[name].stdout
        assert int(figure[1].replace(",", "")) == pytest.approx(3600, abs=30)
    assert "timedatectl" in results["ahead"].stdout
    assert results["late"].returncode == 0, results["late"].stdout + results["late"].stderr
    assert re.search(r"certificate +valid for \d+ days", results["late"].stdout), results["late"].stdout
