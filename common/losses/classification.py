"""Losses on logits."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from common.numerics import working_dtype


def cross_entropy(
    logits: Tensor, labels: Tensor, smoothing: float = 0.0, class_weights: Tensor | None = None
) -> Tensor:
    """Return the softmax cross-entropy of ``logits [B, K]`` with ``labels [B]``, mean over the batch.

    Args:
        logits: ``[B, K]``.
        labels: ``[B]`` int64, < K.
        smoothing: share of the target that is spread evenly over all classes, in [0, 1) (Szegedy et al., CVPR 2016,
            section 7).
        class_weights: ``[K]``; the mean then weights each sample by its class.
    """
    logits = logits.to(working_dtype(logits))
    if class_weights is not None:
        class_weights = class_weights.to(logits)
    return F.cross_entropy(logits, labels, weight=class_weights, label_smoothing=smoothing)


def balanced_weights(counts: Sequence[int]) -> Tensor:
    """Return class weights ``N / (P n_k)``, float32 ``[K]``, for ``n_k`` samples of class ``k`` of N in all.

    P classes have samples. Every such class then has the same weight in total, and the mean weight of a sample is 1.
    A class without samples has weight 1, which matters only with label smoothing.

    Args:
        counts: training samples per class.
    """
    present = sum(1 for count in counts if count)
    weights = torch.ones(len(counts))
    for label, count in enumerate(counts):
        if count:
            weights[label] = sum(counts) / (present * count)
    return weights


def uniform_divergence(
    logits: Tensor, direction: Literal["uniform_first", "prediction_first"] = "uniform_first"
) -> Tensor:
    """Return how far ``softmax(logits [B, C])`` is from uniform: KL divergence in nats, mean over the batch.

    ``uniform_first`` = KL(uniform || prediction), what ADCOL's and FedPall's code compute: ``LSE(v) - mean(v) -
    log C``. The gradient ``softmax - 1/C`` vanishes only at uniformity. ``prediction_first`` = KL(prediction ||
    uniform), as FedPall Eq. 6 prints it; its gradient saturates for confident predictions.
    """
    if direction not in ("uniform_first", "prediction_first"):
        raise ValueError(f"direction must be uniform_first or prediction_first; got {direction!r}")
    logits = logits.to(working_dtype(logits))
    classes = math.log(logits.shape[1])
    if direction == "uniform_first":
        return (torch.logsumexp(logits, 1) - logits.mean(1) - classes).mean()
    predicted = torch.log_softmax(logits, 1)
    return ((predicted.exp() * predicted).sum(1) + classes).mean()
