"""The prototype losses: the arguments of a call, and the closed form of loss and gradient, without an autograd graph.

Loss and gradient together take two matrix products.

With n the softmax over a sample's negatives, r that over its positives and ``d = LSE_negatives - LSE_positives``, the
contrast is ``softplus(d)`` and its derivative in logit j is ``sigmoid(d) (n_j - r_j)``; with negatives only in the
denominator it is ``d`` and ``n_j - r_j``. Nothing cancels, and n and r share one exponential because their supports are
disjoint. Through the cosine: ``dz = (sum_j a_j p_j - (sum_j a_j c_j) z / |z|) / |z|``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from common.precision import NORM_FLOOR, working_dtype
from common.prototypes import PrototypeSet, normalise_rows

Denominator = Literal["all", "negatives"]
DenominatorRows = Literal["normalised", "raw"]
Reduce = Literal["mean", "sum"]
OPTIONS = {"denominator": Denominator, "denominator_rows": DenominatorRows, "mse_reduce": Reduce}

COSINE_FLOOR = 1e-4
"""For alpha < 1 the cosine is clamped here before the power, and passes no gradient below."""


@dataclass(frozen=True)
class PrototypeTerms:
    """Coefficients and options of the prototype losses; a coefficient of 0 leaves its term out.

    The total is ``contrast * C + alignment * A + mse * E + cosine_square * Q``, each a mean over the whole batch (a
    sample whose class has no prototype adds 0 and is still counted). With ``c_ij`` the cosine of feature i and row j,
    ``s_ij = max(c_ij, 1e-4)^alpha`` (``c_ij`` for alpha = 1) and ``w_j`` the row's weight:

    - C, contrast: ``LSE_denominator(s_ij / temperature + log w_j) - LSE_{j of i's class}(...)``;
    - A, alignment: ``-sum of the k largest s_ij w_j of i's class``, ``k = max(1, ceil(fraction n))``;
    - E, mse: ``|z_i - u|^2`` to i's class row (over D: ``mse_reduce``);
    - Q, cosine_square: ``2 (s(cos(z_i, u)) - 1)^2`` to i's class row, s without alpha unless ``power_in_square``.

    Args:
        contrast, alignment, mse, cosine_square: coefficients, finite.
        temperature: tau > 0.
        alpha: exponent of the cosine, in (0, 1].
        fraction: phi of FedPLCC, share of the class's rows that are aligned to, in (0, 1].
        denominator: ``negatives`` leaves the positive class out (FedPall's print).
        denominator_rows: ``raw`` keeps the prototypes' lengths in the denominator only (FedPall's code).
        mse_reduce: mean or sum over D.
        weighted: rows count by their weights; otherwise ``w_j = 1``.
        power_in_square: whether Q takes alpha too.

    Raises:
        ValueError: an option out of range, or two that exclude each other.
    """

    contrast: float = 0.0
    alignment: float = 0.0
    mse: float = 0.0
    cosine_square: float = 0.0
    temperature: float = 1.0
    alpha: float = 1.0
    fraction: float = 1.0
    denominator: Denominator = "all"
    denominator_rows: DenominatorRows = "normalised"
    mse_reduce: Reduce = "mean"
    weighted: bool = False
    power_in_square: bool = False

    def __post_init__(self) -> None:
        for name in ("contrast", "alignment", "mse", "cosine_square"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"coefficient {name} must be finite; got {getattr(self, name)}")
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be > 0; got {self.temperature}")
        for name, share in (("alpha", self.alpha), ("fraction", self.fraction)):
            if not 0 < share <= 1:
                raise ValueError(f"{name} must be in (0, 1]; got {share}")
        for name, option in OPTIONS.items():
            if getattr(self, name) not in get_args(option):
                raise ValueError(f"{name} must be one of {', '.join(get_args(option))}; got {getattr(self, name)!r}")
        if self.denominator_rows == "raw" and self.alpha != 1:
            raise ValueError("denominator_rows='raw' is defined for alpha=1 only")

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """Of (contrast, alignment, mse, cosine_square)."""
        return self.contrast, self.alignment, self.mse, self.cosine_square

    @property
    def uses_rows(self) -> bool:
        """Whether a term reads all rows of the set (contrast, alignment)."""
        return self.contrast != 0 or self.alignment != 0

    @property
    def uses_class_rows(self) -> bool:
        """Whether a term reads one row per class (mse, cosine_square)."""
        return self.mse != 0 or self.cosine_square != 0


class Rows(NamedTuple):
    """A prototype set in the form that kernels read, prepared once per set: once per round and device.

    ``K`` = highest class + 1; class ``c`` owns rows ``offsets[c]:offsets[c + 1]``.
    """

    vectors: Tensor  # [M, D] float32
    units: Tensor  # [M, D] float32, at unit length
    labels: Tensor  # [M] int64, ascending
    offsets: Tensor  # [K + 1] int64
    weights: Tensor  # [M] float32
    lengths: Tensor  # [M] float32, of vectors


class Call(NamedTuple):
    """The arguments of one call of the losses: ``B >= 1``, and each term with a coefficient has rows to read.

    Sums over the batch are divided by ``divisor``.
    """

    features: Tensor  # [B, D], any floating type
    labels: Tensor  # [B] int64
    rows: Rows
    class_rows: Rows  # one per class
    wanted: Tensor  # of the rows, see wanted_counts
    terms: PrototypeTerms
    positive_bias: Tensor | None  # [B]
    divisor: int
    with_gradient: bool


def prepared_rows(prototypes: PrototypeSet) -> Rows:
    """Return the prepared form of ``prototypes``, which is kept with the set. The first call reads the device."""
    cache: dict[str, Any] = prototypes.__dict__
    if "_rows" not in cache:
        offsets = prototypes.offsets(max(prototypes.classes, default=-1) + 1).contiguous()
        lengths = torch.linalg.vector_norm(prototypes.vectors, dim=1)
        units = prototypes.normalised.contiguous()
        cache["_rows"] = Rows(prototypes.vectors, units, prototypes.labels, offsets, prototypes.weights, lengths)
    rows: Rows = cache["_rows"]
    return rows


def wanted_counts(prototypes: PrototypeSet, terms: PrototypeTerms) -> Tensor:
    """Return ``[K]`` int32: the number of rows of each class that ``terms.fraction`` aligns to, kept with the set."""
    cache: dict[float, Tensor] = prototypes.__dict__.setdefault("_wanted", {})
    if terms.fraction not in cache:
        sizes = prepared_rows(prototypes).offsets.diff().tolist()
        counts = [alignment_count(size, terms.fraction) for size in sizes]
        cache[terms.fraction] = torch.tensor(counts, dtype=torch.int32, device=prototypes.labels.device)
    return cache[terms.fraction]


def alignment_count(rows: int, fraction: float) -> int:
    """Return how many of a class's rows are aligned to: ``max(1, ceil(fraction * rows))``, safe from float error."""
    return max(1, math.ceil(fraction * rows - 1e-9))


# ---- the closed form -------------------------------------------------------------------------------------------------


def evaluate(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the losses as :func:`common.losses.prototype.compute` does, in float32, or float64 for float64 features.

    Without a gradient the second matrix product is left out.
    """
    terms, rows, divisor, with_gradient = call.terms, call.rows, call.divisor, call.with_gradient
    dtype = working_dtype(call.features)
    features = call.features.detach().to(dtype)
    length = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    inverse = length.reciprocal().masked_fill_(length < NORM_FLOOR, 0.0)  # [B, 1]
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
