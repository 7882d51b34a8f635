"""Scores of a classifier's confidence from counts that add up over clients: AUROC, calibration, Brier score, log loss.

A device counts its images in fixed bins and sends the counts. The server adds the counts of all clients that scored a
domain, so the result is that of all their images together, and no image's confidence leaves a device.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

CALIBRATION_BINS = 15
"""Equal bins of confidence in the calibration error (Guo et al., ICML 2017)."""

ODDS_BINS = 256
"""Bins of a class's log-odds in the AUROC."""

ODDS_WIDTH = 0.1
"""Width of a bin of log-odds. The bins cover -12.8 to 12.8; the first and the last one take what lies beyond."""

SMALLEST_PROBABILITY = 2.0**-52
"""Smallest probability of the true class in the log loss, which would otherwise be infinite."""

COUNT_TOLERANCE = 1e-6
"""Rounding that is allowed in a sum of confidences, per image."""


@dataclass(frozen=True)
class ConfidenceCounts:
    """Counts of one split, or of several added together.

    With the numbers of :data:`ODDS_BINS` ``B`` and of classes ``K``:

    Args:
        positive: ``[K][B]``, images of each class by the bin of that class's log-odds.
        negative: ``[K][B]``, images of the other classes by the same bin.
        count: ``[15]``, images by the bin of the highest probability.
        correct: ``[15]``, correct predictions among them.
        confidence: ``[15]``, the sum of the highest probabilities in each bin.
        squared_error: the sum over images and classes of ``(p - y)^2``, where ``y`` is 1 for the true class.
        log_loss: the sum of ``-log p`` of the true class, with ``p`` at least :data:`SMALLEST_PROBABILITY`.
    """

    positive: list[list[int]]
    negative: list[list[int]]
    count: list[int]
    correct: list[int]
    confidence: list[float]
    squared_error: float
    log_loss: float

    @classmethod
    def empty(cls, class_count: int) -> ConfidenceCounts:
        """Return the counts of no images."""
        positive = [[0] * ODDS_BINS for _ in range(class_count)]
        negative = [[0] * ODDS_BINS for _ in range(class_count)]
        bins = CALIBRATION_BINS
        return cls(positive, negative, [0] * bins, [0] * bins, [0.0] * bins, 0.0, 0.0)

    def plus(self, other: ConfidenceCounts) -> ConfidenceCounts:
        """Return the counts of both."""
        return ConfidenceCounts(
            _sum_of_rows(self.positive, other.positive),
            _sum_of_rows(self.negative, other.negative),
            _sum_of(self.count, other.count),
            _sum_of(self.correct, other.correct),
            [mine + theirs for mine, theirs in zip(self.confidence, other.confidence, strict=True)],
            self.squared_error + other.squared_error,
            self.log_loss + other.log_loss,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as containers that JSON can write."""
        return asdict(self)

    @property
    def images(self) -> int:
        """The number of images."""
        return sum(self.count)

    def auroc(self) -> tuple[float, float] | None:
        """Return the area under the ROC curve, one class against the rest, and how exact it is; both in per cent.

        The result is the mean over the classes that have images and do not have all of them. Two images in one bin
        count as a tie, a half. With all log-odds known, the area could differ by at most the second number: half the
        share of pairs that share a bin.

        Returns:
            ``None`` if no class has an area.
        """
        areas: list[float] = []
        resolutions: list[float] = []
        for positive, negative in zip(self.positive, self.negative, strict=True):
            pairs = sum(positive) * sum(negative)
            if not pairs:
                continue
            below = 0
            ranked = 0
            tied = 0
            for hits, others in zip(positive, negative, strict=True):
                ranked += hits * below
                tied += hits * others
                below += others
            areas.append(100 * (ranked + tied / 2) / pairs)
            resolutions.append(100 * tied / 2 / pairs)
        if not areas:
            return None
        return statistics.fmean(areas), statistics.fmean(resolutions)

    def calibration_error(self) -> float:
        """Return the expected calibration error in per cent.

        The error is the difference between accuracy and mean confidence in each bin, averaged over images.
        """
        gaps = [abs(right - sure) for right, sure in zip(self.correct, self.confidence, strict=True)]
        return 100 * sum(gaps) / self.images

    def values(self) -> dict[str, float | None]:
        """Return the metrics of :data:`common.metrics.CONFIDENCE_MEASURES`; ``None`` for one that is not defined."""
        if not self.images:
            return dict.fromkeys(("auroc", "calibration_error", "brier_score", "log_loss"))
        area = self.auroc()
        return {
            "auroc": area[0] if area else None,
            "calibration_error": self.calibration_error(),
            "brier_score": self.squared_error / self.images,
            "log_loss": self.log_loss / self.images,
        }


def _sum_of(mine: Sequence[int], theirs: Sequence[int]) -> list[int]:
    return [left + right for left, right in zip(mine, theirs, strict=True)]


def _sum_of_rows(mine: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> list[list[int]]:
    return [_sum_of(left, right) for left, right in zip(mine, theirs, strict=True)]


def count_confidence(scores: Tensor, labels: Tensor) -> ConfidenceCounts:
    """Return the counts of a batch.

    Args:
        scores: ``[N, K]``, the scores of the classes before softmax; minus infinity is a probability of 0.
        labels: int64 ``[N]``, the true classes.

    Raises:
        ValueError: a score is NaN or plus infinity, or all scores of an image are minus infinity.
    """
    import torch

    logs = scores.double().log_softmax(1).cpu()
    labels = labels.cpu()
    if logs.isnan().any():
        raise ValueError("the model's scores are not finite, so there are no probabilities")
    images, classes = logs.shape
    probabilities = logs.exp()
    odds = logs - torch.log1p(-probabilities)
    place = (odds / ODDS_WIDTH).floor().clamp(-ODDS_BINS / 2, ODDS_BINS / 2 - 1).long() + ODDS_BINS // 2
    truth = torch.nn.functional.one_hot(labels, classes).bool()
    cells = place + torch.arange(classes) * ODDS_BINS
    positive = torch.bincount(cells[truth], minlength=classes * ODDS_BINS).view(classes, ODDS_BINS)
    negative = torch.bincount(cells[~truth], minlength=classes * ODDS_BINS).view(classes, ODDS_BINS)
    predicted = scores.argmax(1).cpu()  # of two equal probabilities, as the confusion counts take it
    confidence = probabilities[torch.arange(images), predicted]
    right = predicted == labels
    bins = (confidence * CALIBRATION_BINS).ceil().long().clamp(1, CALIBRATION_BINS) - 1
    sums = torch.zeros(CALIBRATION_BINS, dtype=torch.float64).index_add(0, bins, confidence)
    likelihood = logs[torch.arange(images), labels].clamp_min(math.log(SMALLEST_PROBABILITY))
    return ConfidenceCounts(
        positive.tolist(),
        negative.tolist(),
        torch.bincount(bins, minlength=CALIBRATION_BINS).tolist(),
        torch.bincount(bins[right], minlength=CALIBRATION_BINS).tolist(),
        sums.tolist(),
        float((probabilities - truth.double()).square().sum()),
        -float(likelihood.sum()),
    )


def exact_auroc(probabilities: Tensor, labels: Tensor) -> float | None:
    """Return the area under the ROC curve in per cent, one class against the rest, of all images at once.

    The result is the mean over the classes that have images and do not have all of them (Hand and Till, 2001, for one
    class: the share of pairs of an image of the class and another one that are in the right order; a tie is a half).

    Args:
        probabilities: ``[N, K]``.
        labels: int64 ``[N]``.

    Returns:
        ``None`` if no class has an area.
    """
    import torch

    areas: list[float] = []
    for label in range(probabilities.shape[1]):
        own = labels == label
        hits, others = int(own.sum()), int((~own).sum())
        if not hits or not others:
            continue
        _, place, sizes = torch.unique(probabilities[:, label], return_inverse=True, return_counts=True)
        last = sizes.cumsum(0).double()
        ranks = (last - (sizes.double() - 1) / 2)[place]  # equal probabilities share the mean of their ranks
        areas.append(100 * (float(ranks[own].sum()) - hits * (hits + 1) / 2) / (hits * others))
    if not areas:
        return None
    return statistics.fmean(areas)


def read_confidence(value: Any, class_count: int, total: int, correct: int) -> ConfidenceCounts:
    """Return the counts that a device sent, if they can be those of its score.

    Args:
        value: what should be :meth:`ConfidenceCounts.as_dict`.
        class_count: the number of classes K.
        total: the images of the score.
        correct: the correct predictions among them.

    Raises:
        ValueError: they cannot; the message says why.
    """
    names = tuple(ConfidenceCounts.__dataclass_fields__)
    if not isinstance(value, Mapping) or set(value) != set(names):
        raise ValueError(f"the counts of confidence are not {', '.join(names)}")
    for name in ("positive", "negative"):
        rows = value[name]
        if not isinstance(rows, list) or len(rows) != class_count:
            raise ValueError(f"{name} is not a list for each of {class_count} classes")
        for row in rows:
            _check_counts(name, row, ODDS_BINS, total)
    for name in ("count", "correct"):
        _check_counts(name, value[name], CALIBRATION_BINS, total)
    if sum(value["count"]) != total or sum(value["correct"]) != correct:
        raise ValueError(f"the bins of confidence do not hold {correct} correct of {total} images")
    owned = 0
    for mine, others in zip(value["positive"], value["negative"], strict=True):
        owned += sum(mine)
        if sum(mine) + sum(others) != total:
            raise ValueError(f"the log-odds of a class are not those of {total} images")
    if owned != total:
        raise ValueError(f"the log-odds of the true classes are not those of {total} images")
    _check_sums(value, total)
    return ConfidenceCounts(**{name: value[name] for name in names})


def _check_counts(name: str, row: Any, bins: int, total: int) -> None:
    if not isinstance(row, list) or len(row) != bins:
        raise ValueError(f"{name} does not have {bins} bins")
    if not all(type(count) is int and 0 <= count <= total for count in row):
        raise ValueError(f"{name} has a bin that does not hold 0 to {total} images")


def _check_sums(value: Mapping[str, Any], total: int) -> None:
    """Check the sums of confidences, squared errors and losses against the counts."""
    sums = value["confidence"]
    if not isinstance(sums, list) or len(sums) != CALIBRATION_BINS or not all(type(each) is float for each in sums):
        raise ValueError(f"confidence does not have {CALIBRATION_BINS} sums")
    for index, (bin_sum, count, right) in enumerate(zip(sums, value["count"], value["correct"], strict=True)):
        slack = COUNT_TOLERANCE * count
        lowest = count * index / CALIBRATION_BINS - slack
        highest = count * (index + 1) / CALIBRATION_BINS + slack
        if not lowest <= bin_sum <= highest:
            raise ValueError(f"the confidences of bin {index + 1} sum to {bin_sum}, which {count} images there cannot")
        if right > count:
            raise ValueError(f"bin {index + 1} has {right} correct of {count} images")
    largest = {"squared_error": 2.0, "log_loss": -math.log(SMALLEST_PROBABILITY)}
    for name, bound in largest.items():
        value_sum = value[name]
        if type(value_sum) is not float or not 0 <= value_sum <= total * (bound + COUNT_TOLERANCE):
            raise ValueError(f"{name} is {value_sum!r:.50}; of {total} images it is between 0 and {total * bound:g}")
