"""Tables of scores as files: Markdown, LaTeX, CSV and JSON, with the same rows and marks as the terminal's table."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.errors import writing
from common.metrics import PARTIAL, Metric
from common.storage.files import write_text
from common.wire.messages import printable
from server.results.columns import domain_columns, mark_notes, summary_columns
from server.results.groups import Board, Group, cells
from server.results.seeds import Value
from server.results.table import OWN_MODELS, RULES, markdown, measure, print_table, scored_boards, table_cells

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
}


def show_table(folders: Sequence[str], rule: str, form: str, output: Path | None, metric: Metric = "accuracy") -> None:
    """Print the table of the runs in and below ``folders``, or write it to a file.

    Args:
        folders: run folders, or folders with runs below them.
        rule: how runs are scored, see :data:`server.results.table.RULES`.
        form: one of :data:`FORMATS`.
        output: the file; ``None`` prints.
        metric: what the scores are.

    Raises:
        ConfigError: there is nothing to show, or the file cannot be written.
    """
    if form == "rich" and output is None:
        print_table(folders, rule, metric)
        return
    text = rendered_table(scored_boards(folders, metric), rule, "md" if form == "rich" else form)
    if output is None:
        print(text, end="")
        return
    with writing(output, "another --output"):
        write_text(output, text)
    print(f"wrote {output}")


def rendered_table(boards: Sequence[Board], rule: str, form: str) -> str:
    """Return the tables of ``boards`` in a format other than ``rich``."""
    if form == "csv":
        return _csv(records(boards, rule))
    if form == "json":
        return json.dumps({"rule": rule, "tables": [_json_table(board, rule) for board in boards]}, indent=2) + "\n"
    if form == "latex":
        return "\n".join(latex(board, rule) for board in boards)
    return "\n\n".join(markdown(board, rule) for board in boards) + "\n"


def latex(board: Board, rule: str) -> str:
    r"""Return a ``table`` environment for the package booktabs, with the notes that belong to it as its caption.

    The best value of a column is in ``\textbf``.
    """
    heads, texts = table_cells(board.groups, rule, "\0{}\1", spread=True)
    notes = [*mark_notes(board.groups, rule), *board.notes()]
    if any(group.personal for group in board.groups):
        notes.append(OWN_MODELS)
    caption = ". ".join(
        [f"{board.title}: {measure(board)} in %, {RULES[rule].name}, mean ± deviation over seeds", *notes]
    )
    lines = [
        r"\begin{table}",
        rf"  \caption{{{_latex_text(caption)}}}",
        rf"  \begin{{tabular}}{{l{'r' * len(heads)}}}",
        r"    \toprule",
        "    " + " & ".join(map(_latex_text, ["method", *heads])) + r" \\",
        r"    \midrule",
    ]
    for group, row in zip(board.groups, texts, strict=True):
        label = group.label + (" *" if group.personal else "")
        lines.append("    " + " & ".join(map(_latex_text, [label, *row])) + r" \\")
    lines += [r"    \bottomrule", r"  \end{tabular}", r"\end{table}", ""]
    return "\n".join(lines)


def _latex_text(text: str) -> str:
    escaped = "".join(LATEX_CHARACTERS.get(letter, letter) for letter in text)
    return escaped.replace("\0", r"\textbf{").replace("\1", "}")


def records(boards: Sequence[Board], rule: str) -> list[dict[str, Any]]:
    """Return one record per row of the tables and column of scores.

    Each has ``table``, ``method``, ``column``, ``metric``, ``mean`` and ``std`` in per cent, ``seeds`` (how many),
    ``partial``, ``best`` and ``rounds``. ``std`` is ``None`` for one seed. ``best`` is whether the value is the best of
    its column.
    """
    found: list[dict[str, Any]] = []
    for board in boards:
        columns = _columns(board.groups, rule)
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


def _columns(groups: Sequence[Group], rule: str) -> dict[str, str]:
    columns = {f"domain:{name}": name for name in domain_columns(groups, rule)}
    return columns | summary_columns(groups, spread=True)


def _numbers(value: Value | None) -> dict[str, Any]:
    if value is None:
        return {"mean": None, "std": None, "partial": True}
    return {"mean": value.mean, "std": value.deviation, "partial": value.partial}


def _json_table(board: Board, rule: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for group in board.groups:
        entries = [entry for entry in records([board], rule) if entry["method"] == group.label]
        scores = {entry["column"]: {key: entry[key] for key in ("mean", "std", "partial", "best")} for entry in entries}
        rows.append(
            {
                "method": group.label,
                "own_models": group.personal,
                "seeds": sorted(group.seeds),
                "rounds": group.rounds,
                "scores": scores,
                "runs": [str(run.folder) for run in group.runs],
                "state_sha256": [run.state_sha256 for run in group.runs],
            }
        )
    metric = board.groups[0].runs[0].metric
    return {
        "title": board.title,
        "metric": metric,
        "rows": rows,
        "notes": [*mark_notes(board.groups, rule), *board.notes()],
    }


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:  # names may be a stranger's, and a spreadsheet runs formulas
        writer.writerow({key: printable(value) if isinstance(value, str) else value for key, value in row.items()})
    return stream.getvalue()
