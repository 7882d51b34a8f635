"""Time and memory that opening a list of images takes: its rows, and none of its images.

    python bench/tables.py            # 1,000, 10,000 and 100,000 rows; half a minute
    python bench/tables.py --dry-run  # 100 rows

Prints a line for each size: seconds until domains and classes are known, and by how much the process has grown.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, not an installed package

from bench.measuring import arguments, start
from common.settings import load_settings

COLUMNS = ("data.image=path", "data.label=label", "data.domain=domain")


def write_list(place: Path, rows: int) -> None:
    """Write a list of images in three domains and ten classes. No image is there."""
    lines = ["path,label,domain"]
    for row in range(rows):
        lines.append(f"scans/{row:07}.png,class_{row % 10},ward_{row % 3}")
    place.write_text("\n".join(lines) + "\n")


def measure(rows: int) -> tuple[float, float]:
    """Return the seconds that opening a list takes, and the MB by which the process grows."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "list.csv"
        write_list(place, rows)
        process = psutil.Process()
        before = process.memory_info().rss
        began = time.perf_counter()
        names = load_settings(["data=table", f"data.path={place}", *COLUMNS]).data.class_names
        seconds = time.perf_counter() - began
        if len(names) != 10:
            raise SystemExit(f"{len(names)} classes were found")
        return seconds, (process.memory_info().rss - before) / 1e6


def main() -> None:
    """Measure what the command line asks for."""
    options = arguments(__doc__).parse_args()
    sizes: tuple[int, ...] = (1_000, 10_000, 100_000)
    if options.dry_run:
        sizes = (100,)
    measure(10)  # imports
    for rows in sizes:
        seconds, grown = measure(rows)
        print(f"{rows:>9,} rows  {seconds:6.2f} s  {grown:7.1f} MB more")


if __name__ == "__main__":
    start(main)
