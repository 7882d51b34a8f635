"""The statistics of a board: paired differences, Holm's correction, ranks over data sets, and profiles.

Sources: Holm (Scand. J. Statist. 1979); Friedman (JASA 1937) and Iman and Davenport (1980); Nemenyi (1963) as in Demsar
(JMLR 2006, Eq. after 3.2.2); Dolan and More (Math. Program. 2002) for profiles, here with differences in points instead
of ratios.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """A paired difference.

    Args:
        mean: the mean of the differences, in points.
        low: lower end of the 95 % confidence interval by Student's t; ``None`` for a single pair.
        high: its upper end.
        p: the two-sided p-value of the paired t-test; ``None`` for a single pair.
    """

    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:+.2f}"
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def paired_difference(scores: Sequence[float], base: Sequence[float]) -> Difference:
    """Return the difference of paired scores.

    Args:
        scores: a method's scores.
        base: those of the other method, in the same order and number.

    Raises:
        ValueError: the numbers of scores differ, or there is none.
    """
    from scipy.stats import t

    pairs = [one - other for one, other in zip(scores, base, strict=True)]
    mean = statistics.fmean(pairs)
    if len(pairs) < 2:
        return Difference(mean)
    error = statistics.stdev(pairs) / math.sqrt(len(pairs))
    if error == 0:
        return Difference(mean, mean, mean, float(mean == 0))
    freedom = len(pairs) - 1
    reach = float(t.ppf(0.975, freedom)) * error
    return Difference(mean, mean - reach, mean + reach, 2 * float(t.sf(abs(mean) / error, freedom)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values that are corrected by Holm's step-down procedure, in the order given.

    The i-th smallest of m p-values (from 0) is multiplied by m - i, and is at least the corrected one before it and at
    most 1. The family-wise error is at most alpha if those below alpha are called significant.
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    found = [0.0] * len(p_values)
    largest = 0.0
    for position, index in enumerate(order):
        scaled = (len(p_values) - position) * p_values[index]
        largest = max(largest, min(1.0, scaled))
        found[index] = largest
    return found


def ranks(scores: Sequence[float]) -> list[float]:
    """Return the rank of each score: 1 for the highest; equal scores share the mean of their ranks."""
    found: list[float] = []
    for score in scores:
        higher = sum(other > score for other in scores)
        equal = sum(other == score for other in scores)
        found.append(higher + (equal + 1) / 2)
    return found


def average_ranks(scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each method's rank, averaged over data sets.

    Args:
        scores: for each data set, the score of each method.

    Raises:
        ValueError: there is no data set, or data sets have different methods.
    """
    methods = _common_methods(scores)
    total = dict.fromkeys(methods, 0.0)
    for found in scores:
        for method, rank in zip(methods, ranks([found[name] for name in methods]), strict=True):
            total[method] += rank
    return {method: value / len(scores) for method, value in total.items()}


def _common_methods(scores: Sequence[Mapping[str, float]]) -> list[str]:
    if not scores:
        raise ValueError("ranks need one data set or more")
    methods = list(scores[0])
    for found in scores:
        if set(found) != set(methods):
            raise ValueError("every data set needs the same methods")
    return methods


@dataclass(frozen=True)
class Friedman:
    """Friedman's test of whether all methods have the same expected rank.

    Args:
        chi_square: Friedman's statistic.
        p: its p-value (chi-square with k - 1 degrees of freedom).
        f: Iman and Davenport's statistic; infinite if all data sets rank the methods alike.
        f_p: its p-value (F with k - 1 and (k - 1)(N - 1) degrees of freedom).
    """

    chi_square: float
    p: float
    f: float
    f_p: float


def friedman(scores: Sequence[Mapping[str, float]]) -> Friedman:
    """Return Friedman's test over data sets, without a correction for ties.

    Args:
        scores: for each of two data sets or more, the score of each of two methods or more.

    Raises:
        ValueError: there are too few data sets or methods, or data sets have different methods.
    """
    return friedman_of_ranks(average_ranks(scores), len(scores))


def friedman_of_ranks(mean_ranks: Mapping[str, float], sets: int) -> Friedman:
    """Return Friedman's test from the methods' average ranks over ``sets`` data sets.

    Raises:
        ValueError: there are fewer than two data sets or methods.
    """
    from scipy.stats import chi2
    from scipy.stats import f as f_distribution

    methods = len(mean_ranks)
    if sets < 2 or methods < 2:
        raise ValueError("Friedman's test needs two data sets and two methods or more")
    squares = sum(rank**2 for rank in mean_ranks.values())
    statistic = 12 * sets / (methods * (methods + 1)) * (squares - methods * (methods + 1) ** 2 / 4)
    statistic = max(0.0, statistic)
    left = sets * (methods - 1) - statistic
    f = math.inf
    f_p = 0.0
    if left > 1e-9:
        f = (sets - 1) * statistic / left
        f_p = float(f_distribution.sf(f, methods - 1, (methods - 1) * (sets - 1)))
    return Friedman(statistic, float(chi2.sf(statistic, methods - 1)), f, f_p)


def critical_difference(methods: int, sets: int, alpha: float = 0.05) -> float:
    """Return Nemenyi's critical difference of average ranks: ``q sqrt(k (k + 1) / (6 N))``.

    ``q`` is the upper quantile of the studentized range of k groups with infinite degrees of freedom, divided by
    ``sqrt(2)``.

    Args:
        methods: k, two or more.
        sets: N data sets, one or more.
        alpha: the family-wise error, in (0, 1).
    """
    from scipy.stats import studentized_range

    q = float(studentized_range.ppf(1 - alpha, methods, math.inf)) / math.sqrt(2)
    return q * math.sqrt(methods * (methods + 1) / (6 * sets))


def indistinct_groups(mean_ranks: Mapping[str, float], difference: float) -> list[list[str]]:
    """Return the largest groups of methods with average ranks within ``difference``, the best first.

    Groups of one method, and groups inside another group, are left out. These are the bars of a critical-difference
    figure.
    """
    order = sorted(mean_ranks, key=lambda name: mean_ranks[name])
    found: list[list[str]] = []
    for start, first in enumerate(order):
        group: list[str] = []
        for name in order[start:]:
            if mean_ranks[name] - mean_ranks[first] <= difference:
                group.append(name)
        inside = any(set(group) <= set(other) for other in found)
        if len(group) > 1 and not inside:
            found.append(group)
    return found


def performance_profile(scores: Sequence[Mapping[str, float]], distances: Sequence[float]) -> dict[str, list[float]]:
    """Return, for each method, the share of data sets on which it is within x points of the best method.

    Args:
        scores: for each data set, the score of each method.
        distances: the values of x, in points, >= 0.

    Returns:
        For each method a share in [0, 1] for each x.

    Raises:
        ValueError: there is no data set, or data sets have different methods.
    """
    methods = _common_methods(scores)
    profile: dict[str, list[float]] = {}
    for method in methods:
        shares: list[float] = []
        for distance in distances:
            within = 0
            for found in scores:
                within += max(found.values()) - found[method] <= distance + 1e-9
            shares.append(within / len(scores))
        profile[method] = shares
    return profile
