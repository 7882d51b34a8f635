"""Losses between features and prototypes, alone or fused into one call: ``docs/kernels.md`` has the maths.

Prototypes are constants: only the features have gradients. With an empty set the loss is exactly 0. All sizes are known
from shapes and host arguments, so no call waits for the device, and torch.compile and CUDA graphs work. On CUDA a
Triton kernel computes them (:mod:`common.losses.triton_kernel`), elsewhere the closed form below.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from common.losses.prototype_terms import (
    COSINE_FLOOR,
    Call,
    Denominator,
    DenominatorRows,
    PrototypeTerms,
    Reduce,
    Rows,
    prepared_rows,
    wanted_counts,
)
from common.numerics import NORM_FLOOR, full_precision, working_dtype
from common.prototypes import PrototypeSet, normalise_rows

# ---- the losses ------------------------------------------------------------------------------------------------------

FUSED_WORK = 2**27
"""Largest B * M * D for one program per sample; above, PyTorch's matrix products read the prototypes fewer times."""
Backend = Literal["auto", "closed_form", "triton"]
BACKENDS, REDUCTIONS = get_args(Backend), get_args(Reduce)
TOLERANCE = 1e-3
"""Largest relative difference from the closed form with which the kernel is used on a device."""


class PrototypeLosses(NamedTuple):
    """The fused total, and its terms: detached, times their coefficients, 0 if the coefficient is 0."""

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
    reduction: Reduce = "mean",
    backend: Backend = "auto",
) -> PrototypeLosses:
    """Compute several prototype terms and their gradient in one pass.

    FPL: contrast + mse; FedPLVM: contrast + cosine_square; FedPLCC: contrast + alignment.

    Args:
        features: ``[B, D]``, any floating type; computed in float32 (float64 for float64).
        labels: ``[B]``, integers. A sample whose class has no row adds 0 and still counts in the mean.
        prototypes: 0..n rows per class for contrast and alignment, on the device of ``features``.
        terms: coefficients and options.
        class_rows: one row per class for mse and cosine_square (``unbiased_prototypes(prototypes)``, made once per
            round); by default ``prototypes``.
        positive_bias: ``[B]`` added to the positive logits of the contrast only (RUCR's log class ratio). In RUCR
            classes without a prototype have the logit 0: add zero rows for them to ``prototypes``.
        reduction: over the batch.
        backend: ``auto`` chooses; the others are for tests and measurements.

    Raises:
        ValueError: shapes or dtypes differ from these, a class has several rows where one is needed, or a constant
            requires a gradient.
        RuntimeError: in backward, where a second derivative is asked for (``create_graph=True``).
    """
    if class_rows is None:
        class_rows = prototypes
    _check(features, labels, prototypes, class_rows, terms, positive_bias)
    for name, chosen, choices in (("reduction", reduction, REDUCTIONS), ("backend", backend, BACKENDS)):
        if chosen not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}; got {chosen!r}")
    labels = labels.long()
    if terms.uses_rows and not len(prototypes):
        terms = replace(terms, contrast=0.0, alignment=0.0)
    if terms.uses_class_rows and not len(class_rows):
        terms = replace(terms, mse=0.0, cosine_square=0.0)
    if not len(features) or not (terms.uses_rows or terms.uses_class_rows):
        zero = features[:0].sum(dtype=working_dtype(features))  # exactly 0, also if features are not finite
        return PrototypeLosses(zero, *[zero.detach()] * 4)
    rows, targets, wanted = prepared_rows(prototypes), prepared_rows(class_rows), wanted_counts(prototypes, terms)
    divisor = 1
    if reduction == "mean":
        divisor = len(features)
    with_gradient = features.requires_grad and torch.is_grad_enabled()
    call = Call(features, labels, rows, targets, wanted, terms, positive_bias, divisor, with_gradient)
    total, parts = _WithGradient.apply(features, call, backend)
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
    reduction: Reduce = "mean",
) -> Tensor:
    """Contrast features with the prototypes of their class against those of all classes.

    ``l_i = LSE_denominator(s_ij / temperature + log w_j) - LSE_{j of class y_i}(s_ij / temperature + log w_j)`` with
    ``s = cos^alpha``; mean over the batch. FPL Eq. 7 (CPCL), FedAPC's APC, FedPLVM and FedPLCC's contra (alpha < 1),
    FedProc, FedPall Eq. 7, RUCR (``positive_bias``).

    Options, further arguments and errors: :class:`PrototypeTerms` and :func:`prototype_losses`. With ``denominator =
    "negatives"`` a sample without negatives adds 0; with ``weighted`` a row of weight 0 has no effect.
    """
    options: dict[str, Any] = {"denominator": denominator, "denominator_rows": denominator_rows, "weighted": weighted}
    terms = PrototypeTerms(contrast=1.0, temperature=temperature, alpha=alpha, **options)
    return prototype_losses(features, labels, prototypes, terms, positive_bias=positive_bias, reduction=reduction).total


