"""What a federated round costs beyond its training: `goldfinch run` against a bare PyTorch loop over the same batches.

    python bench/efficiency.py                          # inline engine; seconds to minutes
    python bench/efficiency.py --engines ray --actors 2 # starts a SuperLink and Ray for every repeat
    python bench/efficiency.py --engines startup        # from the command to the first round
    python bench/efficiency.py --engines cluster        # one and two Ray machines (raylets here) against inline
    python bench/efficiency.py --dry-run                # a few small rounds inline, writes nothing

The bare loop takes as many steps on batches of the same sizes, made from the same images by the same augmentation, with
the same net, optimiser and threads; it sends, averages, checks and saves nothing. Inline, both alternate round by round
in one process; on Ray, whole runs alternate with as many bare processes as there are actors. Rounds in which nothing
but training happens are counted: the first and the scores are left out. Appends rows to bench/results/system.csv.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, before an installed copy

from bench.measuring import arguments, start
from bench.ratios import Ratio, append, compare, quantity, wait_until_quiet
from bench.ray_clusters import ray_cluster
from client.trainer import memory_format
from common.data.batches import Split, split_batches
from common.numerics import generator
from common.settings import RunSettings, load_settings
from server.engines.inline import InlineEngine
from server.run.conduct import prepare_output, run_federation

ROOT = Path(__file__).resolve().parent.parent
CLIENTS = 4
QUIET = ["rounds.evaluate_every=100000", "rounds.test_samples=16", "tuned=none"]
WORKLOADS = {
    "small": ["model=small", "train.batch_size=32"],
    "resnet10": ["model=resnet10", "train.batch_size=64", "train.local_steps=2"],
    "one_step": ["model=small", "train.batch_size=32", "train.local_steps=1"],
}
GOALS = {"one_step": 0.85}
"""The share of a bare loop that a workload is to reach where it is not 0.9."""


def main() -> None:
    """Measure what the command line asks for."""
    parser = arguments(__doc__)
    parser.add_argument("--engines", nargs="+", choices=["inline", "ray", "startup", "cluster"], default=["inline"])
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--methods", nargs="+", default=["fedavg", "fpl"])
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds of an inline run, or of each Ray run")
    parser.add_argument("--repeats", type=int, default=5, help="runs on Ray, starts")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        bare_process(json.loads(options.bare))
        return
    if options.dry_run:
        options.workloads, options.rounds, options.repeats = ["small"], 2, 1
    else:
        wait_until_quiet()
    measures = {"inline": inline, "ray": ray, "startup": startup, "cluster": cluster}
    for engine in options.engines:
        for workload in options.workloads if engine in ("inline", "ray") else ["small"]:
            for method in options.methods if engine == "inline" else ["fedavg"]:
                rows = measures[engine](workload, method, options)
                if not options.dry_run:
                    append(rows)


def overrides_of(workload: str, method: str, rounds: int, output: str) -> list[str]:
    """The run: four clients of the glyphs, nothing scored between the first round and the last."""
    return [*WORKLOADS[workload], f"method={method}", *QUIET, f"train.rounds={rounds}", f"output={output}"]


# ---- the opponent ----------------------------------------------------------------------------------------------------


def training_splits(settings: RunSettings) -> list[Split]:
    """Return every client's training images, in the order of the clients' ids."""
    splits: list[Split] = []
    for spec in sorted(settings.protocol.clients(settings.data), key=lambda spec: spec.id):
        domain = settings.data.load(spec.domain)
        splits.append(domain.train.subset(settings.protocol.split(domain, spec, settings.seed)))
    return splits


class Bare:
    """The bare loop: one net that trains on the batches of some of a run's clients in turn.

    Args:
        settings: the run's settings.
        part, parts: takes the clients at the positions that are ``part`` modulo ``parts``.
    """

    def __init__(self, settings: RunSettings, part: int = 0, parts: int = 1) -> None:
        data, train = settings.data, settings.train
        torch.set_num_threads(train.threads)
        self.settings = settings
        self.splits = training_splits(settings)[part::parts]
        self.model = settings.model.build(data.class_count, data.image_size, settings.seed)
        self.model.to(memory_format=memory_format(settings))
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), train.learning_rate, momentum=train.momentum, weight_decay=train.weight_decay
        )
        self.draws = generator(settings.seed, "bare")

    def round(self) -> None:
        """One pass over every client's batches."""
        train = self.settings.train
        for split in self.splits:
            for _ in range(train.epochs):
                order = torch.randperm(len(split), generator=self.draws)
                for indices in split_batches(order, train.batch_size, train.last_batch)[: train.local_steps]:
                    self.step(split.images[indices], split.labels[indices])

    def step(self, images: Tensor, labels: Tensor) -> None:
        """One step."""
        images = self.settings.data.augmentation.train(images, self.draws)
        _, logits = self.model(images.contiguous(memory_format=memory_format(self.settings)))
        self.optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(logits, labels).backward()
        self.optimizer.step()


