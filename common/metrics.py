"""Measures of a federated run: scores per domain, over domains and over rounds, and memory."""

from __future__ import annotations

import math
import resource
import statistics
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Missing = Mapping[str, int | None]
"""Domains that a score lacks, each with the last round before that scored it; ``None`` if no round did.

:data:`UNDEFINED` stands for a domain that was scored, and whose metric is not defined.
"""

UNDEFINED = -1
"""In place of a round: the domain was scored, but its images do not define the metric, such as AUROC of one class."""


Metric = Literal["accuracy", "balanced_accuracy", "macro_f1", "worst_class"]
"""A measure that is computed from a domain's confusion counts; see :meth:`ClassTotals.metric`."""

METRICS: dict[str, str] = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro F1",
    "worst_class": "recall of the worst class",
}
"""The metrics and their names in tables."""


class ScoreRule(NamedTuple):
    """A rule by which a run is scored: its name in the title of tables, and an explanation for the report."""

    name: str
    note: str


RULES = {
    "final": ScoreRule("last round", "after the last scored round"),
    "last_n": ScoreRule("mean of the last rounds", "mean over the last scored rounds, the rule of FPL and FedAPC"),
    "best_round": ScoreRule(
        "best round by test score",
        "of the round with the best test average, which is too optimistic: it selects by the test set",
    ),
    "validated": ScoreRule(
        "best round by validation score",
        "of the round that is best on clients' validation samples, which no client trains on",
    ),
}
"""The rules that ``--rule`` takes; :func:`summarise` computes them."""

COUNTED: tuple[Metric, ...] = ("balanced_accuracy", "macro_f1", "worst_class")
"""The metrics that need confusion counts."""


@dataclass(frozen=True)
class Measure:
    """What a metric's numbers are, for tables and charts.

    Args:
        label: its name in tables, such as ``macro F1``.
        unit: ``%``, another unit, or empty.
        lower_is_better: whether a lower number is better.
    """

    label: str
    unit: str = "%"
    lower_is_better: bool = False

    @property
    def digits(self) -> int:
        """Digits after the point in tables."""
        if self.unit == "%":
            return 2
        return 4

    @property
    def title(self) -> str:
        """The label with the unit, and a note if lower is better."""
        text = self.label
        if self.unit:
            text += f" in {self.unit}"
        if self.lower_is_better:
            text += " (lower is better)"
        return text


MEASURES: dict[str, Measure] = {name: Measure(label) for name, label in METRICS.items()}
"""The metrics that every run has; see :data:`METRICS`."""

CONFIDENCE_MEASURES: dict[str, Measure] = {
    "auroc": Measure("AUROC"),
    "calibration_error": Measure("calibration error", lower_is_better=True),
    "brier_score": Measure("Brier score", "", lower_is_better=True),
    "log_loss": Measure("log loss", "nats", lower_is_better=True),
}
"""The metrics that a run has with ``rounds.scores=true``; see :class:`common.confidence.ConfidenceCounts`."""

PARTIAL = "†"
"""Mark of a partial score in tables and reports."""


@dataclass(frozen=True)
class ClassTotals:
    """Images by class: all that a metric needs of confusion counts.

    Args:
        true: ``[K]``, images of each class.
        predicted: ``[K]``, images that were predicted as each class.
        correct: ``[K]``, images of each class that were predicted as it.
    """

    true: list[int]
    predicted: list[int]
    correct: list[int]

    @classmethod
    def empty(cls, class_count: int) -> ClassTotals:
        """Return totals of no images."""
        return cls([0] * class_count, [0] * class_count, [0] * class_count)

    @classmethod
    def of(cls, confusion: Sequence[Sequence[int]]) -> ClassTotals:
        """Return the totals of confusion counts ``[K][K]``: images by true class (row) and predicted class (column)."""
        totals = cls.empty(len(confusion))
        totals.add_cells(cells_of(confusion))
        return totals

    def add_cells(self, cells: Mapping[str, Any]) -> None:
        """Add the images of confusion counts without their zeros, see :func:`cells_of`."""
        for true, predicted, count in zip(cells["true"], cells["predicted"], cells["count"], strict=True):
            self.true[true] += count
            self.predicted[predicted] += count
            if true == predicted:
                self.correct[true] += count

    def recall(self, label: int) -> float | None:
        """Return the share of a class's images that were predicted as it, in per cent; ``None`` without images."""
        if not self.true[label]:
            return None
        return 100.0 * self.correct[label] / self.true[label]

    def metric(self, name: str) -> float:
        """Return a metric in per cent, of at least one image.

        ``balanced_accuracy`` is the mean of the recalls of the classes that have images. ``worst_class`` is the lowest
        of them. ``macro_f1`` is the mean of F1 over the classes that have images or were predicted. These are
        scikit-learn's definitions.

        Args:
            name: one of :data:`METRICS`.
        """
        if name == "accuracy":
            return 100.0 * sum(self.correct) / sum(self.true)
        recalls: list[float] = []
        scores: list[float] = []
        for label, (true, predicted) in enumerate(zip(self.true, self.predicted, strict=True)):
            recall = self.recall(label)
            if recall is not None:
                recalls.append(recall)
            if true or predicted:
                scores.append(200.0 * self.correct[label] / (true + predicted))
        if name == "balanced_accuracy":
            return statistics.fmean(recalls)
        if name == "worst_class":
            return min(recalls)
        return statistics.fmean(scores)


