"""Compares our numbers with the published ones: mean and deviation over seeds, gaps, order.

**Which rows are ranked with each other.** Rows of one shared model are ranked with each other, and so are rows of
clients' own models. A pair of one of each is left out everywhere: best row, pairs, Spearman, effects. So is a row that
lacks a seed, or a domain of one.

**When two rows tie.** One test image more or less moves a domain's number by a step: ``100 / (images x models scored on
them x rounds that count x seeds)``. There is one model per client that is scored on the domain. Two rows tie in a
domain if they differ by less than half a step: both then have the same number of images right in sum. Two rows tie in
the average over D domains if they differ by less than half of the smallest step over D. Without a record of the counts
two rows tie if they differ by less than 1e-9, which is the noise of floating point.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from scipy.stats import spearmanr

from goldfinch.record import RunRecord
from goldfinch.reproduction.effects import Effect, Order, Standing, chance_of
from goldfinch.reproduction.published import PublishedRow, PublishedTable, Scale
from goldfinch.results.rows import ScoreColumn, ScoreRow, best_row
from goldfinch.results.statistics import EXACT

NORMAL = 1.96
"""Deviations of a normal distribution within which 95 % of it lie."""


@dataclass(frozen=True)
class Column:
    """A test domain of the table: what the paper scored, and what we did, the same or its stand-in."""

    published: str
    scored: str
    title: str

    @property
    def comparable(self) -> bool:
        """Whether ours and the published number are of the same data set."""
        return self.published == self.scored

    @property
    def key(self) -> str:
        """The column of our rows."""
        return f"domain:{self.scored}"


@dataclass(frozen=True)
class Line:
    """A row as it was printed, and the row of our runs.

    Args:
        printed: what was published.
        ours: our finished runs; :attr:`~goldfinch.results.rows.ScoreRow.absent` has the seeds without one.
        folders: the folders of all runs, by seed.
        measured: the table's further measure, one value per seed.
    """

    printed: PublishedRow
    ours: ScoreRow[RunRecord]
    folders: Mapping[int, Path] = field(default_factory=dict)
    measured: tuple[float, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """A table and its reproduction: the rows that were run, with the seeds that were requested."""

    table: PublishedTable
    scale: Scale
    lines: tuple[Line, ...]
    seeds: tuple[int, ...]

    @property
    def columns(self) -> tuple[Column, ...]:
        """The table's domains, in order; a stand-in is named as what it is."""
        columns = []
        for published, title in self.table.domains.items():
            scored = self.table.stand_in(published, self.scale)
            shown = title if scored == published else f"{scored} (stands in for {title})"
            columns.append(Column(published, scored, shown))
        return tuple(columns)

    @property
    def comparable(self) -> tuple[Column, ...]:
        """Columns of the same data set on both sides."""
        columns: list[Column] = []
        for column in self.columns:
            if column.comparable:
                columns.append(column)
        return tuple(columns)

    @property
    def compared(self) -> tuple[Column, ...]:
        """The columns over which rows are put in order: the comparable ones.

        Where every row has only a printed average, it is compared with ours over all columns, stand-ins included.
        """
        for line in self.lines:
            if line.printed.has_cells:
                return self.comparable
        return self.columns

    @property
    def average(self) -> tuple[str, ...]:
        """The column of our rows that is the unweighted mean over the table's domains."""
        return average_of(self.columns)

    # ---- next to the paper ------------------------------------------------------------------------------------------

    def published(self, line: Line, column: Column) -> float | None:
        """The printed accuracy on one domain."""
        cells = line.printed.cells or (None,) * len(self.table.domains)
        return cells[list(self.table.domains).index(column.published)]

    def published_average(self, line: Line, columns: Sequence[Column]) -> float | None:
        """The printed average where it is over ``columns`` and no misprint, else the mean of their printed cells."""
        all_columns = len(columns) == len(self.table.domains)
        wrong = line.printed.misprint and line.printed.has_cells
        if all_columns and line.printed.average is not None and not wrong:
            return line.printed.average
        known: list[float] = []
        for column in columns:
            cell = self.published(line, column)
            if cell is None:
                return None
            known.append(cell)
        if not known:
            return None
        return statistics.fmean(known)

    def gap(self, line: Line, column: Column) -> float | None:
        """Ours minus published, percentage points; ``None`` for a stand-in, and of a partial value."""
        ours = line.ours.value(column.key, self.table.rule)
        theirs = self.published(line, column)
        if not column.comparable or ours is None or ours.partial or theirs is None:
            return None
        return ours.mean - theirs

    def average_gap(self, line: Line) -> float | None:
        """Ours minus published, of the average over comparable columns; ``None`` of a partial value."""
        ours = line.ours.value(average_of(self.comparable), self.table.rule)
        theirs = self.published_average(line, self.comparable)
        if ours is None or ours.partial or theirs is None:
            return None
        return ours.mean - theirs

    # ---- order -----------------------------------------------------------------------------------------------------

    @property
    def kinds(self) -> tuple[bool, ...]:
        """Whether rows are of clients' own models, for each kind of rows that were run: they are ranked apart."""
        kinds: set[bool] = set()
        for line in self.lines:
            if line.ours.runs:
                kinds.add(line.ours.personal)
        return tuple(sorted(kinds, reverse=True))

    @property
    def own(self) -> Line | None:
        """The paper's own row, if it was run."""
        for line in self.lines:
            if line.printed.label == self.table.own and line.ours.runs:
                return line
        return None

    @property
    def judged(self) -> bool:
        """The kind of rows that the effects are of: that of the paper's own row, else of most rows."""
        if self.own is not None:
            return self.own.ours.personal
        personal = [line.ours.personal for line in self.lines]
        return 2 * sum(personal) > len(personal)

    def ranked_with(self, personal: bool) -> list[Line]:
        """The rows of one kind with a number of every seed in every column."""
        lines: list[Line] = []
        for line in self.lines:
            average = line.ours.value(self.average, self.table.rule)
            if line.ours.personal != personal or line.ours.absent or average is None or average.partial:
                continue
            lines.append(line)
        return lines

    @cached_property
    def _steps(self) -> dict[str, float]:
        """The smallest step of each domain over all rows, in percentage points; empty without a record of counts."""
        steps: dict[str, float] = {}
        for line in self.lines:
            for run in line.ours.runs:
                rounds = run.rules[self.table.rule].get("rounds", 1)
                for domain, images in _scored_images(run).items():
                    step = 100.0 / (images * rounds * len(line.ours.runs))
                    steps[domain] = min(step, steps.get(domain, step))
        return steps

    def tolerance(self, columns: Sequence[Column]) -> float:
        """The difference below which two rows tie in the average over ``columns``, in percentage points."""
        steps = []
        for column in columns:
            if column.scored in self._steps:
                steps.append(self._steps[column.scored])
        if not steps:
            return EXACT
        return max(EXACT, min(steps) / len(columns) / 2)

    def order(self, column: Column | None = None, personal: bool | None = None) -> Order:
        """Agreement of order in a column, or in the average over :attr:`compared` ones, among rows of one kind.

        Args:
            column: ``None`` is the average.
            personal: rows of clients' own models or of one shared model; ``None`` is the kind of the paper's own row.
        """
        kind = personal
        if kind is None:
            kind = self.judged
        compared: Sequence[Column] = self.compared
        if column is not None:
            compared = [column]
        pairs: list[tuple[float, float]] = []
        for line in self.ranked_with(kind):
            if column is not None:
                ours, theirs = line.ours.value(column.key, self.table.rule), self.published(line, column)
            else:
                ours = line.ours.value(average_of(compared), self.table.rule)
                theirs = self.published_average(line, compared)
            if ours is not None and theirs is not None:
                pairs.append((ours.mean, theirs))
        return agreement(pairs, self.tolerance(compared))

    @property
    def ranked_kinds(self) -> tuple[bool, ...]:
        """The kinds of rows in which there is something to rank: two rows or more, or the only kind."""
        if len(self.kinds) == 1:
            return self.kinds
        kinds: list[bool] = []
        for kind in self.kinds:
            if len(self.ranked_with(kind)) > 1:
                kinds.append(kind)
        return tuple(kinds)

    def best(self, column: ScoreColumn) -> list[Line]:
        """The best row of each kind in a column of our rows, by :func:`goldfinch.results.rows.best_row`."""
        lines: list[Line] = []
        for kind in self.ranked_kinds:
            of_kind = [line.ours for line in self.lines if line.ours.runs and line.ours.personal == kind]
            best = best_row(of_kind, column, self.table.rule)
            lines += [line for line in self.lines if line.ours is best]
        return lines

    @property
    def rivals(self) -> list[Line]:
        """The rows that are ranked with the paper's own; none if it was not run or has no score."""
        if self.own is None or self.own not in self.ranked_with(self.own.ours.personal):
            return []
        return [line for line in self.ranked_with(self.own.ours.personal) if line is not self.own]

    def standing(self) -> Standing | None:
        """Where the paper's own row stands among the rows that are ranked with it; ``None`` if it has no rival.

        By the average over :attr:`compared` columns, as the pairs of :meth:`order`.
        """
        if self.own is None or not self.rivals or not self.compared:
            return None
        mine = self._mean(self.own)
        ahead = [line for line in self.rivals if self._mean(line) > mine + self.tolerance(self.compared)]
        return Standing(self.own.printed.label, len(self.rivals) + 1, len(ahead) + 1)

    def _mean(self, line: Line) -> float:
        average = line.ours.value(average_of(self.compared), self.table.rule)
        assert average is not None  # it is ranked
        return average.mean

    def effects(self) -> list[Effect]:
        """The paper's own row minus each row that is ranked with it, over all columns, in the table's order.

        Differences are paired by seed. Where a column is a stand-in, no printed difference is one of the same columns.
        """
        effects: list[Effect] = []
        if self.own is None:
            return effects
        mine = self.published_average(self.own, self.columns)
        for line in self.rivals:
            theirs = self.published_average(line, self.columns)
            printed = None
            if mine is not None and theirs is not None and len(self.comparable) == len(self.columns):
                printed = mine - theirs
            ours = self.own.ours.minus(line.ours, self.average, self.table.rule)
            if ours is not None:
                tested = ours.p is not None
                effects.append(Effect(line.printed.label, ours.mean, ours.low, ours.high, printed, tested))
        return effects

    def noise(self, line: Line, columns: Sequence[Column]) -> float | None:
        """Half of the 95 % interval of a gap to print that the choice of test images alone makes, percentage points.

        Binomial, over columns that both sides score, as if the paper scored as many images as ours and others than
        these. Several clients' models that are scored on the same images count as one, since they share the choice.
        ``None`` without a record of the images, or a printed score.
        """
        variance = 0.0
        for column in columns:
            ours, theirs = line.ours.value(column.key, self.table.rule), self.published(line, column)
            images = {run.test_images.get(column.scored) for run in line.ours.runs}
            count = next(iter(images), None)
            if ours is None or theirs is None or not count or not column.comparable:
                return None
            for percent in (ours.mean, theirs):
                variance += percent * (100.0 - percent) / count
        return NORMAL * math.sqrt(variance) / len(columns)

    @property
    def not_asked(self) -> tuple[PublishedRow, ...]:
        """The printed rows of the table that are not among :attr:`lines`."""
        labels = {line.printed.label for line in self.lines}
        return tuple(row for row in self.table.rows if row.label not in labels)

    def splits(self) -> dict[str, str]:
        """SHA-256 of each client's training split; equal in every run of a seed-independent protocol."""
        hashes: dict[str, str] = {}
        for line in self.lines:
            for run in line.ours.runs:
                hashes |= run.facts.splits
        return dict(sorted(hashes.items()))


