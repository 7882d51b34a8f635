"""``goldfinch::prototype_losses``: the fused prototype losses as a torch.library operator.

On CUDA it launches the Triton kernels, on the CPU it evaluates the closed form. All sizes come from shapes and host
arguments: nothing waits for the device and nothing is allocated by its data, so torch.compile and CUDA graphs take it.
"""

from __future__ import annotations

import os
from typing import Any, cast

import torch
from torch import Tensor

from common.kernels.closed_form import evaluate
from common.kernels.inputs import KernelInputs, kernel_inputs
from common.kernels.terms import Denominator, DenominatorRows, Power, PrototypeTerms, Reduce
from common.prototypes import PrototypeSet


def fused_losses(
    features: Tensor,
    labels: Tensor,
    prototypes: PrototypeSet,
    class_rows: PrototypeSet | None,
    terms: PrototypeTerms,
    positive_bias: Tensor | None,
    divisor: int,
    tiling: str = "auto",
) -> tuple[Tensor, Tensor]:
    """``(total [], means [4])`` through the operator; differentiable in ``features``."""
    arguments = operator_arguments(features, labels, prototypes, class_rows, terms, positive_bias, divisor, tiling)
    total, means, _ = torch.ops.goldfinch.prototype_losses(*arguments)
    return total, means


def operator_arguments(
    features: Tensor,
    labels: Tensor,
    prototypes: PrototypeSet,
    class_rows: PrototypeSet | None,
    terms: PrototypeTerms,
    positive_bias: Tensor | None,
    divisor: int,
    tiling: str = "auto",
) -> tuple[Any, ...]:
    """A call in the types that an operator's schema knows."""
    rows = kernel_inputs(prototypes)
    targets = rows if class_rows is None or class_rows is prototypes else kernel_inputs(class_rows)
    return (
        features,
        labels,
        [rows.vectors, rows.units, rows.labels, rows.offsets, rows.weights, rows.lengths],
        rows.wanted_counts(terms.fraction),
        [targets.vectors, targets.units, targets.labels, targets.offsets, targets.weights, targets.lengths],
        positive_bias,
        [terms.contrast, terms.alignment, terms.mse, terms.cosine_square],
        [terms.temperature, terms.alpha, terms.fraction, terms.eps],
        ",".join((terms.denominator, terms.denominator_rows, terms.mse_reduce, terms.power)),
        terms.weighted,
        divisor,
        rows.largest_class,
        features.requires_grad and torch.is_grad_enabled(),
        tiling,
    )


@torch.library.custom_op("goldfinch::prototype_losses", mutates_args=())
def prototype_losses(
    features: Tensor,
    labels: Tensor,
    rows: list[Tensor],
    wanted_counts: Tensor,
    class_rows: list[Tensor],
    positive_bias: Tensor | None,
    coefficients: list[float],
    numbers: list[float],
    options: str,
    weighted: bool,
    divisor: int,
    largest_class: int,
    with_gradient: bool,
    tiling: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(total [], means [4], gradient [B, D])``; the gradient is empty unless asked for. Float32 results.

    ``rows`` and ``class_rows`` are the tensors of :class:`KernelInputs` in its order; ``coefficients``, ``numbers`` and
    ``options`` (joined by commas) are the fields of :class:`PrototypeTerms`.
    """
    terms = _terms(coefficients, numbers, options, weighted)
    prototypes, targets = _inputs(rows, largest_class), _inputs(class_rows, 0)
    if features.is_cuda or os.environ.get("TRITON_INTERPRET") == "1":
        from common.kernels.launch import Tiling, launch

        with torch.cuda.device_of(features):
            return launch(
                features, labels, prototypes, wanted_counts, targets, terms, positive_bias, divisor,
                with_gradient=with_gradient, tiling=cast("Tiling", tiling),
            )  # fmt: skip
    found = evaluate(
        features, labels, prototypes, targets, terms, positive_bias, divisor=divisor, with_gradient=with_gradient
    )
    means = found.means.float()
    total = torch.dot(means, terms.coefficients(means))
    gradient = features.new_empty(0, features.shape[1], dtype=torch.float32)
    return total, means, gradient if found.gradient is None else found.gradient.float()


@prototype_losses.register_fake
def _fake(features: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    with_gradient = arguments[-2]
    return (
        features.new_empty((), dtype=torch.float32),
        features.new_empty(4, dtype=torch.float32),
        features.new_empty(features.shape[0] if with_gradient else 0, features.shape[1], dtype=torch.float32),
    )


def _terms(coefficients: list[float], numbers: list[float], options: str, weighted: bool) -> PrototypeTerms:
    contrast, alignment, mse, cosine_square = coefficients
    temperature, alpha, fraction, eps = numbers
    denominator, denominator_rows, mse_reduce, power = options.split(",")
    return PrototypeTerms(
        contrast=contrast,
        alignment=alignment,
        mse=mse,
        cosine_square=cosine_square,
        temperature=temperature,
        alpha=alpha,
        fraction=fraction,
        denominator=cast("Denominator", denominator),
        denominator_rows=cast("DenominatorRows", denominator_rows),
        weighted=weighted,
        mse_reduce=cast("Reduce", mse_reduce),
        power=cast("Power", power),
        eps=eps,
    )


def _inputs(tensors: list[Tensor], largest_class: int) -> KernelInputs:
    vectors, units, labels, offsets, weights, lengths = tensors
    return KernelInputs(vectors, units, labels, offsets, weights, lengths, class_sizes=(largest_class,))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[2])
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.dtype = inputs[0].dtype
    ctx.argument_count = len(inputs)
    ctx.row_count, ctx.class_row_count = len(inputs[2]), len(inputs[4])


def _backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Any, ...]:
    (gradient,) = ctx.saved_tensors
    arguments: list[Any] = [None] * ctx.argument_count
    arguments[0] = (gradient * upstream).to(ctx.dtype)
    arguments[2], arguments[4] = [None] * ctx.row_count, [None] * ctx.class_row_count
    return tuple(arguments)


prototype_losses.register_autograd(_backward, setup_context=_setup_context)
