"""Ours beside the published numbers: mean and deviation over seeds, gaps, order."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr

from server.reproduction.published import PublishedRow, PublishedTable, Scale
from server.results.run import Run
from server.results.seeds import Value, curve

MEGABYTE = 1e6


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


@dataclass(frozen=True)
class Line:
    """A row with our runs.

    Args:
        row: what was published.
        folders: the runs' folders, by seed.
        summaries: the runs' ``summary.json``, by seed; runs that did not finish are missing.
        failures: what went wrong, by seed.
        measured: the table's further measure, one value per seed.
    """

    row: PublishedRow
    folders: Mapping[int, Path]
    summaries: Mapping[int, Mapping[str, Any]]
    failures: Mapping[int, str] = field(default_factory=dict)
    measured: tuple[float, ...] = ()

    @property
    def personal(self) -> bool:
        """Whether its scores are of clients' own models."""
        return any(summary["scored"] == "own model" for summary in self.summaries.values())


@dataclass(frozen=True)
class Order:
    """How well our order of the rows agrees with the published one, in one column.

    Args:
        rows: rows with a number on both sides.
        correlation: Spearman's, in [-1, 1]; ``None`` with fewer than three rows or where all are equal.
        pairs: pairs of rows that the paper tells apart.
        kept: those in the same order here.
        tied: those that are equal here, and so in no order.
    """

    rows: int
    correlation: float | None
    pairs: int
    kept: int
    tied: int = 0


@dataclass(frozen=True)
class Comparison:
    """A table beside its reproduction: the rows that were run, with the seeds that were asked for."""

    table: PublishedTable
    scale: Scale
    lines: tuple[Line, ...]
    seeds: tuple[int, ...]

    @property
    def columns(self) -> tuple[Column, ...]:
        """The table's domains, in order; a stand-in is named as what it is."""
        found = []
        for published, title in self.table.domains.items():
            scored = self.table.stand_in(published, self.scale)
            shown = title if scored == published else f"{scored} (stands in for {title})"
            found.append(Column(published, scored, shown))
        return tuple(found)

    @property
    def comparable(self) -> tuple[Column, ...]:
        """Columns of the same data set on both sides."""
        return tuple(column for column in self.columns if column.comparable)

    # ---- ours ------------------------------------------------------------------------------------------------------

    def _scores(self, line: Line) -> list[Mapping[str, Any]]:
        return [line.summaries[seed]["scores"][self.table.rule] for seed in sorted(line.summaries)]

    def ours(self, line: Line, column: Column) -> Value | None:
        """Accuracy on one domain by the paper's rule."""
        scores = [score["accuracy"] for score in self._scores(line)]
        return Value.of([float(score[column.scored]) for score in scores if column.scored in score])

    def our_average(self, line: Line, columns: Sequence[Column]) -> Value | None:
        """Unweighted mean over ``columns``."""
        names = [column.scored for column in columns]
        scores = [score["accuracy"] for score in self._scores(line)]
        complete = [score for score in scores if all(name in score for name in names)]
        return Value.of([statistics.fmean(float(score[name]) for name in names) for score in complete])

    def over_domains(self, line: Line, what: str) -> Value | None:
        """The lowest domain's accuracy (``worst``), or the deviation between domains in points (``spread``)."""
        return Value.of([float(score[what]) for score in self._scores(line)])

    def megabytes(self, line: Line) -> Value | None:
        """Megabytes (1e6 bytes) up and down of all clients over the run."""
        sizes = [summary["bytes"] for summary in line.summaries.values()]
        return Value.of([(size["up"] + size["down"]) / MEGABYTE for size in sizes])

    def per_megabyte(self, line: Line) -> float | None:
        """Percentage points of average accuracy for each megabyte."""
        average, size = self.our_average(line, self.columns), self.megabytes(line)
        return average.mean / size.mean if average and size and size.mean > 0 else None

    def curve(self, line: Line) -> dict[int, Value]:
        """Average accuracy over the table's domains by round, over seeds."""
        runs = [Run(line.folders[seed]) for seed in sorted(line.summaries)]
        return curve(runs, [column.scored for column in self.columns])

    # ---- beside the paper ------------------------------------------------------------------------------------------

    def published(self, line: Line, column: Column) -> float | None:
        """The printed accuracy on one domain."""
        cells = line.row.cells or (None,) * len(self.table.domains)
        return cells[list(self.table.domains).index(column.published)]

    def published_average(self, line: Line, columns: Sequence[Column]) -> float | None:
        """The mean of the printed cells of ``columns``; the printed average where no cells were printed."""
        cells = [self.published(line, column) for column in columns]
        known = [cell for cell in cells if cell is not None]
        if known and len(known) == len(cells):
            return statistics.fmean(known)
        whole = len(columns) == len(self.table.domains)
        return line.row.average if whole and not any(cell is not None for cell in line.row.cells) else None

    def gap(self, line: Line, column: Column) -> float | None:
        """Ours minus published, percentage points; ``None`` for a stand-in."""
        ours, theirs = self.ours(line, column), self.published(line, column)
        return ours.mean - theirs if column.comparable and ours is not None and theirs is not None else None

    def average_gap(self, line: Line) -> float | None:
        """Ours minus published, of the average over comparable columns."""
        ours, theirs = self.our_average(line, self.comparable), self.published_average(line, self.comparable)
        return ours.mean - theirs if ours is not None and theirs is not None else None

    def order(self, column: Column | None = None) -> Order:
        """Agreement of order in a column, or in the average over comparable columns.

        Where every row has only a printed average, it is compared with ours over all columns, stand-ins included.
        """
        pairs = []
        has_cells = any(cell is not None for line in self.lines for cell in line.row.cells)
        columns = self.comparable if has_cells else self.columns
        for line in self.lines:
            if column is not None:
                ours, theirs = self.ours(line, column), self.published(line, column)
            else:
                ours, theirs = self.our_average(line, columns), self.published_average(line, columns)
            if ours is not None and theirs is not None:
                pairs.append((ours.mean, theirs))
        return agreement(pairs)

    def best(self) -> list[Line]:
        """Our best row by the average over all columns, or those that tie for it, as far as the page's digits tell.

        Rows scored on clients' own models are ranked only where there are no others.
        """
        scored = [(line, value) for line in self.lines if (value := self.our_average(line, self.columns)) is not None]
        rivals = [pair for pair in scored if not pair[0].personal] or scored
        means = [round(value.mean, 2) for _, value in rivals]
        return [line for (line, _), mean in zip(rivals, means, strict=True) if mean == max(means)]

    def splits(self) -> dict[str, str]:
        """SHA-256 of each client's training split; equal in every run of a seed-independent protocol."""
        found: dict[str, str] = {}
        for line in self.lines:
            for summary in line.summaries.values():
                found |= summary["splits"]
        return dict(sorted(found.items()))


def agreement(pairs: Sequence[tuple[float, float]]) -> Order:
    """Spearman's rank correlation, and how many published orders of two rows hold, of (ours, published)."""
    told_apart = kept = tied = 0
    for (ours, theirs), (other_ours, other_theirs) in itertools.combinations(pairs, 2):
        if theirs != other_theirs:
            told_apart += 1
            kept += (ours - other_ours) * (theirs - other_theirs) > 0
            tied += ours == other_ours
    correlation = None
    varied = len({ours for ours, _ in pairs}) > 1 and len({theirs for _, theirs in pairs}) > 1
    if len(pairs) >= 3 and varied:
        correlation = float(spearmanr([ours for ours, _ in pairs], [theirs for _, theirs in pairs]).statistic)
    return Order(len(pairs), correlation, told_apart, kept, tied)
