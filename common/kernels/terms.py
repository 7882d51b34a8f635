"""What one call of the prototype losses computes: coefficients and options, checked once."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Denominator = Literal["all", "negatives"]
DenominatorRows = Literal["normalised", "raw"]
Power = Literal["clamp", "odd", "shift"]
Reduce = Literal["mean", "sum"]

LENGTH_FLOOR = 1e-12
"""Features shorter than this count as zero vectors: cosine 0, no gradient from the cosine."""

FULL_PRECISION_TEMPERATURE = 0.05
"""At or below this temperature products run in IEEE float32: TF32's 5e-4 in the cosine would be 0.01 in the logit."""

TOP_LIMIT = 2048
"""Most prototypes of one class that the fused top-k alignment keeps on chip."""


@dataclass(frozen=True)
class PrototypeTerms:
    """Coefficients and options of the prototype losses; a coefficient of 0 leaves its term out.

    The total is ``contrast * C + alignment * A + mse * E + cosine_square * Q``, each a mean over the whole batch (a
    sample whose class has no prototype adds 0 and is still counted). With ``c_ij`` the cosine of feature i and row j,
    ``s`` its power and ``w_j`` the row's weight:

    - C, contrast: ``LSE_denominator(s_ij / temperature + log w_j) - LSE_{j of i's class}(...)``;
    - A, alignment: ``-sum of the k largest s_ij w_j of i's class``, ``k = max(1, ceil(fraction n))``;
    - E, mse: ``|z_i - u|^2`` to i's class row (over D: ``mse_reduce``);
    - Q, cosine_square: ``2 (cos(z_i, u) - 1)^2`` to i's class row.

    Raises:
        ValueError: an option out of range, or two that exclude each other.
    """

    contrast: float = 0.0
    alignment: float = 0.0
    mse: float = 0.0
    cosine_square: float = 0.0
    temperature: float = 1.0  # tau > 0
    alpha: float = 1.0  # exponent of the cosine, in (0, 1]
    fraction: float = 1.0  # phi of FedPLCC: share of the class's rows that are aligned to, in (0, 1]
    denominator: Denominator = "all"
    denominator_rows: DenominatorRows = "normalised"
    weighted: bool = False  # rows count by their weights; otherwise w_j = 1
    mse_reduce: Reduce = "mean"
    power: Power = "clamp"
    eps: float = 1e-4  # the cosine is clamped here before the power; no gradient below

    def __post_init__(self) -> None:
        for name in ("contrast", "alignment", "mse", "cosine_square"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"coefficient {name} must be finite; got {getattr(self, name)}")
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be > 0; got {self.temperature}")
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha must be in (0, 1]; got {self.alpha}")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be in (0, 1]; got {self.fraction}")
        if not 0 < self.eps < 1:
            raise ValueError(f"eps must be in (0, 1); got {self.eps}")
        _one_of("denominator", self.denominator, ("all", "negatives"))
        _one_of("denominator_rows", self.denominator_rows, ("normalised", "raw"))
        _one_of("mse_reduce", self.mse_reduce, ("mean", "sum"))
        _one_of("power", self.power, ("clamp", "odd", "shift"))
        if self.denominator_rows == "raw" and (self.alpha != 1 or self.power == "shift"):
            raise ValueError("denominator_rows='raw' is defined for alpha=1 and power='clamp' only")

    def coefficients(self, like: Tensor) -> Tensor:
        """``[4]`` coefficients of (contrast, alignment, mse, cosine_square), of ``like``'s type and device."""
        return like.new_tensor((self.contrast, self.alignment, self.mse, self.cosine_square))

    @property
    def uses_rows(self) -> bool:
        """Whether a term looks at all rows of the set (contrast, alignment)."""
        return self.contrast != 0 or self.alignment != 0

    @property
    def uses_class_rows(self) -> bool:
        """Whether a term looks at one row per class (mse, cosine_square)."""
        return self.mse != 0 or self.cosine_square != 0


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def alignment_count(rows: int, fraction: float) -> int:
    """How many of a class's ``rows`` are aligned to: ``max(1, ceil(fraction * rows))``, safe from float error."""
    return max(1, math.ceil(fraction * rows - 1e-9))


@contextlib.contextmanager
def full_precision(device: torch.device, temperature: float) -> Iterator[None]:
    """No autocast inside; no TF32 products either where ``temperature`` is at most 0.05."""
    lower = (
        device.type == "cuda"
        and temperature <= FULL_PRECISION_TEMPERATURE
        and not torch.compiler.is_compiling()
        and torch.backends.cuda.matmul.allow_tf32
    )
    if lower:
        torch.backends.cuda.matmul.allow_tf32 = False
    try:
        if torch.is_autocast_enabled(device.type):
            with torch.autocast(device.type, enabled=False):
                yield
        else:
            yield
    finally:
        if lower:
            torch.backends.cuda.matmul.allow_tf32 = True
