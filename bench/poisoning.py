"""What hostile clients do to accuracy, by attack, method and defence.

    python bench/poisoning.py           # every run that bench/results/poisoning.csv does not hold yet, then the table
    python bench/poisoning.py --table   # the table of what is there
    python bench/poisoning.py --methods fpl --federations "1 of 5" --seeds 0   # a part of it
    python bench/poisoning.py --classifier  # each client's cosine to the others in the classifier's weights
    python bench/poisoning.py --dry-run  # one attacked run of two rounds on few images; writes nothing

A federation of clients of different domains trains for 15 rounds. Hostile clients, drawn by the seed, train honestly
and change what they send; for label flip they change what they learn from. They know the defence: "at the bound" means
a thousand times too long, so that the server scales the update to exactly the longest that it accepts. Everything else
is the shipped code. Runs are inline, in this process, on one thread.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, not an installed package

from bench.measuring import arguments, environment, start
from bench.rows import append_rows, mean_and_spread
from common.data.batches import Split
from common.numerics import generator
from common.prototypes import PrototypeSet
from common.settings import RunSettings, load_settings
from common.storage import GlobalState
from common.wire.messages import SCALED, Registration, Request
from common.wire.payload import Payload
from server.engines.inline import InlineEngine
from server.run.conduct import prepare_output
from server.run.engine import Admit, Failure, Reply
from server.run.history import read_rows
from server.run.rounds import RoundLoop
from strategies.core.agreement import Agreement, Opposition
from strategies.core.context import ServerContext
from strategies.core.exchange import Update
from strategies.core.federation import Federation

RESULTS = Path(__file__).parent / "results" / "poisoning.csv"
SEEDS = (0, 1, 2)
METHODS: dict[str, tuple[str, ...]] = {
    "fpl": (),
    "fedavg": (),
    "fedplcc": ("tuned=fedplcc_on_glyphs",),  # with the printed weights it stays at chance on this network
    "fedpall": ("tuned=fedpall_on_glyphs",),
}
"""Methods, and further overrides of each."""

ATTACKS = {
    "none": "no client is hostile",
    "absent": "every update of the hostile client is lost: what remains if a defence recognises it at once",
    "sign flip": "the update with the opposite sign, at the bound, from round 1; prototypes too",
    "honest, then flip": "the honest direction at the bound in rounds 1 to 10, then sign flip at the bound",
    "growing, then flip": "the honest update, 8 % longer each round, flipped from round 11",
    "late sign flip": "honest in rounds 1 to 10, then the update with the opposite sign and its own length",
    "drift": "the opposite of its first update, at the bound, in every round",
    "noise": "a random step at the bound",
    "noise, 9e6 samples": "the same, and the client registers nine million samples",
    "label flip": "label y is trained as K - 1 - y",
    "prototype roll": "each class is sent another class's prototype, at the bound",
    "variances": "running variances a thousand times as large",
    "little is enough": "mean minus 1.5 standard deviations of the honest updates (Baruch et al., 2019)",
    "inner product": "the negative mean of the honest updates, at the bound (Xie et al., 2020)",
    "late inner product": "the same from round 11",
}
DEFENCES: dict[str, tuple[str, ...]] = {
    "default": (),
    "bound only": ("rounds.opposing=off",),
    "median": ("rounds.opposing=off", "aggregation=median"),
    "trimmed_mean": ("rounds.opposing=off", "aggregation=trimmed_mean"),
    "multi_krum": ("rounds.opposing=off", "aggregation=multi_krum"),
    "geometric_median": ("aggregation=geometric_median",),
    "centered_clipping": ("aggregation=centered_clipping",),
    "bucketing": ("aggregation=bucketing",),
    "uniform": ("method.weighting=uniform",),
    "server_images": ("method.weighting=uniform",),
}
"""Overrides of each defence. ``server_images`` is a prototype, :class:`ServerImages`, and no part of Goldfinch."""

IMAGES_PER_CLASS = 2
"""Images of each class and domain that the server of the prototype holds."""

STAYS, WORSE = 0.8, 1.0
"""Of the prototype: share of a client's suspicion that stays, and the suspicion above which it is left out, in nats."""