def prototype_mse(features: Tensor, labels: Tensor, prototypes: PrototypeSet, *, reduce: Reduce = "mean") -> Tensor:
    """Return the squared distance to the class's row: FPL Eq. 10 (UPCR, unbiased prototypes), FedProto (global means).

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
) -> None:
    """Check the tensors, as far as that is possible without reading the device."""
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        shapes = f"{tuple(features.shape)} and {tuple(labels.shape)}"
        raise ValueError(f"prototype losses take features [B, D] and labels [B]; got {shapes}")
    if not features.is_floating_point() or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"features must be floating-point and labels integers; got {features.dtype}, {labels.dtype}")
    constants = [prototypes.vectors, prototypes.weights, class_rows.vectors, positive_bias]
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in constants):
        raise ValueError("only features have a gradient: make prototypes and positive_bias of detached tensors")
    if positive_bias is not None and positive_bias.shape != labels.shape:
        raise ValueError(f"positive_bias must be [B] = {tuple(labels.shape)}; got {tuple(positive_bias.shape)}")
    for rows in (prototypes, class_rows):
        if len(rows) and rows.feature_size != features.shape[1]:
            raise ValueError(f"features have {features.shape[1]} dimensions, prototypes {rows.feature_size}")
    if terms.uses_class_rows and len(class_rows.classes) != len(class_rows):
        raise ValueError(
            "the mse and cosine-square terms need one row per class; pass class_rows=unbiased_prototypes(prototypes)"
        )


# ---- the choice between closed form and kernel -----------------------------------------------------------------------


def compute(call: Call, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(total [], terms [4], gradient [B, D])``; the gradient of the total is empty if the call needs none."""
    with full_precision(call.features.device, call.terms.temperature):
        if backend == "triton" or (backend == "auto" and _fused(call.features, call.rows)):
            from common.losses.triton_kernel import launch

            with torch.cuda.device_of(call.features):
                return launch(call)
        return evaluate_call(call)


