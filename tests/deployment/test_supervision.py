"""The ClientApps of a SuperNode are supervised: programs that stand in for them, and claims that a test controls."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
from flwr.common.constant import HEARTBEAT_CALL_TIMEOUT, Status
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest, SendNodeHeartbeatResponse
from flwr.proto.message_pb2 import PushObjectRequest, PushObjectResponse
from support.faults import wait_until
from support.federation import ROOT

from client.supernode import ANSWER_SECONDS, SLOWEST_LINK, PatientClient
from client.supervision import Supervisor


@dataclass
class Claims:
    """Claims by token; notes which were extended."""

    tasks: dict[str, SimpleNamespace] = field(default_factory=dict)
    extended: list[int] = field(default_factory=list)

    def get_task_by_token(self, token: str) -> SimpleNamespace | None:
        return self.tasks.get(token)

    def acknowledge_task_heartbeat(self, task_id: int) -> bool:
        self.extended.append(task_id)
        return True


def task(status: str, running_at: str = "") -> SimpleNamespace:
    return SimpleNamespace(task_id=7, status=SimpleNamespace(status=status), running_at=running_at)


@dataclass
class Apps:
    """Starts programs as Flower's SuperExec starts ClientApps."""

    folder: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, token: str, *, stubborn: bool = False) -> subprocess.Popen[bytes]:
        """Start one that sleeps, and ignores SIGTERM if it is stubborn."""
        program = self.folder / "flwr-clientapp"
        ready = self.folder / f"{token}.ready"
        lines = ["import pathlib, signal, sys, time"]
        if stubborn:
            lines.append("signal.signal(signal.SIGTERM, signal.SIG_IGN)")
        lines += [f"pathlib.Path({str(ready)!r}).touch()", "time.sleep(120)"]
        program.write_text("\n".join(lines))
        process = subprocess.Popen([sys.executable, program, "--insecure", "--token", token])
        self.started.append(process)
        wait_until(ready.exists, "the start")
        return process


@pytest.fixture
def apps(tmp_path: Path) -> Iterator[Apps]:
    started = Apps(tmp_path)
    yield started
    for process in started.started:
        process.kill()
        process.wait()


def test_the_claim_of_a_clientapp_that_starts_is_extended_and_it_lives(apps: Apps) -> None:
    claims = Claims({"one": task(Status.STARTING)})
    process = apps.start("one")
    supervisor = Supervisor(lambda: claims, leave_seconds=0.0)
    for _ in range(3):
        supervisor.check()
    assert claims.extended == [7, 7, 7]
    assert process.poll() is None


def test_a_clientapp_whose_token_has_expired_is_ended(apps: Apps, capsys: pytest.CaptureFixture[str]) -> None:
    claims = Claims()
    process = apps.start("expired")
    patient = Supervisor(lambda: claims, leave_seconds=60.0)
    patient.check()
    assert process.poll() is None, "it has time to end by itself"
    Supervisor(lambda: claims, leave_seconds=0.0).check()
    assert process.wait(30) == -15
    assert capsys.readouterr().err.count(f"ending ClientApp {process.pid}, whose token has expired") == 1


def test_a_clientapp_that_ignores_sigterm_is_killed(apps: Apps, monkeypatch: pytest.MonkeyPatch) -> None:
    process = apps.start("stubborn", stubborn=True)
    monkeypatch.setattr("client.supervision.TERM_SECONDS", 0.2)
    supervisor = Supervisor(Claims, leave_seconds=0.0)
    supervisor.check()
    assert process.poll() is None
    time.sleep(0.3)
    supervisor.check()
    assert process.wait(30) == -9


def test_a_clientapp_that_never_starts_is_ended_so_that_another_can_start(apps: Apps) -> None:
    claims = Claims({"one": task(Status.STARTING)})
    process = apps.start("one")
    Supervisor(lambda: claims, start_seconds=0.0).check()
    assert process.wait(30) == -15
    assert claims.extended == []


@pytest.mark.parametrize(("seconds", "times"), [(75, 1), (3, 0)])
def test_a_slow_start_is_measured_and_said_once(
    apps: Apps, capsys: pytest.CaptureFixture[str], seconds: float, times: int
) -> None:
    claims = Claims()
    supervisor = Supervisor(lambda: claims)
    for token in ("one", "two"):
        process = apps.start(token)
        began = datetime.fromtimestamp(psutil.Process(process.pid).create_time(), UTC) + timedelta(seconds=seconds)
        claims.tasks[token] = task(Status.RUNNING, began.isoformat())
        supervisor.check()
    assert supervisor.slowest_start == pytest.approx(seconds)
    assert capsys.readouterr().err.count("took 75 s to start") == times


def test_a_superexec_that_has_ended_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    """At the second check: a signal that ends it may be meant for the node, too."""
    lost: list[int] = []
    supervisor = Supervisor(lambda: None, lambda: lost.append(1))
    supervisor.check()
    supervisor.start_superexec(["sleep", "60"])
    process = supervisor.superexec
    assert process is not None
    supervisor.check()
    supervisor.check()
    assert lost == []
    process.kill()
    process.wait()
    counts = []
    for _ in range(4):
        supervisor.check()
        counts.append(len(lost))
    assert counts == [0, 1, 1, 1]
    assert capsys.readouterr().err.count("flower-superexec has ended (-9), without which no message is answered") == 1


def test_other_children_and_a_supernode_without_state_are_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        Supervisor(Claims, leave_seconds=0.0).check()
        Supervisor(lambda: None, leave_seconds=0.0).check()
        assert process.poll() is None
        process.kill()


