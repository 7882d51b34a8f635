"""The frame of a table: a pandas DataFrame with one record for each row of runs and each column of scores.

Runs become rows (:mod:`goldfinch.results.rows`), rows become cells here, and every format shows these cells: the
terminal, Markdown, LaTeX, CSV, JSON, the report and the Python interface.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from common.metrics import PARTIAL, RULES
from goldfinch.record import RunRecord
from goldfinch.results.groups import ScoreTable
from goldfinch.results.rows import ScoreRow, best_row, comparable
from goldfinch.results.seeds import Value
from goldfinch.results.sheets import UNSEEN, Sheet, number_text, pandas_library
from goldfinch.results.statistics import FEWEST_TESTED

if TYPE_CHECKING:
    import pandas as pd

OWN_MODELS = "* scored with each client's own model, on its own domain; not ranked with rows of one shared model"

BOUNDS = "bounds, never ranked: each client alone (lower), all clients' images in one place (upper)"

ATTACKED = "under attack: the named clients were hostile, in a simulation"

BEST = "Bold: the best; the 95 % interval of its paired difference over seeds from every other row excludes 0"

NO_BEST = "Nothing is bold: rows are compared if all have the same seeds"

OVER_SEEDS = "mean ± standard deviation over seeds"

NUMBERS = ("table", "method", "column", "metric", "mean", "std", "partial", "seeds", "best", "rounds")
"""Columns of :func:`score_frame` that CSV holds."""

SCORE = ["metric", "mean", "std", "partial", "best"]
"""Columns of :func:`score_frame` that JSON holds of each score."""

Values = Literal["text", "mean", "std"]


# ---- what a row tells besides its scores -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Fact:
    """A column of a table that holds no score. Another one in :data:`FACTS` is in every format but CSV.

    CSV has a line for each score: its columns are :data:`NUMBERS`, which :func:`score_frame` fills.

    Args:
        name: its head, and its name in JSON and in Python.
        value: computes it for a row: what JSON holds.
        text: writes it: what tables print.
    """

    name: str
    value: Callable[[ScoreRow[RunRecord]], Any]
    text: Callable[[ScoreRow[RunRecord]], str]


def _rounds(row: ScoreRow[RunRecord]) -> str:
    skipped = statistics.fmean([len(run.facts.skipped) for run in row.runs])  # seeds may differ
    if skipped:
        return f"{row.rounds_shown} ({skipped:g} skipped)"
    return str(row.rounds_shown)


FACTS = (
    Fact("rounds", lambda row: row.rounds_shown, _rounds),
    Fact("seeds", lambda row: row.seeds, lambda row: ",".join(map(str, row.seeds))),
    Fact("MB", lambda row: row.megabytes, lambda row: number_text(row.megabytes, 1)),
)
"""The columns after the scores."""


def record_frame(rows: Sequence[Mapping[str, Any]], numbers: Collection[str]) -> pd.DataFrame:
    """Return rows as a DataFrame.

    Args:
        rows: the rows.
        numbers: columns that hold numbers, besides those that begin with ``seconds`` or ``bytes``; an empty text
            becomes NaN.
    """
    pandas = pandas_library()
    table = pandas.DataFrame(list(rows))
    for column in table.columns:
        if column in numbers or column.startswith(("seconds", "bytes")):
            table[column] = pandas.to_numeric(table[column])
    return table


# ---- columns ---------------------------------------------------------------------------------------------------------


def domain_columns(rows: Sequence[ScoreRow[RunRecord]], rule: str) -> list[str]:
    """Return the domains of the rows' scores in the order they appear; those that no row scored come last."""
    scored: dict[str, None] = {}
    missing: dict[str, None] = {}
    for row in rows:
        for run in row.runs:
            if rule in run.rules:
                scored |= dict.fromkeys(run.rules[rule]["accuracy"])
                missing |= dict.fromkeys(run.rules[rule]["missing"])
    return list(scored | missing)


