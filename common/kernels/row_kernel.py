"""The prototype losses of one sample per program, with the sample's whole row of similarities on chip (M up to 512).

Two sweeps over the prototypes, which stay in L2: the first makes the row of cosines, the second the gradient. Products
are plain float32 multiply-adds. Nothing of size [B, M] is written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.kernels.device_functions import contrast_of, leading, log_sum, partial_sum, power


@triton.jit
def row_kernel(
    features: tl.tensor,  # [B, D] float32, bfloat16 or float16; rows feature_stride apart
    labels: tl.tensor,  # [B] int64
    units: tl.tensor,  # [M, D] float32, rows at unit length, sorted by class
    offsets: tl.tensor,  # [K + 1] int64
    weights: tl.tensor,  # [M] float32
    lengths: tl.tensor,  # [M] float32
    wanted_counts: tl.tensor,  # [K] int32, rows to align to per class
    positive_bias: tl.tensor,  # [B] float32 (unread unless has_bias)
    class_vectors: tl.tensor,  # [N, D] float32, one row per class
    class_offsets: tl.tensor,  # [L + 1] int64
    values: tl.tensor,  # [4, B] float32 out: contrast, alignment, mse, cosine_square per sample
    gradient: tl.tensor,  # [B, D] float32 out (unwritten unless with_gradient)
    feature_stride: tl.tensor,
    samples: tl.tensor,  # B
    dimensions: tl.tensor,  # D
    rows: tl.tensor,  # M
    class_count: tl.tensor,  # K
    class_row_count: tl.tensor,  # L
    inverse_temperature: tl.tensor,
    alpha: tl.tensor,
    eps: tl.tensor,
    contrast_step: tl.tensor,  # coefficient / divisor of each term, for the gradient
    alignment_step: tl.tensor,
    mse_step: tl.tensor,  # includes 2 / D or 2
    cosine_square_step: tl.tensor,
    mse_scale: tl.tensor,  # 1 / D or 1
    block_m: tl.constexpr,
    block_d: tl.constexpr,
    has_contrast: tl.constexpr,
    has_alignment: tl.constexpr,
    has_mse: tl.constexpr,
    has_cosine_square: tl.constexpr,
    has_bias: tl.constexpr,
    with_gradient: tl.constexpr,
    weighted: tl.constexpr,
    raw: tl.constexpr,
    negatives_only: tl.constexpr,
    top: tl.constexpr,
    exponent: tl.constexpr,
    form: tl.constexpr,
) -> None:
    """One program is one sample."""
    sample = tl.program_id(0)
    label = tl.load(labels + sample)
    known = (label >= 0) & (label < class_count)
    start = tl.load(offsets + label, mask=known, other=0)
    stop = tl.load(offsets + label + 1, mask=known, other=0)
    class_known = (label >= 0) & (label < class_row_count)
    class_row = tl.load(class_offsets + label, mask=class_known, other=0)
    class_present = class_known & (tl.load(class_offsets + label + 1, mask=class_known, other=0) > class_row)
    column = tl.arange(0, block_m)
    chunk = tl.arange(0, block_d)
    valid = column < rows
    feature_row = features + sample.to(tl.int64) * feature_stride
    unit_rows = units + column[:, None].to(tl.int64) * dimensions
    target_row = class_vectors + class_row * dimensions

    product = tl.zeros([block_m], dtype=tl.float32)
    squares = tl.zeros([block_d], dtype=tl.float32)
    target_squares = tl.zeros([block_d], dtype=tl.float32)
    target_product = tl.zeros([block_d], dtype=tl.float32)
    distances = tl.zeros([block_d], dtype=tl.float32)
    for first in range(0, dimensions, block_d):
        d = first + chunk
        inside = d < dimensions
        z = tl.load(feature_row + d, mask=inside, other=0.0).to(tl.float32)
        squares += z * z
        if has_contrast or has_alignment:
            p = tl.load(unit_rows + d[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
            product += tl.sum(p * z[None, :], 1)
        if has_mse or has_cosine_square:
            u = tl.load(target_row + d, mask=inside & class_present, other=0.0)
            distances += (z - u) * (z - u)
            target_squares += u * u
            target_product += z * u
    length = tl.sqrt_rn(tl.sum(squares, 0))
    inverse = tl.where(length < 1e-12, 0.0, 1.0 / length)

    contrast = 0.0
    alignment = 0.0
    pull = tl.zeros([block_m], dtype=tl.float32)
    radial = 0.0
    if has_contrast or has_alignment:
        cosine = product * inverse
        similarity, slope = power(cosine, alpha, eps, exponent, form)
        own = (column >= start) & (column < stop)
        weight = tl.load(weights + column, mask=valid, other=0.0)
        if has_contrast:
            logits = similarity * inverse_temperature
            below_logits = logits
            if raw:
                scale = tl.load(lengths + column, mask=valid, other=0.0)
                below_logits = logits * scale
            if weighted:
                shift = tl.log(weight)
                logits += shift
                below_logits += shift
            bias = 0.0
            if has_bias:
                bias = tl.load(positive_bias + sample)
            positive_largest, positive_total = partial_sum(logits, own, 0)
            positive = log_sum(positive_largest, positive_total)
            if raw:
                below_logits = tl.where(own, below_logits + bias, below_logits)
                counted = valid
                if negatives_only:
                    counted = valid & (own == 0)
            else:
                counted = valid & (own == 0)
            below_largest, below_total = partial_sum(below_logits, counted, 0)
            below = log_sum(below_largest, below_total)
            has_positive = (positive_total == 0.0) == 0
            has_below = (below_total == 0.0) == 0
            if raw or negatives_only:
                contrast, factor = contrast_of(positive + bias, has_positive, below, has_below, "difference")
            else:
                contrast, factor = contrast_of(positive + bias, has_positive, below, has_below, "softplus")
            if with_gradient:
                safe_positive = tl.where(has_positive, positive, 0.0)
                safe_below = tl.where(has_below, below, 0.0)
                shares = tl.where(own, -tl.exp(tl.where(own, logits - safe_positive, 0.0)), 0.0)
                below_shares = tl.exp(tl.where(counted, below_logits - safe_below, 0.0))
                if raw:
                    below_shares *= scale
                shares += tl.where(counted, below_shares, 0.0)
                pull = shares * (factor * contrast_step * inverse_temperature)
        if has_alignment:
            chosen = own
            score = similarity
            if weighted:
                score = similarity * weight
            if top:
                wanted = tl.load(wanted_counts + label, mask=known, other=0)
                chosen = leading(score, own, wanted) & own
            alignment = -tl.sum(tl.where(chosen, score, 0.0), 0)
            if with_gradient:
                if weighted:
                    pull -= tl.where(chosen, weight * alignment_step, 0.0)
                else:
                    pull -= tl.where(chosen, alignment_step, 0.0)
        if with_gradient:
            pull = tl.where(valid, pull * slope, 0.0) * inverse
            radial = tl.sum(tl.where(valid, pull * cosine, 0.0), 0) * inverse

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
            step_d = -radial * z
            if has_contrast or has_alignment:
                p = tl.load(unit_rows + d[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
                step_d += tl.sum(p * pull[:, None], 0)
            if has_mse or has_cosine_square:
                u = tl.load(target_row + d, mask=inside & class_present, other=0.0)
                step_d += tl.where(class_present, direct * (z - u), 0.0) + along * u
            tl.store(gradient + sample.to(tl.int64) * dimensions + d, step_d, mask=inside)


@triton.jit
def total_kernel(
    values: tl.tensor,  # [4, B] float32
    means: tl.tensor,  # [4] float32 out: sums over the batch / divisor
    total: tl.tensor,  # [] float32 out: coefficients . means
    samples: tl.tensor,  # B
    inverse_divisor: tl.tensor,
    contrast: tl.tensor,
    alignment: tl.tensor,
    mse: tl.tensor,
    cosine_square: tl.tensor,
    block_b: tl.constexpr,
) -> None:
    """One program adds the samples up in a fixed order, so that the loss is the same in every run."""
    term = tl.arange(0, 4)
    sums = tl.zeros([4], dtype=tl.float32)
    for first in range(0, samples, block_b):
        sample = first + tl.arange(0, block_b)
        part = tl.load(values + term[:, None] * samples + sample[None, :], mask=(sample < samples)[None, :], other=0.0)
        sums += tl.sum(part, 1)
    sums *= inverse_divisor
    tl.store(means + term, sums)
    coefficient = tl.where(term == 0, contrast, tl.where(term == 1, alignment, tl.where(term == 2, mse, cosine_square)))
    # A term that is not asked for has the sum 0, so its coefficient never meets a NaN.
    tl.store(total, tl.sum(coefficient * sums, 0))
