"""Where the seconds of a deployed round go: with and without resident trainer, and Flower's quickstart FedAvg.

    python bench/round_time.py                                   # 2 nodes, 6 rounds each; 10 to 20 minutes
    python bench/round_time.py --nodes 4 --blocks 2
    python bench/round_time.py --dry-run                         # one short block, writes nothing

Real SuperLinks and SuperNodes on the loopback interface: one federation with resident trainers on its nodes, one
without (``resident=false``). A ResNet-10 goes to every node, is scored on 8 images, takes one step on 8, and
comes back. The quickstart (bench/apps/quickstart_fedavg) does the same as Flower's PyTorch example does: a train and an
evaluate message per round, the state dict as an ArrayRecord; it runs on the federation without trainers. Blocks of
rounds run in turn; the first round of each block, which starts processes and makes data, is left out. A round is from
the end of the one before to its own end.

For each round, the lives of Flower's ClientApp processes are watched: ``wait`` is until the first of them starts (a
SuperNode polls every 3 s, its SuperExec every 0.2 s here), ``process`` from then to the end of the last, ``pick_up``
the rest, ``busy`` the CPU seconds of these processes. Appends rows to bench/results/round_time.csv; its ``load`` says
how busy the machine was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, before an installed copy

from bench.measuring import arguments, start
from bench.ratios import Ratio, append, compare, quantity, wait_until_quiet
from common.settings import load_settings
from goldfinch.commands.deployment import CONNECTION, LocalDeployment
from server.flower.processes import flower_environment, program
from server.run.conduct import prepare_output

APP = Path(__file__).resolve().parent / "apps" / "quickstart_fedavg"
RESULTS = Path(__file__).parent / "results" / "round_time.csv"
WITH, WITHOUT, QUICKSTART = "resident trainer", "no resident trainer", "Flower quickstart"
DOMAINS = ("handwritten", "printed", "signs", "sketch")
GOAL_SECONDS = 6.0
CHOSEN = (
    "method=fedavg", "model=resnet10", "train.local_steps=1", "train.batch_size=8", "protocol.samples=24",
    "rounds.test_samples=8", "train.device=cpu", "rounds.registration=600", "rounds.deadline=600", "engine=superlink",
)  # fmt: skip


@dataclass(frozen=True)
class Round:
    """One round.

    Args:
        begun, ended: seconds since the epoch.
        wait, process, pick_up: its parts in seconds; see the module.
        busy: CPU seconds of the ClientApp processes.
    """

    begun: float
    ended: float
    wait: float
    process: float
    pick_up: float
    busy: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.begun


class Watch:
    """Lives of the processes that SuperExecs start, seen every 20 ms.

    Args:
        supernodes: the SuperExecs of these SuperNodes are watched.
    """

    def __init__(self, supernodes: Sequence[int]) -> None:
        self.supernodes = supernodes
        self.lives: dict[int, list[float]] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        ticks = os.sysconf("SC_CLK_TCK")
        while not self._end.wait(0.02):
            for supernode in self.supernodes:
                for superexec in children(supernode):
                    for pid in children(superexec):
                        with contextlib.suppress(OSError):
                            found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                            if found[0] in "ZX":
                                continue
                            now = time.time()
                            life = self.lives.setdefault(pid, [now, now, 0.0])
                            life[1], life[2] = now, (int(found[11]) + int(found[12])) / ticks

    def split(self, begun: float, ended: float) -> Round:
        """The round between two instants with its parts."""
        inside = [life for life in list(self.lives.values()) if begun <= life[0] < ended]
        if not inside:
            return Round(begun, ended, ended - begun, 0.0, 0.0, 0.0)
        first, last = min(life[0] for life in inside), min(ended, max(life[1] for life in inside))
        return Round(begun, ended, first - begun, last - first, ended - last, sum(life[2] for life in inside))


def children(pid: int) -> list[int]:
    """Processes that ``pid`` started and that have not been waited for."""
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


class Federation:
    """A SuperLink and its nodes.

    Args:
        deployment: the processes.
        nodes: how many nodes.
    """

    def __init__(self, deployment: LocalDeployment, nodes: int) -> None:
        self.deployment, self.nodes, self.count = deployment, nodes, 0

    def _fresh(self) -> Path:
        self.count += 1
        return self.deployment.folder / f"block-{self.count}"

    def watch(self) -> Watch:
        """Of its nodes' processes."""
        found = self.deployment.children
        return Watch([child.process.pid for name, child in found.items() if name != "superlink"])

    def goldfinch(self, rounds: int) -> list[Round]:
        """Rounds of a run of ours, without the first and without the scoring after the last."""
        output = self._fresh()
        domains = ",".join(DOMAINS[: self.nodes])
        chosen = [*CHOSEN, f"data.domains=[{domains}]", f"train.rounds={rounds}", f"output={output}"]
        settings = load_settings(chosen)
        prepare_output(settings)
        with self.watch() as watch:
            self.deployment.run(settings)
        events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
        ends = [event["time"] for event in events if event["event"] == "round done"]
        return [watch.split(*pair) for pair in pairwise(ends)]

    def quickstart(self, rounds: int) -> list[Round]:
        """Rounds of Flower's FedAvg, without the first."""
        times = self._fresh().with_suffix(".json")
        config = f"num-rounds={rounds} min-nodes={self.nodes} times={json.dumps(str(times))}"
        environment = flower_environment(self.deployment.home)
        command = [program("flwr"), "run", str(APP), CONNECTION, "--format", "json", "--run-config", config]
        with self.watch() as watch:
            completed = subprocess.run(
                command, env=environment, cwd=self.deployment.folder, capture_output=True, text=True, check=False
            )
            if completed.returncode:
                raise RuntimeError(f"flwr run failed:\n{completed.stdout}{completed.stderr}")
            run = str(json.loads(completed.stdout[completed.stdout.index("{") :])["run-id"])
            self._wait(run, times, environment)
        ends = json.loads(times.read_text())["ends"]
        return [watch.split(*pair) for pair in pairwise(ends)]

    def _wait(self, run: str, times: Path, environment: dict[str, str]) -> None:
        """Wait for the run's last act; its log's stream can end before it does."""
        command = [program("flwr"), "list", CONNECTION, "--run-id", run, "--format", "json"]
        asked = time.monotonic()
        while not times.exists():
            time.sleep(0.5)
            if time.monotonic() - asked > 60:
                found = subprocess.run(
                    command, env=environment, cwd=self.deployment.folder, capture_output=True, text=True, check=False
                )
                if "finished:" in found.stdout and not times.exists():
                    raise RuntimeError(f"the quickstart failed:\n{found.stdout}")
                asked = time.monotonic()