def domain_heads(rows: Sequence[ScoreRow[RunRecord]], domains: Sequence[str]) -> list[str]:
    """Return the heads of the domains' columns; a domain that no row trained on is marked ``(unseen)``."""
    heads = []
    for name in domains:
        head = name
        if all(name in row.unseen for row in rows):
            head = f"{name} (unseen)"
        heads.append(head)
    return heads


def summary_columns(rows: Sequence[ScoreRow[RunRecord]]) -> list[str]:
    """Return the columns after the domains.

    Runs with unseen domains have an average over the domains that clients trained on, and one over the others. Runs
    with validation samples have the average on these.
    """
    keys: set[str] = set()
    for row in rows:
        for run in row.runs:
            for score in run.rules.values():
                keys.update(score)
    columns = ["average", "worst", "spread"]
    if "unseen_average" in keys:
        columns += ["seen_average", "unseen_average"]
    if "validation" in keys:
        columns.append("validation")
    return columns


def column_names(tables: Sequence[ScoreTable], rule: str) -> list[str]:
    """Return the names of the tables' columns as ``goldfinch table --columns`` takes them, each once."""
    names: dict[str, None] = {}
    for table in tables:
        names |= dict.fromkeys(domain_columns(table.rows, rule))
    for table in tables:
        for column in summary_columns(table.rows):
            names[column.removesuffix("_average")] = None
    for fact in FACTS:
        names[fact.name] = None
    return list(names)


# ---- the frame -------------------------------------------------------------------------------------------------------


def score_frame(table: ScoreTable, rule: str) -> pd.DataFrame:
    """Return the cells of a table: one record for each row, and in it for each column of scores.

    - ``table``, ``method``, ``column``, ``metric``: what the number is, and ``head``, the column's printed head;
    - ``mean``, ``std``: in the metric's unit; NaN without a score, and for the deviation of one seed;
    - ``partial``: whether a score lacks domains of its run, or a run lacks the score;
    - ``seeds``: the number of runs with the score; ``rounds``: those of the row; ``key``: the column's name in a row;
    - ``best``: see :func:`goldfinch.results.rows.best_row`;
    - ``mark``, ``text``: the marks behind the number, and both as printed; ``digits`` are those after the point.
    """
    rows = table.rows
    domains = domain_columns(rows, rule)
    heads = {f"domain:{name}": head for name, head in zip(domains, domain_heads(rows, domains), strict=True)}
    for column in summary_columns(rows):
        heads[column] = column.removesuffix("_average")
    if "validation" in heads:
        heads["validation"] = _validation_head(rows)
    best = {column: best_row(rows, column, rule) for column in heads}
    records: list[dict[str, Any]] = []
    for row in rows:
        for column, head in heads.items():
            value = row.value(column, rule)
            record: dict[str, Any] = {"table": table.title, "method": row.label}
            record |= {"column": column.removeprefix("domain:").removesuffix("_average"), "head": head}
            metric = row.runs[0].metric
            if column == "validation":
                metric = row.runs[0].validation_metric
            record |= {"metric": metric, "seeds": len(row.scores(column, rule)), "key": column}
            record |= {"rounds": row.rounds_shown, "best": row is best[column]}
            records.append(record | _cell(value, unseen_mark(rows, row, column)))
    return pandas_library().DataFrame(records).astype({"mean": float, "std": float})


def _validation_head(rows: Sequence[ScoreRow[RunRecord]]) -> str:
    """Return the head of the scores on validation samples; it names their metric if that of the table is another."""
    labels = list(dict.fromkeys(row.measure_of("validation").label for row in rows))
    if labels == [rows[0].measure_of("average").label]:
        return "validation"
    return f"validation ({', '.join(labels)})"


