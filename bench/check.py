"""Whether the ratios still are what they were: the fast benchmarks against the committed rows of this machine's class.

    make bench-check        # a minute or two on an idle machine
    python bench/check.py --tolerance 0.3

Measures aggregation, the data path and the efficiency of an inline run (processor time) again at small sizes and
compares each ratio with the median of the rows in bench/results/system.csv that have the same subject, variant and
shape and come from the same class of machine: processor, number of cores it may use, PyTorch's threads (one here) and
version. Ends with 1 if a ratio fell by more than the tolerance, or if there is nothing to compare with. Writes no rows;
``--write`` adds what was measured, which is how a new class of machine gets its first rows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, whatever is installed

from bench.aggregation import aggregation
from bench.data_path import data_path
from bench.efficiency import inline
from bench.ratios import RESULTS, Ratio, append, class_of, machine_class, read
from common.models.specs import TorchvisionResNet

MOST_FALL = 0.2


def main() -> None:
    """Measure, compare, and say what fell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tolerance", type=float, default=MOST_FALL, help="largest fall that passes, as a share")
    parser.add_argument("--write", action="store_true", help="append what was measured to the committed rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = committed(read(), machine_class())
    rows = [row for row in measured() if row.ratio is not None and row.variant != row.against]
    if options.write:
        append(rows)
    fallen, compared = judge(rows, known, options.tolerance)
    if not compared:
        print(
            f"nothing to compare with: {RESULTS.name} has no rows of {' / '.join(machine_class())}; "
            "run python bench/check.py --write once on the idle machine and commit the file"
        )
        sys.exit(0 if options.write else 1)
    for line in fallen:
        print(line)
    print(f"{compared} ratios compared with earlier ones of {' / '.join(machine_class())}: {len(fallen)} fell")
    sys.exit(1 if fallen else 0)


def measured() -> list[Ratio]:
    """The fast subset."""
    rows = [*aggregation(10, 5, TorchvisionResNet(18))]
    for case in ("crop", "crop+flip+rotation"):
        rows += data_path(32, case, 512, 5)
    found = inline("small", "fedavg", argparse.Namespace(rounds=5))
    return rows + [row for row in found if row.shape.endswith("cpu")]  # the wall clock is the neighbours' too


def committed(rows: Sequence[dict[str, str]], here: tuple[str, ...]) -> dict[tuple[str, str, str], float]:
    """The median ratio by subject, variant and shape over the rows of a machine class that have an opponent."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if class_of(row) == here and row["ratio"] and row["variant"] != row["against"]:
            found.setdefault((row["subject"], row["variant"], row["shape"]), []).append(float(row["ratio"]))
    return {key: statistics.median(ratios) for key, ratios in found.items()}


def judge(rows: Sequence[Ratio], known: dict[tuple[str, str, str], float], tolerance: float) -> tuple[list[str], int]:
    """A line for each ratio that fell by more than ``tolerance`` of what it was, and how many could be compared."""
    lines, compared = [], 0
    for row in rows:
        before = known.get((row.subject, row.variant, row.shape))
        if before is None or row.ratio is None:
            continue
        compared += 1
        if row.ratio < before * (1 - tolerance):
            lines.append(
                f"{row.subject}, {row.variant}, {row.shape}: the ratio to {row.against} fell from {before:.3f} to "
                f"{row.ratio:.3f}, by {100 * (1 - row.ratio / before):.0f} %; at most {100 * tolerance:g} % may be lost"
            )
    return lines, compared


if __name__ == "__main__":
    main()
