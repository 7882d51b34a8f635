"""The bound on lengths: who is far beyond the round's median is refused by name, and nobody else ever is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.halves import COUNTER, PARAMETERS, Half, clients, model_state
from support.runs import Run, TouchedEngine, run
from support.toy import toy_settings

from common.prototypes import PrototypeSet
from common.settings import TrainSettings
from common.storage.state import GlobalState
from common.wire.messages import Request
from common.wire.payload import Payload
from strategies.core.method import Client, Expected, Update
from strategies.core.outliers import outliers

START = model_state("start")
STATE = GlobalState(0, START)
FACTOR = 5.0


def moved(client: Client, parameters: float, statistics: float = 1.0) -> Update:
    """Parameters at that L2 distance from the shared state, and running statistics of that L2 norm."""
    numbers = sum(START[name].numel() for name in PARAMETERS)
    weights = {name: START[name] + parameters / numbers**0.5 for name in PARAMETERS}
    mean = START["norm.running_mean"]
    weights["norm.running_mean"] = torch.full_like(mean, statistics / mean.numel() ** 0.5)
    weights[COUNTER] = START[COUNTER] + 10**6  # counters have no length
    return Update(client, weights)


def refused(updates: list[Update], expected: Expected | None = None, **changes: Any) -> dict[str, str]:
    return outliers(updates, STATE, expected or Expected(), replace(Half(), **changes), FACTOR)


def test_far_beyond_the_median_is_refused_with_its_reason() -> None:
    everyone = clients([20] * 5)
    lengths = [1.0, 0.5, 2.0, 5.2, 0.1]
    found = refused([moved(client, length) for client, length in zip(everyone, lengths, strict=True)])
    assert list(found) == ["c-3"]
    assert "its parameters' distance from the shared state is 5.2, 5.2 times the round's median" in found["c-3"]
    assert "at most 5 times are let in (rounds.outlier_factor=5)" in found["c-3"]
    assert not refused([moved(client, length) for client, length in zip(everyone, [1, 0.5, 2, 4.9, 0.1], strict=True)])


def test_running_statistics_have_a_length_of_their_own() -> None:
    everyone = clients([20] * 3)
    found = refused([moved(everyone[0], 1.0), moved(everyone[1], 1.0, 26.0), moved(everyone[2], 1.0)])
    assert list(found) == ["c-1"]
    assert "running statistics is 26, 26 times the round's median; at most 25 times" in found["c-1"]
    assert not refused([moved(everyone[0], 1.0), moved(everyone[1], 1.0, 24.0), moved(everyone[2], 1.0, 0.01)])


def test_the_order_does_not_matter_and_fewer_than_half_cannot_shift_the_median() -> None:
    everyone = clients([20] * 5)
    updates = [moved(client, length) for client, length in zip(everyone, [1e6, 1.0, 1.1, 1e6, 0.9], strict=True)]
    assert set(refused(updates)) == set(refused(updates[::-1])) == {"c-0", "c-3"}


@pytest.mark.parametrize("count", [1, 2])
def test_of_two_nobody_is_the_outlier(count: int) -> None:
    everyone = clients([20] * count)
    assert not refused([moved(client, 10.0**index) for index, client in enumerate(everyone)])


def test_where_most_stand_still_there_is_no_scale() -> None:
    everyone = clients([20] * 3)
    assert not refused([moved(everyone[0], 0.0, 0.0), moved(everyone[1], 0.0, 0.0), moved(everyone[2], 3.0)])


def test_who_takes_more_steps_may_go_farther() -> None:
    """Ten times the batches of the median client: ten times the way, unless a round ends after so many steps."""
    everyone = clients([32, 32, 320])
    updates = [moved(everyone[0], 1.0), moved(everyone[1], 1.0), moved(everyone[2], 49.0)]
    assert not refused(updates)
    assert set(refused(updates, train=TrainSettings(local_steps=1))) == {"c-2"}
    assert set(refused([*updates[:2], moved(everyone[2], 51.0)])) == {"c-2"}


def rows(length: float, count: int = 1) -> PrototypeSet:
    vectors = torch.zeros(count, 4)
    vectors[:, 0] = 0.5
    vectors[0, 0] = length
    return PrototypeSet(vectors, torch.arange(count), torch.ones(count))


def test_one_long_prototype_among_many_is_seen() -> None:
    everyone = clients([20] * 4)
    updates = [Update(client, {}, rows(1.0 + index, 3)) for index, client in enumerate(everyone[:3])]
    expected = Expected(weights=False, prototypes=True)
    assert not refused([*updates, Update(everyone[3], {}, rows(62.0, 3))], expected)
    found = refused([*updates, Update(everyone[3], {}, rows(63.0, 3))], expected)
    assert list(found) == ["c-3"]
    assert "longest prototype" in found["c-3"]


def test_empty_sets_are_nobody_s_measure() -> None:
    everyone = clients([20] * 4)
    empty = [Update(client, {}, PrototypeSet.empty(4)) for client in everyone[:2]]
    some = [Update(everyone[2], {}, rows(1.0)), Update(everyone[3], {}, rows(900.0))]
    assert not refused([*empty, *some], Expected(weights=False, prototypes=True))


def test_further_tensors_by_norm_or_by_row() -> None:
    """A table with a row per sample is as long as its longest row: many rows are no offence, one long row is."""
    everyone = clients([20] * 3)
    by_row = Expected(weights=False, extra={"features": (torch.float32, ("samples", 4))})
    tables = [torch.ones(2, 4), torch.ones(2, 4), torch.ones(2000, 4)]
    assert not refused([Update(c, {}, extra={"features": t}) for c, t in zip(everyone, tables, strict=True)], by_row)
    tables[2][7] = 100.0
    found = refused([Update(c, {}, extra={"features": t}) for c, t in zip(everyone, tables, strict=True)], by_row)
    assert "longest row of its features" in found["c-2"]
    fixed = Expected(weights=False, extra={"control": (torch.float32, (2,)), "count": (torch.int64, ())})
    sent = [{"control": torch.full((2,), value), "count": torch.tensor(10**9)} for value in (1.0, 1.0, 26.0)]
    found = refused([Update(c, {}, extra=e) for c, e in zip(everyone, sent, strict=True)], fixed)
    assert list(found) == ["c-2"]
    assert "the length of its control" in found["c-2"]


def test_who_still_learns_when_the_others_have_is_no_offender() -> None:
    """A hundred times the others' steps, but a small one beside the parameters themselves."""
    own = float(torch.cat([START[name].flatten() for name in PARAMETERS]).norm())
    everyone = clients([20] * 3)
    lengths = [0.001 * own, 0.001 * own, 0.099 * own]
    assert not refused([moved(client, length) for client, length in zip(everyone, lengths, strict=True)])
    lengths[2] = 0.101 * own
    assert set(refused([moved(client, length) for client, length in zip(everyone, lengths, strict=True)])) == {"c-2"}


