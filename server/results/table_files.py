"""Tables of scores as Markdown, LaTeX, CSV and JSON, with the rows and marks of the terminal's table."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.errors import writing
from common.metrics import PARTIAL, RULES
from common.wire.messages import printable
from server.results.classes import (
    LOWEST,
    ClassTable,
    class_records,
    markdown_classes,
    render_classes,
    required_class_tables,
)
from server.results.columns import domain_columns, mark_notes, summary_columns
from server.results.groups import Board, cells
from server.results.seeds import Value
from server.results.table import (
    OWN_MODELS,
    has_own_models,
    markdown,
    measure,
    print_table,
    print_whole,
    scored_boards,
    starred_label,
    table_cells,
)

FORMATS = ("rich", "md", "latex", "csv", "json")
"""What ``goldfinch table --format`` takes. ``rich`` is the terminal's table."""

LATEX_CHARACTERS = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    PARTIAL: r"$^\dagger$",
    "°": r"$^\circ$",
    LOWEST: r"$\downarrow$",
}


def show_table(folders: Sequence[str], rule: str, form: str, output: Path | None, metric: str = "accuracy") -> None:
    """Print the table of the runs in and below ``folders``, or write it to a file.

    Args:
        folders: run folders, or folders with runs below them.
        rule: how runs are scored, see :data:`common.metrics.RULES`.
        form: one of :data:`FORMATS`.
        output: the file; ``None`` prints.
        metric: the metric of the scores.

    Raises:
        ConfigError: there is nothing to show, or the file cannot be written.
    """
    if form == "rich" and output is None:
        print_table(folders, rule, metric)
        return
    if form == "rich":  # a file has no colours
        form = "md"
    _write(rendered_table(scored_boards(folders, metric), rule, form), output)


def _write(text: str, output: Path | None) -> None:
    if output is None:
        print(text, end="")
        return
    from common.storage import write_text  # imports torch

    with writing(output, "another --output"):
        write_text(output, text)
    print(f"wrote {output}")


def show_classes(folders: Sequence[str], rule: str, form: str, output: Path | None) -> None:
    """Print the recall of each class by domain, a table for each row of the table of scores, or write it to a file.

    Args:
        folders: run folders, or folders with runs below them.
        rule: how runs are scored; not ``last_n``.
        form: one of :data:`FORMATS`.
        output: the file; ``None`` prints.

    Raises:
        ConfigError: there is nothing to show, or the file cannot be written.
    """
    tables = required_class_tables(scored_boards(folders), rule)
    if form == "rich" and output is None:
        for table in tables:
            print_whole(render_classes(table))
        return
    _write(_rendered_classes(tables, rule, form), output)


def _rendered_classes(tables: Sequence[ClassTable], rule: str, form: str) -> str:
    if form == "csv":
        return _csv(class_records(tables))
    if form == "json":
        return json.dumps({"rule": rule, "recalls": class_records(tables)}, indent=2) + "\n"
    if form == "latex":
        return "\n".join([_latex_classes(table) for table in tables])
    return "\n\n".join([markdown_classes(table) for table in tables]) + "\n"


def _latex_classes(table: ClassTable) -> str:
    caption = ". ".join([f"{table.title}, mean ± deviation over seeds", table.explanation, *table.notes])
    rows = [[row.name, *row.texts("\0{}\1"), str(row.images)] for row in table.rows]
    return _latex_table(caption, ["class", *table.heads, "images"], rows)


def rendered_table(boards: Sequence[Board], rule: str, form: str) -> str:
    """Return the tables of ``boards`` in a format other than ``rich``."""
    if form == "csv":
        return _csv(records(boards, rule))
    if form == "json":
        tables = [_json_table(board, rule) for board in boards]
        return json.dumps({"rule": rule, "tables": tables}, indent=2) + "\n"
    if form == "latex":
        return "\n".join([latex(board, rule) for board in boards])
    return "\n\n".join([markdown(board, rule) for board in boards]) + "\n"


