"""``goldfinch::prototype_losses``: the fused prototype losses as a torch.library operator, and what eager code calls.

All sizes come from shapes and host arguments: nothing waits for the device and nothing is allocated by its data, so
torch.compile and CUDA graphs take it.
"""

from __future__ import annotations

import importlib.util
import warnings
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.kernels.closed_form import evaluate
from common.kernels.terms import PrototypeTerms, Rows, prepared_rows, wanted_counts
from common.precision import full_precision, working_dtype
from common.prototypes import PrototypeSet

FUSED_WORK = 2**27
"""Largest B * M * D for one program per sample; above, PyTorch's matrix products read the prototypes fewer times."""
TOLERANCE = 1e-3
"""How far from the closed form the kernel may be on a device that is tried."""


def fused_losses(
    features: Tensor,
    labels: Tensor,
    prototypes: PrototypeSet,
    class_rows: PrototypeSet,
    terms: PrototypeTerms,
    positive_bias: Tensor | None,
    divisor: int,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """``(total [], terms [4])``, the terms detached and times their coefficients; differentiable in ``features``.

    ``B >= 1``; terms that are asked for have rows to look at; sums over the batch are divided by ``divisor``.
    ``backend`` is auto, closed_form or triton. Float32, float64 for float64 features.
    """
    if torch.compiler.is_compiling():
        found = operator_arguments(features, labels, prototypes, class_rows, terms, positive_bias, divisor, backend)
        total, parts, _ = torch.ops.goldfinch.prototype_losses(*found)
        return total, parts
    rows, targets = prepared_rows(prototypes), prepared_rows(class_rows)
    wanted = wanted_counts(prototypes, terms.fraction)
    with_gradient = features.requires_grad and torch.is_grad_enabled()
    found = (features, labels, rows, targets, wanted, terms, positive_bias, divisor, with_gradient, backend)
    return cast("tuple[Tensor, Tensor]", _Eager.apply(*found))


def compute(
    features: Tensor,
    labels: Tensor,
    rows: Rows,
    class_rows: Rows,
    wanted: Tensor,
    terms: PrototypeTerms,
    positive_bias: Tensor | None,
    divisor: int,
    with_gradient: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(total [], terms [4], gradient [B, D])``; the gradient is that of the total, and empty unless asked for."""
    with full_precision(features.device, terms.temperature):
        if backend == "triton" or (backend == "auto" and _fused(features, rows)):
            from common.kernels.triton_kernel import launch

            with torch.cuda.device_of(features):
                return launch(features, labels, rows, class_rows, wanted, terms, positive_bias, divisor, with_gradient)
        return evaluate(features, labels, rows, class_rows, terms, positive_bias, divisor, with_gradient)


class _Eager(torch.autograd.Function):
    """What eager code calls: an operator of torch.library costs half a millisecond a call, a third of a CPU's loss."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        total, parts, gradient = compute(*arguments)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(parts)
        ctx.dtype, ctx.rest = arguments[0].dtype, len(arguments) - 1
        return total, parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream).to(ctx.dtype), *[None] * ctx.rest


# ---- for torch.compile -----------------------------------------------------------------------------------------------


def operator_arguments(
    features: Tensor,
    labels: Tensor,
    prototypes: PrototypeSet,
    class_rows: PrototypeSet,
    terms: PrototypeTerms,
    positive_bias: Tensor | None,
    divisor: int,
    backend: str = "auto",
) -> tuple[Any, ...]:
    """A call in the types that an operator's schema knows."""
    return (
        features,
        labels,
        list(prepared_rows(prototypes)),
        list(prepared_rows(class_rows)),
        wanted_counts(prototypes, terms.fraction),
        positive_bias,
        [*terms.coefficients, terms.temperature, terms.alpha, terms.fraction],
        f"{terms.denominator},{terms.denominator_rows},{terms.mse_reduce}",
        [terms.weighted, terms.power_in_square],
        divisor,
        features.requires_grad and torch.is_grad_enabled(),
        backend,
    )


@torch.library.custom_op("goldfinch::prototype_losses", mutates_args=())
def prototype_losses(
    features: Tensor,
    labels: Tensor,
    prototypes: list[Tensor],
    class_rows: list[Tensor],
    wanted: Tensor,
    positive_bias: Tensor | None,
    numbers: list[float],
    options: str,
    flags: list[bool],
    divisor: int,
    with_gradient: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`compute`, with :class:`Rows` and :class:`PrototypeTerms` as lists of their fields."""
    fields: tuple[Any, ...] = (*numbers, *options.split(","), *flags)
    rows, targets, terms = Rows(*prototypes), Rows(*class_rows), PrototypeTerms(*fields)
    return compute(features, labels, rows, targets, wanted, terms, positive_bias, divisor, with_gradient, backend)


@prototype_losses.register_fake
def _fake(features: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    dtype, with_gradient = working_dtype(features), arguments[-2]
    gradient = features.new_empty(tuple(features.shape) if with_gradient else (0,), dtype=dtype)
    return features.new_empty((), dtype=dtype), features.new_empty(4, dtype=dtype), gradient


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[2])
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.dtype, ctx.lists, ctx.rest = inputs[0].dtype, (len(inputs[2]), len(inputs[3])), len(inputs) - 4


def _backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Any, ...]:
    (gradient,) = ctx.saved_tensors
    lists = ([None] * length for length in ctx.lists)
    return (gradient * upstream).to(ctx.dtype), None, *lists, *[None] * ctx.rest


prototype_losses.register_autograd(_backward, setup_context=_setup_context)


# ---- who computes ----------------------------------------------------------------------------------------------------


def _fused(features: Tensor, rows: Rows) -> bool:
    """Whether the Triton kernel takes this call where nobody says."""
    if not features.is_cuda or features.dtype == torch.float64 or importlib.util.find_spec("triton") is None:
        return False
    return features.numel() * len(rows.labels) <= FUSED_WORK and _trusted(features.device)


def _trusted(device: torch.device) -> bool:
    """Whether the kernel is known to work on ``device``. While a graph is captured nothing may be tried on the side."""
    return torch.cuda.is_current_stream_capturing() or _tried(device)


@lru_cache
def _tried(device: torch.device) -> bool:
    """Whether the kernel gives the closed form's losses and gradient on ``device``; with a warning if not.

    A GPU that Triton does not know, a missing C compiler or a driver that is too old end here, not in the middle of a
    training step.
    """
    steps = torch.arange(5 * 24, dtype=torch.float32)
    features = ((0.7 * steps).sin() + 1.1).view(5, 24).to(device)
    vectors = ((1.3 * steps[: 4 * 24]).cos() + 1.2).view(4, 24)
    labels = torch.tensor([0, 2, 1, 0, 5], device=device)
    rows = PrototypeSet(vectors, torch.tensor([0, 0, 0, 2]), torch.tensor([0.2, 0.5, 0.3, 1.0])).to(device)
    means = PrototypeSet(vectors[1:3], torch.tensor([0, 2]), torch.ones(2)).to(device)
    terms = PrototypeTerms(1.0, 0.5, 0.25, 0.5, temperature=0.1, alpha=0.5, fraction=0.5, weighted=True)
    try:
        found, expected = (
            compute(
                features, labels, prepared_rows(rows), prepared_rows(means), wanted_counts(rows, 0.5), terms, None, 5,
                with_gradient=True, backend=backend,
            )
            for backend in ("triton", "closed_form")
        )  # fmt: skip
        error = max(
            float((one - other).abs().max() / other.abs().max()) for one, other in zip(found, expected, strict=True)
        )
        reason = None if error < TOLERANCE else f"it is off by {error:.1e}"
    except Exception as problem:  # a compiler, a linker or a driver can fail in any way; what counts is that it did
        reason = f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else 'no message'}"
    if reason is not None:
        warnings.warn(
            f"the fused prototype losses do not work on {device} ({reason}); PyTorch computes them instead. "
            "Results are the same; tests/kernels on this machine show what is wrong",
            RuntimeWarning,
            stacklevel=2,
        )
    return reason is None
