"""Tables of recall: the share of the test images of each class that are recognised, by class and domain."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError
from common.metrics import RULES, ClassTotals, Measure
from goldfinch.record import RunRecord
from goldfinch.results.frames import OVER_SEEDS, domain_columns, domain_heads, partial_notes
from goldfinch.results.groups import ScoreTable
from goldfinch.results.rows import KnownRun, ScoreRow
from goldfinch.results.seeds import Value
from goldfinch.results.sheets import LOWEST, Sheet, pandas_library

if TYPE_CHECKING:
    import pandas as pd

ROUND_RULES = ("final", "best_round", "validated")
"""The rules that choose one round, which has confusion counts; ``last_n`` is a mean of several."""


RECALL = Measure("recall")


@dataclass
class ClassTable:
    """The recalls of one row of a table.

    Args:
        title: the table and the row.
        row: the row.
        heads: the heads of the columns: each domain, ``average`` and ``worst`` over domains.
        columns: the same, as columns of rows.
        classes: a row for each class in the data set's order; its score is the recall of the class in per cent, by
            ``rule``. There is none in a column without test images of the class.
        rule: how runs are scored.
        images: the test images of each class over all domains of the first run.
        notes: what a partial score lacks.
    """

    title: str
    row: ScoreRow[RunRecord]
    heads: list[str]
    columns: list[str]
    classes: list[ScoreRow[KnownRun]]
    rule: str
    images: list[int]
    notes: list[str]

    @cached_property
    def lowest(self) -> list[list[bool]]:
        """Whether each cell of each class is the lowest whole one of its column; none is if all are equal."""
        by_column: list[list[bool]] = []
        for column in self.columns:
            values = [each.value(column, self.rule) for each in self.classes]
            by_column.append(_lowest(values))
        return [list(marks) for marks in zip(*by_column, strict=True)]

    def texts(self, number: int) -> list[str]:
        """Return the cells of a class as texts; the lowest value of a column is marked."""
        texts: list[str] = []
        for column, lowest in zip(self.columns, self.lowest[number], strict=True):
            text = str(self.classes[number].value(column, self.rule) or "-")
            if lowest:
                text += f" {LOWEST}"
            texts.append(text)
        return texts

    @property
    def explanation(self) -> str:
        """What the numbers and the mark are."""
        return (
            f"The share of the test images of a class that are recognised; {LOWEST} is the lowest of a column, - a "
            "class without test images"
        )


def class_tables(table: ScoreTable, rule: str) -> list[ClassTable]:
    """Return a table for each row of a table, if its runs have confusion counts of the rule's round.

    Args:
        table: the table.
        rule: one of :data:`ROUND_RULES`.
    """
    tables: list[ClassTable] = []
    for row in table.rows:
        runs = [run for run in row.runs if rule in run.rules]
        if runs and all(_has_counts(run, rule) for run in runs):
            tables.append(_class_table(table, row, runs, rule))
    return tables


def required_class_tables(tables: Sequence[ScoreTable], rule: str) -> list[ClassTable]:
    """Return the tables of all tables.

    Raises:
        ConfigError: the rule is a mean of rounds, or a row lacks confusion counts.
    """
    if rule not in ROUND_RULES:
        raise ConfigError(
            f"--classes --rule {rule}: recall by class is that of one round; choose --rule {', '.join(ROUND_RULES)}"
        )
    all_tables: list[ClassTable] = []
    for table in tables:
        present = class_tables(table, rule)
        shown = [each.row for each in present]
        for row in table.rows:
            if row not in shown:
                raise ConfigError(
                    f"{row.runs[0].folder} has no confusion counts of {RULES[rule].name}: leave the run out, or "
                    "choose another --rule"
                )
        all_tables += present
    return all_tables


def _has_counts(run: RunRecord, rule: str) -> bool:
    score = run.rules[rule]
    if "round" not in score:  # a summary from elsewhere
        return False
    return all((int(score["round"]), domain) in run.class_totals for domain in score["accuracy"])


def _class_table(table: ScoreTable, row: ScoreRow[RunRecord], runs: Sequence[RunRecord], rule: str) -> ClassTable:
    domains = domain_columns([row], rule)
    classes: list[ScoreRow[KnownRun]] = []
    images: list[int] = []
    for label, name in enumerate(runs[0].class_names):
        classes.append(ScoreRow(name, [_recalls(run, rule, label) for run in runs]))
        counts = [_totals(runs[0], rule, domain) for domain in domains]
        images.append(sum(totals.true[label] for totals in counts if totals is not None))
    heads = [*domain_heads([row], domains), "average", "worst"]
    columns = [*[f"domain:{name}" for name in domains], "average", "worst"]
    title = f"{table.title}: {row.label}: recall by class in %, {RULES[rule].name}"
    return ClassTable(title, row, heads, columns, classes, rule, images, partial_notes([row], rule))


def _totals(run: RunRecord, rule: str, domain: str) -> ClassTotals | None:
    return run.class_totals.get((int(run.rules[rule]["round"]), domain))


def _recalls(run: RunRecord, rule: str, label: int) -> KnownRun:
    """Return a run as if the recall of one class were its score: in the domains that have images of the class."""
    score = run.rules[rule]
    recalls: dict[str, float] = {}
    for domain in score["accuracy"]:
        totals = _totals(run, rule, domain)
        recall = None
        if totals is not None:
            recall = totals.recall(label)
        if recall is not None:
            recalls[domain] = recall
    scores: dict[str, Any] = {"accuracy": recalls, "missing": score["missing"]}
    if recalls:
        scores |= {"average": statistics.fmean(recalls.values()), "worst": min(recalls.values())}
    return KnownRun(run.seed, {rule: scores}, RECALL)


def _lowest(values: Sequence[Value | None]) -> list[bool]:
    """Return whether each value is the lowest whole one of its column; none is if all are equal."""
    means = [value.mean for value in values if value is not None and not value.partial]
    if not means or min(means) == max(means):
        return [False] * len(values)
    return [value is not None and not value.partial and value.mean == min(means) for value in values]


# ---- formats ---------------------------------------------------------------------------------------------------------


def class_sheet(table: ClassTable) -> Sheet:
    """Return a table with the test images of each class; the lowest value of each column is bold and marked."""
    rows: list[list[str]] = []
    strong: set[tuple[int, int]] = set()
    for number, each in enumerate(table.classes):
        rows.append([each.label, *table.texts(number), str(table.images[number])])
        for place, lowest in enumerate(table.lowest[number], 1):
            if lowest:
                strong.add((number, place))
    heads = ["class", *table.heads, "images"]
    title = table.title
    if len(table.row.runs) > 1:
        title += f"; {OVER_SEEDS}"
    return Sheet(title, heads, rows, strong, [table.explanation, *table.notes])


def class_frame(tables: Sequence[ClassTable]) -> pd.DataFrame:
    """Return one record per class and column.

    Each has ``table``, ``method``, ``class``, ``column``, ``mean`` and ``std`` in per cent, ``seeds``, ``partial``,
    ``lowest`` and ``images`` of the class over all domains. ``mean`` is NaN without test images.
    """
    records: list[dict[str, Any]] = []
    for table in tables:
        for number, each in enumerate(table.classes):
            for head, column, lowest in zip(table.heads, table.columns, table.lowest[number], strict=True):
                value = each.value(column, table.rule)
                entry: dict[str, Any] = {"table": table.title, "method": table.row.label, "class": each.label}
                entry |= {"column": head, "mean": None, "std": None, "partial": False}
                if value is not None:
                    entry |= {"mean": value.mean, "std": value.deviation, "partial": value.partial}
                entry |= {"seeds": len(table.row.runs), "lowest": lowest, "images": table.images[number]}
                records.append(entry)
    return pandas_library().DataFrame(records)