def bare_process(task: Mapping[str, Any]) -> None:
    """A bare loop in a process of its own: prints when it is warm, waits for a line, runs, prints when it is done."""
    bare = Bare(load_settings(task["overrides"]), task["part"], task["parts"])
    bare.round()
    print("warm", flush=True)
    sys.stdin.readline()
    for _ in range(task["rounds"]):
        bare.round()
    print("done", flush=True)


def bare_seconds(overrides: list[str], processes: int, rounds: int) -> float:
    """Wall seconds per round of bare loops in several processes at once."""
    started = []
    for part in range(processes):
        task = json.dumps({"overrides": overrides, "part": part, "parts": processes, "rounds": rounds})
        command = [sys.executable, __file__, "--bare", task]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    for process in started:
        assert process.stdout
        if process.stdout.readline().strip() != "warm":
            raise RuntimeError("a bare loop did not start; see its traceback above")
    begin = time.perf_counter()
    for process in started:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    for process in started:
        assert process.stdout
        process.stdout.readline()
    seconds = time.perf_counter() - begin
    for process in started:
        process.communicate()
    return seconds / rounds


# ---- the engines -----------------------------------------------------------------------------------------------------


class Opponent(Protocol):
    """What runs between the rounds of a federated run."""

    def round(self) -> None:
        """Do a round's work."""


class Alternation:
    """A listener that lets an opponent run between the rounds of a federated run, and times both.

    A federated round is everything from one event ``round`` to the next, the checkpoint included.

    Args:
        opponent: what runs between the rounds.
        name: its name in the rows.
    """

    def __init__(self, opponent: Opponent, name: str = "bare") -> None:
        self.opponent, self.name = opponent, name
        self.seconds: dict[str, list[float]] = {name: [], "goldfinch": []}
        self.cpu: dict[str, list[float]] = {name: [], "goldfinch": []}
        self._last: tuple[float, float] | None = None

    def __call__(self, event: str, content: Mapping[str, Any]) -> None:
        """Called by the run."""
        if event != "round":
            return
        arrived = clocks()
        warm = content["round"] > 2
        if self._last is not None and warm:
            self._add("goldfinch", self._last, arrived)
        self.opponent.round()
        left = clocks()
        if warm:
            self._add(self.name, arrived, left)
        self._last = left

    def _add(self, variant: str, begin: tuple[float, float], end: tuple[float, float]) -> None:
        self.seconds[variant].append(end[0] - begin[0])
        self.cpu[variant].append(end[1] - begin[1])


def clocks() -> tuple[float, float]:
    """Wall clock and this process's processor time, seconds."""
    return time.perf_counter(), time.process_time()


def inline(workload: str, method: str, options: argparse.Namespace) -> list[Ratio]:
    """Round by round in this process."""
    with tempfile.TemporaryDirectory() as folder:
        settings = load_settings(overrides_of(workload, method, options.rounds + 2, folder))
        prepare_output(settings)
        torch.set_num_threads(settings.train.threads)
        bare = Bare(settings)
        alternation = Alternation(bare)
        run_federation(settings, InlineEngine(settings), [alternation])
    shape = f"{workload} {method} clients={len(bare.splits)}"
    goals = {"goldfinch": GOALS.get(workload, 0.9)} if method == "fedavg" else {}
    return [
        *compare("efficiency inline", f"{shape} wall", "s", alternation.seconds, "bare", goals),
        *compare("efficiency inline", f"{shape} cpu", "s", alternation.cpu, "bare", goals),
    ]


