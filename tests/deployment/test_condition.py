"""What a SuperNode shows of itself: a file of numbers, the health check that reads it, and systemd's notifications."""

from __future__ import annotations

import http.server
import json
import math
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.proto.error_pb2 import Error
from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest
from flwr.proto.message_pb2 import Message
from support.federation import ROOT
from support.gauges import read_gauges

from client.condition import Condition, condition_of, notify, state_folder
from client.ledger import Budget, Ledger
from client.supernode import _condition, _note_replies, _note_requests
from common.accounting import epsilon
from common.errors import ConfigError
from common.gauges import gauge
from goldfinch.cli import main
from server.admission.certificates import Certificates, ensure


def health(path: Path) -> int:
    script = str(ROOT / "docker" / "health.py")
    return subprocess.run([sys.executable, "-IS", script, str(path)], timeout=60, check=False).returncode


def test_a_node_is_healthy_with_a_recent_heartbeat_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.prom"
    condition = Condition(path)
    assert health(path) == 1, "no file yet"
    condition.write()
    assert health(path) == 1, "no heartbeat yet"
    condition.note_heartbeat()
    condition.write()
    assert health(path) == 0
    name = "goldfinch_last_heartbeat_timestamp_seconds"
    for seconds, unhealthy in ((-61, 1), (2, 0), (60, 1)):  # a clock that was set back leaves one in the future
        path.write_text(f"# HELP {name} When.\n{name} {time.time() + seconds:.17g}\n")
        assert health(path) == unhealthy, seconds


def test_the_file_has_replies_releases_and_what_its_limit_left(tmp_path: Path) -> None:
    for domain, count in (("ward-a", 2), ("ward-b", 1)):
        ledger = tmp_path / ".privacy" / domain / "ledger.json"
        ledger.parent.mkdir(parents=True)
        ledger.write_text(json.dumps({"releases": [{"run": "1", "client": "a", "multipliers": {}, "count": count}]}))
    (tmp_path / ".privacy" / "damaged").mkdir()
    (tmp_path / ".privacy" / "damaged" / "ledger.json").write_text('{"releases": [{"count": 1}]}')
    configuration = {"state-dir": str(tmp_path), "privacy-max-releases": 10}
    condition = condition_of(configuration, tmp_path / "metrics.prom", "", None)
    condition.note_reply()
    condition.write()
    found = read_gauges(tmp_path / "metrics.prom")
    assert found["replies"] == 1
    assert {name: number for name, number in found.items() if name.startswith("privacy")} == {
        'privacy_releases{data="ward-a"}': 2,
        'privacy_releases{data="ward-b"}': 1,
        'privacy_releases_left{data="ward-a"}': 8,
        'privacy_releases_left{data="ward-b"}': 9,
    }
    assert found["disk_free_bytes"] > 0
    assert found["last_reply_timestamp_seconds"] == pytest.approx(time.time(), abs=60)
    assert "last_heartbeat_timestamp_seconds" not in found


