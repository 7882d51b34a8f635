"""The geometric median against a general minimiser, what hostile clients can do, and a rule of one's own in a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from support.own import forget
from support.runs import TouchedEngine, run
from support.toy import composed, method_at_defaults, toy_settings

from common.choices import CONF
from common.errors import ConfigError
from common.numerics import generator
from common.prototypes import PrototypeSet
from common.wire.messages import Request
from common.wire.payload import Payload
from server.run.checkpoint import Checkpoints
from strategies.core.aggregation import Mean
from strategies.core.gate import MAX_NORM
from strategies.core.robust import GeometricMedian

State = dict[str, torch.Tensor]

OWN = '''"""The coordinate-wise median, a rule of one's own."""

import torch

from common.config import checked
from strategies.core.robust import RobustRule


@checked
class Median(RobustRule):
    """The median of each number over the clients; the lower one of an even number."""

    @property
    def min_answers(self):
        return 3

    def combine(self, states, shares):
        return {name: torch.stack([state[name] for state in states]).median(0).values for name in states[0]}

    def combine_rows(self, table):
        return table.median(0).values

    def chosen_rows(self, table):
        distances = (table - table.median(0).values).norm(dim=1)
        return distances.argsort()[: len(table) // 2 + 1].sort().values
'''


def states(count: int, seed: int = 0) -> list[State]:
    draws = generator(seed, "robust states")
    return [
        {"w": torch.randn(3, 2, generator=draws), "b": torch.randn(4, generator=draws), "n": torch.tensor(10 + k)}
        for k in range(count)
    ]


def flat(state: State) -> list[float]:
    return [value for name in ("w", "b") for value in state[name].double().flatten().tolist()]


# ---- the formulas, in loops ------------------------------------------------------------------------------------------


def minimiser(rows: Sequence[Sequence[float]]) -> list[float]:
    """The point with the least sum of distances, to 1e-4."""
    points = np.array(rows)
    return list(minimize(lambda at: np.linalg.norm(points - at, axis=1).sum(), points.mean(0), tol=1e-12).x)


def test_states_are_combined_as_the_formula_says() -> None:
    given = states(7)
    found = GeometricMedian().combine(given, [5.0] * 7)
    assert flat(found) == pytest.approx(minimiser([flat(state) for state in given]), abs=1e-4)
    assert {key: tensor.dtype for key, tensor in found.items()} == {key: t.dtype for key, t in given[0].items()}


# ---- what they do not depend on --------------------------------------------------------------------------------------


def test_neither_the_order_of_the_clients_nor_claimed_samples_matter() -> None:
    given = states(7)
    plain = GeometricMedian().combine(given, [1.0] * 7)
    claimed = GeometricMedian().combine(given, [1e12] + [1.0] * 6)
    assert all(torch.equal(plain[key], claimed[key]) for key in plain)
    for order in list(permutations(range(7)))[500::500]:
        other = GeometricMedian().combine([given[place] for place in order], [1.0] * 7)
        assert all(torch.allclose(other[key].double(), plain[key].double(), atol=1e-6) for key in ("w", "b"))


def test_equal_states_stay_as_they_are() -> None:
    one = states(1)[0]
    found = GeometricMedian().combine([one] * 7, [1.0] * 7)
    assert all(torch.allclose(found[key].double(), one[key].double(), rtol=2e-7) for key in one)


BOUND = MAX_NORM / 6**0.5
"""Six numbers of this size, the larger tensor's, have the longest norm that the gate accepts."""


@pytest.mark.parametrize("value", [1e6, BOUND], ids=["far", "at the gate's bound"])
@pytest.mark.parametrize("hostile", [1, 2, 3])
def test_far_liars_move_the_geometric_median_by_less_than_the_honest_differ(hostile: int, value: float) -> None:
    honest = states(7 - hostile)
    liars = [{**states(1)[0], "w": torch.full((3, 2), value), "b": torch.full((4,), value)}] * hostile
    found = GeometricMedian().combine([*honest, *liars], [1.0] * 7)
    alone = GeometricMedian().combine(honest, [1.0] * len(honest))
    apart = max(float((one["w"] - other["w"]).norm()) for one, other in combinations(honest, 2))
    assert float((found["w"] - alone["w"]).norm()) < apart


def test_totals_are_sums_or_as_many_times_the_rule() -> None:
    given = [{"w": state["w"]} for state in states(5)]
    assert torch.allclose(Mean().totals(given)["w"], sum(state["w"].double() for state in given))
    rule = GeometricMedian()
    assert torch.allclose(rule.totals(given)["w"], 5 * rule.combine(given, [1.0] * 5)["w"].double())


@pytest.mark.parametrize("value", [1e6, -1e6, 0.0, BOUND], ids=["far above", "far below", "zeros", "at the bound"])
def test_a_hostile_client_does_not_move_it_out_of_the_honest_range(value: float) -> None:
    honest = states(6)
    low = torch.stack([state["w"] for state in honest]).min(0).values - 1e-6
    high = torch.stack([state["w"] for state in honest]).max(0).values + 1e-6
    liar = {**states(1)[0], "w": torch.full((3, 2), value), "b": torch.full((4,), value)}
    found = GeometricMedian().combine([*honest, liar], [1.0] * 7)["w"]
    assert bool(((found >= low) & (found <= high)).all())


def test_too_few_states_are_an_error() -> None:
    rule = GeometricMedian()
    assert rule.min_answers == 3
    rule.combine(states(3), [1.0] * 3)
    with pytest.raises(ValueError, match="needs 3 states; got 2"):
        rule.combine(states(2), [1.0] * 2)


# ---- prototypes ------------------------------------------------------------------------------------------------------


def row_sets(count: int, classes: Sequence[int] = (0, 2), seed: int = 0) -> list[PrototypeSet]:
    draws = generator(seed, "robust rows")
    labels = torch.tensor(classes)
    return [PrototypeSet(torch.randn(len(labels), 3, generator=draws), labels, labels + 1.0 + k) for k in range(count)]


def test_class_means_are_combined_class_by_class() -> None:
    sets = row_sets(7)
    found = GeometricMedian().class_means(sets, sample_weighted=True)
    assert found.labels.tolist() == [0, 2]
    assert found.weights.tolist() == [7 * 1 + 21, 7 * 3 + 21]
    for position, label in enumerate(found.classes):
        rows = [part.of_class(label)[0].tolist() for part in sets]
        assert found.vectors[position].tolist() == pytest.approx(minimiser(rows), abs=1e-4)


@pytest.mark.parametrize("value", [100.0, BOUND], ids=["far", "at the gate's bound"])
def test_rows_of_a_hostile_client_are_left_out_of_a_clustering(value: float) -> None:
    sets = row_sets(6)
    swapped = PrototypeSet(value + sets[0].vectors.flip(0), sets[0].labels, sets[0].weights)
    alone, together = (GeometricMedian().class_means(given).vectors for given in (sets, [*sets, swapped]))
    assert float((alone - together).norm(dim=1).max()) < 1.0
    found = GeometricMedian().rows([*sets[:3], swapped, *sets[3:]])
    assert [int((found.labels == label).sum()) for label in (0, 2)] == [4, 4]
    honest = torch.cat([part.vectors for part in sets])
    assert all(bool((honest == row).all(1).any()) for row in found.vectors)


def test_the_rows_farthest_from_the_median_go_with_all_of_their_client_s() -> None:
    """A client with several rows of a class counts once, by their mean."""
    near = [PrototypeSet(torch.tensor([[k / 10.0]]), torch.tensor([1]), torch.ones(1)) for k in range(4)]
    far = PrototypeSet(torch.tensor([[0.0], [9.0]]), torch.tensor([1, 1]), torch.ones(2))
    found = GeometricMedian().rows([near[0], far, *near[1:]])
    assert len(found) == 3
    assert float(found.vectors.max()) < 0.4


def test_a_class_of_few_holders_is_kept() -> None:
    """One holder is taken as it is, two are averaged; classes of all are as before."""
    rule = GeometricMedian()
    empty = [PrototypeSet.empty(3)] * 7
    assert len(rule.class_means(empty)) == len(rule.rows(empty)) == 0
    assert rule.rows(empty).feature_size == 3
    everybody = row_sets(7, classes=(0,))
    alone = PrototypeSet(torch.tensor([[1.0, 2, 3], [4, 5, 6]]), torch.tensor([0, 5]), torch.tensor([2.0, 3.0]))
    pair = PrototypeSet(torch.tensor([[0.0, 0, 0], [2, 2, 2]]), torch.tensor([0, 6]), torch.tensor([2.0, 3.0]))
    other = PrototypeSet(torch.tensor([[0.0, 0, 0], [4, 4, 4]]), torch.tensor([0, 6]), torch.tensor([2.0, 3.0]))
    found = rule.class_means([alone, pair, other, *everybody])
    assert found.classes == [0, 5, 6]
    assert found.of_class(5)[0].tolist() == [4, 5, 6]
    assert found.of_class(6)[0].tolist() == [3, 3, 3]
    assert rule.rows([alone, pair, other, *everybody]).of_class(5).tolist() == [[4, 5, 6]]


def test_claimed_samples_do_not_count_in_prototypes() -> None:
    """A liar about samples had nearly all weight in FedPLCC's clusters, and in RUCR's shares of the classes."""
    sets = [PrototypeSet(torch.eye(3) + k / 10.0, torch.tensor([0, 0, 1]), torch.full((3,), 20.0)) for k in range(5)]
    liar = PrototypeSet(sets[2].vectors, sets[2].labels, torch.tensor([9e6, 9e6, 20.0]))
    lied = [*sets[:2], liar, *sets[3:]]
    rule = GeometricMedian()
    assert rule.rows(lied).weights.tolist() == [0.5] * 6 + [1.0] * 3
    assert rule.rows(lied) == rule.rows(sets)
    assert rule.class_means(lied).weights.tolist() == [5 * 40.0, 5 * 20.0]


# ---- a rule of one's own in a run ------------------------------------------------------------------------------------


def test_a_rule_of_ones_own_bears_a_hostile_client_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The average does not bear it."""
    (tmp_path / "mylib").mkdir()
    (tmp_path / "mylib" / "median.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)

    def edit(request: Request, payload: Payload) -> Payload:
        if request.client != "dark-0" or not request.train:
            return payload
        larger = {}
        for name, tensor in payload.weights.items():
            larger[name] = tensor * 1e5 if tensor.is_floating_point() else tensor
        return replace(payload, weights=larger)

    largest = {}
    for rule in ("mylib.median.Median", "mean"):
        overrides = (f"aggregation={rule}",)
        settings = toy_settings("fedavg", tmp_path / rule, overrides=overrides, train={"rounds": 1})
        run(settings, TouchedEngine(settings, edit=edit))
        checkpoint = Checkpoints(settings.output_folder / "checkpoint").load()
        assert checkpoint is not None
        largest[rule] = max(float(tensor.abs().max()) for tensor in checkpoint.state.weights.values())
    forget("mylib")
    assert largest["mylib.median.Median"] < 1e3 < largest["mean"]


# ---- settings --------------------------------------------------------------------------------------------------------

NOT_AVERAGED = ("adcol", "feddap", "feddg_ga", "fdse", "fedheal", "fedpall", "fpl_heal", "i2pfl", "single_set")


def test_a_method_says_whether_its_server_averages() -> None:
    names = [path.stem for path in (CONF / "method").glob("*.yaml")]
    assert {name for name in names if not method_at_defaults(name).averages} == set(NOT_AVERAGED)


def test_guarded_rounds_bound_lengths_and_samples_and_a_refusal_says_what_to_set() -> None:
    guarded = composed("method=fpl", "rounds=guarded", "engine=inline")
    plain = composed("method=fpl", "engine=inline")
    assert guarded.aggregation == plain.aggregation
    assert guarded.rounds == replace(plain.rounds, outliers="clip", largest_client=1.0)
    with pytest.raises(ConfigError, match=r"method=fedpall: .*aggregation=mean.*rounds=guarded"):
        composed("method=fedpall", "aggregation=geometric_median", "engine=inline")
    composed("method=fedpall", "engine=inline", "aggregation=mean", "rounds=guarded")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["aggregation=geometric_median", "rounds.participation=0.5"], "needs 3 answers a round and 2 clients"),
        (["rounds.outlier_factor=1"], r"rounds.outlier_factor=1: must be greater than 1"),
    ],
)
def test_settings_that_cannot_be(overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        composed("method=fedavg", "engine=inline", *overrides)
