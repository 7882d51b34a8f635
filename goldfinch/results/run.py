"""Read a run's folder: its files, what they record, its models and its data. All other code reads runs through it.

torch takes seconds to import, and a table is shown without it. So this module imports torch, and what needs it, in the
methods that return settings, models or data.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from common.config import build
from common.errors import CheckpointError, ConfigError, GoldfinchError, nearest
from common.metrics import MEASURES, METRICS, ClassTotals, Measure, RoundScore
from common.regular_files import read_small
from common.run_config import attack_text, check_trusted, read_config, result_settings
from common.scores import RunScores, Scorers, class_totals, lines_on, test_images
from common.text import printable
from common.versions import CODE, hash_of_files, processor_name
from server.run.history import (
    answers,
    check_version,
    counts_less,
)
from server.run.measures import measures_in
from server.run.schema import EVENTS, REPLIES, SCORES, check_events, check_lines, read_lines, reading, stream_lines

if TYPE_CHECKING:
    from torch import Tensor, nn

    from common.data.batches import Split
    from common.data.protocols import ClientSpec
    from common.models.base import Model
    from common.settings import RunSettings
    from server.run.checkpoint import Checkpoint
    from server.run.prototype_log import Page
    from strategies.core.federation import Federation
    from strategies.core.method import Method


@dataclass(frozen=True)
class RunFolder:
    """A run's folder, finished or not. Each file is read when it is first needed.

    Every property raises :class:`~common.errors.ConfigError` if its file is missing or damaged.

    Args:
        folder: the run's output folder.
        chosen: the round of the models and prototypes: ``last``, ``best`` by validation, or a round's number.
        metric: the metric of scores on test images, one of :attr:`measures`.
    """

    folder: Path
    chosen: str = "last"
    metric: str = "accuracy"

    @classmethod
    def open(cls, folder: Path | str) -> RunFolder:
        """Return the finished run in ``folder``.

        Raises:
            ConfigError: the folder holds no finished run.
        """
        run = cls(Path(folder))
        if not run.summary:
            raise ConfigError(f"{folder} holds no finished run: summary.json is missing")
        return run

    # ---- its files -------------------------------------------------------------------------------------------------

    @property
    def config_file(self) -> Path:
        """The file of :attr:`config`."""
        return self.folder / "config.yaml"

    @property
    def records(self) -> tuple[Path, Path]:
        """The files that suffice to check a finished run's scores: ``summary.json`` and ``scores.jsonl``."""
        return self.folder / "summary.json", self.folder / SCORES

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """``summary.json``; empty if the run has not finished."""
        path = self.folder / "summary.json"
        if not path.exists():
            return {}
        with reading(path):
            content: dict[str, Any] = json.loads(path.read_text())
        check_lines(path, [content])
        return content

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """``config.yaml``. It may name classes that must not be imported; see :attr:`trusted_config`."""
        if not self.config_file.exists():
            raise ConfigError(f"{self.folder} holds no run: it has no config.yaml")
        return read_config(self.config_file)

    @property
    def trusted_config(self) -> Mapping[str, Any]:
        """``config.yaml``, of which everything may be built.

        Scores are read without it, so a table needs none of the user's own classes.

        Raises:
            ConfigError: it names a class that may not be imported.
        """
        check_trusted(self.config, self.config_file)
        return self.config

    @cached_property
    def options(self) -> Mapping[str, Any]:
        """Every setting that changes the result, except the seed, by its ``a.b.c`` key."""
        return {"rounds.metric": self.validation_metric} | result_settings(self.config, ("seed",))

    @cached_property
    def scores(self) -> Sequence[Mapping[str, Any]]:
        """Lines of ``scores.jsonl`` on test images."""
        return lines_on("test", self.all_scores)

    @cached_property
    def all_scores(self) -> Sequence[Mapping[str, Any]]:
        """Lines of ``scores.jsonl``; none if there is no such file.

        Raises:
            ConfigError: an earlier version wrote the folder.
        """
        return self._lines(SCORES)

    @cached_property
    def replies(self) -> Sequence[Mapping[str, Any]]:
        """Lines of ``replies.jsonl``; none if there is no such file.

        Raises:
            ConfigError: an earlier version wrote the folder.
        """
        return self._lines(REPLIES)

    def _lines(self, name: str) -> Sequence[Mapping[str, Any]]:
        check_version(self.folder)
        path = self.folder / name
        if not path.exists():
            return []
        return read_lines(path)

    @cached_property
    def events(self) -> Sequence[Mapping[str, Any]]:
        """Lines of ``events.jsonl``."""
        events = read_lines(self.folder / EVENTS)
        check_events(self.folder / EVENTS, events)
        return events

    @property
    def confusions(self) -> Sequence[Mapping[str, Any]]:
        """The confusion counts on test images: round, client, domain, and those of :func:`common.metrics.cells_of`."""
        found: list[Mapping[str, Any]] = []
        for line in self.scores:
            if "confusion" in line:
                place = {"round": line["round"], "client": line["client"], "domain": line["domain"]}
                found.append(place | line["confusion"])
        return found

    @cached_property
    def pages(self) -> Sequence[Page]:
        """The prototypes of the rounds that were kept."""
        from server.run.prototype_log import read_pages

        return read_pages(self.folder / "prototypes")

    # ---- what they record ------------------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """The method's name as papers write it: its class."""
        return str(self.config["method"]["_target_"]).rpartition(".")[2]

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.config["seed"])

    @property
    def names(self) -> tuple[str, str, str]:
        """Data set, protocol and model, each by its option's name."""
        known = {**self.summary, **self.config.get("choices", {})}
        return str(known.get("data", "")), str(known.get("protocol", "")), str(known.get("model", ""))

    @property
    def method_name(self) -> str:
        """The name of the method's option."""
        if "method" in self.summary:
            return str(self.summary["method"])
        return str(self.config["method"]["_target_"]).rpartition(".")[0].rpartition(".")[2]

    @property
    def scored(self) -> bool:
        """Whether the run scores test images; trials of ``goldfinch compare`` do not."""
        return bool(dict(self.config.get("rounds", {})).get("test", True))

    @property
    def rounds_done(self) -> int:
        """Completed rounds; for a finished run, the number in its summary."""
        if "rounds" in self.summary:
            return int(self.summary["rounds"])
        return self.rounds

    @property
    def stopped_early(self) -> bool:
        """Whether ``train.patience`` ended the run before its last round."""
        return "stopped_early" in self.summary

    @property
    def at_chance(self) -> bool:
        """Whether the last score is not clearly better than one class for every image, as the run reported."""
        for entry in reversed(self._kept_events):
            if entry["event"] == "at chance":
                return int(entry["round"]) == self.rounds_done
        return False

    @property
    def state_sha256(self) -> str | None:
        """The SHA-256 of the final state; ``None`` if the run has not finished."""
        found = self.summary.get("state_sha256")
        if found is None:
            return None
        return str(found)

    @cached_property
    def answers(self) -> Mapping[str, int]:
        """The number of updates that were used, as ``admitted``, and of replies with each other status."""
        if "answers" in self.summary:
            return dict(self.summary["answers"])
        path = self.folder / REPLIES
        if not path.exists():
            return {}
        return answers(stream_lines(path))

    @cached_property
    def counts_less(self) -> Mapping[str, Mapping[str, int]]:
        """The clients that count for fewer samples than they registered; see :func:`server.run.history.counts_less`."""
        if "counts_less" in self.summary:
            return dict(self.summary["counts_less"])
        return counts_less(self._kept_events)

    @cached_property
    def code(self) -> str:
        """The hash of the code that ran, from ``summary.json`` or else ``code.json``; ``unknown`` without either."""
        if "code" in self.summary:
            return str(self.summary["code"])
        return recorded_code(self.folder / "code.json")

    @property
    def processor(self) -> str:
        """The server's processor: model, instruction set, and what restricts it; empty if it is not recorded."""
        return processor_name(self.summary.get("processor", {}))

    @cached_property
    def code_by_package(self) -> Mapping[str, str]:
        """The hash of the code that ran, of ``goldfinch`` and of each package of the user's own."""
        files = recorded_files(self.folder / "code.json")
        packages: dict[str, dict[str, str]] = {}
        for name, digest in files.items():
            package = name.partition("/")[0].removesuffix(".py")
            if package in CODE:
                package = "goldfinch"
            packages.setdefault(package, {})[name] = digest
        if len(packages) < 2 or hash_of_files(files) != self.code:
            return {"goldfinch": self.code}
        return {package: hash_of_files(found) for package, found in packages.items()}

    @cached_property
    def changed_scoring(self) -> list[int]:
        """The numbers of test images of one domain over the rounds, if they differ; empty if every round had the same.

        Earlier versions let ``rounds.test_samples`` change on resume. Means over the rounds of such a run mix scores of
        different images.
        """
        if not any(entry["event"] == "resume" for entry in self._kept_events):
            return []
        counts: dict[tuple[str, str], set[int]] = {}
        for row in self.scores:
            counts.setdefault((str(row["client"]), str(row["domain"])), set()).add(int(row["count"]))
        for found in counts.values():
            if len(found) > 1:
                return sorted(found)
        return []

    @cached_property
    def test_images(self) -> Mapping[str, int]:
        """By domain the test images of one client, the largest number of any round."""
        if "images" in self.summary:
            return dict(self.summary["images"])
        return test_images(self.all_scores)

    @cached_property
    def round_scores(self) -> list[RoundScore]:
        """The metric per domain of every scored round, ascending."""
        if self.metric not in METRICS:
            _ = self.measure  # which says whether the run has it
        with self._named():
            return self._scores.tested()

    @property
    def _scores(self) -> RunScores:
        """The run's scores by :attr:`metric`, and those on validation samples by accuracy."""
        scorers: dict[str, Scorers] = {}
        for entry in self._kept_events:
            if entry["event"] in ("start", "resume"):
                scorers |= {kind: entry[kind] for kind in ("test", "validation") if kind in entry}
        return RunScores(self.all_scores, self._kept_events, scorers, self.measures, self.metric)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Add the run's folder to errors of scores."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(f"{self.folder}: {error}") from error

    @cached_property
    def class_totals(self) -> Mapping[tuple[int, str], ClassTotals]:
        """Images by class of each round and domain on test images, summed over the clients that scored it."""
        return class_totals(self.scores)

    @cached_property
    def measures(self) -> dict[str, Measure]:
        """The metrics that the run has: those of every run, then those that its settings asked for."""
        if "metrics" in self.summary:
            return measures_in(self.summary["metrics"])
        found: Mapping[str, Mapping[str, Any]] = {}
        for entry in self._kept_events:
            if entry["event"] in ("start", "resume"):
                found = entry.get("measures", {})
        return measures_in(found)

    @property
    def measure(self) -> Measure:
        """The description of the metric of scores on test images.

        Raises:
            ConfigError: the run does not have the metric.
        """
        if self.metric not in self.measures:
            raise ConfigError(
                f"{self.folder} has no metric {self.metric}: {nearest(self.metric, self.measures)}; leave the run out, "
                "or run it again with rounds.scores=true or own_metric="
            )
        return self.measures[self.metric]

    @property
    def resolution(self) -> float:
        """How far a value of the metric after the last round may be from the exact one; 0 if it is not binned."""
        return float(dict(self.summary.get("metrics", {})).get(self.metric, {}).get("resolution", 0.0))

    @property
    def has_counts(self) -> bool:
        """Whether every test score has confusion counts, so that the run has every metric of :data:`METRICS`."""
        for score in self.round_scores:
            for domain in score.accuracy:
                if (score.round, domain) not in self.class_totals:
                    return False
        return True

    def by_metric(self, metric: str) -> RunFolder:
        """Return the run with scores by another metric; its files are not read again."""
        found = replace(self, metric=metric)
        for name in (
            "config",
            "options",
            "summary",
            "all_scores",
            "scores",
            "events",
            "class_totals",
            "measures",
        ):
            if name in self.__dict__:
                found.__dict__[name] = self.__dict__[name]  # where cached_property keeps it
        return found

    @cached_property
    def validation_scores(self) -> list[RoundScore]:
        """The validation metric per domain of every round, ascending; empty without validation samples."""
        with self._named():
            return replace(self._scores, chosen_by=self.validation_metric).validated()

    @property
    def validation_metric(self) -> str:
        """What chooses the best round on validation samples, ``rounds.metric``."""
        metric = str(dict(self.config.get("rounds", {})).get("metric", "accuracy"))
        if metric not in MEASURES and metric not in self.measures:
            raise ConfigError(
                f"{self.config_file}: rounds.metric={printable(metric)}; {nearest(metric, self.measures)}"
            )
        return metric

    @property
    def _kept_events(self) -> Sequence[Mapping[str, Any]]:
        """The events; empty if the folder holds only ``summary.json`` and ``scores.jsonl``."""
        if not (self.folder / EVENTS).exists():
            return []
        return self.events

    @cached_property
    def rules(self) -> dict[str, dict[str, Any]]:
        """The scores under each rule, as in ``summary.json``; for an unfinished run, over the rounds it has."""
        ended = not self._kept_events or self.status in ("finished", "failed")
        if self.metric == "accuracy" and "scores" in self.summary and ended:
            found: dict[str, dict[str, Any]] = {}
            for rule, score in self.summary["scores"].items():
                found[rule] = {"missing": self._missing(score), **score}
            return found
        last = int(self.config.get("rounds", {}).get("last_rounds", 5))
        with self._named():
            return replace(self._scores, chosen_by=self.validation_metric).rules(last, self.unseen)

    def _missing(self, score: Mapping[str, Any]) -> dict[str, int | None]:
        """Return the domains that a summary's score lacks, for summaries that do not record them."""
        if "missing" in score or not self.scores:
            return {}
        found: dict[str, int | None] = {}
        for each in self.round_scores:
            for domain in each.accuracy:
                if domain not in score["accuracy"]:
                    found[domain] = each.round
        return found

    @property
    def unseen(self) -> list[str]:
        """The scored domains of which no client held training samples."""
        if "unseen" in self.summary:
            return list(self.summary["unseen"])
        for entry in self._kept_events:
            if "unseen" in entry:
                return list(entry["unseen"])
        return []

    @cached_property
    def privacy(self) -> Mapping[str, Any] | None:
        """What the run has released, as in ``summary.json`` or so far; ``None`` without differential privacy."""
        from server.run.accounting import LEDGER, ReleaseCounts, privacy_report, with_conditions

        if "privacy" in self.summary:
            return with_conditions(self.summary["privacy"])
        if not (self.folder / LEDGER).exists():
            return None
        samples = {client: int(entry["samples"]) for client, entry in self.registrations.items()}
        return privacy_report(self.settings, ReleaseCounts(self.folder), samples)

    @property
    def domains(self) -> list[str]:
        """The run's test domains, scored or missing, in the data set's order, then by name."""
        present: set[str] = set()
        for score in self.round_scores:
            present.update(score.accuracy, score.missing)
        found: list[str] = []
        for name in self.config["data"].get("domains") or []:
            if str(name) in present:
                found.append(str(name))
        return found + sorted(present.difference(found))

    @property
    def registrations(self) -> dict[str, Mapping[str, Any]]:
        """The last registration of each client, by its id."""
        found: dict[str, Mapping[str, Any]] = {}
        for entry in self.events:
            if entry["event"] == "registered":
                found[str(entry["client"])] = entry
        return dict(sorted(found.items()))

    @cached_property
    def class_names(self) -> list[str]:
        """The names of the classes; their numbers if the data set is not installed or has another number of classes."""
        recorded = self.summary.get("class_names")
        if isinstance(recorded, list):
            return list(map(str, recorded))
        try:
            check_trusted({"data": self.config["data"]}, self.config_file)
            names = list(map(str, build(self.config["data"], "data").class_names))
        except (GoldfinchError, OSError, AttributeError):
            names = []
        counts = [len(entry["class_counts"]) for entry in self.registrations.values()]
        if self.confusions:
            counts.append(int(self.confusions[0]["classes"]))
        if counts and len(names) != counts[0]:
            return list(map(str, range(counts[0])))
        return names

    @property
    def rounds(self) -> int:
        """Completed rounds."""
        numbers = [int(entry["round"]) for entry in self.events if entry["event"] == "round done"]
        return max(numbers, default=0)

    @cached_property
    def personal(self) -> bool:
        """Whether each client was scored with its own model, and not all with one."""
        if "scored" in self.summary:
            return bool(self.summary["scored"] == "own model")
        return bool(self._of_method("personal"))

    @property
    def attack(self) -> str:
        """The attack and its hostile clients, such as ``sign_flip by signs-0``; empty if no client was hostile."""
        return attack_text(self.config)

    @cached_property
    def bound(self) -> str | None:
        """The line of a table that the method is, ``lower`` or ``upper``; ``None`` if it is ranked with the others.

        Runs that finished before bounds were recorded have none.
        """
        if self.summary:
            return self.summary.get("bound")
        return self._of_method("bound")

    def _of_method(self, name: str) -> Any:
        """Return an attribute of the run's method; ``None`` if its class may not be imported."""
        try:
            check_trusted({"method": self.config["method"]}, self.config_file)
            return getattr(build(self.config["method"], "method"), name)
        except GoldfinchError:
            return None

    @property
    def yaml(self) -> str:
        """The text of ``config.yaml``."""
        return OmegaConf.to_yaml(OmegaConf.create(dict(self.config)))

    @property
    def status(self) -> str:
        """``finished``, ``stopped``, ``failed``, or ``unfinished``: it is still running, or was killed."""
        for entry in reversed(self.events):
            if entry["event"] == "finish" and not (self.folder / "summary.json").exists():
                break  # it was resumed, which removes the summary
            if entry["event"] in ("finish", "stopped", "failed"):
                return str(entry["event"]).replace("finish", "finished")
            if entry["event"] in ("start", "resume", "round"):
                break
        return "unfinished"

    # ---- settings, models and data ---------------------------------------------------------------------------------

    @cached_property
    def settings(self) -> RunSettings:
        """The run's settings as objects."""
        from common.settings import settings_of

        return settings_of({**self.trusted_config, "output": str(self.folder)})

    @property
    def method(self) -> Method:
        """The run's method."""
        return self.settings.method

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint of the chosen round.

        Raises:
            CheckpointError: there is no such checkpoint.
            ConfigError: ``best`` was chosen, but the run keeps no best round; or the choice is not valid.
        """
        from server.run.checkpoint import BEST, Checkpoints

        kept = Checkpoints(self.folder / "checkpoint")
        if self.chosen.isdigit():
            return kept.at(int(self.chosen))
        if self.chosen not in ("best", "last"):
            raise ConfigError(f"--round {self.chosen}: best, last or a round's number")
        if self.chosen == "best" and not self.has_best:
            raise ConfigError(
                f"{self.folder} keeps no best round: run again with protocol.validation set to a share of the training "
                "images, by which it is chosen, or take --round last"
            )
        if self.chosen == "best":
            kept = Checkpoints(self.folder / "checkpoint", kind=BEST)
        found = kept.load()
        if found is None:
            raise CheckpointError(f"{self.folder} has no checkpoint: the model is gone; run it again")
        return found

    @property
    def has_best(self) -> bool:
        """Whether the run kept the best round by validation."""
        from server.run.checkpoint import BEST, Checkpoints

        return bool(Checkpoints(self.folder / "checkpoint", kind=BEST).series.numbers())

    @cached_property
    def federation(self) -> Federation:
        """The server's half of the method, which makes the model."""
        from strategies.core.federation import Federation

        return Federation(self.settings)

    @cached_property
    def clients(self) -> tuple[ClientSpec, ...]:
        """The run's clients."""
        return self.settings.clients

    @property
    def test_domains(self) -> tuple[str, ...]:
        """The domains that were scored."""
        return tuple(self.settings.protocol.test_domains(self.settings.data))

    def shared_model(self, client: str | None = None) -> tuple[Model, dict[str, Tensor]]:
        """Return the net that classifies, with initial weights, and the shared weights of the chosen round.

        Args:
            client: the client whose net it is, where clients may have different ones; ``None`` is the first.

        Raises:
            CheckpointError: they are not weights of this net.
        """
        from common.exports.model import without_training_parts

        self.federation.check_fits(self.checkpoint.state)
        domain = (client or self.clients[0].id).rpartition("-")[0]
        model = without_training_parts(self.federation.new_model(domain))
        return model, _selected(self.method.scored_weights(self.checkpoint.state), model)

    def model(self, client: str | None = None) -> Model:
        """Return the model as it was scored, in evaluation mode.

        It is the global model, or a client's model if the method keeps a part of it on the clients.

        Args:
            client: a client's id; ``None`` is the first.

        Raises:
            CheckpointError: the client's part is not in the run's folder, as after a run on real devices.
        """
        model, state = self.shared_model(client)
        if len(state) < len(model.state_dict()):
            state |= _selected(self.kept(client or self.clients[0].id), model)
        model.load_state_dict(state)
        return model.eval().requires_grad_(False)

    def inference(self, client: str | None = None) -> nn.Module:
        """Return the module that classifies with :meth:`model`: from prepared images to features and logits."""
        return self.method.inference(self.model(client), self.checkpoint.state.prototypes, self.seed).eval()

    def kept(self, client: str) -> dict[str, Tensor]:
        """Return the part of its model that a client kept.

        Raises:
            CheckpointError: it is not in the run's folder.
        """
        from common.exports.model import kept_part
        from common.storage import folder_name

        own = self.folder / "clients" / self.checkpoint.run / folder_name(client)
        return kept_part(own, (self.checkpoint.counted or {}).get(client), self.method.exchanges)

    def model_for(self, domain: str) -> Model:
        """Return the model that was scored on ``domain``: the global model, or that of the domain's first client."""
        for spec in self.clients:
            if spec.domain == domain:
                return self.model(spec.id)
        return self.model()

    def test_split(self, domain: str) -> Split:
        """Return the images of a domain that were scored."""
        from common.data.protocols import test_subset

        split: Split = self.settings.protocol.test_split(self.settings.data.load(domain))
        return test_subset(split, self.settings.rounds.test_samples, domain)

    def train_split(self, client: ClientSpec) -> Split:
        """Return the samples that a client trained on."""
        return self._parts(client)[0]

    def validation_split(self, client: ClientSpec) -> Split:
        """Return a client's validation samples; empty if ``protocol.validation`` is 0."""
        return self._parts(client)[1]

    def _parts(self, client: ClientSpec) -> tuple[Split, Split]:
        """Return a client's training samples and its validation samples."""
        from common.data.batches import union_of

        training: list[Split] = []
        validation: list[Split] = []
        for spec in client.holds:
            domain = self.settings.data.load(spec.domain)
            trained, validated = self.settings.protocol.parts(domain, spec, self.settings.seed)
            training.append(domain.train.subset(trained))
            validation.append(domain.train.subset(validated))
        return union_of(training), union_of(validation)

    def sample(self, domain: str, count: int) -> Split:
        """Return at most ``count`` test images of a domain, classes in turn; every call returns the same."""
        import torch

        from common.numerics import generator

        split = self.test_split(domain)
        order = torch.randperm(len(split), generator=generator(0, "figure", domain))
        labels = split.labels[order]
        turn = torch.zeros(len(order), dtype=torch.int64)
        for label in labels.unique():
            members = (labels == label).nonzero().squeeze(1)
            turn[members] = torch.arange(len(members))
        return split.subset(order[torch.argsort(turn, stable=True)][:count])

    def features(self, model: Model, split: Split) -> tuple[Tensor, Tensor]:
        """Return features ``[N, D]`` and logits ``[N, K]`` of a split's images, prepared as for testing."""
        import torch

        from common.data.batches import EVALUATION_BATCH

        augmentation = self.settings.data.augmentation
        features, logits = [], []
        with torch.no_grad():
            for images in split.images.split(EVALUATION_BATCH):
                found = model(augmentation.test(images))
                features.append(found[0])
                logits.append(found[1])
        return torch.cat(features), torch.cat(logits)