class _WithGradient(torch.autograd.Function):
    """The losses, with the gradient that :func:`compute` returns."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, call: Call, backend: str) -> tuple[Tensor, Tensor]:
        total, parts, gradient = compute(call, backend)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(parts)
        ctx.dtype = features.dtype
        return total, parts

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # a derivative of this gradient, which was made as a constant, would be 0
            raise RuntimeError("prototype losses have no second derivative: leave out create_graph=True")
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream).to(ctx.dtype), None, None


def _fused(features: Tensor, rows: Rows) -> bool:
    """Return whether ``backend=auto`` takes the Triton kernel. While a graph is captured, the kernel is not tried."""
    if not features.is_cuda or features.dtype == torch.float64 or importlib.util.find_spec("triton") is None:
        return False
    small = features.numel() * len(rows.labels) <= FUSED_WORK
    return small and (torch.cuda.is_current_stream_capturing() or _tried(features.device))


@lru_cache
def _tried(device: torch.device) -> bool:
    """Return whether the kernel agrees with the closed form on ``device``; warn if it does not.

    So a GPU that Triton does not support, a missing C compiler or an old driver does not stop training.
    """
    steps = torch.arange(5 * 24, dtype=torch.float32)
    features = ((0.7 * steps).sin() + 1.1).view(5, 24).to(device)
    vectors = ((1.3 * steps[: 4 * 24]).cos() + 1.2).view(4, 24)
    labels = torch.tensor([0, 2, 1, 0, 5], device=device)
    rows = PrototypeSet(vectors, torch.tensor([0, 0, 0, 2]), torch.tensor([0.2, 0.5, 0.3, 1.0])).to(device)
    means = PrototypeSet(vectors[1:3], torch.tensor([0, 2]), torch.ones(2)).to(device)
    terms = PrototypeTerms(1.0, 0.5, 0.25, 0.5, temperature=0.1, alpha=0.5, fraction=0.5, weighted=True)
    prepared = prepared_rows(rows), prepared_rows(means), wanted_counts(rows, terms)
    call = Call(features, labels, *prepared, terms, None, 5, True)
    try:
        reason = None
        for one, other in zip(compute(call, "triton"), compute(call, "closed_form"), strict=True):
            error = float((one - other).abs().max() / other.abs().max())
            if not error < TOLERANCE:  # also if it is NaN
                reason = f"it is off by {error:.1e}"
    except Exception as problem:  # a compiler, a linker or a driver can raise any error
        lines = str(problem).splitlines() or ["no message"]
        reason = f"{type(problem).__name__}: {lines[0]}"
    if reason is not None:
        warnings.warn(
            f"the fused prototype losses do not work on {device} ({reason}); PyTorch computes them instead. "
            "Results are the same; tests/kernels on this machine show what is wrong",
            RuntimeWarning,
            stacklevel=2,
        )
    return reason is None


# ---- the closed form -------------------------------------------------------------------------------------------------


def evaluate_call(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the losses as :func:`common.losses.prototype.compute` does, in float32, or float64 for float64 features.

    Without a gradient the second matrix product is left out.
    """
    terms, rows, divisor, with_gradient = call.terms, call.rows, call.divisor, call.with_gradient
    dtype = working_dtype(call.features)
    features = call.features.detach().to(dtype)
    length = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    # Adding 0 times the length makes the inverse of an infinite length NaN, not the 0 of a zero vector, and no other.
    inverse = length.reciprocal().add_(length, alpha=0.0).masked_fill_(length < NORM_FLOOR, 0.0)  # [B, 1]
    zero = features.new_zeros(())
    sums = [zero, zero, zero, zero]
    gradient = None
    if terms.uses_rows:
        units = rows.units
        if dtype != torch.float32:
            units = normalise_rows(rows.vectors.to(dtype))
        cosines = torch.mm(features, units.T).mul_(inverse)
        own = call.labels[:, None] == rows.labels
        similarity, slope = _power(cosines, terms, with_gradient)
        pull: Tensor | None = None  # [B, M] d total / d similarity
        if terms.contrast:
            step = None
            if with_gradient:
                step = terms.contrast / (terms.temperature * divisor)
            sums[0], pull = _contrast(call, similarity, own, step)
        if terms.alignment:
            sums[1], chosen = _alignment(call, similarity, own)
            if with_gradient:
                step = terms.alignment / divisor
                if pull is None:
                    pull = chosen.mul_(-step)
                else:
                    pull.sub_(chosen, alpha=step)
        if with_gradient and pull is not None:
            if slope is not None:
                pull.mul_(slope)
            pull.mul_(inverse)
            radial = torch.linalg.vecdot(pull, cosines)[:, None].mul_(inverse)
            gradient = torch.mm(pull, units).addcmul_(features, radial, value=-1.0)
    if terms.uses_class_rows:
        gradient = _class_terms(call, features, inverse, sums, gradient)
    parts = torch.stack([part * (scale / divisor) for part, scale in zip(sums, terms.coefficients, strict=True)])
    if gradient is None:
        gradient = features.new_empty(0)
    return parts.sum(), parts, gradient


