"""The bound on lengths: who is too long is scaled down to it and still counts, or is refused where that is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.halves import COUNTER, PARAMETERS, Half, clients, model_state
from support.runs import Run, TouchedEngine, run
from support.toy import toy_settings
from torch import Tensor

from common.errors import ConfigError
from common.prototypes import PrototypeSet
from common.round_settings import TrainSettings
from common.settings import load_settings
from common.storage import GlobalState
from common.wire.messages import Request
from common.wire.payload import Payload
from server.run.events import describe
from strategies.core.bounds import MAX_RATIO, MEMORY, STILL, Bounds
from strategies.core.federation import Federation
from strategies.core.method import Client, Update, UploadSpec

MEAN, VARIANCE = "norm.running_mean", "norm.running_var"
START = model_state("start")
STATE = GlobalState(START, round=0)
OWN = float(torch.cat([START[name].flatten() for name in PARAMETERS]).norm())
FACTOR = 2.0


def moved(client: Client, parameters: float, statistics: float = 1.0) -> Update:
    """Parameters at that L2 distance from the shared state, running means of that L2 norm."""
    numbers = sum(START[name].numel() for name in PARAMETERS)
    weights = {name: START[name] + parameters / numbers**0.5 for name in PARAMETERS}
    weights[MEAN] = torch.full_like(START[MEAN], statistics / START[MEAN].numel() ** 0.5)
    weights[VARIANCE] = START[VARIANCE]
    weights[COUNTER] = START[COUNTER] + 10**6  # counters have no length
    return Update(weights, client=client)


def found(
    updates: list[Update], expected: UploadSpec | None = None, bounds: Bounds | None = None, **changes: Any
) -> dict[str, dict[str, tuple[float, float]]]:
    bounds = bounds or Bounds(FACTOR)
    return bounds.find(updates, STATE, expected or UploadSpec(), replace(Half(), **changes))


def limits(updates: list[Update], expected: UploadSpec | None = None, **changes: Any) -> dict[str, dict[str, float]]:
    """The bounds of what is too long."""
    return {
        client: {name: round(bound, 4) for name, (_, bound) in parts.items()}
        for client, parts in found(updates, expected, **changes).items()
    }


def scaled_down(update: Update, most: Mapping[str, float], expected: UploadSpec | None = None) -> Update:
    return Bounds(FACTOR).scale(update, STATE, expected or UploadSpec(), Half(), most)


def distance(weights: Mapping[str, Tensor], names: frozenset[str]) -> float:
    return float(torch.cat([(weights[name] - START[name]).flatten() for name in names]).norm())


# ---- one exchange ----------------------------------------------------------------------------------------------------


def test_what_is_too_long_is_scaled_to_the_bound_in_its_own_direction() -> None:
    long = moved(clients([20])[0], 5.0, 7.0)
    short = scaled_down(long, {"parameters": 2.0, MEAN: 0.5})
    assert distance(short.weights, PARAMETERS) == pytest.approx(2.0, rel=1e-5)
    torch.testing.assert_close(short.weights[MEAN], long.weights[MEAN] * 0.5 / 7.0)
    for name in PARAMETERS:
        expected = START[name].double() + 0.4 * (long.weights[name].double() - START[name].double())
        torch.testing.assert_close(short.weights[name].double(), expected, rtol=1e-5, atol=1e-6)
    assert short.weights[COUNTER] is long.weights[COUNTER]
    assert short.client is long.client
    parameters_alone = scaled_down(long, {"parameters": 2.0})
    assert parameters_alone.weights[MEAN] is long.weights[MEAN]


def test_a_domain_of_its_own_scale_keeps_its_variances_however_near_the_others_lie_together() -> None:
    everyone = clients([20] * 4)
    same = [moved(client, 1.0) for client in everyone]  # all variances are those that were sent

    def scaled(factor: float) -> list[Update]:
        return [*same[:3], replace(same[3], weights={**same[3].weights, VARIANCE: factor * START[VARIANCE]})]

    assert not limits(scaled(FACTOR**2 - 0.1))
    length, bound = found(scaled(60.0))["c-3"][VARIANCE]
    middle = float(START[VARIANCE].norm())
    assert (length, bound) == pytest.approx((60 * middle, FACTOR**2 * middle), rel=1e-5)
    assert (scaled_down(scaled(60.0)[3], {VARIANCE: bound}).weights[VARIANCE] > 0).all()


def test_the_order_does_not_matter_and_fewer_than_half_cannot_shift_the_median() -> None:
    everyone = clients([20] * 5)
    updates = [moved(client, length) for client, length in zip(everyone, [1e6, 1.0, 1.1, 1e6, 0.9], strict=True)]
    assert limits(updates) == limits(updates[::-1]) == {"c-0": {"parameters": 2.2}, "c-3": {"parameters": 2.2}}


@pytest.mark.parametrize("count", [1, 2])
def test_of_two_clients_neither_is_an_outlier(count: int) -> None:
    everyone = clients([20] * count)
    assert not limits([moved(client, 10.0**index) for index, client in enumerate(everyone)])


@pytest.mark.parametrize("few", ["data.domains=[signs,sketch]", "rounds.participation=0.5"])
def test_a_bound_that_no_round_could_have_is_refused(few: str) -> None:
    """Each of two updates was accepted as it was, in a run whose record says ``rounds=guarded``."""
    with pytest.raises(ConfigError, match=r"needs 3 answers a round and 2 clients are asked.*rounds\.participation"):
        Federation(load_settings(["method=fedavg", "data=glyphs", "rounds=guarded", few]))
    Federation(load_settings(["method=pooled", "data=glyphs", "rounds=guarded"]))


def test_where_most_stand_still_a_small_step_is_none_too_long() -> None:
    """Parameters count as moved by 2 % of their own norm at least; what has no norm of its own has no scale then."""
    everyone = clients([20] * 3)
    floor = FACTOR * STILL * OWN
    still = [moved(everyone[0], 0.0, 0.0), moved(everyone[1], 0.0, 0.0)]
    assert not limits([*still, moved(everyone[2], 0.99 * floor, 5.0)])
    assert limits([*still, moved(everyone[2], 1.01 * floor, 5.0)]) == {"c-2": {"parameters": round(floor, 4)}}


@pytest.mark.parametrize(("samples", "ratio"), [(10, 1.0), (48, 1.5), (64, MAX_RATIO), (2**40, MAX_RATIO)])
def test_registered_samples_raise_the_bound_by_a_limited_ratio(samples: int, ratio: float) -> None:
    """They never lower it: half as many batches as the others have, and the ratio is 1."""
    everyone = clients([32, 32, samples])
    updates = [moved(everyone[0], 1.0), moved(everyone[1], 1.0), moved(everyone[2], 1e6, 1e6)]
    train = TrainSettings(batch_size=16)
    assert limits(updates, train=train) == {"c-2": {"parameters": FACTOR * ratio, MEAN: FACTOR**2}}
    assert limits(updates, train=replace(train, local_steps=1))["c-2"]["parameters"] == FACTOR


def rows(length: float, count: int = 1) -> PrototypeSet:
    vectors = torch.zeros(count, 4)
    vectors[:, 0] = 0.5
    vectors[0, 0] = length
    return PrototypeSet(vectors, torch.arange(count), torch.ones(count))


def test_prototypes_by_the_longest_row_and_only_long_rows_are_scaled() -> None:
    everyone = clients([20] * 4)
    updates = [Update({}, rows(1.0 + index, 3), client=client) for index, client in enumerate(everyone[:3])]
    expected = UploadSpec(weights=False, prototypes=True)
    assert not limits([*updates, Update({}, rows(9.9, 3), client=everyone[3])], expected)
    long = Update({}, rows(100.0, 3), client=everyone[3])
    assert limits([*updates, long], expected) == {"c-3": {"prototypes": 10.0}}
    short = scaled_down(long, {"prototypes": 10.0}, expected).prototypes
    torch.testing.assert_close(short.vectors[0], torch.tensor([10.0, 0, 0, 0]))
    assert torch.equal(short.vectors[1:], long.prototypes.vectors[1:])
    assert short.labels is long.prototypes.labels
    assert short.weights is long.prototypes.weights


def test_empty_sets_do_not_count_in_the_median() -> None:
    everyone = clients([20] * 4)
    empty = [Update({}, PrototypeSet.empty(4), client=client) for client in everyone[:2]]
    some = [Update({}, rows(1.0), client=everyone[2]), Update({}, rows(900.0), client=everyone[3])]
    assert not limits([*empty, *some], UploadSpec(weights=False, prototypes=True))


def test_tables_by_row_and_other_tensors_by_their_norm() -> None:
    """A table with a row per sample is as long as its longest row: many rows are no offence, one long row is."""
    everyone = clients([20] * 3)
    by_row = UploadSpec(weights=False, extra={"features": (torch.float32, ("samples", 4))})
    tables = [torch.ones(2, 4), torch.ones(2, 4), torch.ones(2000, 4)]
    assert not limits(
        [Update({}, extra={"features": t}, client=c) for c, t in zip(everyone, tables, strict=True)], by_row
    )
    tables[2][7] = 100.0
    updates = [Update({}, extra={"features": t}, client=c) for c, t in zip(everyone, tables, strict=True)]
    assert limits(updates, by_row) == {"c-2": {"features by row": 8.0}}
    short = scaled_down(updates[2], {"features by row": 8.0}, by_row).extra["features"]
    torch.testing.assert_close(short[7], torch.full((4,), 4.0))
    assert torch.equal(short[8:], tables[2][8:])
    fixed = UploadSpec(weights=False, extra={"control/a": (torch.float32, (2,)), "control/b": (torch.float32, (2,)),
                                           "count": (torch.int64, ())})  # fmt: skip
    sent = [
        {"control/a": torch.full((2,), value), "control/b": torch.zeros(2), "count": torch.tensor(10**9)}
        for value in (1.0, 1.0, 10.0)
    ]
    updates = [Update({}, extra=e, client=c) for c, e in zip(everyone, sent, strict=True)]
    (name, bound), = limits(updates, fixed)["c-2"].items()  # fmt: skip
    assert (name, bound) == ("control", pytest.approx(4 * 2**0.5, rel=1e-3))
    short_extra = scaled_down(updates[2], {name: bound}, fixed).extra
    torch.testing.assert_close(short_extra["control/a"], torch.full((2,), 4.0), rtol=1e-3, atol=0)
    assert int(short_extra["count"]) == 10**9


# ---- history ---------------------------------------------------------------------------------------------------------


Lengths = Callable[[int], list[float]]
"""The length of each client's parameters in a round."""


