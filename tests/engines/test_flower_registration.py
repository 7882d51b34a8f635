"""Nodes that register while rounds go on: who is asked, how often, and who waits for whom."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.common import Code, GetPropertiesIns, GetPropertiesRes, Status
from flwr.common.constant import ErrorCode
from flwr.compat.common.recorddict_compat import recorddict_to_getpropertiesins
from flwr.superlink.grid.http_grid import HttpGrid
from support.engines import GRIDS, REFUSAL, Clock, asked, engine_of, refusal_to_properties, registered
from support.grids import Deployment, Simulation, scripted
from support.nodes import OVERRIDES, Node

from client import node as client_node
from common.settings import load_settings
from common.versions import code_files
from common.wire.payload import Payload
from server import app as server_app
from server.engines import flower as flower_engine
from server.engines.flower import PATIENCE_SECONDS, FlowerEngine, NodeState
from strategies.core.flower import properties_to_registrations


@pytest.fixture(autouse=True)
def no_devices_of_other_tests() -> None:
    client_node._DEVICES.clear()


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
def test_a_registration_that_cannot_be_read_is_that_node_s_refusal(answer: Any, reason: str) -> None:
    there = Deployment(scripted(answer))
    engine = FlowerEngine(there)
    found, failures = registered(engine, ["c"])
    assert not found
    assert [failure.client for failure in failures] == [f"node {next(iter(there.world.nodes))}"]
    assert reason in failures[0].reason
    assert registered(engine, ["c"]) == ([], []), "no node is asked again at once"


def node_of(folder: Path, cid: str = "1") -> Node:
    return Node(cid, {"domain": "sketch", "state-dir": str(folder / cid)}, [*OVERRIDES, f"output={folder}"])


@GRIDS
def test_a_lost_registration_is_asked_for_again(grid: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_engine, "PATIENCE_SECONDS", 1.0)
    lost = scripted(Error(ErrorCode.MESSAGE_UNAVAILABLE, "Message Unavailable"))
    answers = iter([lost, node_of(tmp_path)])
    there = grid(lambda message: next(answers)(message))
    found, failures = registered(FlowerEngine(there), ["sketch-0"], 20.0)
    assert found == ["sketch-0"]
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
    found, failures = registered(engine, ["sketch-0", "printed-0"], 60.0)
    assert found == ["sketch-0"]
    assert [(item.client, item.reason) for item in failures] == [(f"node {silent}", "it has not answered yet")]
    assert 60.0 <= clock.now < 60.0 + PATIENCE_SECONDS
    began, rounds = clock.now, 200
    for _ in range(rounds):
        assert registered(engine, ["printed-0"]) == ([], [])
        clock.now += 30.0
    assert clock.now - began == 30.0 * rounds, "no round waited"
    assert sum(message.metadata.dst_node_id == silent for message in there.world.seen) < 12


def test_a_node_that_joins_during_a_round_is_there_at_the_next(tmp_path: Path) -> None:
    grid = Simulation(scripted(REFUSAL))
    engine = engine_of(grid, "a")
    for node in grid.world.nodes:
        engine._states[node] = NodeState(due=float("inf"), invited=True)
    held: list[Message] = []
    joined = grid.world.join(held.append)
    assert registered(engine, []) == ([], [])
    assert engine._asked
    reply = node_of(tmp_path)(held[0])
    assert reply is not None
    reply.metadata.__dict__["_message_id"] = "answer"
    grid.state.store_message_res(reply)
    engine.exchange(Payload(), asked("a"), 5)
    assert registered(engine, [])[0] == ["sketch-0"]
    assert engine._nodes["sketch-0"] == joined


@GRIDS
def test_registration_ends_when_all_nodes_have_refused(grid: Any) -> None:
    engine = FlowerEngine(grid(*[scripted(refusal_to_properties("no data"))] * 2))
    started = time.monotonic()
    assert len(registered(engine, ["a", "b"], 60.0)[1]) == 2
    assert time.monotonic() - started < 30


@GRIDS
def test_two_nodes_cannot_be_the_same_client(grid: Any, tmp_path: Path) -> None:
    there = grid(node_of(tmp_path, "1"), node_of(tmp_path, "2"))
    one, two = sorted(there.world.nodes)
    engine = FlowerEngine(there)
    found, failures = registered(engine, ["sketch-0"])
    assert found == ["sketch-0"]
    assert f"nodes {one} and {two} both claim to be it" in failures[0].reason
    there.world.leave(one)
    there.world.leave(two)
    third = there.world.join(node_of(tmp_path, "1"))
    assert registered(engine, [])[0] == ["sketch-0"]
    assert engine._nodes == {"sketch-0": third}


@GRIDS
def test_a_refused_node_takes_no_other_client_s_place(grid: Any, tmp_path: Path) -> None:
    there = grid(node_of(tmp_path, "1"))
    engine = FlowerEngine(there)
    failures = engine.register(["sketch-0"], lambda registration: "with other data", 0.0)
    assert [(item.client, item.reason) for item in failures] == [("sketch-0", "with other data")]
    honest = there.world.join(node_of(tmp_path, "2"))
    assert registered(engine, ["sketch-0"]) == (["sketch-0"], [])
    assert engine._nodes == {"sketch-0": honest}
    assert engine.exchange(Payload(), asked("printed-0"), 5)[1][0].reason == "its node is offline"


def test_who_answered_and_left_is_not_mapped(tmp_path: Path) -> None:
    engine = FlowerEngine(Deployment())
    answer = node_of(tmp_path).get_properties(GetPropertiesIns({}), None, None)
    engine._states[77] = NodeState(outcome=properties_to_registrations(answer))  # it came during a round
    found, failures = registered(engine, ["sketch-0"])
    assert (found, [item.reason for item in failures], engine._nodes) == ([], ["node 77 left again"], {})


# ---- enrolled keys ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "told", "enrolled_for"),
    [("printed-0", "printed-0", "printed-0"), ("sketch-1", "sketch-1", "sketch-1"), (None, "sketch-0", "no client")],
    ids=["another client", "another of its domain", "no client"],
)
def test_a_key_is_the_client_that_it_was_enrolled_for(
    tmp_path: Path, name: str | None, told: str, enrolled_for: str
) -> None:
    """Who claims another's place is refused by name, though it comes first; the true one has it when it comes."""
    there = Deployment()
    thief = there.world.join(node_of(tmp_path, "1"), name)
    engine = FlowerEngine(there, enrolled=True)
    found, failures = registered(engine, ["sketch-0"])
    assert found == []
    reason = f"node {thief} claims to be sketch-0, but its key is enrolled for {enrolled_for}"
    assert [(item.client, item.status, item.reason) for item in failures] == [(told, "refused", reason)]
    owner = there.world.join(node_of(tmp_path, "2"), "sketch-0")
    assert registered(engine, ["sketch-0"]) == (["sketch-0"], [])
    assert engine._nodes == {"sketch-0": owner}


