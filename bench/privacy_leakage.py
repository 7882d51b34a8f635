"""What prototypes tell of the images they are means of: a membership attack and an inversion, without and with noise.

    python bench/privacy_leakage.py                                # glyphs, 3 seeds
    GOLDFINCH_DATA=/data python bench/privacy_leakage.py --data glyphs digits
    python bench/privacy_leakage.py --dry-run                      # two rounds of few images; writes nothing

The attacker is the server: it knows every model and prototype of a run without privacy, and public images of the same
domain.

Membership: is an image one of those that a prototype is the mean of? The attacker's score of an image is how far its
feature lies, from the mean of public images of its class, in the direction of the prototype, summed over rounds. AUC:
0.5 is guessing. Inversion: from a grey image, gradient descent until its feature is the prototype of the last round.
Counted is how often the image that is nearest to the result, pixel by pixel, is a training image; it is sought among
as many of them as of others of the same class and domain, so that 0.5 is guessing.

``sent``: what the method sends, seen with the model that came with it, and normalised as in training where its
prototypes are running means of training. Noise multipliers: what ``privacy=gaussian``
makes of the class means under the received model (clip 2, unit one sample; ``0`` only clips). Rows go to
bench/results/privacy_leakage.csv as they come, a second call goes on where the first stopped, and the table and the
picture of docs/results/privacy.md are written again.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, before an installed copy

import torch
from torch import Tensor

from bench.measuring import arguments, start
from bench.rows import append_rows, circumstances, mean_and_spread, read_all
from common.accounting import epsilon
from common.data.batches import Split
from common.models.base import Model
from common.numerics import generator
from common.privacy import clip_rows, gaussian
from common.prototypes import class_means
from common.settings import RunSettings, load_settings
from common.wire.payload import Payload
from goldfinch.results.figures.charts import line_style, new_figure, plain_axes, save
from server.engines.inline import InlineEngine
from server.run.conduct import prepare_output, run_federation

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "privacy_leakage.csv"
ACCURACY = ROOT / "bench" / "results" / "privacy_accuracy.csv"
PAGE = ROOT / "docs" / "results" / "privacy.md"
PICTURE = PAGE.with_name("privacy_leakage.png")
METHODS = ("fpl", "fedapc")
NOISES = (0.0, 0.5, 1.0, 4.0)
INVERTED = ("sent", "1.0")
"""What is inverted; the attack takes longer than the other."""
CLIP, DELTA, ROUNDS, STEPS = 2.0, 1e-5, 6, 100
BASE = ["model=small", "train.learning_rate=0.05", "train.device=cpu", "rounds.test_samples=10"]


@dataclass
class Seen:
    """What the server sees of one client in one round: the model it sent, and the model and prototypes that came."""

    client: str
    received: Mapping[str, Tensor]
    trained: Mapping[str, Tensor]
    prototypes: Mapping[int, Tensor]


class Watching(InlineEngine):
    """The inline engine, which notes what passes."""

    def __init__(self, settings: RunSettings) -> None:
        super().__init__(settings)
        self.rounds: list[list[Seen]] = []

    def exchange(self, message: Payload, requests: Any, seconds: float, **more: Any) -> Any:
        """Note every answer that has prototypes."""
        replies, failures = super().exchange(message, requests, seconds, **more)
        seen = []
        for reply in replies:
            rows = reply.payload.prototypes
            if rows is not None and len(rows):
                by_class = dict(zip(rows.labels.tolist(), rows.vectors.clone(), strict=True))
                seen.append(Seen(reply.client, _copy(message.weights), _copy(reply.payload.weights), by_class))
        if seen:
            self.rounds.append(seen)
        return replies, failures


def _copy(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


@dataclass
class Target:
    """A client's images as the attacker tells them apart: trained on, not trained on, and known to the attacker."""

    members: Split
    others: Split
    public: Split


def target_of(settings: RunSettings, client: str) -> Target:
    """The training images of a client, and test images of its domain: half of them public, half for comparison."""
    spec = next(spec for spec in settings.protocol.clients(settings.data) if spec.id == client)
    domain = settings.data.load(spec.domain)
    trained, _ = settings.protocol.parts(domain, spec, settings.seed)
    order = torch.randperm(len(domain.test), generator=generator(settings.seed, "public", client))
    half = len(order) // 2
    return Target(domain.train.subset(trained), domain.test.subset(order[half:]), domain.test.subset(order[:half]))