def rounds_of(bounds: Bounds, lengths: Lengths, count: int) -> list[list[float]]:
    """Return the accepted length of each client's parameters, by round."""
    everyone = clients([20] * len(lengths(1)))
    accepted = []
    for number in range(1, count + 1):
        asked = lengths(number)
        cut = found([moved(c, length) for c, length in zip(everyone, asked, strict=True)], bounds=bounds)
        accepted.append([
            cut.get(c.id, {}).get("parameters", (0.0, length))[1] for c, length in zip(everyone, asked, strict=True)
        ])  # fmt: skip
    return accepted


STILL_LENGTH = max(0.2, STILL * OWN)
HISTORIES: dict[str, tuple[Lengths, list[float]]] = {
    "long updates in every round keep the same bound": (lambda number: [3.0, 1.0, 1.0, 1.0], [2.0] * 12),
    "growing by 8 % a round earns nothing beyond the bound of the others' median": (
        lambda number: [1.08**number, 1.0, 1.0, 1.0, 1.0],
        [min(1.08**number, 2.0) for number in range(1, 41)],
    ),
    "one exchange of short updates does not cut the next": (
        lambda number: [0.1, 0.1, 0.1] if number == 6 else [1.9, 1.0, 1.0],
        [1.9] * 5 + [0.1, 1.9],
    ),
    "who still learns when the others have learnt keeps its way for a while": (
        lambda number: [3.0, 1.9, 2.0] if number <= 5 else [3.0, 0.2, 0.2],
        [3.0] * 8 + [FACTOR * STILL_LENGTH],
    ),
}


