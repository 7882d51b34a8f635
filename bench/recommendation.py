"""Search a combination of methods on validation samples, and judge it on other data.

    python bench/recommendation.py                # every run that bench/results/recommendation.csv does not hold yet
    python bench/recommendation.py --stages search judge  # some of the stages: search, judge, ablation, unseen
    python bench/recommendation.py --table        # the tables of the rows that are there
    python bench/recommendation.py --dry-run      # one run of one round; writes nothing

The stage search looks at validation samples of glyphs and digits and at no test image. What it found is written down in
RECOMMENDED. The stages judge and ablation score test images of Office-Caltech and PACS; unseen scores those of a domain
without a client, for each domain of these two. PACS, Office-Caltech and the digits are subsets of the public sets;
computer fonts stand in for SYN; glyphs are made on this machine.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, not an installed package

import goldfinch as gf
from bench.measuring import arguments, environment, start
from bench.rows import append_rows, mean_and_spread, read_all
from goldfinch.results.statistics import paired_difference

RESULTS = Path(__file__).parent / "results" / "recommendation.csv"
STAGES = ("search", "judge", "unseen", "ablation")
SEEDS = (0, 1, 2)
SEARCH_SEED = 1000

COMMON = (
    "model=small", "engine=inline", "train.device=cpu", "train.batch_size=16", "train.rounds=6", "train.epochs=4",
    "tracker=csv",
)  # fmt: skip
SEARCHED: Mapping[str, tuple[str, ...]] = {
    "glyphs": (
        "data=glyphs",
        "protocol=glyphs_uneven",
        *("protocol.counts.handwritten=1", "protocol.counts.printed=1", "protocol.counts.signs=1"),
        *("protocol.fractions.handwritten=0.12", "protocol.fractions.printed=0.1", "protocol.fractions.sketch=0.4"),
        "protocol.fraction=0.03",
    ),
    "digits": (
        "data=digits",
        "data.domains=[mnist,usps,svhn,computer_fonts]",
        "protocol=fpl_digits_stand_in",
        *("protocol.counts.mnist=1", "protocol.counts.usps=1", "protocol.counts.svhn=1"),
        *("protocol.counts.computer_fonts=1", "protocol.fraction=0.015", "protocol.fractions.mnist=0.003"),
        "protocol.fractions.computer_fonts=0.01",
    ),
}
"""One client for each of four domains. Images: glyphs 172, 120, 72 and 96; digits 180, 109, 120 and 60."""

JUDGED: Mapping[str, tuple[str, ...]] = {
    "office_caltech": (
        *("data=office_caltech", "data.image_size=32", "protocol=fpl_office", "protocol.fraction=0.3"),
        *("protocol.counts.caltech=1", "protocol.counts.amazon=1", "protocol.counts.dslr=1"),
    ),
    "pacs": (
        *("data=pacs", "data.image_size=32", "protocol=i2pfl_pacs", "protocol.fraction=0.12"),
        *("protocol.fractions.sketch=0.05", "protocol.counts.photo=1", "protocol.counts.art_painting=1"),
        *("protocol.counts.sketch=1", "rounds.test_samples=200"),
    ),
}
"""One client for each of four domains, with 30 to 216 (Office-Caltech) and 117 to 168 (PACS) images."""

DOMAINS: Mapping[str, tuple[str, ...]] = {
    "office_caltech": ("caltech", "amazon", "webcam", "dslr"),
    "pacs": ("photo", "art_painting", "cartoon", "sketch"),
}
VIEWS = {False: "views=none", True: "views=randconv"}
PROTOTYPES = {
    "none": ("method.contrast=0", "method.consistency=0"),
    "FPL": ("method.temperature=0.1",),
}
"""FPL's losses: none, or with a temperature of the order that tuning finds on the small net."""

HEALED: Mapping[str, tuple[str, ...]] = {
    "FedHEAL, views": ("method=fedheal", "views=randconv"),
    "FPL+HEAL, views": ("method=fpl_heal", "method.temperature=0.1", "views=randconv"),
}

TUNED = "tuned=METHOD_on_DATA"
"""Stands for the file of conf/tuned/ that belongs to a row's method and data set."""


