"""The prototype losses as batched PyTorch, differentiated by autograd: the tier every other one must agree with.

Shapes: features ``[B, D]``, labels ``[B]``, rows ``[M, D]`` sorted by class; intermediate ``[B, M]``. Computed in
float32,
or in float64 for float64 features.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from common.kernels.terms import LENGTH_FLOOR, PrototypeTerms
from common.prototypes import PrototypeSet, normalise_rows


class TermValues(NamedTuple):
    """Per-sample values ``[B]`` of the four terms, without coefficients; ``None`` where a term is not asked for."""

    contrast: Tensor | None
    alignment: Tensor | None
    mse: Tensor | None
    cosine_square: Tensor | None


def working_dtype(features: Tensor) -> torch.dtype:
    """float64 for float64 features, float32 for all others."""
    return torch.promote_types(features.dtype, torch.float32)


def unit(features: Tensor) -> Tensor:
    """``[..., D]`` at unit length; vectors shorter than 1e-12 become zero and pass no gradient."""
    length = torch.linalg.vector_norm(features, dim=-1, keepdim=True)
    return features * torch.where(length < LENGTH_FLOOR, 0.0, 1.0 / length.clamp_min(LENGTH_FLOOR))


def unit_rows(prototypes: PrototypeSet, dtype: torch.dtype) -> Tensor:
    """``[M, D]`` prototypes at unit length: the set's cached rows in float32, exact ones in float64."""
    if dtype == torch.float32:
        return prototypes.normalised
    return normalise_rows(prototypes.vectors.to(dtype))


def powered(cosines: Tensor, terms: PrototypeTerms) -> Tensor:
    """``s(c)``: the cosine raised to alpha, clamped *before* the power so that value and gradient stay finite.

    ``clamp``: ``max(c, eps)^alpha``; ``odd``: ``sign(c) max(|c|, eps)^alpha``; ``shift``: ``((1 + c) / 2)^alpha``. With
    alpha = 1 the first two are the cosine itself.
    """
    if terms.power == "shift":
        cosines = (1.0 + cosines) / 2.0
        return cosines if terms.alpha == 1 else cosines.clamp_min(terms.eps).pow(terms.alpha)
    if terms.alpha == 1:
        return cosines
    if terms.power == "odd":
        return cosines.sign() * cosines.abs().clamp_min(terms.eps).pow(terms.alpha)
    return cosines.clamp_min(terms.eps).pow(terms.alpha)


def term_values(
    features: Tensor,
    labels: Tensor,
    prototypes: PrototypeSet,
    class_rows: PrototypeSet | None,
    terms: PrototypeTerms,
    positive_bias: Tensor | None = None,
) -> TermValues:
    """Per-sample values of the terms whose coefficient is not 0. ``prototypes`` and ``class_rows`` are constants."""
    features = features.to(working_dtype(features))
    direction = unit(features)
    contrast = alignment = mse = cosine_square = None
    if terms.uses_rows:
        own = labels[:, None] == prototypes.labels[None, :]
        cosines = direction @ unit_rows(prototypes, features.dtype).T
        similarity = powered(cosines, terms)
        if terms.contrast:
            contrast = _contrast(cosines, similarity, own, prototypes, terms, positive_bias)
        if terms.alignment:
            alignment = _alignment(similarity, own, prototypes, terms)
    if terms.uses_class_rows:
        if class_rows is None:
            raise ValueError("the mse and cosine-square terms need class_rows, one row per class")
        index = torch.searchsorted(class_rows.labels, labels).clamp_max(len(class_rows) - 1)
        present = class_rows.labels[index] == labels
        if terms.mse:
            target = class_rows.vectors.to(features.dtype)[index]
            squares = (features - target).square()
            distance = squares.mean(1) if terms.mse_reduce == "mean" else squares.sum(1)
            mse = torch.where(present, distance, 0.0)
        if terms.cosine_square:
            cosine = (direction * unit_rows(class_rows, features.dtype)[index]).sum(1)
            cosine_square = torch.where(present, 2.0 * (cosine - 1.0).square(), 0.0)
    return TermValues(contrast, alignment, mse, cosine_square)


def _contrast(
    cosines: Tensor,
    similarity: Tensor,
    own: Tensor,
    prototypes: PrototypeSet,
    terms: PrototypeTerms,
    positive_bias: Tensor | None,
) -> Tensor:
    logits = similarity / terms.temperature
    shift = prototypes.weights.to(logits.dtype).log() if terms.weighted else None
    if shift is not None:
        logits = logits + shift  # a row of weight 0 gets -inf and drops out
    positive_logits = logits if positive_bias is None else logits + positive_bias.to(logits.dtype)[:, None]
    positive, has_positive = _log_sum_exp(positive_logits, own)
    if terms.denominator_rows == "raw":
        lengths = torch.linalg.vector_norm(prototypes.vectors.to(logits.dtype), dim=1)
        logits = cosines * (lengths / terms.temperature)
        if shift is not None:
            logits = logits + shift
        positive_logits = logits if positive_bias is None else logits + positive_bias.to(logits.dtype)[:, None]
        everyone = torch.ones_like(own) if terms.denominator == "all" else ~own
        below, has_below = _log_sum_exp(torch.where(own, positive_logits, logits), everyone)
        losses, keep = below - positive, has_positive & has_below
    else:
        below, has_below = _log_sum_exp(logits, ~own)
        if terms.denominator == "all":
            # softplus(negative - positive): equal to LSE(all) - LSE(positive) and exact where the positives dominate.
            losses = torch.where(has_below | positive.isnan(), -F.logsigmoid(positive - below), 0.0)
            keep = has_positive
        else:
            losses, keep = below - positive, has_positive & has_below
    return torch.where(keep | (positive + below).isnan(), losses, 0.0)  # a feature that is NaN is never hidden


def _log_sum_exp(logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp over the chosen entries of each row, and whether there were any (if not: a finite dummy)."""
    masked = logits.masked_fill(~chosen, -math.inf)
    some = masked.detach().amax(1) != -math.inf
    return torch.logsumexp(masked.masked_fill(~some[:, None], 0.0), 1), some


def _alignment(similarity: Tensor, own: Tensor, prototypes: PrototypeSet, terms: PrototypeTerms) -> Tensor:
    scores = similarity * prototypes.weights.to(similarity.dtype) if terms.weighted else similarity
    if terms.fraction < 1:
        ranked = scores.detach().masked_fill(~own, -math.inf)
        order = torch.sort(ranked, dim=1, descending=True, stable=True).indices  # ties: the lowest row index first
        counts = own.sum(1)
        wanted = (terms.fraction * counts.double() - 1e-9).ceil().clamp_min(1)
        leading = torch.arange(own.shape[1], device=own.device) < wanted[:, None]
        own = own & torch.zeros_like(own).scatter(1, order, leading)
    return -torch.where(own, scores, 0.0).sum(1)
