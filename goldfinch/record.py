"""Read a run's record. Tables, reports, figures, comparisons and reproductions read runs through :class:`RunRecord`.

The parts of a record are ``config`` (the settings), ``facts`` (what the run states of itself), ``scores``, ``replies``
and ``events``. Nothing here imports torch, so a table is shown at once; :mod:`goldfinch.run_model` reads what needs it:
a run's checkpoint, its model and its data. ``summary.json`` is not read: it repeats these files for other programs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from common.errors import ConfigError, nearest
from common.metrics import MEASURES, METRICS, ClassTotals, Measure, RoundScore
from common.run_config import attack_text, check_trusted, result_settings, yaml_of
from common.scores import RunScores, class_totals, lines_on, test_images
from common.text import printable
from common.versions import CODE, hash_of_files, processor_name
from goldfinch.folders import files_below
from server.run.files import BEGINNINGS, ENDINGS, OWN, RunFiles
from server.run.measures import resolutions_of
from server.run.schema import EVENTS
from server.run.summary import summary_of
from server.run.tail import ToldEvents

NO_PRIVACY = "common.privacy.NoPrivacy"

PARTITION_SEED = "protocol.partition_seed"
"""The setting of :class:`common.data.protocols` that keeps the clients' samples from run to run."""

SHARED = ("config", "options", "facts", "events", "score_lines", "test_lines", "class_totals", "reply_totals")
"""What records of one run by several metrics have in common."""


