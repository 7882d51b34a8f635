"""A study of 12 trials by one, two and four processes that share it: seconds, and whether the table is the same.

    python bench/shared_study.py                                # minutes
    python bench/shared_study.py --dry-run                      # one process and two trials; writes nothing

Each process runs the same ``goldfinch compare`` of FedProx, which has two searched settings, with six trials for each
in batches of four, and a final run. Four trials are the most that can be done at a time. The seconds include the start
of Python. Appends rows to bench/results/system.csv.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, before an installed copy

from bench.measuring import arguments, start
from bench.ratios import Ratio, append, compare, wait_until_quiet

ROOT = Path(__file__).resolve().parent.parent
VARYING = ("seconds", "bytes")
"""Columns of runs.csv that differ from call to call: times, and replies that hold a time as text."""

Lines = list[Mapping[str, str]]


def main() -> None:
    """Measure what the command line asks for."""
    parser = arguments(__doc__)
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--trials", type=int, default=6, help="for each of the two searched settings")
    options = parser.parse_args()
    if options.dry_run:
        options.processes, options.rounds, options.trials = [1], 1, 1
    else:
        wait_until_quiet()
    seconds: dict[str, list[float]] = {}
    tables: list[Lines] = []
    for count in options.processes:
        with tempfile.TemporaryDirectory() as folder:
            name = f"{count} processes"
            seconds[name] = [study(count, Path(folder), options)]
            tables.append(lines_of(Path(folder) / "study" / "runs.csv"))
        print(f"{name}: {seconds[name][0]:.1f} s, load {os.getloadavg()[0]:.1f}", flush=True)
        if tables[-1] != tables[0]:
            raise RuntimeError(f"the runs of {name} are not those of {options.processes[0]}")
    rows: list[Ratio] = []
    shape = f"trials={2 * options.trials} batch=4 rounds={options.rounds}"
    rows += compare("shared study", shape, "s", seconds, f"{options.processes[0]} processes")
    if not options.dry_run:
        append(rows)


def study(count: int, folder: Path, options: argparse.Namespace) -> float:
    """Return the seconds of a study by so many processes.

    Raises:
        RuntimeError: one failed.
    """
    words = [
        sys.executable,
        "-P",
        "-m",
        "goldfinch.cli",
        "compare",
        "--methods",
        "fedprox",
        "data=glyphs",
        "model=small",
    ]
    words += [f"train.rounds={options.rounds}", "train.local_steps=10", "train.device=cpu", "train.threads=1"]
    words += ["protocol.samples=100", "rounds.test_samples=50", "--studies=1", "--runs=1", "--batch=4"]
    words += [f"--trials={options.trials}", f"--output={folder / 'study'}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    begin = time.perf_counter()
    with (folder / "log").open("w") as log:
        started = [subprocess.Popen(words, env=environment, stdout=log, stderr=log) for _ in range(count)]
        codes = [process.wait() for process in started]
    if any(codes):
        raise RuntimeError(f"{' '.join(words)} failed:\n{(folder / 'log').read_text()[-3000:]}")
    return time.perf_counter() - begin


def lines_of(path: Path) -> Lines:
    """Return the lines of a ``runs.csv`` without :data:`VARYING`."""
    found: Lines = []
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            found.append({name: value for name, value in line.items() if name not in VARYING})
    return found


if __name__ == "__main__":
    start(main)
