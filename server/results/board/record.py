"""The record of a strict comparison: one JSON file that holds every trial and every final run of one board.

The record is all that a comparison needs to go on. Trials and runs that it holds are not run again, also where the run
folders are gone. It holds no images and no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import ConfigError
from common.regular_files import read_small
from common.run_config import result_settings
from common.storage import write_text

FORMAT = 1
"""The version of the file's layout."""

IN_DOMAIN = "in_domain"
"""The case in which every domain has a client, and all domains are scored."""

LEFT_OUT = "leave_out:"
"""The beginning of the name of a case in which one domain has no client; the score is that of this domain."""

STUDY_SEED = 1000
"""Seed of the runs and the partition of the first study; the others count up from it. Final runs have seeds from 0."""

Percent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Number = Annotated[int, Field(ge=0)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Part(BaseModel):
    """A part of a record. Unknown entries are errors."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class Trial(_Part):
    """One run of a tuning study, scored on validation samples alone.

    Attributes:
        values: the searched settings.
        state: ``complete``, ``pruned`` (ended early, since it was worse than the median) or ``failed`` (no score).
        score: validation accuracy after the last round that was scored, in per cent; 0 if the trial failed.
        curve: validation accuracy after each round, by round, in per cent.
        rounds: completed rounds.
        seconds: wall seconds.
    """

    values: dict[str, Finite]
    state: Literal["complete", "pruned", "failed"]
    score: Percent
    curve: dict[int, Percent]
    rounds: Number
    seconds: Finite


class Study(_Part):
    """One tuning study.

    Attributes:
        seed: the seed of its runs and of their partition.
        trials: its trials, in order.
        done: whether its budget is spent.
    """

    seed: Number
    trials: list[Trial] = []
    done: bool = False

    @property
    def rounds(self) -> int:
        """Completed rounds of all trials."""
        return sum(trial.rounds for trial in self.trials)

    @property
    def best(self) -> Trial | None:
        """The complete trial with the highest score, the earliest of several; ``None`` before one is complete."""
        found: Trial | None = None
        for trial in self.trials:
            if trial.state == "complete" and (found is None or trial.score > found.score):
                found = trial
        return found


class FinalRun(_Part):
    """One final run: the setting that a study chose, with a seed and a partition that no study used.

    Attributes:
        study: the number of the study that chose the setting, from 0.
        seed: the seed of the run and of its partition.
        accuracy: test accuracy of each domain after the last round, in per cent.
        average: the score of the case: the mean over domains, or the accuracy of the domain that was left out.
        curve: the score after each round, by round.
        state_sha256: the hash of the final state.
        identity: the hash of the settings.
        code: the hash of the code that ran.
        bytes: bytes ``down`` to and ``up`` from all clients.
        seconds: wall seconds.
        processor: what the run computed on.
        command: the command that repeats the run.
        log: the lines that the run printed.
    """

    study: Number
    seed: Number
    accuracy: dict[str, Percent]
    average: Percent
    curve: dict[int, Percent]
    state_sha256: Sha256
    identity: str
    code: str
    bytes: dict[Literal["down", "up"], Number]
    seconds: Finite
    processor: str
    command: str
    log: list[str]

    @property
    def worst(self) -> float:
        """The lowest accuracy of a domain, in per cent."""
        return min(self.accuracy.values())


class Case(_Part):
    """One method in one case: its studies and final runs.

    Attributes:
        studies: the tuning studies.
        runs: the final runs, in the order of the plan.
        refused: why the method cannot run in this case; ``None`` if it can.
    """

    studies: list[Study] = []
    runs: list[FinalRun] = []
    refused: str | None = None

    def whole(self, rules: Rules) -> bool:
        """Return whether all studies and final runs of ``rules`` are there."""
        done = [study for study in self.studies if study.done]
        return len(done) == rules.studies and len(self.runs) == rules.runs


class Row(_Part):
    """One method of a board.

    Attributes:
        method: the method's name in ``conf/method/``, or the name that a submission gave.
        personal: whether each client is scored with a model of its own.
        weighting: how the server weighs clients in averages of models: ``uniform``, ``samples``, or ``none`` where the
            method averages no models.
        start: the origin of the first trial's values: ``printed``, ``default`` or ``given``.
        source: ``board``, or the name of who submitted the row.
        cases: what was run, by case.
    """

    method: str
    personal: bool = False
    weighting: Literal["uniform", "samples", "none"] = "none"
    start: Literal["printed", "default", "given"] = "default"
    source: str = "board"
    cases: dict[str, Case] = {}

    @property
    def begun(self) -> bool:
        """Whether any trial was run."""
        for case in self.cases.values():
            for study in case.studies:
                if study.trials:
                    return True
        return False


class Rules(_Part):
    """The numbers of the rules; docs/strict-rules.md explains them.

    Attributes:
        studies: independent tuning studies of each method and case.
        trials: the budget of a study, in trials that run to the end.
        runs: final runs of each method and case, spread over the studies.
        rounds: rounds of every trial and run.
        startup: trials of a study with values that do not come from TPE.
        unpruned: complete trials of a study before one may be ended early.
    """

    studies: Annotated[int, Field(ge=1, le=100)]
    trials: Annotated[int, Field(ge=1)]
    runs: Annotated[int, Field(ge=1, le=1000)]
    rounds: Annotated[int, Field(ge=1)]
    startup: Number
    unpruned: Number

    @property
    def budget(self) -> int:
        """Rounds that a study may complete."""
        return self.trials * self.rounds

    def study_of(self, run: int) -> int:
        """Return the study that gives final run number ``run`` its setting: the studies in turn."""
        return run % self.studies


class BoardRecord(_Part):
    """All of one board: rows that have data, domains, net, views, weighting, rounds and batches in common.

    Attributes:
        format: the version of the layout.
        name: the board's name, which is also that of its file.
        data: the data set.
        model: the net.
        views: the option of ``conf/views/``.
        weighting: ``uniform`` or ``samples``.
        rules: the numbers of the rules.
        overrides: the overrides that all runs have.
        shared: every setting that all rows share, by ``a.b.c`` keys.
        command: the command that makes the board, and continues it.
        left_out: methods that cannot run on this board, with the reason.
        rows: the methods, by their name.
    """

    format: Literal[1] = 1
    name: str
    data: str
    model: str
    views: str
    weighting: Literal["uniform", "samples"]
    rules: Rules
    overrides: list[str]
    shared: dict[str, Any]
    command: str
    left_out: dict[str, str] = {}
    rows: dict[str, Row] = {}

    @property
    def cases(self) -> list[str]:
        """The cases that any row has, in the order of their first row."""
        found: dict[str, None] = {}
        for row in self.rows.values():
            for case in row.cases:
                found[case] = None
        return list(found)

    def same_board(self, other: BoardRecord) -> list[str]:
        """Return what differs between this board and ``other``, by name; empty if their rows may be compared."""
        found: list[str] = []
        for key in ("name", "data", "model", "views", "weighting", "rules"):
            if getattr(self, key) != getattr(other, key):
                found.append(key)
        return [*found, *differing_settings(self.shared, other.shared)]


def differing_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the keys with different values, sorted."""
    found: list[str] = []
    for key in sorted({*one, *other}):
        if one.get(key) != other.get(key):
            found.append(key)
    return found


def shared_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that all rows of a board must share, by ``a.b.c`` keys.

    These are all settings that change a result, without those of the method, the learning rate, which is searched, the
    seed, and the protocol's list of domains that are left out.

    Args:
        raw: a run's settings, nested as in ``conf/``.
    """
    found: dict[str, Any] = {}
    for key, value in result_settings(raw, ("seed",)).items():
        if not key.startswith("method.") and key not in ("train.learning_rate", "protocol.leave_out"):
            found[key] = value
    return found


def write_record(path: Path, record: BoardRecord) -> None:
    """Write a record as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, record.model_dump_json(indent=1) + "\n")


def read_record(path: Path) -> BoardRecord:
    """Return the record at ``path``.

    Raises:
        ConfigError: the file cannot be read, or is no record of this format; the message names the entry.
    """
    try:
        return BoardRecord.model_validate_json(read_small(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(
            f"{path} is no record of a board, or is damaged: {place}: {first['msg']}; goldfinch compare --rules strict "
            "writes such records"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def find_records(folders: list[Path]) -> list[tuple[Path, BoardRecord]]:
    """Return the records in ``folders``, which may also be files, sorted by name.

    Raises:
        ConfigError: a path does not exist, there is no record, or one is damaged.
    """
    found: list[tuple[Path, BoardRecord]] = []
    for folder in folders:
        if not folder.exists():
            raise ConfigError(f"{folder} does not exist: name the folder of a board's records, or a record")
        paths = [folder]
        if folder.is_dir():
            paths = sorted(folder.glob("*.json"))
        for path in paths:
            found.append((path, read_record(path)))
    if not found:
        places = ", ".join(map(str, folders))
        raise ConfigError(f"{places} holds no record of a board; goldfinch compare --rules strict writes them")
    return found