def combination(weighting: str, views: bool, alpha: float, prototypes: str, local: bool) -> tuple[str, ...]:
    """Return the settings of one combination.

    Args:
        weighting: ``samples`` or ``uniform``.
        views: whether each image has a view of random convolutions.
        alpha: of FedDyn's correction; 0 for none.
        prototypes: a key of PROTOTYPES.
        local: whether normalisation stays on each client, with statistics that are refreshed before a score.
    """
    return (
        "method=combined",
        f"method.weighting={weighting}",
        VIEWS[views],
        f"method.alpha={alpha}",
        *PROTOTYPES[prototypes],
        f"method.local_normalisation={str(local).lower()}",
    )


def combinations() -> dict[str, tuple[str, ...]]:
    """Return every combination that the search tries, by its name.

    Clients with their own normalisation are weighed alike only, to halve their runs.
    """
    found: dict[str, tuple[str, ...]] = {}
    for local, views, alpha, prototypes, weighting in product(
        (False, True), (False, True), (0.0, 0.02), PROTOTYPES, ("samples", "uniform")
    ):
        if local and weighting == "samples":
            continue
        parts = [weighting]
        if views:
            parts.append("views")
        if alpha:
            parts.append("FedDyn")
        if prototypes != "none":
            parts.append(prototypes)
        if local:
            parts.append("local norm")
        found[", ".join(parts)] = combination(weighting, views, alpha, prototypes, local)
    return {**found, **HEALED}


RECOMMENDED: Mapping[str, tuple[str, ...]] = {
    "recommended, own models": combination("uniform", True, 0.02, "none", local=True),
    "recommended, one model": combination("uniform", True, 0.02, "FPL", local=False),
}
"""The best of the search with a normalisation of each client's own, and the best with one model for all."""

ABLATIONS: Mapping[str, tuple[str, ...]] = {
    "own models, without local norm": combination("uniform", True, 0.02, "none", local=False),
    "own models, without FedDyn": combination("uniform", True, 0.0, "none", local=True),
    "own models, without views": combination("uniform", False, 0.02, "none", local=True),
    "own models, with FPL": combination("uniform", True, 0.02, "FPL", local=True),
}
SINGLE: Mapping[str, tuple[str, ...]] = {
    "FedAvg": ("method=fedavg", TUNED),
    "FedAvg, uniform, views": ("method=fedavg", "method.weighting=uniform", "views=randconv", TUNED),
    "FPL": ("method=fpl", TUNED),
    "FedDyn": ("method=feddyn", TUNED),
    "FedGCA": ("method=fedgca", TUNED),
    "FedBN, refreshed": ("method=fedbn", "method.refresh_statistics=true"),
    "FedPall": ("method=fedpall", TUNED),
}
"""Single methods, with the values that a search found for them on the same data; FedBN has its defaults."""

UNSEEN = ("FedAvg", "recommended, one model")
"""Rows with one model that are scored on domains without a client."""


@dataclass(frozen=True)
class Job:
    """One run: its stage, data set, the row that it belongs to, its settings and its seed."""

    stage: str
    data: str
    name: str
    settings: tuple[str, ...]
    seed: int

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What identifies the run in the CSV."""
        return self.stage, self.data, self.name, str(self.seed)


def search_jobs() -> Iterator[Job]:
    """Every combination on both searched data sets, with one seed."""
    for (name, settings), data in product(combinations().items(), SEARCHED):
        yield Job("search", data, name, settings, SEARCH_SEED)


def judge_jobs() -> Iterator[Job]:
    """The recommendation, its version with one shared model, and single methods, on test images."""
    for seed, data, (name, settings) in product(SEEDS, JUDGED, {**RECOMMENDED, **SINGLE}.items()):
        yield Job("judge", data, name, settings, seed)


def ablation_jobs() -> Iterator[Job]:
    """The recommendation with each part taken away in turn, and with FPL's losses."""
    for seed, data, (name, settings) in product(SEEDS, JUDGED, ABLATIONS.items()):
        yield Job("ablation", data, name, settings, seed)


def unseen_jobs() -> Iterator[Job]:
    """Methods with one shared model, with each domain in turn left without a client."""
    rows = {**RECOMMENDED, **SINGLE}
    for seed, data in product(SEEDS, DOMAINS):
        for domain, name in product(DOMAINS[data], UNSEEN):
            yield Job("unseen", f"{data} without {domain}", name, rows[name], seed)


def jobs(stage: str) -> list[Job]:
    """Return the runs of a stage, one of STAGES."""
    makers = {
        "search": search_jobs,
        "judge": judge_jobs,
        "unseen": unseen_jobs,
        "ablation": ablation_jobs,
    }
    return list(makers[stage]())


