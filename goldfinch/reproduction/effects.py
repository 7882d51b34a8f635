"""What a page says of the paper's claim: differences beside the printed ones, and what chance alone would give.

An *effect* is the difference of the paper's own method from another row, with its 95 % interval, and the printed
difference, which lies inside that interval or outside. An *order* counts the pairs of rows that the paper tells apart
and that are in its order here, and has the probability of at least as many if all methods were equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Order:
    """How well our order of the rows agrees with the published one, in one column.

    Args:
        rows: rows with a number on both sides.
        correlation: Spearman's, in [-1, 1]; ``None`` with fewer than three rows or where all are equal.
        pairs: pairs of rows that the paper tells apart.
        kept: those in the same order here.
        tied: those that tie here, and so are in no order.
        chance: the probability of ``kept`` pairs or more if all orders of the rows were equally likely, in [0, 1].
    """

    rows: int
    correlation: float | None
    pairs: int
    kept: int
    tied: int = 0
    chance: float = 1.0


@dataclass(frozen=True)
class Effect:
    """The paper's own method minus another row.

    Args:
        rival: label of the other row.
        ours: our difference of the averages, in percentage points.
        low, high: the ends of its 95 % interval; ``None`` without one.
        printed: the printed difference; ``None`` where there is none to compare with.
        tested: whether the interval may decide: it has three seeds or more.
    """

    rival: str
    ours: float
    low: float | None
    high: float | None
    printed: float | None
    tested: bool = True

    @property
    def lies(self) -> str:
        """Where the printed difference lies: ``inside`` our interval, ``outside``, or ``-`` where nothing is tested."""
        if not self.tested or self.printed is None or self.low is None or self.high is None:
            return "-"
        if self.low <= self.printed <= self.high:
            return "inside"
        return "outside"

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.ours:+.2f}"
        return f"{self.ours:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


@dataclass(frozen=True)
class Standing:
    """Where the paper's own row stands here, among the rows that are ranked with it.

    Args:
        own: its label.
        rows: how many rows are ranked, with its own.
        place: from 1; rows that tie share one.
    """

    own: str
    rows: int
    place: int


def chance_of(kept: int, groups: Sequence[int]) -> float:
    """Return the probability that a random order keeps ``kept`` pairs or more.

    The number of orders that keep a number of pairs is a coefficient of the Gaussian multinomial.

    Args:
        kept: pairs of rows of different groups that are in order.
        groups: the number of rows with each printed value, in any order; rows of one group make no pair.
    """
    orders = [1]
    rows = 0
    for size in groups:
        rows += size
        orders = _product(orders, _gaussian(rows, size))
    return sum(orders[kept:]) / sum(orders)


@cache
def _gaussian(rows: int, chosen: int) -> list[int]:
    """Return the coefficients of the Gaussian binomial, from power 0."""
    if chosen in (0, rows):
        return [1]
    without = [0] * chosen + _gaussian(rows - 1, chosen)
    coefficients = without
    for power, count in enumerate(_gaussian(rows - 1, chosen - 1)):
        coefficients[power] += count
    return coefficients


def _product(one: Sequence[int], other: Sequence[int]) -> list[int]:
    product = [0] * (len(one) + len(other) - 1)
    for place, first in enumerate(one):
        for power, second in enumerate(other):
            product[place + power] += first * second
    return product


def percent(chance: float) -> str:
    """Return a probability in per cent, such as ``2.4 %``; below a thousandth ``under 0.1 %``."""
    if chance < 0.001:
        return "under 0.1 %"
    return f"{100 * chance:.1f} %"