ROUNDS, LATE = 15, 10
AT_THE_BOUND = 1000.0
LITTLE = 1.5
"""Standard deviations of "little is enough"."""

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
    """One run. Accuracies in per cent after the last round; answers that were scaled or left out, and refused ones."""

    federation: str
    method: str
    attack: str
    defence: str
    seed: int
    average: float
    worst: float
    clipped: int
    refused: int
    honest_clipped: int
    honest_left_out: int
    seconds: float
    torch: str
    commit: str
    when: str


@dataclass
class ServerImages(Agreement):
    """The comparison of directions, and a test on images that the server holds (the idea of Zeno, Xie et al., 2019).

    The server has :data:`IMAGES_PER_CLASS` training images of each class and domain, which the client may have as well.
    It compares the loss of the model that a client sends with that of the model that the client was sent, on images of
    the client's domain, with the statistics of these images. The increase adds to the client's suspicion, a decrease
    lowers it. Above :data:`WORSE` the update is left out, as long as fewer than half are.
    """

    federation: Federation = field(kw_only=True)
    suspicion: dict[str, float] = field(default_factory=dict)
    images: dict[str, Split] = field(default_factory=dict)

    def find(self, updates: Sequence[Update], state: GlobalState, server: ServerContext) -> dict[str, Opposition]:
        """Return the updates to leave out, by client id."""
        found = super().find(updates, state, server)
        if not updates or not updates[0].weights:
            return found
        for update in updates:
            client = update.client.id
            before = self._loss(state.weights, update.client.domain)
            increase = self._loss(update.weights, update.client.domain) - before
            if math.isnan(increase):
                increase = math.inf
            self.suspicion[client] = max(0.0, STAYS * self.suspicion.get(client, 0.0) + increase)
            if self.suspicion[client] > WORSE and client not in found and len(found) + 1 < len(updates) / 2:
                found[client] = Opposition(0.0, 0.0, 0.0)
        return found

    @torch.no_grad()
    def _loss(self, weights: Mapping[str, Tensor], domain: str) -> float:
        """Return the cross-entropy of a model on the server's images of a domain."""
        settings = self.federation.settings
        if domain not in self.images:
            self.images[domain] = some_of_each_class(settings.data.load(domain).train, settings.data.class_count)
        split = self.images[domain]
        model = self.federation.new_model()
        model.load_state_dict({**model.state_dict(), **weights})
        _, logits = model.train()(settings.data.augmentation.test(split.images))
        return float(torch.nn.functional.cross_entropy(logits, split.labels))


@dataclass
class ClassifierDirections(Agreement):
    """The comparison of directions, which also prints that of the classifier's weights alone; it leaves out no more.

    A row of the classifier's weights belongs to a class. What is common to all rows is subtracted first, and the
    others' directions have length 1 before they are added.
    """

    hostile: frozenset[str] = field(kw_only=True)

    def find(self, updates: Sequence[Update], state: GlobalState, server: ServerContext) -> dict[str, Opposition]:
        """Print each client's cosine to the others."""
        if updates and updates[0].weights:
            directions: list[Tensor] = []
            for update in updates:
                step = (update.weights[CLASSIFIER] - state.weights[CLASSIFIER]).double()
                step = (step - step.mean(0)).flatten()
                directions.append(step / torch.linalg.vector_norm(step).clamp_min(1e-30))
            total = torch.stack(directions).sum(0)
            words: list[str] = []
            for update, direction in zip(updates, directions, strict=True):
                others = total - direction
                cosine = float(direction @ others / torch.linalg.vector_norm(others).clamp_min(1e-30))
                mark = "*" * (update.client.id in self.hostile)
                words.append(f"{mark}{update.client.id} {cosine:.2f}")
            print(server.round, ", ".join(words), flush=True)
        return super().find(updates, state, server)


CLASSIFIER = "head.weight"


def some_of_each_class(split: Split, class_count: int) -> Split:
    """Return :data:`IMAGES_PER_CLASS` images of each class, always the same."""
    draws = torch.Generator().manual_seed(999)
    chosen: list[int] = []
    for label in range(class_count):
        members = (split.labels == label).nonzero().flatten()
        chosen += members[torch.randperm(len(members), generator=draws)[:IMAGES_PER_CLASS]].tolist()
    return split.subset(torch.tensor(chosen))


Key = tuple[str, str, str, str, int]


def key_of(outcome: Outcome) -> Key:
    """Return what tells runs apart."""
    return (outcome.federation, outcome.method, outcome.attack, outcome.defence, outcome.seed)