def _cell(value: Value | None, unseen: str) -> dict[str, Any]:
    """Return the entries of a cell that are its value's."""
    if value is None:
        return {"mean": None, "std": None, "partial": True, "mark": "", "text": "-", "digits": 2}
    mark = PARTIAL * value.partial + unseen
    text = str(value)
    if unseen:
        text += f" {unseen}"
    entries = {"mean": value.mean, "std": value.deviation, "partial": value.partial}
    return {**entries, "mark": mark, "text": text, "digits": value.digits}


def unseen_mark(rows: Sequence[ScoreRow[RunRecord]], row: ScoreRow[RunRecord], column: str) -> str:
    """Return the mark of a row that has not trained on a column's domain where another has; empty otherwise."""
    domain = column.removeprefix("domain:")
    if domain == column or domain not in row.unseen:
        return ""
    if all(domain in other.unseen for other in rows):
        return ""
    return UNSEEN


def partial_notes(rows: Sequence[ScoreRow[RunRecord]], rule: str) -> list[str]:
    """Return one line for each row with a partial score: what it lacks, and since when."""
    lines: list[str] = []
    for row in rows:
        missing = row.missing(rule)
        if missing:
            lines.append(f"{PARTIAL} partial, not ranked: {row.label}: {'; '.join(missing)}")
    return lines


def table_notes(table: ScoreTable, frame: pd.DataFrame, rule: str) -> list[str]:
    """Return the notes below a table: what is partial, what the marks in its cells mean, and what rows differ in."""
    lines = partial_notes(table.rows, rule)
    if frame["mark"].str.contains(UNSEEN).any():
        lines.append(f"{UNSEEN} on a domain that no client of this row trained on")
    if frame["best"].any():
        lines.append(BEST)
    elif _has_other_seeds(table.rows):
        lines.append(NO_BEST)
    if any(run.attack for run in table.runs):
        lines.append(ATTACKED)
    if table.bounds:
        lines.append(f"{', '.join(table.bounds)}: {BOUNDS}")
    return [*lines, *table.notes()]


def _has_other_seeds(rows: Sequence[ScoreRow[RunRecord]]) -> bool:
    """Return whether rows have enough seeds for a test, but not the same ones, so that no row is the best."""
    seeds = {tuple(row.seeds) for row in comparable(rows)}
    return len(seeds) > 1 and max(map(len, seeds)) >= FEWEST_TESTED


def wide_frame(table: ScoreTable, rule: str, values: Values = "text") -> pd.DataFrame:
    """Return a table as it is printed: a row for each of its rows, a column for each domain and summary.

    Args:
        table: the table.
        rule: how runs are scored.
        values: ``text`` gives the printed cells; ``mean`` and ``std`` give numbers, NaN for a partial score.
    """
    frame = score_frame(table, rule)
    if values != "text":
        frame.loc[frame["partial"], values] = float("nan")
    heads = dict(zip(frame["key"], frame["head"], strict=True))
    wide = frame.pivot(index="method", columns="key", values=values)
    wide = wide.loc[[row.label for row in table.rows], list(heads)]
    return wide.rename(columns=heads).rename_axis(columns=None)


def wide_table(tables: Sequence[ScoreTable], rule: str, values: Values = "text") -> pd.DataFrame:
    """Return the tables of :func:`wide_frame` as one, with :data:`FACTS`, and with the notes in ``attrs``.

    Args:
        tables: the tables; if there are several, the first level of the index names them.
        rule: how runs are scored.
        values: see :func:`wide_frame`.
    """
    frames: dict[str, pd.DataFrame] = {}
    notes: list[str] = []
    for table in tables:
        frame = wide_frame(table, rule, values).drop(columns="spread")
        for fact in FACTS:
            frame[fact.name] = [_for_a_cell(fact.value(row)) for row in table.rows]
            if values == "text" and frame[fact.name].dtype.kind == "f":
                frame[fact.name] = [fact.text(row) for row in table.rows]
        frames[table.title] = frame
        own_models = [row.label for row in table.rows if row.personal]
        if own_models:
            notes.append(f"{', '.join(own_models)}: {OWN_MODELS.removeprefix('* ')}")
        for note in table_notes(table, score_frame(table, rule), rule):
            if note not in notes and note not in (BEST, NO_BEST):  # nothing in a DataFrame is bold
                notes.append(note)
    joined = pandas_library().concat(frames, names=["table", "method"])
    if len(tables) == 1:
        joined = joined.droplevel("table")
    joined.attrs["notes"] = notes
    joined.attrs["rule"] = rule
    return joined


