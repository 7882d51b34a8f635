"""engine.address: a simulation in a Ray cluster that exists already, of which each raylet stands for a machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.faults import events, wait_until
from support.simulations import SMALL

from bench.ray_clusters import RayCluster, ray_cluster
from common.errors import ConfigError
from common.settings import load_settings
from goldfinch.record import RunRecord
from server.engines.inline import InlineEngine
from server.flower.cluster import find_cluster
from server.flower.submit import run_on_ray
from server.run.conduct import prepare_output, run_federation

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Two machines of one CPU each."""
    with ray_cluster(tmp_path_factory.mktemp("ray")) as found:
        found.add("--num-cpus=1")
        found.add("--num-cpus=1")
        yield found


def run(*overrides: str) -> dict[str, Any]:
    """The summary of a run on Ray."""
    settings = load_settings([*SMALL, "engine=ray", "overwrite=true", *overrides])
    prepare_output(settings)
    run_on_ray(settings, [])
    return RunRecord.open(settings.output_folder).summary


def flower_log(folder: Path) -> str:
    """What Flower's process printed."""
    return (folder / "logs" / "flower.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fpl", "moon"])
def test_two_machines_give_the_inline_state(
    method: str, cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MOON's clients keep their last model, and may be on the other machine in the next round."""
    address = cluster.address
    if method == "moon":
        monkeypatch.setenv("RAY_ADDRESS", address)
        address = "auto"
    found = run(f"method={method}", f"engine.address={address}", f"output={tmp_path / 'ray'}")
    settings = load_settings([*SMALL, f"method={method}", f"output={tmp_path / 'inline'}"])
    prepare_output(settings)
    expected = run_federation(settings, InlineEngine(settings))
    for key in ("state_sha256", "scores", "splits"):
        assert found[key] == expected[key]
    assert "2 actors on " in flower_log(tmp_path / "ray")
    assert len(cluster.raylets()) == 2, "the cluster is the user's"
    wait_until(lambda: not cluster.actors(), "the end of the run's actors", 60)


@pytest.mark.slow
def test_a_machine_that_dies_in_a_round_loses_its_replies_and_the_other_goes_on(tmp_path: Path) -> None:
    output = tmp_path / "run"
    with ray_cluster(tmp_path / "logs") as cluster:
        cluster.add("--num-cpus=1")
        second = cluster.add("--num-cpus=1")
        words = [*SMALL, "train.rounds=8", "engine=ray", f"engine.address={cluster.address}", "rounds.quorum=0.25"]
        command = [sys.executable, "-m", "goldfinch.cli", "run", *words, f"output={output}"]
        with (tmp_path / "printed").open("wb") as printed:
            started = subprocess.Popen(command, stdout=printed, stderr=printed)
        wait_until(lambda: len(events(output, "round done")) >= 2, "the second round")
        os.kill(second, signal.SIGKILL)
        assert started.wait(600) == 0, (tmp_path / "printed").read_text()
        assert len(cluster.raylets()) == 1
    summary = RunRecord.open(output).summary
    assert summary["rounds"] == 8
    lost = [line for line in RunRecord(output).replies if line["status"] == "lost"]
    assert 1 <= len(lost) <= 4
    assert all(socket.gethostname() in line["reason"] for line in lost)


# ---- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("127.0.0.1:1", "Connection refused"),
        ("rubbish", "Invalid address format"),
    ],
)
def test_an_address_that_leads_nowhere_is_told_at_once(address: str, told: str) -> None:
    """Ray itself tries for 107 s, and then ends the process that asks."""
    with pytest.raises(ConfigError, match=f"engine.address={address}.*{told}.*HOST:PORT.*ray start"):
        find_cluster(address)


@pytest.mark.slow
def test_a_program_that_is_not_ray_s_head_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.flower.cluster.JOIN_SECONDS", 15.0)
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))  # Ray asks 127.0.0.1 under the address of this machine
        listener.listen()
        with pytest.raises(ConfigError, match="does not answer as Ray's head does"):
            find_cluster(f"127.0.0.1:{listener.getsockname()[1]}")
