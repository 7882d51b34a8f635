"""The guard that compares directions: updates that work against the others are left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.halves import Half, clients
from support.runs import TouchedEngine, run
from support.toy import toy_settings
from torch import Tensor

from common.settings import RunSettings
from common.storage import GlobalState
from common.wire.messages import Request
from common.wire.payload import Payload
from strategies.core.agreement import MAX_UPDATES, SKETCH, Agreement
from strategies.core.federation import Federation
from strategies.core.method import Update

COUNT = 20_000
STATE = GlobalState({"weight": torch.zeros(COUNT)}, round=0)
SERVER = Half(shared=STATE.weights, parameters=frozenset({"weight"}))


def stepped(position: int, step: Tensor, among: int = 5) -> Update:
    """Return the update of a client that moved the parameters by ``step [COUNT]``."""
    return Update({"weight": STATE.weights["weight"] + step}, client=clients([20] * among)[position])


def drawn(seed: int) -> Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(seed))


def left_out(agreement: Agreement, steps: list[Tensor]) -> set[str]:
    updates = [stepped(position, step, len(steps)) for position, step in enumerate(steps)]
    return set(agreement.find(updates, STATE, SERVER))


def orthogonal(count: int) -> list[Tensor]:
    """Return ``count`` orthogonal steps, as updates of different domains nearly are."""
    basis = torch.linalg.qr(torch.stack([drawn(seed) for seed in range(count)]).double().T).Q.T
    return [row.float() for row in basis]


def name_of(position: int, among: int = 5) -> str:
    return clients([20] * among)[position].id


def test_honest_clients_of_different_domains_are_all_kept() -> None:
    agreement = Agreement(seed=0)
    for number in range(10):
        steps = [
            step + drawn(1000 + 10 * number + position) / COUNT**0.5 for position, step in enumerate(orthogonal(5))
        ]
        assert left_out(agreement, steps) == set()


def test_the_negative_mean_of_the_honest_is_left_out_and_no_honest_client_with_it() -> None:
    """Inner-product manipulation: without the step by step comparison all five look opposed."""
    steps = orthogonal(4)
    steps.append(-3 * torch.stack(steps).mean(0))
    assert left_out(Agreement(seed=0), steps) == {name_of(4)}


def test_a_slight_but_lasting_opposition_adds_up_and_is_forgiven_slowly() -> None:
    agreement = Agreement(seed=0)
    honest = orthogonal(5)
    against = honest[4] - 0.15 * torch.stack(honest[:4]).sum(0) / 2
    assert left_out(agreement, [*honest[:4], against]) == set()
    found = [left_out(agreement, [*honest[:4], against]) for _ in range(4)]
    assert found[-1] == {name_of(4)}
    assert left_out(agreement, honest) == {name_of(4)}


def test_a_client_that_turns_around_is_left_out_at_once() -> None:
    agreement = Agreement(seed=0)
    for number in range(3):
        noise = [0.9 * drawn(100 * number + position) / COUNT**0.5 for position in range(5)]
        steps = [step + noise[position] for position, step in enumerate(orthogonal(5))]
        assert left_out(agreement, steps) == set()
    steps[4] = -steps[4]
    assert left_out(agreement, steps) == {name_of(4)}


def test_a_client_that_always_pushes_the_same_way_is_left_out() -> None:
    """Drift: the others change their direction from round to round."""
    agreement = Agreement(seed=0)
    found = []
    for number in range(3):
        steps = [drawn(10 * number + position) for position in range(4)]
        found.append(left_out(agreement, [*steps, drawn(999)]))
    assert found == [set(), {name_of(4)}, {name_of(4)}]


def test_no_client_is_left_out_where_each_keeps_its_direction() -> None:
    """Small learning rates: all own cosines are near 1."""
    agreement = Agreement(seed=0)
    for _ in range(4):
        assert left_out(agreement, orthogonal(5)) == set()


def test_two_that_send_the_same_do_not_vouch_for_each_other() -> None:
    honest = orthogonal(5)
    against = -torch.stack(honest).sum(0)
    assert left_out(Agreement(seed=0), [*honest, against, 1.01 * against]) == {name_of(5, 7), name_of(6, 7)}


def test_less_than_half_are_left_out() -> None:
    step = drawn(0)
    assert len(left_out(Agreement(seed=0), [step, step, -step, -step])) <= 1


@pytest.mark.parametrize("count", [1, 2, MAX_UPDATES + 1], ids=["one", "two", "too many"])
def test_too_few_and_too_many_are_not_compared(count: int) -> None:
    agreement = Agreement(seed=0)
    assert left_out(agreement, [drawn(0) * (-1) ** position for position in range(count)]) == set()
    assert not agreement.memory


def test_an_update_that_does_not_move_is_kept() -> None:
    assert left_out(Agreement(seed=0), [*orthogonal(4), torch.zeros(COUNT)]) == set()


def test_a_sketch_keeps_cosines() -> None:
    first, second = drawn(1), drawn(2)
    agreement = Agreement(seed=0)
    updates = [stepped(0, first, 3), stepped(1, first + second, 3), stepped(2, second, 3)]
    agreement.find(updates, STATE, SERVER)
    (directions,) = [value for key, value in agreement.memory.items() if key.endswith("directions")]
    assert directions.shape == (3, SKETCH)
    exact = torch.nn.functional.cosine_similarity(first, first + second, dim=0)
    assert float(directions[0] @ directions[1]) == pytest.approx(float(exact), abs=0.05)


# ---- in a run --------------------------------------------------------------------------------------------------------


def reversing(settings: RunSettings, client: str) -> Callable[[Request, Payload], Payload]:
    """From the second round on, the client's first step with the opposite sign, many times as long."""
    start = Federation(settings).initial_state().weights
    steps: dict[str, Tensor] = {}

    def edit(request: Request, payload: Payload) -> Payload:
        if request.client != client or not request.train:
            return payload
        weights = dict(payload.weights)
        for name, tensor in payload.weights.items():
            if not tensor.is_floating_point() or "running" in name:
                continue
            if request.round == 1:
                steps[name] = tensor - start[name]
            else:
                weights[name] = tensor - 50 * steps[name]
        return replace(payload, weights=weights)

    return edit


