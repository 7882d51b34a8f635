"""Many clients on one machine: seconds and memory of a round against their number, and FINCH over many prototypes.

    python bench/scale.py                         # 10, 100 and 1,000 clients, 100 rounds of memory, 10,000 prototypes
    python bench/scale.py --parts clients --clients 10 100
    python bench/scale.py --parts absent          # 1,000 to 100,000 registered clients, ten of them in a round
    python bench/scale.py --plot                  # docs/scale.png from the rows that are there
    python bench/scale.py --dry-run               # ten clients, writes nothing

FPL with the small net on made-up images, inline: every client holds 32 images of its own and takes ``--steps`` steps on
them, so that a client's work does not depend on their number. The server's share is what remains of a round after the
clients' own seconds. Memory is the process's resident set. Appends rows to bench/results/system.csv.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, before an installed copy

from bench.measuring import arguments, peak_kib, start
from bench.ratios import (
    RESULTS,
    Ratio,
    append,
    class_of,
    compare,
    in_turn,
    machine_class,
    quantity,
    read,
    wait_until_quiet,
)
from common.choices import trust
from common.composition import compose_config
from common.config import checked
from common.data.batches import Split
from common.data.domain import DataSource, Domain
from common.numerics import generator
from common.prototypes import Clustering, partition
from common.settings import RunSettings, settings_of
from common.wire.messages import Registration, Request
from common.wire.payload import Payload
from server.engines.inline import InlineEngine, LocalDevice
from server.run.conduct import prepare_output, run_federation

IMAGES = 32
PARTICIPANTS = 10
PICTURE = Path(__file__).resolve().parent.parent / "docs" / "scale.png"


@checked
class MadeUp(DataSource):
    """Two domains of random images, ``images`` in each train split; see :class:`common.data.domain.DataSource`."""

    name: ClassVar[str] = "made up"
    images: int = 1000

    @property
    def class_names(self) -> tuple[str, ...]:
        """Ten."""
        return tuple(str(label) for label in range(10))

    def _read(self, domain: str) -> Domain:
        draws = generator(0, "made up", domain)

        def split(count: int) -> Split:
            shape = (count, 3, self.image_size, self.image_size)
            images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draws)
            return Split(images, torch.randint(0, 10, (count,), generator=draws))

        return Domain(domain, split(self.images), split(64))


def main() -> None:
    """Measure what the command line asks for."""
    parser = arguments(__doc__)
    parts = {"clients": clients, "memory": memory, "finch": finch, "absent": absent}
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=["clients", "memory", "finch"])
    parser.add_argument("--registered", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--steps", type=int, default=10, help="local steps of each client, of 32 images")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that are counted")
    parser.add_argument("--long", type=int, default=100, help="rounds over which memory is watched, with ten clients")
    parser.add_argument("--prototypes", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--one", type=int, nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--one-absent", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_absent:
        one_absent(*options.one_absent)
        return
    if options.one:
        one_size(*options.one)
        return
    torch.set_num_threads(1)
    if options.plot:
        plot()
        return
    if options.dry_run:
        options.clients, options.steps, options.rounds, options.long, options.prototypes = [10], 1, 2, 8, [200]
    else:
        wait_until_quiet()
    for part in options.parts:
        rows = parts[part](options)
        if not options.dry_run:
            append(rows)


def settings_with(
    count: int, steps: int, rounds: int, output: str, more: Sequence[str] = (), side: int = 32
) -> RunSettings:
    """A run of ``count`` clients, half of them in each domain, on images of ``side`` pixels."""
    raw = compose_config(
        ["method=fpl", "model=small", "tuned=none", "rounds.evaluate_every=100000", f"train.rounds={rounds}",
         f"train.epochs={steps}", f"train.batch_size={IMAGES}", f"output={output}", *more]
    )  # fmt: skip
    half = count // 2
    trust(["bench.scale.MadeUp"])
    raw["data"] = {
        "_target_": "bench.scale.MadeUp",
        "domains": ["left", "right"],
        "images": half * IMAGES,
        "image_size": side,
    }
    raw["protocol"] = {
        "_target_": "common.data.protocols.Allocation",
        "counts": {"left": half, "right": half},
        "fraction": 1 / half,
    }
    return settings_of(raw)


class Watch:
    """A listener that notes a round's processor seconds and the resident memory at its end, from the second on."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.client_seconds: list[float] = []
        self.memory: list[float] = []
        self.own = 0.0
        self._began = 0.0

    def __call__(self, event: str, content: Mapping[str, Any]) -> None:
        """Called by the run."""
        if event != "round":
            return
        now = time.process_time()
        if content["round"] > 2:
            self.seconds.append(now - self._began)
            self.client_seconds.append(self.own)
            self.memory.append(resident_mib())
        self._began, self.own = now, 0.0


