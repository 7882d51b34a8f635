"""FlowerStrategy by itself, in Flower's own loop, and its messages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import RecordDict
from flwr.common import FitIns, FitRes, Parameters
from flwr.compat.common.recorddict_compat import recorddict_to_getpropertiesres
from support.engines import refusal_to_properties
from support.nodes import OVERRIDES, Manager, Node, simulation, through

from client import node as client_node
from common.errors import ConfigError, PayloadError
from common.settings import load_settings
from common.storage import tensors_sha256
from common.wire.payload import TENSOR_TYPE, Payload, decode, encode
from server.engines.inline import InlineEngine
from strategies.core import flower
from strategies.core.flower import (
    FlowerStrategy,
    answer_to_fit_res,
    fit_ins_to_request,
    fit_res_to_answer,
)
from strategies.core.method import Method
from strategies.fedavg import FedAvg
from strategies.fedpall import FedPall
from strategies.fedproc import FedProc
from strategies.fpl import FPL


@pytest.fixture(autouse=True)
def no_devices_of_other_tests() -> None:
    client_node._DEVICES.clear()


@pytest.mark.parametrize(
    ("config", "reason"),
    [({}, "carries no request"), ({"request": 3}, "carries no request"), ({"request": "["}, "not JSON")],
)
def test_an_instruction_of_another_app_is_named(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(PayloadError, match=reason):
        fit_ins_to_request(FitIns(Parameters([encode(Payload())], TENSOR_TYPE), config))


SMALL = [*OVERRIDES, "model=small", "rounds.test_samples=12"]


def strategy_of(method: Method, folder: Path, *more: str, nodes: int = 3) -> tuple[FlowerStrategy, Any]:
    """The strategy of a method, and Flower's manager of so many nodes."""
    overrides = [*SMALL, *more, f"method={method.name}", f"output={folder}"]
    return FlowerStrategy(method, load_settings(overrides)), simulation(nodes, overrides)


def answers_of(strategy: FlowerStrategy, manager: Any, number: int = 1) -> list[tuple[Any, FitRes]]:
    asked = strategy.configure_fit(number, Parameters([], ""), manager)
    return [(proxy, proxy.fit(instruction, None, number)) for proxy, instruction in asked]


def weights_of(strategy: FlowerStrategy) -> str:
    return tensors_sha256(strategy.state.weights)


def test_the_strategy_works_in_flower_s_own_loop(tmp_path: Path) -> None:
    strategy, manager = strategy_of(FPL(), tmp_path, nodes=2)
    first = strategy.initialize_parameters(manager)
    for number in (1, 2):
        results = list(reversed(answers_of(strategy, manager, number)))
        failures: list[Any] = [ValueError("one more node went away")]
        last, metrics = strategy.aggregate_fit(number, results, failures)
        assert set(metrics) == {f"accuracy {domain}" for domain in ("printed", "sketch", "handwritten")}
    assert first is not None
    assert last is not None
    assert decode(last.tensors[0]).weights.keys() == decode(first.tensors[0]).weights.keys()
    expected = through(InlineEngine, [*SMALL, "method=fpl"], tmp_path / "inline")
    assert strategy.state.sha256() == expected["state_sha256"]


def test_the_strategy_refuses_what_another_node_answers(tmp_path: Path) -> None:
    strategy, manager = strategy_of(FedAvg(), tmp_path)
    (one, first), (two, second), _ = answers_of(strategy, manager)
    before = weights_of(strategy)
    strategy.aggregate_fit(1, [(two, first), (one, second)], [])
    assert weights_of(strategy) == before
    strategy.aggregate_fit(1, [(one, first), (two, second)], [])
    assert weights_of(strategy) != before


def test_the_strategy_keeps_a_client_on_its_node_while_that_is_there(tmp_path: Path) -> None:
    overrides = [*OVERRIDES, "method=fedavg", f"output={tmp_path}"]
    strategy = FlowerStrategy(FedAvg(), load_settings(overrides))
    first, second = (Node(cid, {"domain": "sketch", "state-dir": str(tmp_path / cid)}, overrides) for cid in "12")
    both: Any = Manager(first, second)
    assert [proxy.cid for proxy, _ in strategy.configure_fit(1, Parameters([], ""), both)] == ["1"]
    alone: Any = Manager(second)
    assert [proxy.cid for proxy, _ in strategy.configure_fit(2, Parameters([], ""), alone)] == ["2"]


def test_an_update_that_is_no_number_counts_as_none(tmp_path: Path) -> None:
    strategy, manager = strategy_of(FedAvg(), tmp_path)
    strategy.aggregate_fit(1, answers_of(strategy, manager)[1:], [])
    without = weights_of(strategy)
    spoilt, manager = strategy_of(FedAvg(), tmp_path)
    answers = answers_of(spoilt, manager)
    payload = decode(answers[0][1].parameters.tensors[0])
    weights = {name: float("nan") * tensor for name, tensor in payload.weights.items()}
    answers[0][1].parameters.tensors[0] = encode(replace(payload, weights=weights))
    spoilt.aggregate_fit(1, answers, [])
    assert weights_of(spoilt) == without


