"""Losses that hold a model to another model, or the views of one sample to each other."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from common.precision import unit_vectors, working_dtype

PROBABILITY_FLOOR = 1e-7
"""Probabilities are kept this far from 0 and 1 inside logarithms (FedGCA's clamp)."""


def model_contrast(features: Tensor, positive: Tensor, negative: Tensor, *, temperature: float) -> Tensor:
    """MOON's model-contrastive loss (Li et al., CVPR 2021), mean over the batch.

    ``softplus((cos(z, negative) - cos(z, positive)) / temperature)``, identical to its two-way cross-entropy.

    Args:
        features: ``[B, D]`` of the model in training.
        positive: ``[B, D]`` of the global model; a constant.
        negative: ``[B, D]`` of the client's previous model; a constant. Equal to ``positive``, the loss is log 2 with
            gradient exactly 0.
        temperature: > 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0; got {temperature}")
    dtype = working_dtype(features)
    gap = unit_vectors(negative.detach().to(dtype)) - unit_vectors(positive.detach().to(dtype))
    return -F.logsigmoid(-(unit_vectors(features.to(dtype)) * gap).sum(1) / temperature).mean()


def multi_view_consistency(
    local: Tensor, global_: Tensor, form: Literal["bce", "kl"] = "bce", *, detach_mean: bool = True
) -> Tensor:
    """FedGCA Eq. 2: every view's distribution held to the mean over the views of both models.

    The sum over views, averaged over the batch. Used twice: over classes (CP) and, with ``form="kl"``, over the pixels
    of class activation maps (CAM).

    Args:
        local: ``[V, B, K]`` probabilities of the model in training, one slice per view.
        global_: ``[V', B, K]`` probabilities of the frozen global model; a constant.
        form: ``bce`` as printed, ``-sum_c p log m + (1 - p) log(1 - m)``, which alone drives views to one-hot; ``kl``
            as the text says, ``KL(p || m)``.
        detach_mean: the mean distribution is a constant target. The paper does not say.
    """
    if form not in ("bce", "kl"):
        raise ValueError(f"form must be bce or kl; got {form!r}")
    if local.ndim != 3 or local.shape[1:] != global_.shape[1:]:
        raise ValueError(f"views must be [V, B, K]; got {tuple(local.shape)} and {tuple(global_.shape)}")
    local = local.to(working_dtype(local))
    mean = (local.sum(0) + global_.detach().to(local.dtype).sum(0)) / (len(local) + len(global_))
    mean = mean.clamp(PROBABILITY_FLOOR, 1.0 - PROBABILITY_FLOOR)
    if detach_mean:
        mean = mean.detach()
    if form == "bce":
        values = -(local * mean.log() + (1.0 - local) * (-mean).log1p())
    else:
        values = local * (local.clamp_min(PROBABILITY_FLOOR).log() - mean.log())
    return values.sum((0, 2)).mean()
