"""The Flower engine and both apps' code without processes: nodes are objects that carry real Flower messages."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.common import Code, FitIns, FitRes, GetPropertiesIns, GetPropertiesRes, Parameters, Status
from support.nodes import OVERRIDES, Manager, Node, deployment, request, simulation, through

from client import node as client_node
from common.config import CONF
from common.errors import EngineError, PayloadError
from common.settings import RunSettings, load_settings
from common.wire.messages import Request
from common.wire.payload import TENSOR_TYPE, Payload, encode
from server.engines import flower as flower_engine
from server.engines.flower import FlowerEngine
from server.engines.inline import InlineEngine
from server.run.conduct import conduct, prepare_output
from strategies.core.flower import (
    ask_registrations,
    failure_to_fit_res,
    refusal_to_properties,
    request_to_fit_ins,
)


@pytest.fixture(autouse=True)
def no_devices_of_other_tests() -> None:
    client_node._DEVICES.clear()


QUICK = ("fpl", "feddyn")
OTHERS = sorted({path.stem for path in (CONF / "method").glob("*.yaml")} - set(QUICK))


@pytest.mark.parametrize("method", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_nodes_and_inline_give_the_same_state_however_clients_are_spread(method: str, tmp_path: Path) -> None:
    overrides = [*OVERRIDES, f"method={method}"]
    expected = through(InlineEngine, overrides, tmp_path / "inline")
    ways: dict[str, Callable[[RunSettings], FlowerEngine]] = {
        "a node per client": lambda settings: FlowerEngine(simulation(3, settings_overrides(settings))),
        "two nodes": lambda settings: FlowerEngine(simulation(2, settings_overrides(settings))),
        "more nodes than clients": lambda settings: FlowerEngine(simulation(5, settings_overrides(settings))),
        "a deployment": lambda settings: FlowerEngine(deployment(tmp_path / "state", settings_overrides(settings))),
    }

    def settings_overrides(settings: RunSettings) -> list[str]:
        return [*overrides, f"output={settings.output}"]

    for way, engine in ways.items():
        found = through(engine, overrides, tmp_path / way.replace(" ", "-"))
        assert found["state_sha256"] == expected["state_sha256"], way
        assert found["scores"] == expected["scores"], way
        assert found["bytes"]["up"] > 0
    kept = {path.name for path in (tmp_path / "state").rglob("*.safetensors")}
    assert kept == {path.name for path in (tmp_path / "inline" / "clients").rglob("*.safetensors")}


def test_a_rounded_transport_gives_the_same_state_through_flower(tmp_path: Path) -> None:
    overrides = [*OVERRIDES, "method=scaffold", "rounds.transport=bfloat16"]
    expected = through(InlineEngine, overrides, tmp_path / "inline")
    manager = deployment(tmp_path / "state", [*overrides, f"output={tmp_path / 'nodes'}"])
    found = through(lambda _: FlowerEngine(manager), overrides, tmp_path / "nodes")
    assert found["state_sha256"] == expected["state_sha256"]
    assert found["bytes"]["up"] == pytest.approx(expected["bytes"]["up"], rel=0.01)  # seconds differ in digits
    exact = through(InlineEngine, overrides[:-1], tmp_path / "exact")
    assert found["state_sha256"] != exact["state_sha256"]
    assert found["bytes"]["up"] < 0.6 * exact["bytes"]["up"]


# ---- many at once ----------------------------------------------------------------------------------------------------


class Waiting:
    """Answers only when all of its kind have been asked: Flower's own pool would never get there."""

    def __init__(self, cid: str, barrier: threading.Barrier) -> None:
        self.cid, self.barrier = cid, barrier

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        self.barrier.wait(20)
        return failure_to_fit_res(Code.FIT_NOT_IMPLEMENTED, "all were asked", "")


def test_all_clients_are_in_flight_at_once() -> None:
    barrier = threading.Barrier(40)
    engine = FlowerEngine(Manager(*(Waiting(str(index), barrier) for index in range(40))))  # type: ignore[arg-type]
    engine._nodes = {f"c{index}": str(index) for index in range(40)}
    _, failures = engine.exchange(Payload({}), {client: request(client) for client in engine._nodes}, 30)
    assert [failure.reason for failure in failures] == ["all were asked"] * 40


class Stuck:
    """A node whose answer never becomes complete, whatever timeout Flower was given."""

    def __init__(self, cid: str, released: threading.Event) -> None:
        self.cid, self.released = cid, released

    def get_properties(self, ins: GetPropertiesIns, timeout: float | None, group_id: int | None) -> GetPropertiesRes:
        self.released.wait(60)
        return GetPropertiesRes(Status(Code.OK, ""), {})

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        self.released.wait(60)
        return failure_to_fit_res(Code.FIT_NOT_IMPLEMENTED, "too late", "")