class Attacker:
    """A server that knows the architecture, every model and public images of a client's domain."""

    def __init__(self, settings: RunSettings, model: Model) -> None:
        self.settings, self.model = settings, model

    def install(self, weights: Mapping[str, Tensor]) -> None:
        """Evaluate the net with these weights."""
        self.model.load_state_dict(dict(weights))
        self.model.eval().requires_grad_(False)

    @torch.no_grad()
    def features(self, split: Split, *, batch_statistics: bool = False) -> Tensor:
        """Features ``[N, D]`` of images as for testing, normalised as a net is tested or as it trains."""
        self.model.train(batch_statistics)
        parts = [self.model(self.settings.data.augmentation.test(part))[0] for part in split.images.split(256)]
        return torch.cat(parts)

    def invert(self, prototypes: Tensor) -> Tensor:
        """Images ``[N, 3, S, S]`` in 0..255 with features near the prototypes ``[N, D]``."""
        side = self.settings.data.image_size
        self.model.eval()
        images = torch.full((len(prototypes), 3, side, side), 128.0, requires_grad=True)
        optimizer = torch.optim.Adam([images], lr=4.0)
        mean, std = (
            torch.tensor(self.settings.data.augmentation.__dict__[name]).view(-1, 1, 1) for name in ("mean", "std")
        )
        for _ in range(STEPS):
            optimizer.zero_grad()
            features = self.model((images / 255 - mean) / std)[0]
            loss = (features - prototypes).square().sum() + 1e-6 * _roughness(images)
            loss.backward()
            optimizer.step()
            images.data.clamp_(0, 255)
        return images.detach()


def _roughness(images: Tensor) -> Tensor:
    """The sum of squared differences of neighbouring pixels."""
    down, right = images[:, :, 1:] - images[:, :, :-1], images[:, :, :, 1:] - images[:, :, :, :-1]
    return down.square().sum() + right.square().sum()


def noised(features: Tensor, labels: Tensor, noise: float, draws: torch.Generator) -> dict[int, Tensor]:
    """What ``privacy=gaussian`` (one sample) sends in place of the class means of ``features``, by class."""
    means = class_means(clip_rows(features, CLIP), labels, int(labels.max()) + 1)
    deviations = noise * 2 * CLIP / means.weights.double()[:, None]
    vectors = means.vectors.double() + gaussian(tuple(means.vectors.shape), draws) * deviations
    return dict(zip(means.labels.tolist(), clip_rows(vectors, CLIP).float(), strict=True))


def area(members: Sequence[float], others: Sequence[float]) -> float:
    """The probability that a member's score is above another's: the area under the ROC curve."""
    first, second = torch.tensor(members)[:, None], torch.tensor(others)[None]
    return float((first > second).double().mean() + 0.5 * (first == second).double().mean())


def of_class(split: Split, label: int) -> Tensor:
    """Indices of the images of a class."""
    return (split.labels == label).nonzero().squeeze(1)


def membership(
    attacker: Attacker, target: Target, prototypes: Mapping[int, Tensor], *, batch_statistics: bool
) -> dict[int, tuple[Tensor, Tensor]]:
    """Scores of members and of others by class, through the net that is installed."""
    splits = (target.members, target.others, target.public)
    members, others, public = (attacker.features(split, batch_statistics=batch_statistics) for split in splits)
    found = {}
    for label, prototype in prototypes.items():
        known = of_class(target.public, label)
        if len(known) and len(of_class(target.others, label)):
            centre = public[known].mean(0)
            direction = torch.nn.functional.normalize(prototype - centre, dim=0)
            ours, theirs = members[of_class(target.members, label)], others[of_class(target.others, label)]
            found[label] = ((ours - centre) @ direction, (theirs - centre) @ direction)
    return found


