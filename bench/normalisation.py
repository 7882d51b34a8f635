"""Accuracy by normalisation, when clients hold different domains.

    python bench/normalisation.py           # every run that bench/results/normalisation.csv does not hold yet
    python bench/normalisation.py --table   # the table of the rows that are there
    python bench/normalisation.py --dry-run  # one run of one round on few images; writes nothing

Two data sets, both made on this machine and stand-ins for real images. ``shapes``: four shapes on flat backgrounds,
dark at one site, grey at the second and bright at the third, 72 images to train and 24 to test a site. ``glyphs``: five
of Goldfinch's domains, 200 images a client. One client a domain, model=small, ten rounds, seeds 0 to 2.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, not an installed package

import goldfinch as gf
from bench.measuring import arguments, environment, start
from bench.rows import append_rows, mean_and_spread, read_all
from common.numerics import generator

RESULTS = Path(__file__).parent / "results" / "normalisation.csv"
SEEDS = (0, 1, 2)
RATES = ("0.05", "0.01")
"""Learning rates. A network without normalisation needs a smaller one."""

VARIANTS: dict[str, tuple[str, ...]] = {
    "batch": ("method=fedavg", "model.norm=batch"),
    "group": ("method=fedavg", "model.norm=group"),
    "none": ("method=fedavg", "model.norm=none"),
    "FedBN": ("method=fedbn", "model.norm=batch"),
    "FedBN, refreshed": ("method=fedbn", "model.norm=batch", "method.refresh_statistics=true"),
}
SITES = {"dark": 40, "grey": 128, "bright": 215}
"""Brightness of the backgrounds, 0 to 255."""

SHAPES = ("circle", "cross", "square", "triangle")
DATA: dict[str, tuple[str, ...]] = {
    "shapes, 1 epoch": ("data=folder", "train.epochs=1"),
    "shapes, 10 epochs": ("data=folder", "train.epochs=10"),
    "glyphs, 1 epoch": (
        "data=glyphs",
        "data.domains=[handwritten,printed,signs,sketch,blended]",
        "protocol.samples=200",
        "rounds.test_samples=200",
    ),
}
COMMON = (
    "model=small", "tuned=none", "protocol=one_per_domain", "engine=inline", "train.device=cpu", "train.batch_size=16",
    "rounds.evaluate_every=1000",
)  # fmt: skip


def draw_shape(shape: str, background: int, place: Sequence[float]) -> Image.Image:
    """Return one image of 32 x 32 pixels.

    Args:
        shape: one of :data:`SHAPES`.
        background: brightness, 0 to 255; the shape is 60 brighter, or darker where that is not possible.
        place: three numbers in 0..1: horizontal and vertical position, and size.
    """
    colour = background + 60
    if colour > 255:
        colour = background - 60
    image = Image.new("RGB", (32, 32), (background, background, background))
    pen = ImageDraw.Draw(image)
    radius = 5 + 5 * place[2]
    x = radius + (32 - 2 * radius) * place[0]
    y = radius + (32 - 2 * radius) * place[1]
    ink = (colour, colour, colour)
    if shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=ink)
    elif shape == "square":
        pen.rectangle((x - radius, y - radius, x + radius, y + radius), fill=ink)
    elif shape == "triangle":
        pen.polygon(((x - radius, y + radius), (x + radius, y + radius), (x, y - radius)), fill=ink)
    else:
        pen.line((x - radius, y, x + radius, y), fill=ink, width=3)
        pen.line((x, y - radius, x, y + radius), fill=ink, width=3)
    return image


def write_shapes(root: Path) -> None:
    """Write the images of all sites as ``<root>/<site>/{train,test}/<shape>/*.png``."""
    for site, background in SITES.items():
        for part, count in (("train", 18), ("test", 6)):
            for shape in SHAPES:
                draws = generator(0, "shapes", site, part, shape)
                folder = root / site / part / shape
                folder.mkdir(parents=True)
                for number in range(count):
                    place = torch.rand(3, generator=draws).tolist()
                    draw_shape(shape, background, place).save(folder / f"{number:03}.png")


def measure(data: str, variant: str, rate: str, seed: int, shapes: Path, more: Sequence[str] = ()) -> dict[str, object]:
    """Run one federation and return its row.

    ``largest_share`` is the share of test images, per cent, that were assigned to the most frequent class, in the
    domain where it is largest.
    """
    chosen = [
        *COMMON,
        *DATA[data],
        *VARIANTS[variant],
        f"train.learning_rate={rate}",
        f"seed={seed}",
        "train.rounds=10",
    ]
    if "data=folder" in DATA[data]:
        chosen.append(f"data.root={shapes}")
    with tempfile.TemporaryDirectory() as folder:
        run = gf.run(*chosen, f"output={folder}/run", *more, quiet=True)
        share = 0.0
        for domain in run.accuracy:
            counts = run.confusion(domain).to_numpy()
            share = max(share, 100 * counts.sum(axis=0).max() / counts.sum())
        row = {
            "data": data,
            "normalisation": variant,
            "learning_rate": rate,
            "seed": seed,
            "average": round(run.average, 2),
            "worst": round(run.worst, 2),
            "largest_share": round(float(share), 1),
        }
    where = environment(torch.device("cpu"))
    return {**row, "torch": where["torch"], "commit": where["commit"], "when": where["when"]}


def table(rows: Sequence[dict[str, str]]) -> str:
    """Return Markdown: a row for each data set and normalisation, with two columns for each learning rate."""
    heads = ["data", "normalisation"]
    for rate in RATES:
        heads += [f"average, {rate}", "worst domain"]
    lines = [f"| {' | '.join(heads)} |", "|---|---|" + "---:|" * 2 * len(RATES)]
    for data, variant in product(DATA, VARIANTS):
        cells = [data, variant]
        for rate, column in product(RATES, ("average", "worst")):
            wanted = (data, variant, rate)
            mine = [row for row in rows if (row["data"], row["normalisation"], row["learning_rate"]) == wanted]
            cells.append(mean_and_spread([float(row[column]) for row in mine], len(SEEDS)))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, then print the table."""
    options = arguments(__doc__)
    options.add_argument("--table", action="store_true", help="only print the table of the rows that are there")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        shapes = Path(name) / "shapes"
        write_shapes(shapes)
        if chosen.dry_run:
            print(measure("shapes, 1 epoch", "group", "0.01", 0, shapes, ["train.rounds=1"]))
            return
        rows = read_all(RESULTS) if RESULTS.exists() else []
        done = {(row["data"], row["normalisation"], row["learning_rate"], row["seed"]) for row in rows}
        for data, variant, rate, seed in product(DATA, VARIANTS, RATES, SEEDS):
            if chosen.table or (data, variant, rate, str(seed)) in done:
                continue
            row = measure(data, variant, rate, seed, shapes)
            append_rows(RESULTS, [row])
            print(row, flush=True)
    if RESULTS.exists():
        print(table(read_all(RESULTS)))


if __name__ == "__main__":
    start(main)
