"""Runs as they lie in their folders, and which of them are seeds of one configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from common.config import build
from common.errors import ConfigError, GoldfinchError
from common.metrics import RoundScore, domain_accuracy, summarise
from server.run.history import read_rows
from server.run.prototype_log import Page, read_confusions, read_pages
from server.trackers.base import flat

NOT_THE_RESULT = ("engine.", "report.", "choices.", "experiment.", "output", "resume", "overwrite", "data.root")
"""Settings that tell runs apart without changing what comes out."""

NOT_THE_RESULT_EITHER = (
    "train.device",
    "rounds.deadline",
    "rounds.registration",
    "rounds.failures",
    "rounds.checkpoints",
)


@dataclass(frozen=True)
class RunRecord:
    """One run's files, read.

    Args:
        folder: the run's folder.
        config: ``config.yaml``.
        summary: ``summary.json``; empty where the run has not finished.
        scores, activity: rows of ``history.csv`` and ``activity.csv``.
        events: lines of ``events.jsonl``.
        confusions: lines of ``confusion.jsonl``.
        pages: prototypes over rounds.
    """

    folder: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    scores: Sequence[Mapping[str, Any]]
    activity: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    confusions: Sequence[Mapping[str, Any]]
    pages: Sequence[Page]

    @property
    def method(self) -> str:
        """The method's name as papers write it: its class."""
        return str(self.config["method"]["_target_"]).rpartition(".")[2]

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.config["seed"])

    @property
    def board(self) -> tuple[str, str, str]:
        """Data, protocol and model: what runs must share to be compared."""
        choices = self.config.get("choices", {})
        return tuple(str(choices.get(key, "")) for key in ("data", "protocol", "model"))  # type: ignore[return-value]  # three

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Every setting that changes the result, the seed left out, as ``a.b.c`` keys."""
        return {
            key: value
            for key, value in flat(self.config).items()
            if key != "seed" and not key.startswith(NOT_THE_RESULT) and key not in NOT_THE_RESULT_EITHER
        }

    @cached_property
    def round_scores(self) -> list[RoundScore]:
        """Accuracy per domain of every scored round, ascending."""
        by_round: dict[int, list[tuple[str, int, int]]] = {}
        for row in self.scores:
            entry = (str(row["domain"]), int(row["correct"]), int(row["count"]))
            by_round.setdefault(int(row["round"]), []).append(entry)
        return [RoundScore(number, domain_accuracy(by_round[number])) for number in sorted(by_round)]

    @cached_property
    def rules(self) -> dict[str, dict[str, Any]]:
        """The scores under each rule, as in ``summary.json``; of an unfinished run, of the rounds it has."""
        if self.status in ("finished", "failed") and "scores" in self.summary:
            return dict(self.summary["scores"])
        last = int(self.config.get("rounds", {}).get("last_rounds", 5))
        return summarise(self.round_scores, last)

    @property
    def domains(self) -> list[str]:
        """Scored domains in the data set's order, then by name."""
        present = {domain for score in self.round_scores for domain in score.accuracy}
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
            if entry["event"] in ("finish", "stopped", "failed"):
                return str(entry["event"]).replace("finish", "finished")
            if entry["event"] in ("start", "resume", "round"):
                break
        return "unfinished"


@dataclass
class Group:
    """Runs of one configuration, by seed.

    Args:
        label: the method's name, with the settings that tell it from its namesakes.
        runs: the runs, by seed.
    """

    label: str
    runs: list[RunRecord] = field(default_factory=list)

    @property
    def seeds(self) -> list[int]:
        """The runs' seeds."""
        return [run.seed for run in self.runs]

    @property
    def personal(self) -> bool:
        """Whether its scores are of clients' own models."""
        return self.runs[0].personal


