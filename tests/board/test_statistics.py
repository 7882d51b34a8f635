"""A board's statistics against SciPy, and against numbers that were worked out by hand or printed in papers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from server.results.board.statistics import (
    average_ranks,
    critical_difference,
    friedman,
    friedman_of_ranks,
    holm,
    indistinct_groups,
    paired_difference,
    performance_profile,
    ranks,
)

SCORES = st.floats(0, 100).map(lambda value: round(value, 2))


def named(matrix: np.ndarray) -> list[dict[str, float]]:
    """A row for each data set, with the methods a, b, c ..."""
    return [{chr(97 + column): float(value) for column, value in enumerate(row)} for row in matrix]


@given(st.lists(st.tuples(SCORES, SCORES), min_size=2, max_size=8))
def test_a_paired_difference_is_scipy_s_paired_t_test(pairs: list[tuple[float, float]]) -> None:
    one, other = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    found = paired_difference(one, other)
    differences = np.subtract(one, other)
    if np.std(differences) < 1e-6:
        return
    expected = stats.ttest_rel(one, other)
    interval = expected.confidence_interval(0.95)
    assert found.mean == pytest.approx(differences.mean())
    assert found.p == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-6, abs=1e-9)


def test_equal_and_constant_pairs_and_a_single_pair() -> None:
    assert paired_difference([1, 2, 3], [1, 2, 3]).p == 1
    constant = paired_difference([2, 3, 4], [1, 2, 3])
    assert (constant.mean, constant.low, constant.high, constant.p) == (1, 1, 1, 0)
    single = paired_difference([2.0], [1.5])
    assert (single.mean, single.low, single.p) == (0.5, None, None)
    with pytest.raises(ValueError, match="argument 2"):
        paired_difference([1, 2], [1])


def test_holm_by_hand() -> None:
    # four p-values: 0.005 * 4, 0.01 * 3, 0.03 * 2, 0.04 * 1; the last is raised to the one before it
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0.01, 0.2))
def test_holm_rejects_what_the_step_down_procedure_rejects(p_values: list[float], alpha: float) -> None:
    """The procedure as it is defined: go up the p-values until one is above alpha / (number that are left)."""
    rejected: set[int] = set()
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    for done, index in enumerate(order):
        if p_values[index] > alpha / (len(p_values) - done):
            break
        rejected.add(index)
    for index, corrected in enumerate(holm(p_values)):
        if not math.isclose(corrected, alpha, rel_tol=1e-9):
            assert (corrected <= alpha) == (index in rejected)


@given(st.lists(SCORES, min_size=1, max_size=9))
def test_ranks_are_scipy_s(scores: list[float]) -> None:
    assert ranks(scores) == stats.rankdata([-score for score in scores]).tolist()


def test_friedman_and_the_critical_difference_of_demsar_s_example() -> None:
    """Demsar 2006, Section 3.2.2: four classifiers on 14 data sets, average ranks 3.143, 2.000, 2.893, 1.964."""
    mean_ranks = {"a": 3.143, "b": 2.000, "c": 2.893, "d": 1.964}
    test = friedman_of_ranks(mean_ranks, 14)
    assert test.chi_square == pytest.approx(9.28, abs=0.01)
    assert test.f == pytest.approx(3.69, abs=0.01)
    assert test.f_p == pytest.approx(stats.f.sf(test.f, 3, 39))
    assert critical_difference(4, 14) == pytest.approx(1.25, abs=0.005)
    assert critical_difference(4, 14, 0.10) == pytest.approx(1.12, abs=0.005)
    # at 0.10 the first is worse than the second and the fourth, and the third is within reach of all
    groups = indistinct_groups(mean_ranks, critical_difference(4, 14, 0.10))
    assert groups == [["d", "b", "c"], ["c", "a"]]


@given(st.integers(2, 6), st.integers(2, 7), st.integers(0, 1000))
def test_friedman_is_scipy_s_without_ties(sets: int, methods: int, seed: int) -> None:
    matrix = np.random.default_rng(seed).permuted(np.tile(np.arange(float(methods)), (sets, 1)), axis=1)
    found = friedman(named(matrix))
    if methods > 2:
        expected = stats.friedmanchisquare(*matrix.T)
        assert found.chi_square == pytest.approx(expected.statistic, abs=1e-9)
        assert found.p == pytest.approx(expected.pvalue, abs=1e-9)
    same = friedman(named(np.tile(np.arange(float(methods)), (sets, 1))))
    assert (same.f, same.f_p) == (math.inf, 0.0)


@pytest.mark.parametrize(
    ("methods", "q"), [(2, 1.960), (3, 2.343), (5, 2.728), (10, 3.164)], ids=lambda value: str(value)
)
def test_the_critical_values_are_those_of_demsar_s_table(methods: int, q: float) -> None:
    assert critical_difference(methods, 7) == pytest.approx(q * math.sqrt(methods * (methods + 1) / 42), rel=5e-4)


def test_a_profile_by_hand() -> None:
    scores = [{"a": 90.0, "b": 88.0}, {"a": 50.0, "b": 60.0}]
    assert performance_profile(scores, [0, 2, 9.99, 10]) == {"a": [0.5, 0.5, 0.5, 1.0], "b": [0.5, 1.0, 1.0, 1.0]}


@pytest.mark.parametrize("scores", [[], [{"a": 1.0}, {"b": 1.0}]], ids=["no data set", "other methods"])
def test_data_sets_with_other_methods_are_refused(scores: list[dict[str, float]]) -> None:
    for function in (average_ranks, lambda found: performance_profile(found, [0.0])):
        with pytest.raises(ValueError, match="data set"):
            function(scores)
