"""The board as one HTML page: sortable tables, curves, and for each run its hash, command and log lines."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from server.results.board.record import BoardRecord, Case, FinalRun
from server.results.board.table import (
    HEADS,
    BoardRow,
    BoardTable,
    Overall,
    cases_of,
    description,
    notes,
    overall_note,
    row_cells,
    tables_of,
)
from server.results.report.page import content_hash
from server.results.templates import templates

HERE = Path(__file__).resolve().parent
REPORT = HERE.parent / "report"


def render_board(
    records: Sequence[BoardRecord], overalls: Sequence[Overall], pictures: Mapping[str, Sequence[str]]
) -> str:
    """Return the page as HTML. Its content security policy forbids the browser to fetch anything.

    Args:
        records: the boards.
        overalls: ranks over data sets.
        pictures: for each title of ``overalls``, SVG pictures as data URIs.
    """
    style = (REPORT / "style.css").read_text() + (HERE / "board.css").read_text()
    script = (HERE / "board.js").read_text()
    boards: list[dict[str, Any]] = []
    for record in records:
        boards.append({"record": record, "description": description(record), "tables": tables_of(record)})
    policy = [
        "default-src 'none'",
        f"style-src {content_hash(style)}",
        f"script-src {content_hash(script)}",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    page = templates(HERE)
    page.globals.update(
        heads=HEADS,
        row_cells=row_cells,
        run_cells=run_cells,
        studies=studies,
        curves=curves,
        notes=notes,
        anchor=anchor,
        overall_note=overall_note,
    )
    content = {
        "boards": boards,
        "overalls": overalls,
        "pictures": pictures,
        "style": Markup(style),  # noqa: S704  # our own files
        "script": Markup(script),  # noqa: S704
        "policy": "; ".join(policy),
    }
    return page.get_template("board.html").render(content)


def anchor(record: BoardRecord, row: BoardRow, case: str, seed: int | str) -> str:
    """Return the id of a place on the page: of one final run, or of a method's studies (``seed`` is ``studies``)."""
    text = f"{record.name}-{row.row.method}-{case}-{seed}"
    return re.sub(r"[^\w-]", "_", text)


def run_cells(table: BoardTable, row: BoardRow) -> list[tuple[str, FinalRun]]:
    """Return a row's final runs with their cases, by case and then by seed."""
    found: list[tuple[str, FinalRun]] = []
    for case in cases_of(table.record, table.kind):
        for run in row.row.cases.get(case, Case()).runs:
            found.append((case, run))
    return found


def studies(table: BoardTable, row: BoardRow) -> list[tuple[str, Case]]:
    """Return a row's cases by name."""
    found: list[tuple[str, Case]] = []
    for case in cases_of(table.record, table.kind):
        if case in row.row.cases:
            found.append((case, row.row.cases[case]))
    return found


def curves(table: BoardTable) -> list[dict[str, Any]]:
    """Return the mean curve of each row that has runs: its name and ``[round, per cent]`` points, ascending.

    A round is in a curve if every run of the row scored it.
    """
    found: list[dict[str, Any]] = []
    for row in table.rows:
        runs = [run for _, run in run_cells(table, row)]
        if not runs:
            continue
        points: list[list[float]] = []
        for number in sorted(runs[0].curve):
            values = [run.curve[number] for run in runs if number in run.curve]
            if len(values) == len(runs):
                points.append([number, round(statistics.fmean(values), 2)])
        found.append({"name": row.name, "points": points})
    return found
