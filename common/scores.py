"""A run's scores, computed from its records; a running, a resumed and a finished run are read in the same way.

A line of ``scores.jsonl`` holds what one client counted on one domain in one round. :class:`RunScores` makes of all of
them the scores of each round by any metric, and the run's scores under each rule.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.errors import ConfigError
from common.metrics import (
    COUNTED,
    METRICS,
    UNDEFINED,
    ClassTotals,
    Coverage,
    Measure,
    RoundScore,
    summarise,
)

Scorers = Mapping[str, int]
"""The domains that are scored, and how many scores complete each; see :class:`common.metrics.Coverage`."""

Values = Mapping[tuple[int, str], Mapping[str, float | None]]
"""The values of further metrics by round and domain; ``None`` for one that is not defined."""

COLUMNS = (
    *("round", "client", "client_domain", "domain", "scored_on", "count", "correct", "accuracy", "loss"),
    *COUNTED,
)
"""Columns of :func:`score_row`. Those of ``rounds.scores`` and ``own_metric`` follow, where the run has them."""


@dataclass(frozen=True)
class RunScores:
    """A run's scores.

    Args:
        lines: the lines of ``scores.jsonl``.
        events: the run's events, which hold the values of further metrics and the skipped rounds.
        scorers: the scored domains by ``test`` and ``validation``; of one that is absent, the domains of any line.
        measures: the metrics of ``rounds.scores`` and ``own_metric`` that the run has.
        metric: by which test images are scored in :meth:`rules`.
        chosen_by: ``rounds.metric``, by which validation samples are scored.
    """

    lines: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]] = ()
    scorers: Mapping[str, Scorers] = field(default_factory=dict)
    measures: Mapping[str, Measure] = field(default_factory=dict)
    metric: str = "accuracy"
    chosen_by: str = "accuracy"

    def tested(self, metric: str | None = None) -> list[RoundScore]:
        """Return the score of every round on test images, ascending.

        Accuracy counts each client of a domain once; other metrics are of its clients' images together.

        Args:
            metric: a metric that the run has; ``None`` is :attr:`metric`.

        Raises:
            ConfigError: the records lack the metric's counts or values.
        """
        return self._by(metric or self.metric, "test")

    def validated(self) -> list[RoundScore]:
        """Return the score of every round on clients' validation samples, ascending; see :meth:`tested`.

        Raises:
            ConfigError: the records lack the metric's counts.
        """
        return self._by(self.chosen_by, "validation")

    def rules(self, last: int, unseen: Collection[str] = ()) -> dict[str, dict[str, Any]]:
        """Return the run's scores under each rule, see :func:`common.metrics.summarise`.

        Args:
            last: number of states of the rule ``last_n``.
            unseen: domains that no client trains on.
        """
        return summarise(self.tested(), last, self.validated(), skipped=self.skipped, unseen=unseen)

    @property
    def skipped(self) -> set[int]:
        """The rounds that missed their quorum."""
        return {entry["round"] for entry in self.events if entry["event"] == "round skipped"}

    def _by(self, metric: str, scored_on: str) -> list[RoundScore]:
        """Return the score of every round by a metric.

        Args:
            metric: the metric.
            scored_on: ``test`` or ``validation``.
        """
        lines = lines_on(scored_on, self.lines)
        accuracies = round_scores(lines, self.scorers.get(scored_on))
        if metric == "accuracy" or not accuracies:
            return accuracies
        if metric in METRICS:
            return self._by_counts(metric, accuracies, lines)
        values = recorded_values(self.events, scored_on)
        if scored_on == "test" and not values:
            raise ConfigError(f"its events have no values of {metric}: restore them, or take --metric accuracy")
        return scores_by_values(metric, self.measures[metric], accuracies, values)

    def _by_counts(
        self, metric: str, accuracies: Sequence[RoundScore], lines: Sequence[Mapping[str, Any]]
    ) -> list[RoundScore]:
        try:
            return scores_by_counts(metric, accuracies, class_totals(lines))
        except KeyError as error:
            number, domain = error.args[0]
            raise ConfigError(
                f"no confusion counts of {domain} ({lines[0]['scored_on']}) in round {number}, so there is no "
                f"{METRICS[metric]}; take --metric accuracy, leave the run out, or run it again with overwrite=true"
            ) from error


# ---- lines -----------------------------------------------------------------------------------------------------------


def lines_on(scored_on: str, lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the lines of ``scores.jsonl`` that were scored on ``test`` images or on ``validation`` samples."""
    return [line for line in lines if line["scored_on"] == scored_on]