class RunRecord(RunFiles):
    """The record of a run, finished or not. Each file is read when it is first needed.

    Every property raises :class:`~common.errors.ConfigError` if its file is damaged, or if an older version wrote it.

    Args:
        folder: the run's output folder.
        metric: the metric of scores on test images, one of :attr:`measures`.
    """

    def __init__(self, folder: Path, metric: str = "accuracy") -> None:
        super().__init__(folder)
        self.metric = metric

    @classmethod
    def open(cls, folder: Path | str) -> RunRecord:
        """Return the record of a run that has ended.

        Raises:
            ConfigError: the folder holds no such run.
        """
        record = cls(Path(folder))
        if not record.config_file.exists():
            raise ConfigError(f"{folder} holds no run: config.yaml is missing; give the folder that output= named")
        if not record.ended:
            raise ConfigError(
                f"{folder} holds no finished run: it is going on, or was stopped; goldfinch report {folder} shows it, "
                f"goldfinch resume {folder} goes on with it"
            )
        return record

    def by_metric(self, metric: str) -> RunRecord:
        """Return the record with scores by another metric; its files are not read again."""
        if metric == self.metric:
            return self
        record = RunRecord(self.folder, metric)
        for name in SHARED:
            if name in self.__dict__:
                record.__dict__[name] = self.__dict__[name]  # where cached_property keeps it
        return record

    # ---- settings --------------------------------------------------------------------------------------------------

    @property
    def trusted_config(self) -> Mapping[str, Any]:
        """``config.yaml``; everything in it may be built.

        Scores are read without it, so a table needs none of the user's own classes.

        Raises:
            ConfigError: it names a class that may not be imported.
        """
        check_trusted(self.config, self.config_file)
        return self.config

    @property
    def yaml(self) -> str:
        """The text of ``config.yaml``."""
        return yaml_of(self.config)

    @cached_property
    def options(self) -> Mapping[str, Any]:
        """Every setting that changes the result, except the seed, by its ``a.b.c`` key."""
        options = result_settings(self.config, ("seed",))
        partitions = options.get(PARTITION_SEED)
        if partitions is not None and not isinstance(partitions, int):
            raise ConfigError(
                f"{self.config_file}: {PARTITION_SEED}={printable(str(partitions))}: must be a whole number"
            )
        return options

    @property
    def title(self) -> str:
        """The method's name as papers write it: its class."""
        return str(self.config["method"]["_target_"]).rpartition(".")[2]

    @property
    def method_name(self) -> str:
        """The name of the method's option."""
        return self.facts.method

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.facts.seed

    @property
    def names(self) -> tuple[str, str, str]:
        """Data set, protocol and model, each by its option's name."""
        choices = self.config["choices"]
        return str(choices.get("data") or self.facts.data), self.facts.protocol, self.facts.model

    @property
    def attack(self) -> str:
        """The attack and its hostile clients, such as ``sign_flip by signs-0``; empty if no client was hostile."""
        return attack_text(self.config)

    @property
    def scored(self) -> bool:
        """Whether the run scores test images; trials of ``goldfinch compare`` do not."""
        return bool(self.config["rounds"].get("test", True))

    @property
    def validation_metric(self) -> str:
        """What chooses the best round on validation samples, ``rounds.metric``."""
        metric = str(self.config["rounds"].get("metric", "accuracy"))
        if metric not in MEASURES and metric not in self.measures:
            raise ConfigError(
                f"{self.config_file}: rounds.metric={printable(metric)}; {nearest(metric, self.measures)}"
            )
        return metric

    # ---- how it ran ------------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether the run has ended in order: its rounds are done, or it was asked to stop."""
        return self.facts.end is not None

    @property
    def status(self) -> str:
        """``finished``, ``stopped``, ``failed``, or ``unfinished``: it is still running, or was killed."""
        for entry in reversed(self.events):
            if entry["event"] in ENDINGS:
                return str(entry["event"]).replace("finish", "finished")
            if entry["event"] in (*BEGINNINGS, "round"):
                break
        return "unfinished"

    def told_events(self, without: Collection[str] = ()) -> Iterator[Mapping[str, Any]]:
        """Yield the events as the listeners of the run got them, with the numbers of scores.

        Args:
            without: names of events that are left out.
        """
        told = ToldEvents(self.folder)
        for entry in self.events:
            if entry["event"] in without:
                told.pass_over(entry)
            else:
                yield told.complete(entry)

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """What ``summary.json`` says, made of the record; empty if the run has not ended."""
        return summary_of(self)

    @property
    def rounds_done(self) -> int:
        """Completed rounds."""
        return self.facts.rounds

    @property
    def stopped_early(self) -> bool:
        """Whether ``train.patience`` ended the run before its last round."""
        return self.facts.early_stop is not None and self.ended

    @property
    def planned_rounds(self) -> int:
        """Completed rounds; of a run that ``train.patience`` ended those that it was to have."""
        if self.stopped_early:
            return self.facts.planned
        return self.rounds_done

    @property
    def traffic(self) -> int | None:
        """Bytes to all clients and from them; ``None`` if the run has not ended."""
        if not self.ended:
            return None
        return sum(self.reply_totals.bytes.values())

    @property
    def at_chance(self) -> bool:
        """Whether the last score is not clearly better than one class for every image, as the run reported."""
        for entry in reversed(self.events):
            if entry["event"] == "at chance":
                return int(entry["round"]) == self.rounds_done
        return False

    @property
    def state_sha256(self) -> str | None:
        """The SHA-256 of the final state; ``None`` if the run has not ended."""
        if self.facts.end is None:
            return None
        return self.facts.end.sha256

    @property
    def personal(self) -> bool:
        """Whether each client was scored with its own model, and not all with one."""
        return self.facts.scored == OWN

    @property
    def bound(self) -> str | None:
        """The line of a table that the method is, ``lower`` or ``upper``; ``None`` if it is ranked with the others."""
        return self.facts.bound

    @property
    def unseen(self) -> Sequence[str]:
        """The scored domains of which no client held training samples."""
        return self.facts.unseen

    @property
    def registrations(self) -> Mapping[str, Mapping[str, Any]]:
        """The last registration of each client, by its id."""
        return self.facts.registrations

    @property
    def clients(self) -> Sequence[str]:
        """The clients of the run, or of its last part."""
        return self.facts.taking_part

    @property
    def client_images(self) -> Mapping[tuple[str, str], str]:
        """The hash of each client's training images, by the client and the hash of which samples they are.

        Empty of a run with differential privacy, whose hashes have a secret of each device.
        """
        images: dict[tuple[str, str], str] = {}
        privacy = self.config.get("privacy") or {}
        if privacy.get("_target_", NO_PRIVACY) == NO_PRIVACY:
            for client in self.facts.taking_part:
                entry = self.registrations[client]
                if entry.get("content"):
                    images[client, str(entry.get("split", ""))] = str(entry["content"])
        return images

    @property
    def answers(self) -> Mapping[str, int]:
        """The number of updates that were used, as ``admitted``, and of replies with each other status."""
        return self.reply_totals.answers

    @property
    def counts_less(self) -> Mapping[str, Mapping[str, int]]:
        """The clients that count for fewer samples than they registered; see :func:`server.run.files.counts_less`."""
        return self.facts.counts_less

    @property
    def code(self) -> str:
        """The hash of the code that ran; ``unknown`` if it is not recorded."""
        return self.facts.code

    @property
    def processor(self) -> str:
        """The server's processor: model, instruction set, restrictions, the clients' card; empty before the start."""
        return processor_name(self.facts.processor)

    @cached_property
    def code_by_package(self) -> Mapping[str, str]:
        """The hash of the code that ran, of ``goldfinch`` and of each package of the user's own."""
        packages: dict[str, dict[str, str]] = {}
        for name, digest in self.code_files.items():
            package = name.partition("/")[0].removesuffix(".py")
            if package in CODE:
                package = "goldfinch"
            packages.setdefault(package, {})[name] = digest
        if len(packages) < 2 or hash_of_files(self.code_files) != self.code:
            return {"goldfinch": self.code}
        return {package: hash_of_files(files) for package, files in packages.items()}

    @cached_property
    def class_names(self) -> Sequence[str]:
        """The names of the classes by label; their numbers if the record has no names."""
        names = super().class_names
        counts = [len(entry["class_counts"]) for entry in self.registrations.values()]
        counts += [int(line["confusion"]["classes"]) for line in self.test_lines[:1] if "confusion" in line]
        if counts and len(names) != counts[0]:
            return list(map(str, range(counts[0])))
        return names

    # ---- scores ----------------------------------------------------------------------------------------------------

    @property
    def scores(self) -> RunScores:
        """The run's scores; those on test images by :attr:`metric`."""
        if self.metric not in METRICS:
            _ = self.measure  # which says whether the run has it
        _ = self.validation_metric  # likewise
        return self.scores_by(self.metric)

    @cached_property
    def test_lines(self) -> Sequence[Mapping[str, Any]]:
        """Lines of ``scores.jsonl`` on test images."""
        return lines_on("test", self.score_lines)

    @property
    def test_images(self) -> Mapping[str, int]:
        """By domain the test images of one client, the largest number of any round."""
        return test_images(self.score_lines)

    @property
    def validation_images(self) -> int:
        """The validation samples of all clients that scored theirs."""
        images: dict[str, int] = {}
        for line in lines_on("validation", self.score_lines):
            images[line["client"]] = max(images.get(line["client"], 0), line["count"])
        return sum(images.values())

    @cached_property
    def round_scores(self) -> list[RoundScore]:
        """The metric per domain of every round that was scored on test images, ascending."""
        with self._named():
            return self.scores.tested()

    @cached_property
    def validation_scores(self) -> list[RoundScore]:
        """The validation metric per domain of every round, ascending; empty without validation samples."""
        with self._named():
            return self.scores.validated()

    @cached_property
    def rules(self) -> dict[str, dict[str, Any]]:
        """The scores under each rule, as in ``summary.json``; for an unfinished run, over the rounds it has."""
        with self._named():
            _ = self.scores
            return self.rules_by(self.metric)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Add the run's folder to errors of scores."""
        try:
            yield
        except ConfigError as error:
            if str(self.folder) in str(error):
                raise
            raise ConfigError(f"{self.folder}: {error}") from error

    @cached_property
    def domains(self) -> list[str]:
        """The run's test domains, scored or missing, in the data set's order, then by name."""
        present: set[str] = set()
        for score in self.round_scores:
            present.update(score.accuracy, score.missing)
        names: list[str] = []
        for name in self.config["data"].get("domains") or []:
            if str(name) in present:
                names.append(str(name))
        return names + sorted(present.difference(names))

    @cached_property
    def class_totals(self) -> Mapping[tuple[int, str], ClassTotals]:
        """Images by class of each round and domain on test images, summed over the clients that scored it."""
        return class_totals(self.test_lines)

    @property
    def measures(self) -> Mapping[str, Measure]:
        """The metrics that the run has: those of every run, then those that its settings asked for."""
        return self.facts.measures

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
        if self.metric in METRICS or not self.round_scores:
            return 0.0
        return resolutions_of(self.events, self.round_scores[-1].round).get(self.metric, 0.0)

    @property
    def has_counts(self) -> bool:
        """Whether every test score has confusion counts, so that the run has every metric of :data:`METRICS`."""
        for score in self.round_scores:
            for domain in score.accuracy:
                if (score.round, domain) not in self.class_totals:
                    return False
        return True

    @cached_property
    def changed_scoring(self) -> list[int]:
        """The numbers of test images of one domain over the rounds, if they differ; empty if every round had the same.

        The numbers differ if a device's test images changed before the run was resumed. Means over the rounds of such a
        run mix scores of different images.
        """
        if not any(entry["event"] == "resume" for entry in self.events):
            return []
        counts: dict[tuple[str, str], set[int]] = {}
        for line in self.test_lines:
            counts.setdefault((str(line["client"]), str(line["domain"])), set()).add(int(line["count"]))
        for numbers in counts.values():
            if len(numbers) > 1:
                return sorted(numbers)
        return []


