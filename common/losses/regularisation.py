"""FedSR's regularisers (Nguyen et al., NeurIPS 2022)."""

from __future__ import annotations

import torch
from torch import Tensor

from common.precision import working_dtype


def feature_norm(features: Tensor, *, squared: bool = False) -> Tensor:
    """FedSR's L2R: mean length of ``features [B, D]`` as its code has it, or mean squared length."""
    features = features.to(working_dtype(features))
    if squared:
        return features.square().sum(1).mean()
    return torch.linalg.vector_norm(features, dim=1).mean()


def gaussian_class_divergence(
    mean: Tensor,
    deviation: Tensor,
    labels: Tensor,
    class_mean: Tensor,
    class_deviation: Tensor,
    scale: Tensor | float = 1.0,
) -> Tensor:
    """FedSR's CMI: ``KL(N(C m, (C s)^2) || N(r_m, r_s^2))`` to the label's Gaussian, mean over B.

    Summed over the D dimensions.

    Args:
        mean: ``[B, D]`` of the features' Gaussians.
        deviation: ``[B, D]``, > 0.
        labels: ``[B]`` int64.
        class_mean: ``[K, D]``, learned.
        class_deviation: ``[K, D]``, > 0, learned.
        scale: C > 0, learned; keep it positive (softplus): the released code does not, and its logarithm turns NaN.
    """
    dtype = working_dtype(mean)
    scale = torch.as_tensor(scale, dtype=dtype, device=mean.device)
    scaled_mean, scaled_deviation = scale * mean.to(dtype), scale * deviation.to(dtype)
    target_mean, target_deviation = class_mean.to(dtype)[labels], class_deviation.to(dtype)[labels]
    spread = (scaled_deviation.square() + (scaled_mean - target_mean).square()) / (2.0 * target_deviation.square())
    return (target_deviation.log() - scaled_deviation.log() + spread - 0.5).sum(1).mean()
