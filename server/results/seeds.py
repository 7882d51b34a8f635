"""Several seeds of one configuration: mean and deviation, and accuracy by round."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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


@dataclass
class Group:
    """Runs of one configuration, by seed.

    Args:
        label: the method's name, with the settings that tell it from its namesakes.
    """

    label: str
    runs: list[Run] = field(default_factory=list)

    @property
    def seeds(self) -> list[int]:
        """The runs' seeds."""
        return [run.seed for run in self.runs]

    @property
    def personal(self) -> bool:
        """Whether its scores are of clients' own models."""
        return self.runs[0].personal

    def values(self, column: str, rule: str = "final") -> list[float]:
        """What each run that has it scored: ``average``, ``worst``, ``spread``, ``validation`` or ``domain:<name>``."""
        rules = [run.summary["scores"] if run.summary else run.rules for run in self.runs]
        scores = [each[rule] for each in rules if rule in each]
        if column.startswith("domain:"):
            scores, column = [score["accuracy"] for score in scores], column.removeprefix("domain:")
        return [float(score[column]) for score in scores if score.get(column) is not None]

    def value(self, column: str, rule: str = "final") -> Value | None:
        """The same over seeds; ``None`` where no run has it."""
        return Value.of(self.values(column, rule))


def comparable(groups: Sequence[Group]) -> list[Group]:
    """Groups among which a best one may be named: those scored on one shared model, or all if there are none."""
    return [group for group in groups if not group.personal] or list(groups)


def cells(groups: Sequence[Group], columns: Sequence[str], rule: str) -> list[list[tuple[Value | None, bool]]]:
    """Each group's value in each of ``columns``, ``None`` without a score, and whether it is the best of its column.

    Of ``spread`` the least is best. A best one is named among several :func:`comparable` groups only.
    """
    rivals, found = comparable(groups), []
    for column in columns:
        values = [group.value(column, rule) for group in groups]
        means = [value.mean for group, value in zip(groups, values, strict=True) if value and group in rivals]
        best = (min if column == "spread" else max)(means) if means and len(rivals) > 1 else math.nan
        found.append(
            [
                (value, value is not None and group in rivals and abs(value.mean - best) < 1e-9)
                for group, value in zip(groups, values, strict=True)
            ]
        )
    return [list(row) for row in zip(*found, strict=True)]


def ranked(groups: Sequence[Group], rule: str = "final") -> list[Group]:
    """Groups that were scored, the best average first."""
    scored = [(value.mean, group) for group in groups if (value := group.value("average", rule))]
    return [group for _, group in sorted(scored, key=lambda pair: -pair[0])]


def best_run(groups: Sequence[Group], rule: str = "final") -> Run | None:
    """The finished run of the lowest seed in the group with the best average; ``None`` if there is none."""
    runs = [run for group in comparable(ranked(groups, rule))[:1] for run in group.runs if run.summary]
    return min(runs, key=lambda run: run.seed, default=None)


def curve(runs: Sequence[Run], domains: Sequence[str] = ()) -> dict[int, Value]:
    """Mean accuracy over ``domains`` (all that were scored, if empty) by round, over the seeds of one configuration."""
    each = [
        {
            score.round: statistics.fmean(score.accuracy[name] for name in domains or score.accuracy)
            for score in run.round_scores
            if all(name in score.accuracy for name in domains)
        }
        for run in runs
    ]
    return by_round(each)


def by_round(each: Sequence[Mapping[int, float]]) -> dict[int, Value]:
    """Numbers by round of several runs, over those that have one."""
    rounds = sorted({number for points in each for number in points})
    values = {number: Value.of([points[number] for points in each if number in points]) for number in rounds}
    return {number: value for number, value in values.items() if value is not None}
