"""Links that are slow or long: what the device and the server say, and that nothing finished is lost."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from support.cables import SlowCable
from support.faults import events, node_log, wait_until

from common.settings import load_settings
from goldfinch.commands.deployment import LocalDeployment
from goldfinch.record import RunRecord

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(1800)]

SLOW, SLOWER = 12_500.0, 5_000.0
"""Bytes a second: 100 kbit/s, and a rate at which the weights, 549 kB, take 110 s."""


def run_words(output: Path, *more: str) -> list[str]:
    words = ["method=fedavg", "data=glyphs", "data.domains=[sketch]", "protocol.samples=24", "model=small"]
    words += ["train.device=cpu", "train.rounds=1", "train.local_steps=1", "rounds.test_samples=8"]
    return [*words, "rounds.registration=600", f"output={output}", *more]


def test_a_device_behind_100_kbit_a_second_is_waited_for_and_takes_part(tmp_path: Path) -> None:
    """The weights take 44 s, longer than Flower's 30: the device sent its reply again and again, and no other."""
    deployment = LocalDeployment(tmp_path / "deployment", {"sketch-0": {"domain": "sketch"}})
    link = SlowCable(deployment.address, SLOW)
    deployment.node_address = link.address
    try:
        with deployment:
            deployment.run(load_settings(run_words(tmp_path / "run")))
            said = node_log(deployment, "sketch-0")
    finally:
        link.close()
    record = RunRecord(tmp_path / "run")
    assert [line["status"] for line in record.replies] == ["trained", "scored"]
    waits = [event for event in events(tmp_path / "run", "waiting") if event.get("round")]
    assert {tuple(event["clients"]) for event in waits} == {("sketch-0",)}
    assert max(event["seconds"] for event in waits) > 30
    assert "Failed to send" not in said


def test_a_device_that_is_too_slow_for_the_deadline_is_left_out_by_name_and_the_run_ends(tmp_path: Path) -> None:
    """Also in the scoring after the last round, and although it is still sending."""
    nodes = {"sketch-0": {"domain": "sketch"}, "printed-0": {"domain": "printed"}}
    deployment = LocalDeployment(tmp_path / "deployment", nodes)
    link = SlowCable(deployment.address)
    output = tmp_path / "run"
    words = run_words(output, "data.domains=[sketch,printed]", "train.rounds=2", "rounds.deadline=40")

    def slow_down() -> None:
        wait_until(lambda: events(output, "start"), "the registration of both")
        link.rate = SLOWER

    with deployment:
        deployment.children["sketch-0"].stop()
        deployment.node_address = link.address
        deployment.start_node("sketch-0")
        deployment.wait_for_nodes()
        slowing = threading.Thread(target=slow_down, daemon=True)
        slowing.start()
        try:
            deployment.run(load_settings(words))
        finally:
            slowing.join()
            link.close()
    record = RunRecord(output)
    assert record.ended
    of_slow = [line for line in record.replies if line["client"] == "sketch-0"]
    assert {line["status"] for line in of_slow} == {"lost"}
    assert "no complete answer within 40 s" in {line["reason"] for line in of_slow}
    assert {event["client"] for event in events(output, "score missing")} == {"sketch-0"}
    of_fast = [line["status"] for line in record.replies if line["client"] == "printed-0"]
    assert of_fast == ["trained", "trained", "scored"]


def test_300_ms_of_latency_change_nothing(tmp_path: Path) -> None:
    seconds, states = {}, set()
    for latency in (0.0, 0.15):
        deployment = LocalDeployment(tmp_path / f"{latency}", {"sketch-0": {"domain": "sketch"}})
        link = SlowCable(deployment.address, latency=latency)
        deployment.node_address = link.address
        output = tmp_path / f"run {latency}"
        try:
            with deployment:
                deployment.run(load_settings(run_words(output, "train.rounds=3")))
                said = node_log(deployment, "sketch-0")
        finally:
            link.close()
        record = RunRecord(output)
        assert [line["status"] for line in record.replies] == ["trained"] * 3 + ["scored"]
        states.add(record.summary["state_sha256"])
        seconds[latency] = [event["seconds"] for event in events(output, "round done")]
        assert "Failed to" not in said  # "retrying" can be there: the server closed an idle connection meanwhile
    print(f"\nseconds of each round, without and with latency: {seconds}")
    assert len(states) == 1