@pytest.mark.parametrize("case", HISTORIES)
def test_the_first_client_is_accepted_as_far_as_the_rounds_so_far_say(case: str) -> None:
    lengths, expected = HISTORIES[case]
    bounds = Bounds(FACTOR)
    accepted = [row[0] for row in rounds_of(bounds, lengths, len(expected))]
    assert accepted == pytest.approx(expected, rel=1e-4)
    assert {tuple(tensor.shape) for tensor in bounds.medians.values()} == {(MEMORY,)}, "what is remembered is small"


# ---- in a run --------------------------------------------------------------------------------------------------------


def far(round_number: int, clients: tuple[str, ...] = ("dark-0",), factor: float = 1e3) -> Callable[..., Payload]:
    """Parameters, and nothing else, so large that they are far from what was sent."""

    def edit(request: Request, payload: Payload) -> Payload:
        if request.round != round_number or request.client not in clients or not request.train:
            return payload
        weights = {
            name: tensor * factor if tensor.is_floating_point() and "running" not in name else tensor
            for name, tensor in payload.weights.items()
        }
        return replace(payload, weights=weights)

    return edit


def not_finite(round_number: int) -> Callable[..., Payload]:
    """In one round, dark-0 sends values that are not finite."""
    return far(round_number, factor=float("nan"))