def latex(board: Board, rule: str) -> str:
    r"""Return a ``table`` environment for the package booktabs; the notes are in its caption.

    The best value of a column is in ``\textbf``.
    """
    heads, texts = table_cells(board.groups, rule, "\0{}\1", spread=True)
    title = f"{board.title}: {measure(board)}, {RULES[rule].name}, mean ± deviation over seeds"
    caption = [title, *mark_notes(board.groups, rule), *board.notes()]
    if has_own_models(board):
        caption.append(OWN_MODELS)
    rows: list[list[str]] = []
    for group, row in zip(board.groups, texts, strict=True):
        rows.append([starred_label(group), *row])
    return _latex_table(". ".join(caption), ["method", *heads], rows)


def _latex_table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [
        r"\begin{table}",
        rf"  \caption{{{_latex_text(caption)}}}",
        rf"  \begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}",
        r"    \toprule",
        _latex_row(heads),
        r"    \midrule",
    ]
    for row in rows:
        lines.append(_latex_row(row))
    lines += [r"    \bottomrule", r"  \end{tabular}", r"\end{table}", ""]
    return "\n".join(lines)


def _latex_row(cells: Sequence[str]) -> str:
    return "    " + " & ".join(map(_latex_text, cells)) + r" \\"


def _latex_text(text: str) -> str:
    r"""Escape a text for LaTeX; the characters ``\0`` and ``\1`` begin and end bold text."""
    escaped = "".join([LATEX_CHARACTERS.get(letter, letter) for letter in text])
    return escaped.replace("\0", r"\textbf{").replace("\1", "}")


def records(boards: Sequence[Board], rule: str) -> list[dict[str, Any]]:
    """Return one record per row of the tables and column of scores.

    Each has ``table``, ``method``, ``column``, ``metric``, ``mean`` and ``std`` in the metric's unit, ``seeds`` (their
    number), ``partial``, ``best`` and ``rounds``. ``std`` is ``None`` for one seed. ``best`` is whether the value is
    the best of its column.
    """
    found: list[dict[str, Any]] = []
    for board in boards:
        columns: dict[str, str] = {}
        for name in domain_columns(board.groups, rule):
            columns[f"domain:{name}"] = name
        columns |= summary_columns(board.groups, spread=True)
        values = cells(board.groups, list(columns), rule)
        for group, row in zip(board.groups, values, strict=True):
            for (column, head), (value, best) in zip(columns.items(), row, strict=True):
                entry: dict[str, Any] = {"table": board.title, "method": group.label, "column": head}
                entry["metric"] = group.runs[0].metric
                entry |= _numbers(value)
                entry["seeds"] = len(group.values(column, rule))
                entry["best"] = best
                entry["rounds"] = group.rounds
                found.append(entry)
    return found


def _numbers(value: Value | None) -> dict[str, Any]:
    if value is None:
        return {"mean": None, "std": None, "partial": True}
    return {"mean": value.mean, "std": value.deviation, "partial": value.partial}


def _json_table(board: Board, rule: str) -> dict[str, Any]:
    scores: dict[str, dict[str, Any]] = {group.label: {} for group in board.groups}
    for entry in records([board], rule):
        numbers = {key: entry[key] for key in ("mean", "std", "partial", "best")}
        scores[entry["method"]][entry["column"]] = numbers
    rows: list[dict[str, Any]] = []
    for group in board.groups:
        rows.append(
            {
                "method": group.label,
                "own_models": group.personal,
                "seeds": sorted(group.seeds),
                "rounds": group.rounds,
                "scores": scores[group.label],
                "runs": [str(run.folder) for run in group.runs],
                "state_sha256": [run.state_sha256 for run in group.runs],
            }
        )
    return {
        "title": board.title,
        "metric": board.groups[0].runs[0].metric,
        "rows": rows,
        "notes": [*mark_notes(board.groups, rule), *board.notes()],
    }


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        cells = dict(row)
        for key, value in row.items():
            if isinstance(value, str):  # a name may come from elsewhere, and a spreadsheet would run it as a formula
                cells[key] = printable(value)
        writer.writerow(cells)
    return stream.getvalue()
