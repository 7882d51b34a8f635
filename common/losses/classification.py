"""Losses on logits."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from common.precision import working_dtype


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Softmax cross-entropy of ``logits [B, K]`` with ``labels [B]``, mean over the batch.

    ``smoothing`` in [0, 1) mixes the target with the uniform distribution (FedADG).
    """
    return F.cross_entropy(logits.to(working_dtype(logits)), labels, label_smoothing=smoothing)


def uniform_divergence(
    logits: Tensor, direction: Literal["uniform_first", "prediction_first"] = "uniform_first"
) -> Tensor:
    """How far ``softmax(logits [B, C])`` is from uniform: KL divergence in nats, mean over the batch.

    ``uniform_first`` = KL(uniform || prediction), what ADCOL's and FedPall's code compute: ``LSE(v) - mean(v) -
    log C``, whose gradient ``softmax - 1/C`` never vanishes before uniformity. ``prediction_first`` = KL(prediction ||
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
