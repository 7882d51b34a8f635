"""Losses between features and prototypes, alone or fused into one call.

Prototypes are constants: gradients reach the features only. A batch against an empty set gives exactly 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

from torch import Tensor

from common.kernels.operator import fused_losses
from common.kernels.terms import Denominator, DenominatorRows, PrototypeTerms, Reduce
from common.precision import working_dtype
from common.prototypes import PrototypeSet


class PrototypeLosses(NamedTuple):
    """The fused total, and its terms: detached, times their coefficients, 0 where not asked for."""

    total: Tensor
    contrast: Tensor
    alignment: Tensor
    mse: Tensor
    cosine_square: Tensor


def prototype_losses(
    features: Tensor,
    labels: Tensor,
    prototypes: PrototypeSet,
    terms: PrototypeTerms,
    *,
    class_rows: PrototypeSet | None = None,
    positive_bias: Tensor | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    backend: Literal["auto", "closed_form", "triton"] = "auto",
) -> PrototypeLosses:
    """Several prototype terms and their gradient in one pass.

    FPL: contrast + mse; FedPLVM: contrast + cosine_square; FedPLCC: contrast + alignment.

    Args:
        features: ``[B, D]``, any floating type; computed in float32 (float64 for float64).
        labels: ``[B]`` int64. A sample whose class has no row adds 0 and still counts in the mean.
        prototypes: 0..n rows per class for contrast and alignment, on the device of ``features``.
        terms: coefficients and options.
        class_rows: one row per class for mse and cosine_square (``unbiased_prototypes(prototypes)``, made once per
            round); by default ``prototypes``.
        positive_bias: ``[B]`` added to the positive logits of the contrast only (RUCR's log class ratio). RUCR gives
            classes that nobody reported the logit 0: give them zero rows in ``prototypes``.
        reduction: over the batch.
        backend: ``auto`` lets the operator choose; the others are for tests and measurements.

    Raises:
        ValueError: feature sizes differ, or a class has several rows where one is needed.
    """
    class_rows = prototypes if class_rows is None else class_rows
    _check(features, labels, prototypes, class_rows, terms, positive_bias, reduction)
    if terms.uses_rows and not len(prototypes):
        terms = replace(terms, contrast=0.0, alignment=0.0)
    if terms.uses_class_rows and not len(class_rows):
        terms = replace(terms, mse=0.0, cosine_square=0.0)
    if not len(features) or not (terms.uses_rows or terms.uses_class_rows):
        zero = features[:0].sum(dtype=working_dtype(features))  # exactly 0, whatever the features hold
        return PrototypeLosses(zero, *[zero.detach()] * 4)
    divisor = len(features) if reduction == "mean" else 1
    total, parts = fused_losses(features, labels, prototypes, class_rows, terms, positive_bias, divisor, backend)
    return PrototypeLosses(total, *parts.unbind())


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
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Contrast of features with the prototypes of their class against those of all classes.

    ``l_i = LSE_denominator(s_ij / temperature + log w_j) - LSE_{j of class y_i}(s_ij / temperature + log w_j)`` with
    ``s = cos^alpha``; mean over the batch. FPL Eq. 7 (CPCL), FedAPC's APC, FedPLVM and FedPLCC's contra (alpha < 1),
    FedProc, FedPall Eq. 7, RUCR (``positive_bias``).

    Options, further arguments and errors: :class:`PrototypeTerms` and :func:`prototype_losses`. With ``denominator =
    "negatives"`` a sample without negatives adds 0; with ``weighted`` a row of weight 0 is as if absent.
    """
    terms = PrototypeTerms(
        contrast=1.0,
        temperature=temperature,
        alpha=alpha,
        denominator=denominator,
        denominator_rows=denominator_rows,
        weighted=weighted,
    )
    return prototype_losses(features, labels, prototypes, terms, positive_bias=positive_bias, reduction=reduction).total


def prototype_mse(features: Tensor, labels: Tensor, prototypes: PrototypeSet, *, reduce: Reduce = "mean") -> Tensor:
    """Squared distance to the class's row: FPL Eq. 10 (UPCR, rows = unbiased prototypes), FedProto (global means).

    Features and rows are taken as they are, not normalised. FPL prints the sum over D, its code takes the mean:
    ``reduce`` chooses (default: the code's). ``prototypes`` holds one row per class; a sample of an absent class adds
    0.
    """
    return prototype_losses(features, labels, prototypes, PrototypeTerms(mse=1.0, mse_reduce=reduce)).total


def _check(
    features: Tensor,
    labels: Tensor,
    prototypes: PrototypeSet,
    class_rows: PrototypeSet,
    terms: PrototypeTerms,
    positive_bias: Tensor | None,
    reduction: str,
) -> None:
    """What can be checked without a look at the device."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be mean or sum; got {reduction!r}")
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise ValueError(
            f"prototype losses take features [B, D] and labels [B]; got {tuple(features.shape)} and "
            f"{tuple(labels.shape)}"
        )
    if positive_bias is not None and positive_bias.shape != labels.shape:
        raise ValueError(f"positive_bias must be [B] = {tuple(labels.shape)}; got {tuple(positive_bias.shape)}")
    for rows in (prototypes, class_rows):
        if len(rows) and rows.feature_size != features.shape[1]:
            raise ValueError(f"features have {features.shape[1]} dimensions, prototypes {rows.feature_size}")
    if terms.uses_class_rows and len(class_rows.classes) != len(class_rows):
        raise ValueError(
            "the mse and cosine-square terms need one row per class; pass class_rows=unbiased_prototypes(prototypes)"
        )