def cells_of(confusion: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return confusion counts without their zeros, as a run records them.

    Args:
        confusion: ``[K][K]``, images by true class (row) and predicted class (column).

    Returns:
        The number of ``classes`` K and, for each pair of classes with images, an entry in each of the lists ``true``,
        ``predicted`` and ``count``.
    """
    cells: dict[str, Any] = {"classes": len(confusion), "true": [], "predicted": [], "count": []}
    for true, row in enumerate(confusion):
        for predicted, count in enumerate(row):
            if count:
                cells["true"].append(true)
                cells["predicted"].append(predicted)
                cells["count"].append(count)
    return cells


def counts_fit(counts: Any, class_count: int, total: int, correct: int) -> bool:
    """Return whether ``counts``, as a device sent them, are the confusion counts of its score.

    Args:
        counts: what should be ``[K][K]`` whole numbers, images by true class (row) and predicted class (column).
        class_count: the number of classes K.
        total: the images of the score.
        correct: the correct predictions among them.
    """
    if not isinstance(counts, list) or len(counts) != class_count:
        return False
    for line in counts:
        if not isinstance(line, list) or len(line) != class_count:
            return False
        if not all(type(n) is int and 0 <= n <= total for n in line):
            return False
    diagonal = sum(counts[index][index] for index in range(class_count))
    return diagonal == correct and sum(map(sum, counts)) == total


@dataclass(frozen=True)
class RoundScore:
    """Accuracy per domain after a round, in per cent.

    Args:
        round: the round, 0 before the first.
        accuracy: by domain, in per cent; never empty.
        missing: the run's domains that this round did not score, or not by all clients that should. A score without
            missing domains is whole; any other is partial, and its average and worst are over fewer domains.
        lower_is_better: whether the numbers are of a metric of which the lowest is best, instead of accuracies.
    """

    round: int
    accuracy: Mapping[str, float]
    missing: Missing = field(default_factory=dict)
    lower_is_better: bool = False

    def content(self) -> dict[str, Any]:
        """Return the numbers of the score as the listeners of a run get them."""
        return {
            "accuracy": dict(self.accuracy),
            "average": self.average,
            "worst": self.worst,
            "missing": dict(self.missing),
        }

    @property
    def average(self) -> float:
        """Unweighted mean over the scored domains, as the AVG column of the papers' tables."""
        return sum(self.accuracy.values()) / len(self.accuracy)

    @property
    def worst(self) -> float:
        """The lowest scored domain's accuracy; the highest number if lower is better."""
        if self.lower_is_better:
            return max(self.accuracy.values())
        return min(self.accuracy.values())

    @property
    def spread(self) -> float:
        """Standard deviation between the scored domains (population), in percentage points."""
        mean = self.average
        squares = [(value - mean) ** 2 for value in self.accuracy.values()]
        return math.sqrt(sum(squares) / len(squares))


def domain_accuracy(scores: Sequence[tuple[str, int, int]]) -> dict[str, float]:
    """Return the accuracy in per cent by domain, sorted, from ``(domain, correct, count)`` entries.

    Of several entries for a domain (clients with models of their own) the mean of the accuracies is taken.
    """
    by_domain: dict[str, list[float]] = {}
    for domain, correct, count in scores:
        by_domain.setdefault(domain, []).append(100.0 * correct / count)
    accuracy: dict[str, float] = {}
    for domain in sorted(by_domain):
        accuracy[domain] = sum(by_domain[domain]) / len(by_domain[domain])
    return accuracy


def states(rounds: Sequence[RoundScore], skipped: Collection[int] = ()) -> list[RoundScore]:
    """Return one score for each trained state: the one with the fewest missing domains, the earliest of several.

    Round 0 is left out, because nothing was trained before it. A skipped round keeps the state of the round before, so
    its score is another score of that state.

    Args:
        rounds: scores in ascending order.
        skipped: the rounds that were skipped.
    """
    chosen: dict[int, RoundScore] = {}
    for score in rounds:
        held = score.round
        while held in skipped:
            held -= 1
        if held > 0 and (held not in chosen or len(score.missing) < len(chosen[held].missing)):
            chosen[held] = score
    return list(chosen.values())


def best_round(rounds: Sequence[RoundScore]) -> RoundScore | None:
    """Return the round of the best average, the earliest of several.

    A partial score is chosen only if no score is whole: then among those of the most domains.
    """
    whole = [score for score in rounds if not score.missing]

    def quality(score: RoundScore) -> tuple[int, float]:
        if score.lower_is_better:
            return len(score.accuracy), -score.average
        return len(score.accuracy), score.average

    return max(whole or rounds, key=quality, default=None)


def best_of(scores: Sequence[RoundScore]) -> dict[str, float]:
    """Return the highest accuracy over ``scores`` of each domain, and of ``average`` and ``worst`` of whole scores."""
    best: dict[str, float] = {}
    for score in scores:
        values = dict(score.accuracy)
        if not score.missing:
            values["average"] = score.average
            values["worst"] = score.worst
        for name, value in values.items():
            best[name] = max(value, best.get(name, value))
    return best


def summarise(
    rounds: Sequence[RoundScore],
    last: int,
    validation: Sequence[RoundScore] = (),
    *,
    skipped: Collection[int] = (),
    unseen: Collection[str] = (),
) -> dict[str, dict[str, object]]:
    """Return the run's scores under each rule.

    ``final`` is the last scored round, also if it is partial. ``last_n`` is the mean of each domain over the last
    ``last`` trained states that scored it (the rule of FPL and FedAPC). ``best_round`` is the round of the highest test
    average; it chooses a model by its test score, as FedPall's table does, and so is too optimistic. ``validated`` is
    the test score of the round that is best on ``validation``. The last three count each trained state once
    (:func:`states`), and the last two choose as :func:`best_round` does.

    Each rule has the keys ``round``, ``accuracy``, ``average``, ``worst``, ``spread``, ``missing`` (see
    :data:`Missing`; empty for a whole score), with ``validation`` the average of the same rounds on validation samples,
    and ``validation_missing`` their missing domains. With ``unseen``, ``seen_average`` and ``unseen_average`` are the
    means over domains that clients trained on, and over those that no client has.

    Args:
        rounds: test scores of all rounds, ascending.
        last: number of states of ``last_n``, >= 1.
        validation: scores on validation samples, ascending.
        skipped: the rounds that were skipped.
        unseen: domains that no client trains on.
    """
    if not rounds:
        return {}
    trained = states(rounds, skipped)
    tail = trained[-last:]
    rules = {"final": rounds[-1]}
    best = best_round(trained)
    if best is not None:
        rules["last_n"] = _mean(tail)
        rules["best_round"] = best
    by_round = {score.round: score for score in rounds}
    held_out = {score.round: score for score in validation}
    validated = best_round(states(validation, skipped))
    if validated is not None and validated.round in by_round:
        rules["validated"] = by_round[validated.round]
    result: dict[str, dict[str, object]] = {}
    for name, score in rules.items():
        result[name] = _entry(score, unseen)
        sources = [score]
        if name == "last_n":
            sources = tail
        covered = [held_out[source.round] for source in sources if source.round in held_out]
        if covered:
            result[name]["validation"] = sum(each.average for each in covered) / len(covered)
            result[name]["validation_missing"] = _missing_of(covered)
    if "last_n" in result:
        result["last_n"]["rounds"] = len(tail)
    return result


def _mean(tail: Sequence[RoundScore]) -> RoundScore:
    """Return the mean of each domain over the scores that have it; domains that one score lacks are missing."""
    by_domain: dict[str, list[float]] = {}
    for score in tail:
        for domain, accuracy in score.accuracy.items():
            by_domain.setdefault(domain, []).append(accuracy)
    mean: dict[str, float] = {}
    for domain in sorted(by_domain):
        mean[domain] = sum(by_domain[domain]) / len(by_domain[domain])
    return RoundScore(tail[-1].round, mean, _missing_of(tail), tail[-1].lower_is_better)


def _missing_of(scores: Iterable[RoundScore]) -> dict[str, int | None]:
    """Return the domains that any of several scores lacks, each with the entry of the last of them that lacks it."""
    missing: dict[str, int | None] = {}
    for score in scores:
        missing.update(score.missing)
    return missing


def _entry(score: RoundScore, unseen: Collection[str]) -> dict[str, object]:
    entry: dict[str, object] = {
        "round": score.round,
        "accuracy": dict(score.accuracy),
        "average": score.average,
        "worst": score.worst,
        "spread": score.spread,
        "missing": dict(score.missing),
    }
    values: dict[bool, list[float]] = {True: [], False: []}
    for domain, accuracy in score.accuracy.items():
        values[domain in unseen].append(accuracy)
    if values[True] and values[False]:
        entry["seen_average"] = statistics.fmean(values[False])
        entry["unseen_average"] = statistics.fmean(values[True])
    return entry


def named_missing(missing: Missing) -> str:
    """Return text with the missing domains and the last round that scored each."""
    parts: list[str] = []
    for domain, last in missing.items():
        if last is None:
            parts.append(f"{domain} (never scored)")
        elif last == UNDEFINED:
            parts.append(f"{domain} (scored, but its images do not define the metric)")
        else:
            parts.append(f"{domain} (last scored in round {last})")
    return ", ".join(parts)


def peak_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    return peak * 1024
