"""The statistics of comparisons: intervals, one paired test, Holm's correction, and ranks.

Sources: Student's t; Holm (Scand. J. Statist. 1979).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.05
"""The family-wise error; intervals cover 1 - LEVEL."""

EXACT = 1e-9
"""The difference of scores up to which floating point alone may make them differ."""

FEWEST_TESTED = 3
"""The fewest values that are tested: two, in whole numbers of images, are too often nearly alike by chance."""


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, or a mean, with its interval.

    Args:
        mean: the mean.
        half_width: half of its 95 % confidence interval by Student's t; ``None`` for a single value, and for values
            that are equal to within :data:`EXACT`: few values in whole numbers of images can be equal by chance, and
            Student's t is not defined there.
        p: the two-sided p-value of the t-test that the mean is zero; ``None`` where ``half_width`` is, and for fewer
            than :data:`FEWEST_TESTED` values.
        identical: whether it is 0 because both rows ended in the same states; then there is nothing to test.
    """

    mean: float
    half_width: float | None = None
    p: float | None = None
    identical: bool = False

    @property
    def low(self) -> float | None:
        """Lower end of the interval."""
        if self.half_width is None:
            return None
        return self.mean - self.half_width

    @property
    def high(self) -> float | None:
        """Upper end of the interval."""
        if self.half_width is None:
            return None
        return self.mean + self.half_width

    def text(self, digits: int) -> str:
        """Return the mean with its interval, each with ``digits`` digits; of identical rows ``0 (identical)``."""
        if self.identical:
            return "0 (identical)"
        if self.low is None or self.high is None:
            return f"{self.mean:+.{digits}f}"
        return f"{self.mean:+.{digits}f} [{self.low:+.{digits}f}, {self.high:+.{digits}f}]"

    def __str__(self) -> str:
        return self.text(2)


def mean_interval(values: Sequence[float]) -> Difference:
    """Return the mean of independent values with its 95 % interval.

    Args:
        values: one or more. Runs that share a tuned setting are not independent: take the mean of each study.

    Raises:
        statistics.StatisticsError: there is none.
    """
    from scipy.stats import t

    mean = round(statistics.fmean(values), 11)  # where printed digits tie, no last bit of the values decides
    if len(values) < 2:
        return Difference(mean)
    if max(values) - min(values) <= EXACT:
        return Difference(0.0 if abs(mean) <= EXACT else mean)
    error = statistics.stdev(values) / math.sqrt(len(values))
    freedom = len(values) - 1
    half_width = float(t.ppf(1 - LEVEL / 2, freedom)) * error
    if len(values) < FEWEST_TESTED:
        return Difference(mean, half_width)
    return Difference(mean, half_width, 2 * float(t.sf(abs(mean) / error, freedom)))


def paired_difference(scores: Sequence[float], base: Sequence[float]) -> Difference:
    """Return the difference of paired scores; its p-value is that of the paired t-test.

    Args:
        scores: a method's scores.
        base: those of the other method, in the same order and number.

    Raises:
        ValueError: the numbers of scores differ, or there is none.
    """
    return mean_interval([one - other for one, other in zip(scores, base, strict=True)])


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values that are corrected by Holm's step-down procedure, in the order given.

    The i-th smallest of m p-values (from 0) is multiplied by m - i, and is at least the corrected one before it and at
    most 1. The family-wise error is at most alpha if those below alpha are called significant.
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for position, index in enumerate(order):
        scaled = (len(p_values) - position) * p_values[index]
        largest = max(largest, min(1.0, scaled))
        corrected[index] = largest
    return corrected


def ranks(scores: Sequence[float]) -> list[int]:
    """Return the rank of each score, 1 for the highest. Scores that are equal in two digits share their first rank."""
    shown = [round(score, 2) for score in scores]
    places: list[int] = []
    for score in shown:
        higher = [other for other in shown if other > score]
        places.append(1 + len(higher))
    return places


def verdict_on(difference: Difference, p: float | None) -> str:
    """Return what a difference says: ``ahead``, ``behind``, ``identical``, not distinguished, or not tested.

    Args:
        difference: the difference.
        p: its p-value after Holm's correction over all tests of the page; ``None`` if it was not tested.
    """
    if difference.identical:
        return "identical"
    if difference.half_width is None or p is None:
        return "not tested"
    shown = f"p {p:.3f}"
    if p < 0.001:
        shown = "p < 0.001"
    if p < LEVEL and difference.mean > 0:
        return f"ahead ({shown})"
    if p < LEVEL:
        return f"behind ({shown})"
    return f"not distinguished (half-width {difference.half_width:.2f}, {shown})"
