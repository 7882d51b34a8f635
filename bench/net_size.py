"""What the size of the network does to the lead of prototypes: FedAvg, FPL and FedPLCC on Office-Caltech.

    python bench/net_size.py           # every run that bench/results/net_size.csv does not hold yet
    python bench/net_size.py --table   # the table of the rows that are there
    python bench/net_size.py --dry-run  # one run of one round; writes nothing

Three networks: the small one (128 features), the small one with 512 features, and ResNet-10 with half its width (256
features). FPL's protocol on a subset of the public set at 32 pixels, ten clients, in far fewer rounds than the papers'.
Seeds are run one after the other, each with all rows, so that an unfinished table compares the same seeds.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, not an installed package

import goldfinch as gf
from bench.measuring import arguments, environment, start
from bench.rows import append_rows, mean_and_spread, read_all
from goldfinch.results.statistics import paired_difference

RESULTS = Path(__file__).parent / "results" / "net_size.csv"
SEEDS = (0, 1, 2)
NETWORKS: Mapping[str, tuple[str, ...]] = {
    "small, 128 features": ("model=small",),
    "small, 512 features": ("model=small", "model.features=512"),
    "ResNet-10, half width": ("model=resnet10", "model.width=32"),
}
METHODS: Mapping[str, tuple[str, ...]] = {
    "FedAvg": ("method=fedavg",),
    "FPL": ("method=fpl",),
    "FedPLCC": ("method=fedplcc", "method.contrast=20", "method.correction=200"),
}
"""With the papers' printed values, as in the tables that this page is about."""

DATA = ("data=office_caltech", "data.image_size=32", "protocol=fpl_office")
COMMON = (
    "train.rounds=6", "train.epochs=3", "train.batch_size=16", "train.device=cpu", "engine=inline",
    "tuned=none", "rounds.evaluate_every=1000",
)  # fmt: skip
TINY = ("data=glyphs", "protocol=glyphs_uneven", "rounds.test_samples=20", "train.rounds=1", "train.epochs=1")
"""What --dry-run runs instead: data that every machine has."""


def measure(network: str, method: str, seed: int, data: Sequence[str] = DATA) -> dict[str, object]:
    """Run one federation and return its row: accuracy in per cent after the last round.

    Args:
        network: a key of NETWORKS.
        method: a key of METHODS.
        seed: the run's seed.
        data: settings of data and protocol, and others that replace those of COMMON.
    """
    replaced = {setting.partition("=")[0] for setting in data}
    common = [setting for setting in COMMON if setting.partition("=")[0] not in replaced]
    chosen = [*common, *data, *NETWORKS[network], *METHODS[method], f"seed={seed}"]
    with tempfile.TemporaryDirectory() as folder:
        run = gf.run(*chosen, f"output={folder}/run", quiet=True)
        scores = {domain: round(value, 2) for domain, value in run.accuracy.items()}
        average, state = round(run.average, 2), run.sha256
    where = environment(torch.device("cpu"))
    return {
        "network": network,
        "method": method,
        "seed": seed,
        "average": average,
        **scores,
        "state": state,
        "torch": where["torch"],
        "commit": where["commit"],
        "when": where["when"],
    }


def averages(rows: Sequence[Mapping[str, str]], network: str, method: str) -> dict[str, float]:
    """Return the averages of one network and method by seed."""
    found: dict[str, float] = {}
    for row in rows:
        if (row["network"], row["method"]) == (network, method):
            found[row["seed"]] = float(row["average"])
    return found


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return Markdown: a row for each network and method, with the difference from FedAvg on the same seeds."""
    lines = ["| network | method | average | minus FedAvg | seeds |", "|---|---|---:|---:|---:|"]
    for network, method in product(NETWORKS, METHODS):
        mine, base = averages(rows, network, method), averages(rows, network, "FedAvg")
        if not mine:
            continue
        both = [seed for seed in mine if seed in base]
        difference = ""
        if method != "FedAvg" and both:
            found = paired_difference([mine[seed] for seed in both], [base[seed] for seed in both])
            difference = f"{found.mean:+.1f}"
            if found.low is not None and found.high is not None:
                difference += f" [{found.low:+.1f}, {found.high:+.1f}]"
        lines.append(f"| {network} | {method} | {mean_and_spread(list(mine.values()))} | {difference} | {len(mine)} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, then print the table."""
    options = arguments(__doc__)
    options.add_argument("--table", action="store_true", help="only print the table of the rows that are there")
    options.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    chosen = options.parse_args()
    torch.set_num_threads(1)
    if chosen.dry_run:
        print(measure("small, 512 features", "FPL", 0, TINY))
        return
    for seed, network, method in product(SEEDS, chosen.networks, METHODS):
        done = {(row["network"], row["method"], row["seed"]) for row in read_all(RESULTS)}
        if chosen.table or (network, method, str(seed)) in done:
            continue
        row = measure(network, method, seed)
        append_rows(RESULTS, [row])
        print(row, flush=True)
    print(table(read_all(RESULTS)))


if __name__ == "__main__":
    start(main)
