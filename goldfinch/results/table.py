"""``goldfinch table``: the scores of runs side by side, printed or in a file.

The cells are made in :mod:`goldfinch.results.frames`, and the mean with its deviation in
:mod:`goldfinch.results.seeds`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError, nearest, writing
from common.metrics import METRICS
from common.text import printable, shell_line
from goldfinch.record import RunRecord, find_runs
from goldfinch.results.classes import class_frame, class_sheet, required_class_tables
from goldfinch.results.frames import NUMBERS, column_names, json_table, score_frame, score_sheet
from goldfinch.results.groups import ScoreTable, exported_run, group_runs, rename
from goldfinch.results.overrides import export_command
from goldfinch.results.rows import MANY_ROWS
from goldfinch.results.sheets import pandas_library

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("rich", "md", "latex", "csv", "json")
"""What ``goldfinch table --format`` takes. ``rich`` is the terminal's table."""


def scored_tables(folders: Sequence[str], metric: str = "accuracy", labels: Sequence[str] = ()) -> list[ScoreTable]:
    """Return the tables of the scored runs in and below ``folders``.

    Args:
        folders: run folders, or folders with runs below them.
        metric: the metric of the scores.
        labels: other labels of rows; see :func:`goldfinch.results.groups.rename`.

    Raises:
        ConfigError: no run was scored, no run has the metric, or a label fits no row.
    """
    runs = find_runs(folders)
    return tables_of(runs, metric, labels, unfinished=unfinished_runs(folders, runs), option="--metric")


