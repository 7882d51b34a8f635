"""The Flower engine and both apps' code without processes: nodes are objects that carry real Flower messages."""

from __future__ import annotations

import pickle
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Error, Message, RecordDict
from flwr.common import Code, FitRes, GetPropertiesIns, Parameters, Status
from flwr.common.constant import ErrorCode
from flwr.compat.common.recorddict_compat import fitres_to_recorddict, recorddict_to_fitins, recorddict_to_fitres
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from support.engines import GRIDS, REFUSAL, Clock, asked, engine_of, failure_to_fit_res, refusal_to_properties
from support.grids import Deployment, Simulation, scripted
from support.nodes import OVERRIDES, Node, deployment, simulation, through
from support.toy import method_at_defaults

from client import node as client_node
from client.app import as_arrays
from common.choices import CONF
from common.errors import EngineError, PayloadError
from common.settings import RunSettings, load_settings
from common.wire.messages import Request
from common.wire.payload import TENSOR_TYPE, Payload, decode, encode
from server.engines import flower as flower_engine
from server.engines.flower import NO_REPLY, Deadline, FlowerEngine
from server.engines.inline import InlineEngine
from server.flower.cluster import ENDS_RUN
from server.run.conduct import prepare_output, run_federation
from strategies.core.flower import properties_to_registrations, request_to_fit_ins


@pytest.fixture(autouse=True)
def no_devices_of_other_tests() -> None:
    client_node._DEVICES.clear()


QUICK = "fpl_heal"
"""A method with prototypes and with states of the clients' own."""
OTHERS = [
    path.stem
    for path in sorted((CONF / "method").glob("*.yaml"))
    if path.stem != QUICK and not method_at_defaults(path.stem).bound  # a bound of a table is only simulated
]


def kept_positions(folder: Path) -> set[str]:
    """The positions of the clients' own states below a folder; a file's name has the attempt's time before them."""
    return {path.stem.rpartition("-")[2] for path in folder.rglob("*.safetensors")}