@pytest.mark.parametrize(
    ("grid", "enrolled", "clients"),
    [(Deployment, True, {"sketch-0"}), (Simulation, False, {"handwritten-0", "printed-0", "sketch-0"})],
    ids=["deployed", "simulated"],
)
def test_a_deployed_key_is_one_client_and_a_simulated_node_several(
    grid: Any, enrolled: bool, clients: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower_engine, "PATIENCE_SECONDS", 300.0)  # the node reads three domains for the first time
    there = grid()
    there.world.join(Node("0", {"partition-id": 0, "num-partitions": 1}, OVERRIDES), "sketch-0")
    engine = FlowerEngine(there, enrolled=enrolled)
    found, failures = registered(engine, sorted(clients))
    assert set(found) == engine._nodes.keys() == clients
    assert len(failures) == (1 if enrolled else 0)


def test_the_wait_for_clients_goes_on_when_a_stranger_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Deployment()
    there.world.join(node_of(tmp_path, "1"), "printed-0")

    class Later(Clock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if self.now > 10 and len(there.world.nodes) == 1:
                there.world.join(node_of(tmp_path, "2"), "sketch-0")

    monkeypatch.setattr(flower_engine, "time", Later())
    assert registered(FlowerEngine(there, enrolled=True), ["sketch-0"], 60.0)[0] == ["sketch-0"]


def test_the_client_of_a_lost_node_waits_for_its_own_key(tmp_path: Path) -> None:
    there = Deployment()
    owner = there.world.join(node_of(tmp_path, "1"), "sketch-0")
    engine = FlowerEngine(there, enrolled=True)
    assert registered(engine, ["sketch-0"])[0] == ["sketch-0"]
    there.world.leave(owner)
    there.world.join(node_of(tmp_path, "2"), "printed-0")
    assert registered(engine, [])[0] == []
    assert engine.exchange(Payload(), asked("sketch-0"), 5)[1][0].reason == "its node is offline"
    there.world.come_back(owner, node_of(tmp_path, "1"))
    assert registered(engine, []) == (["sketch-0"], [])
    there.world.leave(owner)
    again = there.world.join(node_of(tmp_path, "3"), "sketch-0")  # the device has a new key
    assert registered(engine, [])[0] == ["sketch-0"]
    assert engine._nodes == {"sketch-0": again}


@pytest.mark.parametrize(
    ("grid", "expected"),
    [
        (lambda: HttpGrid(token="none"), (False, True)),
        (lambda: HttpGrid(insecure=True, token="none"), (False, False)),
        (Simulation, (True, False)),
    ],
    ids=["TLS", "plain", "simulation"],
)
def test_keys_are_asked_for_where_flower_can_know_them(
    grid: Any, expected: tuple[bool, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[FlowerEngine] = []
    monkeypatch.setattr(server_app, "run_federation", lambda settings, engine, listeners: engines.append(engine))
    chosen = {"overrides": f"method=fedavg output={tmp_path / 'run'}"}
    server_app.main(grid(), Context(1, 1, {}, RecordDict(), chosen))
    assert [(engine.simulated, engine.enrolled) for engine in engines] == [expected]


def test_a_node_names_its_files_only_to_a_server_with_other_code(tmp_path: Path) -> None:
    """Those of Goldfinch alone: a server could name any other package to learn what the device has."""
    node = node_of(tmp_path)
    code = load_settings([*OVERRIDES, f"output={tmp_path}"]).code
    for sent, files in (({}, {}), ({"code": code}, {}), ({"code": "0" * 16}, code_files())):
        answer = node.get_properties(GetPropertiesIns(sent), None, None)
        assert [found.files for found in properties_to_registrations(answer)] == [files]
    sent_to: list[Any] = []

    def listening(message: Any) -> Any:
        sent_to.append(recorddict_to_getpropertiesins(message.content).config)
        return node(message)

    assert registered(FlowerEngine(Deployment(listening), code=code), ["sketch-0"], 20.0)[0] == ["sketch-0"]
    assert sent_to == [{"code": code}]