def find_runs(folders: Sequence[str], *, finished: bool = True) -> list[RunRecord]:
    """Return the runs in and below ``folders``, each once; links to folders are followed.

    Args:
        folders: run folders, or folders with runs below them.
        finished: whether to leave out runs that have not ended.

    Raises:
        ConfigError: a folder does not exist, or holds no run; no run has ended; or a record cannot be read.
    """
    runs_by_folder: dict[Path, RunRecord] = {}
    unfinished: list[str] = []
    for text in folders:
        if not text or not Path(text).is_dir():
            raise ConfigError(f"{text or repr(text)} is not a folder")
        begun = [RunRecord(path.parent) for path in files_below(Path(text)) if path.name == EVENTS]
        begun = [run for run in begun if run.config_file.exists() and run.config]
        if not begun:
            kind = "finished run" if finished else "run"
            raise ConfigError(f"{text} holds no {kind} (no config.yaml with {EVENTS} in it or below it)")
        runs = begun
        if finished:
            runs = [run for run in begun if run.ended]
        if not runs:
            unfinished.append(text)
        for run in runs:
            runs_by_folder.setdefault(run.folder.resolve(), run)
    if unfinished and not runs_by_folder:
        raise ConfigError(
            f"{unfinished[0]} holds no finished run: a run is going on or was stopped; goldfinch report "
            f"{unfinished[0]} shows it, goldfinch resume goes on with it"
        )
    return list(runs_by_folder.values())


