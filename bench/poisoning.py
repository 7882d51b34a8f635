"""What hostile clients do to accuracy, and what each defence costs honest clients that are unlike the others.

    python bench/poisoning.py           # every run that bench/results/poisoning.csv does not hold yet, then the tables
    python bench/poisoning.py --table   # the tables of what is there
    python bench/poisoning.py --dry-run  # one attacked run of two rounds on few images; writes nothing

Clients of different domains train for 15 rounds. Hostile clients are drawn by the seed; what they do is the setting
``attack`` (``strategies/core/attacks.py``). Everything else is the shipped code. Runs are inline, in this process, on
one thread.
"""

from __future__ import annotations

import itertools
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, not an installed package

from bench.measuring import arguments, environment, start
from bench.rows import append_rows, mean_and_spread, read_all
from common.config import checked
from common.errors import EngineError
from common.numerics import generator
from common.settings import RunSettings, load_settings
from common.wire.messages import SCALED
from common.wire.payload import Payload
from server.engines.inline import InlineEngine
from server.run.conduct import prepare_output
from server.run.rounds import RoundLoop
from server.run.schema import REPLIES, read_lines
from strategies.core.attacks import AT_THE_BOUND, Seen, SignFlip, drawn, stepped, steps_of

RESULTS = Path(__file__).parent / "results" / "poisoning.csv"
SEEDS = (0, 1, 2)
METHODS = ("fedavg", "fpl")

ATTACKS: dict[str, str] = {
    "none": "",
    "sign flip": "sign_flip",
    "sign flip of 3": "sign_flip",
    "blind flip": "bench.poisoning.BlindFlip",
    "framing": "framing",
    "noise, 9e6 samples": "noise",
    "label flip": "label_flip",
    "variances": "variances",
    "little is enough": "little_is_enough",
}
"""The attack of each case, as ``goldfinch run attack=`` has it."""

STEPS = ("sign flip", "sign flip of 3", "blind flip", "framing", "little is enough")
"""Attacks by the update alone, which are run for each share of hostile clients."""

LONG = f"attack.strength={AT_THE_BOUND:g}"
STRENGTHS = {
    "sign flip": LONG,
    "sign flip of 3": "attack.strength=3.0",
    "blind flip": LONG,
    "framing": LONG,
    "noise, 9e6 samples": LONG,
    "variances": LONG,
}
"""The strength of an attack; others have none, or their own."""
UNLIKE = {
    "rare domain": "four clients have handwritten digits, one has signs",
    "80/10/10": "three clients of three domains; one has 80 % of the samples",
}
"""Honest federations with one client that is unlike the others."""

DEFENCES: dict[str, tuple[str, ...]] = {
    "mean": (),
    "guarded": ("rounds=guarded",),
    "geometric median": ("aggregation=geometric_median",),
    "limits": ("rounds.largest_client=2", "rounds.largest_share=0.5"),
}
"""Overrides of each defence. ``mean`` is what runs by default."""

LIMITED = ("noise, 9e6 samples", "80/10/10")
"""Cases in which limits on samples alone are tried: a client has, or claims to have, most samples."""

ROUNDS = 15
BLIND = 4096
"""Numbers that "blind flip" replaces."""

FOUR = ("data.domains=[handwritten,printed,signs,sketch]", "protocol=one_per_domain", "protocol.samples=200")
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
    "1 of 4": (1, FOUR, ("none", *STEPS)),
    "1 of 5": (1, FIVE, tuple(ATTACKS)),
    "1 of 10": (1, TEN, STEPS),
    "2 of 10": (2, TEN, ("none", *STEPS)),
    "rare domain": (0, RARE, ("rare domain",)),
    "80/10/10": (0, LARGE, ("80/10/10",)),
}
"""Number of hostile clients, overrides and cases of each federation. Without an attack, 1 of 10 is 2 of 10."""

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


@checked
class BlindFlip(SignFlip):
    """Sign flip at the bound, in which 4,096 numbers are replaced so that a sum drawn from the seed looks honest.

    It was made against a comparison of directions that Goldfinch once had.
    """

    def sent(self, payload: Payload, seen: Seen) -> Payload | None:
        """Return the flipped update, whose first block of :data:`BLIND` numbers is replaced."""
        flipped = super().sent(payload, seen)
        assert flipped is not None
        return stepped(flipped, seen.message, blinded(steps_of(payload, seen.message), seen.seed))


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


def own_accuracy(settings: RunSettings, client: str, model: torch.nn.Module) -> float:
    """Return the model's accuracy in per cent on the test images of a client's domain."""
    split = settings.data.load(client.rpartition("-")[0]).test
    with torch.no_grad():
        _, logits = model.eval()(settings.data.augmentation.test(split.images))
    return 100 * float((logits.argmax(1) == split.labels).double().mean())


