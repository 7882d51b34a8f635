"""What the output folder of a run holds already, and what a run that is to be written there does with it.

Rounds that are done belong to the user. Only ``overwrite=true`` replaces them. :func:`decide` follows this table, and
every command asks it. A *study* is a command with many runs: a sweep, a comparison, a reproduced table.

======================================  ========  ===========  ==============  ===============  =====================
the folder holds                        run       resume=true  overwrite=true  study            study, overwrite=true
======================================  ========  ===========  ==============  ===============  =====================
nothing, or files that no run writes    start     start        start           start            start
files that a run would write, no run    refuse    refuse       refuse          refuse           refuse
a run without a checkpoint or a score   start     start        start           start            start
the same run, unfinished or failed      refuse    go on        start           go on            start
the same, some code changed             refuse    go on        start           keep             start
the same run, finished                  refuse    nothing      start           nothing          nothing
the same, some code changed             refuse    nothing      start           keep, in tables  start
the same with fewer rounds              refuse    go on        start           go on            start
a run with other settings               refuse    refuse       start           keep             start
a run whose records cannot be read      refuse    refuse       start           keep             start
======================================  ========  ===========  ==============  ===============  =====================

A failed run is an unfinished one. A run without ``summary.json`` is unfinished, even if its process was killed between
its last round and its summary: to go on with it scores the last state again. A run that has a score and no checkpoint
cannot go on; it is finished or kept. ``resume=true`` on a run with changed code records the change.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from common.errors import CheckpointError, ConfigError, GoldfinchError, some_of
from common.regular_files import read_small
from common.run_config import read_config
from common.settings import RunSettings
from common.text import listing
from common.versions import code_files, differing, hash_of_files, recorded_files
from server.run.checkpoint import Checkpoints
from server.run.history import CSV_COPIES
from server.run.resume import MAX_NAMED, changed_settings, check_resumable, has_finished
from server.run.schema import EVENTS, REPLIES, SCORES, read_lines

RUN_NAMES = (
    *("config.yaml", "summary.json", "code.json", SCORES, REPLIES, EVENTS, "checkpoint", "prototypes", "clients"),
    *CSV_COPIES,
)
"""The files and folders that a run writes or removes in its folder."""


class Step(Enum):
    """What a run does with what its folder holds."""

    START = "start"
    GO_ON = "go on"
    NOTHING = "nothing is left to do"
    KEEP = "keep"


@dataclass(frozen=True)
class Decision:
    """What a run does with what its folder holds, and why.

    Args:
        step: what it does.
        reason: why the folder's run is kept; empty for the other steps.
        is_run: whether the folder holds a run, with or without rounds that are done.
        replaces: whether a run with rounds or a score is replaced, as ``overwrite=true`` asked.
        finished: in a study, whether the folder's run has the settings and the rounds that are asked for, by any code
            and with or without a score.
    """

    step: Step
    reason: str = ""
    is_run: bool = False
    replaces: bool = False
    finished: bool = False


def decide(settings: RunSettings, *, study: bool = False) -> Decision:
    """Return what a run does with what its output folder holds; it only reads.

    Args:
        settings: the run's settings; ``resume`` and ``overwrite`` say what is allowed.
        study: whether the run is one of many of a sweep, a comparison or a reproduced table.

    Raises:
        ConfigError: the folder holds files that the run would replace, and no run.
        CheckpointError: ``resume`` is set, and the run in the folder cannot go on with these settings.
    """
    found = ExistingRun.of(settings.output_folder)
    _check_other_files(found)
    if not found.has_result:
        ended = study and found.is_run and _has_ended_as_asked(settings, found)
        return Decision(Step.START, is_run=found.is_run, finished=ended)
    if study:
        return _in_a_study(settings, found)
    if settings.overwrite:
        return Decision(Step.START, is_run=True, replaces=True)
    if not settings.resume:
        reason = (
            f"{found.folder} already holds a run; add resume=true to go on with it, overwrite=true to replace it, "
            "or choose another output="
        )
        return Decision(Step.KEEP, reason, is_run=True)
    check_resumable(settings)
    if has_finished(settings):
        return Decision(Step.NOTHING, is_run=True, finished=True)
    if not found.has_checkpoint:
        raise CheckpointError(
            f"{found.folder} holds a run without a checkpoint, so that it cannot go on: start it again with "
            "overwrite=true, or choose another output="
        )
    return Decision(Step.GO_ON, is_run=True)


def _in_a_study(settings: RunSettings, found: ExistingRun) -> Decision:
    """Return what a run of a study does with a folder in which a run has rounds or a score."""
    problem = found.problem or _other_settings(settings, found)
    other_code = found.other_code(settings)
    finished = _has_ended_as_asked(settings, found)
    if finished and not other_code and found.summary.get("average") is not None:
        return Decision(Step.NOTHING, is_run=True, finished=True)
    if settings.overwrite:
        return Decision(Step.START, is_run=True, replaces=True, finished=finished)
    reason = problem or other_code
    if not reason:
        try:
            check_resumable(replace(settings, resume=True))
        except GoldfinchError as error:
            reason = str(error)
    if not reason and not found.has_checkpoint:
        reason = "it has no checkpoint to go on from"
    if reason:
        return Decision(Step.KEEP, reason, is_run=True, finished=finished)
    return Decision(Step.GO_ON, is_run=True, finished=finished)


def _has_ended_as_asked(settings: RunSettings, found: ExistingRun) -> bool:
    """Return whether the folder's run has the settings, the scoring and the rounds that are asked for, by any code."""
    if found.problem or _other_settings(settings, found):
        return False
    same_scoring = found.summary.get("scoring", settings.scoring) == settings.scoring
    return same_scoring and _is_long_enough(settings, found.summary)


