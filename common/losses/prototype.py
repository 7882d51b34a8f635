"""Losses between features and prototypes, alone or fused into one call.

Prototypes are constants: gradients reach the features only. A batch against an empty set gives exactly 0.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from common.kernels.batched import term_values
from common.kernels.dispatch import Backend, PrototypeLosses, compute, zero_of
from common.kernels.terms import Denominator, DenominatorRows, Power, PrototypeTerms, Reduce, full_precision
from common.prototypes import PrototypeSet

Reduction = Literal["mean", "sum", "none"]


def prototype_contrast(
    features: Tensor,
    labels: Tensor,
    prototypes: PrototypeSet,
    *,
    temperature: float,
    alpha: float = 1.0,
    denominator: Denominator = "all",
    denominator_rows: DenominatorRows = "normalised",
    weighted: bool = False,
    positive_bias: Tensor | None = None,
    power: Power = "clamp",
    eps: float = 1e-4,
    reduction: Reduction = "mean",
    backend: Backend = "auto",
) -> Tensor:
    """Contrast of features with the prototypes of their class against those of all classes.

    ``l_i = LSE_denominator(s_ij / temperature + log w_j) - LSE_{j of class y_i}(s_ij / temperature + log w_j)`` with
    ``s = cos^alpha``; mean over the batch. FPL Eq. 7 (CPCL), FedAPC's APC, FedPLVM and FedPLCC's contra (alpha < 1),
    FedProc, FedPall Eq. 7, RUCR (``positive_bias``).

    Args:
        features: ``[B, D]``, any floating type; computed in float32 (float64 for float64).
        labels: ``[B]`` int64. A sample whose class has no row adds 0 and still counts in the mean.
        prototypes: 0..n rows per class, on the device of ``features``.
        temperature: > 0.
        alpha: exponent of the cosine, in (0, 1]; below 1 the cosine is clamped at ``eps`` before the power and passes
            no gradient there (the papers' code has no guard and gives NaN for negative cosines).
        denominator: ``negatives`` leaves the positive class out (FedPall's print); a sample without negatives adds 0.
        denominator_rows: ``raw`` keeps the prototypes' lengths in the denominator only (FedPall's code).
        weighted: add ``log weights`` to the logits (FedPLCC); a row of weight 0 is as if absent.
        positive_bias: ``[B]`` added to the positive logits only (RUCR's log class ratio). RUCR gives classes that
            nobody reported the logit 0: give them zero rows in ``prototypes``.
        power: for signed features: ``odd`` = ``sign(c) max(|c|, eps)^alpha``, ``shift`` = ``((1 + c) / 2)^alpha``.
        eps: where the cosine is clamped.
        reduction: ``none`` gives ``[B]``.
        backend: ``auto`` takes the fastest tier; the others are for tests and measurements.

    Raises:
        ValueError: an option out of range, or feature sizes that differ.
    """
    terms = PrototypeTerms(
        contrast=1.0,
        temperature=temperature,
        alpha=alpha,
        denominator=denominator,
        denominator_rows=denominator_rows,
        weighted=weighted,
        power=power,
        eps=eps,
    )
    return _single(features, labels, prototypes, terms, positive_bias, reduction, backend)


def prototype_alignment(
    features: Tensor,
    labels: Tensor,
    prototypes: PrototypeSet,
    *,
    alpha: float = 1.0,
    fraction: float = 1.0,
    weighted: bool = True,
    power: Power = "clamp",
    eps: float = 1e-4,
    reduction: Reduction = "mean",
    backend: Backend = "auto",
) -> Tensor:
    """FedPLCC's corr: ``-sum`` of the ``max(1, ceil(fraction n))`` largest ``cos^alpha w`` among the class's n rows.

    Ties go to the lowest row. With weights that sum to 1 per class the value is in [-1, 0] (for cosines >= 0).
    Arguments and errors as :func:`prototype_contrast`.
    """
    terms = PrototypeTerms(alignment=1.0, alpha=alpha, fraction=fraction, weighted=weighted, power=power, eps=eps)
    return _single(features, labels, prototypes, terms, None, reduction, backend)


def prototype_mse(
    features: Tensor,
    labels: Tensor,
    prototypes: PrototypeSet,
    *,
    reduce: Reduce = "mean",
    reduction: Reduction = "mean",
    backend: Backend = "auto",
) -> Tensor:
    """Squared distance to the class's row: FPL Eq. 10 (UPCR, rows = unbiased prototypes), FedProto (global means).

    Features and rows are taken as they are, not normalised. FPL prints the sum over D, its code takes the mean:
    ``reduce`` chooses (default: the code's). ``prototypes`` holds one row per class; a sample of an absent class adds
    0.
    """
    terms = PrototypeTerms(mse=1.0, mse_reduce=reduce)
    return _single(features, labels, prototypes, terms, None, reduction, backend)


def prototype_cosine_square(
    features: Tensor,
    labels: Tensor,
    prototypes: PrototypeSet,
    *,
    reduction: Reduction = "mean",
    backend: Backend = "auto",
) -> Tensor:
    """FedPLVM's correction: ``2 (cos(z_i, u) - 1)^2`` to the class's row (the factor 2 and no alpha: its code).

    ``prototypes`` holds one row per class: the mean of the class's global cluster prototypes.
    """
    return _single(features, labels, prototypes, PrototypeTerms(cosine_square=1.0), None, reduction, backend)


def prototype_losses(
    features: Tensor,
    labels: Tensor,
    prototypes: PrototypeSet,
    terms: PrototypeTerms,
    *,
    class_rows: PrototypeSet | None = None,
    positive_bias: Tensor | None = None,
    backend: Backend = "auto",
) -> PrototypeLosses:
    """Several prototype terms in one pass.

    FPL: contrast + mse; FedPLVM: contrast + cosine_square; FedPLCC: contrast + alignment.

    Args:
        features: ``[B, D]``.
        labels: ``[B]`` int64.
        prototypes: the rows of contrast and alignment.
        terms: coefficients and options.
        class_rows: one row per class for mse and cosine_square (``unbiased_prototypes(prototypes)``, made once per
            round); by default ``prototypes`` where it holds one row per class.
        positive_bias: ``[B]``, see :func:`prototype_contrast`.
        backend: see :func:`prototype_contrast`.

    Raises:
        ValueError: feature sizes differ, or a class has several rows where one is needed.
    """
    class_rows = _check(features, labels, prototypes, class_rows, terms, positive_bias)
    divisor = max(len(features), 1)
    return compute(features, labels, prototypes, class_rows, terms, positive_bias, backend=backend, divisor=divisor)


def _single(
    features: Tensor,
    labels: Tensor,
    prototypes: PrototypeSet,
    terms: PrototypeTerms,
    positive_bias: Tensor | None,
    reduction: Reduction,
    backend: Backend,
) -> Tensor:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be mean, sum or none; got {reduction!r}")
    class_rows = _check(features, labels, prototypes, None, terms, positive_bias)
    if reduction == "none":  # per-sample values exist in the batched tier only
        if not len(prototypes) or not len(features):
            return zero_of(features).expand(len(features))
        with full_precision(features.device, terms.temperature):
            values = term_values(features, labels, prototypes, class_rows, terms, positive_bias)
        return next(value for value in values if value is not None)
    divisor = max(len(features), 1) if reduction == "mean" else 1
    return compute(
        features, labels, prototypes, class_rows, terms, positive_bias, backend=backend, divisor=divisor
    ).total


def _check(
    features: Tensor,
    labels: Tensor,
    prototypes: PrototypeSet,
    class_rows: PrototypeSet | None,
    terms: PrototypeTerms,
    positive_bias: Tensor | None,
) -> PrototypeSet | None:
    """The class rows to use, after checks that need no look at the device."""
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise ValueError(
            f"prototype losses take features [B, D] and labels [B]; got {tuple(features.shape)} and "
            f"{tuple(labels.shape)}"
        )
    if positive_bias is not None and positive_bias.shape != labels.shape:
        raise ValueError(f"positive_bias must be [B] = {tuple(labels.shape)}; got {tuple(positive_bias.shape)}")
    if terms.uses_class_rows and class_rows is None:
        class_rows = prototypes
    for rows in (prototypes, class_rows):
        if rows is not None and len(rows) and rows.feature_size != features.shape[1]:
            raise ValueError(f"features have {features.shape[1]} dimensions, prototypes {rows.feature_size}")
    if terms.uses_class_rows and class_rows is not None and len(class_rows.classes) != len(class_rows):
        raise ValueError(
            "the mse and cosine-square terms need one row per class; pass class_rows=unbiased_prototypes(prototypes)"
        )
    return class_rows
