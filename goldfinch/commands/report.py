"""``goldfinch report --csv``: a run's record as tables for a spreadsheet."""

from collections.abc import Sequence
from pathlib import Path

from common.scores import score_row
from common.storage import write_text
from goldfinch.record import find_runs
from goldfinch.results.frames import record_frame
from goldfinch.results.table import csv_text
from server.run.history import CSV_COPIES, reply_row


def write_csv(folders: Sequence[str]) -> list[Path]:
    """Write ``history.csv`` and ``replies.csv`` into the folder of each run, for a spreadsheet; return their paths.

    The files have a row for each line of ``scores.jsonl`` and ``replies.jsonl`` so far, with the metrics of confusion
    counts in place of the counts. Goldfinch does not read them.

    Args:
        folders: run folders, or folders with runs below them.

    Raises:
        ConfigError: there is no run, or an older version of Goldfinch wrote one.
    """
    written: list[Path] = []
    for run in find_runs(folders, finished=False):
        tables = [map(score_row, run.score_lines), map(reply_row, run.replies)]
        for name, rows in zip(CSV_COPIES, tables, strict=True):
            path = run.folder / name
            write_text(path, csv_text(record_frame(list(rows), ())))
            written.append(path)
    return written