@dataclass
class Board:
    """Groups that may be compared: same data, protocol and model."""

    data: str
    protocol: str
    model: str
    groups: list[Group] = field(default_factory=list)

    @property
    def title(self) -> str:
        """What the groups share."""
        return ", ".join(part for part in (self.data, self.protocol.replace("_", " "), self.model) if part)

    @property
    def domains(self) -> list[str]:
        """Domains of all groups, in the first one's order."""
        return list(dict.fromkeys(name for group in self.groups for run in group.runs for name in run.domains))

    @property
    def runs(self) -> list[RunRecord]:
        """All runs, group by group."""
        return [run for group in self.groups for run in group.runs]

    @property
    def named_runs(self) -> list[tuple[str, RunRecord]]:
        """The same with what each is called on the page."""
        return [(run_name(group, run), run) for group in self.groups for run in group.runs]

    @property
    def clients(self) -> int:
        """The most clients of a run."""
        return max((len(run.registrations) for run in self.runs), default=0)


def run_name(group: Group, run: RunRecord) -> str:
    """What a run is called on the page."""
    twins = [other for other in group.runs if other.seed == run.seed]
    name = f"{group.label}, seed {run.seed}" if len(group.runs) > 1 else group.label
    return f"{name} ({run.folder.name})" if len(twins) > 1 else name


def find_records(folders: Sequence[str]) -> list[RunRecord]:
    """The runs in and below ``folders``, finished or not.

    Raises:
        ConfigError: a folder is not there, holds no run, or holds one whose files cannot be read.
    """
    found: dict[Path, RunRecord] = {}
    for text in folders:
        folder = Path(text)
        if not folder.is_dir():
            raise ConfigError(f"{text} is not a folder")
        runs = sorted(path.parent for path in folder.rglob("events.jsonl") if (path.parent / "config.yaml").exists())
        if not runs:
            raise ConfigError(f"{text} holds no run (no config.yaml with events.jsonl in it or below it)")
        found.update({run.resolve(): read_record(run) for run in runs if run.resolve() not in found})
    return list(found.values())


def read_record(folder: Path) -> RunRecord:
    """One run's files.

    Raises:
        ConfigError: a file cannot be read.
    """
    try:
        config = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
        summary_path = folder / "summary.json"
        summary = json.loads(summary_path.read_text()) if summary_path.exists() else {}
        events = []
        for line in (folder / "events.jsonl").read_text().splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:
                continue  # the last line of a run that was killed
        if not isinstance(config, dict) or "_target_" not in (config.get("method") or {}):
            raise ConfigError(f"{folder / 'config.yaml'} is not a run's configuration")
        return RunRecord(
            folder,
            {str(key): value for key, value in config.items()},
            summary,
            read_rows(folder / "history.csv"),
            read_rows(folder / "activity.csv"),
            events,
            read_confusions(folder / "confusion.jsonl"),
            read_pages(folder / "prototypes"),
        )
    except (OSError, ValueError, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"{folder} cannot be read as a run: {error}") from error


def arrange(records: Sequence[RunRecord]) -> list[Board]:
    """Boards of groups of runs; groups in the order of their first run, labels unique within a board."""
    boards: dict[tuple[str, str, str], Board] = {}
    groups: dict[str, Group] = {}
    for record in records:
        board = boards.setdefault(record.board, Board(*record.board))
        key = json.dumps([record.board, record.settings], sort_keys=True, default=str)
        if key not in groups:
            groups[key] = Group(record.method)
            board.groups.append(groups[key])
        groups[key].runs.append(record)
    for board in boards.values():
        for group in board.groups:
            group.runs.sort(key=lambda run: (run.seed, str(run.folder)))
        _tell_apart(board.groups)
    return list(boards.values())


def _tell_apart(groups: Sequence[Group]) -> None:
    for label in {group.label for group in groups}:
        namesakes = [group for group in groups if group.label == label]
        if len(namesakes) < 2:
            continue
        settings = [group.runs[0].settings for group in namesakes]
        keys = [key for key in settings[0] if len({json.dumps(other.get(key), default=str) for other in settings}) > 1]
        for index, group in enumerate(namesakes):
            parts = [
                f"{key.rpartition('.')[2].replace('_', ' ')} {group.runs[0].settings.get(key)}" for key in keys[:3]
            ]
            group.label = f"{label}, {', '.join(parts)}" if parts else f"{label} ({index + 1})"
