"""The same run inline, on Ray and as processes: one SHA-256; and failures that are told, with an exit status."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.faults import kill_node
from support.logs import without_time
from support.own import forget
from support.simulations import SMALL

from common.errors import EngineError
from common.settings import RunSettings, load_settings
from common.versions import OURS
from goldfinch.cli import main
from goldfinch.commands.deployment import LocalDeployment, one_node_per_client
from goldfinch.record import RunRecord
from server.engines.inline import InlineEngine
from server.flower.processes import Child, Processes
from server.flower.submit import ROOT, run_on_ray
from server.run.conduct import prepare_output, run_federation
from server.run.schema import read_lines

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]
MINE = """
import random

import numpy as np
import torch
from torch import nn


class Noise(nn.Module):
    def forward(self, image):
        noise = 20 * torch.randn(image.shape) + 9 * random.random() + 9 * np.random.rand()
        return (image + noise).clamp(0, 255).to(torch.uint8)
"""
STATEFUL = "moon"
"""A method in which clients keep their last model: the second round depends on what a device wrote in the first."""


def prepared(method: str, output: Path, *more: str) -> RunSettings:
    """Settings of a run whose folder is there."""
    settings = load_settings([f"method={method}", *SMALL, *more, "overwrite=true", f"output={output}"])
    prepare_output(settings)
    return settings


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Summaries of inline runs by method and further settings, run once."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}

    def of(*words: str) -> dict[str, Any]:
        if words not in found:
            method, *more = words
            settings = prepared(method, tmp_path_factory.mktemp("inline"), *more)
            found[words] = run_federation(settings, InlineEngine(settings))
        return found[words]

    return of


@pytest.fixture
def transform(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A transform of the user's own, which all processes find."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "mine.py").write_text(MINE)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    monkeypatch.syspath_prepend(folder)
    yield "data.augmentation.transform=mine.Noise"
    forget("mine")


def assert_equal(found: Any, expected: Any) -> None:
    assert found["state_sha256"] == expected["state_sha256"]
    assert found["scores"] == expected["scores"]
    assert found["splits"] == expected["splits"]
    assert found["rounds"] == 2


def left_running(folder: Path) -> list[str]:
    """Command lines of processes that work in ``folder`` or were given it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                place = str((entry / "cwd").readlink())
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if place.startswith(str(folder)) or str(folder) in words:
                found.append(words)
    return found


def stale_copy(folder: Path) -> Path:
    """A checkout of another version, in a folder from which somebody works."""
    for package in OURS:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    changed = folder / "strategies" / "fpl.py"
    changed.write_text(changed.read_text() + "\n# another version\n")
    return folder