def _selected(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return those of ``tensors`` that ``model`` has, in the model's order."""
    return {name: tensors[name] for name in model.state_dict() if name in tensors}


def find_runs(folders: Sequence[str], *, finished: bool = True) -> list[RunFolder]:
    """Return the runs in and below ``folders``, each once.

    Args:
        folders: run folders, or folders with runs below them.
        finished: whether to leave out runs that have not finished.

    Raises:
        ConfigError: a folder does not exist, or holds no run; or its ``config.yaml`` cannot be read.
    """
    found: dict[Path, RunFolder] = {}
    mark, kind = "events.jsonl", "run"
    if finished:
        mark, kind = "summary.json", "finished run"
    for text in folders:
        if not Path(text).is_dir():
            raise ConfigError(f"{text} is not a folder")
        runs = [RunFolder(path.parent) for path in sorted(Path(text).rglob(mark))]
        runs = [run for run in runs if run.config_file.exists()]
        if not runs:
            if finished and any(Path(text).rglob("events.jsonl")):
                raise ConfigError(
                    f"{text} holds no finished run: a run is going on or was stopped; goldfinch report {text} "
                    "shows it, goldfinch resume goes on with it"
                )
            raise ConfigError(f"{text} holds no {kind} (no config.yaml with {mark} in it or below it)")
        for run in runs:
            found.setdefault(run.folder.resolve(), run)
    return [run for run in found.values() if run.config]


def varying(runs: Sequence[RunFolder]) -> list[str]:
    """Return the keys of the settings that differ between the runs, those with most values first, then by name."""
    keys: set[str] = set()
    for run in runs:
        keys.update(run.options)
    counts: dict[str, int] = {}
    for key in keys:
        count = len({repr(run.options.get(key)) for run in runs})
        if count > 1:
            counts[key] = count
    return sorted(counts, key=lambda key: (-counts[key], key))


def setting_text(key: str, value: Any) -> str:
    """Return a setting as ``name=value`` without its group; for a class, the group and the class's name."""
    if key.endswith("._target_"):
        key, value = key.removesuffix("._target_"), str(value).rpartition(".")[2]
    return f"{key.rpartition('.')[2]}={brief(value)}"


def brief(value: Any) -> str:
    """Return a setting's value as a short text."""
    if isinstance(value, float):
        return f"{value:g}"
    return printable(str(value))


def recorded_code(path: Path) -> str:
    """Return the hash of the code that ``code.json`` lists; ``unknown`` if it cannot be read."""
    files = recorded_files(path)
    if not files:
        return "unknown"
    return hash_of_files(files)


def recorded_files(path: Path) -> dict[str, str]:
    """Return the hash of each file of code that ``code.json`` lists; empty if it cannot be read."""
    try:
        content = dict(json.loads(read_small(path)))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}
    files: dict[str, str] = {}
    for name, digest in content.items():
        if str(name).endswith((".py", ".yaml")):
            files[str(name)] = str(digest)
    return files
