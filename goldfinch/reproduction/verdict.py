"""Whether a paper's order of methods holds here: one rule for the word on every page.

The rule compares three things: pairs of rows that the paper tells apart and that are in its order here, Spearman's rank
correlation of the averages (rounded to two decimals, as printed), and the paper's own claim, that its method is ahead
of every row that is ranked with it.

=========  =========================================================================================================
word       when
=========  =========================================================================================================
yes        the paper's method is clearly first, 80 % of the pairs or more are kept, and Spearman is 0.70 or more
mostly     the paper's method is first, 60 % of the pairs or more are kept, and Spearman is 0.40 or more;
           or it is not first, 80 % of the pairs or more are kept, and Spearman is 0.70 or more
no         everything else
``-``      the paper's method was not run, has no rival here, or the paper prints no two rows to compare
=========  =========================================================================================================

*First* is the highest average over all columns of the page, alone. *Clearly* first is a lead over the next row that is
no smaller than the larger of the two rows' sample deviations over seeds, so that one seed is never enough for a yes.
With fewer than three rows there is no Spearman, and pairs decide alone.
"""

from dataclasses import dataclass
from typing import Literal

Word = Literal["yes", "mostly", "no", "-"]

STRONG = (80, 0.7)
WEAK = (60, 0.4)
"""The smallest percentage of pairs that are kept, and the smallest Spearman correlation."""


@dataclass(frozen=True)
class Order:
    """How well our order of the rows agrees with the published one, in one column.

    Args:
        rows: rows with a number on both sides.
        correlation: Spearman's, in [-1, 1]; ``None`` with fewer than three rows or where all are equal.
        pairs: pairs of rows that the paper tells apart.
        kept: those in the same order here.
        tied: those that tie here, and so are in no order.
    """

    rows: int
    correlation: float | None
    pairs: int
    kept: int
    tied: int = 0


@dataclass(frozen=True)
class Claim:
    """Where the paper's own row stands here, among the rows that are ranked with it.

    Args:
        own: its label.
        rival: label of the best other row.
        rows: how many rows are ranked, with its own.
        place: from 1; rows that tie share one.
        lead: its average minus the rival's, in percentage points.
        tolerance: the difference below which the two tie, in percentage points.
        deviation: the larger of the two sample deviations over seeds, in percentage points; ``None`` with one seed.
    """

    own: str
    rival: str
    rows: int
    place: int
    lead: float
    tolerance: float
    deviation: float | None

    @property
    def first(self) -> bool:
        """Whether it is ahead of every other row."""
        return self.lead > self.tolerance

    @property
    def clear(self) -> bool:
        """Whether it is first by a deviation over seeds or more."""
        return self.first and self.deviation is not None and self.lead >= self.deviation

    def __str__(self) -> str:
        """Place, and the difference from the best other row."""
        text = f"{self.own}, the paper's own, is number {self.place} of the {self.rows} that are ranked with it"
        text += f": {self.lead:+.2f} points against {self.rival}"
        if abs(self.lead) <= self.tolerance:
            return text + ", a tie"
        if self.deviation is None:
            return text + " (one seed)"
        if abs(self.lead) < self.deviation:
            return text + ", less than a deviation over seeds"
        return text + ", a deviation over seeds or more"


@dataclass(frozen=True)
class Verdict:
    """A word and what it follows from."""

    word: Word
    reason: str


def verdict(order: Order, claim: Claim | None) -> Verdict:
    """Return whether the paper's order holds; the rule stands at the top of this module.

    Args:
        order: of the averages, among the rows that are ranked with the paper's own.
        claim: where the paper's own row stands; ``None`` if it was not run or has no rival.
    """
    if claim is None or order.pairs == 0:
        return Verdict("-", "nothing to judge")
    reason = f"{claim}; {order.kept} of {order.pairs} pairs"
    if order.correlation is not None:
        reason += f", Spearman {order.correlation:.2f}"
    if claim.clear and _agrees(order, STRONG):
        return Verdict("yes", reason)
    required = STRONG
    if claim.first:
        required = WEAK
    if _agrees(order, required):
        return Verdict("mostly", reason)
    return Verdict("no", reason)


def _agrees(order: Order, least: tuple[int, float]) -> bool:
    share, correlation = least
    ranked = order.correlation is None or round(order.correlation, 2) >= correlation
    return 100 * order.kept >= share * order.pairs and ranked
