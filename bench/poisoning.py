"""What hostile clients do to accuracy, by attack, method and aggregation rule, with and without the bound on lengths.

    python bench/poisoning.py           # every run that bench/results/poisoning.csv does not hold yet, then the table
    python bench/poisoning.py --table   # the table of what is there
    python bench/poisoning.py --methods fpl --federations "1 of 5" --seeds 0   # a part of it
    python bench/poisoning.py --dry-run  # one attack after one honest round, few images; writes nothing

A federation trains honestly for some rounds and is attacked in the ones that follow, from the same state for every
attack and rule. Attackers train honestly and change what they send (or, for label flip, what they learn from);
everything else is the shipped code. Hostile are clients drawn by the seed. Runs are inline, in this process, on one
thread.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, whatever is installed

from bench.measuring import arguments, environment, start
from bench.rows import append_rows
from common.data.batches import Split
from common.metrics import RoundScore
from common.prototypes import PrototypeSet
from common.seeding import generator
from common.settings import RunSettings, load_settings
from common.wire.messages import Request
from common.wire.payload import Payload
from server.engines.inline import InlineEngine
from server.run.checkpoint import Checkpoint
from server.run.conduct import prepare_output
from server.run.engine import Admit, Failure, Reply
from server.run.history import read_rows
from server.run.rounds import RoundLoop

RESULTS = Path(__file__).parent / "results" / "poisoning.csv"
SEEDS = (0, 1)
METHODS = ("fedavg", "fpl", "fedproto")
ATTACKS = ("none", "times ten", "sign flip", "prototype swap", "label flip", "variances")
RULES = ("mean", "statistics_median", "median", "trimmed_mean", "multi_krum", "krum")
HONEST_ROUNDS, ROUNDS = 12, 4
SWAPPED = (3, 8)
"""The classes whose prototypes are exchanged."""

FEDERATIONS: dict[str, tuple[int, Sequence[str]]] = {
    "1 of 5": (
        1,
        ("data.domains=[handwritten,printed,signs,sketch,blended]", "protocol=one_per_domain", "protocol.samples=200"),
    ),
    "2 of 10": (
        2,
        (
            "protocol=glyphs_uneven",
            "protocol.fraction=0.04",
            "protocol.fractions={handwritten: 0.08, printed: 0.08, sketch: 0.4}",
        ),
    ),
}
COMMON = (
    "data=glyphs", "model=small", "tuned=none", "engine=inline", "train.device=cpu", "train.batch_size=16",
    "train.learning_rate=0.05", "rounds.evaluate_every=1000", "rounds.test_samples=200", "overwrite=true",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """One run. Accuracies in per cent after the last round; how many updates were shortened, how many refused."""

    federation: str
    method: str
    attack: str
    aggregation: str
    bound: str
    seed: int
    average: float
    worst: float
    clipped: int
    refused: int
    seconds: float
    sha256: str
    torch: str
    commit: str
    when: str


Key = tuple[str, str, str, str, str, int]


def key_of(outcome: Outcome) -> Key:
    """What tells runs apart."""
    return (
        outcome.federation, outcome.method, outcome.attack, outcome.aggregation, outcome.bound, outcome.seed,
    )  # fmt: skip


class HostileEngine:
    """The inline engine with some clients' answers changed on their way to the server.

    Args:
        settings: the run's settings.
        attack: one of :data:`ATTACKS`.
        count: how many clients are hostile.
    """

    simulated = True

    def __init__(self, settings: RunSettings, attack: str, count: int) -> None:
        self.inner = InlineEngine(settings)
        self.attack, self.class_count = attack, settings.data.class_count
        clients = sorted(self.inner.devices)
        drawn = torch.randperm(len(clients), generator=generator(settings.seed, "hostile"))[:count].tolist()
        self.hostile = {clients[index] for index in drawn} if attack != "none" else set()
        if attack == "label flip":
            for client in self.hostile:
                flip_labels(self.inner.devices[client], self.class_count)

    def register(self, expected: Sequence[str], admit: Admit, seconds: float) -> list[Failure]:
        """See :class:`server.run.engine.Engine`."""
        return self.inner.register(expected, admit, seconds)

    def exchange(
        self, message: Payload, requests: Mapping[str, Request], seconds: float, **more: Any
    ) -> tuple[list[Reply], list[Failure]]:
        """See :class:`server.run.engine.Engine`."""
        replies, failures = self.inner.exchange(message, requests, seconds, **more)
        return [
            replace(reply, payload=self.spoiled(reply.payload, message))
            if reply.client in self.hostile and requests[reply.client].train
            else reply
            for reply in replies
        ], failures

    def spoiled(self, payload: Payload, message: Payload) -> Payload:
        """The answer as the attack has it."""
        if self.attack in ("sign flip", "times ten"):
            factor = -1.0 if self.attack == "sign flip" else 10.0
            weights = {name: moved(name, tensor, message.weights, factor) for name, tensor in payload.weights.items()}
            sets = payload.prototypes
            if sets is not None:
                sets = PrototypeSet(factor * sets.vectors, sets.labels, sets.weights)
            return replace(payload, weights=weights, prototypes=sets)
        if self.attack == "variances":
            scaled = {name: 60 * tensor for name, tensor in payload.weights.items() if name.endswith("running_var")}
            return replace(payload, weights={**payload.weights, **scaled})
        if self.attack == "prototype swap" and payload.prototypes is not None:
            return replace(payload, prototypes=swapped(payload.prototypes))
        return payload

    def close(self) -> None:
        """See :class:`server.run.engine.Engine`."""
        self.inner.close()


def moved(name: str, tensor: Tensor, received: Mapping[str, Tensor], factor: float) -> Tensor:
    """``w^t + factor (w_k - w^t)``; running statistics stay honest, or the gate would see negative variances."""
    if not tensor.is_floating_point() or "running_" in name:
        return tensor
    return received[name] + factor * (tensor - received[name])


def swapped(prototypes: PrototypeSet) -> PrototypeSet:
    """Two classes with each other's vectors; counts stay."""
    first, second = ((prototypes.labels == label).nonzero().flatten() for label in SWAPPED)
    vectors = prototypes.vectors.clone()
    if len(first) == len(second) == 1:
        vectors[first], vectors[second] = prototypes.vectors[second], prototypes.vectors[first]
    return PrototypeSet(vectors, prototypes.labels, prototypes.weights)


