"""CSV files in bench/results/, to which rows are only added; where a row was measured; cells of tables."""

from __future__ import annotations

import csv
import datetime
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch


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


def mean_and_spread(values: Sequence[float], seeds: int = 0, *, digits: int = 1, sign: str = "") -> str:
    """Return a cell of a table: mean ± standard deviation, a single value as it is, and a dash without values.

    Args:
        values: one for each seed that was run.
        seeds: seeds that the table has; another number of values is marked. 0: never.
        digits: after the decimal point.
        sign: ``+`` writes the sign of positive means too.
    """
    if not values:
        return "-"
    text = f"{statistics.mean(values):{sign}.{digits}f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.{digits}f}"
    if seeds and len(values) != seeds:
        text += f" ({len(values)} of {seeds} seeds)"
    return text


def circumstances() -> dict[str, object]:
    """PyTorch's threads, versions, the checkout's commit and the time, as every row has them."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    return {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": found.stdout.strip() or "unknown",
        "when": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
    }


def cpu_name() -> str:
    """The processor's model name, as Linux gives it."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def read_all(path: Path) -> list[dict[str, str]]:
    """Return the rows of the CSV at ``path`` as text, with any columns; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))