def test_an_answer_that_stays_incomplete_holds_no_round(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(flower_engine, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(flower_engine, "POLL_SECONDS", 0.05)
    released = threading.Event()
    engine = FlowerEngine(Manager(Stuck("1", released), Waiting("2", threading.Barrier(1))))  # type: ignore[arg-type]
    engine._nodes = {"a": "1", "b": "2"}
    began = time.monotonic()
    _, failures = engine.exchange(Payload({}), {"a": request("a"), "b": request("b")}, 0.3)
    registrations, missing = FlowerEngine(Manager(Stuck("1", released))).register(["a"], 0.3)  # type: ignore[arg-type]
    assert time.monotonic() - began < 20
    released.set()
    assert [(failure.client, failure.status, failure.reason) for failure in failures] == [
        ("a", "lost", "no complete answer within 0 s"),
        ("b", "failed", "all were asked"),
    ]
    assert not registrations
    assert [failure.status for failure in missing] == ["lost"]


def test_a_signal_that_another_thread_raises_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Flower's watch of the SuperLink does; Python sees it in the main thread only, and only when that wakes."""

    def interrupt(*_: object) -> None:
        raise InterruptedError("the SuperLink is gone")

    released = threading.Event()
    before = signal.signal(signal.SIGUSR1, interrupt)
    threading.Timer(0.5, signal.raise_signal, [signal.SIGUSR1]).start()
    began = time.monotonic()
    try:
        with pytest.raises(InterruptedError):
            flower_engine.each([1], lambda _: released.wait(60), 60, lambda _: False)
    finally:
        signal.signal(signal.SIGUSR1, before)
        released.set()
    assert time.monotonic() - began < 30


# ---- what goes wrong -------------------------------------------------------------------------------------------------


class Scripted:
    """A node that does what it is told."""

    cid = "1"

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def _act(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        result: FitRes = self._act()
        return result

    def get_properties(self, ins: GetPropertiesIns, timeout: float | None, group_id: int | None) -> GetPropertiesRes:
        result: GetPropertiesRes = self._act()
        return result


def ok(parameters: Parameters) -> FitRes:
    return FitRes(Status(Code.OK, ""), parameters, 1, {})


OUTCOMES: dict[str, tuple[Any, str, str]] = {
    "its own error": (
        failure_to_fit_res(Code.FIT_NOT_IMPLEMENTED, "DataError: no images", "Traceback ..."), "failed", "no images",
    ),
    "node lost": (ValueError("Message Unavailable"), "lost", "Message Unavailable"),
    "not our bytes": (ok(Parameters([b"x"], TENSOR_TYPE)), "refused", "truncated"),
    "another type": (ok(Parameters([b"x"], "numpy.ndarray")), "refused", "numpy.ndarray"),
    "no tensors": (ok(Parameters([], TENSOR_TYPE)), "refused", "got 0"),
    "many tensors": (ok(Parameters([b"", b""], TENSOR_TYPE)), "refused", "got 2"),
    "no header": (ok(Parameters([encode(Payload({"hello": 1}))], TENSOR_TYPE)), "refused", "lacks"),
}  # fmt: skip


@pytest.mark.parametrize("case", OUTCOMES)
def test_what_a_node_gives_back_is_named(case: str) -> None:
    answer, status, reason = OUTCOMES[case]
    engine = FlowerEngine(Manager(Scripted(answer)))  # type: ignore[arg-type]
    engine._nodes = {"c": "1"}
    replies, failures = engine.exchange(Payload({}), {"c": request("c")}, 5)
    assert not replies
    assert [(failure.client, failure.status) for failure in failures] == [("c", status)]
    assert reason in failures[0].reason
    if status == "failed":
        assert failures[0].traceback == "Traceback ..."


def test_a_client_without_a_node_is_lost() -> None:
    engine = FlowerEngine(Manager())  # type: ignore[arg-type]
    _, failures = engine.exchange(Payload({}), {"c": request("c")}, 5)
    assert (failures[0].status, failures[0].reason) == ("lost", "its node is offline")


def test_a_dead_actor_ends_the_run_with_a_way_out() -> None:
    engine = FlowerEngine(Manager(Scripted(ValueError("ActorDiedError: the actor died"))))  # type: ignore[arg-type]
    engine._nodes = {"c": "1"}
    with pytest.raises(EngineError, match=r"Ray actor that trained c died.*resume=true"):
        engine.exchange(Payload({}), {"c": request("c")}, 5)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (refusal_to_properties("DataError: /data is empty"), "DataError: /data is empty"),
        (GetPropertiesRes(Status(Code.OK, ""), {}), "does not answer as a Goldfinch client"),
        (GetPropertiesRes(Status(Code.OK, ""), {"registrations": "{"}), "not JSON"),
        (GetPropertiesRes(Status(Code.OK, ""), {"registrations": "[1]"}), "not a list of objects"),
        (GetPropertiesRes(Status(Code.OK, ""), {"registrations": "[{}]"}), "lacks"),
        (GetPropertiesRes(Status(Code.OK, ""), {"registrations": "[" * 100_000}), "not JSON"),
        (ValueError("node went away"), "node went away"),
    ],
    ids=["refused", "nothing", "cut short", "numbers", "an empty object", "nested deeply", "went away"],
)
def test_a_registration_that_cannot_be_read_is_that_node_s_refusal(answer: Any, reason: str) -> None:
    engine = FlowerEngine(Manager(Scripted(answer)))  # type: ignore[arg-type]
    found, failures = engine.register(["c"], 0.0)
    assert not found
    assert [failure.client for failure in failures] == ["node 1"]
    assert reason in failures[0].reason
    assert bool(engine.register(["c"], 0.0)[1]) == isinstance(answer, ValueError), (
        "only a lost answer is asked for again"
    )


class Forgetful(Node):
    """Its first answer gets lost."""

    lost = False

    def get_properties(self, ins: GetPropertiesIns, timeout: float | None, group_id: int | None) -> GetPropertiesRes:
        if not self.lost:
            self.lost = True
            raise ValueError("Message Unavailable")
        return super().get_properties(ins, timeout, group_id)


def test_a_lost_registration_is_asked_for_again(tmp_path: Path) -> None:
    node = Forgetful("1", {"domain": "sketch", "state-dir": str(tmp_path)}, [*OVERRIDES, f"output={tmp_path}"])
    found, failures = FlowerEngine(Manager(node)).register(["sketch-0"], 20.0)  # type: ignore[arg-type]
    assert [item.client for item in found] == ["sketch-0"]
    assert failures == []


def test_nobody_waits_when_all_have_refused() -> None:
    nodes = [Scripted(refusal_to_properties("no data")), Scripted(refusal_to_properties("no data"))]
    nodes[1].cid = "2"
    engine = FlowerEngine(Manager(*nodes))  # type: ignore[arg-type]
    started = time.monotonic()
    assert len(engine.register(["a", "b"], 60.0)[1]) == 2
    assert time.monotonic() - started < 30


def test_two_nodes_cannot_be_the_same_client(tmp_path: Path) -> None:
    overrides = [*OVERRIDES, f"output={tmp_path}"]
    nodes = [Node(cid, {"domain": "sketch", "state-dir": str(tmp_path / cid)}, overrides) for cid in ("1", "2")]
    manager = Manager(*nodes)
    engine = FlowerEngine(manager)  # type: ignore[arg-type]
    found, failures = engine.register(["sketch-0"], 0.0)
    assert [item.client for item in found] == ["sketch-0"]
    assert "nodes 1 and 2 both claim to be it" in failures[0].reason
    del manager.nodes["1"], manager.nodes["2"]
    manager.nodes["3"] = Node("3", {"domain": "sketch", "state-dir": str(tmp_path / "1")}, overrides)
    assert [item.client for item in engine.register([], 0.0)[0]] == ["sketch-0"]
    assert engine._nodes == {"sketch-0": "3"}


NODES: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown key": ({"domian": "sketch"}, r"--node-config: domian is unknown; did you mean 'domain'"),
    "an unknown domain": ({"domain": "skech"}, r"no client skech-0; did you mean 'sketch-0'"),
    "an index too high": ({"domain": "sketch", "index": 3}, "no client sketch-3"),
    "a folder that is not there": ({"domain": "sketch", "data-dir": "/no/such"}, "data-dir /no/such is not a folder"),
    "nothing": ({}, "a SuperNode needs --node-config"),
}


