"""A run's scores, computed from its records; a running, a resumed and a finished run are read in the same way.

A line of ``scores.jsonl`` holds what one client counted on one domain in one round. :class:`ScoreSeries` makes of the
lines of a round its score by a metric. :class:`RunScores` has those of all rounds, and the run's scores by each rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.errors import ConfigError
from common.metrics import (
    COUNTED,
    MEASURES,
    METRICS,
    UNDEFINED,
    ClassTotals,
    Measure,
    RoundScore,
    domain_accuracy,
    summarise,
)

Scorers = Mapping[str, int]
"""The domains that are scored, and how many scores complete each; see :class:`ScoreSeries`."""

Values = Mapping[tuple[int, str], Mapping[str, float | None]]
"""The values of further metrics by round and domain; ``None`` for one that is not defined."""

COLUMNS = (
    *("round", "client", "client_domain", "domain", "scored_on", "count", "correct", "accuracy", "loss"),
    *COUNTED,
)
"""Columns of :func:`score_row`. The columns of ``rounds.scores`` and ``own_metric`` follow, where a run has them."""


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
        return self.series("test", metric or self.metric).scores

    def validated(self) -> list[RoundScore]:
        """Return the score of every round on clients' validation samples, ascending; see :meth:`tested`.

        Raises:
            ConfigError: the records lack the metric's counts.
        """
        return self.series("validation", self.chosen_by).scores

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

    def series(self, scored_on: str, metric: str) -> ScoreSeries:
        """Return the scores of every round by a metric, to which further rounds can be added.

        Args:
            scored_on: ``test`` or ``validation``.
            metric: the metric.

        Raises:
            ConfigError: the records lack the metric's counts or values.
        """
        lines = lines_on(scored_on, self.lines)
        scorers = self.scorers.get(scored_on)
        if scorers is None:
            scorers = dict.fromkeys(sorted({line["domain"] for line in lines}), 1)
        series = ScoreSeries(scorers, metric, self.measures.get(metric, MEASURES.get(metric)))
        values: Values = {}
        if metric not in METRICS and lines:
            values = recorded_values(self.events, scored_on)
            if scored_on == "test" and not values:
                raise ConfigError(f"its events have no values of {metric}: restore them, or take --metric accuracy")
        by_round: dict[int, list[Mapping[str, Any]]] = {}
        for line in lines:
            by_round.setdefault(line["round"], []).append(line)
        for number in sorted(by_round):
            series.add(number, by_round[number], values)
        return series


class ScoreSeries:
    """The scores of a run's rounds by one metric, on test images or on validation samples.

    A running run adds each round as it is scored; :class:`RunScores` adds those of a record.

    Args:
        scorers: the scored domains, and the number of scores that complete each: 1 for a shared model, which one client
            scores; if clients score models or samples of their own, the number of clients that hold the domain.
        metric: the metric.
        measure: its description; needed for a metric that is recorded as values.

    Attributes:
        scores: the score of each round that was added, without rounds in which the metric is defined nowhere.
    """

    def __init__(self, scorers: Scorers, metric: str = "accuracy", measure: Measure | None = None) -> None:
        self.metric = metric
        self.scores: list[RoundScore] = []
        self._lower_is_better = measure is not None and measure.lower_is_better
        self._scorers = scorers
        self._latest: dict[str, int] = {}
        """The last round that scored each domain completely."""

    def add(self, number: int, lines: Sequence[Mapping[str, Any]], values: Values | None = None) -> RoundScore | None:
        """Add a round and return its score; ``None`` if the metric is defined in no domain.

        Args:
            number: the round, later than those before it.
            lines: its lines of ``scores.jsonl``; at least one.
            values: of a metric that is recorded as values.

        Raises:
            ConfigError: the lines lack the metric's counts.
        """
        accuracy = self._accuracy(number, lines)
        score: RoundScore | None = accuracy
        if self.metric in COUNTED:
            score = self._by_counts(accuracy, lines)
        elif self.metric != "accuracy":
            score = self._by_values(accuracy, values or {})
        if score is not None:
            self.scores.append(score)
        return score

    def _accuracy(self, number: int, lines: Sequence[Mapping[str, Any]]) -> RoundScore:
        """Return the score by accuracy, with the domains that were not scored by all clients that should."""
        entries = [(line["domain"], line["correct"], line["count"]) for line in lines]
        scores = Counter(line["domain"] for line in lines)
        missing: dict[str, int | None] = {}
        for domain, needed in self._scorers.items():
            if scores[domain] < max(needed, 1):
                missing[domain] = self._latest.get(domain)
            else:
                self._latest[domain] = number
        return RoundScore(number, domain_accuracy(entries), missing)

    def _by_counts(self, accuracy: RoundScore, lines: Sequence[Mapping[str, Any]]) -> RoundScore:
        totals = class_totals(lines)
        accuracies: dict[str, float] = {}
        for domain in accuracy.accuracy:
            if (accuracy.round, domain) not in totals:
                raise ConfigError(
                    f"no confusion counts of {domain} ({lines[0]['scored_on']}) in round {accuracy.round}, so there is "
                    f"no {METRICS[self.metric]}; take --metric accuracy, leave the run out, or run it again with "
                    "overwrite=true"
                )
            accuracies[domain] = totals[accuracy.round, domain].metric(self.metric)
        return RoundScore(accuracy.round, accuracies, accuracy.missing)

    def _by_values(self, accuracy: RoundScore, values: Values) -> RoundScore | None:
        """Return the score by recorded values; domains without one are missing, as :data:`UNDEFINED`."""
        values_by_domain: dict[str, float] = {}
        missing = dict(accuracy.missing)
        for domain in accuracy.accuracy:
            value = values.get((accuracy.round, domain), {}).get(self.metric)
            if value is None:
                missing[domain] = UNDEFINED
                continue
            values_by_domain[domain] = value
        if not values_by_domain:
            return None
        return RoundScore(accuracy.round, values_by_domain, missing, self._lower_is_better)


# ---- lines -----------------------------------------------------------------------------------------------------------


def lines_on(scored_on: str, lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the lines of ``scores.jsonl`` that were scored on ``test`` images or on ``validation`` samples."""
    return [line for line in lines if line["scored_on"] == scored_on]


def test_images(lines: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return by domain the test images of one client, the largest number of any line of ``scores.jsonl``."""
    images: dict[str, int] = {}
    for line in lines_on("test", lines):
        images[line["domain"]] = max(images.get(line["domain"], 0), line["count"])
    return dict(sorted(images.items()))


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


def class_totals(lines: Iterable[Mapping[str, Any]]) -> dict[tuple[int, str], ClassTotals]:
    """Return the images by class of each round and domain, summed over the clients that scored it.

    A domain of which a client's line has no counts in a round has none in that round.

    Args:
        lines: lines of ``scores.jsonl``, all of test images or all of validation samples.
    """
    totals_by_key: dict[tuple[int, str], ClassTotals] = {}
    uncounted: set[tuple[int, str]] = set()
    for line in lines:
        key = line["round"], line["domain"]
        if "confusion" not in line:
            uncounted.add(key)
            continue
        totals = totals_by_key.setdefault(key, ClassTotals.empty(line["confusion"]["classes"]))
        totals.add_cells(line["confusion"])
    return {key: totals for key, totals in totals_by_key.items() if key not in uncounted}


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
    values: dict[tuple[int, str], dict[str, float | None]] = {}
    for entry in events:
        if entry["event"] == name:
            for metric, by_domain in entry.get("values", {}).items():
                for domain, value in by_domain.items():
                    values.setdefault((entry["round"], domain), {})[metric] = value
    return values