def _for_a_cell(value: Any) -> Any:
    """Return a value of a row; a list becomes a text."""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return value


# ---- as texts --------------------------------------------------------------------------------------------------------


def score_sheet(table: ScoreTable, rule: str, *, spread: bool = False, columns: Sequence[str] = ()) -> Sheet:
    """Return a table with its rounds, seeds and megabytes, and with its notes.

    Args:
        table: the table.
        rule: how runs are scored.
        spread: whether the standard deviation between domains is a column.
        columns: names of :func:`column_names`, in the order in which they are shown; none of them shows all. A column
            that this table does not have is left out.
    """
    frame = score_frame(table, rule)
    if columns:
        frame = frame[frame["column"].isin(columns)]
    elif not spread:
        frame = frame[frame["key"] != "spread"]
    facts = [fact.name for fact in FACTS]
    heads = ["method", *dict(zip(frame["key"], frame["head"], strict=True)).values(), *facts]
    rows: list[list[str]] = []
    strong: set[tuple[int, int]] = set()
    for number, row in enumerate(table.rows):
        cells = frame[frame["method"] == row.label]
        for place, best in enumerate(cells["best"], 1):
            if best:
                strong.add((number, place))
        rows.append([starred_label(row), *cells["text"], *[fact.text(row) for fact in FACTS]])
    notes = table_notes(table, frame, rule)
    if any(row.personal for row in table.rows):
        notes.insert(0, OWN_MODELS)
    title = f"{table.title}: {measure(table)}, {RULES[rule].name}"
    if any(len(row.runs) > 1 for row in table.rows):
        title += f"; {OVER_SEEDS}"
    sheet = Sheet(title, heads, rows, strong, notes)
    if not columns:
        return sheet
    names = [*dict(zip(frame["key"], frame["column"], strict=True)).values(), *facts]
    return sheet.with_columns([0, *[1 + names.index(name) for name in columns if name in names]])


def measure(table: ScoreTable) -> str:
    """Return the name and the unit of the table's metric, such as ``macro F1 in %``."""
    return table.rows[0].runs[0].measure.title


def starred_label(row: ScoreRow[RunRecord]) -> str:
    """Return a row's label; with a star if it is scored with clients' own models."""
    return row.label + " *" * row.personal


def starred_bounds(rows: Sequence[ScoreRow[RunRecord]]) -> dict[str, str]:
    """Return ``lower`` or ``upper`` by the label of each row that is a bound, as :func:`starred_label` writes it."""
    return {starred_label(row): row.bound for row in rows if row.bound}


def json_table(table: ScoreTable, rule: str) -> dict[str, Any]:
    """Return a table as containers that JSON can write."""
    frame = score_frame(table, rule)
    rows: list[dict[str, Any]] = []
    for row in table.rows:
        cells = frame[frame["method"] == row.label].set_index("column")[SCORE]
        rows.append(
            {
                "method": row.label,
                "own_models": row.personal,
                "bound": row.bound,
                "attack": row.runs[0].attack,
                **{fact.name: fact.value(row) for fact in FACTS},
                "scores": cells.astype(object).where(cells.notna(), None).to_dict("index"),
                "runs": [str(run.folder) for run in row.runs],
                "state_sha256": [run.state_sha256 for run in row.runs],
            }
        )
    notes = table_notes(table, frame, rule)
    return {"title": table.title, "metric": table.rows[0].runs[0].metric, "rows": rows, "notes": notes}