@pytest.mark.parametrize("case", NODES)
def test_a_node_says_what_its_configuration_lacks(case: str) -> None:
    config, reason = NODES[case]
    with pytest.raises(PayloadError, match=reason):
        ask_registrations(Node("1", config, OVERRIDES), None)  # type: ignore[arg-type]


def test_a_node_that_cannot_read_its_settings_says_so() -> None:
    with pytest.raises(PayloadError, match="ConfigError: method=nope: no such choice"):
        ask_registrations(Node("1", {"domain": "sketch"}, ["method=nope"]), None)  # type: ignore[arg-type]


def test_other_code_is_refused_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings([*OVERRIDES, f"output={tmp_path}"])
    node = Node("1", {"domain": "sketch", "state-dir": str(tmp_path)}, [*OVERRIDES, f"output={tmp_path}"])
    other = Request("run", settings.identity, "fpl", 1, "train", "sketch-0", 3, 0, train=True, score=[], code="0" * 16)
    result = node.fit(request_to_fit_ins(encode(Payload({})), other), None, 1)
    assert result.status.code != Code.OK
    assert "install the same Goldfinch" in result.status.message
    assert "PayloadError" in str(result.metrics["traceback"])
    monkeypatch.setattr("strategies.core.registry.code_sha256", lambda: "1" * 16)
    prepare_output(settings)
    with pytest.raises(EngineError, match="install the same Goldfinch"):
        conduct(settings, FlowerEngine(Manager(node)))  # type: ignore[arg-type]
