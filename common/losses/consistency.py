"""Losses that hold a model to another model or to a distribution, and the views of one sample to each other."""

from typing import Literal

import torch
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


# ---- FedSR's regularisers (Nguyen et al., NeurIPS 2022)


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


# ---- FedADG's least squares (Zhang et al., 2021), on the scores of a sigmoid discriminator


def least_squares_discriminator(reference_scores: Tensor, feature_scores: Tensor) -> Tensor:
    """What the discriminator minimises: ``-(mean D(reference)^2 + mean (1 - D(feature))^2)``.

    ``reference_scores`` are those of samples from the distribution generator, ``feature_scores`` those of the
    (detached) features; any shape. Bounded below by -2 for scores in [0, 1].
    """
    reference = reference_scores.to(working_dtype(reference_scores))
    feature = feature_scores.to(working_dtype(feature_scores))
    return -(reference.square().mean() + (1.0 - feature).square().mean())


def least_squares_generator(scores: Tensor) -> Tensor:
    """``mean (1 - D)^2``: what the feature extractor (on its features) and the generator (on its samples) minimise."""
    return (1.0 - scores.to(working_dtype(scores))).square().mean()