class HostileEngine:
    """The inline engine with some clients' answers changed on their way to the server.

    Args:
        settings: the run's settings.
        attack: one of :data:`ATTACKS`.
        count: number of hostile clients.
    """

    simulated = True

    def __init__(self, settings: RunSettings, attack: str, count: int) -> None:
        self.inner = InlineEngine(settings)
        self.attack = attack
        self.first_steps: dict[str, dict[str, Tensor]] = {}
        self.registered: dict[str, dict[str, Any]] = {}
        clients = sorted(self.inner.devices)
        drawn = torch.randperm(len(clients), generator=generator(settings.seed, "hostile"))[:count].tolist()
        self.hostile = {clients[index] for index in drawn} if attack != "none" else set()
        if attack == "label flip":
            for client in self.hostile:
                flip_labels(self.inner.devices[client], settings.data.class_count)

    def register(self, expected: Sequence[str], admit: Admit, seconds: float) -> list[Failure]:
        """See :class:`server.run.engine.Engine`."""

        def admit_changed(registration: Registration) -> str | None:
            if self.attack == "noise, 9e6 samples" and registration.client in self.hostile:
                counts = [count * 9_000_000 // registration.samples for count in registration.class_counts]
                registration = replace(registration, samples=sum(counts), class_counts=counts)
                self.registered[registration.client] = {"samples": sum(counts), "class_counts": counts}
            return admit(registration)

        return self.inner.register(expected, admit_changed, seconds)

    def exchange(
        self, message: Payload, requests: Mapping[str, Request], seconds: float, **more: Any
    ) -> tuple[list[Reply], list[Failure]]:
        """See :class:`server.run.engine.Engine`."""
        replies, failures = self.inner.exchange(message, requests, seconds, **more)
        honest = [
            reply.payload for reply in replies if reply.client not in self.hostile and requests[reply.client].train
        ]
        sent: list[Reply] = []
        for reply in replies:
            request = requests[reply.client]
            if self.attack == "absent" and reply.client in self.hostile and request.train:
                failures = [*failures, Failure(reply.client, "lost", "its update is lost")]
                continue
            if reply.client in self.hostile and request.train:
                reply = replace(reply, payload=self.changed(reply.payload, message, request, honest))
            if reply.client in self.registered:
                reply = replace(reply, answer=replace(reply.answer, **self.registered[reply.client]))
            sent.append(reply)
        return sent, failures

    def changed(self, payload: Payload, message: Payload, request: Request, honest: Sequence[Payload]) -> Payload:
        """Return what the hostile client sends."""
        late = request.round > LATE
        if self.attack == "sign flip":
            return scaled(payload, message, -AT_THE_BOUND)
        if self.attack == "honest, then flip":
            return scaled(payload, message, -AT_THE_BOUND if late else AT_THE_BOUND)
        if self.attack == "growing, then flip":
            length = 1.08**request.round
            return scaled(payload, message, -length if late else length)
        if self.attack == "late sign flip":
            return scaled(payload, message, -1.0 if late else 1.0)
        if self.attack == "drift":
            steps = self.first_steps.setdefault(request.client, steps_of(payload, message))
            return stepped(payload, message, {name: -AT_THE_BOUND * step for name, step in steps.items()})
        if self.attack.startswith("noise"):
            return stepped(payload, message, random_steps(payload, message, request))
        if self.attack == "prototype roll" and payload.prototypes is not None and len(payload.prototypes):
            rolled = AT_THE_BOUND * payload.prototypes.vectors.roll(1, 0)
            return replace(
                payload, prototypes=PrototypeSet(rolled, payload.prototypes.labels, payload.prototypes.weights)
            )
        if self.attack == "variances":
            large = {name: 1000 * tensor for name, tensor in payload.weights.items() if name.endswith("running_var")}
            return replace(payload, weights={**payload.weights, **large})
        if self.attack == "little is enough":
            return stepped(payload, message, little(honest, message))
        if self.attack == "inner product" or (self.attack == "late inner product" and late):
            return stepped(payload, message, negative_mean(honest, message))
        return payload

    def close(self) -> None:
        """See :class:`server.run.engine.Engine`."""
        self.inner.close()


def is_parameter(name: str, tensor: Tensor) -> bool:
    """Return whether a tensor is trained: neither a running statistic nor a counter."""
    return tensor.is_floating_point() and "running_" not in name


def steps_of(payload: Payload, message: Payload) -> dict[str, Tensor]:
    """Return how far each parameter moved."""
    steps: dict[str, Tensor] = {}
    for name, tensor in payload.weights.items():
        if is_parameter(name, tensor):
            steps[name] = tensor - message.weights[name]
    return steps


def stepped(payload: Payload, message: Payload, steps: Mapping[str, Tensor]) -> Payload:
    """Return the payload with other steps; running statistics stay honest."""
    moved = {name: message.weights[name] + step for name, step in steps.items()}
    return replace(payload, weights={**payload.weights, **moved})


def scaled(payload: Payload, message: Payload, factor: float) -> Payload:
    """Return the payload with its step and its prototypes multiplied by ``factor``."""
    steps = {name: factor * step for name, step in steps_of(payload, message).items()}
    changed = stepped(payload, message, steps)
    if payload.prototypes is None:
        return changed
    vectors = factor * payload.prototypes.vectors
    return replace(changed, prototypes=PrototypeSet(vectors, payload.prototypes.labels, payload.prototypes.weights))


def random_steps(payload: Payload, message: Payload, request: Request) -> dict[str, Tensor]:
    """Return random steps at the bound, in each tensor in proportion to the honest step."""
    draws = generator(0, "noise", request.client, request.round)
    steps: dict[str, Tensor] = {}
    for name, step in steps_of(payload, message).items():
        deviation = step.std() if step.numel() > 1 else step.abs().sum()
        steps[name] = AT_THE_BOUND * deviation * torch.randn(step.shape, generator=draws)
    return steps


def honest_steps(honest: Sequence[Payload], message: Payload) -> dict[str, Tensor]:
    """Return the honest clients' steps, stacked, by parameter."""
    steps = [steps_of(payload, message) for payload in honest]
    return {name: torch.stack([each[name] for each in steps]) for name in steps[0]}


def little(honest: Sequence[Payload], message: Payload) -> dict[str, Tensor]:
    """Return the mean minus :data:`LITTLE` standard deviations of the honest steps."""
    stacked = honest_steps(honest, message)
    return {name: steps.mean(0) - LITTLE * steps.std(0) for name, steps in stacked.items()}


def negative_mean(honest: Sequence[Payload], message: Payload) -> dict[str, Tensor]:
    """Return the negative mean of the honest steps, at the bound."""
    return {name: -AT_THE_BOUND * steps.mean(0) for name, steps in honest_steps(honest, message).items()}


def flip_labels(device: object, class_count: int) -> None:
    """Turn every label y of the device's training data into K - 1 - y, before it registers."""
    read = device._own_data  # type: ignore[attr-defined]

    def flipped() -> tuple[Split, Split]:
        split, validation = read()
        return replace(split, labels=class_count - 1 - split.labels), validation

    device._own_data = flipped  # type: ignore[attr-defined]


def run(federation: str, method: str, attack: str, defence: str, seed: int, more: Sequence[str] = ()) -> Outcome:
    """Run one attacked federation and return its row."""
    count, overrides = FEDERATIONS[federation]
    chosen = [f"method={method}", f"seed={seed}", f"train.rounds={ROUNDS}", *METHODS[method]]
    chosen += [*DEFENCES.get(defence, ()), *more]
    if defence in ("trimmed_mean", "multi_krum"):
        chosen.append(f"aggregation.attackers={count}")
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        settings = load_settings([*COMMON, *overrides, *chosen, f"output={folder}"])
        prepare_output(settings)
        engine = HostileEngine(settings, attack, count)
        rounds = RoundLoop(settings, engine)
        if defence == "server_images":
            rounds.federation.agreement = ServerImages(settings.seed, federation=rounds.federation)
        if defence == "classifier":
            rounds.federation.agreement = ClassifierDirections(settings.seed, hostile=frozenset(engine.hostile))
        rounds.run()
        engine.close()
        rows = read_rows(Path(folder) / "activity.csv")
        score = rounds.history.round_scores()[-1]
    statuses = Counter(row["status"] for row in rows)
    reasons = [row["reason"] for row in rows if row["status"] == SCALED and row["client"] not in engine.hostile]
    shortened = sum("longer than the bound" in reason for reason in reasons)
    left_out = sum("left out: its" in reason for reason in reasons)
    where = environment(torch.device("cpu"))
    return Outcome(
        federation, method, attack, defence, seed, round(score.average, 3), round(score.worst, 3),
        statuses[SCALED], statuses["refused"], shortened, left_out,
        round(time.process_time() - started, 2), str(where["torch"]), str(where["commit"]), str(where["when"]),
    )  # fmt: skip


def plan(
    seeds: Sequence[int],
    federations: Sequence[str],
    methods: Sequence[str],
    attacks: Sequence[str],
    defences: Sequence[str],
) -> Iterator[Key]:
    """Yield the runs of the table, a column after the other."""
    for defence in defences:
        for federation in federations:
            for method in methods:
                for attack in attacks:
                    if attack == "prototype roll" and method == "fedavg":
                        continue  # it sends no prototypes
                    if attack == "absent" and defence == "multi_krum":
                        continue  # it needs five updates
                    for seed in seeds:
                        yield federation, method, attack, defence, seed


def load(path: Path) -> list[Outcome]:
    """Return the rows of the CSV, typed; none if it does not exist. A run that is there twice counts once."""
    kinds: dict[str, Any] = dict.fromkeys(("seed", "clipped", "refused", "honest_clipped", "honest_left_out"), int)
    kinds |= dict.fromkeys(("average", "worst", "seconds"), float)
    outcomes: dict[Key, Outcome] = {}
    for row in read_rows(path):
        outcome = Outcome(**{name: kinds.get(name, str)(value) for name, value in row.items()})
        outcomes[key_of(outcome)] = outcome
    return list(outcomes.values())


def table(outcomes: Sequence[Outcome]) -> str:
    """Return Markdown: rows are federation, method and attack; columns the defences that were run."""
    run_defences = {outcome.defence for outcome in outcomes}
    defences = [defence for defence in DEFENCES if defence in run_defences]
    lines = [
        "| hostile | method | attack | " + " | ".join(defences) + " |",
        "|---|---|---|" + "---:|" * len(defences),
    ]
    for federation in FEDERATIONS:
        for method in METHODS:
            for attack in ATTACKS:
                wanted = (federation, method, attack)
                mine = [item for item in outcomes if (item.federation, item.method, item.attack) == wanted]
                if not mine:
                    continue
                cells: list[str] = []
                for defence in defences:
                    averages = [item.average for item in mine if item.defence == defence]
                    cells.append(mean_and_spread(averages, len(SEEDS)))
                lines.append(f"| {federation} | {method} | {attack} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def dry_run() -> None:
    """Run one attacked federation for two rounds on few images."""
    few = ("protocol.samples=24", "rounds.test_samples=8", "train.rounds=2")
    print(run("1 of 5", "fpl", "sign flip", "default", 0, few))
    print(table(load(RESULTS)))


def main() -> None:
    """Run what is missing, then print the table."""
    options = arguments(__doc__)
    options.add_argument("--classifier", action="store_true", help="print cosines of the classifier's weights")
    options.add_argument("--table", action="store_true", help="only print the table of the rows that are there")
    options.add_argument("--results", type=Path, default=RESULTS)
    options.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    options.add_argument("--federations", nargs="+", default=list(FEDERATIONS), choices=list(FEDERATIONS))
    options.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    options.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=list(ATTACKS))
    options.add_argument("--defences", nargs="+", default=list(DEFENCES), choices=list(DEFENCES))
    chosen = options.parse_args()
    torch.set_num_threads(1)
    if chosen.dry_run:
        dry_run()
        return
    if chosen.classifier:
        for attack in ("none", "label flip", "noise", "sign flip"):
            print(attack)
            run("1 of 5", "fedavg", attack, "classifier", 0, ("train.rounds=7",))
        return
    outcomes = load(chosen.results)
    done = {key_of(outcome) for outcome in outcomes}
    if not chosen.table:
        for key in plan(chosen.seeds, chosen.federations, chosen.methods, chosen.attacks, chosen.defences):
            if key in done:
                continue
            outcomes.append(run(*key))
            append_rows(chosen.results, [asdict(outcomes[-1])])
            print(outcomes[-1], flush=True)
    print(table(outcomes))


if __name__ == "__main__":
    start(main)
