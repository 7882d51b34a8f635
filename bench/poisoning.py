"""What hostile clients do to accuracy, and what each defence costs honest clients that are unlike the others.

    python bench/poisoning.py           # every run that bench/results/poisoning.csv does not hold yet, then the tables
    python bench/poisoning.py --table   # the tables of what is there
    python bench/poisoning.py --dry-run  # one attacked run of two rounds on few images; writes nothing

Clients of different domains train for 15 rounds. Hostile clients, drawn by the seed, train honestly and change what
they send; for label flip they change what they learn from. They know the defence and what the honest clients send: "at
the bound" means a thousand times too long, so that a bound scales the update to exactly the longest that is accepted.
Honest clients that are unlike the others have other data. Everything else is the shipped code. Runs are inline, in this
process, on one thread.
"""

from __future__ import annotations

import itertools
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, not an installed package

from bench.measuring import arguments, environment, start
from bench.rows import append_rows, mean_and_spread, read_all
from common.data.batches import Split
from common.errors import EngineError
from common.numerics import generator
from common.prototypes import PrototypeSet
from common.settings import RunSettings, load_settings
from common.wire.messages import SCALED, Registration, Request
from common.wire.payload import Payload
from server.engines.inline import InlineEngine
from server.run.conduct import prepare_output
from server.run.engine import Admit, Failure, Reply
from server.run.rounds import RoundLoop
from server.run.schema import REPLIES, read_lines

RESULTS = Path(__file__).parent / "results" / "poisoning.csv"
SEEDS = (0, 1, 2)
METHODS = ("fedavg", "fpl")

ATTACKS = {
    "none": "no client is hostile",
    "absent": "every update of the hostile client is lost: what remains if a defence recognises it at once",
    "sign flip": "the update with the opposite sign, at the bound; prototypes too",
    "quiet sign flip": "the update with the opposite sign and its own length; prototypes too",
    "blind flip": "sign flip at the bound; 4,096 numbers are replaced so that a sum drawn from the seed looks honest",
    "framing": "the opposite of the update of one honest client, at the bound",
    "noise, 9e6 samples": "a random step at the bound, from a client that registers nine million samples",
    "label flip": "label y is trained as K - 1 - y",
    "prototype roll": "each class is sent another class's prototype, at the bound",
    "variances": "running variances a thousand times as large",
    "little is enough": "mean minus 1.5 standard deviations of the honest updates (Baruch et al., 2019)",
    "inner product": "the negative mean of the honest updates, at the bound (Xie et al., 2020)",
}
UNLIKE = {
    "one class": "as many images of one class as the others have of all, or all that the domain has",
    "two classes": "the same with two classes",
    "eight samples": "eight images",
    "inverted": "images with inverted brightness",
    "rare domain": "four clients have handwritten digits, one has signs",
    "80/10/10": "three clients of three domains; one has 80 % of the samples",
}
"""Honest federations with one client that is unlike the others."""

DEFENCES: dict[str, tuple[str, ...]] = {
    "mean": (),
    "uniform": ("method.weighting=uniform",),
    "bound": ("rounds.outliers=clip",),
    "bound, limits": ("rounds.outliers=clip", "rounds.largest_client=2", "rounds.largest_share=0.5"),
    "bound, uniform": ("rounds.outliers=clip", "method.weighting=uniform"),
    "guarded": ("rounds=guarded",),
    "geometric median": ("aggregation=geometric_median",),
    "bound, geometric median": ("rounds.outliers=clip", "aggregation=geometric_median"),
}
"""Overrides of each defence. ``mean`` is what runs by default."""

ROUNDS = 15
AT_THE_BOUND = 1000.0
BLIND = 4096
"""Numbers that "blind flip" replaces."""