def test_the_file_has_epsilon_used_and_left_of_the_device_s_own_budget(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    own = {"state-dir": str(tmp_path), "privacy-max-epsilon": 8, "privacy-delta": 1e-6}
    ledger = Ledger(tmp_path / ".privacy" / "ward-a", Budget(max_epsilon=8.0, delta=1e-6))
    for _ in range(2):
        ledger.spend("1", "ward-a-0", {"update": 5.0}, [ledger.budget])
    Ledger(tmp_path / ".privacy" / "bare").spend("1", "ward-a-0", {"update": 0.0}, [])
    expected = epsilon([5.0], 2, 1e-6)
    assert 0 < expected < 8

    def found_with(**more: object) -> dict[str, float]:
        condition_of({**own, **more}, tmp_path / "metrics.prom", "", None).write()
        return read_gauges(tmp_path / "metrics.prom")

    found = found_with()
    assert found['privacy_epsilon{data="ward-a"}'] == pytest.approx(expected)
    assert found['privacy_epsilon_left{data="ward-a"}'] == pytest.approx(8 - expected)
    assert found['privacy_epsilon{data="bare"}'] == math.inf
    assert found['privacy_epsilon_left{data="bare"}'] == 0
    assert 'privacy_epsilon{data="ward-a"}' not in found_with(**{"privacy-delta": 1e-5}), "not known at this delta"
    assert not [name for name in found_with(**{"privacy-max-epsilon": None}) if "epsilon" in name]


def test_requests_without_a_reply_are_counted_until_one_is_taken(tmp_path: Path) -> None:
    """The server's answers go through the functions by which a SuperNode notes them."""
    condition = Condition(tmp_path / "metrics.prom")
    request = PullMessagesResponse(messages_list=[Message()])
    nothing = PullMessagesResponse()
    good, bad = (PushMessagesRequest(messages_list=[message]) for message in (Message(), Message(error=Error(code=1))))
    counts = []
    for step in (nothing, request, request, nothing, request, bad, request, good, request):
        if isinstance(step, PushMessagesRequest):
            _note_replies(condition, step, None)
        else:
            _note_requests(condition, None, step)
        condition.write()
        counts.append(read_gauges(condition.path or tmp_path)["missed_requests"])
    assert counts == [0, 0, 1, 1, 2, 3, 3, 0, 0]


def test_labels_are_escaped_and_what_is_not_known_is_left_out() -> None:
    assert gauge("device_online", "Is it.", {'a"b\\': True, "c": None}, "device") == [
        "# HELP goldfinch_device_online Is it.",
        "# TYPE goldfinch_device_online gauge",
        'goldfinch_device_online{device="a\\"b\\\\"} 1',
    ]
    assert gauge("replies", "How many.", {"": 3}) == [
        "# HELP goldfinch_replies How many.",
        "# TYPE goldfinch_replies gauge",
        "goldfinch_replies 3",
    ]
    assert gauge("replies", "How many.", {"": None}) == []


def test_the_file_is_replaced_whole_and_others_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.prom"
    path.write_text("of before")
    Condition(path).write()
    assert "of before" not in path.read_text()
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.prom"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_systemd_is_told_of_the_first_heartbeat_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        condition = Condition()
        assert condition.status() == "no contact with the server yet"
        condition.note_heartbeat()
        condition.note_heartbeat()
        notify(f"STATUS={condition.status()}")
        assert systemd.recv(100) == b"READY=1"
        assert systemd.recv(100) == b"STATUS=in contact with the server; 0 replies sent"


class Answering(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:  # the library's name
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(params=[20, 365])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[int, str, Path]]:
    """A server with TLS: the days of its certificate, its address, and the authority's certificate."""
    files = Certificates(tmp_path)
    ensure(tmp_path, [], days=request.param)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.server, files.server_key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield request.param, f"127.0.0.1:{server.server_port}", files.authority
    server.shutdown()
    server.server_close()


def test_doctor_and_device_warn_before_the_certificate_ends(
    served: tuple[int, str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    days, address, authority = served
    code = main(["doctor", "--server", address, "--ca", str(authority)])
    output = capsys.readouterr().out
    if days < 30:
        assert code == 3
        assert "SOON  certificate        ends in 19 days" in output
        assert "goldfinch devices certificates" in output
        assert "the proxy loads the new server/ by itself; then restart the SuperLink" in output
    else:
        assert code == 0
        assert "ok  certificate        valid for 364 days" in output
    condition = Condition(tmp_path / "metrics.prom", address, authority)
    condition.write()
    found = read_gauges(tmp_path / "metrics.prom")
    assert found["certificate_days"] == pytest.approx(days, abs=0.1)


LIMIT = "privacy-max-epsilon=8.0"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([f"domain='a' {LIMIT.replace('=', ' = ')}"], "'privacy-max-epsilon = 8.0' is no key=value"),
        ([f"{LIMIT.replace('=', '= ')} domain='a'"], "'privacy-max-epsilon= 8.0' is no key=value"),
        ([f"domain='a' {LIMIT.replace('=', ': ')}"], "'privacy-max-epsilon: 8.0' is no key=value"),
        (["domain='ward a'b"], "'b' is no key=value"),
        ([LIMIT, "domain='a'"], "the last of several --node-config: write all keys into one"),
        (["state-dir='here'"], "state-dir must be a whole path"),
        (["index=01"], "invalid format"),
        (["absent.toml"], "No such file"),
    ],
)
def test_no_limit_of_a_device_is_passed_over(given: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower drops what it cannot read, and the device would take part without its limit."""
    words = ["goldfinch-supernode"]
    for each in given:
        words += ["--node-config", each]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit, match=re.escape(message)):
        _condition()


def test_keys_over_several_lines_and_a_file_of_them_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "node.toml"
    path.write_text("privacy-max-epsilon = 8.0\n")
    for text in (str(path), f'domain="ward a"  data-path="list.csv"\n  {LIMIT}'):
        for option in ("--node-config", "--node-conf"):  # Flower takes abbreviations
            monkeypatch.setattr("sys.argv", ["goldfinch-supernode", option, text])
            assert _condition().max_epsilon == 8.0


@pytest.mark.parametrize("name", ["FLWR_HOME", "HOME"])
def test_a_home_that_changes_with_the_working_folder_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started in another folder, the node would find no ledger."""
    monkeypatch.delenv("FLWR_HOME", raising=False)
    monkeypatch.setenv(name, "here")
    with pytest.raises(ConfigError, match=rf"{name}.* must be a whole path, from / on; got 'here/"):
        state_folder({})
    assert state_folder({"state-dir": "/srv/state"}) == Path("/srv/state")


def test_the_budget_is_read_where_the_node_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node configuration without state-dir keeps its ledger in Flower's folder."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    condition = condition_of({"privacy-max-releases": 5}, None, "", None)
    folder = state_folder({})
    assert condition.state == folder == tmp_path / "goldfinch-state"
    Ledger(folder / ".privacy" / "bright", Budget(5)).spend("one", "bright-0", {"weights": 1.0}, [])
    assert 'goldfinch_privacy_releases_left{data="bright"} 4' in "\n".join(condition.lines())


def test_an_empty_name_of_the_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["goldfinch-supernode", "--metrics", ""])
    with pytest.raises(SystemExit, match="name a file"):
        _condition()