def average_of(columns: Sequence[Column]) -> tuple[str, ...]:
    """Return the column of our rows that is the unweighted mean over some domains of a table."""
    return tuple(column.scored for column in columns)


def _scored_images(run: RunRecord) -> dict[str, int]:
    """Return each domain's test images times the number of clients' models scored on them; empty if not recorded."""
    counts_by_domain: dict[str, dict[str, int]] = {}
    for row in run.test_lines:
        counts_by_domain.setdefault(str(row["domain"]), {})[str(row["client"])] = int(row["count"])
    images: dict[str, int] = {}
    for domain, counts in counts_by_domain.items():
        images[domain] = max(counts.values()) * len(counts)
    return images


def ranks_of(values: Sequence[float], tolerance: float) -> list[float]:
    """Return how many of the other values are below each; one that differs by no more than ``tolerance`` is half."""
    ranks: list[float] = []
    for value in values:
        below = sum(value - other > tolerance for other in values)
        tied = sum(abs(value - other) <= tolerance for other in values) - 1
        ranks.append(below + tied / 2)
    return ranks


def agreement(pairs: Sequence[tuple[float, float]], tolerance: float = EXACT) -> Order:
    """Return Spearman's rank correlation, and how many published orders of two rows hold.

    Args:
        pairs: (ours, published) of each row, in per cent.
        tolerance: the difference up to which two of ours tie. Published numbers tie if they are printed alike.
    """
    ours = ranks_of([mine for mine, _ in pairs], tolerance)
    theirs = ranks_of([printed for _, printed in pairs], EXACT)
    told_apart = kept = tied = 0
    for (mine, printed), (other, other_printed) in itertools.combinations(pairs, 2):
        if abs(printed - other_printed) > EXACT:
            told_apart += 1
            tied += abs(mine - other) <= tolerance
            kept += abs(mine - other) > tolerance and (mine - other) * (printed - other_printed) > 0
    correlation = None
    if len(pairs) >= 3 and len(set(ours)) > 1 and len(set(theirs)) > 1:
        correlation = float(spearmanr(ours, theirs).statistic)
    groups = Counter(theirs)
    return Order(len(pairs), correlation, told_apart, kept, tied, chance_of(kept, list(groups.values())))
