"""Numbers over several seeds: mean and deviation, and accuracy by round. Which runs: :mod:`server.results.groups`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.metrics import PARTIAL
from server.results.run import Run


@dataclass(frozen=True)
class Value:
    """Mean and sample deviation over seeds.

    Args:
        mean: the mean.
        deviation: the sample standard deviation; ``None`` for a single seed.
        partial: whether a score in it lacks domains of its run, or a run lacks the score. It is shown with a mark, and
            is never the best of anything.
    """

    mean: float
    deviation: float | None
    partial: bool = False

    @classmethod
    def of(cls, values: Sequence[float], *, partial: bool = False) -> Value | None:
        """``None`` if there are no values."""
        if not values:
            return None
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, partial)

    def __str__(self) -> str:
        deviation = f" ± {self.deviation:.2f}" if self.deviation is not None else ""
        return f"{self.mean:.2f}{deviation}" + f" {PARTIAL}" * self.partial


def curve(runs: Sequence[Run], domains: Sequence[str] = ()) -> dict[int, Value]:
    """Mean accuracy by round, over the seeds of one configuration.

    A round in which a run did not score all of these domains is left out: its mean would be of other domains.

    Args:
        runs: the seeds.
        domains: the domains of the mean; empty takes all of the run.
    """
    each: list[dict[int, float]] = []
    partial: set[int] = set()
    for run in runs:
        points = {}
        for score in run.round_scores:
            names = domains or [*score.accuracy, *score.missing]
            if any(name not in score.accuracy or name in score.missing for name in names):
                partial.add(score.round)
            else:
                points[score.round] = statistics.fmean(score.accuracy[name] for name in names)
        each.append(points)
    return {number: value for number, value in by_round(each).items() if number not in partial}


def by_round(each: Sequence[Mapping[int, float]]) -> dict[int, Value]:
    """Numbers by round of several runs, over those that have one."""
    rounds = sorted({number for points in each for number in points})
    values = {number: Value.of([points[number] for points in each if number in points]) for number in rounds}
    return {number: value for number, value in values.items() if value is not None}