# ---- Ray -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fpl", pytest.param(STATEFUL, marks=pytest.mark.slow)])
def test_ray_gives_the_inline_state(
    method: str, inline: Any, transform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called from a folder with another copy of the packages, which Ray's workers must not pick up."""
    monkeypatch.chdir(stale_copy(tmp_path / "work"))
    events: list[str] = []
    settings = prepared(method, tmp_path / "run", transform, "engine=ray", "engine.actors=2")
    run_on_ray(settings, [lambda name, _: events.append(name)])
    assert_equal(RunRecord.open(tmp_path / "run").summary, inline(method, transform))
    assert inline(method)["state_sha256"] != inline(method, transform)["state_sha256"], "it changes what is trained on"
    assert events.count("round done") == 2
    assert "finish" in events


def test_a_failing_run_exits_with_an_error_and_its_reason(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    command = [sys.executable, "-m", "goldfinch.cli", "run", "engine=ray", "data=office_caltech"]
    command += [f"data.root={tmp_path / 'empty'}", f"output={tmp_path / 'run'}", "train.rounds=1"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=500,
    )
    assert done.returncode == 1
    assert "office_caltech" in done.stderr
    assert str(tmp_path / "empty") in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "summary.json").exists()
    assert not left_running(tmp_path)


# ---- SuperLink and SuperNodes ----------------------------------------------------------------------------------------


def test_a_deployment_gives_the_inline_state(
    inline: Any,
    transform: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two of the four nodes have a resident trainer, and two train in a new process per message."""
    sockets = tmp_path_factory.mktemp("r")  # short: a socket's path has 107 bytes at most
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(sockets))
    settings = prepared(STATEFUL, tmp_path / "run", transform, "engine=superlink")
    nodes = one_node_per_client(settings)
    for index, node in enumerate(nodes.values()):
        node["resident"] = index % 2 == 0
    with LocalDeployment(tmp_path / "flower", nodes, secure=False) as deployment:
        deployment.run(settings)
        assert len(list(sockets.rglob("*.sock"))) == 2
    assert_equal(RunRecord.open(tmp_path / "run").summary, inline(STATEFUL, transform))
    assert inline(STATEFUL)["state_sha256"] != inline(STATEFUL, transform)["state_sha256"]
    kept = list((tmp_path / "flower").rglob("state-*.safetensors"))
    assert {path.parent.name for path in kept} == {"handwritten-0", "printed-0", "signs-0", "sketch-0"}
    assert not left_running(tmp_path)
    assert not left_running(sockets), "a trainer ends with its node"


MIX = ("model=by_domain", "method.aggregate_models=false", "tuned=none")


@pytest.mark.slow
def test_different_networks_give_the_inline_state_on_ray_and_on_devices_that_choose_their_own(tmp_path: Path) -> None:
    """The deployment's run names one of two networks; the other is its node's own choice."""
    both = (*MIX, "model.networks={signs: digit_cnn, sketch: digit_cnn_gap}")
    settings = prepared("fedproto", tmp_path / "inline", *both)
    expected = run_federation(settings, InlineEngine(settings))
    run_on_ray(prepared("fedproto", tmp_path / "ray", *both, "engine=ray", "engine.actors=2"), [])
    assert_equal(RunRecord.open(tmp_path / "ray").summary, expected)
    one = "model.networks={signs: digit_cnn}"
    settings = prepared("fedproto", tmp_path / "nodes", *MIX, one, "engine=superlink")
    nodes = one_node_per_client(settings)
    nodes["sketch-0"]["model"] = "digit_cnn_gap"
    with LocalDeployment(tmp_path / "flower", nodes, secure=False) as deployment:
        deployment.run(settings)
    assert_equal(RunRecord.open(tmp_path / "nodes").summary, expected)


@pytest.mark.slow
def test_nodes_serve_several_runs_and_report_errors(inline: Any, tmp_path: Path) -> None:
    settings = prepared("fpl", tmp_path / "fpl", "engine=superlink")
    with LocalDeployment(tmp_path / "flower", one_node_per_client(settings), secure=False) as deployment:
        for name in ("first", "second"):
            settings = prepared("fpl", tmp_path / name, "engine=superlink")
            deployment.run(settings)
            assert_equal(RunRecord.open(tmp_path / name).summary, inline("fpl"))
        (tmp_path / "empty").mkdir()
        missing = ["data=office_caltech", f"data.root={tmp_path / 'empty'}"]
        settings = prepared("fpl", tmp_path / "third", "engine=superlink", *missing)
        with pytest.raises(EngineError, match=r"only 0 of 4 clients registered"):
            deployment.run(settings)
        assert all(child.process.poll() is None for child in deployment.children.values())
    assert not left_running(tmp_path)


@pytest.mark.slow
def test_private_nodes_draw_their_own_noise_and_keep_their_own_budget(tmp_path: Path) -> None:
    """One node has a partition, as in Flower's examples, and may release one update; the other has a domain."""
    more = ("data.domains=[printed,sketch]", "privacy=gaussian", "privacy.update_clip=1", "engine=superlink")
    settings = prepared("fpl", tmp_path / "run", *more)
    nodes: dict[str, dict[str, object]] = {
        "a": {"partition-id": 0, "num-partitions": 2, "privacy-max-releases": 1},
        "b": {"domain": "sketch", "privacy-max-epsilon": 50.0, "resident": False},
    }
    with LocalDeployment(tmp_path / "flower", nodes, secure=False) as deployment:
        deployment.run(settings)
    found = RunRecord.open(tmp_path / "run")
    private = found.summary["privacy"]
    assert private["randomness"] == ["system"]
    assert private["unprotected"] == []
    assert private["releases"] == {"printed-0": 1, "sketch-0": 2}
    assert private["epsilon"]["sketch-0"] > private["epsilon"]["printed-0"] > 0
    rows = read_lines(tmp_path / "run" / "replies.jsonl")
    (failed,) = [row for row in rows if row["status"] == "failed"]
    assert (failed["client"], failed["round"]) == ("printed-0", 2)
    assert failed["reason"].startswith("the privacy budget is spent; nothing was sent")
    assert "privacy-max-releases=1" in (tmp_path / "flower" / "logs" / "a.log").read_text(), "its own log names it too"
    for name in ("superlink", "a", "b"):  # of a SuperNode: also SuperExec, ClientApps and trainer
        assert without_time((tmp_path / "flower" / "logs" / f"{name}.log").read_text().splitlines()) == []
    assert "Starting Flower SuperExec" in (tmp_path / "flower" / "logs" / "a.log").read_text()
    assert "\x1b" not in (tmp_path / "run" / "logs" / "flower.log").read_text()
    kept = sorted(path.parent.name for path in (tmp_path / "flower" / "nodes").rglob("ledger.json"))
    assert kept == ["printed", "sketch"]
    assert not list((tmp_path / "run").rglob("ledger.json"))
    assert not left_running(tmp_path)


def test_processes_end_when_the_block_fails(tmp_path: Path) -> None:
    settings = prepared("fpl", tmp_path / "run")
    nodes = dict(list(one_node_per_client(settings).items())[:1])
    started: list[int] = []

    def use() -> None:
        with LocalDeployment(tmp_path / "flower", nodes, secure=False) as deployment:
            started.extend(child.process.pid for child in deployment.children.values())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        use()
    assert len(started) == 2
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
    assert not left_running(tmp_path)


def test_a_wrong_setting_leaves_nothing_of_the_superlink_that_was_started_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started: list[Path] = []
    kept = Processes.start

    def start(self: Processes, *arguments: Any) -> Child:
        started.append(self.folder)
        return kept(self, *arguments)

    monkeypatch.setattr(Processes, "start", start)
    assert main(["run", "engine=ray", "method.temperature=-1", f"output={tmp_path / 'run'}"]) == 1
    assert "method.temperature=-1" in capsys.readouterr().err
    assert [folder.parent.parent for folder in started] == [tmp_path]
    assert list(tmp_path.iterdir()) == []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            assert f"FLWR_HOME={tmp_path}".encode() not in (entry / "environ").read_bytes()


def test_a_superlink_that_does_not_start_is_an_error_and_its_log_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no room on this port\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr("server.flower.superlink.program", lambda _: str(broken))
    settings = prepared("fpl", tmp_path / "run", "engine=ray")
    with pytest.raises(EngineError, match=r"superlink ended with code 3:\n\S+Z no room on this port") as failure:
        run_on_ray(settings, [])
    log = tmp_path / "run" / "logs" / "superlink.log"
    assert f"(see {log})" in str(failure.value)
    _, _, line = log.read_text().partition(" ")
    assert line == "no room on this port\n"


@pytest.mark.slow  # the server waits for the dead site as long as its deadline, twice
def test_a_killed_site_leaves_a_partial_score_with_its_last_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of two SuperNodes is killed after the first round; the other goes on, and the last score is marked."""
    words = ["data.domains=[handwritten,printed]", "rounds.deadline=60", "rounds.quorum=0.5", "engine=superlink"]
    settings = prepared("fedavg", tmp_path / "run", *words)
    with LocalDeployment(tmp_path / "flower", one_node_per_client(settings), secure=False) as deployment:

        def kill(name: str, entry: Mapping[str, Any]) -> None:
            if name == "round done" and entry["round"] == 1:
                kill_node(deployment, "printed-0")

        deployment.run(settings, [kill])
    record = RunRecord.open(tmp_path / "run")
    assert record.summary["missing"] == {"printed": 0}
    assert list(record.summary["accuracy"]) == ["handwritten"]
    assert record.rules["last_n"]["missing"] == {"printed": 0}
    told = [entry for entry in record.events if entry["event"] == "score missing"]
    assert {(entry["client"], entry["domain"], entry["status"]) for entry in told} == {("printed-0", "printed", "lost")}
    capsys.readouterr()
    assert main(["table", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "printed" in shown.splitlines()[2], "its column is there"
    assert "† partial, not ranked: fedavg: seed 0: without printed (last scored in" in shown
