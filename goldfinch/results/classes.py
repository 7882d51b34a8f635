"""Tables of recall: the share of the test images of each class that are recognised, by class and domain."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError
from common.metrics import RULES, ClassTotals
from goldfinch.results.frames import OVER_SEEDS, domain_columns, domain_heads, partial_notes
from goldfinch.results.groups import Board, Group
from goldfinch.results.run import RunFolder
from goldfinch.results.seeds import Value
from goldfinch.results.sheets import LOWEST, Sheet, pandas_library

if TYPE_CHECKING:
    import pandas as pd

ROUND_RULES = ("final", "best_round", "validated")
"""The rules that choose one round, which has confusion counts; ``last_n`` is a mean of several."""


@dataclass
class ClassRow:
    """A class of a table.

    Args:
        name: the class.
        cells: its recall in each column, in per cent over seeds; ``None`` if it has no test images there.
        lowest: whether each cell is the lowest of its column.
        images: its test images over all domains of the first run.
    """

    name: str
    cells: list[Value | None]
    lowest: list[bool] = field(default_factory=list)
    images: int = 0

    def texts(self) -> list[str]:
        """Return the cells as texts; the lowest value of a column is marked."""
        found: list[str] = []
        for value, lowest in zip(self.cells, self.lowest, strict=True):
            text = str(value or "-")
            if lowest:
                text += f" {LOWEST}"
            found.append(text)
        return found


@dataclass
class ClassTable:
    """The recalls of one row of a board.

    Args:
        title: the board and the row.
        group: the row.
        heads: the heads of the columns: each domain, ``average`` and ``worst`` over domains.
        rows: the classes in the data set's order.
        notes: what a partial score lacks.
    """

    title: str
    group: Group
    heads: list[str]
    rows: list[ClassRow]
    notes: list[str]

    @property
    def explanation(self) -> str:
        """What the numbers and the mark are."""
        return (
            f"The share of the test images of a class that are recognised; {LOWEST} is the lowest of a column, - a "
            "class without test images"
        )


def class_tables(board: Board, rule: str) -> list[ClassTable]:
    """Return a table for each row of a board, if its runs have confusion counts of the rule's round.

    Args:
        board: the board.
        rule: one of :data:`ROUND_RULES`.
    """
    found: list[ClassTable] = []
    for group in board.groups:
        runs = [run for run in group.runs if rule in run.rules]
        if runs and all(_has_counts(run, rule) for run in runs):
            found.append(_class_table(board, group, runs, rule))
    return found


def required_class_tables(boards: Sequence[Board], rule: str) -> list[ClassTable]:
    """Return the tables of all boards.

    Raises:
        ConfigError: the rule is a mean of rounds, or a row lacks confusion counts.
    """
    if rule not in ROUND_RULES:
        raise ConfigError(
            f"--classes --rule {rule}: recall by class is that of one round; choose --rule {', '.join(ROUND_RULES)}"
        )
    found: list[ClassTable] = []
    for board in boards:
        tables = class_tables(board, rule)
        shown = [table.group for table in tables]
        for group in board.groups:
            if group not in shown:
                raise ConfigError(
                    f"{group.runs[0].folder} has no confusion counts of {RULES[rule].name}: leave the run out, or "
                    "choose another --rule"
                )
        found += tables
    return found


def _has_counts(run: RunFolder, rule: str) -> bool:
    score = run.rules[rule]
    if "round" not in score:  # a summary from elsewhere
        return False
    return all((int(score["round"]), domain) in run.class_totals for domain in score["accuracy"])


def _class_table(board: Board, group: Group, runs: Sequence[RunFolder], rule: str) -> ClassTable:
    domains = domain_columns([group], rule)
    names = runs[0].class_names
    rows: list[ClassRow] = []
    for label, name in enumerate(names):
        cells = [_recall(runs, rule, domain, label) for domain in domains]
        cells += [_over_domains(runs, rule, label, column) for column in ("average", "worst")]
        images = 0
        for domain in domains:
            totals = _totals(runs[0], rule, domain)
            if totals is not None:
                images += totals.true[label]
        rows.append(ClassRow(name, cells, images=images))
    _mark_lowest(rows)
    heads = [*domain_heads([group], domains), "average", "worst"]
    title = f"{board.title}: {group.label}: recall by class in %, {RULES[rule].name}"
    return ClassTable(title, group, heads, rows, partial_notes([group], rule))


def _totals(run: RunFolder, rule: str, domain: str) -> ClassTotals | None:
    return run.class_totals.get((int(run.rules[rule]["round"]), domain))


def _share(totals: ClassTotals | None, label: int) -> float | None:
    """Return the recall of a class in per cent; ``None`` without images of it."""
    if totals is None:
        return None
    return totals.recall(label)


def _recall(runs: Sequence[RunFolder], rule: str, domain: str, label: int) -> Value | None:
    values: list[float] = []
    partial = False
    for run in runs:
        value = _share(_totals(run, rule, domain), label)
        partial = partial or domain in run.rules[rule]["missing"]
        if value is not None:
            values.append(value)
    return Value.of(values, partial=partial)


def _over_domains(runs: Sequence[RunFolder], rule: str, label: int, column: str) -> Value | None:
    """Return the mean or the lowest recall over the domains with images of the class."""
    values: list[float] = []
    partial = False
    for run in runs:
        score = run.rules[rule]
        shares: list[float] = []
        for domain in score["accuracy"]:
            value = _share(_totals(run, rule, domain), label)
            if value is not None:
                shares.append(value)
        partial = partial or bool(score["missing"])
        if shares:
            values.append(statistics.fmean(shares) if column == "average" else min(shares))
    return Value.of(values, partial=partial)


def _mark_lowest(rows: Sequence[ClassRow]) -> None:
    """Mark the lowest whole value of each column, unless all are equal."""
    for row in rows:
        row.lowest = [False] * len(row.cells)
    for column in range(len(rows[0].cells)):
        means: list[float] = []
        for row in rows:
            value = row.cells[column]
            if value is not None and not value.partial:
                means.append(value.mean)
        if not means or min(means) == max(means):
            continue
        for row in rows:
            value = row.cells[column]
            row.lowest[column] = value is not None and not value.partial and value.mean == min(means)


# ---- formats ---------------------------------------------------------------------------------------------------------


def class_sheet(found: ClassTable) -> Sheet:
    """Return a table with the test images of each class; the lowest value of each column is bold and marked."""
    rows: list[list[str]] = []
    strong: set[tuple[int, int]] = set()
    for number, row in enumerate(found.rows):
        rows.append([row.name, *row.texts(), str(row.images)])
        for place, lowest in enumerate(row.lowest, 1):
            if lowest:
                strong.add((number, place))
    heads = ["class", *found.heads, "images"]
    title = found.title
    if len(found.group.runs) > 1:
        title += f"; {OVER_SEEDS}"
    return Sheet(title, heads, rows, strong, [found.explanation, *found.notes])


def class_frame(tables: Sequence[ClassTable]) -> pd.DataFrame:
    """Return one record per class and column.

    Each has ``table``, ``method``, ``class``, ``column``, ``mean`` and ``std`` in per cent, ``seeds``, ``partial``,
    ``lowest`` and ``images`` of the class over all domains. ``mean`` is NaN without test images.
    """
    found: list[dict[str, Any]] = []
    for table in tables:
        for row in table.rows:
            for head, value, lowest in zip(table.heads, row.cells, row.lowest, strict=True):
                entry: dict[str, Any] = {"table": table.title, "method": table.group.label, "class": row.name}
                entry |= {"column": head, "mean": None, "std": None, "partial": False}
                if value is not None:
                    entry |= {"mean": value.mean, "std": value.deviation, "partial": value.partial}
                entry |= {"seeds": len(table.group.runs), "lowest": lowest, "images": row.images}
                found.append(entry)
    return pandas_library().DataFrame(found)
