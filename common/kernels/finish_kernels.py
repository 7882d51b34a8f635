"""What stands around the streaming kernels: top-k alignment before them, and the join of their splits after them."""

from __future__ import annotations

import triton
import triton.language as tl

from common.kernels.device_functions import contrast_of, leading, log_sum, power
from common.kernels.stream_kernels import joined_statistics


@triton.jit
def top_kernel(
    features: tl.tensor,  # [B, D] float32, bfloat16 or float16; rows feature_stride apart
    labels: tl.tensor,  # [B] int64
    units: tl.tensor,  # [M, D] float32, rows at unit length, sorted by class
    offsets: tl.tensor,  # [K + 1] int64
    weights: tl.tensor,  # [M] float32
    wanted_counts: tl.tensor,  # [K] int32, rows to align to per class
    partials: tl.tensor,  # [splits + 1, B, D] float32 out, its last slice
    radials: tl.tensor,  # [splits + 1, B] float32 out, its last row
    alignments: tl.tensor,  # [B] float32 out
    feature_stride: tl.tensor,
    samples: tl.tensor,  # B
    dimensions: tl.tensor,  # D
    class_count: tl.tensor,  # K
    splits: tl.tensor,
    alpha: tl.tensor,
    eps: tl.tensor,
    alignment_step: tl.tensor,
    block_m: tl.constexpr,  # >= rows of the largest class
    block_d: tl.constexpr,
    with_gradient: tl.constexpr,
    weighted: tl.constexpr,
    exponent: tl.constexpr,
    form: tl.constexpr,
) -> None:
    """One program is one sample against the rows of its class, all on chip."""
    sample = tl.program_id(0)
    label = tl.load(labels + sample)
    known = (label >= 0) & (label < class_count)
    start = tl.load(offsets + label, mask=known, other=0)
    stop = tl.load(offsets + label + 1, mask=known, other=0)
    wanted = tl.load(wanted_counts + label, mask=known, other=0)
    column = start + tl.arange(0, block_m)
    own = column < stop
    chunk = tl.arange(0, block_d)
    feature_row = features + sample.to(tl.int64) * feature_stride
    unit_rows = units + column[:, None] * dimensions
    product = tl.zeros([block_m], dtype=tl.float32)
    squares = tl.zeros([block_d], dtype=tl.float32)
    for first in range(0, dimensions, block_d):
        d = first + chunk
        inside = d < dimensions
        z = tl.load(feature_row + d, mask=inside, other=0.0).to(tl.float32)
        p = tl.load(unit_rows + d[None, :], mask=own[:, None] & inside[None, :], other=0.0)
        squares += z * z
        product += tl.sum(p * z[None, :], 1)
    length = tl.sqrt_rn(tl.sum(squares, 0))
    cosine = product * tl.where(length < 1e-12, 0.0, 1.0 / length)
    similarity, slope = power(cosine, alpha, eps, exponent, form)
    weight = tl.full([block_m], 1.0, dtype=tl.float32)
    if weighted:
        weight = tl.load(weights + column, mask=own, other=0.0)
    score = similarity * weight
    chosen = leading(score, own, wanted) & own
    tl.store(alignments + sample, -tl.sum(tl.where(chosen, score, 0.0), 0))
    if with_gradient:
        pull = tl.where(chosen, -alignment_step * weight * slope, 0.0)
        tl.store(radials + splits * samples + sample, tl.sum(tl.where(own, pull * cosine, 0.0), 0))
        buffer = partials + (splits * samples + sample.to(tl.int64)) * dimensions
        for first in range(0, dimensions, block_d):
            d = first + chunk
            inside = d < dimensions
            p = tl.load(unit_rows + d[None, :], mask=own[:, None] & inside[None, :], other=0.0)
            tl.store(buffer + d, tl.sum(p * pull[:, None], 0), mask=inside)


