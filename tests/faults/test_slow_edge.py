"""Devices at the slow edge: a slow start of ClientApps, a certificate that ends, a full disk, two runs.

Each says what is wrong, and keeps what was done.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.faults import events, node_log, small_disk, started_by, wait_until

from common.errors import EngineError
from common.settings import load_settings
from goldfinch.commands.deployment import CONNECTION, LocalDeployment
from goldfinch.record import RunRecord
from server.admission.certificates import Certificates, ensure
from server.flower.processes import answer_in, ask_flower, flower_environment

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(1800)]

START_SECONDS = float(os.environ.get("GOLDFINCH_START", "40"))
"""Seconds by which each ClientApp's start is delayed: more than the 30 that Flower waits."""

SLOW_START = """
import os, sys, time
if any(os.path.basename(word) == "flwr-clientapp" for word in sys.orig_argv[:4]):
    time.sleep({seconds})
"""


def run_words(output: Path, *more: str) -> list[str]:
    words = ["method=fedavg", "data=glyphs", "data.domains=[sketch]", "protocol.samples=24", "model=small"]
    words += ["train.device=cpu", "train.rounds=1", "train.local_steps=1", "rounds.test_samples=8"]
    return [*words, "rounds.registration=300", f"output={output}", *more]


@pytest.fixture
def slow_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ClientApp that is started from now on starts slowly."""
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SLOW_START.format(seconds=START_SECONDS))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))


def test_a_clientapp_that_starts_slowly_is_the_only_one_and_its_device_takes_part(
    tmp_path: Path, slow_start: None
) -> None:
    deployment = LocalDeployment(tmp_path / "deployment", {"sketch-0": {"domain": "sketch"}})
    most, ended = 0, threading.Event()

    def count() -> None:
        nonlocal most
        while not ended.wait(0.5):
            apps = [words for words in started_by(deployment, "sketch-0").values() if "flwr-clientapp" in words]
            most = max(most, len(apps))

    with deployment:
        watcher = threading.Thread(target=count)
        watcher.start()
        try:
            deployment.run(load_settings(run_words(tmp_path / "run")))
        finally:
            ended.set()
            watcher.join()
        assert most == 1
        log = node_log(deployment, "sketch-0")
        assert "authentication failed" not in log
        assert log.count("s to start; every message to this device takes that much longer") == 1
        (slow,) = events(tmp_path / "run", "client starts slowly")
        assert slow["client"] == "sketch-0"
        (registered,) = events(tmp_path / "run", "registered")
        assert registered["start_seconds"] >= START_SECONDS
        assert [line["status"] for line in RunRecord(tmp_path / "run").replies] == ["trained", "scored"]


def test_sigterm_ends_a_node_and_the_clientapp_that_is_still_starting(tmp_path: Path, slow_start: None) -> None:
    deployment = LocalDeployment(tmp_path / "deployment", {"sketch-0": {"domain": "sketch"}})
    with deployment:
        thread = threading.Thread(target=_try_run, args=[deployment, tmp_path / "run"])
        thread.start()
        wait_until(lambda: any("flwr-clientapp" in each for each in started_by(deployment, "sketch-0").values()), "it")
        processes = [psutil.Process(each) for each in started_by(deployment, "sketch-0")]
        assert len(processes) >= 3
        began = time.monotonic()
        deployment.children["sketch-0"].process.terminate()
        deployment.children["sketch-0"].process.wait(60)
        _, alive = psutil.wait_procs(processes, timeout=30)
        print(f"\n{len(processes)} processes ended within {time.monotonic() - began:.1f} s")
        assert alive == []
        deployment.processes.stop()
        thread.join(120)


def _try_run(deployment: LocalDeployment, output: Path) -> None:
    with pytest.raises(EngineError):
        deployment.run(load_settings(run_words(output)))


def test_a_certificate_that_ends_is_said_before_and_named_after(tmp_path: Path) -> None:
    """The device's own numbers tell the days; a node that starts after the end names the reason."""
    deployment = LocalDeployment(tmp_path / "deployment", {"sketch-0": {"domain": "sketch"}})
    files = Certificates(tmp_path / "deployment" / "certificates")
    ensure(files.folder, [], ["sketch-0"], days=365)
    shutil.rmtree(files.server.parent)
    ensure(files.folder, [], ["sketch-0"], days=31)
    with deployment:
        path = tmp_path / "deployment" / "nodes" / "sketch-0" / "metrics.prom"
        text = wait_until(lambda: path.exists() and "certificate_days" in path.read_text() and path.read_text(), "days")
        days = [float(line.split()[1]) for line in text.splitlines() if line.startswith("goldfinch_certificate_days")]
        assert days == [pytest.approx(31, abs=0.1)]


def test_of_two_runs_at_once_one_is_stopped_and_the_other_is_whole(tmp_path: Path) -> None:
    deployment = LocalDeployment(tmp_path / "deployment", {"sketch-0": {"domain": "sketch"}})
    errors: list[Exception] = []

    def hold(output: Path) -> None:
        try:
            deployment.run(load_settings(run_words(output, "train.rounds=4")))
        except EngineError as error:
            errors.append(error)

    environment = flower_environment(deployment.home)
    with deployment:
        first = threading.Thread(target=hold, args=[tmp_path / "first"])
        first.start()
        wait_until(lambda: events(tmp_path / "first", "start"), "the first run")

        def listed() -> list[dict[str, Any]]:
            return list(answer_in(ask_flower(["list", CONNECTION], environment, tmp_path).stdout, "no list")["runs"])

        known = {str(run["run-id"]) for run in listed()}
        second = threading.Thread(target=hold, args=[tmp_path / "second"])
        second.start()
        wait_until(lambda: len(listed()) == 2, "the second run")
        (other,) = {str(run["run-id"]) for run in listed()} - known
        stopped = ask_flower(["stop", other, CONNECTION], environment, tmp_path)
        assert answer_in(stopped.stdout, "no answer")["success"]
        first.join(900)
        second.join(120)
    assert [str(error) for error in errors if "the run was stopped" not in str(error)] == []
    assert len(errors) == 1
    assert RunRecord(tmp_path / "first").rounds_done == 4
    assert not RunRecord(tmp_path / "second").ended


def test_a_device_with_a_full_disk_says_so_and_takes_part_when_there_is_space_again(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "200k") as change:
        state = tmp_path / "disk" / "state"
        nodes = {
            "sketch-0": {"domain": "sketch", "state-dir": str(state)},
            "printed-0": {"domain": "printed"},
        }
        filler = tmp_path / "disk" / "filler"
        with contextlib.suppress(OSError):
            filler.write_bytes(bytes(10**6))
        with LocalDeployment(tmp_path / "deployment", nodes) as deployment:
            words = run_words(tmp_path / "run", "data.domains=[sketch,printed]", "method=scaffold")
            deployment.run(load_settings(words))
            lines = [line for line in RunRecord(tmp_path / "run").replies if line["client"] == "sketch-0"]
            assert {line["status"] for line in lines} & {"failed"}, lines
            assert any("No space left" in str(line.get("reason")) for line in lines), lines
            filler.unlink()
            change("size=100m")
            deployment.run(load_settings([*words, "train.rounds=2", "resume=true"]))
    last = [line for line in RunRecord(tmp_path / "run").replies if line["client"] == "sketch-0" and line["round"] == 2]
    assert last[0]["status"] == "trained"
