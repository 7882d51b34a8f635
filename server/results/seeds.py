"""Several seeds of one configuration: mean and deviation, and accuracy by round."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from server.results.run import Run


@dataclass(frozen=True)
class Value:
    """Mean and sample deviation over seeds; ``deviation`` is ``None`` for a single seed."""

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Value | None:
        """``None`` if there are no values."""
        if not values:
            return None
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + (f" ± {self.deviation:.2f}" if self.deviation is not None else "")


def averages(run: Run, domains: Sequence[str] = ()) -> dict[int, float]:
    """Mean accuracy over ``domains`` (all that were scored, if empty) by round."""
    return {
        score.round: statistics.fmean(score.accuracy[name] for name in domains or score.accuracy)
        for score in run.round_scores
        if all(name in score.accuracy for name in domains)
    }


def curve(runs: Sequence[Run], domains: Sequence[str] = ()) -> dict[int, Value]:
    """:func:`averages` over the seeds of one configuration, of every round that any of them scored."""
    each = [averages(run, domains) for run in runs]
    rounds = sorted({number for found in each for number in found})
    values = {number: Value.of([found[number] for found in each if number in found]) for number in rounds}
    return {number: value for number, value in values.items() if value is not None}