@triton.jit
def finish_kernel(
    features: tl.tensor,  # [B, D] float32, bfloat16 or float16; rows feature_stride apart
    labels: tl.tensor,  # [B] int64
    positive_bias: tl.tensor,  # [B] float32 (unread unless has_bias)
    statistics: tl.tensor,  # [splits, 5, B] float32
    partials: tl.tensor,  # [buffers, B, D] float32
    radials: tl.tensor,  # [buffers, B] float32
    alignments: tl.tensor,  # [B] float32 (unread unless top)
    class_vectors: tl.tensor,  # [N, D] float32, one row per class
    class_offsets: tl.tensor,  # [L + 1] int64
    values: tl.tensor,  # [4, B] float32 out: contrast, alignment, mse, cosine_square per sample
    gradient: tl.tensor,  # [B, D] float32 out (unwritten unless with_gradient)
    feature_stride: tl.tensor,
    samples: tl.tensor,  # B
    dimensions: tl.tensor,  # D
    class_row_count: tl.tensor,  # L
    splits: tl.tensor,
    buffers: tl.tensor,  # splits, and one more where top_kernel ran
    mse_step: tl.tensor,  # includes 2 / D or 2
    cosine_square_step: tl.tensor,
    mse_scale: tl.tensor,  # 1 / D or 1
    block_d: tl.constexpr,
    has_contrast: tl.constexpr,
    has_mse: tl.constexpr,
    has_cosine_square: tl.constexpr,
    has_bias: tl.constexpr,
    with_gradient: tl.constexpr,
    difference: tl.constexpr,  # raw denominator rows, or negatives only
    top: tl.constexpr,
) -> None:
    """One program is one sample: joins the splits, adds the terms to the class row, writes values and gradient."""
    sample = tl.program_id(0)
    label = tl.load(labels + sample)
    class_known = (label >= 0) & (label < class_row_count)
    class_row = tl.load(class_offsets + label, mask=class_known, other=0)
    class_present = class_known & (tl.load(class_offsets + label + 1, mask=class_known, other=0) > class_row)
    chunk = tl.arange(0, block_d)
    feature_row = features + sample.to(tl.int64) * feature_stride
    target_row = class_vectors + class_row * dimensions
    squares = tl.zeros([block_d], dtype=tl.float32)
    target_squares = tl.zeros([block_d], dtype=tl.float32)
    target_product = tl.zeros([block_d], dtype=tl.float32)
    distances = tl.zeros([block_d], dtype=tl.float32)
    for first in range(0, dimensions, block_d):
        d = first + chunk
        inside = d < dimensions
        z = tl.load(feature_row + d, mask=inside, other=0.0).to(tl.float32)
        squares += z * z
        if has_mse or has_cosine_square:
            u = tl.load(target_row + d, mask=inside & class_present, other=0.0)
            distances += (z - u) * (z - u)
            target_squares += u * u
            target_product += z * u
    length = tl.sqrt_rn(tl.sum(squares, 0))
    inverse = tl.where(length < 1e-12, 0.0, 1.0 / length)

    positive_largest, positive_total, below_largest, below_total, alignment = joined_statistics(
        statistics, sample, sample < samples, samples, splits
    )
    contrast = 0.0
    if has_contrast:
        bias = 0.0
        if has_bias:
            bias = tl.load(positive_bias + sample)
        positive = log_sum(positive_largest, positive_total) + bias
        below = log_sum(below_largest, below_total)
        has_positive = (positive_total == 0.0) == 0
        has_below = (below_total == 0.0) == 0
        if difference:
            contrast, _ = contrast_of(positive, has_positive, below, has_below, "difference")
        else:
            contrast, _ = contrast_of(positive, has_positive, below, has_below, "softplus")
    alignment = -alignment
    if top:
        alignment = tl.load(alignments + sample)
    radial = 0.0
    if with_gradient:
        for part in range(buffers):
            radial += tl.load(radials + part * samples + sample)
        radial *= inverse * inverse
    mse = 0.0
    cosine_square = 0.0
    direct = 0.0  # multiplies z - u
    along = 0.0  # multiplies u
    if has_mse:
        mse = tl.where(class_present, tl.sum(distances, 0) * mse_scale, 0.0)
        direct = tl.where(class_present, mse_step, 0.0)
    if has_cosine_square:
        target_length = tl.sqrt_rn(tl.sum(target_squares, 0))
        target_inverse = tl.where(target_length < 1e-12, 0.0, 1.0 / target_length)
        target_cosine = tl.sum(target_product, 0) * inverse * target_inverse
        error = tl.where(class_present, target_cosine - 1.0, 0.0)
        cosine_square = 2.0 * error * error
        step = 4.0 * cosine_square_step * error * inverse
        along = step * target_inverse
        radial += step * target_cosine * inverse
    tl.store(values + sample, contrast)
    tl.store(values + samples + sample, alignment)
    tl.store(values + 2 * samples + sample, mse)
    tl.store(values + 3 * samples + sample, cosine_square)

    if with_gradient:
        for first in range(0, dimensions, block_d):
            d = first + chunk
            inside = d < dimensions
            z = tl.load(feature_row + d, mask=inside, other=0.0).to(tl.float32)
            pulled = tl.zeros([block_d], dtype=tl.float32)
            for part in range(buffers):
                cell = partials + (part * samples + sample.to(tl.int64)) * dimensions
                pulled += tl.load(cell + d, mask=inside, other=0.0)
            step_d = pulled * inverse - radial * z
            if has_mse or has_cosine_square:
                u = tl.load(target_row + d, mask=inside & class_present, other=0.0)
                step_d += tl.where(class_present, direct * (z - u), 0.0) + along * u
            tl.store(gradient + sample.to(tl.int64) * dimensions + d, step_d, mask=inside)
