"""Draw docs/picture.png, the demonstration over several seeds.

    python docs/make_picture.py outputs/seeds
    python docs/make_picture.py --dry-run        # from tiny runs of its own; writes nothing

The runs are those of ``goldfinch sweep experiment=demo engine=inline method=fedavg,fpl seed=0,1,2
--output outputs/seeds``.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, before an installed copy

from bench.measuring import arguments, start
from common.settings import load_settings
from goldfinch.record import RunRecord
from goldfinch.results.figures.charts import new_figure, plain_axes, save
from server.engines.inline import InlineEngine
from server.run.conduct import prepare_output, run_federation

COLORS = {"fedavg": "#8a8d9a", "fpl": "#c98a00"}


def draw(folder: Path, target: Path) -> None:
    """Devices with their domains on the left, the server in the middle, what comes of it on the right."""
    settings = load_settings(["experiment=demo"])
    data, protocol = settings.data, settings.protocol
    figure = new_figure(11, 4.2)
    figure.set_layout_engine("none")
    canvas = figure.add_axes((0, 0, 1, 1))
    canvas.set_axis_off()
    canvas.set_xlim(0, 11)
    canvas.set_ylim(0, 4.2)
    for index, name in enumerate(data.domains):
        split = data.load(name).train
        y = 3.1 - index * 0.92
        canvas.text(0.2, y + 0.36, f"{name}", fontsize=10, va="center", weight="bold")
        held = [len(protocol.split(data.load(name), one, 0)) for one in protocol.clients(data) if one.domain == name]
        canvas.text(0.2, y + 0.12, held_text(held), fontsize=8, va="center", color="#555")
        for column, digit in enumerate((2, 3, 5, 7)):
            chosen = torch.nonzero(split.labels == digit)[column].item()
            picture = figure.add_axes(((1.45 + column * 0.62) / 11, (y - 0.1) / 4.2, 0.58 / 11, 0.58 / 4.2))
            picture.imshow(split.images[chosen].permute(1, 2, 0).numpy())
            picture.set_axis_off()
        canvas.add_patch(
            FancyArrowPatch((4.0, y + 0.2), (4.95, 2.1), arrowstyle="<|-|>", mutation_scale=9, color="#999", lw=1)
        )
    canvas.add_patch(FancyBboxPatch((5.05, 1.35), 1.75, 1.5, boxstyle="round,pad=0.06", fc="#fff7e0", ec="#c98a00"))
    canvas.text(5.92, 2.62, "server", fontsize=10, ha="center", weight="bold")
    canvas.text(
        5.92,
        2.12,
        "averages the weights,\nclusters class means\ninto prototypes",
        fontsize=8.5,
        ha="center",
        va="center",
    )
    canvas.text(5.92, 1.5, "Flower SuperLink", fontsize=8, ha="center", color="#777")
    canvas.text(4.48, 3.5, "weights +\nprototypes", fontsize=8, ha="center", color="#777")
    canvas.text(
        0.2, 0.12, "devices, with one domain each (Flower SuperNodes, or simulated on Ray)", fontsize=8, color="#777"
    )
    chart = plain_axes(figure.add_axes((0.685, 0.16, 0.22, 0.68)))
    chart.grid(visible=False)
    for method, color in COLORS.items():
        runs = [RunRecord(path) for path in sorted(folder.glob(f"method-{method}/seed-*"))]
        rounds = [score.round for score in runs[0].round_scores]
        average = mean_over_runs([[score.average for score in run.round_scores] for run in runs])
        worst = mean_over_runs([[score.worst for score in run.round_scores] for run in runs])
        chart.plot(rounds, average, color=color, linewidth=2)
        chart.plot(rounds, worst, "--", color=color, linewidth=1.3)
        for name, weight, values in ((runs[0].title, "bold", average), ("worst", "normal", worst)):
            text, place = f"{name} {values[-1]:.0f}", (rounds[-1], values[-1])
            chart.annotate(
                text, place, (6, 0), textcoords="offset points", va="center", fontsize=8, color=color, weight=weight
            )
        chart.set_xticks(range(0, rounds[-1] + 1, 5))
    chart.set_xlabel("round", fontsize=9)
    seeds = "one seed" if len(runs) == 1 else f"mean of {len(runs)} seeds"
    chart.set_title(f"accuracy (%), average and worst domain; {seeds}", fontsize=8, loc="left")
    chart.tick_params(labelsize=8)
    chart.set_ylim(0, 100)
    save(figure, target)


def held_text(held: Sequence[int]) -> str:
    """Return how many clients hold how many images each, which a protocol gives all clients of a domain alike."""
    images = " to ".join(f"{count}" for count in sorted({min(held), max(held)}))
    return f"{len(held)} x {images} images" if len(held) > 1 else f"{images} images"


def mean_over_runs(values: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean over runs of each round's number."""
    return [statistics.fmean(column) for column in zip(*values, strict=True)]


def main() -> None:
    """Draw what the command line asks for."""
    parser = arguments(__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("outputs/seeds"), help="the runs of the sweep")
    options = parser.parse_args()
    if options.dry_run:
        dry_run()
        return
    if not all((options.folder / f"method-{method}").is_dir() for method in COLORS):
        parser.error(f"{options.folder} has no runs of {' and '.join(COLORS)}; run the sweep that --help names")
    draw(options.folder, Path(__file__).parent / "picture.png")


def dry_run() -> None:
    """Draw two runs of one round into a folder that is deleted."""
    with tempfile.TemporaryDirectory() as name:
        for method in COLORS:
            tiny = ["train.rounds=1", "train.local_steps=1", "rounds.test_samples=8", "train.device=cpu"]
            settings = load_settings(
                ["experiment=demo", f"method={method}", *tiny, f"output={name}/method-{method}/seed-0"]
            )
            prepare_output(settings)
            run_federation(settings, InlineEngine(settings))
        picture = Path(name) / "picture.png"
        draw(Path(name), picture)
        print(f"a picture of {picture.stat().st_size:,} bytes")


if __name__ == "__main__":
    start(main)
