"""What the prototype losses are computed from: their terms, the prepared rows of a set, and the arguments of one call.

Closed form (:mod:`common.losses.prototype`) and kernel (:mod:`common.losses.triton_kernel`) both read them here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from common.prototypes import PrototypeSet

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
