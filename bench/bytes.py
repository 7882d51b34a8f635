"""Bytes per method, client and round with ResNet-10, and what half-precision transport does to accuracy.

    python bench/bytes.py           # bytes: one local step a round, since steps do not change bytes
    python bench/bytes.py accuracy  # FedAvg and FPL on glyphs, small net, with each transport
    python bench/bytes.py page      # the tables of docs/results/bytes.md, from what was measured so far
    python bench/bytes.py --dry-run # all three once with the small net; writes nothing

Rows go to bench/results/bytes.csv and bench/results/transport.csv as they come; a second call goes on.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, before an installed copy

from bench.measuring import arguments, start
from bench.rows import append_rows, read_all
from common.settings import load_settings
from server.engines.inline import InlineEngine
from server.run.conduct import prepare_output, run_federation
from server.run.files import PARTS
from server.run.schema import REPLIES, read_lines

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "results" / "bytes.md"
TINY = ["data=glyphs", "model=resnet10", "protocol.samples=24", "train.rounds=2", "train.local_steps=1"]
TINY += ["train.batch_size=8", "rounds.test_samples=1", "rounds.evaluate_every=9", "train.device=cpu", "tuned=none"]
SHORT = ["data=glyphs", "model=small", "protocol.samples=200", "rounds.test_samples=100", "train.rounds=12"]
SHORT += ["train.learning_rate=0.05", "train.device=cpu"]
METHODS = {
    "FedAvg": ["method=fedavg"],
    "FedAvg, bfloat16": ["method=fedavg", "rounds.transport=bfloat16"],
    "FPL": ["method=fpl"],
    "FPL, bfloat16": ["method=fpl", "rounds.transport=bfloat16"],
    "FedProto, prototypes only": ["method=fedproto", "method.aggregate_models=false"],
    "FedProto with averaging": ["method=fedproto"],
    "FedBN": ["method=fedbn"],
    "FedRep": ["method=fedrep"],
    "SCAFFOLD": ["method=scaffold"],
    "FedProc": ["method=fedproc"],
    "FedPLVM": ["method=fedplvm"],
    "FedPLCC": ["method=fedplcc"],
}


def summary_of(*overrides: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a run's summary and its replies."""
    with tempfile.TemporaryDirectory() as folder:
        settings = load_settings([*overrides, f"output={folder}/run"])
        prepare_output(settings)
        return run_federation(settings, InlineEngine(settings)), read_lines(Path(folder) / "run" / REPLIES)


def bytes_of(name: str, *more: str) -> list[dict[str, object]]:
    """Mean bytes per client of a method's second round, by way and part; a row for each way."""
    _, replies = summary_of(*TINY, *METHODS[name], *more)
    rows = [row for row in replies if row["round"] == 2]
    found: list[dict[str, object]] = []
    for way in ("down", "up"):
        means: dict[str, object] = {"method": name, "way": way}
        for part in PARTS:
            means[part] = round(statistics.mean(row.get(f"bytes_{way}_{part}", 0) for row in rows))
        means["total"] = round(statistics.mean(row[f"bytes_{way}"] for row in rows))
        found.append(means)
    return found


def measure_bytes() -> None:
    """Append the bytes of every method that is not there yet."""
    done = {row["method"] for row in read_all(RESULTS / "bytes.csv")}
    for name in METHODS:
        if name not in done:
            append_rows(RESULTS / "bytes.csv", bytes_of(name))
            print(name, flush=True)


def accuracy_of(method: str, transport: str, seed: int, *more: str) -> dict[str, object]:
    """The row of one run with a transport."""
    chosen = [*SHORT, f"method={method}", f"rounds.transport={transport}", f"seed={seed}", *more]
    summary, _ = summary_of(*chosen)
    return {
        "method": method,
        "transport": transport,
        "seed": seed,
        "average": round(summary["scores"]["last_n"]["average"], 3),
        "megabytes": round(sum(summary["bytes"].values()) / 1e6, 2),
        "sha256": summary["state_sha256"][:16],
    }


def measure_accuracy() -> None:
    """The last five rounds' average accuracy for each method, transport and seed."""
    path = RESULTS / "transport.csv"
    done = {(row["method"], row["transport"], row["seed"]) for row in read_all(path)}
    for transport in ("bfloat16", "float16", "float32"):
        for method in ("fedavg", "fpl"):
            for seed in (0, 1):
                if (method, transport, str(seed)) in done:
                    continue
                row = accuracy_of(method, transport, seed)
                append_rows(path, [row])
                print(row, flush=True)


def page() -> str:
    """Return the page with both tables between their marks."""
    rows = {(row["method"], row["way"]): row for row in read_all(RESULTS / "bytes.csv")}
    whole = sum(int(rows["FedAvg", way]["total"]) for way in ("down", "up"))
    lines = ["| method | down | up | of it weights | prototypes | extra | header | of FedAvg's |", "|---" * 8 + "|"]
    for name in METHODS:
        if (name, "up") in rows:
            down, up = rows[name, "down"], rows[name, "up"]
            parts = [f"{int(down[part]) + int(up[part]):,}" for part in PARTS]
            share = 100 * (int(down["total"]) + int(up["total"])) / whole
            lines.append(
                f"| {name} | {int(down['total']):,} | {int(up['total']):,} | {' | '.join(parts)} | {share:.2f} % |"
            )
    table = ["| method | transport | average accuracy | megabytes of the run |", "|---|---|---|---|"]
    found = read_all(RESULTS / "transport.csv")
    for method in ("fedavg", "fpl"):
        for transport in ("float32", "bfloat16", "float16"):
            group = [row for row in found if (row["method"], row["transport"]) == (method, transport)]
            if group:
                values = [float(row["average"]) for row in group]
                shown = " and ".join(f"{value:.1f}" for value in values)
                megabytes = group[-1]["megabytes"]
                table.append(f"| {method} | {transport} | {shown} | {megabytes} |")
    text = PAGE.read_text()
    for mark, content in (("bytes", lines), ("transport", table)):
        before, _, rest = text.partition(f"<!-- {mark} -->\n")
        after = rest.partition(f"<!-- /{mark} -->\n")[2]
        text = before + f"<!-- {mark} -->\n" + "\n".join(content) + f"\n<!-- /{mark} -->\n" + after
    return text


def write_page() -> None:
    """Write both tables into the page."""
    PAGE.write_text(page())


def dry_run() -> None:
    """Each part once, with the small net and one round of few images."""
    for row in bytes_of("FPL", "model=small"):
        print(row)
    print(accuracy_of("fedavg", "bfloat16", 0, "train.rounds=1", "protocol.samples=24", "rounds.test_samples=8"))
    print(f"a page of {len(page().splitlines())} lines")


def main() -> None:
    """Do what the command line asks for."""
    parser = arguments(__doc__)
    parser.add_argument("what", nargs="?", default="bytes", choices=["bytes", "accuracy", "page"])
    options = parser.parse_args()
    if options.dry_run:
        dry_run()
        return
    {"bytes": measure_bytes, "accuracy": measure_accuracy, "page": write_page}[options.what]()


if __name__ == "__main__":
    start(main)