def refusals(done: Run) -> list[tuple[str, str, str]]:
    return [(r["round"], r["client"], r["reason"]) for r in done.replies() if r["status"] == "refused"]


def test_the_round_goes_on_without_it_as_if_it_had_never_answered(tmp_path: Path) -> None:
    settings = toy_settings("fpl", tmp_path / "far")
    done = run(settings, TouchedEngine(settings, edit=not_finite(2)))
    found = refusals(done)
    assert [entry[:2] for entry in found] == [("2", "dark-0")]
    assert "values that are not finite" in found[0][2]
    absent = toy_settings("fpl", tmp_path / "absent")
    without = run(absent, TouchedEngine(absent, failing=lambda request: request.round == 2 and
                                        request.client == "dark-0" and request.train))  # fmt: skip
    assert done.sha256 == without.sha256


@pytest.mark.parametrize(
    ("more", "by"),
    [({"rounds": {"quorum": 1.0}}, "rounds.quorum"), ({"overrides": ("aggregation=geometric_median",)}, "aggregation")],
    ids=["quorum", "rule"],
)
def test_a_refusal_may_leave_too_few_answers_for_a_quorum_or_a_rule(
    more: dict[str, Any], by: str, tmp_path: Path
) -> None:
    settings = toy_settings("fedavg", tmp_path, train={"rounds": 3}, **more)
    done = run(settings, TouchedEngine(settings, edit=not_finite(2)))
    (skipped,) = [entry for name, entry in done.events if name == "round skipped"]
    assert [skipped[name] for name in ("round", "answered", "needed", "by")] == [2, 2, 3, by]
    assert done.summary["rounds"] == 3


def test_with_the_bound_it_is_scaled_and_recorded(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path, train={"rounds": 3}, rounds={"quorum": 1.0, "outliers": "clip"})
    done = run(settings, TouchedEngine(settings, edit=far(2)))
    assert not refusals(done)
    assert not [name for name, _ in done.events if name == "round skipped"]
    told = [entry for name, entry in done.events if name == "client scaled" and entry["round"] == 2]
    (entry,) = [entry for entry in told if entry["client"] == "dark-0"]
    assert 0 < entry["factors"]["parameters"] < 0.01
    assert "parameters by " in entry["reason"]
    assert "dark-0 scaled: longer than the bound" in describe("client scaled", entry, 3)
    mine = [r for r in done.replies() if r["round"] == "2" and r["client"] == "dark-0"]
    assert [(row["status"], row["reason"]) for row in mine] == [("scaled", entry["reason"])]
    assert int(mine[0]["samples"]) > 0
    totals = [entry["outcomes"] for name, entry in done.events if name == "round done" and entry["round"] == 2]
    assert totals[0]["scaled"] >= 1


def test_by_default_a_long_update_is_accepted_as_it_is(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path / "plain")
    done = run(settings, TouchedEngine(settings, edit=far(2)))
    assert {row["status"] for row in done.replies()} <= {"trained", "scored"}
    bounded = toy_settings("fedavg", tmp_path / "bounded", rounds={"outliers": "clip"})
    assert run(bounded, TouchedEngine(bounded, edit=far(2))).sha256 != done.sha256


def test_a_resumed_run_remembers_what_the_guards_do(tmp_path: Path) -> None:
    """A client that is ten times too long in every round: the bound depends on earlier medians, which a stop keeps."""

    def always(request: Request, payload: Payload) -> Payload:
        return far(request.round, factor=10.0)(request, payload)

    make = partial(toy_settings, "fedavg", train={"rounds": 4}, rounds={"outliers": "clip"})
    whole = make(tmp_path / "whole")
    done = run(whole, TouchedEngine(whole, edit=always))
    assert len([name for name, _ in done.events if name == "client scaled"]) >= 4
    half = make(tmp_path / "half")
    run(half, TouchedEngine(half, edit=always), stop_after=3)
    again = replace(half, resume=True)
    assert run(again, TouchedEngine(again, edit=always)).sha256 == done.sha256
