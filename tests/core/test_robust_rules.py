"""Median, trimmed mean, Krum: the formulas in loops, Flower's own functions, and what hostile clients cannot do."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.server.strategy.aggregate import aggregate_krum, aggregate_median, aggregate_trimmed_avg
from hypothesis import given
from hypothesis import strategies as draw
from scipy.optimize import minimize
from support.runs import TouchedEngine, run
from support.toy import composed, method_at_defaults, toy_settings

from common.choices import CONF
from common.errors import ConfigError
from common.numerics import generator
from common.prototypes import PrototypeSet
from common.settings import RunSettings
from server.engines.inline import InlineEngine
from strategies.core.aggregation import Mean, RuleContext, average
from strategies.core.robust import (
    Bucketing,
    CenteredClipping,
    GeometricMedian,
    Krum,
    Median,
    RobustRule,
    StatisticsMedian,
    TrimmedMean,
)

State = dict[str, torch.Tensor]

RULES = {
    "median": Median(),
    "trimmed 1": TrimmedMean(1),
    "trimmed 2": TrimmedMean(2),
    "krum": Krum(1),
    "krum 2": Krum(2),
    "multi-krum": Krum(1, keep=None),
    "multi-krum 2 of 3": Krum(2, keep=3),
    "geometric median": GeometricMedian(),
    "centered clipping": CenteredClipping(),
    "centered clipping, 3 steps": CenteredClipping(radius=0.7, iterations=3),
    "bucketing, median": Bucketing(2, Median()),
    "bucketing, geometric median": Bucketing(2),
}
TOLERANCE = dict.fromkeys(RULES, 1e-06) | {"geometric median": 1e-4, "bucketing, geometric median": 1e-4}
"""Of the general minimiser that the geometric median is compared with, too."""
every_rule = pytest.mark.parametrize("name", RULES)


def states(count: int, seed: int = 0) -> list[State]:
    draws = generator(seed, "robust states")
    return [
        {"w": torch.randn(3, 2, generator=draws), "b": torch.randn(4, generator=draws), "n": torch.tensor(10 + k)}
        for k in range(count)
    ]


def flat(state: State) -> list[float]:
    return [value for name in ("w", "b") for value in state[name].double().flatten().tolist()]


# ---- the formulas, in loops ------------------------------------------------------------------------------------------


def krum_order(rows: Sequence[Sequence[float]], attackers: int) -> list[int]:
    """Clients by the sum of squared distances to their n - f - 2 nearest others, the lowest first."""
    scores = []
    for index, row in enumerate(rows):
        others = [other for position, other in enumerate(rows) if position != index]
        squares = sorted(sum((a - b) ** 2 for a, b in zip(row, other, strict=True)) for other in others)
        scores.append(sum(squares[: len(rows) - attackers - 2]))
    return sorted(range(len(rows)), key=lambda index: scores[index])


def clipped_about(
    centre: Sequence[float], rows: Sequence[Sequence[float]], radius: float, iterations: int
) -> list[float]:
    """v <- v + 1/n sum_i (x_i - v) min(1, r / |x_i - v|), where r is ``radius`` times the median of |x_i - v|."""
    centre = list(centre)
    for _ in range(iterations):
        distances = [math.dist(row, centre) for row in rows]
        longest = radius * statistics.median(distances)
        step = [0.0] * len(centre)
        for row, distance in zip(rows, distances, strict=True):
            for place in range(len(centre)):
                step[place] += (row[place] - centre[place]) * min(1.0, longest / distance) / len(rows)
        centre = [number + change for number, change in zip(centre, step, strict=True)]
    return centre


def expected_row(rule: Mean, rows: Sequence[Sequence[float]]) -> list[float]:
    columns = list(zip(*rows, strict=True))
    if isinstance(rule, Median):
        return [statistics.median(column) for column in columns]
    if isinstance(rule, TrimmedMean):
        cut = min(rule.attackers, (len(rows) - 1) // 2)
        return [statistics.mean(sorted(column)[cut : len(rows) - cut]) for column in columns]
    if isinstance(rule, GeometricMedian):
        points = np.array(rows)
        best_point = minimize(lambda at: np.linalg.norm(points - at, axis=1).sum(), points.mean(0), tol=1e-12)
        return list(best_point.x)
    if isinstance(rule, CenteredClipping):
        return clipped_about([statistics.median(column) for column in columns], rows, rule.radius, rule.iterations)
    if isinstance(rule, Bucketing):
        order = torch.randperm(len(rows), generator=generator(0, "bucketing")).tolist()
        means = []
        for start in range(0, len(rows), rule.size):
            members = [rows[index] for index in order[start : start + rule.size]]
            means.append([statistics.mean(column) for column in zip(*members, strict=True)])
        return expected_row(rule.rule, means)
    assert isinstance(rule, Krum)
    keep = len(rows) - rule.attackers if rule.keep is None else rule.keep
    best = [rows[index] for index in krum_order(rows, rule.attackers)[:keep]]
    return [statistics.mean(column) for column in zip(*best, strict=True)]


@every_rule
@pytest.mark.parametrize("count", [7, 8], ids=["odd", "even"])
def test_states_are_combined_as_the_formula_says(name: str, count: int) -> None:
    given = states(count, seed=count)
    found = RULES[name].combine(given, [5.0] * count)
    assert flat(found) == pytest.approx(
        expected_row(RULES[name], [flat(state) for state in given]), abs=TOLERANCE[name]
    )
    assert {key: tensor.dtype for key, tensor in found.items()} == {key: t.dtype for key, t in given[0].items()}


def test_counters_are_the_lower_median_or_the_best_client_s() -> None:
    given = states(6)
    assert int(Median().combine(given, [1.0] * 6)["n"]) == 12
    best = krum_order([flat(state) for state in given], 1)[0]
    assert int(Krum(1).combine(given, [1.0] * 6)["n"]) == 10 + best


def as_flower(given: Sequence[State]) -> list[tuple[Any, int]]:
    return [([state["w"].double().numpy(), state["b"].double().numpy()], 3) for state in given]


@pytest.mark.parametrize("count", [7, 10])
def test_flower_s_own_functions_agree(count: int) -> None:
    given = states(count, seed=1)
    results, shares = as_flower(given), [1.0] * count
    pairs = {
        "median": (Median(), aggregate_median(results)),
        "trimmed": (TrimmedMean(2), aggregate_trimmed_avg(results, 2 / count + 1e-9)),
        "krum": (Krum(2), aggregate_krum(results, 2, 0)),
        "multi-krum": (Krum(2, keep=None), aggregate_krum(results, 2, count - 2)),
    }
    for label, (rule, theirs) in pairs.items():
        ours = rule.combine(given, shares)
        for name, array in zip(("w", "b"), theirs, strict=True):
            assert np.allclose(ours[name].double().numpy(), array, atol=1e-6), label


# ---- what they do not depend on --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in RULES if "bucketing" not in name])
def test_the_order_of_the_clients_does_not_matter(name: str) -> None:
    given = states(7)
    found = [RULES[name].combine([given[i] for i in order], [1.0] * 7) for order in list(permutations(range(7)))[::500]]
    for other in found[1:]:
        assert all(torch.allclose(other[key].double(), found[0][key].double(), atol=1e-6) for key in ("w", "b"))


@every_rule
def test_claimed_samples_do_not_matter(name: str) -> None:
    given = states(7)
    plain, claimed = (RULES[name].combine(given, shares) for shares in ([1.0] * 7, [1e12] + [1.0] * 6))
    assert all(torch.equal(plain[key], claimed[key]) for key in plain)


@every_rule
def test_equal_states_stay_as_they_are(name: str) -> None:
    one = states(1)[0]
    found = RULES[name].combine([one] * 7, [1.0] * 7)
    assert all(torch.allclose(found[key].double(), one[key].double(), rtol=2e-7) for key in one)


@pytest.mark.parametrize("hostile", [1, 2, 3])
def test_far_liars_move_the_geometric_median_by_less_than_the_honest_differ(hostile: int) -> None:
    honest = states(7 - hostile)
    liars = [{**states(1)[0], "w": torch.full((3, 2), 1e6), "b": torch.full((4,), 1e6)}] * hostile
    found = GeometricMedian().combine([*honest, *liars], [1.0] * 7)
    alone = GeometricMedian().combine(honest, [1.0] * len(honest))
    apart = max(float((one["w"] - other["w"]).norm()) for one, other in combinations(honest, 2))
    assert float((found["w"] - alone["w"]).norm()) < apart


def test_nothing_trimmed_is_the_mean_with_equal_weights() -> None:
    given = states(5)
    found, mean = TrimmedMean(0).combine(given, [9.0] * 5), average(given, [1.0] * 5)
    assert all(torch.allclose(found[key], mean[key], atol=1e-7) for key in ("w", "b"))
    everyone = Krum(0, keep=5).combine(given, [9.0] * 5)
    assert all(torch.allclose(everyone[key], mean[key], atol=1e-7) for key in ("w", "b"))


def test_totals_are_sums_or_as_many_times_the_rule() -> None:
    given = [{"w": state["w"]} for state in states(5)]
    assert torch.allclose(Mean().totals(given)["w"], sum(state["w"].double() for state in given))
    assert torch.allclose(Median().totals(given)["w"], 5 * Median().combine(given, [1.0] * 5)["w"].double())


# ---- breakdown -------------------------------------------------------------------------------------------------------

BEARS = {"median": (7, 3), "trimmed 1": (7, 1), "trimmed 2": (7, 2), "krum": (7, 1), "krum 2": (7, 2),
         "multi-krum": (7, 1), "multi-krum 2 of 3": (7, 2), "geometric median": (7, 1), "centered clipping": (7, 1),
         "centered clipping, 3 steps": (7, 1), "bucketing, median": (7, 1),
         "bucketing, geometric median": (9, 1)}  # fmt: skip


@every_rule
@pytest.mark.parametrize("value", [1e6, -1e6, 0.0], ids=["far above", "far below", "zeros"])
def test_as_many_as_assumed_do_not_move_it_out_of_the_honest_range(name: str, value: float) -> None:
    count, hostile = BEARS[name]
    honest = states(count - hostile)
    low = torch.stack([state["w"] for state in honest]).min(0).values - 1e-6
    high = torch.stack([state["w"] for state in honest]).max(0).values + 1e-6
    for places in list(combinations(range(count), hostile))[::5]:
        mixed = list(honest)
        for place in places:
            mixed.insert(place, {**states(1)[0], "w": torch.full((3, 2), value), "b": torch.full((4,), value)})
        found = RULES[name].combine(mixed, [1.0] * count)["w"]
        if value or "krum" not in name:
            assert bool(((found >= low) & (found <= high)).all())


@pytest.mark.parametrize(("rule", "hostile"), [(Median(), 4), (TrimmedMean(1), 2), (Krum(1), 5), (Mean(), 1)])
def test_more_than_that_do(rule: Mean, hostile: int) -> None:
    """The bound is real: colluding clients beyond it get their way."""
    liars = [{**state, "w": torch.full((3, 2), 1e6)} for state in states(1) * hostile]
    found = rule.combine(states(7 - hostile) + liars, [1.0] * 7)["w"]
    assert float(found.abs().max()) > 1e4


@pytest.mark.parametrize(
    ("attackers", "refused", "admitted", "trimmed", "krum"),
    [
        (1, 1, 4, 1, 0),  # five clients, one refused: the trimmed mean still can, Krum needs five
        (2, 2, 8, 2, 2),  # ten clients: both can, and the two may have been honest
        (2, 1, 6, 2, 1),
        (2, 2, 3, 1, 0),
        (2, 1, 2, 1, 1),  # too few in any case: no more than the refused one is forgiven
        (3, 0, 4, 3, 3),  # those that did not answer at all are not known to be hostile
        (1, 5, 0, 0, 0),
    ],
)
def test_what_was_refused_counts_as_borne_where_answers_are_short(
    attackers: int, refused: int, admitted: int, trimmed: int, krum: int
) -> None:
    assert TrimmedMean(attackers).after_refusals(refused, admitted) == TrimmedMean(trimmed)
    assert Krum(attackers, keep=None).after_refusals(refused, admitted) == Krum(krum, keep=None)
    assert [rule.after_refusals(refused, admitted) for rule in (Mean(), Median())] == [Mean(), Median()]


@given(attackers=draw.integers(0, 6), refused=draw.integers(0, 20), admitted=draw.integers(0, 20))
def test_a_rule_tolerates_exactly_its_number_of_hostile_clients(attackers: int, refused: int, admitted: int) -> None:
    for rule in (TrimmedMean(attackers), Krum(attackers)):
        found = rule.after_refusals(refused, admitted)
        assert isinstance(found, TrimmedMean | Krum)
        assert max(0, attackers - refused) <= found.attackers <= attackers
        if found.attackers > max(0, attackers - refused):
            assert found.min_answers <= admitted
        if found.attackers < attackers:
            assert replace(rule, attackers=found.attackers + 1).min_answers > admitted


def test_too_few_states_are_an_error() -> None:
    for rule, least in ((Median(), 3), (TrimmedMean(2), 5), (Krum(1), 5), (Krum(2, keep=None), 7)):
        assert rule.min_answers == least
        rule.combine(states(least), [1.0] * least)
        with pytest.raises(ValueError, match=f"needs {least} states; got {least - 1}"):
            rule.combine(states(least - 1), [1.0] * (least - 1))


# ---- prototypes ------------------------------------------------------------------------------------------------------


def row_sets(count: int, classes: Sequence[int] = (0, 2), seed: int = 0) -> list[PrototypeSet]:
    draws = generator(seed, "robust rows")
    labels = torch.tensor(classes)
    return [PrototypeSet(torch.randn(len(labels), 3, generator=draws), labels, labels + 1.0 + k) for k in range(count)]


@every_rule
def test_class_means_are_combined_class_by_class(name: str) -> None:
    sets = row_sets(7)
    found = RULES[name].class_means(sets, sample_weighted=True)
    assert found.labels.tolist() == [0, 2]
    assert found.weights.tolist() == [7 * 1 + 21, 7 * 3 + 21]
    for position, label in enumerate(found.classes):
        rows = [part.of_class(label)[0].tolist() for part in sets]
        assert found.vectors[position].tolist() == pytest.approx(expected_row(RULES[name], rows), abs=TOLERANCE[name])


KEPT = {"median": 4, "trimmed 1": 6, "trimmed 2": 5, "krum": 1, "krum 2": 1, "multi-krum": 6, "multi-krum 2 of 3": 3,
        "geometric median": 4, "bucketing, median": 6, "bucketing, geometric median": 6}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_rows_of_a_hostile_client_are_left_out_of_a_clustering(name: str) -> None:
    sets = row_sets(6)
    swapped = PrototypeSet(100 + sets[0].vectors.flip(0), sets[0].labels, sets[0].weights)
    found = RULES[name].rows([*sets[:3], swapped, *sets[3:]])
    assert [int((found.labels == label).sum()) for label in (0, 2)] == [KEPT[name]] * 2
    honest = torch.cat([part.vectors for part in sets])
    assert all(bool((honest == row).all(1).any()) for row in found.vectors)


def test_the_rows_farthest_from_the_median_go_with_all_of_their_client_s() -> None:
    """A client with several rows of a class counts once, by their mean."""
    near = [PrototypeSet(torch.tensor([[k / 10.0]]), torch.tensor([1]), torch.ones(1)) for k in range(4)]
    far = PrototypeSet(torch.tensor([[0.0], [9.0]]), torch.tensor([1, 1]), torch.ones(2))
    found = TrimmedMean(1).rows([near[0], far, *near[1:]])
    assert found.vectors.flatten().tolist() == pytest.approx([0.0, 0.1, 0.2, 0.3])


@every_rule
def test_a_class_of_few_holders_is_kept(name: str) -> None:
    """One holder is taken as it is, two are averaged where the rule averages; classes of all are as before."""
    everybody = row_sets(7, classes=(0,))
    alone = PrototypeSet(torch.tensor([[1.0, 2, 3], [4, 5, 6]]), torch.tensor([0, 5]), torch.tensor([2.0, 3.0]))
    pair = PrototypeSet(torch.tensor([[0.0, 0, 0], [2, 2, 2]]), torch.tensor([0, 6]), torch.tensor([2.0, 3.0]))
    other = PrototypeSet(torch.tensor([[0.0, 0, 0], [4, 4, 4]]), torch.tensor([0, 6]), torch.tensor([2.0, 3.0]))
    found = RULES[name].class_means([alone, pair, other, *everybody])
    assert found.classes == [0, 5, 6]
    assert found.of_class(5)[0].tolist() == [4, 5, 6]
    assert found.of_class(6)[0].tolist() == [3, 3, 3]
    assert RULES[name].rows([alone, pair, other, *everybody]).of_class(5).tolist() == [[4, 5, 6]]


@every_rule
def test_no_rows_at_all(name: str) -> None:
    empty = [PrototypeSet.empty(3)] * 7
    assert len(RULES[name].class_means(empty)) == len(RULES[name].rows(empty)) == 0
    assert RULES[name].rows(empty).feature_size == 3


# ---- rules that remember or draw -------------------------------------------------------------------------------------


def context(memory: dict[str, torch.Tensor], number: int = 1, seed: int = 0) -> RuleContext:
    sent = {"w": torch.full((3, 2), 0.5), "b": torch.full((4,), -0.5), "n": torch.tensor(0)}
    return RuleContext(sent, memory, seed, number, "train")


def test_the_centre_is_the_sent_model_plus_the_momentum_of_the_last_step() -> None:
    rule = CenteredClipping(radius=0.8, iterations=2, momentum=0.6)
    memory: dict[str, torch.Tensor] = {}
    sent = flat(dict(context({}).sent))
    last = [0.0] * len(sent)
    for number in (1, 2, 3):
        given = states(6, seed=number)
        found = rule.in_exchange(context(memory, number)).combine_models(given, [1.0] * 6)
        start = [number + 0.6 * step for number, step in zip(sent, last, strict=True)]
        expected = clipped_about(start, [flat(state) for state in given], 0.8, 2)
        assert flat(found) == pytest.approx(expected, abs=1e-6)
        last = [after - before for after, before in zip(expected, sent, strict=True)]


def test_running_statistics_have_a_radius_of_their_own() -> None:
    given = states(6)
    variances = [1.0, 20.0, 300.0, 4e3, 5e4, 6e5]
    far = [{**state, "bn.running_var": torch.tensor([value])} for state, value in zip(given, variances, strict=True)]
    alone = CenteredClipping().combine(given, [1.0] * 6)
    together = CenteredClipping().combine(far, [1.0] * 6)
    assert all(torch.equal(alone[name], together[name]) for name in alone)
    assert together["bn.running_var"].tolist() == pytest.approx(
        clipped_about([statistics.median(variances)], [[value] for value in variances], 1.0, 1)
    )


def test_centred_clipping_with_a_large_radius_is_the_mean() -> None:
    given = states(5)
    found = CenteredClipping(radius=1e6).in_exchange(context({})).combine_models(given, [9.0] * 5)
    mean = average(given, [1.0] * 5)
    assert all(torch.allclose(found[name], mean[name], atol=1e-6) for name in ("w", "b"))


def test_rows_far_from_the_class_s_centre_are_moved_towards_it_and_kept() -> None:
    sets = row_sets(6)
    swapped = PrototypeSet(100 + sets[0].vectors.flip(0), sets[0].labels, sets[0].weights)
    found = CenteredClipping().rows([*sets, swapped])
    assert len(found) == 14
    assert float(found.vectors.abs().max()) < 10
    near = CenteredClipping(radius=1e6).rows(sets)
    assert torch.equal(near.vectors, PrototypeSet.concatenate(sets).vectors)


def test_the_groups_follow_from_seed_round_and_exchange() -> None:
    given = states(8)
    rule = Bucketing(2, Median())
    first = rule.in_exchange(context({}, 1)).combine_models(given, [1.0] * 8)
    again = rule.in_exchange(context({}, 1)).combine_models(given, [1.0] * 8)
    assert all(torch.equal(first[name], again[name]) for name in first)
    for other in (context({}, 2), context({}, 1, seed=1)):
        assert not torch.equal(rule.in_exchange(other).combine_models(given, [1.0] * 8)["w"], first["w"])


def test_bucketing_over_centred_clipping_remembers_the_step() -> None:
    memory: dict[str, torch.Tensor] = {}
    rule = Bucketing(2, CenteredClipping()).in_exchange(context(memory))
    found = rule.combine_models(states(8), [1.0] * 8)
    assert set(memory) == {"train/w", "train/b"}
    assert torch.equal(memory["train/w"], found["w"] - 0.5)


@pytest.mark.parametrize(("size", "rule", "least"), [(2, Median(), 5), (3, Median(), 7), (2, Krum(1), 9)])
def test_bucketing_asks_for_as_many_clients_as_give_full_groups(size: int, rule: RobustRule, least: int) -> None:
    bucketing = Bucketing(size, rule)
    assert bucketing.min_participants == least
    assert bucketing.min_answers == rule.min_answers
    with pytest.raises(ValueError, match=f"bucketing needs {rule.min_answers} states"):
        bucketing.combine(states(rule.min_answers - 1), [1.0] * (rule.min_answers - 1))


def test_groups_are_smaller_if_few_updates_are_left() -> None:
    """A hostile client of five is left out; the four others are groups of one."""
    given = states(4)
    found = Bucketing(2, Median()).combine(given, [1.0] * 4)
    expected = Median().combine(given, [1.0] * 4)
    assert all(torch.equal(found[name], expected[name]) for name in found)
    sizes = [Bucketing(3, Median())._fitting_size(count) for count in (1, 3, 4, 5, 6, 7, 20)]
    assert sizes == [1, 1, 1, 2, 2, 3, 3]


def test_a_client_that_is_left_out_does_not_stop_a_federation_of_five(tmp_path: Path) -> None:
    clients = ("protocol=dirichlet", "protocol.client_count=5", "protocol.alpha=10", "protocol.least=1")
    overrides = ("aggregation=bucketing", "rounds.quorum=0.5", *clients)
    settings = toy_settings("fedavg", tmp_path, overrides=overrides, train={"rounds": 4})
    first = sorted(InlineEngine(settings).devices)[0]
    done = run(settings, TouchedEngine(settings, failing=lambda request: request.train and request.client == first))
    assert [name for name, _ in done.events if name in ("round done", "round skipped")] == ["round done"] * 4


@pytest.mark.parametrize(
    "overrides",
    [("aggregation=centered_clipping",), ("aggregation=bucketing", "aggregation.rule.iterations=20")],
    ids=["centred clipping", "bucketing"],
)
def test_a_resumed_run_ends_with_the_same_state(overrides: tuple[str, ...], tmp_path: Path) -> None:
    clients: tuple[str, ...] = ()
    if "aggregation=bucketing" in overrides:  # which needs five clients
        clients = ("protocol=dirichlet", "protocol.client_count=5", "protocol.alpha=10", "protocol.least=1")

    def settings(name: str, **more: Any) -> RunSettings:
        return toy_settings("fpl", tmp_path / name, overrides=(*overrides, *clients), train={"rounds": 4}, **more)

    whole = run(settings("whole"))
    run(settings("parts"), stop_after=2)
    assert run(settings("parts", resume=True)).sha256 == whole.sha256
    mean = toy_settings("fpl", tmp_path / "mean", overrides=clients, train={"rounds": 4})
    assert run(mean).sha256 != whole.sha256


# ---- settings --------------------------------------------------------------------------------------------------------

NOT_AVERAGED = ("adcol", "feddap", "feddg_ga", "fdse", "fedheal", "fedpall", "fpl_heal", "i2pfl", "single_set")


def test_a_method_says_whether_its_server_averages() -> None:
    names = [path.stem for path in (CONF / "method").glob("*.yaml")]
    assert {name for name in names if not method_at_defaults(name).averages} == set(NOT_AVERAGED)


@pytest.mark.parametrize("method", ["fpl", *NOT_AVERAGED])
def test_a_rule_is_taken_or_refused_by_name(method: str) -> None:
    """tests/conformance/ checks that the others go with the median."""
    overrides = (f"method={method}", "aggregation=median", "engine=inline")
    if method in NOT_AVERAGED:
        with pytest.raises(ConfigError, match=rf"method={method}: .*aggregation=median would not protect it"):
            composed(*overrides)
    else:
        assert composed(*overrides).aggregation == Median()


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["aggregation=krum"], "aggregation=krum needs 5 answers a round and 4 clients are asked"),
        (["aggregation=multi_krum"], "aggregation=multi_krum needs 5 answers"),
        (["aggregation=trimmed_mean", "aggregation.attackers=2"], "trimmed_mean needs 5 answers"),
        (["aggregation=median", "rounds.participation=0.5"], "median needs 3 answers a round and 2 clients are asked"),
        (["aggregation=krum", "aggregation.keep=0"], r"aggregation.keep=0: must be greater than or equal to 1"),
        (
            ["aggregation=krum", "aggregation.attackers=-1"],
            r"attackers=-1: must be greater than or equal to 0",
        ),
        (["aggregation=bucketing"], "aggregation=bucketing needs 5 answers a round and 4 clients are asked"),
        (["aggregation=centered_clipping", "aggregation.momentum=1"], "aggregation.momentum=1: must be less than 1"),
        (["aggregation=centered_clipping", "aggregation.radius=0"], "aggregation.radius=0: must be greater than 0"),
        (["aggregation=bucketing", "aggregation.size=1"], "aggregation.size=1: must be greater than or equal to 2"),
        (
            ["aggregation=bucketing", "aggregation.rule._target_=strategies.core.aggregation.Mean"],
            r"aggregation.rule.*RobustRule",
        ),
        (["rounds.outlier_factor=1"], r"rounds.outlier_factor=1: must be greater than 1"),
    ],
)
def test_settings_that_cannot_be(overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        composed("method=fedavg", "engine=inline", *overrides)


def test_the_rule_and_the_bound_belong_to_the_run() -> None:
    plain = composed("method=fedavg", "engine=inline")
    assert plain.identity == composed("method=fedavg", "engine=inline", "aggregation=mean").identity
    assert plain.identity != composed("method=fedavg", "engine=inline", "aggregation=median").identity
    assert plain.identity != composed("method=fedavg", "engine=inline", "rounds.outlier_factor=9").identity
    assert plain.identity != composed("method=fedavg", "engine=inline", "rounds.outliers=refuse").identity


def test_only_running_statistics_are_the_median_where_parameters_are_averaged() -> None:
    numbers = ((1.0, 2.0), (2.0, 900.0), (6.0, 1.0))
    given = [{"w": torch.tensor([w]), "n.running_var": torch.tensor([v])} for w, v in numbers]
    found = StatisticsMedian().combine(given, [1.0, 1.0, 2.0])
    assert (float(found["w"]), float(found["n.running_var"])) == (3.75, 2.0)