def place(job: Job) -> list[str]:
    """Return the settings of a job's data."""
    if job.stage == "search":
        validation = ["protocol.validation=0.3", "protocol.partition_seed=null", "rounds.test=false"]
        return [*SEARCHED[job.data], *validation]
    if job.stage in ("judge", "ablation"):
        return [*JUDGED[job.data], "protocol.partition_seed=null", "rounds.evaluate_every=1000"]
    data, _, domain = job.data.partition(" without ")
    return [
        *(f"data={data}", "data.image_size=32", "protocol=leave_one_out", f"protocol.leave_out=[{domain}]"),
        *("protocol.score=unseen", "protocol.samples=100", "protocol.partition_seed=null"),
        *("rounds.evaluate_every=1000", "rounds.test_samples=200", "train.rounds=4"),
    ]


def measure(job: Job, more: Sequence[str] = ()) -> dict[str, object]:
    """Run one job and return its row: average and worst accuracy over domains, in per cent.

    In the stage search, these are on validation samples, in the round of the best average.
    """
    settings = list(job.settings)
    found = "tuned=none"
    if TUNED in settings:
        settings.remove(TUNED)
        method = settings[0].removeprefix("method=")
        found = f"tuned={method}_on_{job.data.partition(' ')[0]}"
    replaced = {setting.partition("=")[0] for setting in more}
    common = [setting for setting in COMMON if setting.partition("=")[0] not in replaced]
    chosen = [*common, *settings, f"seed={job.seed}", *place(job), found]
    with tempfile.TemporaryDirectory() as folder:
        run = gf.run(*chosen, f"output={folder}/run", *more, quiet=True)
        if job.stage == "search":
            average, worst = float(run.summary["validation"]["average"]), None
        else:
            average, worst = run.average, round(run.worst, 2)
        sha256 = run.sha256
    where = environment(torch.device("cpu"))
    return {
        "stage": job.stage,
        "data": job.data,
        "name": job.name,
        "seed": job.seed,
        "average": round(average, 2),
        "worst": worst,
        "settings": " ".join([*settings, found]),
        "state": sha256,
        "torch": where["torch"],
        "commit": where["commit"],
        "when": where["when"],
    }


def averages(rows: Sequence[Mapping[str, str]], stage: str, data: str, name: str) -> dict[str, float]:
    """Return the averages of one row of a table by seed."""
    found: dict[str, float] = {}
    for row in rows:
        if (row["stage"], row["data"], row["name"]) == (stage, data, name):
            found[row["seed"]] = float(row["average"])
    return found


def search_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return Markdown: a row for each combination, the best first, and the gain by each part."""
    lines = ["| combination | glyphs | digits | mean |", "|---|---:|---:|---:|"]
    means: dict[str, float] = {}
    cells: dict[str, list[float]] = {}
    for name in combinations():
        values = [value for data in SEARCHED for value in averages(rows, "search", data, name).values()]
        if len(values) == len(SEARCHED):
            cells[name], means[name] = values, statistics.mean(values)
    for name in sorted(means, key=lambda name: -means[name]):
        numbers = " | ".join(f"{value:.1f}" for value in cells[name])
        lines.append(f"| {name} | {numbers} | {means[name]:.1f} |")
    lines += ["", "| part | pairs | mean gain | smallest | largest |", "|---|---:|---:|---:|---:|"]
    for part in ("views", "FedDyn", "FPL", "local norm"):
        gains: list[float] = []
        for name, mean in means.items():
            without = ", ".join(piece for piece in name.split(", ") if piece != part)
            if without != name and without in means:
                gains.append(mean - means[without])
        if gains:
            numbers = f"{statistics.mean(gains):+.1f} | {min(gains):+.1f} | {max(gains):+.1f}"
            lines.append(f"| {part} | {len(gains)} | {numbers} |")
    return "\n".join(lines)


def interval(scores: Mapping[str, float], base: Mapping[str, float]) -> str:
    """Return the mean difference of the seeds that both have, with its 95 % interval by Student's t; "-" without."""
    seeds = [seed for seed in scores if seed in base]
    if not seeds:
        return "-"
    return paired_difference([scores[seed] for seed in seeds], [base[seed] for seed in seeds]).text(1)


