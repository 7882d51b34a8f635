"""Nodes that register while rounds go on: who is asked, how often, and who waits for whom."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Error, Message
from flwr.common import Code, GetPropertiesRes, Status
from flwr.common.constant import ErrorCode
from support.engines import GRIDS, REFUSAL, Clock, asked, engine_of
from support.grids import Simulation, scripted
from support.nodes import OVERRIDES, Node

from client import node as client_node
from common.wire.payload import Payload
from server.engines import flower as flower_engine
from server.engines.flower import PATIENCE_SECONDS, FlowerEngine
from strategies.core.flower import refusal_to_properties


@pytest.fixture(autouse=True)
def no_devices_of_other_tests() -> None:
    client_node._DEVICES.clear()


@GRIDS
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (refusal_to_properties("DataError: /data is empty"), "DataError: /data is empty"),
        (GetPropertiesRes(Status(Code.OK, ""), {}), "does not answer as a Goldfinch client"),
        (GetPropertiesRes(Status(Code.OK, ""), {"registrations": "{"}), "not JSON"),
        (GetPropertiesRes(Status(Code.OK, ""), {"registrations": "[1]"}), "not a list of objects"),
        (GetPropertiesRes(Status(Code.OK, ""), {"registrations": "[{}]"}), "client"),
        (GetPropertiesRes(Status(Code.OK, ""), {"registrations": "[" * 100_000}), "not JSON"),
        (REFUSAL, "not the answer of a Goldfinch client"),
        (Error(ErrorCode.NODE_UNAVAILABLE, "node went away"), "node went away"),
    ],
    ids=["refused", "nothing", "cut short", "numbers", "an empty object", "nested deeply", "another kind", "went away"],
)
def test_a_registration_that_cannot_be_read_is_that_node_s_refusal(grid: Any, answer: Any, reason: str) -> None:
    there = grid(scripted(answer))
    engine = FlowerEngine(there)
    found, failures = engine.register(["c"], 0.0)
    assert not found
    assert [failure.client for failure in failures] == [f"node {next(iter(there.world.nodes))}"]
    assert reason in failures[0].reason
    assert engine.register(["c"], 0.0)[1] == [], "nobody is asked again at once"


class Turns:
    """Answers with one after another."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def __call__(self, message: Message) -> Message | None:
        return self.answers.pop(0)(message)


def node_of(folder: Path, cid: str = "1") -> Node:
    return Node(cid, {"domain": "sketch", "state-dir": str(folder / cid)}, [*OVERRIDES, f"output={folder}"])


@GRIDS
def test_a_lost_registration_is_asked_for_again(grid: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_engine, "PATIENCE_SECONDS", 1.0)
    lost = scripted(Error(ErrorCode.MESSAGE_UNAVAILABLE, "Message Unavailable"))
    found, failures = FlowerEngine(grid(Turns(lost, node_of(tmp_path)))).register(["sketch-0"], 20.0)
    assert [item.client for item in found] == ["sketch-0"]
    assert failures == []


@GRIDS
def test_a_silent_node_is_waited_for_once_and_stalls_no_round(
    grid: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked ever more rarely, and what others answer during a round is there at the next."""
    clock = Clock()
    monkeypatch.setattr(flower_engine, "time", clock)
    there = grid(scripted(None), node_of(tmp_path))
    engine = FlowerEngine(there)
    silent = next(iter(there.world.nodes))
    found, failures = engine.register(["sketch-0", "printed-0"], 60.0)
    assert [item.client for item in found] == ["sketch-0"]
    assert [(item.client, item.reason) for item in failures] == [(f"node {silent}", "it has not answered yet")]
    assert 60.0 <= clock.now < 60.0 + PATIENCE_SECONDS
    began, rounds = clock.now, 200
    for _ in range(rounds):
        assert engine.register(["printed-0"], 0.0) == ([], [])
        clock.now += 30.0
    assert clock.now - began == 30.0 * rounds, "no round waited"
    assert sum(message.metadata.dst_node_id == silent for message in there.world.seen) < 12


def test_a_node_that_joins_during_a_round_is_there_at_the_next(tmp_path: Path) -> None:
    late = Turns(scripted(None))
    grid = Simulation(scripted(REFUSAL))
    engine = engine_of(grid, "a")
    engine._due = dict.fromkeys(grid.world.nodes, float("inf"))
    engine._lost = dict.fromkeys(grid.world.nodes, 0)
    joined = grid.world.join(late)
    held: list[Message] = []

    def slow(message: Message) -> Message | None:
        held.append(message)
        return None

    late.answers = [slow]
    assert engine.register([], 0.0) == ([], [])
    assert engine._asked
    reply = node_of(tmp_path)(held[0])
    assert reply is not None
    reply.metadata.__dict__["_message_id"] = "answer"
    grid.state.store_message_res(reply)
    engine.exchange(Payload({}), asked("a"), 5)
    assert [item.client for item in engine.register([], 0.0)[0]] == ["sketch-0"]
    assert engine._nodes["sketch-0"] == joined


@GRIDS
def test_nobody_waits_when_all_have_refused(grid: Any) -> None:
    engine = FlowerEngine(grid(*[scripted(refusal_to_properties("no data"))] * 2))
    started = time.monotonic()
    assert len(engine.register(["a", "b"], 60.0)[1]) == 2
    assert time.monotonic() - started < 30


@GRIDS
def test_two_nodes_cannot_be_the_same_client(grid: Any, tmp_path: Path) -> None:
    there = grid(node_of(tmp_path, "1"), node_of(tmp_path, "2"))
    one, two = sorted(there.world.nodes)
    engine = FlowerEngine(there)
    found, failures = engine.register(["sketch-0"], 0.0)
    assert [item.client for item in found] == ["sketch-0"]
    assert f"nodes {one} and {two} both claim to be it" in failures[0].reason
    there.world.leave(one)
    there.world.leave(two)
    third = there.world.join(node_of(tmp_path, "1"))
    assert [item.client for item in engine.register([], 0.0)[0]] == ["sketch-0"]
    assert engine._nodes == {"sketch-0": third}