def inversion(attacker: Attacker, target: Target, prototypes: Mapping[int, Tensor]) -> list[bool]:
    """Whether the image nearest to each inverted prototype is a training image, among as many that are as are not."""
    labels = [label for label in prototypes if len(of_class(target.others, label))]
    images = attacker.invert(torch.stack([prototypes[label] for label in labels]))
    found = []
    for label, image in zip(labels, images, strict=True):
        ours, theirs = of_class(target.members, label), of_class(target.others, label)
        count = min(len(ours), len(theirs))
        pool = torch.cat([target.members.images[ours[:count]], target.others.images[theirs[:count]]]).float()
        nearest = int((pool - image).square().sum((1, 2, 3)).argmin())
        found.append(nearest < count)
    return found


def attack(engine: Watching, settings: RunSettings, attacker: Attacker, kind: str) -> dict[str, float]:
    """AUC of membership over all rounds, mean over clients and classes, and the share of inversions that hit."""
    targets = {seen.client: target_of(settings, seen.client) for seen in engine.rounds[0]}
    scores: dict[tuple[str, int], list[tuple[Tensor, Tensor]]] = {}
    hits: list[bool] = []
    running = kind == "sent" and settings.method.prototypes_from == "last_epoch_running"
    for number, round_seen in enumerate(engine.rounds):
        for seen in round_seen:
            attacker.install(seen.trained if kind == "sent" else seen.received)
            prototypes, target = seen.prototypes, targets[seen.client]
            if kind != "sent":
                draws = generator(settings.seed, "leakage", kind, number, seen.client)
                prototypes = noised(attacker.features(target.members), target.members.labels, float(kind), draws)
            found = membership(attacker, target, prototypes, batch_statistics=running)
            for label, pair in found.items():
                scores.setdefault((seen.client, label), []).append(pair)
            if kind in INVERTED and number == len(engine.rounds) - 1:
                hits += inversion(attacker, target, prototypes)
    areas = []
    for pairs in scores.values():
        ours, theirs = (sum(part[1:], part[0]) for part in zip(*pairs, strict=True))
        areas.append(area(ours.tolist(), theirs.tolist()))
    return {"auc": statistics.mean(areas), "inversion": statistics.mean(hits) if hits else -1.0}


