"""A training step on a GPU: Goldfinch with plain and with captured steps, and bare loops of the same net.

    python bench/gpu_step.py                       # about five minutes on one card
    python bench/gpu_step.py --methods fpl --epochs 10 --precisions bfloat16 --streams 4
    GOLDFINCH_DATA=DATA python bench/gpu_step.py --code CLONE    # and FPL's released code, see bench/released_fpl.py
    python bench/gpu_step.py --dry-run             # on the CPU, a few small rounds with plain steps; writes nothing

Four clients of the glyphs, ResNet-10, 32x32 pixels, batches of 64, nine steps an epoch. Milliseconds a step: of
training alone (the devices' own seconds, divided by the clients that train at a time), and of the whole round. The
bare loops take the same steps of a cross-entropy: eager, and captured as a whole in a CUDA graph. The released code
takes those of its own images, Office-Caltech. Variants take turns; the first two rounds of each run and its last are
left out. Appends rows to bench/results/gpu.csv, with the card and its driver.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, before an installed copy

from bench.efficiency import QUIET, training_splits
from bench.measuring import arguments, start, synchronise
from bench.ratios import quartiles
from bench.rows import append_rows, circumstances
from client.trainer import choose_device, memory_format
from common.numerics import generator
from common.settings import RunSettings, load_settings
from server.engines.inline import InlineEngine
from server.run.conduct import prepare_output, run_federation

RESULTS = Path(__file__).parent / "results" / "gpu.csv"
NET = ["model=resnet10", "data=glyphs", "data.image_size=32", "train.batch_size=64", "protocol.samples=576"]
SMALL = ["model=small", "data=glyphs", "train.batch_size=32", "protocol.samples=64"]
UNMEASURED = 2
"""Rounds of a run before those that are measured: the first compiles, the second is the first with prototypes."""
GOALS = {
    ("fpl, captured steps", 10, "float32", "training"): 2.1,
    ("fpl, captured steps", 10, "float32", "round"): 2.3,
    ("fpl, captured steps, 4 streams", 10, "bfloat16", "training"): 1.0,
    ("fpl, captured steps, 4 streams", 10, "bfloat16", "round"): 1.2,
    ("fedavg, captured steps", 2, "float32", "round"): 3.0,
}
"""Most milliseconds a step that captured steps should take."""


def main() -> None:
    """Measure what the command line asks for."""
    parser = arguments(__doc__)
    parser.add_argument("--methods", nargs="+", default=["fedavg", "fpl"])
    parser.add_argument("--epochs", nargs="+", type=int, default=[2, 10])
    parser.add_argument("--precisions", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=2, help="measured rounds of a run")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each variant, in turn")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 2, 4], help="clients that train at a time")
    parser.add_argument("--code", type=Path, help="a clone of FPL's released code")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.dry_run:
        options.device, options.rounds, options.repeats, options.epochs = "cpu", 1, 1, [1]
        options.precisions, options.methods, options.streams = ["float32"], ["fpl"], [1, 2]
    elif not torch.cuda.is_available():
        parser.error("there is no GPU here that PyTorch can use; --dry-run tries the script on the CPU")
    if options.code is not None:
        append_rows(RESULTS, released(options.code))
    for precision in options.precisions:
        for epochs in options.epochs:
            rows = measure(precision, epochs, options)
            if not options.dry_run:
                append_rows(RESULTS, rows)


def measure(precision: str, epochs: int, options: argparse.Namespace) -> list[dict[str, object]]:
    """Return the rows of one precision and length of local training; all variants take turns."""
    base = [
        *(SMALL if options.dry_run else NET),
        *QUIET,
        f"train.epochs={epochs}",
        f"train.precision={precision}",
        f"train.device={options.device}",
        f"train.rounds={UNMEASURED + options.rounds + 1}",
        "engine=inline",
    ]
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(options.repeats):
        for name, milliseconds in bare_loops(load_settings([*base, "method=fedavg"]), options).items():
            found.setdefault((name, "training"), []).append(milliseconds)
        for method in options.methods:
            for name, overrides in variants(method, options.streams).items():
                for part, values in federated([*base, *overrides]).items():
                    found.setdefault((name, part), []).extend(values)
    rows: list[dict[str, object]] = []
    for (name, part), values in found.items():
        goal = GOALS.get((name, epochs, precision, part))
        rows.append(row(name, part, epochs, precision, values, goal))
    return rows


def variants(method: str, streams: list[int]) -> dict[str, list[str]]:
    """Return the overrides of each way to run a method: plain steps, and captured ones of some clients at a time."""
    found = {f"{method}, plain steps": [f"method={method}", "train.capture=false"]}
    for count in streams:
        name = f"{method}, captured steps"
        if count > 1:
            name += f", {count} streams"
        found[name] = [f"method={method}", "train.capture=true", f"engine.workers={count}"]
    return found


def released(code: Path) -> list[dict[str, object]]:
    """Return the rows of FPL's released code: one epoch a round, in the second round, the first with prototypes."""
    script = Path(__file__).parent / "released_fpl.py"
    command = [sys.executable, str(script), "--code", str(code), "--rounds", "1", "--wall", "--play", "released"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    measured = json.loads(ended.stdout.splitlines()[-1])[-1]
    rows: list[dict[str, object]] = []
    for part, name in (("training", "train"), ("round", "round")):
        milliseconds_a_step = 1e3 * measured[name] / measured["steps"]
        rows.append(row("released FPL", part, 1, "float32", [milliseconds_a_step], None))
    return rows


def row(
    variant: str, part: str, epochs: int, precision: str, values: list[float], goal: float | None
) -> dict[str, object]:
    """Return a row, and print it."""
    low, middle, high = (round(value, 4) for value in quartiles(values))
    text = f"{precision:9} {epochs:3} epochs  {variant:36} {part:9} {middle:9.3f} ms a step ({low:.3f} to {high:.3f})"
    if goal is not None:
        text += f"  goal {goal:g}, {'met' if middle <= goal else 'missed'}"
    print(text, flush=True)
    return {
        "variant": variant,
        "part": part,
        "epochs": epochs,
        "precision": precision,
        "unit": "ms a step",
        "low": low,
        "middle": middle,
        "high": high,
        "repeats": len(values),
        "goal": goal,
        **card(),
        **circumstances(),
    }


def card() -> dict[str, object]:
    """Return the name of the card and the version of its driver."""
    if not torch.cuda.is_available():
        return {"card": "none", "driver": "none"}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.partition("\n")[0].strip()
    return {"card": torch.cuda.get_device_name(), "driver": driver or "unknown"}


# ---- Goldfinch -------------------------------------------------------------------------------------------------------


def federated(overrides: list[str]) -> dict[str, list[float]]:
    """Return milliseconds a step of training and of the whole round, for each measured round of a run."""
    began: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        settings = load_settings([*overrides, f"output={folder}/run"])
        device = choose_device(settings.train.device)

        def note(event: str, _: Mapping[str, Any]) -> None:
            if event == "round":
                synchronise(device)
                began.append(time.perf_counter())

        prepare_output(settings)
        run_federation(settings, InlineEngine(settings), [note])
        lines = Path(folder, "run", "replies.jsonl").read_text().splitlines()
    replies = [json.loads(line) for line in lines]
    times: dict[str, list[float]] = {"training": [], "round": []}
    for number in range(UNMEASURED + 1, settings.train.rounds):
        of_round = [reply for reply in replies if reply["round"] == number and reply["steps"]]
        steps = sum(reply["steps"] for reply in of_round)
        seconds = sum(reply["seconds_train"] for reply in of_round) / settings.engine["workers"]
        times["training"].append(1e3 * seconds / steps)
        times["round"].append(1e3 * (began[number] - began[number - 1]) / steps)
    return times


# ---- bare loops ------------------------------------------------------------------------------------------------------


class BareStep:
    """One step of a cross-entropy on batches of fixed size, with the images of one client.

    Args:
        settings: the run's settings.
    """

    def __init__(self, settings: RunSettings) -> None:
        self.settings, train = settings, settings.train
        self.device = choose_device(train.device)
        self.split = training_splits(settings)[0].to(self.device)
        self.format = memory_format(settings)
        self.model = settings.model.build(settings.data.class_count, settings.data.image_size, settings.seed)
        self.model.to(self.device).to(memory_format=self.format).train()
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), train.learning_rate, train.momentum, weight_decay=train.weight_decay, foreach=True
        )
        self.draws = generator(settings.seed, "bare")
        size = min(train.batch_size, len(self.split))
        self.chosen = torch.arange(size, device=self.device)
        self.images, self.labels = self.batch()

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return an augmented batch."""
        images = self.settings.data.augmentation.train(self.split.images_at(self.chosen), self.draws)
        return images.contiguous(memory_format=self.format), self.split.labels[self.chosen]

    def step(self) -> None:
        """Take a step with the present batch."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.train.precision == "bfloat16"):
            _, logits = self.model(self.images)
        self.optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(logits.float(), self.labels).backward()
        self.optimizer.step()

    def eager(self) -> None:
        """Make a batch and take a step."""
        self.images, self.labels = self.batch()
        self.step()

    def captured(self) -> Callable[[], None]:
        """Return a function that makes a batch and replays the captured step."""
        for _ in range(3):
            self.step()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            self.step()

        def replay() -> None:
            images, labels = self.batch()
            self.images.copy_(images)
            self.labels.copy_(labels)
            graph.replay()

        return replay


def bare_loops(settings: RunSettings, options: argparse.Namespace) -> dict[str, float]:
    """Return milliseconds a step of the bare loops."""
    times = {"bare, plain steps": milliseconds(BareStep(settings).eager, options)}
    if options.device != "cpu":
        times["bare, captured steps"] = milliseconds(BareStep(settings).captured(), options)
    return times


def milliseconds(step: Callable[[], None], options: argparse.Namespace) -> float:
    """Return the time of a step in a row of steps, after a few that do not count."""
    count = 3 if options.dry_run else 300
    device = torch.device(options.device)
    for _ in range(min(count, 20)):
        step()
    synchronise(device)
    begin = time.perf_counter()
    for _ in range(count):
        step()
    synchronise(device)
    return 1e3 * (time.perf_counter() - begin) / count


if __name__ == "__main__":
    start(main)
