"""The metrics that a run's settings ask for besides accuracy and those of confusion counts, computed on the server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from common.confidence import ConfidenceCounts
from common.errors import ConfigError
from common.metrics import Measure
from common.own_metric import values_of

if TYPE_CHECKING:  # imports torch
    from common.settings import RunSettings


class FurtherMeasures:
    """Computes the values of ``rounds.scores`` and ``own_metric`` from the scores that devices sent.

    Args:
        settings: the run's settings.
        tell: called with an event's name and content, once if ``own_metric`` fails on the server.
    """

    def __init__(self, settings: RunSettings, tell: Callable[..., None]) -> None:
        self.measures = settings.further_measures
        self.own_metric = settings.own_metric
        self.class_count: int = settings.data.class_count
        self.scores: bool = settings.rounds.scores
        self._tell = tell
        self._failed = False

    def confidence(self, entries: Sequence[Mapping[str, Any]]) -> ConfidenceCounts:
        """Return the counts of confidences over scores."""
        counts = ConfidenceCounts.empty(self.class_count)
        for entry in entries:
            counts = counts.plus(ConfidenceCounts(**entry["confidence"]))
        return counts

    def resolution(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return how far binned metrics of scores may be from the exact ones, by metric; empty without such metrics."""
        if not self.scores:
            return {}
        area = self.confidence(entries).auroc()
        if area is None:
            return {}
        return {"auroc": area[1]}

    def values(self, number: int, entries: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
        """Return the values of scores of one domain together; ``None`` for one that is not defined.

        Args:
            number: the scored round.
            entries: the scores, as the gate accepted them; at least one.
        """
        values: dict[str, float | None] = {}
        if self.scores:
            values |= self.confidence(entries).values()
        if self.own_metric.sum_names:
            values |= self._own_values(number, self.sums(entries))
        return values

    def recorded(self, number: int, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the ``values`` and ``sums`` of one score as its line holds them, without values that are not defined.

        Args:
            number: the scored round.
            entry: the score, as the gate accepted it.
        """
        values: dict[str, float] = {}
        for metric, value in self.values(number, [entry]).items():
            if value is not None:
                values[metric] = round(value, 6)
        recorded: dict[str, Any] = {"values": values}
        sums = self.sums([entry])
        if sums:
            recorded["sums"] = sums
        return recorded

    def sums(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return the sums of ``own_metric`` over scores; empty without such a metric."""
        total = dict.fromkeys(self.own_metric.sum_names, 0.0)
        for entry in entries:
            for name in total:
                total[name] += float(entry["sums"][name])
        return total

    def _own_values(self, number: int, sums: Mapping[str, float]) -> dict[str, float | None]:
        try:
            return values_of(self.own_metric, sums)
        except ConfigError as error:
            if not self._failed:
                self._failed = True
                self._tell("metric failed", round=number, reason=str(error), sums=dict(sums))
            return dict.fromkeys(self.own_metric.measures)


def described(measures: Mapping[str, Measure]) -> dict[str, dict[str, Any]]:
    """Return metrics as containers that JSON can write; see :func:`measures_in`."""
    return {name: asdict(measure) for name, measure in measures.items()}


def measures_in(content: Mapping[str, Mapping[str, Any]]) -> dict[str, Measure]:
    """Return the metrics that :func:`described` wrote."""
    measures: dict[str, Measure] = {}
    for name, each in content.items():
        measures[name] = Measure(str(each["label"]), str(each["unit"]), bool(each["lower_is_better"]))
    return measures


def resolutions_of(events: Iterable[Mapping[str, Any]], number: int) -> dict[str, float]:
    """Return how far a value of a round on test images may be from the exact one, by metric that is binned."""
    resolutions: dict[str, float] = {}
    for entry in events:
        if entry["event"] == "score" and entry["round"] == number:
            resolutions = dict(entry.get("resolution", {}))
    return resolutions