@contextlib.contextmanager
def federation(folder: Path, nodes: int, *, resident: bool) -> Iterator[Federation]:
    """A federation with a number of nodes, one domain each."""
    configurations: dict[str, dict[str, object]] = {
        f"{domain}-0": {"domain": domain, "index": 0, "resident": resident} for domain in DOMAINS[:nodes]
    }
    with LocalDeployment(folder, configurations, secure=False) as deployment:
        yield Federation(deployment, nodes)


def main() -> None:
    """Measure what the command line asks for."""
    parser = arguments(__doc__)
    parser.add_argument("--nodes", type=int, default=2, choices=range(1, len(DOMAINS) + 1))
    parser.add_argument("--blocks", type=int, default=2, help="runs of each variant")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per block that count")
    parser.add_argument(
        "--variants", nargs="+", choices=[WITH, WITHOUT, QUICKSTART], default=[WITH, WITHOUT, QUICKSTART]
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.dry_run:
        options.nodes, options.blocks, options.rounds = 1, 1, 1
    else:
        wait_until_quiet()
    found: dict[str, list[Round]] = {name: [] for name in options.variants}
    with contextlib.suppress(KeyboardInterrupt):  # what was measured until then counts
        measure(found, options)
    complete = min(len(rounds) for rounds in found.values())
    if not complete:
        print("no round of every variant was complete")
        return
    rows = rows_of({name: rounds[:complete] for name, rounds in found.items()}, f"ResNet-10 nodes={options.nodes}")
    if not options.dry_run:
        append(rows, options.output)


def measure(found: dict[str, list[Round]], options: argparse.Namespace) -> None:
    """Blocks of rounds of all variants in turn."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="round-time-")))
        trainers = stack.enter_context(federation(folder / "with", options.nodes, resident=True))
        without = trainers
        if WITHOUT in found:
            without = stack.enter_context(federation(folder / "without", options.nodes, resident=False))
        variants = {WITH: trainers.goldfinch, WITHOUT: without.goldfinch, QUICKSTART: without.quickstart}
        for block in range(options.blocks):
            for name in found:
                rounds = variants[name](options.rounds + 1)
                found[name] += rounds
                listed = ", ".join(f"{one.seconds:.1f}" for one in rounds)
                print(f"block {block + 1}: {name}: {listed} s; load {os.getloadavg()[0]:.1f}", flush=True)


def rows_of(found: dict[str, list[Round]], shape: str) -> list[Ratio]:
    """Round times against the quickstart's, the goal, and the parts of a round."""
    seconds = {name: [one.seconds for one in rounds] for name, rounds in found.items()}
    rows = compare("deployed round", shape, "s", seconds, QUICKSTART if QUICKSTART in seconds else WITH)
    own = seconds[WITH]
    rows.append(quantity("deployed round, goal", WITH, shape, "s", own, GOAL_SECONDS))
    for name, rounds in found.items():
        for part in ("wait", "process", "pick_up", "busy"):
            rows.append(quantity(f"part: {part}", name, shape, "s", [getattr(one, part) for one in rounds]))
    print(f"median {statistics.median(own):.1f} s with resident trainer; goal {GOAL_SECONDS:g} s")
    return rows


if __name__ == "__main__":
    start(main)
