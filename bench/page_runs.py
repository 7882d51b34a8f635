"""Keep the runs that a page's numbers are read from: a row for each in docs/results/runs.csv.

    goldfinch sweep experiment=demo engine=inline method=fedavg,fpl seed=0,1,2 --output outputs/seeds
    python bench/page_runs.py README.md outputs/seeds   # in place of the rows that the page had
    python bench/page_runs.py --dry-run                 # one run of one round; writes nothing

tests/reproduce/test_recorded_runs.py compares the pages with the rows, and repeats the cheapest run of each page.
"""

from __future__ import annotations

import datetime
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, not an installed package

import goldfinch as gf
from bench.measuring import arguments, start
from bench.rows import append_rows, read_all
from goldfinch.record import RunRecord, find_runs
from goldfinch.results.overrides import repeat_command

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results" / "runs.csv"
TINY = ("method=fedavg", "train.rounds=1", "train.local_steps=1", "rounds.test_samples=8", "train.device=cpu")


def rule_of(summary: Mapping[str, Any]) -> str:
    """Return by which rule a run is scored, from its ``summary.json``."""
    if "validated" in summary["scores"]:
        return "validated"
    return "final"


def row_of(page: str, run: RunRecord) -> dict[str, object]:
    """Return the row of a finished run; scores are in per cent.

    They are of the last round, or of the best round by validation if the run has validation samples.
    """
    summary = run.summary
    score = summary["scores"][rule_of(summary)]
    ended = datetime.datetime.fromtimestamp(float(run.events[-1]["time"]), datetime.UTC)
    accuracy = [f"{domain}={value:.4f}" for domain, value in score["accuracy"].items()]
    return {
        "page": page,
        "data": summary["data"],
        "method": summary["method"],
        "seed": run.seed,
        "rule": rule_of(summary),
        "average": f"{score['average']:.4f}",
        "worst": f"{score['worst']:.4f}",
        "accuracy": " ".join(accuracy),
        "rounds": summary["rounds"],
        "seconds": round(summary["wall_seconds"]),
        "state": run.state_sha256,
        "code": run.code,
        "processor": run.processor,
        "torch": summary["versions"]["torch"],
        "when": ended.strftime("%Y-%m-%dT%H:%MZ"),
        "command": repeat_command(run.config),
    }


def replace_rows(path: Path, page: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Write ``rows`` to the CSV at ``path`` in place of all rows of ``page``."""
    kept = [row for row in read_all(path) if row["page"] != page]
    path.unlink(missing_ok=True)
    append_rows(path, [*kept, *rows])


def dry_run() -> None:
    """Print the row of a run of one round in a folder that is deleted."""
    with tempfile.TemporaryDirectory() as folder:
        gf.run(*TINY, f"output={folder}/run", quiet=True)
        print(row_of("README.md", RunRecord.open(f"{folder}/run")))


def main() -> None:
    """Record the runs of the folders on the command line."""
    parser = arguments(__doc__)
    parser.add_argument("page", nargs="?", help="the page, by its path in the repository")
    parser.add_argument("folders", nargs="*", help="folders of finished runs, or with runs below them")
    options = parser.parse_args()
    if options.dry_run:
        dry_run()
        return
    if not options.page or not options.folders:
        parser.error("name a page and the folders of its runs")
    rows = [row_of(options.page, run) for run in find_runs(options.folders)]
    replace_rows(RESULTS, options.page, rows)
    print(f"{len(rows)} runs of {options.page} in {RESULTS.name}")


if __name__ == "__main__":
    start(main)
