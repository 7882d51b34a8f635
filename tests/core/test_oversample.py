"""``rounds.oversample``: more clients are asked than are needed, and who comes after them is late."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from flwr.proto.node_pb2 import Node
from rich.console import Console
from support.engines import REFUSAL, asked, engine_of
from support.grids import Deployment, Simulation, scripted
from support.nodes import OVERRIDES, request, simulation, through
from support.runs import Run, TouchedEngine, run
from support.toy import attacked_settings, toy_settings

from common.errors import ConfigError
from common.round_settings import RoundSettings
from common.settings import load_settings
from common.wire.messages import Answer, header_of
from common.wire.payload import Payload
from goldfinch.record import RunRecord as Record
from goldfinch.trackers.live import LiveView
from server.engines.flower import FlowerEngine
from server.engines.inline import InlineEngine
from server.run.accounting import ReleaseCounts
from server.run.engine import ENOUGH, without_the_late
from server.run.events import Subject, describe
from strategies.core.federation import Closing, Reply
from strategies.core.flower import answer_to_fit_res, fit_res_to_answer

SOME = {"participation": 0.67, "oversample": 1.5, "evaluate_every": 100, "quorum": 1.0}
"""Two of three are needed, three are asked, and only the first round and the last score."""


def late(done: Run) -> list[tuple[int, str]]:
    return [(int(row["round"]), row["client"]) for row in done.replies() if row["status"] == "late"]


@pytest.mark.parametrize(
    ("clients", "participation", "oversample", "expected"),
    [(100, 0.1, 1.0, 10), (100, 0.1, 1.3, 13), (100, 0.1, 1.1, 11), (100, 0.9, 1.3, 100), (3, 0.1, 1.01, 2)],
)
def test_how_many_are_asked(clients: int, participation: float, oversample: float, expected: int) -> None:
    assert RoundSettings(participation=participation, oversample=oversample).asked(clients) == expected


@pytest.mark.parametrize(
    ("oversample", "words"),
    [("0.9", "must be greater than or equal to 1"), ("1.25", "asks more clients.*participation=0.8 or less")],
)
def test_what_makes_no_sense_is_refused(oversample: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"oversample={oversample}.*{words}"):
        load_settings([f"rounds.oversample={oversample}"])


def test_the_late_are_named_and_count_as_if_they_had_never_answered(tmp_path: Path) -> None:
    done = run(toy_settings("fedavg", tmp_path / "late", rounds=SOME, train={"rounds": 5}, seed=2))
    found = late(done)
    assert [number for number, _ in found] == [2, 3, 4, 5], "in the first round all score, and are waited for"
    assert len({client for _, client in found}) > 1
    answers = {status: count for status, count in done.summary["answers"].items() if count}
    assert answers == {"admitted": 11, "late": 4}
    assert done.summary["rounds_skipped"] == 0, "the quorum is of those that are needed"
    told = [entry for name, entry in done.events if name == "late"]
    assert [(entry["round"], *entry["clients"]) for entry in told] == found
    assert not any(name.startswith("client ") for name, _ in done.events)
    assert describe("late", told[0], 5) == f"round 2: enough have answered; late: {found[0][1]}"
    assert Record.open(done.folder).summary["rounds"] == 5
    assert [row["bytes_up"] for row in done.replies() if row["status"] == "late"] == ["0"] * 4

    usual = {"evaluate_every": 100}
    all_asked = toy_settings("fedavg", tmp_path / "failing", rounds=usual, train={"rounds": 5}, seed=2)
    away = TouchedEngine(all_asked, failing=lambda asked: (asked.round, asked.client) in found)
    assert run(all_asked, away).sha256 == done.sha256


def test_who_scores_is_waited_for(tmp_path: Path) -> None:
    done = run(toy_settings("fedavg", tmp_path, rounds={**SOME, "evaluate_every": 1}, train={"rounds": 4}))
    assert late(done) == []
    assert {(row["round"], row["domain"]) for row in done.history()} == {
        (str(number), domain) for number in range(5) for domain in ("bright", "dark", "noisy")
    }


def test_further_exchanges_wait_for_those_who_were_in_time(tmp_path: Path) -> None:
    settings = toy_settings("rucr", tmp_path, rounds=SOME, train={"rounds": 3})
    first, second = settings.method.exchanges
    done = run(settings)
    rows = [row for row in done.replies() if row["round"] == "2"]
    in_time = {row["client"] for row in rows if row["exchange"] == first and row["status"] != "late"}
    assert len(in_time) == 2
    assert {row["client"]: row["status"] for row in rows if row["exchange"] == second} == dict.fromkeys(
        in_time, "trained"
    )


def test_more_than_are_needed_may_be_in_time_and_all_go_on(tmp_path: Path) -> None:
    """In the first exchange all three score, and are waited for, though two are enough."""
    settings = toy_settings("fccl_plus", tmp_path, rounds={**SOME, "evaluate_every": 1}, train={"rounds": 1})
    first, second = settings.method.exchanges
    assert settings.method.scored_at == first
    done = run(settings)
    statuses = {row["client"]: row["status"] for row in done.replies() if row["exchange"] == second}
    assert statuses == {"bright-0": "trained", "dark-0": "trained", "noisy-0": "trained"}


def test_two_simulations_agree_who_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.engines.flower.InRay", lambda blob: blob)  # the nodes are in this process
    overrides = [*OVERRIDES, "method=fedavg", *(f"rounds.{name}={value}" for name, value in SOME.items())]
    expected = through(InlineEngine, overrides, tmp_path / "inline")

    def simulated(settings: Any) -> FlowerEngine:
        nodes = simulation(2, [*overrides, f"output={settings.output}"]).nodes.values()
        return FlowerEngine(Simulation(*nodes), simulated=True)

    found = through(simulated, overrides, tmp_path / "nodes")
    assert expected["answers"]["late"] == 1
    assert (found["state_sha256"], found["answers"]) == (expected["state_sha256"], expected["answers"])


def test_an_update_that_an_attack_withholds_is_not_in_time(tmp_path: Path) -> None:
    """Who sends nothing cannot be among the first to answer: two of the three clients are needed, and two count."""
    done = run(attacked_settings("absent", "fedavg", tmp_path, rounds=SOME, train={"rounds": 4}))
    for number in range(1, 5):
        statuses = {row["client"]: row["status"] for row in done.replies() if row["round"] == str(number)}
        assert statuses == {"bright-0": "trained", "dark-0": "lost", "noisy-0": "trained"}


def test_what_a_late_client_released_counts(tmp_path: Path) -> None:
    ledger = ReleaseCounts(tmp_path)
    for status, releases in (("late", ""), ("trained", "1")):
        ledger.count_requests("run", ["a"])
        ledger.count_replies("run", [{"client": "a", "status": status, "releases": releases}])
    assert ledger.releases() == {"a": 2}


def test_the_live_view_counts_them_apart_from_failures(tmp_path: Path) -> None:
    view = LiveView(Subject.of(toy_settings("fedavg", tmp_path)), Console(width=120))
    view.last_outcomes = {"trained": 10, "late": 3}
    view.outcomes.update(view.last_outcomes)
    shown = [(label, str(text)) for label, text in view._outcomes()]
    assert shown == [("clients", "10 of 13 trained   none refused, none failed"), ("late", "3 now, 3 in all")]


# ---- real devices ----------------------------------------------------------------------------------------------------


class Slow:
    """A node that plays a client and answers when it is told to."""

    def __init__(self, client: str) -> None:
        self.client, self.answers, self.seen = client, True, 0
        self.open: list[Message] = []

    def __call__(self, message: Message) -> Message | None:
        self.seen += 1
        if self.answers:
            return scripted(result(self.client))(message)
        self.open.append(message)
        return None


def slow_engine(*names: str) -> tuple[Any, Deployment, dict[str, Slow]]:
    nodes = {name: Slow(name) for name in names}
    grid = Deployment(*nodes.values())
    return engine_of(grid, *nodes), grid, nodes


def send_late(grid: Deployment, place: int, node: Slow) -> None:
    """The node's answer to what it was asked first."""
    grid._send(Node(node_id=list(grid.world.nodes)[place]), scripted(result(node.client))(node.open.pop()))