def flip_labels(device: object, class_count: int) -> None:
    """Every label y of the device's training data becomes K - 1 - y, before it registers."""
    read = device._own_data  # type: ignore[attr-defined]

    def flipped() -> tuple[Split, Split]:
        split, validation = read()
        return replace(split, labels=class_count - 1 - split.labels), validation

    device._own_data = flipped  # type: ignore[attr-defined]


def rounds_of(
    overrides: Sequence[str], attack: str, hostile: int, start: Checkpoint | None
) -> tuple[Checkpoint, RoundScore, Counter[str]]:
    """A run begun from ``start`` or from the initial weights: where it ended, its last score, and answers by status.

    ``start`` brings its remembered lengths: for the bound, the attack comes from clients that were honest so far.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = load_settings([*COMMON, *overrides, f"output={folder}"])
        prepare_output(settings)
        engine = HostileEngine(settings, attack, hostile)
        rounds = RoundLoop(settings, engine)
        if start is not None:
            rounds.federation.initial_state = lambda: replace(start.state, round=0)  # type: ignore[method-assign]
            rounds.federation.bounds.lengths = dict(start.lengths)
        rounds.run()
        engine.close()
        statuses = Counter(row["status"] for row in read_rows(Path(folder) / "activity.csv"))
        end = rounds.checkpoints.load()
        assert end is not None
        return end, rounds.history.round_scores()[-1], statuses


@cache
def honest_state(federation: str, method: str, seed: int) -> Checkpoint:
    """What :data:`HONEST_ROUNDS` rounds without an attack lead to, with the plain average."""
    overrides = (*FEDERATIONS[federation][1], f"method={method}", f"seed={seed}", f"train.rounds={HONEST_ROUNDS}")
    return rounds_of(overrides, "none", 0, None)[0]


def run(federation: str, method: str, attack: str, rule: str, bound: str, seed: int) -> Outcome:
    """One attacked run and its row."""
    count, overrides = FEDERATIONS[federation]
    extra = [f"aggregation.attackers={count}"] if rule not in ("mean", "statistics_median", "median") else []
    extra += ["rounds.outliers=off"] if bound == "off" else []
    start = honest_state(federation, method, seed)
    started = time.process_time()
    chosen = (f"method={method}", f"aggregation={rule}", f"seed={1000 + seed}", f"train.rounds={ROUNDS}")
    end, score, statuses = rounds_of([*overrides, *chosen, *extra], attack, count, start)
    where = environment(torch.device("cpu"))
    return Outcome(
        federation, method, attack, rule, bound, seed, round(score.average, 3), round(score.worst, 3),
        statuses["clipped"], statuses["refused"], round(time.process_time() - started, 2), end.state.sha256(),
        str(where["torch"]), str(where["commit"]), str(where["when"]),
    )  # fmt: skip


def plan(
    seeds: Sequence[int],
    federations: Sequence[str],
    methods: Sequence[str],
    attacks: Sequence[str],
    rules: Sequence[str],
) -> Iterator[tuple[str, str, str, str, int]]:
    """The runs with the bound on: a column of the table after the other."""
    for rule in rules:
        for seed in seeds:
            for federation in federations:
                for method in methods:
                    for attack in attacks:
                        if attack != "prototype swap" or method != "fedavg":
                            yield federation, method, attack, rule, seed


def load(path: Path) -> list[Outcome]:
    """The rows of the CSV, typed; none if it does not exist."""
    kinds = {"seed": int, "clipped": int, "refused": int, "average": float, "worst": float, "seconds": float}
    return [Outcome(**{name: kinds.get(name, str)(value) for name, value in row.items()}) for row in read_rows(path)]


def append(outcome: Outcome, path: Path) -> None:
    """Add a row to the CSV, made with a header when it does not exist."""
    append_rows(path, [asdict(outcome)])


def cell(outcomes: Sequence[Outcome]) -> str:
    """Mean ± standard deviation of the average accuracy over seeds."""
    if not outcomes:
        return "-"
    values = [outcome.average for outcome in outcomes]
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: rows are federation, method and attack; columns the rules, and the mean without the bound."""
    lines = [
        "| hostile | method | attack | clipped | mean, no bound | " + " | ".join(RULES) + " |",
        "|---|---|---|---:|---:|" + "---:|" * len(RULES),
    ]
    for federation in FEDERATIONS:
        for method in METHODS:
            for attack in ATTACKS:
                wanted = (federation, method, attack)
                mine = [item for item in outcomes if (item.federation, item.method, item.attack) == wanted]
                if not mine:
                    continue
                by_rule = {rule: [x for x in mine if x.aggregation == rule and x.bound == "on"] for rule in RULES}
                without = [x for x in mine if x.aggregation == "mean" and x.bound == "off"]
                without += [x for x in by_rule["mean"] if not x.clipped]  # where nothing was cut it is the same run
                clipped = sum(item.clipped for item in by_rule["mean"])
                cells = [cell(without), *(cell(by_rule[rule]) for rule in RULES)]
                lines.append(f"| {federation} | {method} | {attack} | {clipped} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def dry_run() -> None:
    """One attacked run of two rounds on few images."""
    count, overrides = FEDERATIONS["1 of 5"]
    chosen = [*overrides, "method=fpl", "protocol.samples=24", "rounds.test_samples=8"]
    honest, _, _ = rounds_of([*chosen, "train.rounds=1"], "none", 0, None)
    _, score, statuses = rounds_of([*chosen, "train.rounds=1", "seed=1000"], "sign flip", count, honest)
    print(f"average {score.average:.2f}, worst {score.worst:.2f}, answers {dict(statuses)}")
    print(table(load(RESULTS)))


def main() -> None:
    """Run what is missing, then print the table."""
    options = arguments(__doc__)
    options.add_argument("--table", action="store_true", help="only print the table of the rows that are there")
    options.add_argument("--results", type=Path, default=RESULTS)
    options.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    options.add_argument("--federations", nargs="+", default=list(FEDERATIONS), choices=list(FEDERATIONS))
    options.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    options.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=list(ATTACKS))
    options.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
    chosen = options.parse_args()
    torch.set_num_threads(1)
    if chosen.dry_run:
        dry_run()
        return
    outcomes = load(chosen.results)
    done = {key_of(outcome) for outcome in outcomes}
    runs = plan(chosen.seeds, chosen.federations, chosen.methods, chosen.attacks, chosen.rules)
    for federation, method, attack, rule, seed in () if chosen.table else runs:
        for bound in ("on", "off"):
            key = (federation, method, attack, rule, bound, seed)
            same = next((item for item in outcomes if key_of(item) == (*key[:4], "on", seed)), None)
            if key in done or (bound == "off" and (rule != "mean" or same is None or not same.clipped)):
                continue  # where the bound cut nothing, the run without it is the same run
            outcomes.append(run(federation, method, attack, rule, bound, seed))
            append(outcomes[-1], chosen.results)
            print(outcomes[-1], flush=True)
    print(table(outcomes))


if __name__ == "__main__":
    start(main)
