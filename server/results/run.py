"""The one reader of a run's folder: its files, what they say, and its models and data again; and what to call runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from common.config import build
from common.data.batches import EVALUATION_BATCH, Split
from common.data.protocols import ClientSpec, test_subset
from common.errors import CheckpointError, ConfigError, GoldfinchError
from common.exports.model import kept_part, without_training_parts
from common.metrics import METRICS, ClassTotals, Metric, RoundScore, summarise
from common.models.base import Model
from common.regular_files import read_small
from common.seeding import generator
from common.settings import RunSettings, read_config, result_settings, settings_of
from common.storage.files import folder_name
from common.versions import hash_of_files
from common.wire.messages import printable
from server.run.accounting import LEDGER, Ledger, privacy_report, with_conditions
from server.run.checkpoint import BEST, Checkpoint, Checkpoints
from server.run.history import class_totals, round_scores, rows_on, scores_by
from server.run.prototype_log import Page, read_pages
from server.run.schema import check_events, check_lines, read_lines, read_rows, reading
from strategies.core.federation import Federation
from strategies.core.method import Method


@dataclass(frozen=True)
class Run:
    """A run's folder, finished or not, each file read when it is asked for.

    Every property raises :class:`~common.errors.ConfigError` where its file is missing or damaged.

    Args:
        folder: where it was written.
        chosen: the round whose models and prototypes are given: ``last``, ``best`` by validation, or a round's number.
        metric: what scores on test images are; another one than accuracy is computed from the confusion counts.
    """

    folder: Path
    chosen: str = "last"
    metric: Metric = "accuracy"

    @classmethod
    def open(cls, folder: Path | str) -> Run:
        """A finished run.

        Raises:
            ConfigError: the folder holds none.
        """
        run = cls(Path(folder))
        if not run.summary:
            raise ConfigError(f"{folder} holds no finished run: summary.json is missing")
        return run

    # ---- its files -------------------------------------------------------------------------------------------------

    @property
    def config_file(self) -> Path:
        """Where :attr:`config` is read from."""
        return self.folder / "config.yaml"

    @property
    def records(self) -> tuple[Path, Path]:
        """The files by which a finished run can be checked without its models: ``summary.json`` and ``history.csv``."""
        return self.folder / "summary.json", self.folder / "history.csv"

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """``summary.json``; empty where there is none, as the run has not finished."""
        path = self.folder / "summary.json"
        if not path.exists():
            return {}
        with reading(path):
            content: dict[str, Any] = json.loads(path.read_text())
        check_lines(path, [content])
        return content

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """``config.yaml``."""
        if not self.config_file.exists():
            raise ConfigError(f"{self.folder} holds no run: it has no config.yaml")
        return read_config(self.config_file)

    @cached_property
    def options(self) -> Mapping[str, Any]:
        """Every setting that changes the result, the seed left out, as ``a.b.c`` keys."""
        return result_settings(self.config, ("seed",))

    @cached_property
    def scores(self) -> Sequence[Mapping[str, Any]]:
        """Rows of ``history.csv`` of test images."""
        return rows_on("test", self._history)

    @cached_property
    def _history(self) -> Sequence[Mapping[str, Any]]:
        """All rows of ``history.csv``."""
        return read_rows(self.folder / "history.csv")

    @cached_property
    def activity(self) -> Sequence[Mapping[str, Any]]:
        """Rows of ``activity.csv``."""
        return read_rows(self.folder / "activity.csv")

    @cached_property
    def events(self) -> Sequence[Mapping[str, Any]]:
        """Lines of ``events.jsonl``."""
        events = read_lines(self.folder / "events.jsonl")
        check_events(self.folder / "events.jsonl", events)
        return events

    @cached_property
    def confusions(self) -> Sequence[Mapping[str, Any]]:
        """Lines of ``confusion.jsonl``."""
        path = self.folder / "confusion.jsonl"
        return read_lines(path) if path.exists() else []

    @cached_property
    def pages(self) -> Sequence[Page]:
        """The prototypes of the rounds that were kept."""
        return read_pages(self.folder / "prototypes")

    # ---- what they say ---------------------------------------------------------------------------------------------

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
        choices = self.config.get("choices", {})
        return (
            str(choices.get("data", self.summary.get("data", ""))),
            str(choices.get("protocol", self.summary.get("protocol", ""))),
            str(choices.get("model", self.summary.get("model", ""))),
        )

    @property
    def method_name(self) -> str:
        """The name of the method's option."""
        if "method" in self.summary:
            return str(self.summary["method"])
        return str(self.config["method"]["_target_"]).rpartition(".")[0].rpartition(".")[2]

    @property
    def scored(self) -> bool:
        """Whether test images are scored at all; a trial of a search leaves them alone."""
        return bool(dict(self.config.get("rounds", {})).get("test", True))

    @property
    def rounds_done(self) -> int:
        """Rounds that are done: of a finished run as its summary has it."""
        return int(self.summary["rounds"]) if "rounds" in self.summary else self.rounds

    @property
    def stopped_early(self) -> bool:
        """Whether ``train.patience`` ended the run before its last round."""
        return "stopped_early" in self.summary

    @property
    def state_sha256(self) -> str | None:
        """The SHA-256 of the final state; ``None`` of a run that has not finished."""
        found = self.summary.get("state_sha256")
        return None if found is None else str(found)

    @cached_property
    def code(self) -> str:
        """The hash of the code that ran; of records without it, of ``code.json``; ``unknown`` without either."""
        if "code" in self.summary:
            return str(self.summary["code"])
        return recorded_code(self.folder / "code.json")

    @cached_property
    def round_scores(self) -> list[RoundScore]:
        """The metric per domain of every scored round, ascending."""
        accuracies = round_scores(self.scores, self._scorers("test"))
        if self.metric == "accuracy":
            return accuracies
        try:
            return scores_by(self.metric, accuracies, self.class_totals)
        except KeyError as error:
            number, domain = error.args[0]
            raise ConfigError(
                f"{self.folder} has no confusion counts of {domain} in round {number}, so there is no "
                f"{METRICS[self.metric]}; use --metric accuracy, or leave the run out"
            ) from error

    @cached_property
    def class_totals(self) -> Mapping[tuple[int, str], ClassTotals]:
        """Images by class of each round and domain on test images, summed over the clients that scored it."""
        return class_totals(self.confusions)

    @property
    def has_counts(self) -> bool:
        """Whether there are confusion counts of every test score, so that the run has every metric."""
        for score in self.round_scores:
            if not all((score.round, domain) in self.class_totals for domain in score.accuracy):
                return False
        return True

    def by_metric(self, metric: Metric) -> Run:
        """Return the run with scores by another metric. What was read of its files is not read again."""
        found = replace(self, metric=metric)
        for name in ("config", "options", "summary", "_history", "scores", "events", "class_totals"):
            if name in self.__dict__:
                found.__dict__[name] = self.__dict__[name]  # where cached_property keeps it
        return found

    @cached_property
    def validation_scores(self) -> list[RoundScore]:
        """Accuracy per domain of every round on clients' validation samples, ascending; empty without any."""
        return round_scores(rows_on("validation", self._history), self._scorers("validation"))

    def _scorers(self, kind: str) -> Mapping[str, int] | None:
        """The domains that are scored and by how many clients each, as its last start says; ``None`` if unsaid."""
        found: Mapping[str, int] | None = None
        for entry in self._told:
            if entry["event"] in ("start", "resume") and kind in entry:
                found = entry[kind]
        return found

    @property
    def _told(self) -> Sequence[Mapping[str, Any]]:
        """The events, none where only records were kept."""
        return self.events if (self.folder / "events.jsonl").exists() else []

    @cached_property
    def rules(self) -> dict[str, dict[str, Any]]:
        """The scores under each rule, as in ``summary.json``; of an unfinished run, of the rounds it has."""
        if (
            self.metric == "accuracy"
            and "scores" in self.summary
            and (not self._told or self.status in ("finished", "failed"))
        ):
            scores: Mapping[str, Mapping[str, Any]] = self.summary["scores"]
            return {rule: {"missing": self._missing(score), **score} for rule, score in scores.items()}
        last = int(self.config.get("rounds", {}).get("last_rounds", 5))
        skipped = {int(entry["round"]) for entry in self._told if entry["event"] == "round skipped"}
        return summarise(self.round_scores, last, self.validation_scores, skipped=skipped, unseen=self.unseen)

    def _missing(self, score: Mapping[str, Any]) -> dict[str, int | None]:
        """What a score lacks of the domains that the run scored in any round: for summaries that do not say it."""
        if "missing" in score or not (self.folder / "history.csv").exists():
            return {}
        found: dict[str, int | None] = {}
        for each in self.round_scores:
            found |= {domain: each.round for domain in each.accuracy if domain not in score["accuracy"]}
        return found

    @property
    def unseen(self) -> list[str]:
        """The scored domains of which no client held training samples."""
        if "unseen" in self.summary:
            return list(self.summary["unseen"])
        return next((list(entry["unseen"]) for entry in self._told if "unseen" in entry), [])

    @cached_property
    def privacy(self) -> Mapping[str, Any] | None:
        """What the run has released, as in ``summary.json``; of an unfinished run, so far. ``None`` without privacy."""
        if "privacy" in self.summary:
            return with_conditions(self.summary["privacy"])
        if not (self.folder / LEDGER).exists():
            return None
        samples = {client: int(entry["samples"]) for client, entry in self.registrations.items()}
        return privacy_report(self.settings, Ledger(self.folder), samples)

    @property
    def domains(self) -> list[str]:
        """The run's test domains, scored or missing, in the data set's order, then by name."""
        present = {domain for score in self.round_scores for domain in (*score.accuracy, *score.missing)}
        known = [str(name) for name in self.config["data"].get("domains") or []]
        return [name for name in known if name in present] + sorted(present - set(known))

    @property
    def registrations(self) -> dict[str, Mapping[str, Any]]:
        """The last registration of each client, by its id."""
        found = {str(entry["client"]): entry for entry in self.events if entry["event"] == "registered"}
        return dict(sorted(found.items()))

    @cached_property
    def class_names(self) -> list[str]:
        """The classes' names; their numbers where the data set is not described here."""
        counts = [len(entry["class_counts"]) for entry in self.registrations.values()]
        counts += [int(line["classes"]) for line in self.confusions[:1]]
        try:
            names = [str(name) for name in build(self.config["data"], "data").class_names]
        except (GoldfinchError, OSError, AttributeError):
            names = []
        return names if not counts or len(names) == counts[0] else [str(index) for index in range(counts[0])]

    @property
    def rounds(self) -> int:
        """Rounds completed."""
        return max((int(entry["round"]) for entry in self.events if entry["event"] == "round done"), default=0)

    @cached_property
    def personal(self) -> bool:
        """Whether clients were scored each with its own model, not all with one."""
        if "scored" in self.summary:
            return bool(self.summary["scored"] == "own model")
        try:
            return bool(build(self.config["method"], "method").personal)
        except GoldfinchError:
            return False

    @property
    def yaml(self) -> str:
        """``config.yaml`` again."""
        return OmegaConf.to_yaml(OmegaConf.create(dict(self.config)))

    @property
    def status(self) -> str:
        """``finished``, ``stopped``, ``failed``, or ``unfinished``: it goes on still, or was broken off."""
        for entry in reversed(self.events):
            if entry["event"] == "finish" and not (self.folder / "summary.json").exists():
                break  # it is being continued, or was to be
            if entry["event"] in ("finish", "stopped", "failed"):
                return str(entry["event"]).replace("finish", "finished")
            if entry["event"] in ("start", "resume", "round"):
                break
        return "unfinished"

    # ---- what it was made of ---------------------------------------------------------------------------------------

    @cached_property
    def settings(self) -> RunSettings:
        """The settings again, as objects."""
        return settings_of({**self.config, "output": str(self.folder)})

    @property
    def method(self) -> Method:
        """The run's method."""
        return self.settings.method

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint of the chosen round.

        Raises:
            CheckpointError: there is none.
            ConfigError: ``best`` was chosen, and the run keeps no such round; or the choice is none.
        """
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
        found = (Checkpoints(self.folder / BEST) if self.chosen == "best" else kept).load()
        if found is None:
            raise CheckpointError(f"{self.folder} has no checkpoint: the model is gone; run it again")
        return found

    @property
    def has_best(self) -> bool:
        """Whether the run kept the best round by validation."""
        return bool(Checkpoints(self.folder / BEST).series.numbers())

    @cached_property
    def federation(self) -> Federation:
        """The server's side: who the clients are, how the model is made."""
        return Federation(self.settings)

    @cached_property
    def clients(self) -> tuple[ClientSpec, ...]:
        """The run's clients."""
        return self.settings.protocol.clients(self.settings.data)

    @property
    def test_domains(self) -> tuple[str, ...]:
        """The domains that were scored."""
        return tuple(self.settings.protocol.test_domains(self.settings.data))

    def shared_model(self) -> tuple[Model, dict[str, Tensor]]:
        """The net that classifies, with initial weights, and those of the chosen state that are shared, as scored."""
        model = without_training_parts(self.federation.new_model())
        scored = self.method.scored_weights(self.checkpoint.state)
        return model, {name: scored[name] for name in model.state_dict() if name in scored}

    def model(self, client: str | None = None) -> Model:
        """The global model as it is scored, or, where methods leave parts of it on devices, a client's; for evaluation.

        Args:
            client: a client's id; ``None`` is the first.

        Raises:
            CheckpointError: the client's part is not in the run's folder, as after a run on real devices.
        """
        model, state = self.shared_model()
        if len(state) < len(model.state_dict()):
            kept = self.kept(client or self.clients[0].id)
            state |= {name: kept[name] for name in model.state_dict() if name in kept}
        model.load_state_dict(state)
        return model.eval().requires_grad_(False)

    def inference(self, client: str | None = None) -> nn.Module:
        """What classifies by :meth:`model`: from prepared images to features and scores."""
        return self.method.inference(self.model(client), self.checkpoint.state.prototypes, self.seed).eval()

    def kept(self, client: str) -> dict[str, Tensor]:
        """The part of its model that a client kept.

        Raises:
            CheckpointError: it is not in the run's folder.
        """
        after = (self.checkpoint.state.round + 1) * len(self.method.exchanges)
        return kept_part(self.folder / "clients" / self.checkpoint.run / folder_name(client), after)

    def model_for(self, domain: str) -> Model:
        """The model that was scored on ``domain``: the global one, or its first client's."""
        own = next((spec.id for spec in self.clients if spec.domain == domain), None)
        return self.model(own)

    def test_split(self, domain: str) -> Split:
        """What was scored of a domain."""
        split: Split = self.settings.protocol.test_split(self.settings.data.load(domain))
        return test_subset(split, self.settings.rounds.test_samples, domain)

    def train_split(self, client: ClientSpec) -> Split:
        """What a client trained on."""
        domain = self.settings.data.load(client.domain)
        return domain.train.subset(self.settings.protocol.parts(domain, client, self.settings.seed)[0])

    def validation_split(self, client: ClientSpec) -> Split:
        """Return a client's validation samples; empty if ``protocol.validation`` is 0."""
        domain = self.settings.data.load(client.domain)
        return domain.train.subset(self.settings.protocol.parts(domain, client, self.settings.seed)[1])

    def sample(self, domain: str, count: int) -> Split:
        """At most ``count`` test images of a domain, classes in turn, the same every time."""
        split = self.test_split(domain)
        order = torch.randperm(len(split), generator=generator(0, "figure", domain))
        labels = split.labels[order]
        turn = torch.zeros(len(order), dtype=torch.int64)
        for label in labels.unique():
            members = (labels == label).nonzero().squeeze(1)
            turn[members] = torch.arange(len(members))
        return split.subset(order[torch.argsort(turn, stable=True)][:count])

    @torch.no_grad()
    def features(self, model: Model, split: Split) -> tuple[Tensor, Tensor]:
        """Features ``[N, D]`` and logits ``[N, K]`` of a split's images as for testing."""
        augmentation = self.settings.data.augmentation
        passes = [model(augmentation.test(images)) for images in split.images.split(EVALUATION_BATCH)]
        return torch.cat([features for features, _ in passes]), torch.cat([logits for _, logits in passes])


