"""The statistics of comparisons against SciPy, against numbers by hand, and in simulated comparisons."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from goldfinch.results.statistics import (
    Difference,
    holm,
    mean_interval,
    paired_difference,
    ranks,
    verdict_on,
)

SCORES = st.floats(0, 100).map(lambda value: round(value, 2))


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
    if len(pairs) > 2:
        assert found.p == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-6, abs=1e-9)


def test_equal_and_constant_pairs_and_a_single_pair() -> None:
    equal = paired_difference([1, 2, 3], [1, 2, 3])
    assert (equal.mean, equal.half_width, equal.p) == (0, None, None), "likewise: an interval of no width would be sure"
    assert verdict_on(equal, equal.p) == "not tested"
    constant = paired_difference([2, 3, 4], [1, 2, 3])
    assert (constant.mean, constant.half_width, constant.p) == (1, None, None), "t is not defined"
    single = paired_difference([2.0], [1.5])
    assert (single.mean, single.low, single.p) == (0.5, None, None)
    with pytest.raises(ValueError, match="argument 2"):
        paired_difference([1, 2], [1])


@given(st.lists(st.integers(0, 20), min_size=2, max_size=6), st.integers(0, 20), st.sampled_from([7, 24, 150, 997]))
def test_one_difference_in_whole_images_in_every_pair_is_no_result(right: list[int], more: int, images: int) -> None:
    """The quotients differ in their last digits alone, and so would give a p-value of about 1e-30."""
    scores = [100.0 * (count + more) / images for count in right]
    base = [100.0 * count / images for count in right]
    found = paired_difference(scores, base)
    assert found.mean == pytest.approx(100.0 * more / images)
    assert (found.half_width, found.p) == (None, None)


def test_two_nearly_equal_differences_have_an_interval_and_are_not_tested() -> None:
    found = paired_difference([63.2296, 62.8293], [59.0484, 58.6433])  # one image of DSLR makes 1.04 points
    assert str(found) == "+4.18 [+4.15, +4.21]"
    assert verdict_on(found, found.p) == "not tested"


def test_an_interval_by_hand() -> None:
    half = 4.302653 * 1.0 / math.sqrt(3)  # t of two degrees of freedom; 2, 1, 3 deviate by one
    found = paired_difference([72.0, 81.0, 93.0], [70.0, 80.0, 90.0])
    assert (found.low, found.high) == pytest.approx((2 - half, 2 + half), abs=1e-5)
    assert str(found) == f"+2.00 [{2 - half:+.2f}, {2 + half:+.2f}]"
    assert found.text(1) == f"+2.0 [{2 - half:+.1f}, {2 + half:+.1f}]"


def test_intervals_over_studies_cover_the_mean_and_those_over_runs_do_not() -> None:
    """Three runs of a study share its tuning: their scores move together."""
    rng = np.random.default_rng(0)
    covered = {"studies": 0, "runs": 0}
    repetitions = 2000
    for _ in range(repetitions):
        studies = rng.normal(50.0, 3.0, (5, 1)) + rng.normal(0.0, 1.0, (5, 3))
        for name, values in (("studies", studies.mean(1)), ("runs", studies.ravel())):
            found = mean_interval(values.tolist())
            assert found.low is not None
            assert found.high is not None
            covered[name] += found.low <= 50.0 <= found.high
    assert covered["studies"] / repetitions == pytest.approx(0.95, abs=0.015)
    assert covered["runs"] / repetitions < 0.8


def test_equal_methods_are_rarely_distinguished_on_a_page_of_tests() -> None:
    """The family-wise error of eleven methods against one base, over the means of five studies."""
    rng = np.random.default_rng(1)
    false = 0
    for _ in range(400):
        scores = rng.normal(50.0, 3.0, (12, 5))
        differences = [paired_difference(row.tolist(), scores[0].tolist()) for row in scores[1:]]
        p_values = holm([each.p or 0.0 for each in differences])
        said = [verdict_on(each, p) for each, p in zip(differences, p_values, strict=True)]
        false += any(not word.startswith("not distinguished") for word in said)
    assert false / 400 < 0.08


def test_a_verdict_never_says_level() -> None:
    found = Difference(3.0, 4.5, 0.2)
    assert verdict_on(found, 0.2) == "not distinguished (half-width 4.50, p 0.200)"
    assert verdict_on(Difference(3.0, 1.0, 0.001), 0.01) == "ahead (p 0.010)"
    assert verdict_on(Difference(-3.0, 1.0, 0.001), 0.01) == "behind (p 0.010)"
    assert verdict_on(Difference(-3.0, 1.0, 0.001), 0.06).startswith("not distinguished"), "the corrected p decides"
    assert verdict_on(Difference(3.0, 1.0, 0.0001), 0.0004) == "ahead (p < 0.001)"
    assert verdict_on(Difference(3.0), None) == "not tested"
    assert verdict_on(Difference(0.0, identical=True), None) == "identical"
    assert str(Difference(0.0, identical=True)) == "0 (identical)"


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
def test_ranks_are_scipy_s_and_equal_scores_share_one(scores: list[float]) -> None:
    assert ranks(scores) == stats.rankdata([-score for score in scores], method="min").tolist()


def test_scores_that_print_alike_share_a_rank() -> None:
    assert ranks([28.4842, 30.0, 28.4839, 10.0]) == [2, 1, 2, 4]


@pytest.mark.parametrize("last_bit", [-3e-14, 0.0, 3e-14])
def test_where_printed_digits_tie_no_last_bit_decides(last_bit: float) -> None:
    found = paired_difference([75.34, 73.03, 72.73 + last_bit], [76.06, 76.025, 76.47])  # -2.485 in the mean
    assert str(found) == "-2.48 [-6.39, +1.42]"
