"""Accuracy against conditional epsilon: FPL with noised prototypes, and with noised weights besides.

    GOLDFINCH_DATA=/data python bench/privacy_accuracy.py
    python bench/privacy_accuracy.py --dry-run    # one round on few images, writes nothing

Rows go to bench/results/privacy_accuracy.csv as they come (a second call goes on where the first stopped); when all are
there, the table of docs/results/privacy.md and its picture are written again. No row has an epsilon: simulations draw
noise from the seed, and most send weights as they are. The column is what the accountant gives for the noised parts.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, before an installed copy

from bench.measuring import arguments, start
from bench.rows import append_rows, mean_and_spread, read_all
from common.settings import load_settings
from goldfinch.results.figures.charts import line_style, new_figure, plain_axes, save
from server.engines.inline import InlineEngine
from server.run.conduct import prepare_output, run_federation

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "privacy_accuracy.csv"
PAGE = ROOT / "docs" / "results" / "privacy.md"
BASE = [
    "model=small",
    "protocol.samples=200",
    "rounds.test_samples=100",
    "train.learning_rate=0.05",
    "train.device=cpu",
]
DATA = {"glyphs": ["data=glyphs"], "digits": ["data=digits"]}
ON = ["privacy=gaussian", "privacy.clip=2"]


def variants() -> Iterator[tuple[str, float, list[str]]]:
    """Name, noise multiplier and overrides of every row of the table, what matters most first."""
    yield "FPL, nothing protected", 0.0, ["method=fpl"]
    for noise in (1.0, 4.0):
        yield prototypes(noise)
    yield both(0.5)
    yield "FedAvg, nothing protected", 0.0, ["method=fedavg"]
    for noise in (0.0, 0.5, 2.0, 8.0):
        yield prototypes(noise)
    yield both(0.005)


def prototypes(noise: float) -> tuple[str, float, list[str]]:
    """FPL with only its prototypes clipped and noised; without noise they are only clipped.

    A run in which nothing carries noise is refused, so that clipping alone has noise that changes nothing.
    """
    return "FPL, prototypes", noise, ["method=fpl", *ON, f"privacy.noise_multiplier={max(noise, 1e-9)}"]


def both(noise: float) -> tuple[str, float, list[str]]:
    """FPL with prototypes and weight updates clipped and noised."""
    noises = [f"privacy.noise_multiplier={noise}", f"privacy.update_noise_multiplier={noise}"]
    return "FPL, prototypes and weights", noise, ["method=fpl", *ON, *noises, "privacy.update_clip=1"]


def measure(data: str, variant: str, noise: float, overrides: list[str], seed: int, rounds: int) -> dict[str, Any]:
    """One run's row."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = [*DATA[data], *BASE, *overrides, f"seed={seed}", f"train.rounds={rounds}", f"output={folder}/run"]
        settings = load_settings(chosen)
        prepare_output(settings)
        summary = run_federation(settings, InlineEngine(settings))
    private = summary.get("privacy")
    found = (
        max((value for value in private["conditional_epsilon"].values() if value is not None), default=None)
        if private and noise
        else None
    )
    last = summary["scores"]["last_n"]
    return {
        "data": data,
        "variant": variant,
        "covers": "+".join(private["covers"]) if private else "",
        "noise": noise,
        "conditional_epsilon": "" if found is None else found,
        "seed": seed,
        "average": round(last["average"], 3),
        "worst": round(last["worst"], 3),
        "accuracy": " ".join(f"{name}={value:.1f}" for name, value in last["accuracy"].items()),
        "sha256": summary["state_sha256"][:16],
    }