def ray(workload: str, method: str, options: argparse.Namespace) -> list[Ratio]:
    """Whole runs on Ray in turn with as many bare processes as actors."""
    seconds: dict[str, list[float]] = {"bare": [], "goldfinch": []}
    starts: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            overrides = overrides_of(workload, method, options.rounds + 2, f"{folder}/{repeat}")
            seconds["bare"].append(bare_seconds(overrides, options.actors, options.rounds))
            begin = time.time()
            times = run([*overrides, "engine=ray", f"engine.actors={options.actors}"])
            starts.append(times[1] - begin)
            seconds["goldfinch"].append((times[max(times)] - times[3]) / (max(times) - 3))
    shape = f"{workload} {method} actors={options.actors} wall"
    return [
        *compare("efficiency ray", shape, "s", seconds, "bare", {"goldfinch": 0.8}),
        quantity("start-up", "ray", shape, "s", starts, 20.0),
    ]


def cluster(workload: str, method: str, options: argparse.Namespace) -> list[Ratio]:
    """Seconds a client on one and on two Ray machines of one core each, against inline on as many cores."""
    rows: list[Ratio] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        ray_cluster(Path(folder, "one")) as one,
        ray_cluster(Path(folder, "two")) as two,
    ):
        for machines in (one, two, two):
            machines.add("--num-cpus=1")
        seconds: dict[int, dict[str, list[float]]] = {
            1: {"inline": [], "cluster": []},
            2: {"inline": [], "cluster": []},
        }
        for repeat in range(options.repeats):
            for count, machines in ((1, one), (2, two)):
                chosen = overrides_of(workload, method, options.rounds + 2, f"{folder}/{repeat}-{count}")
                joined = ["engine=ray", f"engine.address={machines.address}", f"engine.actors={count}"]
                times = {
                    "inline": run_here([*chosen, f"engine.workers={count}"]),
                    "cluster": run([*chosen, *joined, "overwrite=true"]),
                }
                for name, began in times.items():
                    seconds[count][name].append((began[max(began)] - began[3]) / (max(began) - 3) / CLIENTS)
        for count, found in seconds.items():
            shape = f"{workload} {method} clients={CLIENTS} machines={count} a client"
            rows += compare("efficiency cluster", shape, "s", found, "inline")
    for row in rows:
        print(f"{row.variant}, {row.shape}: {1 / row.middle:.2f} clients a second, load {row.load}")
    return rows


def run_here(overrides: list[str]) -> dict[int, float]:
    """A run in this process; the time at which each round began."""
    began: dict[int, float] = {}

    def note(event: str, content: Mapping[str, Any]) -> None:
        if event == "round":
            began[content["round"]] = time.perf_counter()

    settings = load_settings(overrides)
    prepare_output(settings)
    run_federation(settings, InlineEngine(settings), [note])
    return began


def run(overrides: list[str]) -> dict[int, float]:
    """`goldfinch run` as a process; the time of day at which each round began."""
    output = Path(next(item for item in overrides if item.startswith("output=")).partition("=")[2])
    command = [sys.executable, "-m", "goldfinch.cli", "run", *overrides]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if found.returncode:
        raise RuntimeError(f"goldfinch run failed:\n{found.stdout}\n{found.stderr}")
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    return {event["round"]: event["time"] for event in events if event["event"] == "round"}


def startup(workload: str, method: str, options: argparse.Namespace) -> list[Ratio]:
    """Seconds from the command to the first round, and of a bare loop to its first step."""
    starts: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            begin = time.time()
            starts.append(run(overrides_of(workload, method, 1, f"{folder}/{repeat}"))[1] - begin)
    return [quantity("start-up", "inline", f"{workload} {method}", "s", starts, 5.0)]


if __name__ == "__main__":
    start(main)