def result(client: str) -> Any:
    of = request(client)
    header = Answer(
        of.run, of.method, of.round, of.exchange, client, 2, [1, 1], True, [], {}, 1, {}, 0, "a test", 0
    )  # fmt: skip
    return answer_to_fit_res(Payload({"w": torch.ones(300_000)}, header=header_of(header)))


def test_scores_alone_do_not_close_a_simulated_exchange() -> None:
    """A client that only scores is waited for, and is none of the updates that are enough."""
    replies = []
    for client in ("a", "b", "c", "scorer"):
        answer, payload, _ = fit_res_to_answer(result(client))
        replies.append(Reply(client, replace(answer, trained=client != "scorer"), payload))
    for number in range(1, 20):  # the order in which they come is another in each round
        arrived, failures = without_the_late(replies, [], Closing(2, frozenset({"scorer"}), number))
        trained = [reply.client for reply in arrived if reply.answer.trained]
        assert len(trained) >= 2
        assert sorted([*trained, "scorer", *(failure.client for failure in failures)]) == ["a", "b", "c", "scorer"]


def test_no_exchange_waits_for_the_late_and_nothing_is_kept_of_them() -> None:
    engine, grid, nodes = slow_engine("a", "b", "c")
    nodes["b"].answers = False
    closing = Closing(2, frozenset())
    replies, failures = engine.exchange(Payload(), asked(*nodes), 600, closing=closing)
    assert sorted(reply.client for reply in replies) == ["a", "c"]
    assert [(failure.client, failure.status, failure.reason) for failure in failures] == [("b", "late", ENOUGH)]

    replies, failures = engine.exchange(Payload(), asked(*nodes), 600, closing=closing)
    assert [(failure.client, failure.status, failure.sent) for failure in failures] == [("b", "late", False)]
    assert nodes["b"].seen == 1, "it is at work on the first"

    store = grid.world.link.object_store
    send_late(grid, 1, nodes["b"])
    assert len(store) > 0
    engine.exchange(Payload(), asked("a", "c"), 600, closing=closing)
    assert engine._inbox.late == {}
    assert len(engine._inbox._announced) == 0
    assert len(store) == 0, "nor does the SuperLink keep the late answer"

    nodes["b"].answers = True
    replies, failures = engine.exchange(Payload(), asked(*nodes), 600, closing=Closing(3, frozenset()))
    assert (sorted(reply.client for reply in replies), failures) == (["a", "b", "c"], [])