def run(federation: str, method: str, case: str, defence: str, seed: int, more: Sequence[str] = ()) -> Outcome:
    """Run one federation and return its row."""
    count, overrides, _ = FEDERATIONS[federation]
    chosen = [f"method={method}", f"seed={seed}", f"train.rounds={ROUNDS}", *DEFENCES[defence], *more]
    started = time.process_time()
    average = worst = own = math.nan
    with tempfile.TemporaryDirectory() as folder:
        chosen = [*COMMON, *overrides, *chosen, f"output={folder}"]
        clients = drawn(sorted(spec.id for spec in load_settings(chosen).clients), seed)
        hostile = clients[:count] if ATTACKS.get(case) else []
        if hostile:
            chosen += [f"attack={ATTACKS[case]}", f"attack.clients=[{','.join(hostile)}]"]
        if case in STRENGTHS:
            chosen.append(STRENGTHS[case])
        settings = load_settings(chosen)
        prepare_output(settings)
        subject = SUBJECTS.get(case, clients[count])
        engine = InlineEngine(settings)
        rounds = RoundLoop(settings, engine)
        try:
            rounds.run()
            score = rounds.history.round_scores()[-1]
            average, worst = score.average, score.worst
            model = rounds.federation.new_model()
            model.load_state_dict({**model.state_dict(), **rounds.state.weights})
            own = own_accuracy(settings, subject, model)
        except EngineError as error:
            print(f"ended: {str(error)[:200]}", flush=True)
        engine.close()
        rows = read_lines(Path(folder) / REPLIES)
    altered = Counter(row["client"] for row in rows if row["status"] == SCALED)
    scaled = sum(altered[client] for client in hostile)
    where = environment(torch.device("cpu"))
    return Outcome(
        federation, method, case, defence, seed, round(average, 3), round(worst, 3), subject, round(own, 3),
        altered.total() - scaled, scaled, altered[subject], sum(row["status"] == "refused" for row in rows),
        rounds.state.sha256()[:16], round(time.process_time() - started, 2),
        str(where["torch"]), str(where["commit"]), str(where["when"]),
    )  # fmt: skip


def plan(options: Any) -> Iterator[Key]:
    """Yield the runs of the tables that the command line asks for."""
    for seed, method, federation in itertools.product(options.seeds, options.methods, options.federations):
        for case in FEDERATIONS[federation][2]:
            if case not in options.cases:
                continue
            for defence in options.defences:
                if defence != "limits" or case in LIMITED:
                    yield (federation, method, case, defence, seed)


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
    """Return mean ± standard deviation of the accuracy over all domains; of runs that all ended early, that they do."""
    values = [item.average for item in outcomes if not math.isnan(item.average)]
    ended = len(outcomes) - len(values)
    if ended == len(SEEDS):
        return "ends"
    if ended:
        return f"{ended} of {len(outcomes)} end; {mean_and_spread(values)}"
    return mean_and_spread(values, len(SEEDS))


def cost(outcomes: Sequence[Outcome], plain: Mapping[int, Outcome]) -> str:
    """Return the change of the subject's own accuracy against the plain mean, and the share of its scaled updates."""
    gains = [item.own - plain[item.seed].own for item in outcomes if item.seed in plain]
    altered = sum(item.own_altered for item in outcomes)
    text = mean_and_spread(gains, len(SEEDS), sign="+")
    if altered:
        text += f" ({altered}/{ROUNDS * len(outcomes)})"
    return text


def table(outcomes: Sequence[Outcome], *, unlike: bool) -> str:
    """Return Markdown: columns for each method, with ``unlike`` the table of :data:`UNLIKE`."""
    mine = [item for item in outcomes if (item.case in UNLIKE) == unlike]
    defences = [name for name in DEFENCES if name != "limits"]
    titles = [f"{method}, {defence}" for method in METHODS for defence in defences]
    lines = ["| federation | case | " + " | ".join(titles) + " |", "|---|---|" + "---:|" * len(titles)]
    shown: set[str] = set()
    for federation, (_, _, cases) in FEDERATIONS.items():
        for case in cases:
            found = [item for item in mine if (item.federation, item.case) == (federation, case)]
            cells = [_cell_of(found, method, defence, unlike=unlike) for method in METHODS for defence in defences]
            if found:
                first = federation not in shown
                lines.append(f"| {federation if first else ''} | {case} | " + " | ".join(cells) + " |")
                shown.add(federation)
    return "\n".join(lines)


def _cell_of(found: Sequence[Outcome], method: str, defence: str, *, unlike: bool) -> str:
    """Return the cell of a method and a defence among the runs of one federation and case."""
    mine = [item for item in found if item.method == method]
    chosen = [item for item in mine if item.defence == defence]
    if not unlike:
        return cell(chosen)
    if defence == "mean" or not chosen:
        return mean_and_spread([item.own for item in chosen], len(SEEDS))
    return cost(chosen, {item.seed: item for item in mine if item.defence == "mean"})


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
