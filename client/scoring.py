"""What a device counts while it scores a model: confusion, loss, and what the run's settings ask for besides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from common.confidence import ConfidenceCounts, count_confidence
from common.errors import PayloadError
from common.own_metric import count_sums
from common.settings import RunSettings


class ScoreCounter:
    """Adds up the score of a split over its batches.

    Args:
        settings: the run's settings.
    """

    def __init__(self, settings: RunSettings) -> None:
        self.class_count: int = settings.data.class_count
        self.own_metric = settings.own_metric
        self.confusion = torch.zeros(self.class_count, self.class_count, dtype=torch.int64)
        self.loss = 0.0
        self.sums = dict.fromkeys(self.own_metric.sum_names, 0.0)
        self.confidence: ConfidenceCounts | None = None
        if settings.rounds.scores:
            self.confidence = ConfidenceCounts.empty(self.class_count)

    def add(self, scores: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch.

        Args:
            scores: float32 ``[N, K]``, by which the method classifies; probabilities are their softmax.
            logits: float32 ``[N, K]``, of which the loss is.
            labels: int64 ``[N]``.

        Raises:
            PayloadError: the model's scores are not finite, or the user's own metric returned something else than the
                sums that it declares.
        """
        self.loss += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
        cells = labels * self.class_count + scores.argmax(1)
        self.confusion += torch.bincount(cells.cpu(), minlength=self.class_count**2).view_as(self.confusion)
        if self.confidence is not None:
            try:
                self.confidence = self.confidence.plus(count_confidence(scores, labels))
            except ValueError as error:
                raise PayloadError(f"rounds.scores=true: {error}") from error
        if self.sums:
            for name, value in count_sums(self.own_metric, scores.softmax(1), labels).items():
                self.sums[name] += value

    def result(self, count: int) -> dict[str, Any]:
        """Return the score of ``count`` images as :class:`common.wire.messages.Score` has it, without the domain."""
        score: dict[str, Any] = {
            "count": count,
            "correct": int(self.confusion.diagonal().sum()),
            "loss": self.loss / max(count, 1),
            "confusion": self.confusion.tolist(),
        }
        if self.sums:
            score["sums"] = self.sums
        if self.confidence is not None:
            score["confidence"] = self.confidence.as_dict()
        return score