def test_a_late_answer_that_comes_in_parts_is_taken_without_keeping_them() -> None:
    engine, grid, nodes = slow_engine("a", "b")
    nodes["b"].answers = False
    closing = Closing(1, frozenset())
    engine.exchange(Payload(), asked(*nodes), 600, closing=closing)
    grid.held = 1
    send_late(grid, 1, nodes["b"])
    grid.held = 0
    engine.exchange(Payload(), asked("a"), 600, closing=closing)
    (announced,) = engine._inbox._announced.values()
    assert sum(map(len, announced.parts.values())) == 0
    grid.release()
    engine.exchange(Payload(), asked("a"), 600, closing=closing)
    assert (engine._inbox.late, len(grid.world.link.object_store)) == ({}, 0)


def test_who_scores_is_waited_for_and_asked_though_it_is_late() -> None:
    engine, _, nodes = slow_engine("a", "b")
    nodes["b"].answers = False
    engine.exchange(Payload(), asked(*nodes), 600, closing=Closing(1, frozenset()))
    nodes["b"].answers = True
    replies, _ = engine.exchange(Payload(), asked(*nodes), 600, closing=Closing(1, frozenset({"b"})))
    assert "b" in {reply.client for reply in replies}


def test_failures_do_not_count_as_answers_and_a_node_that_left_is_asked_again() -> None:
    nodes = {"a": scripted(REFUSAL), "b": Slow("b"), "c": Slow("c")}
    grid = Deployment(*nodes.values())
    engine = engine_of(grid, *nodes)
    nodes["c"].answers = False  # type: ignore[union-attr]
    replies, failures = engine.exchange(Payload(), asked(*nodes), 600, closing=Closing(1, frozenset()))
    assert [reply.client for reply in replies] == ["b"]
    assert sorted((failure.client, failure.status) for failure in failures) in (
        [("a", "failed"), ("c", "late")],
        [("a", "late"), ("c", "late")],
    )
    identity = list(grid.world.nodes)[2]
    grid.world.leave(identity)
    engine._update_nodes()
    grid.world.come_back(identity, Slow("c"))
    replies, _ = engine.exchange(Payload(), asked("c"), 600, closing=Closing(1, frozenset()))
    assert [reply.client for reply in replies] == ["c"]


@pytest.mark.parametrize("oversample", [1.004, 1.5, 3.0])
def test_the_remedy_of_oversampling_all_is_accepted(oversample: float) -> None:
    with pytest.raises(ValueError, match="take participation=") as refused:
        RoundSettings(oversample=oversample)
    participation = float(str(refused.value).partition("take participation=")[2].split()[0])
    assert RoundSettings(oversample=oversample, participation=participation).oversample == oversample
