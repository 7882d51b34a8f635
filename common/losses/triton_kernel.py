"""The prototype losses in Triton: one program per sample, which reads the prototypes in blocks of rows.

A program reads the prototypes twice (they stay in the L2 cache). The first pass writes the sample's cosines to a
scratch row and computes both log-sum-exps online. Between the passes a second row gets the factor of each prototype in
the gradient; the second pass computes the gradient. Few prototypes fit in one block. Products are plain float32
multiply-adds, also if TF32 is switched on. Three rules: a NaN stays a NaN (comparisons are written so that NaN takes no
shortcut), -inf is never subtracted from -inf, and an empty side of the contrast is recognised by its sum of 0.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.losses.prototype_terms import COSINE_FLOOR, Call

FLOOR = tl.constexpr(COSINE_FLOOR)


@triton.jit
def power(cosine: tl.tensor, alpha: tl.tensor, curved: tl.constexpr) -> tl.tensor:
    """Return ``(s(c), ds/dc)``, the cosine clamped before the power, the slope 0 if it was; ``curved``: alpha < 1."""
    similarity = cosine
    slope = cosine * 0.0 + 1.0
    if curved:
        floored = tl.where(cosine <= FLOOR, FLOOR, cosine)
        similarity = tl.exp2(alpha * tl.log2(floored))
        slope = tl.where(cosine <= FLOOR, 0.0, alpha * similarity / floored)
    return similarity, slope


@triton.jit
def joined(largest: tl.tensor, total: tl.tensor, logits: tl.tensor, chosen: tl.tensor) -> tl.tensor:
    """Add the chosen ``logits`` to the sum of exponentials ``total * exp(largest)``; ``(-inf, 0)`` is an empty sum."""
    masked = tl.where(chosen, logits, float("-inf"))
    joint = tl.maximum(largest, tl.max(masked, 0))
    safe = tl.where(joint == float("-inf"), 0.0, joint)
    return joint, total * tl.exp(largest - safe) + tl.sum(tl.exp(masked - safe), 0)


@triton.jit
def log_sum(largest: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Return the log-sum-exp of an online sum; -inf if it is empty."""
    return tl.where(largest == float("-inf"), 0.0, largest) + tl.log(total)


@triton.jit
def contrast_of(
    positive: tl.tensor,  # log-sum-exp of the positives, with their bias
    has_positive: tl.tensor,
    below: tl.tensor,  # of the rest of the denominator; whole: of all of it
    has_below: tl.tensor,
    whole: tl.constexpr,
) -> tl.tensor:
    """Return ``(loss, factor)``: a sample's contrast and what its softmax shares are multiplied by in the gradient."""
    both = has_positive & has_below
    gap = tl.where(both, below - positive, 0.0)
    loss = gap
    factor = gap * 0.0 + 1.0
    if not whole:
        small = tl.exp(-tl.abs(gap))
        # log(1 + small): by its series where that keeps more digits
        series = small * (1.0 - small * (0.5 - small * (1.0 / 3.0 - small * 0.25)))
        # max(gap, 0), written so that NaN stays NaN
        loss = tl.where(gap <= 0.0, 0.0, gap) + tl.where(small < 0.03, series, tl.log(1.0 + small))
        factor = tl.where(gap >= 0.0, 1.0, small) / (1.0 + small)
    nothing = positive + below
    bad = nothing != nothing
    loss = tl.where(bad, nothing, tl.where(both, loss, 0.0))
    factor = tl.where(bad, nothing, tl.where(both, factor, 0.0))
    return loss, factor


@triton.jit
def scores(
    cosine: tl.tensor,  # [block_m]
    column: tl.tensor,
    own: tl.tensor,
    weights: tl.tensor,  # [M]
    alpha: tl.tensor,
    curved: tl.constexpr,
    weighted: tl.constexpr,
) -> tl.tensor:
    """Return what the alignment ranks and sums: ``s(c)``, times the weight."""
    score, _ = power(cosine, alpha, curved)
    if weighted:
        score *= tl.load(weights + column, mask=own, other=0.0)
    return score


