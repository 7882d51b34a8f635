"""``goldfinch report``: one HTML page of runs, with a figure of the prototypes of each."""

from collections.abc import Sequence
from pathlib import Path

from common.scores import score_row
from common.storage import write_text
from server.plots.figures import rendered
from server.plots.prototypes import sent_figure
from server.results.frames import record_frame
from server.results.report.page import write_report
from server.results.run import RunFolder, find_runs
from server.results.table import csv_text
from server.run.history import CSV_COPIES, reply_row


def report(folders: Sequence[str], output: Path | None = None) -> Path:
    """Write the report on the runs in and below ``folders``, and return its path.

    Args:
        folders: run folders, or folders with runs below them.
        output: the page; ``None`` writes ``report.html`` into the first folder.

    Raises:
        ConfigError: there is no run, or the file cannot be written.
    """
    return write_report(folders, output, _prototypes)


def write_csv(folders: Sequence[str]) -> list[Path]:
    """Write ``history.csv`` and ``replies.csv`` into the folder of each run, for a spreadsheet; return their paths.

    They have a row for each line of ``scores.jsonl`` and ``replies.jsonl`` so far, with the metrics of confusion counts
    in place of the counts. Nothing reads them.

    Args:
        folders: run folders, or folders with runs below them.

    Raises:
        ConfigError: there is no run, or an earlier version wrote one.
    """
    written: list[Path] = []
    for run in find_runs(folders, finished=False):
        tables = [map(score_row, run.all_scores), map(reply_row, run.replies)]
        for name, rows in zip(CSV_COPIES, tables, strict=True):
            path = run.folder / name
            write_text(path, csv_text(record_frame(list(rows), ())))
            written.append(path)
    return written


def _prototypes(run: RunFolder) -> bytes | None:
    """Return the figure of the run's prototypes as PNG; ``None`` if it kept none."""
    figure = sent_figure(run)
    if figure is None:
        return None
    return rendered(figure)
