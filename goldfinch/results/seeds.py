"""Mean and deviation over seeds, of one score or by round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.metrics import PARTIAL
from goldfinch.record import RunRecord


@dataclass(frozen=True)
class Value:
    """Mean and sample deviation over seeds.

    Args:
        mean: the mean.
        deviation: the sample standard deviation; ``None`` for a single seed.
        partial: whether a score lacks domains of its run, or a run lacks the score. A partial value is marked and has
            no rank.
        digits: digits after the point in tables.
    """

    mean: float
    deviation: float | None
    partial: bool = False
    digits: int = 2

    @classmethod
    def of(cls, values: Sequence[float], *, partial: bool = False, digits: int = 2) -> Value | None:
        """Return mean and deviation of ``values``; ``None`` if there are none."""
        if not values:
            return None
        deviation = None
        if len(values) > 1:
            deviation = statistics.stdev(values)
        return cls(statistics.fmean(values), deviation, partial, digits)

    def __str__(self) -> str:
        text = f"{self.mean:.{self.digits}f}"
        if self.deviation is not None:
            text += f" ± {self.deviation:.{self.digits}f}"
        if self.partial:
            text += f" {PARTIAL}"
        return text


def curve(runs: Sequence[RunRecord], domains: Sequence[str] = ()) -> dict[int, Value]:
    """Return mean accuracy by round over the seeds of one configuration.

    A round in which a run did not score all of the domains is left out, since its mean would be over other domains. So
    is a round that a run does not have, since its mean would be over other seeds.

    Args:
        runs: one run per seed.
        domains: the domains to average over; empty takes all domains of the run.
    """
    curves: list[dict[int, float]] = []
    for run in runs:
        points: dict[int, float] = {}
        for score in run.round_scores:
            names = domains or [*score.accuracy, *score.missing]
            whole = score.accuracy.keys() - score.missing.keys()
            if whole.issuperset(names):
                points[score.round] = statistics.fmean([score.accuracy[name] for name in names])
        curves.append(points)
    return by_round(curves)


def by_round(curves: Sequence[Mapping[int, float]]) -> dict[int, Value]:
    """Return the value of each round that all of the curves have, ascending."""
    numbers: set[int] = set()
    for points in curves:
        numbers.update(points)
    means: dict[int, Value] = {}
    for number in sorted(numbers):
        values = [points[number] for points in curves if number in points]
        mean = Value.of(values)
        if mean is not None and len(values) == len(curves):
            means[number] = mean
    return means
