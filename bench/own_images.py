"""What a first run on a few images of one's own comes to, with and without the settings of docs/own-domain.md.

    python bench/own_images.py            # every run that bench/results/own_images.csv does not hold yet
    python bench/own_images.py --table    # the table of the rows that are there
    python bench/own_images.py --dry-run  # one run of one round; writes nothing

The images are a stand-in for a reader's own: three shapes on flat backgrounds, dark at one site, grey at the second and
bright at the third, 30 images of each shape and site, of which 24 are to train. One client a site, five rounds.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, not an installed package

import goldfinch as gf
from bench.measuring import arguments, environment, start
from bench.normalisation import SITES, draw_shape
from bench.rows import append_rows, mean_and_spread, read_all
from common.numerics import generator

RESULTS = Path(__file__).parent / "results" / "own_images.csv"
SHAPES = ("circle", "square", "triangle")
IMAGES = 30
SEEDS = (0, 1, 2)
METHODS = ("fpl", "fedavg")
BY_IMAGE = "data.augmentation.normalisation=image"
TRAINING = ("train.epochs=5", "train.batch_size=8", "train.optimizer=adam", "train.learning_rate=0.001")
VARIANTS: dict[str, tuple[str, ...]] = {
    "defaults": (),
    "each image normalised by itself": (BY_IMAGE,),
    "more and smaller steps": TRAINING,
    "both, the page's command": (BY_IMAGE, *TRAINING),
}
"""Settings besides the data, by the name of the table's row."""


def write_images(root: Path) -> None:
    """Write the images as ``<root>/<site>/<shape>/*.png``."""
    for site, background in SITES.items():
        for shape in SHAPES:
            draws = generator(0, "own images", site, shape)
            folder = root / site / shape
            folder.mkdir(parents=True)
            for number in range(IMAGES):
                draw_shape(shape, background, torch.rand(3, generator=draws).tolist()).save(folder / f"{number:03}.png")


def measure(method: str, variant: str, seed: int, images: Path, more: Sequence[str] = ()) -> dict[str, object]:
    """Run one federation and return its row: the average and the worst domain after the last round, in per cent."""
    with tempfile.TemporaryDirectory() as folder:
        run = gf.run(
            f"method={method}", "data=folder", f"data.root={images}", "data.image_size=64", "engine=inline",
            "train.device=cpu", "train.rounds=5", f"seed={seed}", f"output={folder}/run", *VARIANTS[variant], *more,
            quiet=True,
        )  # fmt: skip
        row = {
            "method": method,
            "variant": variant,
            "seed": seed,
            "average": round(run.average, 2),
            "worst": round(run.worst, 2),
        }
    where = environment(torch.device("cpu"))
    return {**row, "torch": where["torch"], "commit": where["commit"], "when": where["when"]}


def table(rows: Sequence[dict[str, str]]) -> str:
    """Return Markdown: a row for each method and variant."""
    lines = ["| method | settings | average | worst domain |", "|---|---|---:|---:|"]
    for method, variant in product(METHODS, VARIANTS):
        chosen = [row for row in rows if (row["method"], row["variant"]) == (method, variant)]
        if chosen:
            average = mean_and_spread([float(row["average"]) for row in chosen], len(SEEDS))
            worst = mean_and_spread([float(row["worst"]) for row in chosen], len(SEEDS))
            lines.append(f"| {method} | {variant} | {average} | {worst} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, then print the table."""
    options = arguments(__doc__)
    options.add_argument("--table", action="store_true", help="only print the table of the rows that are there")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        images = Path(name) / "images"
        write_images(images)
        if chosen.dry_run:
            print(measure("fpl", "defaults", 0, images, ["train.rounds=1"]))
            return
        rows = read_all(RESULTS) if RESULTS.exists() else []
        done = {(row["method"], row["variant"], row["seed"]) for row in rows}
        for method, seed, variant in product(METHODS, SEEDS, VARIANTS):
            if chosen.table or (method, variant, str(seed)) in done:
                continue
            row = measure(method, variant, seed, images)
            append_rows(RESULTS, [row])
            print(row, flush=True)
    if RESULTS.exists():
        print(table(read_all(RESULTS)))


if __name__ == "__main__":
    start(main)