FIVE = ("data.domains=[handwritten,printed,signs,sketch,blended]", "protocol=one_per_domain", "protocol.samples=200")
UNEVEN = "protocol=glyphs_uneven"
TEN = (UNEVEN, "protocol.fraction=0.04", "protocol.fractions={handwritten: 0.08, printed: 0.08, sketch: 0.4}")
RARE = (
    UNEVEN, "protocol.counts={handwritten: 4, printed: 0, signs: 1, sketch: 0}",
    "protocol.fraction=0.084", "protocol.fractions={handwritten: 0.14}",
)  # fmt: skip
LARGE = (
    UNEVEN, "protocol.counts={handwritten: 1, printed: 1, signs: 0, sketch: 1}",
    "protocol.fractions={handwritten: 0.067, printed: 0.64, sketch: 0.4}",
)  # fmt: skip
FEDERATIONS: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "1 of 5": (1, FIVE, tuple(ATTACKS)),
    "2 of 10": (2, TEN, tuple(ATTACKS)),
    "5 honest": (0, FIVE, ("one class", "two classes", "eight samples", "inverted")),
    "rare domain": (0, RARE, ("rare domain",)),
    "80/10/10": (0, LARGE, ("80/10/10",)),
}
"""Number of hostile clients, overrides and cases of each federation."""

SUBJECTS = {"rare domain": "signs-0", "80/10/10": "printed-0"}
"""The client whose own accuracy is measured, where the seed does not draw it."""