class Timed:
    """A device that adds up the processor seconds of its answers."""

    def __init__(self, device: LocalDevice, watch: Watch) -> None:
        self.device, self.watch = device, watch

    def register(self) -> Registration:
        """The device's."""
        return self.device.register()

    def answer(self, request: Request, message: Payload) -> Payload:
        """The device's."""
        begin = time.thread_time()
        found = self.device.answer(request, message)
        self.watch.own += time.thread_time() - begin
        return found


def watched(count: int, steps: int, rounds: int) -> Watch:
    """A run of ``rounds`` rounds that count."""
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        settings = settings_with(count, steps, rounds + 2, folder)
        prepare_output(settings)
        engine = InlineEngine(settings)
        engine.devices = {client: Timed(device, watch) for client, device in engine.devices.items()}
        run_federation(settings, engine, [watch])
    return watch


def one_size(count: int, steps: int, rounds: int) -> None:
    """In a process of its own: a line of JSON with what was seen."""
    torch.set_num_threads(1)
    start = resident_mib()
    watch = watched(count, steps, rounds)
    print(json.dumps({"round": watch.seconds, "clients": watch.client_seconds, "memory": max(watch.memory) - start}))


def clients(options: argparse.Namespace) -> list[Ratio]:
    """Seconds of a round, the server's share of them, and memory, for each number of clients."""
    rows: list[Ratio] = []
    for count in options.clients:
        numbers = [str(number) for number in (count, options.steps, options.rounds)]
        command = [sys.executable, __file__, "--one", *numbers]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
        shape = f"clients={count} steps={options.steps}"
        shares = [100 * (1 - own / all_) for all_, own in zip(found["round"], found["clients"], strict=True)]
        rows += [
            quantity("scale round", "inline", shape, "s", found["round"]),
            quantity("scale server share", "inline", shape, "%", shares, 5.0),
            quantity("scale memory", "inline", shape, "MiB", [found["memory"]]),
        ]
    return rows


def one_absent(count: int, rounds: int) -> None:
    """In a process of its own: a line of JSON with the seconds of registration and of rounds, and memory a client."""
    torch.set_num_threads(1)
    moments: dict[str, float] = {}
    seconds: list[float] = []

    def listen(event: str, content: Mapping[str, Any]) -> None:
        now = time.perf_counter()
        if event == "start":
            moments["registered"] = now
            moments["memory"] = resident_mib()
        elif event == "round":
            moments["round"] = now
        elif event == "round done" and content["round"] > 1:  # the first round imports and warms up
            seconds.append(now - moments["round"])

    with tempfile.TemporaryDirectory() as folder:
        settings = settings_with(
            count, 1, rounds + 1, folder, [f"rounds.participation={PARTICIPANTS / count}"], side=16
        )
        prepare_output(settings)
        for domain in settings.data.domains:
            settings.data.load(domain)
        began, before = time.perf_counter(), resident_mib()
        run_federation(settings, InlineEngine(settings), [listen])
    images = count * IMAGES * 3 * 16 * 16 / 2**20  # each client's own copy
    kib = 1024 * (moments["memory"] - before - images) / count
    print(json.dumps({"registration": moments["registered"] - began, "round": seconds, "kib": kib}))


