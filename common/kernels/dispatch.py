"""Which tier computes a call of the prototype losses, and the call itself.

``batched`` (autograd) gives per-sample values and is what torch.compile sees on the CPU; ``closed_form`` computes the
gradient beside the loss; ``triton`` does so in fused CUDA kernels. All agree (tests/kernels); ``docs/kernels.md`` says
where each is fastest, with the measurements.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from common.kernels.batched import term_values, working_dtype
from common.kernels.closed_form import evaluate
from common.kernels.inputs import kernel_inputs
from common.kernels.probe import trusted
from common.kernels.terms import TOP_LIMIT, PrototypeTerms, full_precision
from common.prototypes import PrototypeSet

HAS_TRITON = importlib.util.find_spec("triton") is not None
Backend = Literal["auto", "batched", "closed_form", "triton"]


class PrototypeLosses(NamedTuple):
    """The fused total, and its terms (detached, before their coefficients; 0 where not asked for)."""

    total: Tensor
    contrast: Tensor
    alignment: Tensor
    mse: Tensor
    cosine_square: Tensor


def compute(
    features: Tensor,
    labels: Tensor,
    prototypes: PrototypeSet,
    class_rows: PrototypeSet | None,
    terms: PrototypeTerms,
    positive_bias: Tensor | None,
    *,
    backend: Backend,
    divisor: int,
) -> PrototypeLosses:
    """Total and terms, each summed over the batch and divided by ``divisor``.

    Raises:
        ValueError: an unknown backend, or ``triton`` where it cannot run.
    """
    terms = _without_empty(terms, prototypes, class_rows)
    if not len(features) or not (terms.uses_rows or terms.uses_class_rows):
        zero = zero_of(features)
        nothing = zero.detach()
        return PrototypeLosses(zero, nothing, nothing, nothing, nothing)
    chosen = choose(features, prototypes, terms, backend)
    with full_precision(features.device, terms.temperature):
        if chosen == "batched":
            return _batched(features, labels, prototypes, class_rows, terms, positive_bias, divisor)
        if chosen == "triton":
            from common.kernels.operator import fused_losses

            found = fused_losses(features, labels, prototypes, class_rows, terms, positive_bias, divisor)
        else:
            found = _ClosedForm.apply(features, labels, prototypes, class_rows, terms, positive_bias, divisor)
    return PrototypeLosses(found[0], *found[1].unbind())


def choose(features: Tensor, prototypes: PrototypeSet, terms: PrototypeTerms, backend: Backend) -> str:
    """The tier that ``backend`` means for this call."""
    if backend not in ("auto", "batched", "closed_form", "triton"):
        raise ValueError(f"backend must be auto, batched, closed_form or triton; got {backend!r}")
    if backend == "triton":
        reason = _obstacle(features, prototypes, terms)
        if reason:
            raise ValueError(f"backend='triton' cannot run here: {reason}; backend='auto' picks one that can")
    if backend != "auto":
        return backend
    if features.is_cuda and _obstacle(features, prototypes, terms) is None and trusted(features.device):
        return "triton"
    return "batched" if torch.compiler.is_compiling() else "closed_form"


def _obstacle(features: Tensor, prototypes: PrototypeSet, terms: PrototypeTerms) -> str | None:
    """Why the fused kernels cannot take this call, or ``None``."""
    if not HAS_TRITON:
        return "Triton is not installed"
    if features.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"features are {features.dtype}, not float32, bfloat16 or float16"
    if terms.alignment and terms.fraction < 1 and kernel_inputs(prototypes).largest_class > TOP_LIMIT:
        return f"top-k alignment takes at most {TOP_LIMIT} prototypes per class"
    return None


def zero_of(features: Tensor) -> Tensor:
    """Exactly 0, whatever the features hold, and differentiable."""
    return features[:0].sum(dtype=working_dtype(features))


def _without_empty(terms: PrototypeTerms, prototypes: PrototypeSet, class_rows: PrototypeSet | None) -> PrototypeTerms:
    """``terms`` without those that would look into an empty set: they are exactly 0."""
    if terms.uses_rows and not len(prototypes):
        terms = replace(terms, contrast=0.0, alignment=0.0)
    if terms.uses_class_rows and (class_rows is None or not len(class_rows)):
        terms = replace(terms, mse=0.0, cosine_square=0.0)
    return terms


def _batched(
    features: Tensor,
    labels: Tensor,
    prototypes: PrototypeSet,
    class_rows: PrototypeSet | None,
    terms: PrototypeTerms,
    positive_bias: Tensor | None,
    divisor: int,
) -> PrototypeLosses:
    values = term_values(features, labels, prototypes, class_rows, terms, positive_bias)
    coefficients = (terms.contrast, terms.alignment, terms.mse, terms.cosine_square)
    means: list[Tensor] = []
    total: Tensor | None = None
    for coefficient, value in zip(coefficients, values, strict=True):
        mean = features.new_zeros((), dtype=working_dtype(features)) if value is None else value.sum() / divisor
        means.append(mean.detach())
        if value is not None:
            part = mean if coefficient == 1 else coefficient * mean
            total = part if total is None else total + part
    assert total is not None
    return PrototypeLosses(total, *means)


class _ClosedForm(torch.autograd.Function):
    """Loss and gradient in one forward; backward is one scale."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        features: Tensor,
        labels: Tensor,
        prototypes: PrototypeSet,
        class_rows: PrototypeSet | None,
        terms: PrototypeTerms,
        positive_bias: Tensor | None,
        divisor: int,
    ) -> tuple[Tensor, Tensor]:
        found = evaluate(
            features,
            labels,
            kernel_inputs(prototypes),
            None if class_rows is None else kernel_inputs(class_rows),
            terms,
            positive_bias,
            divisor=divisor,
            with_gradient=ctx.needs_input_grad[0],  # type: ignore[attr-defined]  # set by autograd, absent from its stub
        )
        means = found.means
        total = torch.dot(means, terms.coefficients(means))
        if found.gradient is not None:
            ctx.save_for_backward(found.gradient)
        ctx.dtype = features.dtype  # type: ignore[attr-defined]  # a context takes any attribute
        ctx.mark_non_differentiable(means)
        return total, means

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream).to(ctx.dtype), None, None, None, None, None, None