COMMON = (
    "data=glyphs", "model=small", "tuned=none", "engine=inline", "train.device=cpu", "train.batch_size=32",
    "train.learning_rate=0.1", "rounds.evaluate_every=1000", "rounds.test_samples=200", "overwrite=true",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """One run. Accuracies are in per cent after the last round; ``nan`` if the run ended with an error before it.

    ``own`` is the accuracy of the final model on the kind of data that the client ``subject`` has: the unlike client,
    the one that is framed, or the first honest one. ``altered`` counts updates that the server scaled: of honest
    clients, of hostile ones, and of the subject.
    """

    federation: str
    method: str
    case: str
    defence: str
    seed: int
    average: float
    worst: float
    subject: str
    own: float
    honest_altered: int
    hostile_altered: int
    own_altered: int
    refused: int
    sha256: str
    seconds: float
    torch: str
    commit: str
    when: str


Key = tuple[str, str, str, str, int]


def key_of(outcome: Outcome) -> Key:
    """Return what tells runs apart."""
    return (outcome.federation, outcome.method, outcome.case, outcome.defence, outcome.seed)


class ChangedEngine:
    """The inline engine with some clients' data, registrations or replies changed.

    Args:
        settings: the run's settings.
        case: one of :data:`ATTACKS` or :data:`UNLIKE`.
        count: number of hostile clients.
    """

    simulated = True

    def __init__(self, settings: RunSettings, case: str, count: int) -> None:
        self.inner = InlineEngine(settings)
        self.settings, self.case = settings, case
        self.registered: dict[str, dict[str, Any]] = {}
        clients = sorted(self.inner.devices)
        order = torch.randperm(len(clients), generator=generator(settings.seed, "hostile")).tolist()
        drawn = [clients[index] for index in order]
        self.hostile = set(drawn[:count])
        if case == "none":
            self.hostile = set()
        self.subject = SUBJECTS.get(case, drawn[count])
        self.own_split: Callable[[Split], Split] = lambda split: split
        last = settings.data.class_count - 1
        if case == "label flip":
            for client in self.hostile:
                self._change_data(client, lambda split: replace(split, labels=last - split.labels))
        if case in UNLIKE:
            self._make_unlike()

    def _change_data(self, client: str, change: Callable[[Split], Split]) -> None:
        """Change a client's training images before it registers."""
        device: Any = self.inner.devices[client]
        read = device._own_data

        def changed() -> tuple[Split, Split]:
            split, validation = read()
            return change(split), validation

        device._own_data = changed

    def _make_unlike(self) -> None:
        draws = generator(self.settings.seed, "unlike")
        classes = torch.randperm(self.settings.data.class_count, generator=draws)
        domain = self.settings.data.load(self.subject.rpartition("-")[0])
        if self.case in ("one class", "two classes"):
            kept = classes[: 1 if self.case == "one class" else 2]
            self.own_split = lambda split: split.subset(torch.isin(split.labels, kept).nonzero().flatten())
            available = self.own_split(domain.train)
            order = torch.randperm(len(available), generator=draws)
            self._change_data(self.subject, lambda split: available.subset(order[: len(split)].sort().values))
        if self.case == "eight samples":
            self._change_data(self.subject, lambda split: split.subset(torch.arange(8)))
        if self.case == "inverted":
            self.own_split = lambda split: replace(split, images=255 - split.images)
            self._change_data(self.subject, self.own_split)

    def own_accuracy(self, model: torch.nn.Module) -> float:
        """Return the accuracy in per cent on test images of the kind that the subject has."""
        domain = self.settings.data.load(self.subject.rpartition("-")[0])
        split = self.own_split(domain.test)
        with torch.no_grad():
            _, logits = model.eval()(self.settings.data.augmentation.test(split.images))
        return 100 * float((logits.argmax(1) == split.labels).double().mean())

    def register(self, expected: Sequence[str], admit: Admit, seconds: float) -> list[Failure]:
        """See :class:`server.run.engine.Engine`."""

        def admit_changed(registration: Registration) -> str | None:
            if self.case == "noise, 9e6 samples" and registration.client in self.hostile:
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
        honest: dict[str, Payload] = {}
        for reply in replies:
            if reply.client not in self.hostile and requests[reply.client].train:
                honest[reply.client] = reply.payload
        sent: list[Reply] = []
        for reply in replies:
            request = requests[reply.client]
            if reply.client in self.hostile and request.train:
                if self.case == "absent":
                    failures = [*failures, Failure(reply.client, "lost", "its update is lost")]
                    continue
                reply = replace(reply, payload=self.changed(reply.payload, message, request, honest))
            if reply.client in self.registered:
                reply = replace(reply, answer=replace(reply.answer, **self.registered[reply.client]))
            sent.append(reply)
        return sent, failures

    def changed(self, payload: Payload, message: Payload, request: Request, honest: Mapping[str, Payload]) -> Payload:
        """Return what the hostile client sends."""
        case = self.case
        if case in ("sign flip", "blind flip"):
            sent = scaled(payload, message, -AT_THE_BOUND)
            if case == "blind flip":
                sent = stepped(sent, message, blinded(steps_of(payload, message), self.settings.seed))
            return sent
        if case == "quiet sign flip":
            return scaled(payload, message, -1.0)
        if case == "framing":
            against = steps_of(honest[self.subject], message) if self.subject in honest else {}
            return stepped(payload, message, {name: -AT_THE_BOUND * step for name, step in against.items()})
        if case == "noise, 9e6 samples":
            return stepped(payload, message, random_steps(payload, message, request))
        if case == "prototype roll" and payload.prototypes is not None and len(payload.prototypes):
            sets = payload.prototypes
            rolled = PrototypeSet(AT_THE_BOUND * sets.vectors.roll(1, 0), sets.labels, sets.weights)
            return replace(payload, prototypes=rolled)
        if case == "variances":
            large = {name: 1000 * tensor for name, tensor in payload.weights.items() if name.endswith("running_var")}
            return replace(payload, weights={**payload.weights, **large})
        if case in ("little is enough", "inner product"):
            steps: dict[str, Tensor] = {}
            for name, stacked in honest_steps(honest, message).items():
                steps[name] = -AT_THE_BOUND * stacked.mean(0)
                if case == "little is enough":
                    steps[name] = stacked.mean(0) - 1.5 * stacked.std(0)
            return stepped(payload, message, steps)
        return payload

    def close(self) -> None:
        """See :class:`server.run.engine.Engine`."""
        self.inner.close()


def steps_of(payload: Payload, message: Payload) -> dict[str, Tensor]:
    """Return how far each parameter moved; running statistics and counters are none."""
    steps: dict[str, Tensor] = {}
    for name, tensor in payload.weights.items():
        if tensor.is_floating_point() and "running_" not in name:
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


def blinded(steps: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return the flipped step at the bound, whose first block of :data:`BLIND` numbers is replaced.

    The sum of its blocks, each number with a sign drawn from the seed, is that of the honest step.
    """
    flat = torch.cat([step.flatten() for step in steps.values()])
    padded = torch.zeros(math.ceil(len(flat) / BLIND) * BLIND)
    padded[: len(flat)] = flat
    signs = 2.0 * torch.randint(2, padded.shape, generator=generator(seed, "agreement")) - 1
    sketch = (signs * padded).view(-1, BLIND).sum(0)
    sent = -padded
    sent[:BLIND] += 2 * signs[:BLIND] * sketch
    parts = (AT_THE_BOUND * sent[: len(flat)]).split([step.numel() for step in steps.values()])
    return {name: part.view(steps[name].shape) for name, part in zip(steps, parts, strict=True)}


def random_steps(payload: Payload, message: Payload, request: Request) -> dict[str, Tensor]:
    """Return random steps at the bound, in each tensor in proportion to the honest step."""
    draws = generator(0, "noise", request.client, request.round)
    steps: dict[str, Tensor] = {}
    for name, step in steps_of(payload, message).items():
        deviation = step.std() if step.numel() > 1 else step.abs().sum()
        steps[name] = AT_THE_BOUND * deviation * torch.randn(step.shape, generator=draws)
    return steps


def honest_steps(honest: Mapping[str, Payload], message: Payload) -> dict[str, Tensor]:
    """Return the honest clients' steps, stacked, by parameter."""
    steps = [steps_of(payload, message) for payload in honest.values()]
    return {name: torch.stack([each[name] for each in steps]) for name in steps[0]}


def run(federation: str, method: str, case: str, defence: str, seed: int, more: Sequence[str] = ()) -> Outcome:
    """Run one federation and return its row."""
    count, overrides, _ = FEDERATIONS[federation]
    chosen = [f"method={method}", f"seed={seed}", f"train.rounds={ROUNDS}", *DEFENCES[defence], *more]
    started = time.process_time()
    average = worst = own = math.nan
    with tempfile.TemporaryDirectory() as folder:
        settings = load_settings([*COMMON, *overrides, *chosen, f"output={folder}"])
        prepare_output(settings)
        engine = ChangedEngine(settings, case, count)
        rounds = RoundLoop(settings, engine)
        try:
            rounds.run()
            score = rounds.history.round_scores()[-1]
            average, worst = score.average, score.worst
            model = rounds.federation.new_model()
            model.load_state_dict({**model.state_dict(), **rounds.state.weights})
            own = engine.own_accuracy(model)
        except EngineError as error:
            print(f"ended: {str(error)[:200]}", flush=True)
        engine.close()
        rows = read_lines(Path(folder) / REPLIES)
    altered = Counter(row["client"] for row in rows if row["status"] == SCALED)
    hostile = sum(altered[client] for client in engine.hostile)
    where = environment(torch.device("cpu"))
    return Outcome(
        federation, method, case, defence, seed, round(average, 3), round(worst, 3), engine.subject, round(own, 3),
        altered.total() - hostile, hostile, altered[engine.subject], sum(row["status"] == "refused" for row in rows),
        rounds.state.sha256()[:16], round(time.process_time() - started, 2),
        str(where["torch"]), str(where["commit"]), str(where["when"]),
    )  # fmt: skip


MAIN = ("mean", "bound", "guarded", "geometric median", "bound, geometric median")
SHORT = ("mean", "bound", "guarded", "geometric median")
ALL = tuple(DEFENCES)
PRINTED = ("mean", "guarded", "geometric median")
"""Columns of the tables; the other defences are parts of these, run where they tell something."""

FIRST: dict[str, dict[str, tuple[str, ...]]] = {
    "1 of 5": {"none": MAIN, "noise, 9e6 samples": ALL, "sign flip": MAIN},
    "rare domain": {"rare domain": MAIN},
    "5 honest": {"eight samples": (*MAIN, "uniform"), "one class": (*SHORT, "uniform")},
    "80/10/10": {"80/10/10": ALL},
}
SECOND: dict[str, dict[str, tuple[str, ...]]] = {
    "1 of 5": {
        **dict.fromkeys(("label flip", "inner product", "quiet sign flip"), MAIN),
        **dict.fromkeys(("blind flip", "framing"), SHORT[1:]),
        "little is enough": SHORT,
        "prototype roll": SHORT,
        "variances": SHORT,
        "absent": ("mean",),
    },
    "5 honest": {"two classes": SHORT, "inverted": SHORT},
}
LAST: dict[str, dict[str, tuple[str, ...]]] = {
    "2 of 10": dict.fromkeys(
        ("none", "noise, 9e6 samples", "sign flip", "label flip"),
        ("mean", "bound, uniform", "geometric median", "guarded"),
    ),
}
"""Defences by federation and case, the most telling first. Without limits on samples, defences that differ only in what
samples count for are the same where all clients have as many."""


def plan(options: Any) -> Iterator[Key]:
    """Yield the runs of the tables that the command line asks for."""
    for stage, method in itertools.product((FIRST, SECOND, LAST), METHODS):
        for seed in options.seeds:
            for federation, cases in stage.items():
                for case, defences in cases.items():
                    if (method, case) == ("fedavg", "prototype roll"):
                        continue  # it sends no prototypes
                    if method in options.methods and federation in options.federations and case in options.cases:
                        chosen = [defence for defence in defences if defence in options.defences]
                        yield from [(federation, method, case, defence, seed) for defence in chosen]


def load(path: Path) -> list[Outcome]:
    """Return the rows of the CSV, typed; none if it does not exist. A run that is there twice counts once."""
    kinds: dict[str, Any] = dict.fromkeys(("average", "worst", "own", "seconds"), float)
    kinds |= dict.fromkeys(("seed", "honest_altered", "hostile_altered", "own_altered", "refused"), int)
    outcomes: dict[Key, Outcome] = {}
    for row in read_all(path):
        outcome = Outcome(**{name: kinds.get(name, str)(value) for name, value in row.items()})
        outcomes[key_of(outcome)] = outcome
    return list(outcomes.values())


def cell(outcomes: Sequence[Outcome]) -> str:
    """Return mean ± standard deviation of the accuracy over all domains; how many runs ended with an error."""
    values = [item.average for item in outcomes if not math.isnan(item.average)]
    ended = len(outcomes) - len(values)
    if ended:
        return f"{ended} of {len(outcomes)} runs end" + (f"; {mean_and_spread(values)}" if values else "")
    return mean_and_spread(values, len(SEEDS))


def cost(outcomes: Sequence[Outcome], plain: Mapping[int, Outcome]) -> str:
    """Return the change of the subject's own accuracy against the plain mean, and the share of its altered updates."""
    gains = [item.own - plain[item.seed].own for item in outcomes if item.seed in plain]
    altered = sum(item.own_altered for item in outcomes)
    return f"{mean_and_spread(gains, len(SEEDS), sign='+')} ({altered} of {ROUNDS * len(outcomes)})"


def table(outcomes: Sequence[Outcome], *, unlike: bool) -> str:
    """Return Markdown: a column for each of :data:`PRINTED`; with ``unlike`` the table of :data:`UNLIKE`."""
    mine = [item for item in outcomes if (item.case in UNLIKE) == unlike]
    defences = PRINTED
    lines = [
        "| federation | method | case | " + " | ".join(defences) + " |",
        "|---|---|---|" + "---:|" * len(defences),
    ]
    for federation, (_, _, cases) in FEDERATIONS.items():
        for method in METHODS:
            for case in cases:
                found = [
                    item for item in mine if (item.federation, item.method, item.case) == (federation, method, case)
                ]
                if not found:
                    continue
                plain = {item.seed: item for item in found if item.defence == "mean"}
                cells: list[str] = []
                for defence in defences:
                    chosen = [item for item in found if item.defence == defence]
                    if unlike and chosen and defence != "mean":
                        cells.append(cost(chosen, plain))
                    elif unlike:
                        cells.append(mean_and_spread([item.own for item in chosen], len(SEEDS)))
                    else:
                        cells.append(cell(chosen))
                lines.append(f"| {federation} | {method} | {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def dry_run() -> None:
    """Run one attacked federation for two rounds on few images."""
    few = ("protocol.samples=24", "rounds.test_samples=8", "train.rounds=2")
    print(run("1 of 5", "fpl", "blind flip", "guarded", 0, few))
    print(table(load(RESULTS), unlike=False))


def main() -> None:
    """Run what is missing, then print the tables."""
    options = arguments(__doc__)
    options.add_argument("--table", action="store_true", help="only print the tables of the rows that are there")
    options.add_argument("--results", type=Path, default=RESULTS)
    options.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parts = {"federations": FEDERATIONS, "methods": METHODS, "cases": ATTACKS | UNLIKE, "defences": DEFENCES}
    for name, known in parts.items():
        options.add_argument(f"--{name}", nargs="+", default=list(known), choices=list(known))
    chosen = options.parse_args()
    torch.set_num_threads(1)
    if chosen.dry_run:
        dry_run()
        return
    outcomes = load(chosen.results)
    done = {key_of(outcome) for outcome in outcomes}
    if not chosen.table:
        for key in plan(chosen):
            if key in done:
                continue
            outcomes.append(run(*key))
            append_rows(chosen.results, [asdict(outcomes[-1])])
            print(outcomes[-1], flush=True)
    print(table(outcomes, unlike=False))
    print()
    print(table(outcomes, unlike=True))


if __name__ == "__main__":
    start(main)