@pytest.mark.parametrize("method", [QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_nodes_and_inline_give_the_same_state_however_clients_are_spread(method: str, tmp_path: Path) -> None:
    overrides = [*OVERRIDES, f"method={method}", "rounds.test_samples=12"]
    expected = through(InlineEngine, overrides, tmp_path / "inline")

    def simulated(count: int) -> Callable[[RunSettings], FlowerEngine]:
        def engine(settings: RunSettings) -> FlowerEngine:
            nodes = simulation(count, [*overrides, f"output={settings.output}"]).nodes
            return FlowerEngine(Simulation(*nodes.values()))

        return engine

    def deployed(settings: RunSettings) -> FlowerEngine:
        """A key for every client."""
        there = Deployment()
        for node in deployment(tmp_path / "state", [*overrides, f"output={settings.output}"]).nodes.values():
            there.world.join(node, f"{node.context.node_config['domain']}-0")
        return FlowerEngine(there, enrolled=True)

    ways = {"two-nodes": simulated(2), "more-nodes-than-clients": simulated(5), "a-deployment": deployed}
    for way, engine in ways.items():
        found = through(engine, overrides, tmp_path / way)
        assert found["state_sha256"] == expected["state_sha256"], way
        assert found["scores"] == expected["scores"], way
    assert kept_positions(tmp_path / "state") == kept_positions(tmp_path / "inline" / "clients")


def test_a_rounded_transport_gives_the_same_state_through_flower(tmp_path: Path) -> None:
    overrides = [*OVERRIDES, "method=fdse", "rounds.transport=bfloat16"]
    expected = through(InlineEngine, overrides, tmp_path / "inline")
    manager = deployment(tmp_path / "state", [*overrides, f"output={tmp_path / 'nodes'}"])
    found = through(lambda _: FlowerEngine(Deployment(*manager.nodes.values())), overrides, tmp_path / "nodes")
    assert found["state_sha256"] == expected["state_sha256"]
    assert found["bytes"]["up"] == pytest.approx(expected["bytes"]["up"], rel=0.01)  # seconds differ in digits


# ---- one exchange ----------------------------------------------------------------------------------------------------


@GRIDS
def test_all_clients_are_asked_at_once(grid: Any) -> None:
    """The 40 answer only when all have been asked; no thread is started for any of them."""
    waiting: list[Message] = []
    threads = threading.active_count()

    def answer(message: Message) -> Message | None:
        waiting.append(message)
        assert threading.active_count() <= threads + 2, "Flower's own two that push parts"
        return scripted(REFUSAL)(message) if len(waiting) >= 40 else None

    names = [f"c{index:02}" for index in range(40)]
    there = grid(*[answer] * 40)
    _, failures = engine_of(there, *names).exchange(Payload(), asked(*names), 0.2)
    assert len(waiting) == 40
    assert sorted(failure.status for failure in failures) == ["failed"] + ["lost"] * 39


def test_requests_share_one_record_of_tensors() -> None:
    names = ("a", "b", "c")
    grid = Deployment(*[scripted(REFUSAL)] * 3)
    engine_of(grid, *names).exchange(Payload({"w": torch.ones(1000)}), asked(*names), 5)
    shared, own = 3, 3  # chunk, array and their record; the request, the content, and the message
    assert grid.calls.count("PushObject") == shared + own * len(names)


def test_a_message_is_put_into_ray_s_store_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As bytes: an array would be read in place, and stay there (seen over 200 rounds, tests/faults/test_soak.py)."""
    names = ("a", "b", "c")
    puts: list[Any] = []
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(put=lambda what: puts.append(what) or "place", get=len))
    message = Payload({"w": torch.ones(1000)})
    engine = engine_of(Simulation(*[scripted(REFUSAL)] * 3), *names)
    engine.exchange(message, asked(*names), 5)
    for sent in engine.grid.world.seen:
        text = pickle.dumps(sent.content, protocol=5)
        assert len(text) < 2000 < len(encode(message))
        assert recorddict_to_fitins(pickle.loads(text), True).parameters.tensors == [len("place")]  # what ``get`` gives
    assert [type(put) for put in puts] == [bytes]
    assert [decode(put).weights["w"].tolist() for put in puts] == [[1.0] * 1000]


def test_an_answer_leaves_as_an_array_that_ray_copies_once() -> None:
    answer = as_arrays(Message(RecordDict(), 1, "train"), Any, lambda *_: replied(b"\1" * 5000))  # type: ignore[arg-type]
    apart: list[pickle.PickleBuffer] = []
    text = pickle.dumps(answer.content, protocol=5, buffer_callback=apart.append)
    assert len(text) < 2000
    assert [part.raw().nbytes for part in apart] == [5000]
    back = recorddict_to_fitres(pickle.loads(text, buffers=apart), keep_input=True)
    assert bytes(back.parameters.tensors[0]) == b"\1" * 5000


def replied(content: bytes) -> Message:
    result = FitRes(Status(Code.OK, ""), Parameters([content, b""], TENSOR_TYPE), 3, {})
    return Message(fitres_to_recorddict(result, keep_input=True), 1, "train")


def test_an_answer_that_stays_incomplete_holds_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node died over the upload: the others are heard at once, and the round ends at its deadline."""
    monkeypatch.setattr(flower_engine, "GRACE_SECONDS", 0.2)
    grid = Deployment(scripted(REFUSAL), held=1)
    engine = engine_of(grid, "a")
    began = time.monotonic()
    assert engine.exchange(Payload(), asked("a"), 1.0)[1][0].reason == "no complete answer within 1 s"
    assert time.monotonic() - began < 10
    grid.held = 0
    grid.world.join(scripted(REFUSAL))
    engine._nodes["b"] = list(grid.world.nodes)[1]
    _, failures = engine.exchange(Payload(), asked("b"), 5)
    assert [failure.reason for failure in failures] == ["DataError: no images"]
    assert len(engine._inbox._announced) == 0, "nothing is kept of answers that are no longer waited for"


def test_a_reply_with_late_parts_is_received_completely() -> None:
    class Slow(Deployment):
        def work(self) -> None:
            super().work()
            if self.calls.count("PullObject") > 1:
                self.release()

    grid = Slow(scripted(REFUSAL), held=3)
    threading.Timer(0.3, grid.release).start()
    _, failures = engine_of(grid, "a").exchange(Payload(), asked("a"), 20)
    assert [failure.reason for failure in failures] == ["DataError: no images"]


def no_message(*_: Any) -> None:
    raise KeyError("no such part")


@pytest.mark.parametrize(
    ("name", "value", "pulled"),
    [("inflate_object_from_contents", no_message, 7), ("MAX_REPLY_BYTES", 1, 1), ("MAX_PARTS", 6, 0)],
    ids=["parts that make no message", "an answer without end", "an answer of too many parts"],
)
def test_what_cannot_be_received_is_that_client_s_loss(
    name: str, value: Any, pulled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that is too large is given up while it comes."""
    monkeypatch.setattr(f"server.engines.inbox.{name}", value)
    grid = Deployment(scripted(REFUSAL))
    _, failures = engine_of(grid, "a").exchange(Payload(), asked("a"), 5)
    reason = "its answer did not arrive whole: no part came for 180 s, or it is too large"
    assert [(failure.status, failure.reason) for failure in failures] == [("lost", reason)]
    assert grid.calls.count("PullObject") == pulled


def test_how_often_answers_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 5 % late, at most 3 s late, and in an hour not much more looks than Flower's own."""
    for arrival in (0.0, 5.0, 40.0, 3600.0):
        clock, looks = Clock(), 0
        monkeypatch.setattr(flower_engine, "time", clock)
        engine = FlowerEngine(Simulation())

        def pull(_: set[str], clock: Clock = clock, arrival: float = arrival) -> Any:
            nonlocal looks
            looks += 1
            return [("a", None)] if clock.now >= arrival else []

        monkeypatch.setattr(engine._inbox, "pull", pull)
        assert [key for key, _ in engine._receive({"a"}, Deadline(1e9), lambda: None)] == ["a"]
        assert clock.now - arrival <= min(3.0, max(0.02, 0.06 * arrival)) + 1e-6
        assert looks <= arrival / 3.0 + 120


def test_a_signal_that_another_thread_raises_ends_the_wait() -> None:
    """As Flower's watch of the SuperLink does; Python sees it in the main thread only, and only when that wakes."""

    def interrupt(*_: object) -> None:
        raise InterruptedError("the SuperLink is gone")

    engine = engine_of(Simulation(scripted(None)), "a")
    before = signal.signal(signal.SIGUSR1, interrupt)
    threading.Timer(0.5, signal.raise_signal, [signal.SIGUSR1]).start()
    began = time.monotonic()
    try:
        with pytest.raises(InterruptedError):
            engine.exchange(Payload(), asked("a"), 60)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert time.monotonic() - began < 30


def test_sending_counts_towards_the_limit_as_it_does_towards_the_messages_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that ran out would be reported as a ClientApp that ended."""
    clock = Clock()
    engine = engine_of(Simulation(scripted(None)), "a")
    monkeypatch.setattr(flower_engine, "time", clock)
    send = engine._push

    def slowly(messages: Any) -> Any:
        clock.sleep(8)
        return send(messages)

    monkeypatch.setattr(engine, "_push", slowly)
    _, (failure,) = engine.exchange(Payload(), asked("a"), 45)
    assert failure.reason == "no complete answer within 45 s"
    assert clock.now <= 45 + 1e-6


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def ok(parameters: Parameters) -> FitRes:
    return FitRes(Status(Code.OK, ""), parameters, 1, {})


OUTCOMES: dict[str, tuple[Any, str, str]] = {
    "its own error": (REFUSAL, "failed", "no images"),
    "node lost": (Error(ErrorCode.NODE_UNAVAILABLE, "Node Unavailable"), "lost", "Node Unavailable"),
    "no answer": (None, "lost", "no complete answer within 1 s"),
    "another kind of answer": (refusal_to_properties("what?"), "refused", "not the answer of a Goldfinch client"),
    "not our bytes": (ok(Parameters([b"x"], TENSOR_TYPE)), "refused", "truncated"),
    "another type": (ok(Parameters([b"x"], "numpy.ndarray")), "refused", "numpy.ndarray"),
    "no tensors": (ok(Parameters([], TENSOR_TYPE)), "refused", "got 0"),
    "many tensors": (ok(Parameters([b"", b"x"], TENSOR_TYPE)), "refused", "got 2"),
    "no header": (ok(Parameters([encode(Payload(header={"hello": 1}))], TENSOR_TYPE)), "refused", "method"),
}  # fmt: skip


@GRIDS
@pytest.mark.parametrize("case", OUTCOMES)
def test_what_a_node_gives_back_is_named(grid: Any, case: str) -> None:
    answer, status, reason = OUTCOMES[case]
    replies, failures = engine_of(grid(scripted(answer)), "c").exchange(Payload(), asked("c"), 1.0)
    assert not replies
    assert [(failure.client, failure.status) for failure in failures] == [("c", status)]
    assert reason in failures[0].reason
    if status == "failed":
        assert failures[0].traceback == "Traceback ..."


@GRIDS
def test_a_client_without_a_node_is_lost(grid: Any) -> None:
    there = grid(scripted(REFUSAL))
    engine = engine_of(there, "c")
    there.world.leave(engine._nodes["c"])
    _, failures = engine.exchange(Payload(), asked("c", "d"), 5)
    assert [(item.status, item.reason, item.sent) for item in failures] == [("lost", "its node is offline", False)] * 2


DEAD = "ActorDiedError: the actor died. ActorPool is empty"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Error(ErrorCode.UNKNOWN, "anything"), r"Ray actor that trained c died.*resume=true"),
        (Error(ENDS_RUN, "all actors have died"), r"^all actors have died$"),
    ],
    ids=["an actor that died", "a cluster that cannot go on"],
)
def test_what_no_later_round_can_do_without_ends_the_run(error: Error, told: str) -> None:
    """Flower's simulation gives UNKNOWN to all that is neither the ClientApp's error nor its import's."""
    with pytest.raises(EngineError, match=told):
        engine_of(Simulation(scripted(error)), "c").exchange(Payload(), asked("c"), 5)


@GRIDS
@pytest.mark.parametrize(
    "answer",
    [
        failure_to_fit_res(Code.FIT_NOT_IMPLEMENTED, DEAD, DEAD),
        Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, DEAD),
        Error(ErrorCode.LOAD_CLIENT_APP_EXCEPTION, DEAD),
    ],
    ids=["a result", "an exception", "an import"],
)
def test_a_client_s_message_does_not_end_the_run(grid: Any, answer: Any) -> None:
    _, failures = engine_of(grid(scripted(answer)), "c").exchange(Payload(), asked("c"), 5)
    assert [failure.client for failure in failures] == ["c"]
    assert DEAD in failures[0].reason


@pytest.mark.parametrize(
    ("grid", "error"),
    [
        (Simulation, Error(ErrorCode.CLIENT_APP_CRASHED, "the actor on a ended without a reply")),
        (Deployment, Error(ErrorCode.UNKNOWN, DEAD)),
    ],
    ids=["a machine that died", "a device that speaks for Ray"],
)
def test_one_reply_is_lost_and_the_run_goes_on(grid: Any, error: Error) -> None:
    _, failures = engine_of(grid(scripted(error)), "c").exchange(Payload(), asked("c"), 5)
    assert [(failure.status, failure.reason) for failure in failures] == [("lost", error.reason)]


SKETCH = {"domain": "sketch"}


@pytest.mark.parametrize(
    ("config", "overrides", "reason"),
    [
        ({"domian": "sketch"}, OVERRIDES, r"domian is unknown; did you mean 'domain'"),
        ({"domain": "skech"}, OVERRIDES, r"no client skech-0; did you mean 'sketch-0'"),
        ({**SKETCH, "index": 3}, OVERRIDES, "no client sketch-3"),
        ({**SKETCH, "data-dir": "/no/such"}, OVERRIDES, "data-dir /no/such is not a folder"),
        ({**SKETCH, "data-dir": ""}, OVERRIDES, "data-dir  is not a folder"),
        (
            {**SKETCH, "index": "one"},
            OVERRIDES,
            "ConfigError: --node-config: index must be a whole .* got 'one'",
        ),
        ({**SKETCH, "index": 1.5}, OVERRIDES, "index must be a whole number"),
        ({**SKETCH, "device": "gpu"}, OVERRIDES, "ConfigError: --node-config: device must be auto, cpu, .* got 'gpu'"),
        ({"partition-id": -1, "num-partitions": 2}, OVERRIDES, "partition-id must be a whole number"),
        ({"partition-id": 2, "num-partitions": 2}, OVERRIDES, "counts from 0, below num-partitions=2; got 2"),
        ({}, OVERRIDES, "a SuperNode needs --node-config"),
        (SKETCH, ["method=nope"], "cannot use the run's settings, or lacks a library; the log of the device says more"),
    ],
    ids=[
        *("a key", "a domain", "an index", "a folder", "an empty folder", "an index in words", "half an index"),
        *("a processor", "a place below 0", "a place beyond the last", "nothing", "the run's settings"),
    ],
)
def test_a_node_whose_configuration_is_wrong_sends_the_error(
    config: dict[str, Any], overrides: list[str], reason: str
) -> None:
    answer = Node("1", config, overrides).get_properties(GetPropertiesIns({}), None, None)
    with pytest.raises(PayloadError, match=reason):
        properties_to_registrations(answer)


def test_other_code_is_refused_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings([*OVERRIDES, f"output={tmp_path}"])
    node = Node("1", {"domain": "sketch", "state-dir": str(tmp_path)}, [*OVERRIDES, f"output={tmp_path}"])
    other = Request("run", settings.identity, "fpl", 1, "train", "sketch-0", 3, 0, train=True, score=[], code="0" * 16)
    result = node.fit(request_to_fit_ins(encode(Payload()), other), None, 1)
    assert result.status.code != Code.OK
    assert "install the same Goldfinch" in result.status.message
    assert "PayloadError" in str(result.metrics["traceback"])
    monkeypatch.setitem(vars(settings), "own_packages", ("support",))
    prepare_output(settings)
    with pytest.raises(EngineError, match="install the same Goldfinch and the same support on both"):
        run_federation(settings, FlowerEngine(Deployment(node)))


def test_a_request_is_six_objects_of_flower_and_a_reply_seven(tmp_path: Path) -> None:
    """The SuperLink stores, and node and server transfer, each object on its own; FitIns and FitRes need no fewer."""
    overrides = [*OVERRIDES, "method=fedavg", "model=small", "train.rounds=1", "rounds.test_samples=12"]
    overrides.append(f"output={tmp_path / 'run'}")
    found: set[tuple[str, int, int]] = set()
    there = Deployment()

    def counting(node: Node) -> Callable[[Message], Message | None]:
        def reply(message: Message) -> Message | None:
            sent = len(get_all_nested_objects(message))
            answer = node(message)
            assert answer is not None
            answer.metadata.__dict__["_message_id"] = answer.object_id
            found.add((message.metadata.message_type, sent, len(get_all_nested_objects(answer))))
            return answer

        return reply

    for node in deployment(tmp_path / "state", overrides).nodes.values():
        there.world.join(counting(node), f"{node.context.node_config['domain']}-0")
    through(lambda _: FlowerEngine(there, enrolled=True), overrides, tmp_path / "run")
    assert found == {("get_properties", 3, 4), ("train", 6, 7)}


@GRIDS
@pytest.mark.parametrize("code", NO_REPLY)
@pytest.mark.parametrize("online", [True, False])
def test_why_a_reply_is_lost_is_what_the_engine_knows(grid: Any, code: int, online: bool) -> None:
    """Flower gives one text for a killed ClientApp, a cut, and a node that was stopped or killed."""
    there = grid(scripted(Error(code, "may have expired, been deleted, or never existed")))
    engine = engine_of(there, "c")
    push = there.push_messages

    def push_and_leave(messages: Any) -> Any:
        sent = push(messages)
        if not online:
            there.world.leave(engine._nodes["c"])
        return sent

    there.push_messages = push_and_leave
    _, (failure,) = engine.exchange(Payload(), asked("c"), 5.0)
    assert failure.status == "lost"
    place = "its node is online" if online else "its node is offline"
    assert re.fullmatch(rf"no reply \d+ s after it was asked; {place}: .+ \(.+\)", failure.reason, re.DOTALL)


def test_a_part_that_is_sent_again_since_its_answer_was_lost_does_not_end_the_run() -> None:
    """Flower repeats the call, the SuperLink has the part and refuses it: ObjectPushError ended the run."""
    asked_for: list[Any] = []

    def answer(message: Any) -> Any:
        asked_for.append(message)
        return Message(Error(ErrorCode.NODE_UNAVAILABLE, "it was reached"), reply_to=message)

    there = Deployment(answer)
    engine = engine_of(there, "c")
    lost: list[str] = []
    calls = there.__getattr__

    def push_object(request: Any) -> Any:
        response = calls("PushObject")(request)
        if len(lost) == 3:
            return response
        lost.append(request.object_id)
        return calls("PushObject")(request)  # what Flower does after a lost answer

    there.PushObject = push_object
    _, (failure,) = engine.exchange(Payload(), asked("c"), 5.0)
    assert len(lost) == 3
    assert "it was reached" in failure.reason
    assert len(asked_for) == 1, "a device trains once"


@pytest.mark.parametrize("back", [10.1, 12.5])
@pytest.mark.parametrize("other_reports", [3600.0, 8.0, 9.9])
def test_the_moment_in_which_a_killed_node_is_offline_is_not_slept_through(
    back: float, other_reports: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ought to report within ten seconds, is then offline until it is back, and has forgotten its request.

    Another node ought to report a little earlier, and does: Flower is asked then, and the sleep after that was long.
    """
    there = Deployment(scripted(None), scripted(None))
    engine = engine_of(there, "c", "d")
    node, began = engine._nodes["c"], time.time()
    found, other = there.world.link.nodes[node], there.world.link.nodes[engine._nodes["d"]]
    found.online_until = began + 10
    other.online_until = began + other_reports

    class Restart(Clock):
        def time(self) -> float:
            return began + self.now

        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if self.now >= 7:
                other.online_until = began + 3600
            if 10 <= self.now < back:
                found.online_until = began - 1
            elif self.now >= back:
                found.online_until = began + 3600

    clock = Restart()
    monkeypatch.setattr(flower_engine, "time", clock)
    monkeypatch.setattr(flower_engine, "MAX_DELAY_SHARE", 10.0)  # as after a minute of waiting
    _, (failure,) = engine.exchange(Payload(), asked("c"), 300.0)
    assert (failure.status, clock.now < back) == ("lost", True)
