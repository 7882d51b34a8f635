"""Runs over several real SuperLinks with light nodes: one hash, and what is lost when a SuperLink or a relay ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.faults import PATIENCE, events, started_by, wait_until
from support.light import RUN, LightShards
from support.shards import connections, start_run

from common.settings import load_settings
from server.results.run import Run
from server.run.conduct import prepare_output
from server.run.history import read_rows

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(3600)]
NODES = 6
ROUNDS = 40
"""Rounds that a run would take; the tests end it before."""


def overrides_of(output: Path, rounds: int, *more: str) -> list[str]:
    return RUN(NODES, rounds, output, list(more))[1]


def finished(home: Path, overrides: list[str], log: Path) -> None:
    process = start_run(home, overrides, log)
    assert process.wait(PATIENCE) == 0, log.read_text()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightShards]:
    """Two SuperLinks, a and b, with TLS, keys and three clients each."""
    folder = tmp_path_factory.mktemp("two")
    settings = load_settings(overrides_of(folder / "any", 3))
    with LightShards(folder, ["a", "b"], settings, secure=True).running() as there:
        yield there


def relays(there: LightShards, name: str) -> list[int]:
    """Processes of the relays at a SuperLink."""
    found = started_by(there.deployments[name], "superlink").items()
    return [process for process, words in found if "flwr-serverapp" in words]


def replied(output: Path, number: int) -> set[str]:
    """Return the clients with updates that a round has averaged."""
    rows = read_rows(output / "activity.csv")
    return {row["client"] for row in rows if int(row["round"]) == number and row["status"] == "trained"}


def done(output: Path) -> int:
    """The last round that is done."""
    return max((entry["round"] for entry in events(output, "round done")), default=0)


def test_one_two_and_four_superlinks_give_one_state(tmp_path: Path) -> None:
    """And so does one SuperLink with a ServerApp that runs the rounds, as without engine.connections."""
    found: dict[str, Any] = {}
    for count in (1, 2, 4):
        names = [f"s{place}" for place in range(count)]
        settings = load_settings(overrides_of(tmp_path / "any", 3))
        with LightShards(tmp_path / str(count), names, settings, secure=count == 4).running() as there:
            output = tmp_path / f"run-{count}"
            finished(there.home, overrides_of(output, 3, connections(names)), tmp_path / f"{count}.log")
            found[f"{count} with relays"] = Run.open(output).summary
            if count == 1:
                output = tmp_path / "one"
                overrides = overrides_of(output, 3)
                settings = load_settings(overrides)
                prepare_output(settings)
                there.deployments["s0"].run(settings)
                found["one"] = Run.open(output).summary
    assert len({summary["state_sha256"] for summary in found.values()}) == 1, found
    for summary in found.values():
        assert summary["answers"]["admitted"] == 3 * NODES
        assert summary["answers"]["lost"] == 0


def watched_until_complete_again(there: LightShards, output: Path, process: subprocess.Popen[bytes], log: Path) -> int:
    """Wait for a round in which the clients of both SuperLinks have replied; its number."""
    everybody = {client for clients in there.clients.values() for client in clients}
    after = done(output)

    def complete() -> int:
        assert process.poll() is None, log.read_text()
        for number in range(after + 1, done(output) + 1):
            if replied(output, number) == everybody:
                return number
        return 0

    return int(wait_until(complete, "a complete round"))


@pytest.mark.parametrize("victim", ["superlink", "relay"])
def test_what_ends_in_a_round_loses_only_its_nodes_and_comes_back(
    victim: str, two: LightShards, tmp_path: Path
) -> None:
    output, log = tmp_path / "run", tmp_path / "log.txt"
    process = start_run(two.home, overrides_of(output, ROUNDS, connections(two.names)), log)
    try:
        wait_until(lambda: done(output) >= 2 or process.poll() is not None, "two rounds", 2 * PATIENCE)
        assert process.poll() is None, log.read_text()
        began = time.monotonic()
        if victim == "superlink":
            link = two.deployments["b"].children["superlink"].process
            os.kill(link.pid, signal.SIGKILL)
            link.wait()
        else:
            (relay,) = relays(two, "b")
            os.kill(relay, signal.SIGKILL)
        hit = done(output) + 1
        wait_until(lambda: done(output) >= hit or process.poll() is not None, "the end of the round", 2 * PATIENCE)
        closed = time.monotonic() - began
        assert process.poll() is None, log.read_text()
        assert set(two.clients["a"]) <= replied(output, hit)
        if victim == "superlink":
            wait_until(lambda: done(output) >= hit + 1, "a round without b", 2 * PATIENCE)
            assert replied(output, hit + 1) == set(two.clients["a"])
            two.deployments["b"].start_link()
        number = watched_until_complete_again(two, output, process, log)
        print(f"\n{victim}: round {hit} closed after {closed:.0f} s; all replied in round {number}, "
              f"{time.monotonic() - began:.0f} s after the kill", flush=True)  # fmt: skip
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 143
    finally:
        if process.poll() is None:
            process.kill()
    printed = log.read_text()
    assert "SuperLink b is lost" in printed
    assert "SuperLink b is back" in printed
    assert "SuperLink a" not in printed
    recorded = [entry["reason"] for entry in events(output, "superlink")]
    assert recorded[0].startswith("SuperLink b is lost")
    assert recorded[-1] == "SuperLink b is back"
    for name in two.names:
        wait_until(lambda name=name: not relays(two, name), f"the end of the relay at {name}", 120)


def test_a_killed_coordinator_resumes_to_the_same_state(two: LightShards, tmp_path: Path) -> None:
    expected = tmp_path / "expected"
    finished(two.home, overrides_of(expected, 6, connections(two.names)), tmp_path / "expected.txt")
    output, log = tmp_path / "run", tmp_path / "log.txt"
    process = start_run(two.home, overrides_of(output, 6, connections(two.names)), log)
    wait_until(lambda: done(output) >= 2 or process.poll() is not None, "two rounds", 2 * PATIENCE)
    process.kill()
    process.wait()
    finished(two.home, overrides_of(output, 6, connections(two.names), "resume=true"), tmp_path / "resumed.txt")
    assert Run.open(output).summary["state_sha256"] == Run.open(expected).summary["state_sha256"]
    for name in two.names:
        wait_until(lambda name=name: not relays(two, name), f"the end of the relays at {name}", 180)