def test_the_record_names_what_was_left_out_and_its_score_counts(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path, train={"rounds": 3}, rounds={"quorum": 1.0, "outliers": "off"})
    done = run(settings, TouchedEngine(settings, edit=reversing(settings, "dark-0")))
    assert done.summary["rounds"] == 3
    rows = [row for row in done.rows("activity.csv") if row["round"] == "2" and row["client"] == "dark-0"]
    assert [row["status"] for row in rows] == ["clipped"]
    assert "rounds.opposing=refuse" in rows[0]["reason"]
    events = [entry for name, entry in done.events if name == "client clipped" and entry["round"] == 2]
    assert [(entry["client"], entry["factors"]) for entry in events] == [("dark-0", {"update": 0.0})]
    assert {row["client"] for row in done.rows("history.csv")} >= {"dark-0"}


def test_nothing_is_compared_when_it_is_off(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path, train={"rounds": 3}, rounds={"opposing": "off", "outliers": "off"})
    done = run(settings, TouchedEngine(settings, edit=reversing(settings, "dark-0")))
    assert {row["status"] for row in done.rows("activity.csv")} <= {"trained", "scored"}


def test_only_the_latest_clients_are_remembered_and_only_those_that_took_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.core.agreement.MAX_REMEMBERED", 6)
    agreement = Agreement(seed=0)
    everyone = clients([20] * 10)
    for chosen in ([0, 1, 2], [3, 4, 5], [0, 6, 7]):
        updates = []
        for position, index in enumerate(chosen):
            weights = {"weight": STATE.weights["weight"] + orthogonal(3)[position]}
            updates.append(Update(weights, client=everyone[index]))
        agreement.find(updates, STATE, SERVER)
    assert agreement.memory[f"{SERVER.exchange}/clients"].tolist() == [3, 4, 5, 0, 6, 7]
    directions = agreement.memory[f"{SERVER.exchange}/directions"]
    assert directions.shape[0] == 6
    first, later = directions[3], directions[4]
    assert torch.linalg.vector_norm(first) > torch.linalg.vector_norm(later), "client 0 took part before"