def test_the_strategy_names_the_domains_that_an_accuracy_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(flower, "log", lambda level, text, *arguments: logged.append(text % arguments))
    strategy, manager = strategy_of(FedAvg(), tmp_path)
    answers = answers_of(strategy, manager)
    _, whole = strategy.aggregate_fit(1, answers, [])
    assert not [line for line in logged if "partial" in line]
    scoring = [len(fit_res_to_answer(answer)[0].scores) > 0 for _, answer in answers]
    del answers[scoring.index(True)]
    _, partial = strategy.aggregate_fit(1, answers, [])
    lost = sorted(name.removeprefix("accuracy ") for name in set(whole) - set(partial))
    assert lost
    expected = f"round 1: the accuracy is partial, without {', '.join(lost)}"
    assert [line for line in logged if "partial" in line] == [expected]


@pytest.mark.parametrize("setting", ["aggregation=geometric_median", "rounds.quorum=1"], ids=["rule", "quorum"])
def test_the_strategy_skips_a_round_with_too_few_answers(setting: str, tmp_path: Path) -> None:
    strategy, manager = strategy_of(FedAvg(), tmp_path, setting)
    before = weights_of(strategy)
    strategy.aggregate_fit(1, answers_of(strategy, manager)[:2], [])
    assert weights_of(strategy) == before
    assert strategy.state.round == 1
    strategy.aggregate_fit(2, answers_of(strategy, manager, 2), [])
    assert weights_of(strategy) != before


def test_a_round_that_was_skipped_has_no_further_exchange(tmp_path: Path) -> None:
    """FedPall: if a train exchange misses the quorum, no client mixes; the next round begins from the state before."""
    strategy, manager = strategy_of(FedPall(), tmp_path)
    before = strategy.state
    strategy.aggregate_fit(1, answers_of(strategy, manager)[:1], [])
    assert strategy.configure_fit(2, Parameters([], ""), manager) == []
    assert strategy.state.sha256() == replace(before, round=1).sha256()
    trained = answers_of(strategy, manager, 3)
    strategy.aggregate_fit(3, trained[:2], [])
    mixed = answers_of(strategy, manager, 4)
    assert [proxy for proxy, _ in mixed] == [proxy for proxy, _ in trained[:2]], "only who trained is asked"
    assert strategy.state.round == 1, "the round ends with its last exchange"
    strategy.aggregate_fit(4, mixed, [])
    assert strategy.state.round == 2
    assert tensors_sha256(strategy.state.extra) != tensors_sha256(before.extra)


@pytest.mark.parametrize("setting", ["method=fedproc", "train.schedule=cosine"])
def test_a_round_beyond_the_schedule_is_refused(setting: str, tmp_path: Path) -> None:
    """FedProc's weight of the contrast would be negative from there on."""
    method = FedProc() if setting == "method=fedproc" else FedAvg()
    strategy, manager = strategy_of(method, tmp_path, setting, "train.rounds=1")
    strategy.aggregate_fit(1, answers_of(strategy, manager), [])
    with pytest.raises(ConfigError, match=r"round 2: .* train.rounds=1 rounds; give FlowerStrategy settings"):
        strategy.configure_fit(2, Parameters([], ""), manager)
    unscheduled, manager = strategy_of(FedAvg(), tmp_path, "train.rounds=1")
    assert unscheduled.configure_fit(2, Parameters([], ""), manager)


def test_a_state_that_is_not_finite_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, manager = strategy_of(FedAvg(), tmp_path)
    answers = answers_of(strategy, manager)
    average = FedAvg.average

    def diverged(self: FedAvg, *arguments: Any) -> Any:
        return {name: tensor / 0 for name, tensor in average(self, *arguments).items()}

    monkeypatch.setattr(FedAvg, "average", diverged)
    monkeypatch.setattr("strategies.core.federation.tensor_specs", lambda tensors: {})
    with pytest.raises(
        ConfigError, match=r"round 1 has values in .* not finite, made of finite replies: .*lower train\.learning_rate"
    ):
        strategy.aggregate_fit(1, answers, [])


class Loud:
    """A node that sends control characters for a terminal."""

    cid = "7"

    def get_properties(self, ins: Any, timeout: Any, group_id: Any) -> Any:
        return refusal_to_properties("\x1b[2Jgone\r" + "x" * 10_000)


def test_a_node_whose_properties_are_of_another_form_ends_no_run() -> None:
    """Flower raises a KeyError when it reads a record that lacks the properties, and a TypeError for other values."""

    class Odd(Loud):
        def get_properties(self, ins: Any, timeout: Any, group_id: Any) -> Any:
            return recorddict_to_getpropertiesres(RecordDict())

    strategy = FlowerStrategy(FedAvg(), load_settings(OVERRIDES))
    assert strategy.configure_fit(1, strategy._parameters(), Manager(Odd())) == []  # type: ignore[arg-type]  # a fake


def test_messages_of_strangers_are_logged_printable_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(flower, "log", lambda level, text, *arguments: logged.append(text % arguments))
    strategy = FlowerStrategy(FedAvg(), load_settings(OVERRIDES))
    assert strategy.configure_fit(1, strategy._parameters(), Manager(Loud())) == []  # type: ignore[arg-type]  # a fake
    answer = {
        "run": "r", "method": "fedavg", "round": 1, "exchange": "train", "client": "\x1b[2Jme", "samples": 2,
        "class_counts": [2], "trained": True, "scores": [], "losses": {}, "steps": 1, "seconds": {}, "peak_bytes": 1,
        "device": "a CPU", "releases": 0,
    }  # fmt: skip
    strategy.aggregate_fit(1, [(Loud(), answer_to_fit_res(Payload(header=answer)))], [])  # type: ignore[list-item]  # a fake
    assert [line for line in logged if "not admitted" in line]
    assert [line for line in logged if "does not host" in line]
    assert all(line.isprintable() and len(line) < 3000 for line in logged)