def table(rows: list[dict[str, str]], data: str, order: list[tuple[str, str]]) -> list[str]:
    """The Markdown table of one data set."""
    lines = [
        "| noised | noise multiplier | conditional epsilon | average accuracy | worst domain |",
        "|---|---|---|---|---|",
    ]
    for variant, noise in order:
        group = [row for row in rows if (row["data"], row["variant"], row["noise"]) == (data, variant, noise)]
        if group:
            epsilon = f"{float(group[0]['conditional_epsilon']):.1f}" if group[0]["conditional_epsilon"] else "∞"
            shown = "-" if "nothing" in variant else "0 (only clipped)" if float(noise) == 0 else f"{float(noise):g}"
            lines.append(f"| {variant} | {shown} | {epsilon} | {spread(group, 'average')} | {spread(group, 'worst')} |")
    return lines


def spread(group: list[dict[str, str]], column: str) -> str:
    """Mean and sample deviation over seeds."""
    values = [float(row[column]) for row in group]
    return mean_and_spread(values)


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """Average accuracy over epsilon, a panel per data set; the unprotected runs as level lines."""
    figure = new_figure(7.0, 2.8)
    names = sorted({row["data"] for row in rows})
    for place, data in enumerate(names):
        axes = plain_axes(figure.add_subplot(1, len(names), place + 1))
        found = [row for row in rows if row["data"] == data]
        for index, name in enumerate(("FedAvg, nothing protected", "FPL, nothing protected")):
            level = [float(row["average"]) for row in found if row["variant"] == name]
            style = {**line_style(index + 2), "marker": "", "linestyle": "--"}
            if level:
                axes.axhline(statistics.mean(level), label=name, **style)
        for index, name in enumerate(("FPL, prototypes", "FPL, prototypes and weights")):
            points: dict[float, list[float]] = {}
            for row in found:
                if row["variant"] == name and row["conditional_epsilon"]:
                    points.setdefault(float(row["conditional_epsilon"]), []).append(float(row["average"]))
            xs = sorted(points)
            axes.plot(xs, [statistics.mean(points[x]) for x in xs], label=f"{name} noised", **line_style(index))
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(lambda *_: "")
        axes.set_xlabel("conditional epsilon (log scale)")
        axes.set_title(data, fontsize=9)
        axes.set_ylim(0, 100)
        if not place:
            axes.set_ylabel("average accuracy, %")
            axes.legend(fontsize=6)
    save(figure, path)


def main() -> None:
    """Measure what is missing, then write table and picture."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--data", nargs="*", default=list(DATA), choices=list(DATA))
    chosen = parser.parse_args()
    if chosen.dry_run:
        variant, noise, overrides = prototypes(1.0)
        print(measure("glyphs", variant, noise, [*overrides, "protocol.samples=40", "rounds.test_samples=8"], 0, 1))
        return
    done = {(row["data"], row["variant"], row["noise"], row["seed"]) for row in read_all(RESULTS)}
    for data in chosen.data:
        for variant, noise, overrides in variants():
            for seed in chosen.seeds:
                if (data, variant, str(noise), str(seed)) not in done:
                    append_rows(RESULTS, [row := measure(data, variant, noise, overrides, seed, chosen.rounds)])
                    print(row, flush=True)
    write_page(read_all(RESULTS), chosen.rounds)


def write_page(rows: list[dict[str, str]], rounds: int) -> None:
    """The tables and the picture of what was measured so far."""
    order = sorted({(row["variant"], row["noise"]) for row in rows}, key=lambda item: (item[0], float(item[1])))
    draw(rows, PAGE.with_suffix(".png"))
    begin, end = "<!-- table -->\n", "<!-- /table -->\n"
    text = PAGE.read_text() if PAGE.exists() else f"# Accuracy against epsilon\n\n{begin}{end}"
    settings = f"{rounds} rounds, `{' '.join(BASE)} {' '.join(ON)}`; mean ± deviation over seeds\n"
    tables = [f"\n**{data}**\n\n" + "\n".join(table(rows, data, order)) + "\n" for data in DATA]
    content = settings + "".join(tables)
    before, _, rest = text.partition(begin)
    PAGE.write_text(before + begin + content + end + rest.partition(end)[2])


if __name__ == "__main__":
    start(main)
