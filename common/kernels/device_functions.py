"""Triton functions that the kernels share: the cosine's power, log-sum-exp, one sample's contrast, top-k on chip.

They work on a scalar, a row or a tile alike. Rules throughout: a NaN stays one (comparisons are written so that NaN
takes no shortcut), -inf is never subtracted from -inf, and an empty side of the contrast is known by its sum being 0.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def power(
    cosine: tl.tensor,
    alpha: tl.tensor,
    eps: tl.tensor,
    exponent: tl.constexpr,  # "one", "half", "quarter" or "any": what alpha is
    form: tl.constexpr,  # "clamp", "odd" or "shift"
) -> tl.tensor:
    """``(s(c), ds/dc)`` with the cosine clamped at ``eps`` before the power, and no slope where it was."""
    base = cosine
    inner = 1.0
    if form == "shift":
        base = (1.0 + cosine) * 0.5
        inner = 0.5
    if exponent == "one":
        similarity = base
        slope = base * 0.0 + inner
    else:
        size = base
        if form == "odd":
            size = tl.abs(base)
        floored = tl.where(size <= eps, eps, size)
        if exponent == "half":
            similarity = tl.sqrt_rn(floored)
        elif exponent == "quarter":
            similarity = tl.sqrt_rn(tl.sqrt_rn(floored))
        else:
            similarity = tl.exp2(alpha * tl.log2(floored))
        slope = tl.where(size <= eps, 0.0, inner * alpha * similarity / floored)
        if form == "odd":
            similarity = tl.where(base == 0.0, 0.0, tl.where(base < 0.0, -similarity, similarity))
    return similarity, slope


@triton.jit
def merge(largest: tl.tensor, total: tl.tensor, other_largest: tl.tensor, other_total: tl.tensor) -> tl.tensor:
    """Two partial sums of exponentials ``total * exp(largest)`` as one; ``(-inf, 0)`` is the empty sum."""
    joint = tl.maximum(largest, other_largest)
    safe = tl.where(joint == float("-inf"), 0.0, joint)
    return joint, total * tl.exp(largest - safe) + other_total * tl.exp(other_largest - safe)


@triton.jit
def partial_sum(logits: tl.tensor, chosen: tl.tensor, axis: tl.constexpr) -> tl.tensor:
    """``(largest, sum of exp(logits - largest))`` over the chosen entries along ``axis``."""
    masked = tl.where(chosen, logits, float("-inf"))
    largest = tl.max(masked, axis)
    safe = tl.where(largest == float("-inf"), 0.0, largest)
    return largest, tl.sum(tl.exp(masked - (safe[:, None] if axis == 1 else safe)), axis)


@triton.jit
def log_sum(largest: tl.tensor, total: tl.tensor) -> tl.tensor:
    """The log-sum-exp of a partial sum; -inf where it is empty."""
    safe = tl.where(largest == float("-inf"), 0.0, largest)
    return safe + tl.log(total)


@triton.jit
def log1p_positive(x: tl.tensor) -> tl.tensor:
    """``log(1 + x)`` for x in [0, 1], with relative error below 1e-5 for every x."""
    series = x * (1.0 - x * (0.5 - x * (1.0 / 3.0 - x * 0.25)))
    return tl.where(x < 0.03, series, tl.log(1.0 + x))


@triton.jit
def contrast_of(
    positive: tl.tensor,  # log-sum-exp of the positives, with their bias
    has_positive: tl.tensor,
    below: tl.tensor,  # of the rest of the denominator; "whole": of all of it
    has_below: tl.tensor,
    mode: tl.constexpr,  # "softplus": denominator = positives + rest; "difference": below is the whole denominator
) -> tl.tensor:
    """``(loss, factor)``: a sample's contrast and what its softmax shares are multiplied by in the gradient."""
    both = has_positive & has_below
    gap = tl.where(both, below - positive, 0.0)
    if mode == "softplus":
        small = tl.exp(-tl.abs(gap))
        # max(gap, 0), written so that NaN stays NaN
        loss = tl.where(gap <= 0.0, 0.0, gap) + log1p_positive(small)
        factor = tl.where(gap >= 0.0, 1.0, small) / (1.0 + small)
    else:
        loss = gap
        factor = gap * 0.0 + 1.0
    nothing = positive + below
    bad = nothing != nothing
    loss = tl.where(bad, nothing, tl.where(both, loss, 0.0))
    factor = tl.where(bad, nothing, tl.where(both, factor, 0.0))
    return loss, factor


@triton.jit
def leading(scores: tl.tensor, own: tl.tensor, wanted: tl.tensor) -> tl.tensor:
    """Which of a row's ``own`` scores are among its ``wanted`` largest; ties go to the lowest index.

    A bisection over the scores' bit patterns (32 counts), so nothing is sorted and any length works.
    """
    tidy = tl.where(scores == 0.0, 0.0, scores)  # -0 and 0 are a tie
    bits = tidy.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)  # as integers, in the order of the floats
    ordered = tl.where(own, ordered, -2147483649)
    low = tl.min(ordered, 0) * 0 - 2147483648
    high = low + 4294967295
    for _ in range(32):
        middle = low + ((high - low + 1) >> 1)
        enough = tl.sum((ordered >= middle).to(tl.int32), 0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    above = ordered > low
    equal = ordered == low
    room = wanted - tl.sum(above.to(tl.int32), 0)
    return above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