def test_images(lines: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return by domain the test images of one client, the largest number of any line of ``scores.jsonl``."""
    found: dict[str, int] = {}
    for line in lines_on("test", lines):
        found[line["domain"]] = max(found.get(line["domain"], 0), line["count"])
    return dict(sorted(found.items()))


def score_row(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of ``scores.jsonl`` as a row for people: the metrics in place of the counts, in per cent.

    A metric of confusion counts is ``None`` without them. A further metric that is not defined is absent.
    """
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    for column in row.keys() & line.keys():
        row[column] = line[column]
    row["accuracy"] = round(100.0 * line["correct"] / max(1, line["count"]), 4)
    if "confusion" in line:
        totals = ClassTotals.empty(line["confusion"]["classes"])
        totals.add_cells(line["confusion"])
        for metric in COUNTED:
            row[metric] = round(totals.metric(metric), 4)
    return row | line.get("values", {})


# ---- from lines to rounds --------------------------------------------------------------------------------------------


def round_scores(lines: Iterable[Mapping[str, Any]], scorers: Mapping[str, int] | None = None) -> list[RoundScore]:
    """Return the accuracy per domain of every round in lines of ``scores.jsonl``, ascending, with what each lacks.

    Args:
        lines: lines of ``scores.jsonl``, all of test images or all of validation samples.
        scorers: the run's domains, and how many scores complete each; ``None`` takes the domains of any line.
    """
    by_round: dict[int, list[tuple[str, int, int]]] = {}
    for line in lines:
        by_round.setdefault(line["round"], []).append((line["domain"], line["correct"], line["count"]))
    if scorers is None:
        domains: set[str] = set()
        for entries in by_round.values():
            domains.update(domain for domain, _, _ in entries)
        scorers = dict.fromkeys(sorted(domains), 1)
    coverage = Coverage(scorers)
    return [coverage.score(number, by_round[number]) for number in sorted(by_round)]


def class_totals(lines: Iterable[Mapping[str, Any]]) -> dict[tuple[int, str], ClassTotals]:
    """Return the images by class of each round and domain, summed over the clients that scored it.

    A domain of which a client's line has no counts in a round has none in that round.

    Args:
        lines: lines of ``scores.jsonl``, all of test images or all of validation samples.
    """
    found: dict[tuple[int, str], ClassTotals] = {}
    uncounted: set[tuple[int, str]] = set()
    for line in lines:
        key = line["round"], line["domain"]
        if "confusion" not in line:
            uncounted.add(key)
            continue
        totals = found.setdefault(key, ClassTotals.empty(line["confusion"]["classes"]))
        totals.add_cells(line["confusion"])
    return {key: totals for key, totals in found.items() if key not in uncounted}


def scores_by_counts(
    metric: str, accuracies: Iterable[RoundScore], totals: Mapping[tuple[int, str], ClassTotals]
) -> list[RoundScore]:
    """Return the scores of the same rounds and domains by a metric of confusion counts.

    Args:
        metric: one of :data:`common.metrics.METRICS`.
        accuracies: the scores by accuracy.
        totals: images by class of each round and domain; see :func:`class_totals`.

    Raises:
        KeyError: ``(round, domain)`` of a score without counts.
    """
    found: list[RoundScore] = []
    for score in accuracies:
        values = {domain: totals[score.round, domain].metric(metric) for domain in score.accuracy}
        found.append(RoundScore(score.round, values, score.missing))
    return found


def recorded_values(
    events: Iterable[Mapping[str, Any]], scored_on: str
) -> dict[tuple[int, str], dict[str, float | None]]:
    """Return the values of further metrics by round and domain, over all clients that scored it.

    Args:
        events: the run's events.
        scored_on: ``test`` or ``validation``.
    """
    name = "score"
    if scored_on == "validation":
        name = "validation"
    found: dict[tuple[int, str], dict[str, float | None]] = {}
    for entry in events:
        if entry["event"] == name:
            for metric, by_domain in entry.get("values", {}).items():
                for domain, value in by_domain.items():
                    found.setdefault((entry["round"], domain), {})[metric] = value
    return found


def scores_by_values(
    metric: str,
    measure: Measure,
    accuracies: Iterable[RoundScore],
    values: Mapping[tuple[int, str], Mapping[str, float | None]],
) -> list[RoundScore]:
    """Return the scores of the same rounds by a metric that was recorded as values.

    A domain in which the metric is not defined counts as missing, as :data:`common.metrics.UNDEFINED`. A round in which
    it is defined nowhere is left out.

    Args:
        metric: the metric's name.
        measure: its description.
        accuracies: the scores by accuracy.
        values: see :func:`recorded_values`.
    """
    found: list[RoundScore] = []
    for score in accuracies:
        numbers: dict[str, float] = {}
        missing = dict(score.missing)
        for domain in score.accuracy:
            value = values.get((score.round, domain), {}).get(metric)
            if value is None:
                missing[domain] = UNDEFINED
                continue
            numbers[domain] = value
        if numbers:
            found.append(RoundScore(score.round, numbers, missing, measure.lower_is_better))
    return found