def _power(cosines: Tensor, terms: PrototypeTerms, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Return ``s(c)`` and ``ds/dc`` (``None`` means 1). Cosines are clamped before the power, so both stay finite."""
    if terms.alpha == 1:
        return cosines, None
    floored = cosines.clamp_min(COSINE_FLOOR)
    if terms.alpha == 0.5:
        similarity = floored.sqrt()
    else:
        similarity = floored.pow(terms.alpha)
    if not with_gradient:
        return similarity, None
    return similarity, (similarity / floored).mul_(terms.alpha).masked_fill_(cosines <= COSINE_FLOOR, 0.0)


def _contrast(call: Call, similarity: Tensor, own: Tensor, step: float | None) -> tuple[Tensor, Tensor | None]:
    """Return the sum of the contrast over the batch, and ``[B, M]``: ``step`` times its derivative in the logits."""
    terms, positive_bias = call.terms, call.positive_bias
    logits = similarity / terms.temperature
    shift = None
    if terms.weighted:
        shift = call.rows.weights.to(logits.dtype).log()
    if terms.denominator_rows == "raw":
        return _raw_contrast(call, logits, own, shift, step)
    if shift is not None:
        logits += shift
    positive = torch.logsumexp(logits.masked_fill(~own, -math.inf), 1, keepdim=True)
    negative = torch.logsumexp(logits.masked_fill(own, -math.inf), 1, keepdim=True)
    gap = negative - positive
    if positive_bias is not None:
        gap -= positive_bias.to(gap.dtype)[:, None]
    # Without positives the gap is +inf, without negatives -inf, without both NaN: such samples add 0. But if their
    # feature is NaN, the loss must be NaN.
    skipped = positive == -math.inf
    if terms.denominator == "negatives":
        skipped |= negative == -math.inf
        losses = gap
    else:
        losses = -F.logsigmoid(-gap)
    skipped &= ~(positive + negative).isnan()
    total = losses.masked_fill(skipped, 0.0).sum()
    if step is None:
        return total, None
    if terms.denominator == "all":
        factor = gap.sigmoid().mul_(step)
    else:
        factor = torch.full_like(gap, step)
    factor.masked_fill_(skipped | (negative == -math.inf), 0.0)
    normaliser = torch.where(own, positive, negative)
    normaliser.masked_fill_(normaliser == -math.inf, 0.0)
    shares = logits.sub_(normaliser).exp_()
    return total, shares.mul_(torch.where(own, -factor, factor))


def _raw_contrast(
    call: Call, logits: Tensor, own: Tensor, shift: Tensor | None, step: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return the same as :func:`_contrast` with the prototypes' raw lengths in the denominator.

    The two softmaxes are then over different logits.
    """
    lengths = torch.linalg.vector_norm(call.rows.vectors.to(logits.dtype), dim=1)
    below = logits * lengths
    if shift is not None:
        logits, below = logits + shift, below + shift
    if call.positive_bias is not None:
        bias = torch.where(own, call.positive_bias.to(logits.dtype)[:, None], 0.0)
        logits, below = logits + bias, below + bias
    logits = logits.masked_fill(~own, -math.inf)
    if call.terms.denominator == "negatives":
        below = below.masked_fill(own, -math.inf)
    positive, denominator = torch.logsumexp(logits, 1, True), torch.logsumexp(below, 1, True)
    skipped = ((positive == -math.inf) | (denominator == -math.inf)) & ~(positive + denominator).isnan()
    total = (denominator - positive).masked_fill(skipped, 0.0).sum()
    if step is None:
        return total, None
    pull = (below - denominator).exp_().mul_(lengths).sub_((logits - positive).exp_())
    return total, pull.masked_fill_(skipped, 0.0).mul_(step)


def _alignment(call: Call, similarity: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the alignment over the batch, and ``[B, M]``: the weight of each chosen row, 0 elsewhere."""
    terms, weights = call.terms, call.rows.weights.to(similarity.dtype)
    if terms.fraction < 1:
        scores = similarity
        if terms.weighted:
            scores = similarity * weights
        own = _leading(scores, own, terms.fraction)
    chosen = own.to(similarity.dtype)
    if terms.weighted:
        chosen *= weights
    # torch.where() as well as a product: a NaN or infinite similarity of another class must not reach the sum.
    return -torch.where(own, similarity, 0.0).mul_(chosen).sum(), chosen


def _leading(scores: Tensor, own: Tensor, fraction: float) -> Tensor:
    """Return ``[B, M]`` bool: the ``max(1, ceil(fraction n))`` largest of a row's n own scores, ties to the first."""
    order = torch.sort(scores.masked_fill(~own, -math.inf), dim=1, descending=True, stable=True).indices
    wanted = (fraction * own.sum(1).double() - 1e-9).ceil().clamp_min(1)
    first = torch.arange(own.shape[1], device=own.device) < wanted[:, None]
    return own & torch.zeros_like(own).scatter_(1, order, first)


def _class_terms(
    call: Call, features: Tensor, inverse: Tensor, sums: list[Tensor], gradient: Tensor | None
) -> Tensor | None:
    """Add mse and cosine_square to ``sums``; return the gradient with theirs, added in place if there is one."""
    terms, divisor, with_gradient, known = call.terms, call.divisor, call.with_gradient, call.class_rows.labels
    index = torch.searchsorted(known, call.labels).clamp_max_(len(known) - 1)
    present = (known[index] == call.labels)[:, None]
    rows = call.class_rows.vectors.to(features.dtype)[index]
    if terms.mse:
        scale = 1.0
        if terms.mse_reduce == "mean":
            scale = 1.0 / features.shape[1]
        # torch.where() and not a product: a feature that is NaN must not become a difference of an absent class.
        difference = torch.where(present, features - rows, 0.0)
        sums[2] = torch.linalg.vecdot(difference, difference).sum() * scale
        if with_gradient:
            factor = 2.0 * scale * terms.mse / divisor
            if gradient is None:
                gradient = difference * factor
            else:
                gradient.add_(difference, alpha=factor)
    if terms.cosine_square:
        units = normalise_rows(rows)
        cosine = torch.linalg.vecdot(features, units)[:, None] * inverse
        similarity, slope = cosine, None
        if terms.power_in_square:
            similarity, slope = _power(cosine, terms, with_gradient)
        error = torch.where(present, similarity - 1.0, 0.0)
        sums[3] = 2.0 * error.square().sum()
        if with_gradient:
            step = error * (4.0 * terms.cosine_square / divisor) * inverse
            if slope is not None:
                step *= slope
            radial = step * cosine * inverse
            if gradient is None:
                gradient = torch.zeros_like(features)
            gradient.addcmul_(units, step).addcmul_(features, radial, value=-1.0)
    return gradient