def _is_long_enough(settings: RunSettings, summary: Mapping[str, Any]) -> bool:
    """Return whether a finished run has as many rounds as the settings ask for, or stopped early as it would."""
    if not summary:
        return False
    done, asked = summary.get("rounds", 0), settings.train.rounds
    early = summary.get("stopped_early")
    if early:
        return bool(early["patience"] == settings.train.patience and early["rounds_planned"] == asked)
    if settings.scheduled:
        return bool(done == asked)
    return bool(done >= asked)


def _other_settings(settings: RunSettings, found: ExistingRun) -> str:
    """Return which settings of the folder's run are others, with both values; empty if they are the same."""
    parts = changed_settings(settings)
    if parts:
        return f"it has other settings: {some_of(parts, MAX_NAMED)}"
    if found.summary.get("identity", settings.identity) != settings.identity:
        return "it has other settings than its config.yaml says"
    return ""


def _check_other_files(found: ExistingRun) -> None:
    """Refuse a folder with files that a run would replace and that are no run's.

    Raises:
        ConfigError: it names them.
    """
    if found.is_run:
        return
    names = [name for name in dict.fromkeys(RUN_NAMES) if (found.folder / name).exists()]
    if names:
        raise ConfigError(
            f"{found.folder} holds no run, but {listing(names)}, which a run would replace: choose another output=, "
            f"such as {found.folder / 'run'}"
        )


@dataclass(frozen=True)
class ExistingRun:
    """The run that a folder holds, as far as its records can be read.

    Args:
        folder: the folder.
        is_run: whether it holds a run, with or without rounds that are done.
        has_checkpoint: whether there is a checkpoint to go on from.
        summary: ``summary.json``; empty without one.
        problem: why a record cannot be read; empty if all can.
    """

    folder: Path
    is_run: bool
    has_checkpoint: bool
    summary: Mapping[str, Any]
    problem: str = ""

    @classmethod
    def of(cls, folder: Path) -> ExistingRun:
        """Return the run in ``folder``; one that :attr:`is_run` says is none, if there is none."""
        problem = ""
        summary: dict[str, Any] = {}
        try:
            summary = dict(json.loads(read_small(folder / "summary.json")))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, RecursionError) as error:
            problem = f"its summary.json cannot be read ({error})"
        has_config = False
        try:
            read_config(folder / "config.yaml")
            has_config = True
        except ConfigError as error:
            problem = problem or f"its record cannot be read ({error})"
        has_checkpoint = bool(Checkpoints(folder / "checkpoint").series.numbers())
        is_run = has_config or has_checkpoint or "state_sha256" in summary or (folder / EVENTS).exists()
        if not (folder / "config.yaml").exists() and summary:  # records that were copied without it
            problem = ""
        return cls(folder, is_run, has_checkpoint, summary, problem)

    @property
    def has_result(self) -> bool:
        """Whether something would be lost with the run: a checkpoint, a score, or a record that cannot be read."""
        if not self.is_run:
            return False
        if self.has_checkpoint or self.summary.get("average") is not None:
            return True
        return bool(self.problem and (self.folder / "summary.json").exists()) or self._has_ended()

    def _has_ended(self) -> bool:
        """Return whether the run's events say that it ended with a score, as of a folder without its summary."""
        path = self.folder / EVENTS
        if self.summary or not path.exists():
            return False
        try:
            entries = read_lines(path)
        except GoldfinchError:  # somebody's record, which is damaged
            return True
        return bool(entries) and entries[-1]["event"] == "finish"

    def other_code(self, settings: RunSettings) -> str:
        """Return how the code that ran differs from the present code, by its files; empty if it does not."""
        before = recorded_files(self.folder / "code.json")
        code = str(self.summary.get("code", "unknown"))
        if code == "unknown" and before:
            code = hash_of_files(before)
        if code in ("unknown", settings.code):
            return ""
        changed = changed_files(self.folder, settings.own_packages)
        if changed:
            return f"it is of other code, which differs in {some_of(changed, MAX_NAMED)}"
        if before:
            return "its code changed between two of its rounds"
        return f"it is of other code ({code}; now {settings.code})"


def changed_files(folder: Path, own: tuple[str, ...] = ()) -> list[str]:
    """Return the files in which the code of the run in ``folder`` differs from the present code, sorted.

    Args:
        folder: the run's folder.
        own: the user's own packages; their code is compared too.

    Returns:
        Paths, those of missing and added files too; empty if the run has no ``code.json``.
    """
    before, now = recorded_files(folder / "code.json"), code_files(own)
    if not before:
        return []
    return differing(before, now)