@triton.jit
def prototype_kernel(
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
    scratch: tl.tensor,  # [2, B, M] float32: the cosines, and what each row pulls with
    values: tl.tensor,  # [5, B] float32 out: total, contrast, alignment, mse, cosine_square; times their scales
    gradient: tl.tensor,  # [B, D] float32 out (unwritten unless with_gradient)
    feature_stride: tl.tensor,
    samples: tl.tensor,  # B
    dimensions: tl.tensor,  # D
    rows: tl.tensor,  # M
    class_count: tl.tensor,  # K
    class_row_count: tl.tensor,  # L
    inverse_temperature: tl.tensor,
    alpha: tl.tensor,
    contrast_scale: tl.tensor,  # coefficient / divisor of each term
    alignment_scale: tl.tensor,
    mse_scale: tl.tensor,  # over D for the mean
    cosine_square_scale: tl.tensor,
    block_m: tl.constexpr,
    block_d: tl.constexpr,
    has_contrast: tl.constexpr,
    has_alignment: tl.constexpr,
    has_class_terms: tl.constexpr,
    has_bias: tl.constexpr,
    with_gradient: tl.constexpr,
    weighted: tl.constexpr,
    raw: tl.constexpr,  # prototypes' lengths in the denominator
    negatives_only: tl.constexpr,
    top: tl.constexpr,  # align to the largest wanted_counts scores, not to all rows of the class
    curved: tl.constexpr,  # alpha < 1
    curved_square: tl.constexpr,  # and cosine_square takes it too
) -> None:
    """One program is one sample."""
    sample = tl.program_id(0)
    label = tl.load(labels + sample)
    known = (label >= 0) & (label < class_count)
    start = tl.load(offsets + label, mask=known, other=0)
    stop = tl.load(offsets + label + 1, mask=known, other=0)
    chunk = tl.arange(0, block_d)
    block = tl.arange(0, block_m)
    feature_row = features + sample.to(tl.int64) * feature_stride
    cosines = scratch + sample.to(tl.int64) * rows
    pulls = scratch + (samples + sample.to(tl.int64)) * rows

    class_known = (label >= 0) & (label < class_row_count) & has_class_terms
    class_row = tl.load(class_offsets + label, mask=class_known, other=0)
    class_present = class_known & (tl.load(class_offsets + label + 1, mask=class_known, other=0) > class_row)
    target_row = class_vectors + class_row * dimensions
    squares = tl.zeros([block_d], dtype=tl.float32)
    target_squares = tl.zeros([block_d], dtype=tl.float32)
    target_product = tl.zeros([block_d], dtype=tl.float32)
    distances = tl.zeros([block_d], dtype=tl.float32)
    for first in range(0, dimensions, block_d):
        d = first + chunk
        z = tl.load(feature_row + d, mask=d < dimensions, other=0.0).to(tl.float32)
        squares += z * z
        if has_class_terms:
            u = tl.load(target_row + d, mask=(d < dimensions) & class_present, other=0.0)
            distances += (z - u) * (z - u)
            target_squares += u * u
            target_product += z * u
    length = tl.sqrt_rn(tl.sum(squares, 0))
    inverse = tl.where(length < 1e-12, 0.0, 1.0 / length + length * 0.0)  # of an infinite length NaN, not 0

    contrast = 0.0
    alignment = 0.0
    radial = 0.0
    if has_contrast or has_alignment:
        bias = 0.0
        if has_bias:
            bias = tl.load(positive_bias + sample)
        positive_largest = tl.full([], float("-inf"), dtype=tl.float32)
        positive_total = tl.zeros([], dtype=tl.float32)
        below_largest = tl.full([], float("-inf"), dtype=tl.float32)
        below_total = tl.zeros([], dtype=tl.float32)
        for first_row in range(0, rows, block_m):  # first sweep: cosines and both sums
            column = first_row + block
            valid = column < rows
            unit_rows = units + column[:, None].to(tl.int64) * dimensions
            cosine = tl.zeros([block_m], dtype=tl.float32)
            for first in range(0, dimensions, block_d):
                d = first + chunk
                z = tl.load(feature_row + d, mask=d < dimensions, other=0.0).to(tl.float32)
                p = tl.load(unit_rows + d[None, :], mask=valid[:, None] & (d < dimensions)[None, :], other=0.0)
                cosine += tl.sum(p * z[None, :], 1)
            cosine *= inverse
            tl.store(cosines + column, cosine, mask=valid)
            if has_contrast:
                own = (column >= start) & (column < stop)
                logits, below_logits, counted, _ = block_logits(
                    cosine, column, valid, own, weights, lengths, bias, alpha, inverse_temperature,
                    curved, weighted, raw, negatives_only,
                )  # fmt: skip
                positive_largest, positive_total = joined(positive_largest, positive_total, logits, own)
                below_largest, below_total = joined(below_largest, below_total, below_logits, counted)
        tl.debug_barrier()  # the cosines are read again, perhaps by another thread

        has_positive = (positive_total == 0.0) == 0
        has_below = (below_total == 0.0) == 0
        positive = log_sum(positive_largest, positive_total)
        below = log_sum(below_largest, below_total)
        factor = 0.0
        if has_contrast:
            contrast, factor = contrast_of(positive + bias, has_positive, below, has_below, raw or negatives_only)
            factor *= contrast_scale * inverse_temperature
            positive = tl.where(has_positive, positive, 0.0)
            below = tl.where(has_below, below, 0.0)

        wanted = tl.load(wanted_counts + label, mask=known, other=0)
        for first_row in range(0, rows, block_m):  # between the sweeps: what each row pulls with
            column = first_row + block
            valid = column < rows
            own = (column >= start) & (column < stop)
            cosine = tl.load(cosines + column, mask=valid, other=0.0)
            _, slope = power(cosine, alpha, curved)
            pull = tl.zeros([block_m], dtype=tl.float32)
            if has_contrast:
                logits, below_logits, counted, scale = block_logits(
                    cosine, column, valid, own, weights, lengths, bias, alpha, inverse_temperature,
                    curved, weighted, raw, negatives_only,
                )  # fmt: skip
                shares = tl.where(own, -tl.exp(tl.where(own, logits - positive, 0.0)), 0.0)
                below_shares = tl.exp(tl.where(counted, below_logits - below, 0.0)) * scale
                pull = (shares + tl.where(counted, below_shares, 0.0)) * factor
            if has_alignment:
                score = scores(cosine, column, own, weights, alpha, curved, weighted)
                chosen = own
                if top:  # each row counts the rows of its class that rank before it; ties go to the lowest index
                    ahead = tl.zeros([block_m], dtype=tl.int32)
                    overlaps = (first_row < stop) & (first_row + block_m > start)
                    for first_other in range(start, tl.where(overlaps, stop, start), block_m):
                        other = first_other + block
                        rival = tl.load(cosines + other, mask=other < stop, other=0.0)
                        rival = scores(rival, other, other < stop, weights, alpha, curved, weighted)
                        equal = (rival[:, None] == score[None, :]) & (other[:, None] < column[None, :])
                        before = ((rival[:, None] > score[None, :]) | equal) & (other < stop)[:, None]
                        ahead += tl.sum(before.to(tl.int32), 0)
                    chosen = own & (ahead < wanted)
                alignment -= tl.sum(tl.where(chosen, score, 0.0), 0)
                weight = tl.full([block_m], 1.0, dtype=tl.float32)
                if weighted:
                    weight = tl.load(weights + column, mask=valid, other=0.0)
                pull -= tl.where(chosen, weight * alignment_scale, 0.0)
            if with_gradient:
                pull = tl.where(valid, pull * slope, 0.0) * inverse
                radial += tl.sum(tl.where(valid, pull * cosine, 0.0), 0) * inverse
                tl.store(pulls + column, pull, mask=valid)
        tl.debug_barrier()

    contrast *= contrast_scale
    alignment *= alignment_scale
    mse = 0.0
    cosine_square = 0.0
    direct = 0.0  # multiplies z - u
    along = 0.0  # multiplies u
    if has_class_terms:
        direct = tl.where(class_present, 2.0 * mse_scale, 0.0)
        # A term with coefficient 0 stays 0, also if another is NaN.
        mse = tl.where(class_present & (mse_scale != 0.0), tl.sum(distances, 0) * mse_scale, 0.0)
        target_length = tl.sqrt_rn(tl.sum(target_squares, 0))
        target_inverse = tl.where(target_length < 1e-12, 0.0, 1.0 / target_length)
        target_cosine = tl.sum(target_product, 0) * inverse * target_inverse
        target_similarity, target_slope = power(target_cosine, alpha, curved_square)
        used = class_present & (cosine_square_scale != 0.0)
        error = tl.where(used, target_similarity - 1.0, 0.0)
        cosine_square = 2.0 * error * error * cosine_square_scale
        step = tl.where(used, 4.0 * cosine_square_scale * error * target_slope * inverse, 0.0)
        along = step * target_inverse
        radial += tl.where(used, step * target_cosine * inverse, 0.0)
    tl.store(values + sample, contrast + alignment + mse + cosine_square)
    tl.store(values + samples + sample, contrast)
    tl.store(values + 2 * samples + sample, alignment)
    tl.store(values + 3 * samples + sample, mse)
    tl.store(values + 4 * samples + sample, cosine_square)

    if with_gradient:
        for first in range(0, dimensions, block_d):  # second sweep: the gradient
            d = first + chunk
            inside = d < dimensions
            z = tl.load(feature_row + d, mask=inside, other=0.0).to(tl.float32)
            step_d = -radial * z
            if has_contrast or has_alignment:
                for first_row in range(0, rows, block_m):
                    column = first_row + block
                    valid = column < rows
                    pull = tl.load(pulls + column, mask=valid, other=0.0)
                    unit_rows = units + column[:, None].to(tl.int64) * dimensions
                    p = tl.load(unit_rows + d[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
                    step_d += tl.sum(p * pull[:, None], 0)
            if has_class_terms:
                u = tl.load(target_row + d, mask=inside & class_present, other=0.0)
                step_d += tl.where(class_present, direct * (z - u), 0.0) + along * u
            tl.store(gradient + sample.to(tl.int64) * dimensions + d, step_d, mask=inside)


@triton.jit
def block_logits(
    cosine: tl.tensor,  # [block_m]
    column: tl.tensor,
    valid: tl.tensor,
    own: tl.tensor,
    weights: tl.tensor,  # [M]
    lengths: tl.tensor,  # [M]
    bias: tl.tensor,
    alpha: tl.tensor,
    inverse_temperature: tl.tensor,
    curved: tl.constexpr,
    weighted: tl.constexpr,
    raw: tl.constexpr,
    negatives_only: tl.constexpr,
) -> tl.tensor:
    """``(logits, the denominator's logits, which columns it counts, scale of its logits)`` of a block of rows."""
    similarity, _ = power(cosine, alpha, curved)
    logits = similarity * inverse_temperature
    below_logits = logits
    scale = tl.full(cosine.shape, 1.0, dtype=tl.float32)
    counted = valid & (own == 0)
    if raw:
        scale = tl.load(lengths + column, mask=valid, other=0.0)
        below_logits = logits * scale
        if not negatives_only:
            counted = valid
    if weighted:
        shift = tl.log(tl.load(weights + column, mask=valid, other=0.0))
        logits += shift
        below_logits += shift
    if raw:
        below_logits = tl.where(own, below_logits + bias, below_logits)
    return logits, below_logits, counted, scale


def blocks(rows: int, dimensions: int) -> dict[str, int]:
    """Return the sizes of blocks, known at compile time, and the warps for ``rows`` prototypes of ``dimensions``."""
    block_m = max(16, min(64, triton.next_power_of_2(rows)))
    block_d = max(16, min(8192 // block_m, 256, triton.next_power_of_2(dimensions)))
    warps = 8
    if block_m * block_d <= 4096:
        warps = 4
    return {"block_m": block_m, "block_d": block_d, "num_warps": warps}


def launch(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the losses of :func:`common.losses.prototype.compute`. The device must be current; it is not read."""
    features, labels, prototypes, class_rows, wanted, terms, positive_bias, divisor, with_gradient = call
    if features.stride(1) != 1:
        features = features.contiguous()
    samples, dimensions = features.shape
    rows = 0
    if terms.uses_rows:
        rows = len(prototypes.labels)
    values, gradient = _floats(features, 5, samples), _floats(features, 0, dimensions)
    if with_gradient:
        gradient = _floats(features, samples, dimensions)
    bias = values  # the kernel does not read it unless has_bias
    if positive_bias is not None:
        bias = positive_bias.float().contiguous()
    scales = [coefficient / divisor for coefficient in terms.coefficients]
    if terms.mse_reduce == "mean":
        scales[2] /= dimensions
    flags: dict[str, Any] = {
        "has_contrast": terms.contrast != 0,
        "has_alignment": terms.alignment != 0,
        "has_class_terms": terms.uses_class_rows,
        "has_bias": positive_bias is not None,
        "with_gradient": with_gradient,
        "weighted": terms.weighted,
        "raw": terms.denominator_rows == "raw",
        "negatives_only": terms.denominator == "negatives",
        "top": terms.fraction < 1,
        "curved": terms.alpha < 1,
        "curved_square": terms.alpha < 1 and terms.power_in_square,
    }
    prototype_kernel[(samples,)](
        features, labels.contiguous(), prototypes.units, prototypes.offsets, prototypes.weights, prototypes.lengths,
        wanted, bias, class_rows.vectors, class_rows.offsets, _floats(features, 2, samples, rows), values, gradient,
        features.stride(0), samples, dimensions, rows, len(prototypes.offsets) - 1, len(class_rows.offsets) - 1,
        1.0 / terms.temperature, terms.alpha, *scales, **flags, **blocks(rows, dimensions),
    )  # fmt: skip
    sums = values.sum(1)  # in a fixed order: two runs give the same bits
    if not with_gradient:
        gradient = _floats(features, 0)
    return sums[0].clone(), sums[1:], gradient


def _floats(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)