def absent(options: argparse.Namespace) -> list[Ratio]:
    """Seconds until all clients have registered, seconds of a round of ten of them, and memory a client.

    Images are made before. Memory is without each client's images of 16x16 pixels.
    """
    rows: list[Ratio] = []
    for count in [20] if options.dry_run else options.registered:
        command = [sys.executable, __file__, "--one-absent", str(count), str(options.rounds)]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
        shape = f"registered={count} participants={PARTICIPANTS}"
        rows += [
            quantity("scale registration", "inline", shape, "s", [found["registration"]]),
            quantity("scale round of participants", "inline", shape, "s", found["round"]),
            quantity("scale memory of a client", "inline", shape, "KiB", [found["kib"]]),
        ]
    return rows


def memory(options: argparse.Namespace) -> list[Ratio]:
    """Growth of the resident memory over a long run: the least-squares slope of its second half."""
    held = watched(10, 1, options.long).memory
    late = held[len(held) // 2 :]
    slope = statistics.linear_regression(range(len(late)), late).slope * 100
    return [quantity("scale memory growth", "inline", f"clients=10 rounds={options.long}", "MiB/100", [slope], 1.0)]


def called(way: Callable[[], object], _: int) -> object:
    """Call ``way``; a measured step has a number."""
    return way()


def finch(options: argparse.Namespace) -> list[Ratio]:
    """Processor seconds and peak memory of clustering one class's prototypes of 512 features, by package and torch."""
    rows: list[Ratio] = []
    for count in options.prototypes:
        points = torch.rand(count, 512, generator=generator(0, "finch", count))
        ways: dict[str, Callable[[], object]] = {}
        clusterings: tuple[Clustering, ...] = ("finch-clust", "torch")
        for way in clusterings:
            ways[way] = partial(partition, points, clustering=way)
        shape = f"prototypes={count} D=512"
        rows += compare("scale finch", shape, "s", in_turn(ways, 5), "finch-clust")
        tracemalloc.start()  # NumPy's arrays; PyTorch's tensors are counted by itself
        ways["finch-clust"]()
        held = {"finch-clust": tracemalloc.get_traced_memory()[1] / 2**20}
        tracemalloc.stop()
        held["torch"] = peak_kib(partial(called, ways["torch"]), torch.device("cpu")) / 1024
        rows += [quantity("scale finch peak", way, shape, "MiB", [value]) for way, value in held.items()]
    return rows


def resident_mib() -> float:
    """This process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def plot() -> None:
    """docs/scale.png: seconds of a round and memory against the number of clients, from this machine class's rows."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot, ticker

    points: dict[str, dict[int, float]] = {"scale round": {}, "scale memory": {}}
    for row in read():
        if row["subject"] in points and class_of(row) == machine_class():
            points[row["subject"]][int(row["shape"].partition("=")[2].split()[0])] = float(row["middle"])
    figure, axes = pyplot.subplots(1, 2, figsize=(7, 2.8), layout="constrained")
    titles = ("seconds of processor time a round", "MiB above the start")
    for axis, (subject, found), title in zip(axes, points.items(), titles, strict=True):
        axis.loglog(sorted(found), [found[count] for count in sorted(found)], "o-", color="#d4900f")
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
            side.set_major_formatter(ticker.FormatStrFormatter("%g"))
            side.set_minor_formatter(ticker.NullFormatter())
        axis.set_xticks([10, 100, 1000])
        axis.set_xlabel("clients")
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
        if not found:
            raise SystemExit(f"no rows of {subject} for this machine in {RESULTS}; run python bench/scale.py first")
    figure.savefig(PICTURE, dpi=110)
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    start(main)
