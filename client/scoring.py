"""What a device counts while it scores a model: confusion, loss, and what the run's settings ask for besides."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from common.confidence import ConfidenceCounts, count_confidence
from common.errors import DIVERGED, PayloadError
from common.own_metric import count_sums
from common.settings import RunSettings


class ScoreCounter:
    """Adds up the score of a split over its batches.

    Args:
        settings: the run's settings.
        device: where the model is. What is counted stays there until :meth:`result`, so that no batch is waited for.
    """

    def __init__(self, settings: RunSettings, device: torch.device) -> None:
        self.class_count: int = settings.data.class_count
        self.own_metric = settings.own_metric
        self._cells = torch.zeros(self.class_count**2, dtype=torch.int64, device=device)
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
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
            PayloadError: the scores or logits are of another shape, or not finite; or the user's own metric returned
                something else than the sums that it declares.
        """
        if not scores.shape == logits.shape == (len(labels), self.class_count):
            raise PayloadError(f"logits {[*logits.shape]}, scores {[*scores.shape]}: must be [N, {self.class_count}]")
        self._loss += nn.functional.cross_entropy(logits, labels, reduction="sum").double()
        cells = labels * self.class_count + scores.argmax(1)
        self._cells.index_add_(0, cells, torch.ones_like(cells))
        if self.confidence is not None:
            try:
                self.confidence = self.confidence.plus(count_confidence(scores, labels))
            except ValueError as error:
                raise PayloadError(f"rounds.scores=true: {error}") from error
        if self.sums:
            for name, value in count_sums(self.own_metric, scores.softmax(1), labels).items():
                self.sums[name] += value

    def result(self, count: int) -> dict[str, Any]:
        """Return the score of ``count`` images as :class:`common.wire.messages.Score` has it, without the domain.

        Raises:
            PayloadError: the mean loss is not finite.
        """
        loss = float(self._loss) / max(count, 1)
        if not math.isfinite(loss):
            raise PayloadError(f"the model that is scored gives a loss that is not finite: {DIVERGED}")
        confusion = self._cells.view(self.class_count, self.class_count).cpu()
        score: dict[str, Any] = {
            "count": count,
            "correct": int(confusion.diagonal().sum()),
            "loss": loss,
            "confusion": confusion.tolist(),
        }
        if self.sums:
            score["sums"] = self.sums
        if self.confidence is not None:
            score["confidence"] = self.confidence.as_dict()
        return score