def measure(data: str, method: str, samples: int, seed: int, rounds: int = ROUNDS) -> Iterator[dict[str, Any]]:
    """Rows of one run: what was sent, and every noise."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = [f"data={data}", f"method={method}", f"protocol.samples={samples}", f"seed={seed}"]
        settings = load_settings([*BASE, *chosen, f"train.rounds={rounds}", f"output={folder}/run"])
        prepare_output(settings)
        engine = Watching(settings)
        summary = run_federation(settings, engine)
        size, names = settings.data.image_size, settings.data.class_names
        attacker = Attacker(settings, settings.model.build(len(names), size, seed, names))
        for kind in ("sent", *map(str, NOISES)):
            started = time.process_time()
            found = attack(engine, settings, attacker, kind)
            spent = epsilon([float(kind)], rounds, DELTA) if kind not in ("sent", "0.0") else None
            yield {
                "data": data,
                "method": method,
                "samples": samples,
                "rounds": rounds,
                "prototypes": kind,
                "seed": seed,
                "conditional_epsilon": "" if spent is None else round(spent, 4),
                "auc": round(found["auc"], 4),
                "inversion": "" if found["inversion"] < 0 else round(found["inversion"], 4),
                "sha256": summary["state_sha256"][:16],
                "seconds": round(time.process_time() - started, 1),
                **circumstances(),
            }


# ---- the page --------------------------------------------------------------------------------------------------------


def spread(rows: Sequence[Mapping[str, str]], column: str) -> str:
    """Mean and sample deviation over seeds, or a dash."""
    values = [float(row[column]) for row in rows if row[column]]
    return mean_and_spread(values, digits=2)


def table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Markdown: a line for each method, number of images and noise."""
    names = {"sent": "as sent", "0.0": "clipped"}
    lines = [
        "| method | images a client | prototypes | conditional epsilon | membership, AUC | inversion hits |",
        "|---|---:|---|---:|---:|---:|",
    ]
    keys = dict.fromkeys((row["data"], row["method"], row["samples"], row["prototypes"]) for row in rows)
    for key in sorted(keys, key=lambda key: (key[0], key[1], int(key[2]), -1.0 if key[3] == "sent" else float(key[3]))):
        group = [row for row in rows if (row["data"], row["method"], row["samples"], row["prototypes"]) == key]
        _, method, samples, kind = key
        spent = f"{float(group[0]['conditional_epsilon']):.1f}" if group[0]["conditional_epsilon"] else "∞"
        name = names.get(kind, f"noise multiplier {float(kind):g}" if kind not in names else "")
        cells = (method, samples, name, spent, spread(group, "auc"), spread(group, "inversion"))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def draw(rows: Sequence[Mapping[str, str]], path: Path) -> None:
    """Membership over conditional epsilon next to the accuracy of FPL over the same, both for the whole run."""
    figure = new_figure(9.0, 3.4)
    left, right = (plain_axes(figure.add_subplot(1, 2, place)) for place in (1, 2))
    glyphs = [row for row in rows if row["data"] == "glyphs"]
    series = dict.fromkeys((row["method"], row["samples"]) for row in glyphs)
    for index, (method, samples) in enumerate(series):
        mine = [row for row in glyphs if (row["method"], row["samples"]) == (method, samples)]
        _line(
            left,
            [row for row in mine if row["conditional_epsilon"]],
            "conditional_epsilon",
            "auc",
            f"{method}, {samples} images, 6 rounds",
            index,
        )
        sent = [float(row["auc"]) for row in mine if row["prototypes"] == "sent"]
        if sent:
            left.axhline(statistics.mean(sent), **{**line_style(index), "marker": "", "linestyle": "--", "alpha": 0.6})
    left.axhline(0.5, color="grey", linewidth=0.8)
    left.set_ylim(0.45, 0.95)
    left.set_title("dashed: as sent, without noise", fontsize=8)
    right.set_title("dashed: nothing protected", fontsize=8)
    left.set_ylabel("membership, AUC")
    accuracy = [row for row in read_all(ACCURACY) if row["data"] == "glyphs"]
    noisy = [row for row in accuracy if row["variant"] == "FPL, prototypes" and row["conditional_epsilon"]]
    _line(right, noisy, "conditional_epsilon", "average", "FPL, prototypes noised, 200 images, 12 rounds", 0)
    level = [float(row["average"]) for row in accuracy if row["variant"] == "FPL, nothing protected"]
    if level:
        right.axhline(statistics.mean(level), **{**line_style(0), "marker": "", "linestyle": "--"})
    right.set_ylabel("average accuracy, %")
    right.set_ylim(0, 100)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(lambda *_: "")
        axes.set_xlabel("conditional epsilon of the run")
        axes.legend(fontsize=6, loc="upper left")
    save(figure, path)


def _line(axes: Any, rows: Sequence[Mapping[str, str]], across: str, up: str, label: str, index: int) -> None:
    points: dict[float, list[float]] = {}
    for row in rows:
        points.setdefault(float(row[across]), []).append(float(row[up]))
    places = sorted(points)
    axes.plot(places, [statistics.mean(points[place]) for place in places], label=label, **line_style(index))


def write_page(rows: Sequence[Mapping[str, str]]) -> None:
    """The table and the picture of what was measured so far."""
    draw(rows, PICTURE)
    begin, end = "<!-- leakage -->\n", "<!-- /leakage -->\n"
    before, _, rest = PAGE.read_text().partition(begin)
    PAGE.write_text(before + begin + "\n".join(table(rows)) + "\n" + end + rest.partition(end)[2])


def main() -> None:
    """Measure what is missing, then write table and picture."""
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--samples", type=int, nargs="*", default=[40, 200])
    parser.add_argument("--data", nargs="*", default=["glyphs"])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.dry_run:
        print("\n".join(map(str, measure("glyphs", "fpl", 40, 0, rounds=2))))
        return
    done = {(row["data"], row["method"], row["samples"], row["seed"]) for row in read_all(RESULTS)}
    for data in chosen.data:
        for seed in chosen.seeds:
            for method in METHODS:
                for samples in chosen.samples:
                    if (data, method, str(samples), str(seed)) not in done:
                        rows = list(measure(data, method, samples, seed))
                        append_rows(RESULTS, rows)
                        print(*rows, sep="\n", flush=True)
    write_page(read_all(RESULTS))


if __name__ == "__main__":
    start(main)
