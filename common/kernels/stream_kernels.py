"""The prototype losses for many prototypes or large batches: prototypes stream by, log-sum-exp is kept online.

``statistics_kernel`` leaves (largest, sum) of positives and denominator per sample and split of the rows;
``gradient_kernel`` recomputes each tile of cosines with the sums known and adds its share of the gradient to the buffer
of its split; ``finish_kernel`` joins the splits per sample. Nothing of size [B, M] is written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.kernels.device_functions import contrast_of, log_sum, merge, partial_sum, power


@triton.jit
def cosine_tile(
    features: tl.tensor,  # [B, D]
    units: tl.tensor,  # [M, D]
    sample: tl.tensor,  # [block_b]
    column: tl.tensor,  # [block_m]
    feature_stride: tl.tensor,
    samples: tl.tensor,
    dimensions: tl.tensor,
    rows: tl.tensor,
    block_b: tl.constexpr,
    block_m: tl.constexpr,
    block_d: tl.constexpr,
    precision: tl.constexpr,
) -> tl.tensor:
    """Cosines ``[block_b, block_m]`` and inverse lengths ``[block_b]`` of a tile, summed in float32."""
    product = tl.zeros([block_b, block_m], dtype=tl.float32)
    squares = tl.zeros([block_b], dtype=tl.float32)
    chunk = tl.arange(0, block_d)
    feature_rows = features + sample[:, None].to(tl.int64) * feature_stride
    unit_columns = units + column[None, :].to(tl.int64) * dimensions
    for first in range(0, dimensions, block_d):
        d = first + chunk
        inside = d < dimensions
        z = tl.load(feature_rows + d[None, :], mask=(sample < samples)[:, None] & inside[None, :], other=0.0)
        z = z.to(tl.float32)
        p = tl.load(unit_columns + d[:, None], mask=inside[:, None] & (column < rows)[None, :], other=0.0)
        product = tl.dot(z, p, product, input_precision=precision)
        squares += tl.sum(z * z, 1)
    length = tl.sqrt_rn(squares)
    inverse = tl.where(length < 1e-12, 0.0, 1.0 / length)
    return product * inverse[:, None], inverse


@triton.jit
def tile_logits(
    similarity: tl.tensor,  # [block_b, block_m]
    own: tl.tensor,
    valid: tl.tensor,  # [block_m]
    column: tl.tensor,
    bias: tl.tensor,  # [block_b]
    weights: tl.tensor,  # [M]
    lengths: tl.tensor,  # [M]
    inverse_temperature: tl.tensor,
    weighted: tl.constexpr,
    raw: tl.constexpr,
    negatives_only: tl.constexpr,
) -> tl.tensor:
    """``(logits, denominator logits, which columns the denominator counts, scale of its logits)`` of a tile."""
    logits = similarity * inverse_temperature
    below_logits = logits
    scale = tl.full([1], 1.0, dtype=tl.float32)
    counted = valid[None, :] & (own == 0)
    if raw:
        scale = tl.load(lengths + column, mask=valid, other=0.0)
        below_logits = logits * scale[None, :]
        if negatives_only == 0:
            counted = valid[None, :] & (own == own)
    if weighted:
        shift = tl.log(tl.load(weights + column, mask=valid, other=0.0))[None, :]
        logits += shift
        below_logits += shift
    if raw:
        below_logits = tl.where(own, below_logits + bias[:, None], below_logits)
    return logits, below_logits, counted, scale


@triton.jit
def statistics_kernel(
    features: tl.tensor,  # [B, D] float32, bfloat16 or float16; rows feature_stride apart
    labels: tl.tensor,  # [B] int64
    units: tl.tensor,  # [M, D] float32, rows at unit length, sorted by class
    offsets: tl.tensor,  # [K + 1] int64
    weights: tl.tensor,  # [M] float32
    lengths: tl.tensor,  # [M] float32
    positive_bias: tl.tensor,  # [B] float32 (unread unless has_bias)
    statistics: tl.tensor,  # [splits, 5, B] float32 out: positive (largest, sum), denominator (largest, sum), alignment
    feature_stride: tl.tensor,
    samples: tl.tensor,  # B
    dimensions: tl.tensor,  # D
    rows: tl.tensor,  # M
    class_count: tl.tensor,  # K
    tiles_per_split: tl.tensor,
    inverse_temperature: tl.tensor,
    alpha: tl.tensor,
    eps: tl.tensor,
    block_b: tl.constexpr,
    block_m: tl.constexpr,
    block_d: tl.constexpr,
    has_contrast: tl.constexpr,
    align_all: tl.constexpr,
    has_bias: tl.constexpr,
    weighted: tl.constexpr,
    raw: tl.constexpr,
    negatives_only: tl.constexpr,
    exponent: tl.constexpr,
    form: tl.constexpr,
    precision: tl.constexpr,
) -> None:
    """One program is block_b samples against one split of the rows."""
    sample = tl.program_id(0) * block_b + tl.arange(0, block_b)
    split = tl.program_id(1)
    present = sample < samples
    label = tl.load(labels + sample, mask=present, other=-1)
    known = (label >= 0) & (label < class_count)
    start = tl.load(offsets + label, mask=known, other=0)
    stop = tl.load(offsets + label + 1, mask=known, other=0)
    bias = tl.zeros([block_b], dtype=tl.float32)
    if has_bias:
        bias = tl.load(positive_bias + sample, mask=present, other=0.0)
    positive_largest = tl.full([block_b], float("-inf"), dtype=tl.float32)
    positive_total = tl.zeros([block_b], dtype=tl.float32)
    below_largest = tl.full([block_b], float("-inf"), dtype=tl.float32)
    below_total = tl.zeros([block_b], dtype=tl.float32)
    aligned = tl.zeros([block_b], dtype=tl.float32)
    for tile in range(split * tiles_per_split, (split + 1) * tiles_per_split):
        column = tile * block_m + tl.arange(0, block_m)
        valid = column < rows
        cosine, _ = cosine_tile(
            features, units, sample, column, feature_stride, samples, dimensions, rows,
            block_b, block_m, block_d, precision,
        )  # fmt: skip
        similarity, _ = power(cosine, alpha, eps, exponent, form)
        own = (column[None, :] >= start[:, None]) & (column[None, :] < stop[:, None])
        if has_contrast:
            logits, below_logits, counted, _ = tile_logits(
                similarity, own, valid, column, bias, weights, lengths, inverse_temperature,
                weighted, raw, negatives_only,
            )  # fmt: skip
            largest, total = partial_sum(logits, own, 1)
            positive_largest, positive_total = merge(positive_largest, positive_total, largest, total)
            largest, total = partial_sum(below_logits, counted, 1)
            below_largest, below_total = merge(below_largest, below_total, largest, total)
        if align_all:
            score = similarity
            if weighted:
                score = similarity * tl.load(weights + column, mask=valid, other=0.0)[None, :]
            aligned += tl.sum(tl.where(own, score, 0.0), 1)
    cell = statistics + split * 5 * samples + sample
    tl.store(cell, positive_largest, mask=present)
    tl.store(cell + samples, positive_total, mask=present)
    tl.store(cell + 2 * samples, below_largest, mask=present)
    tl.store(cell + 3 * samples, below_total, mask=present)
    tl.store(cell + 4 * samples, aligned, mask=present)


@triton.jit
def joined_statistics(
    statistics: tl.tensor,  # [splits, 5, B]
    sample: tl.tensor,  # [] or [block_b]
    present: tl.tensor,
    samples: tl.tensor,
    splits: tl.tensor,
) -> tl.tensor:
    """The five statistics of ``sample`` over all splits, in the order of the splits."""
    cell = statistics + sample
    positive_largest = tl.load(cell, mask=present, other=0.0)
    positive_total = tl.load(cell + samples, mask=present, other=0.0)
    below_largest = tl.load(cell + 2 * samples, mask=present, other=0.0)
    below_total = tl.load(cell + 3 * samples, mask=present, other=0.0)
    aligned = tl.load(cell + 4 * samples, mask=present, other=0.0)
    for split in range(1, splits):
        cell = statistics + split * 5 * samples + sample
        largest = tl.load(cell, mask=present, other=0.0)
        total = tl.load(cell + samples, mask=present, other=0.0)
        positive_largest, positive_total = merge(positive_largest, positive_total, largest, total)
        largest = tl.load(cell + 2 * samples, mask=present, other=0.0)
        total = tl.load(cell + 3 * samples, mask=present, other=0.0)
        below_largest, below_total = merge(below_largest, below_total, largest, total)
        aligned += tl.load(cell + 4 * samples, mask=present, other=0.0)
    return positive_largest, positive_total, below_largest, below_total, aligned


@triton.jit
def gradient_kernel(
    features: tl.tensor,  # [B, D] float32, bfloat16 or float16; rows feature_stride apart
    labels: tl.tensor,  # [B] int64
    units: tl.tensor,  # [M, D] float32, rows at unit length, sorted by class
    offsets: tl.tensor,  # [K + 1] int64
    weights: tl.tensor,  # [M] float32
    lengths: tl.tensor,  # [M] float32
    positive_bias: tl.tensor,  # [B] float32 (unread unless has_bias)
    statistics: tl.tensor,  # [splits, 5, B] float32
    partials: tl.tensor,  # [>= splits, B, D] float32 out: sum_j pull_j units_j of each split
    radials: tl.tensor,  # [>= splits, B] float32 out: sum_j pull_j cosine_j of each split
    feature_stride: tl.tensor,
    samples: tl.tensor,  # B
    dimensions: tl.tensor,  # D
    rows: tl.tensor,  # M
    class_count: tl.tensor,  # K
    splits: tl.tensor,
    tiles_per_split: tl.tensor,
    inverse_temperature: tl.tensor,
    alpha: tl.tensor,
    eps: tl.tensor,
    contrast_step: tl.tensor,  # coefficient / divisor
    alignment_step: tl.tensor,
    block_b: tl.constexpr,
    block_m: tl.constexpr,
    block_d: tl.constexpr,
    has_contrast: tl.constexpr,
    align_all: tl.constexpr,
    has_bias: tl.constexpr,
    weighted: tl.constexpr,
    raw: tl.constexpr,
    negatives_only: tl.constexpr,
    exponent: tl.constexpr,
    form: tl.constexpr,
    precision: tl.constexpr,
) -> None:
    """One program is block_b samples against one split; its buffer is its own, so the order of sums is fixed."""
    sample = tl.program_id(0) * block_b + tl.arange(0, block_b)
    split = tl.program_id(1)
    present = sample < samples
    label = tl.load(labels + sample, mask=present, other=-1)
    known = (label >= 0) & (label < class_count)
    start = tl.load(offsets + label, mask=known, other=0)
    stop = tl.load(offsets + label + 1, mask=known, other=0)
    bias = tl.zeros([block_b], dtype=tl.float32)
    if has_bias:
        bias = tl.load(positive_bias + sample, mask=present, other=0.0)
    positive_largest, positive_total, below_largest, below_total, _ = joined_statistics(
        statistics, sample, present, samples, splits
    )
    positive = log_sum(positive_largest, positive_total)
    below = log_sum(below_largest, below_total)
    has_positive = (positive_total == 0.0) == 0
    has_below = (below_total == 0.0) == 0
    if raw or negatives_only:
        _, factor = contrast_of(positive + bias, has_positive, below, has_below, "difference")
    else:
        _, factor = contrast_of(positive + bias, has_positive, below, has_below, "softplus")
    factor *= contrast_step * inverse_temperature
    positive = tl.where(has_positive, positive, 0.0)
    below = tl.where(has_below, below, 0.0)

    radial = tl.zeros([block_b], dtype=tl.float32)
    chunk = tl.arange(0, block_d)
    first_tile = split * tiles_per_split
    buffer = partials + (split.to(tl.int64) * samples + sample[:, None]) * dimensions
    for tile in range(first_tile, first_tile + tiles_per_split):
        column = tile * block_m + tl.arange(0, block_m)
        valid = column < rows
        cosine, _ = cosine_tile(
            features, units, sample, column, feature_stride, samples, dimensions, rows,
            block_b, block_m, block_d, precision,
        )  # fmt: skip
        similarity, slope = power(cosine, alpha, eps, exponent, form)
        own = (column[None, :] >= start[:, None]) & (column[None, :] < stop[:, None])
        pull = tl.zeros([block_b, block_m], dtype=tl.float32)
        if has_contrast:
            logits, below_logits, counted, scale = tile_logits(
                similarity, own, valid, column, bias, weights, lengths, inverse_temperature,
                weighted, raw, negatives_only,
            )  # fmt: skip
            shares = tl.where(own, -tl.exp(tl.where(own, logits - positive[:, None], 0.0)), 0.0)
            below_shares = tl.exp(tl.where(counted, below_logits - below[:, None], 0.0)) * scale[None, :]
            pull = (shares + tl.where(counted, below_shares, 0.0)) * factor[:, None]
        if align_all:
            if weighted:
                weight = tl.load(weights + column, mask=valid, other=0.0)
                pull -= tl.where(own, weight[None, :] * alignment_step, 0.0)
            else:
                pull -= tl.where(own, alignment_step, 0.0)
        pull = tl.where(valid[None, :] & present[:, None], pull * slope, 0.0)
        radial += tl.sum(tl.where(valid[None, :], pull * cosine, 0.0), 1)
        unit_rows = units + column[:, None].to(tl.int64) * dimensions
        for first in range(0, dimensions, block_d):
            d = first + chunk
            inside = d < dimensions
            p = tl.load(unit_rows + d[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
            mask = present[:, None] & inside[None, :]
            earlier = tl.load(buffer + d[None, :], mask=mask & (tile > first_tile), other=0.0)
            tl.store(buffer + d[None, :], tl.dot(pull, p, earlier, input_precision=precision), mask=mask)
        tl.debug_barrier()  # this tile's stores are read by the next tile, perhaps in another thread
    tl.store(radials + split * samples + sample, radial, mask=present)