def test_everything_that_a_supernode_started_ends_with_it(tmp_path: Path) -> None:
    """A child, a stubborn grandchild, and a resident trainer whose starter has ended."""
    program = tmp_path / "node.py"
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True)"
    program.write_text(
        textwrap.dedent(f"""
        import os, subprocess, sys
        from client.supervision import end_processes
        stubborn = subprocess.Popen(
            ["sh", "-c", '"$0" -c "$1; time.sleep(120)"; true', sys.executable, {stubborn!r}], stdout=subprocess.PIPE)
        stubborn.stdout.readline()
        orphan = [sys.executable, "-c", "import time; time.sleep(120)", "client.resident", "socket", str(os.getpid())]
        start = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL).pid)"
        trainer = subprocess.run([sys.executable, "-c", start, *orphan], stdout=subprocess.PIPE, text=True).stdout
        another = orphan[:-1] + ["1", "2.5", "sha", str(os.getpid())]  # another node's, with idle seconds
        others = subprocess.run([sys.executable, "-c", start, *another], stdout=subprocess.PIPE, text=True).stdout
        print(stubborn.pid, trainer, flush=True)
        import psutil
        processes = [psutil.Process(int(trainer)), *psutil.Process().children(recursive=True)]
        assert len(processes) == 3, processes
        end_processes(seconds=1.0)
        gone, alive = psutil.wait_procs(processes, timeout=30)
        assert psutil.Process(int(others)).status() != psutil.STATUS_ZOMBIE
        psutil.Process(int(others)).kill()
        sys.exit(len(alive))
        """)
    )
    assert (
        subprocess.run([sys.executable, program], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, timeout=120).returncode == 0
    )


REFUSED = """
import os, signal, sys, threading, time
from flwr.supercore.telemetry import EventType
from flwr.supernode import start_client_internal as node
from client import supernode

def refused(seconds):
    for pause in seconds:  # each thread that is answered 401 does this
        time.sleep(pause)
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1000)

def flower_supernode():
    if {registers}:
        node.register_signal_handlers(EventType.RUN_SUPERNODE_LEAVE)
    threading.Thread(target=refused, args=({pauses},)).start()
    time.sleep(1000)

def slow_end(**_):
    time.sleep(2)

sys.argv = ["goldfinch-supernode"]
supernode.flower_supernode = flower_supernode
supernode.end_processes = slow_end
supernode.main()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("registers", "pauses", "status"),
    [(True, (0.2, 0.5, 0.5), 0), (True, (0.2, *[0.0] * 2000), 0), (False, (0.2,), 1)],
    ids=["while it ends", "at once", "before Flower takes signals"],
)
def test_a_supernode_that_several_threads_interrupt_ends(
    registers: bool, pauses: tuple[float, ...], status: int
) -> None:
    """Threads that wait for a server never end by themselves, and such a process would take no message again."""
    code = REFUSED.format(registers=registers, pauses=pauses)
    environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0"}
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, timeout=60)
    assert ended.returncode == status, ended.stderr.decode()


BEGINNING = """
import os, sys, time
from flwr.supernode import start_client_internal as node
from client import supernode

def failed():
    {does}

sys.argv = ["goldfinch-supernode", *{words}]
supernode.flower_supernode = failed
supernode.main()
"""

LONELY = """node.register_signal_handlers("")
    node.subprocess.Popen(["sh", "-c", "sleep 3"])
    time.sleep(60)"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("does", "words", "said", "again"),
    [
        (
            "open('/nope/key')",
            [],
            "begin: [Errno 2] No such file or directory: '/nope/key'; correct the command",
            False,
        ),
        ("raise RuntimeError('two\\nlines.')", [], "cannot begin: two lines; correct the command line", False),
        ("return", [], "the SuperNode failed, see above", True),
        (LONELY, [], "flower-superexec has ended (0)", True),
        ("return", ["--node-config", "domain=ward-a"], "error: --node-config domain=ward-a: The provided conf", False),
        ("return", ["--node-config", "/nope/x.toml"], "error: --node-config /nope/x.toml: [Errno 2] No such", False),
        ("sys.exit(int('no_proxy' not in os.environ))", [], "", False),
    ],
    ids=["file", "lines", "later", "superexec", "quotes", "toml", "proxy"],
)
def test_a_supernode_that_cannot_begin_is_not_to_be_started_again(
    does: str, words: list[str], said: str, again: bool
) -> None:
    """Only one that fails after it has begun is; and it says why in one line."""
    code = BEGINNING.format(does=does, words=words)
    environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "http_proxy": "http://127.0.0.1:1"}
    environment.pop("no_proxy", None)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, timeout=60)
    error = done.stderr.decode()
    assert done.returncode == int(bool(said)), error
    assert said in error
    assert ("start it again" in error) == again
    assert "Traceback" not in error


def test_a_call_has_the_time_that_its_own_bytes_take_on_a_slow_link() -> None:
    given: list[dict[str, float]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        given.append(request.extensions["timeout"])
        kinds = {"push-object": PushObjectResponse(), "send-node-heartbeat": SendNodeHeartbeatResponse()}
        return httpx.Response(200, content=kinds[request.url.path.rpartition("/")[2]].SerializeToString())

    client = PatientClient("http://server")
    client._client = httpx.Client(transport=httpx.MockTransport(answer), timeout=30.0)
    for size in (0, 600_000):
        client.PushObject(PushObjectRequest(object_content=bytes(size)))
    client.SendNodeHeartbeat(SendNodeHeartbeatRequest())
    small, large, heartbeat = given
    assert small == pytest.approx(dict.fromkeys(("connect", "pool", "read", "write"), ANSWER_SECONDS))
    assert large["connect"] == ANSWER_SECONDS
    assert large["read"] == large["write"] >= ANSWER_SECONDS + 600_000 / SLOWEST_LINK
    assert set(heartbeat.values()) == {HEARTBEAT_CALL_TIMEOUT}
