"""The benchmarks' CSV files in bench/results/: rows are only added; :mod:`server.run.history` reads them."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path


def append_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Add ``rows``, which share their columns, to the CSV at ``path``; it is made with a header if there is none.

    Raises:
        ValueError: the file has other columns; nothing was written.
    """
    if not rows:
        return
    columns = list(rows[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    if not new:
        with path.open(newline="") as stream:
            header = next(csv.reader(stream), [])
        if header != columns:
            raise ValueError(f"{path} has the columns {', '.join(header)}; these rows have {', '.join(columns)}")
    with path.open("a", newline="") as stream:
        writer = csv.DictWriter(stream, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)