# ---- in a run --------------------------------------------------------------------------------------------------------


def far(round_number: int, clients: tuple[str, ...] = ("dark-0",), factor: float = 1e3) -> Callable[..., Payload]:
    """Parameters, and nothing else, so large that they are far from whatever was sent."""

    def edit(request: Request, payload: Payload) -> Payload:
        if request.round != round_number or request.client not in clients or not request.train:
            return payload
        weights = {
            name: tensor * factor if tensor.is_floating_point() and "running" not in name else tensor
            for name, tensor in payload.weights.items()
        }
        return replace(payload, weights=weights)

    return edit


def refusals(done: Run) -> list[tuple[str, str, str]]:
    return [(r["round"], r["client"], r["reason"]) for r in done.rows("activity.csv") if r["status"] == "refused"]


def test_the_round_goes_on_without_it_as_if_it_had_never_answered(tmp_path: Path) -> None:
    settings = toy_settings("fpl", tmp_path / "far", train={"rounds": 3})
    done = run(settings, TouchedEngine(settings, edit=far(2)))
    found = refusals(done)
    assert [entry[:2] for entry in found] == [("2", "dark-0")]
    assert "times the round's median" in found[0][2]
    assert not [row for row in done.rows("activity.csv") if row["round"] == "2" and row["status"] == "trained"
                and row["client"] == "dark-0"]  # fmt: skip
    absent = toy_settings("fpl", tmp_path / "absent", train={"rounds": 3})
    without = run(absent, TouchedEngine(absent, failing=lambda request: request.round == 2 and
                                        request.client == "dark-0" and request.train))  # fmt: skip
    assert done.sha256 == without.sha256


def test_the_quorum_is_counted_after_refusals(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path, train={"rounds": 3}, rounds={"quorum": 1.0})
    done = run(settings, TouchedEngine(settings, edit=far(2)))
    skipped = [entry for name, entry in done.events if name == "round skipped"]
    assert [(entry["round"], entry["answered"], entry["needed"]) for entry in skipped] == [(2, 2, 3)]


def test_without_the_bound_it_is_let_in(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path, rounds={"outlier_factor": None})
    done = run(settings, TouchedEngine(settings, edit=far(2)))
    assert not refusals(done)
    bounded = toy_settings("fedavg", tmp_path / "bounded")
    assert run(bounded, TouchedEngine(bounded, edit=far(2))).sha256 != done.sha256


def test_a_rule_that_needs_more_answers_skips_the_round(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path, train={"rounds": 3}, overrides=("aggregation=median",))
    done = run(settings, TouchedEngine(settings, edit=far(2)))
    skipped = [entry for name, entry in done.events if name == "round skipped"]
    assert [(entry["round"], entry["answered"], entry["needed"], entry["by"]) for entry in skipped] == [
        (2, 2, 3, "aggregation")
    ]
    assert done.summary["rounds"] == 3


def test_a_rule_counts_those_that_were_refused_as_hostile(tmp_path: Path) -> None:
    """Else a client could stop a federation of just as many as the rule needs, by being refused."""
    settings = toy_settings("fedavg", tmp_path, train={"rounds": 3}, overrides=("aggregation=trimmed_mean",))
    done = run(settings, TouchedEngine(settings, edit=far(2)))
    assert [entry[:2] for entry in refusals(done)] == [("2", "dark-0")]
    assert not [name for name, _ in done.events if name == "round skipped"]
    lost = toy_settings("fedavg", tmp_path / "lost", train={"rounds": 3}, overrides=("aggregation=trimmed_mean",))
    engine = TouchedEngine(lost, failing=lambda request: request.round == 2 and request.client == "dark-0")
    assert [entry["needed"] for name, entry in run(lost, engine).events if name == "round skipped"] == [3]
