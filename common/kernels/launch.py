"""Launches the Triton kernels: which tiling, how many programs, what is allocated. Reads nothing from the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from common.kernels.finish_kernels import finish_kernel, top_kernel
from common.kernels.inputs import KernelInputs
from common.kernels.row_kernel import row_kernel, total_kernel
from common.kernels.stream_kernels import gradient_kernel, statistics_kernel
from common.kernels.terms import FULL_PRECISION_TEMPERATURE, PrototypeTerms

Tiling = Literal["auto", "row", "stream"]

ROW_LIMIT = 512
"""Most prototypes whose similarities one program keeps on chip."""
ROW_WORK = 2**25
"""Largest B * M * D for one program per sample; above, tiles read the prototypes fewer times."""
PARTIAL_ELEMENTS = 2**24
"""Most float32 elements for the splits' gradient buffers together (64 MiB), beyond the first buffer."""
DOT_BLOCK_D = 32


@dataclass(frozen=True)
class Plan:
    """How a call is tiled; what the kernels take as compile-time sizes."""

    tiling: Literal["row", "stream"]
    block_b: int
    block_m: int
    block_d: int
    splits: int
    tiles_per_split: int
    warps: int


def plan(samples: int, rows: int, dimensions: int, processors: int, tiling: Tiling, uses_rows: bool) -> Plan:
    """The tiling of a call with ``samples`` features of ``dimensions`` against ``rows`` on ``processors`` SMs.

    Raises:
        ValueError: ``tiling="row"`` for more rows than fit on chip.
    """
    if not uses_rows:
        tiling, rows = "row", 0
    if tiling == "auto":
        tiling = "row" if rows <= ROW_LIMIT and samples * rows * dimensions <= ROW_WORK else "stream"
    if tiling == "row":
        if rows > ROW_LIMIT:
            raise ValueError(f"the row tiling keeps at most {ROW_LIMIT} prototypes on chip; got {rows}")
        block_m = max(16, triton.next_power_of_2(rows))
        block_d = max(16, min(256, 8192 // block_m, triton.next_power_of_2(dimensions)))
        return Plan("row", 1, block_m, block_d, 1, 1, 4 if block_m * block_d <= 4096 else 8)
    block_b = 16 if samples <= 512 else 32 if samples <= 2048 else 64
    block_m = 64
    tiles = triton.cdiv(rows, block_m)
    wanted = triton.cdiv(2 * processors, triton.cdiv(samples, block_b))
    affordable = 1 + PARTIAL_ELEMENTS // (samples * dimensions)
    tiles_per_split = triton.cdiv(tiles, max(1, min(tiles, wanted, affordable)))
    splits = triton.cdiv(tiles, tiles_per_split)
    return Plan("stream", block_b, block_m, DOT_BLOCK_D, splits, tiles_per_split, 4 if block_b == 16 else 8)


def top_blocks(largest_class: int) -> tuple[int, int, int]:
    """``(block_m, block_d, warps)`` of the top-k kernel: the class's rows on chip, without spilling registers."""
    block_m = max(16, triton.next_power_of_2(largest_class))
    return block_m, min(128, 8192 // block_m), 16 if block_m > 512 else 8


@lru_cache
def processor_count(device: torch.device) -> int:
    """Streaming multiprocessors of ``device``; 2 for the interpreter on the CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def precision(terms: PrototypeTerms) -> str:
    """``tf32`` only where the user allows it for float32 products and the temperature is high enough."""
    allowed = torch.backends.cuda.matmul.allow_tf32 and terms.temperature > FULL_PRECISION_TEMPERATURE
    return "tf32" if allowed else "ieee"


def launch(
    features: Tensor,
    labels: Tensor,
    prototypes: KernelInputs,
    wanted_counts: Tensor,
    class_rows: KernelInputs,
    terms: PrototypeTerms,
    positive_bias: Tensor | None,
    divisor: int,
    *,
    with_gradient: bool,
    tiling: Tiling = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """``(total [], means [4], gradient [B, D] float32)``; the gradient is that of the total (empty if not asked for).

    ``B >= 1``; terms that are asked for have rows to look at. The caller sets the current device.
    """
    if features.stride(1) != 1:
        features = features.contiguous()
    labels = labels.contiguous()
    samples, dimensions = features.shape
    rows = len(prototypes.labels)
    chosen = plan(samples, rows, dimensions, processor_count(features.device), tiling, terms.uses_rows)
    values = _empty(features, 4, samples)
    gradient = _empty(features, samples if with_gradient else 0, dimensions)
    means = _empty(features, 4)
    total = _empty(features)
    bias = values if positive_bias is None else positive_bias.to(torch.float32).contiguous()
    flags = {
        "weighted": terms.weighted,
        "exponent": {1.0: "one", 0.5: "half", 0.25: "quarter"}.get(terms.alpha, "any"),
        "form": terms.power,
    }
    contrast_flags = {
        "has_contrast": terms.contrast != 0,
        "has_bias": positive_bias is not None,
        "raw": terms.denominator_rows == "raw",
        "negatives_only": terms.denominator == "negatives",
    }
    class_flags = {"has_mse": terms.mse != 0, "has_cosine_square": terms.cosine_square != 0}
    mse_scale = 1.0 / dimensions if terms.mse_reduce == "mean" else 1.0
    class_steps = (2.0 * mse_scale * terms.mse / divisor, terms.cosine_square / divisor, mse_scale)
    steps = (terms.contrast / divisor, terms.alignment / divisor)
    warps: dict[str, Any] = {"num_warps": chosen.warps}
    if chosen.tiling == "row":
        row_kernel[(samples,)](
            features, labels, prototypes.units, prototypes.offsets, prototypes.weights, prototypes.lengths,
            wanted_counts, bias, class_rows.vectors, class_rows.offsets, values, gradient,
            features.stride(0), samples, dimensions, rows, len(prototypes.offsets) - 1, len(class_rows.offsets) - 1,
            1.0 / terms.temperature, terms.alpha, terms.eps, *steps, *class_steps,
            block_m=chosen.block_m, block_d=chosen.block_d, has_alignment=terms.alignment != 0,
            with_gradient=with_gradient, top=terms.fraction < 1, **contrast_flags, **class_flags, **flags, **warps,
        )  # fmt: skip
    else:
        _stream(
            features, labels, prototypes, wanted_counts, class_rows, terms, bias, chosen, steps, class_steps,
            values, gradient, contrast_flags | flags, class_flags, with_gradient,
        )  # fmt: skip
    total_kernel[(1,)](
        values, means, total, samples, 1.0 / divisor,
        terms.contrast, terms.alignment, terms.mse, terms.cosine_square, block_b=256,
    )  # fmt: skip
    return total, means, gradient


def _stream(
    features: Tensor,
    labels: Tensor,
    prototypes: KernelInputs,
    wanted_counts: Tensor,
    class_rows: KernelInputs,
    terms: PrototypeTerms,
    bias: Tensor,
    chosen: Plan,
    steps: tuple[float, float],
    class_steps: tuple[float, float, float],
    values: Tensor,
    gradient: Tensor,
    flags: dict[str, Any],
    class_flags: dict[str, Any],
    with_gradient: bool,
) -> None:
    samples, dimensions = features.shape
    rows, class_count = len(prototypes.labels), len(prototypes.offsets) - 1
    stride = features.stride(0)
    top = terms.alignment != 0 and terms.fraction < 1
    buffers = chosen.splits + top
    statistics = _empty(features, chosen.splits, 5, samples)
    partials = _empty(features, buffers if with_gradient else 0, samples, dimensions)
    radials = _empty(features, buffers if with_gradient else 0, samples)
    alignments = _empty(features, samples if top else 0)
    tile = {
        "block_b": chosen.block_b,
        "block_m": chosen.block_m,
        "block_d": chosen.block_d,
        "align_all": terms.alignment != 0 and not top,
        "precision": precision(terms),
        "num_warps": chosen.warps,
    }
    grid = (triton.cdiv(samples, chosen.block_b), chosen.splits)
    shape = (stride, samples, dimensions, rows, class_count)
    numbers = (1.0 / terms.temperature, terms.alpha, terms.eps)
    row_tensors = (prototypes.units, prototypes.offsets, prototypes.weights)
    statistics_kernel[grid](
        features, labels, *row_tensors, prototypes.lengths, bias, statistics,
        *shape, chosen.tiles_per_split, *numbers, **tile, **flags,
    )  # fmt: skip
    if with_gradient:
        gradient_kernel[grid](
            features, labels, *row_tensors, prototypes.lengths, bias, statistics, partials, radials,
            *shape, chosen.splits, chosen.tiles_per_split, *numbers, *steps, **tile, **flags,
        )  # fmt: skip
    if top:
        block_m, block_d, warps = top_blocks(prototypes.largest_class)
        top_kernel[(samples,)](
            features, labels, *row_tensors, wanted_counts, partials, radials, alignments,
            stride, samples, dimensions, class_count, chosen.splits, terms.alpha, terms.eps, steps[1],
            block_m=block_m, block_d=block_d, with_gradient=with_gradient,
            weighted=flags["weighted"], exponent=flags["exponent"], form=flags["form"],
            num_warps=warps,
        )  # fmt: skip
    finish_kernel[(samples,)](
        features, labels, bias, statistics, partials, radials, alignments, class_rows.vectors, class_rows.offsets,
        values, gradient, stride, samples, dimensions, len(class_rows.offsets) - 1, chosen.splits, buffers,
        *class_steps, block_d=min(512, triton.next_power_of_2(dimensions)), has_contrast=flags["has_contrast"],
        has_bias=flags["has_bias"], with_gradient=with_gradient,
        difference=flags["raw"] or flags["negatives_only"], top=top, **class_flags, num_warps=4,
    )  # fmt: skip


def _empty(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)
