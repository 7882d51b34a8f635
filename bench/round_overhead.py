"""What a round costs when the clients do nothing: Goldfinch against Flower's own simulation of the same app.

    python bench/round_overhead.py                              # 1 k and 11.2 M values, inline and Ray; minutes
    python bench/round_overhead.py --models tiny --engines inline
    python bench/round_overhead.py --engines ray --against ../earlier   # and another checkout's, in turn
    python bench/round_overhead.py --dry-run                    # one repeat of the small one, writes nothing

Ten clients get the model and send it back; the server averages. Flower's side is bench/apps/flower_no_op.py: its FedAvg
and a NumPyClient under ``run_simulation``. Ours is FedAvg without local training, with everything else a run does:
checks, checkpoints, history. Per repeat each variant runs once as a process of its own, in turn; the first round and
the later ones are told apart. Appends rows to bench/results/system.csv.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, before an installed copy

from bench.apps.no_op import Tiny
from bench.measuring import arguments, start
from bench.ratios import Ratio, append, compare, wait_until_quiet
from common.models.specs import TorchvisionResNet

APPS = Path(__file__).resolve().parent / "apps"
MODELS = {
    "tiny": (Tiny(), ["model=small", "model._target_=no_op.Tiny"]),
    "resnet18": (TorchvisionResNet(18), ["model=resnet18"]),
}
CLIENTS = 10
GOALS = {"later rounds": {"inline": 1 / 0.3, "ray": 1.0}, "start and first round": {"inline": 5.0, "ray": 5.0}}
"""By subject and engine. The first round alone has no goal: Flower's includes the start of Ray, and ours does not."""

Times = tuple[float, float, float]
"""Seconds from the start to the first round's end, of the first round, and of a later one."""


def main() -> None:
    """Measure what the command line asks for."""
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--engines", nargs="+", choices=["inline", "ray"], default=["inline", "ray"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--against", type=Path, help="another checkout, which is measured in turn with this one")
    options = parser.parse_args()
    if options.dry_run:
        options.models, options.engines, options.repeats, options.rounds = ["tiny"], ["inline"], 1, 3
    else:
        wait_until_quiet()
    for model in options.models:
        rows = overhead(model, options)
        if not options.dry_run:
            append(rows)


def overhead(model: str, options: argparse.Namespace) -> list[Ratio]:
    """Return the measurements of all engines in turn, repeated."""
    checkouts = {engine: (engine, APPS.parent.parent) for engine in options.engines}
    if options.against:
        checkouts |= {f"{engine} against": (engine, options.against.resolve()) for engine in options.engines}
    found: dict[str, list[Times]] = {name: [] for name in ("flower", *checkouts)}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            found["flower"].append(flower(model, options))
            for name, (engine, checkout) in checkouts.items():
                output = f"{folder}/{repeat}-{name.replace(' ', '-')}"
                found[name].append(goldfinch(model, engine, output, options, checkout))
            print(
                f"{model} {repeat + 1}: " + ", ".join(f"{name} {times[-1]}" for name, times in found.items()),
                flush=True,
            )
    rows: list[Ratio] = []
    size = sum(tensor.numel() for tensor in MODELS[model][0].build(10, 32, 0).parameters())
    shape = f"clients={CLIENTS} parameters={size} actors={options.actors}"
    for position, subject in enumerate(("start and first round", "first round", "later rounds")):
        seconds = {name: [times[position] for times in several] for name, several in found.items()}
        rows += compare(f"no-op {subject}", shape, "s", seconds, "flower", GOALS.get(subject))
    return rows


def flower(model: str, options: argparse.Namespace) -> Times:
    """Flower's own simulation."""
    shapes = [list(tensor.shape) for tensor in MODELS[model][0].build(10, 32, 0).state_dict().values()]
    task = {"shapes": shapes, "clients": CLIENTS, "rounds": options.rounds, "actors": options.actors}
    begin = time.time()
    output = call([sys.executable, str(APPS / "flower_no_op.py"), json.dumps(task)])
    found = json.loads(next(line for line in output.splitlines() if line.startswith('{"begins"')))
    begins, ends = found["begins"], found["ends"]
    return ends[0] - begin, begins[1] - begins[0], (ends[-1] - begins[1]) / (len(ends) - 1)


def goldfinch(model: str, engine: str, output: str, options: argparse.Namespace, checkout: Path) -> Times:
    """The same app as a run of the Goldfinch in ``checkout``."""
    command = [
        str(Path(sys.executable).parent / "goldfinch"), "run", "method=fedavg", "method._target_=no_op.NoOp",
        *MODELS[model][1], "protocol=glyphs_uneven", "rounds.evaluate_every=100000", "rounds.test_samples=1",
        f"train.rounds={options.rounds}", f"engine={engine}", f"output={output}",
    ]  # fmt: skip
    if engine == "ray":
        command.append(f"engine.actors={options.actors}")
    begin = time.time()
    call(command, checkout)
    events = [json.loads(line) for line in (Path(output) / "events.jsonl").read_text().splitlines()]
    begins = [event["time"] for event in events if event["event"] == "round"]
    ends = [event["time"] for event in events if event["event"] == "round done"]
    return ends[0] - begin, begins[1] - begins[0], (ends[-1] - begins[1]) / (len(ends) - 1)


def call(command: list[str], checkout: Path = APPS.parent.parent) -> str:
    """What a process printed that imports from ``checkout``."""
    environment = {**os.environ, "PYTHONPATH": f"{APPS}{os.pathsep}{checkout}", "FLWR_TELEMETRY_ENABLED": "0"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if found.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{found.stdout[-3000:]}\n{found.stderr[-3000:]}")
    return found.stdout


if __name__ == "__main__":
    start(main)