def varying(runs: Sequence[RunRecord]) -> list[str]:
    """Return the keys of the settings that differ between the runs, those with most values first, then by name."""
    keys: set[str] = set()
    for run in runs:
        keys.update(run.options)
    options = [run.options for run in runs]
    counts: dict[str, int] = {}
    for key in keys:
        count = len({repr(each.get(key)) for each in having(key, options)})
        if count > 1:
            counts[key] = count
    return sorted(counts, key=lambda key: (-counts[key], key))


def having(key: str, options: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the settings of the runs that are compared in a key.

    If the runs differ in the class whose setting it is, only those that have it are compared: the class says already
    that the others have none.

    Args:
        key: the key of a setting.
        options: the settings of each run by their keys.
    """
    parts = key.split(".")
    for end in range(1, len(parts)):
        target = f"{'.'.join(parts[:end])}._target_"
        if len({str(each.get(target)) for each in options}) > 1:
            return [each for each in options if key in each]
    return list(options)


def setting_text(key: str, value: Any) -> str:
    """Return a setting as ``name=value`` without its group; for a class, the group and the class's name."""
    if key.endswith("._target_"):
        key, value = key.removesuffix("._target_"), str(value).rpartition(".")[2]
    return f"{key.rpartition('.')[2]}={brief(value)}"


def brief(value: Any) -> str:
    """Return a setting's value as a short text, in the words of the command line.

    A number of more than six digits, which a search has drawn, has three.
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        text = f"{value:g}"
        if float(text) != value:
            text = f"{value:.3g}"
        return text
    return printable(str(value))
