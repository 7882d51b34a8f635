"""Several seeds of one configuration: mean and deviation, and accuracy by round."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.metrics import PARTIAL, named_missing
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
        """What each run that has it scored.

        Args:
            column: ``average``, ``worst``, ``spread``, ``validation``, ``seen_average``, ``unseen_average`` or
                ``domain:<name>``.
            rule: how runs are scored, see :func:`common.metrics.summarise`.
        """
        found = [_cell(run.rules[rule], column) for run in self.runs if rule in run.rules]
        return [value for value in found if value is not None]

    def value(self, column: str, rule: str = "final") -> Value | None:
        """The same over seeds, partial if any run's is or a run has none; ``None`` where no run has it."""
        values = self.values(column, rule)
        lacking = [_lacks(run.rules[rule], column, rule, run.unseen) for run in self.runs if rule in run.rules]
        return Value.of(values, partial=any(lacking) or len(values) < len(self.runs))

    def missing(self, rule: str = "final") -> list[str]:
        """What the runs' scores lack and since when, a line for each run that is not whole."""
        lines = []
        for run in self.runs:
            score = run.rules.get(rule)
            if score is None:
                lines.append(f"seed {run.seed}: no such score")
            elif score["missing"]:
                lines.append(f"seed {run.seed}: without {named_missing(score['missing'])}")
            elif score.get("validation_missing"):
                lines.append(f"seed {run.seed}: validation without {named_missing(score['validation_missing'])}")
        return lines


def _cell(score: Mapping[str, Any], column: str) -> float | None:
    """A number of a run's score, ``None`` if it has none."""
    if column.startswith("domain:"):
        score, column = score["accuracy"], column.removeprefix("domain:")
    return None if score.get(column) is None else float(score[column])


def _lacks(score: Mapping[str, Any], column: str, rule: str, unseen: Collection[str]) -> bool:
    """Whether a number of a run's score is of fewer domains, rounds or clients than it should be."""
    missing = set(score["missing"])
    if column == "validation" or (rule == "validated" and score.get("validation_missing")):
        return bool(score.get("validation_missing"))
    if column.startswith("domain:"):
        return column.removeprefix("domain:") in missing
    if column == "unseen_average":
        return bool(missing.intersection(unseen))
    if column == "seen_average":
        return bool(missing.difference(unseen))
    return bool(missing)


def footnotes(groups: Sequence[Group], rule: str = "final") -> list[str]:
    """Return one line for each group with a partial score: what it lacks, and since when."""
    lines = []
    for group in groups:
        if found := group.missing(rule):
            lines.append(f"{PARTIAL} partial, not ranked: {group.label}: {'; '.join(found)}")
    return lines


def comparable(groups: Sequence[Group]) -> list[Group]:
    """Groups among which a best one may be named: those scored on one shared model, or all if there are none."""
    return [group for group in groups if not group.personal] or list(groups)


def cells(groups: Sequence[Group], columns: Sequence[str], rule: str) -> list[list[tuple[Value | None, bool]]]:
    """Each group's value in each of ``columns``, ``None`` without a score, and whether it is the best of its column.

    Of ``spread`` the least is best. A best one is named among several :func:`comparable` groups only, and is never a
    partial value.
    """
    rivals, found = comparable(groups), []
    for column in columns:
        values = [group.value(column, rule) for group in groups]
        ranks = [
            value is not None and not value.partial and group in rivals
            for group, value in zip(groups, values, strict=True)
        ]
        means = [value.mean for value, may in zip(values, ranks, strict=True) if value is not None and may]
        best = (min if column == "spread" else max)(means) if means and len(rivals) > 1 else math.nan
        found.append(
            [
                (value, may and value is not None and abs(value.mean - best) < 1e-9)
                for value, may in zip(values, ranks, strict=True)
            ]
        )
    return [list(row) for row in zip(*found, strict=True)]


def ranked(groups: Sequence[Group], rule: str = "final") -> list[Group]:
    """Groups with a whole score, the best average first; a partial one has no rank."""
    values = [(group.value("average", rule), group) for group in groups]
    scored = [(value.mean, group) for value, group in values if value is not None and not value.partial]
    return [group for _, group in sorted(scored, key=lambda pair: -pair[0])]


def best_run(groups: Sequence[Group], rule: str = "final") -> Run | None:
    """The finished run of the lowest seed in the group with the best whole average; ``None`` if there is none."""
    runs = [run for group in comparable(ranked(groups, rule))[:1] for run in group.runs if run.summary]
    return min(runs, key=lambda run: run.seed, default=None)


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