def find_runs(folders: Sequence[str], *, finished: bool = True) -> list[Run]:
    """The runs in and below ``folders``, each once.

    Raises:
        ConfigError: a folder is not there, or holds no run; or its ``config.yaml`` cannot be read.
    """
    found: dict[Path, Run] = {}
    mark = "summary.json" if finished else "events.jsonl"
    for text in folders:
        if not Path(text).is_dir():
            raise ConfigError(f"{text} is not a folder")
        runs = [Run(path.parent) for path in sorted(Path(text).rglob(mark)) if Run(path.parent).config_file.exists()]
        if not runs:
            what = "finished run" if finished else "run"
            if finished and any(Path(text).rglob("events.jsonl")):
                raise ConfigError(
                    f"{text} holds no finished run: a run is going on or was stopped; goldfinch report {text} "
                    "shows it, goldfinch resume goes on with it"
                )
            raise ConfigError(f"{text} holds no {what} (no config.yaml with {mark} in it or below it)")
        for run in runs:
            found.setdefault(run.folder.resolve(), run)
    return [run for run in found.values() if run.config]


def varying(runs: Sequence[Run]) -> list[str]:
    """The keys that differ between the runs, most values first, then by name."""
    keys = dict.fromkeys(key for run in runs for key in run.options)
    values = {key: {repr(run.options.get(key)) for run in runs} for key in keys}
    return sorted((key for key in keys if len(values[key]) > 1), key=lambda key: (-len(values[key]), key))


def setting_text(key: str, value: Any) -> str:
    """A setting as ``name=value`` without its group; of a class, the group and the class's name."""
    if key.endswith("._target_"):
        key, value = key.removesuffix("._target_"), str(value).rpartition(".")[2]
    return f"{key.rpartition('.')[2]}={brief(value)}"


def brief(value: Any) -> str:
    """A setting's value in few letters."""
    return f"{value:g}" if isinstance(value, float) else printable(str(value))


def recorded_code(path: Path) -> str:
    """The hash of the code whose files ``code.json`` lists; ``unknown`` if it cannot be read."""
    try:
        content = dict(json.loads(read_small(path)))
    except (OSError, ValueError, TypeError, RecursionError):
        return "unknown"
    files = {str(name): str(digest) for name, digest in content.items() if str(name).endswith((".py", ".yaml"))}
    return hash_of_files(files) if files else "unknown"