def judge_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return Markdown: mean ± standard deviation on each data set, the difference from FedAvg; the best mean first."""
    names = [*RECOMMENDED, *SINGLE]
    found: dict[tuple[str, str], dict[str, float]] = {}
    for name, data in product(names, JUDGED):
        found[name, data] = averages(rows, "judge", data, name)
    names = [name for name in names if all(found[name, data] for data in JUDGED)]
    means: dict[str, float] = {}
    for name in names:
        means[name] = statistics.mean(statistics.mean(found[name, data].values()) for data in JUDGED)
    heads = " | ".join(f"{data} | minus FedAvg" for data in JUDGED)
    lines = [f"| row | {heads} | seeds |", "|---|" + "---:|" * (2 * len(JUDGED) + 1)]
    for name in sorted(names, key=lambda name: -means[name]):
        cells: list[str] = []
        for data in JUDGED:
            mine, base = found[name, data], found["FedAvg", data]
            cells.append(mean_and_spread(list(mine.values())))
            if name == "FedAvg":
                cells.append("")
            else:
                cells.append(interval(mine, base))
        seeds = min(len(found[name, data]) for data in JUDGED)
        lines.append(f"| {name} | {' | '.join(cells)} | {seeds} |")
    return "\n".join(lines)


def unseen_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return Markdown: accuracy on each domain without a client, and the means over a data set's domains.

    The mean of a data set counts the seeds that all its domains have.
    """
    base, other = UNSEEN
    lines = [f"| domain without a client | {base} | {other} | difference |", "|---|---:|---:|---:|"]
    for data in DOMAINS:
        found: dict[str, list[dict[str, float]]] = {base: [], other: []}
        for domain in DOMAINS[data]:
            split = f"{data} without {domain}"
            mine = {name: averages(rows, "unseen", split, name) for name in UNSEEN}
            for name in UNSEEN:
                found[name].append(mine[name])
            lines.append(_compared(f"{data}, {domain}", mine[base], mine[other]))
        means: list[dict[str, float]] = []
        for name in UNSEEN:
            common = set.intersection(*(set(split) for split in found[name]))
            means.append({seed: statistics.mean(split[seed] for split in found[name]) for seed in sorted(common)})
        lines.append(_compared(f"**{data}, mean of {len(DOMAINS[data])} domains**", *means))
    return "\n".join(lines)


def _compared(title: str, base: Mapping[str, float], other: Mapping[str, float]) -> str:
    """Return a table row: two accuracies by seed and their paired difference."""
    cells = [mean_and_spread(list(values.values()), len(SEEDS)) for values in (base, other)]
    return f"| {title} | {' | '.join(cells)} | {interval(other, base)} |"


def ablation_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return Markdown: the recommendation, what is left without each of its parts, and with FPL."""
    whole = "recommended, own models"
    heads = " | ".join(f"{data} | minus the whole" for data in JUDGED)
    lines = [f"| row | {heads} |", "|---|" + "---:|" * (2 * len(JUDGED))]
    for name in (whole, *ABLATIONS):
        cells: list[str] = []
        for data in JUDGED:
            base = averages(rows, "judge", data, whole)
            mine = averages(rows, "judge" if name == whole else "ablation", data, name)
            cells.append(mean_and_spread(list(mine.values()), len(SEEDS)))
            cells.append("" if name == whole else interval(mine, base))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def run_missing(stages: Sequence[str], seeds: Sequence[int] | None) -> None:
    """Run the jobs of the stages that the CSV does not hold yet, and append a row for each."""
    for stage in stages:
        for job in jobs(stage):
            done = {(row["stage"], row["data"], row["name"], row["seed"]) for row in read_all(RESULTS)}
            if job.key in done or (seeds and job.seed not in seeds):
                continue
            row = measure(job)
            append_rows(RESULTS, [row])
            print(row["stage"], row["data"], row["name"], row["seed"], row["average"], flush=True)


def main() -> None:
    """Run what is missing, then print the tables."""
    options = arguments(__doc__)
    options.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    options.add_argument("--seeds", nargs="+", type=int, help="only runs with these seeds")
    options.add_argument("--table", action="store_true", help="only print the tables of the rows that are there")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    if chosen.dry_run:
        settings = combination("uniform", True, 0.02, "FPL", local=True)
        print(measure(Job("search", "glyphs", "dry", settings, 0), ("train.rounds=1", "train.epochs=1")))
        return
    if not chosen.table:
        run_missing(chosen.stages, chosen.seeds)
    rows = read_all(RESULTS)
    for table in (search_table, judge_table, ablation_table, unseen_table):
        print(table(rows))
        print()


if __name__ == "__main__":
    start(main)
