"""Losses that hold a model to another model or to a distribution, and the views of one sample to each other."""

import torch
from torch import Tensor

from common.precision import unit_vectors, working_dtype

# ---- FCCL+ (Huang et al., TPAMI 2023): on public data between clients, and to the client's previous model


def nontarget_distillation(
    logits: Tensor, teacher_logits: Tensor, labels: Tensor, *, temperature: float = 3.0
) -> Tensor:
    """``T^2 sum_{c != y} q_c (log q_c - log p_c)``, mean over the batch: what the teacher knows of other classes.

    ``p, q`` are the softmax at ``temperature`` of ``logits`` and of the previous model's ``teacher_logits`` (a
    constant), both ``[B, K]``; neither is normalised again over the non-target classes.
    """
    dtype = working_dtype(logits)
    student = torch.log_softmax(logits.to(dtype) / temperature, 1)
    teacher = torch.log_softmax(teacher_logits.detach().to(dtype) / temperature, 1)
    terms = teacher.exp() * (teacher - student)
    return temperature**2 * terms.scatter(1, labels[:, None], 0.0).sum(1).mean()


def cross_correlation(logits: Tensor, mean_logits: Tensor, *, off_diagonal: float = 0.0051) -> Tensor:
    """``sum_c (R_cc - 1)^2 + off_diagonal * sum_{c != c'} (R_cc' + 1)^2`` on public data.

    ``R = Y^T Ybar / B`` of the column-standardised (unbiased deviation) ``logits [B, K]`` and ``mean_logits [B, K]``,
    the mean over clients (a constant). A column without variation counts as zeros.

    Raises:
        ValueError: fewer than two samples.
    """
    if len(logits) < 2:
        raise ValueError(f"cross_correlation needs at least 2 samples; got {len(logits)}")
    dtype = working_dtype(logits)
    ours, theirs = _standardised(logits.to(dtype)), _standardised(mean_logits.detach().to(dtype))
    correlation = ours.T @ theirs / len(logits)
    eye = torch.eye(len(correlation), dtype=dtype, device=logits.device)
    penalties = eye * (correlation - 1.0).square() + (1.0 - eye) * off_diagonal * (correlation + 1.0).square()
    return penalties.sum()


def _standardised(columns: Tensor) -> Tensor:
    centred = columns - columns.mean(0)
    deviation = columns.var(0).clamp_min(0.0)
    varies = deviation > torch.finfo(columns.dtype).tiny
    return centred * torch.where(varies, deviation.where(varies, 1.0).rsqrt(), 0.0)


def pairwise_similarities(features: Tensor, *, temperature: float = 0.02) -> Tensor:
    """``[B, B - 1]``: cosines of ``features [B, D]`` with each other over ``temperature``, without the diagonal."""
    direction = unit_vectors(features.to(working_dtype(features)))
    count = len(direction)
    similarities = direction @ direction.T / temperature
    # Dropping the diagonal of a square matrix: read from the second entry, B - 1 rows of B + 1, without their last.
    return similarities.flatten()[1:].view(count - 1, count + 1)[:, :-1].reshape(count, count - 1)


def similarity_distillation(
    features: Tensor, mean_similarities: Tensor, *, temperature: float = 0.02, scale: float = 3.0
) -> Tensor:
    """``scale * KL(softmax(mean similarities) || softmax(own similarities))``, mean over the batch.

    Args:
        features: ``[B, D]`` of public samples.
        mean_similarities: ``[B, B - 1]``, mean over clients of :func:`pairwise_similarities` (a constant).
        temperature: of the similarities, > 0.
        scale: FCCL+'s ``dis_power``.

    Raises:
        ValueError: fewer than two samples.
    """
    if len(features) < 2:
        raise ValueError(f"similarity_distillation needs at least 2 samples; got {len(features)}")
    own = torch.log_softmax(pairwise_similarities(features, temperature=temperature), 1)
    target = torch.log_softmax(mean_similarities.detach().to(own.dtype), 1)
    return scale * (target.exp() * (target - own)).sum(1).mean()