def unfinished_runs(folders: Sequence[str], ended: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs in and below ``folders`` that are not among those that have ended."""
    known = {run.folder.resolve() for run in ended}
    return [run for run in find_runs(folders, finished=False) if run.folder.resolve() not in known]


def scored_runs(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs that score test images.

    Raises:
        ConfigError: there is none.
    """
    scored = [run for run in runs if run.scored]
    if not runs:
        raise ConfigError("there is no run to show")
    if not scored:
        folders = ", ".join([str(run.folder) for run in runs[:3]])
        raise ConfigError(f"no run in {folders} was scored on test images, so there is nothing to show")
    return scored


def tables_of(
    runs: Sequence[RunRecord],
    metric: str,
    labels: Sequence[str] = (),
    *,
    unfinished: Sequence[RunRecord] = (),
    option: str = "metric",
) -> list[ScoreTable]:
    """Return the tables of the runs that were scored.

    Args:
        runs: the runs.
        metric: the metric of the scores.
        labels: other labels of rows; see :func:`goldfinch.results.groups.rename`.
        unfinished: further runs, which have not ended. A note names them; no row holds them.
        option: how the user named the metric, for messages.

    Raises:
        ConfigError: no run was scored, no run has the metric, or a label fits no row.
    """
    scored = [run.by_metric(metric) for run in scored_runs(runs)]
    check_metric(metric, scored, option)
    left_out = [*unfinished, *[run for run in runs if not run.scored]]
    left_out += [run for run in scored if metric not in run.measures]
    tables = group_runs([run for run in scored if metric in run.measures], left_out=left_out)
    rename([table.rows for table in tables], labels)
    return tables


def check_metric(metric: str, runs: Sequence[RunRecord], option: str) -> None:
    """Check that a run has a metric.

    Args:
        metric: the metric's name.
        runs: the runs.
        option: how the user named it, for messages.

    Raises:
        ConfigError: no run knows the metric.
    """
    known = dict(METRICS)
    for run in runs:
        known |= dict.fromkeys(run.measures, "")
    if metric not in known:
        more = "runs with rounds.scores=true have those of confidence, such as auroc"
        raise ConfigError(f"{option} {metric}: {nearest(metric, known)}; {more}")


def check_columns(columns: Sequence[str], tables: Sequence[ScoreTable], rule: str, form: str) -> None:
    """Check the columns that ``--columns`` names.

    Args:
        columns: their names; none of them is right, too.
        tables: the tables.
        rule: how runs are scored.
        form: one of :data:`FORMATS`.

    Raises:
        ConfigError: no table has a column, a column is there twice, or the format holds all of them.
    """
    known = column_names(tables, rule)
    for place, name in enumerate(columns):
        if name not in known:
            raise ConfigError(f"--columns {name}: no such column; {nearest(name, known)}")
        if name in columns[:place]:
            raise ConfigError(f"--columns {','.join(columns)}: {name} is there twice; leave it out")
    if columns and form in ("csv", "json"):
        raise ConfigError(f"--columns chooses what rich, md and latex show; {form} holds all columns: leave it out")


# ---- scores ----------------------------------------------------------------------------------------------------------


def show_table(
    folders: Sequence[str],
    rule: str = "final",
    form: str = "rich",
    output: Path | None = None,
    metric: str = "accuracy",
    labels: Sequence[str] = (),
    columns: Sequence[str] = (),
) -> None:
    """Print the tables of the runs in and below ``folders``, one per data set, protocol and model, or write them.

    Args:
        folders: run folders, or folders with runs below them.
        rule: how runs are scored, see :data:`common.metrics.RULES`.
        form: one of :data:`FORMATS`.
        output: the file; ``None`` prints.
        metric: the metric of the scores.
        labels: other labels of rows; see :func:`goldfinch.results.groups.rename`.
        columns: the columns to show, see :func:`goldfinch.results.frames.column_names`; none of them shows all.

    Raises:
        ConfigError: there is nothing to show, a column is unknown, or the file cannot be written.
    """
    tables = scored_tables(folders, metric, labels)
    check_columns(columns, tables, rule, form)
    if form == "csv":  # which has no notes
        for table in tables:
            for note in table.left_out_notes():
                print(note, file=sys.stderr)
    if form != "rich" or output is not None:
        _write(table_text(tables, rule, form, columns), output)
        return
    for table in tables:
        score_sheet(table, rule, columns=columns).show()
        run = exported_run(table.rows, rule)
        if run is not None:
            print(f"export its model: {export_command(run)}\n")
    if sum(len(table.rows) for table in tables) >= MANY_ROWS:
        for folder in folders:
            print(smaller_tables(Path(folder), tables), end="")


def table_text(tables: Sequence[ScoreTable], rule: str, form: str, columns: Sequence[str] = ()) -> str:
    """Return the tables of ``tables`` in a format; a file has no colours, so ``rich`` is Markdown.

    Args:
        tables: the tables.
        rule: how runs are scored.
        form: one of :data:`FORMATS`.
        columns: the columns to show in Markdown and LaTeX; none of them shows all.
    """
    pandas = pandas_library()
    if form == "csv":
        frames = [score_frame(table, rule)[list(NUMBERS)] for table in tables]
        return csv_text(pandas.concat(frames))
    if form == "json":
        contents = [json_table(table, rule) for table in tables]
        return json.dumps({"rule": rule, "tables": contents}, indent=2) + "\n"
    texts: list[str] = []
    for table in tables:
        sheet = score_sheet(table, rule, spread=form == "latex", columns=columns)
        if form != "latex":
            sheet = replace(sheet, notes=[*sheet.notes, f"Code: {', '.join(table.codes)}."])
        texts.append(sheet.written(form))
    return "\n\n".join(texts) + "\n"


def csv_text(frame: pd.DataFrame) -> str:
    """Return a frame as CSV in which a spreadsheet finds no formula."""
    safe = frame.copy()
    for column in safe.columns:
        safe[column] = safe[column].map(_printable)
    return str(safe.to_csv(index=False, lineterminator="\n"))


def _printable(value: Any) -> Any:
    """Return a text without what a spreadsheet would run as a formula; a name may come from elsewhere."""
    if isinstance(value, str):
        return printable(value)
    return value


def _write(text: str, output: Path | None) -> None:
    if output is None:
        print(text, end="")
        return
    from common.storage import write_text  # imports torch

    with writing(output, "another --output"):
        write_text(output, text)
    print(f"wrote {output}")


def smaller_tables(folder: Path, tables: Sequence[ScoreTable]) -> str:
    """Return a text that names the folders directly in ``folder`` which hold several of the runs; else an empty one.

    Args:
        folder: a folder with runs below it.
        tables: the tables that were shown.
    """
    place = folder.resolve()
    counts: Counter[str] = Counter()
    for table in tables:
        for run in table.runs:
            below = run.folder.resolve()
            if place in below.parents:
                counts[below.relative_to(place).parts[0]] += 1
    several = [(name, count) for name, count in counts.items() if count > 1]
    if len(counts) < 2 or not several:
        return ""
    lines = [f"{folder} holds runs of {len(counts)} folders. A table of one of them:\n"]
    for name, count in several:
        lines.append(f"  {shell_line(['goldfinch', 'table', folder / name])}   # {count} runs\n")
    return "".join(lines)


# ---- recall by class -------------------------------------------------------------------------------------------------


def show_classes(folders: Sequence[str], rule: str, form: str, output: Path | None, labels: Sequence[str] = ()) -> None:
    """Print the recall of each class by domain, a table for each row of the table of scores, or write it to a file.

    Args:
        folders: run folders, or folders with runs below them.
        rule: how runs are scored; not ``last_n``.
        form: one of :data:`FORMATS`.
        output: the file; ``None`` prints.
        labels: other labels of rows; see :func:`goldfinch.results.groups.rename`.

    Raises:
        ConfigError: there is nothing to show, or the file cannot be written.
    """
    tables = required_class_tables(scored_tables(folders, labels=labels), rule)
    if form in ("csv", "json"):
        frame = class_frame(tables)
        text = csv_text(frame)
        if form == "json":
            records = json.loads(frame.to_json(orient="records"))
            text = json.dumps({"rule": rule, "recalls": records}, indent=2) + "\n"
        _write(text, output)
        return
    sheets = [class_sheet(table) for table in tables]
    if form == "rich" and output is None:
        for sheet in sheets:
            sheet.show()
        return
    _write("\n\n".join([sheet.written(form) for sheet in sheets]) + "\n", output)
