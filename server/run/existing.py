"""The content of a run's output folder, and the decision to start, go on, keep or refuse.

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
the same with more rounds               refuse    refuse       start           keep             start
a run with other settings               refuse    refuse       start           keep             start
a run whose records cannot be read      refuse    refuse       start           keep             start
======================================  ========  ===========  ==============  ===============  =====================

A failed run is an unfinished one. A run's events say whether it has ended (:class:`server.run.files.End`); its
``summary.json`` is not read. A run that has a score and no checkpoint cannot go on; it is finished or kept.
``resume=true`` on a run with changed code records the change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from common.errors import CheckpointError, ConfigError, GoldfinchError, some_of
from common.settings import RunSettings
from common.text import listing
from common.versions import code_files, differing, hash_of_files, recorded_files
from server.run.checkpoint import Checkpoints
from server.run.files import Facts, RunFiles
from server.run.history import CSV_COPIES
from server.run.resume import MAX_NAMED, changed_settings, check_resumable, has_finished
from server.run.schema import EVENTS, REPLIES, SCORES
from server.run.summary import SUMMARY

RUN_NAMES = (
    *("config.yaml", SUMMARY, "code.json", SCORES, REPLIES, EVENTS, "checkpoint", "prototypes", "clients"),
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
        replaces: whether a run with rounds or a score is replaced, as ``overwrite=true`` asked.
        finished: in a study, whether the folder's run has the settings and the rounds that are asked for, by any code
            and with or without a score.
    """

    step: Step
    reason: str = ""
    replaces: bool = False
    finished: bool = False


def decide(settings: RunSettings, *, study: bool = False) -> Decision:
    """Return what a run does with the content of its output folder, which is only read.

    Args:
        settings: the run's settings; ``resume`` and ``overwrite`` say what is allowed.
        study: whether the run is one of many of a sweep, a comparison or a reproduced table.

    Raises:
        ConfigError: the folder holds files that the run would replace, and no run.
        CheckpointError: ``resume`` is set, and the run in the folder cannot go on with these settings.
    """
    existing = ExistingRun.of(settings.output_folder)
    _check_other_files(existing)
    if not existing.has_result:
        ended = study and existing.is_run and _has_ended_as_asked(settings, existing)
        return Decision(Step.START, finished=ended)
    if study:
        return _in_a_study(settings, existing)
    if settings.overwrite:
        return Decision(Step.START, replaces=True)
    if not settings.resume:
        reason = (
            f"{existing.folder} already holds a run; add resume=true to go on with it, overwrite=true to replace it, "
            "or choose another output="
        )
        return Decision(Step.KEEP, reason)
    check_resumable(settings)
    if has_finished(settings):
        return Decision(Step.NOTHING, finished=True)
    if not existing.has_checkpoint:
        raise CheckpointError(
            f"{existing.folder} holds a run without a checkpoint, so that it cannot go on: start it again with "
            "overwrite=true, or choose another output="
        )
    return Decision(Step.GO_ON)


def _in_a_study(settings: RunSettings, existing: ExistingRun) -> Decision:
    """Return what a run of a study does with a folder in which a run has rounds or a score."""
    problem = existing.problem or _other_settings(settings)
    other_code = existing.other_code(settings)
    finished = _has_ended_as_asked(settings, existing)
    if finished and not other_code and existing.has_score:
        return Decision(Step.NOTHING, finished=True)
    if settings.overwrite:
        return Decision(Step.START, replaces=True, finished=finished)
    reason = problem or other_code
    if not reason:
        try:
            check_resumable(replace(settings, resume=True))
        except GoldfinchError as error:
            reason = str(error)
    if not reason and not existing.has_checkpoint:
        reason = "it has no checkpoint to go on from"
    if reason:
        return Decision(Step.KEEP, reason, finished=finished)
    return Decision(Step.GO_ON, finished=finished)


def _has_ended_as_asked(settings: RunSettings, existing: ExistingRun) -> bool:
    """Return whether the folder's run has the settings, the scoring and the rounds that are asked for, by any code."""
    if existing.problem or _other_settings(settings):
        return False
    return _is_long_enough(settings, existing.facts)


def _is_long_enough(settings: RunSettings, facts: Facts | None) -> bool:
    """Return whether a run has ended with the scores and the rounds that are asked for, or stopped early alike."""
    if facts is None or facts.end is None or facts.scoring != settings.scoring:
        return False
    done, asked = facts.rounds, settings.train.rounds
    early = facts.early_stop
    if early is not None:
        return bool(early["patience"] == settings.train.patience and early["rounds"] == asked)
    return done == asked


def _other_settings(settings: RunSettings) -> str:
    """Return the settings that differ from those of the folder's run, with both values; empty if none differs."""
    parts = changed_settings(settings)
    if parts:
        return f"it has other settings: {some_of(parts, MAX_NAMED)}"
    return ""


def _check_other_files(existing: ExistingRun) -> None:
    """Refuse a folder that holds no run, but files that a run would replace.

    Raises:
        ConfigError: the folder has such files; the message names them.
    """
    if existing.is_run:
        return
    names = [name for name in dict.fromkeys(RUN_NAMES) if (existing.folder / name).exists()]
    if names:
        raise ConfigError(
            f"{existing.folder} holds no run, but {listing(names)}, which a run would replace: choose another output=, "
            f"such as {existing.folder / 'run'}"
        )


@dataclass(frozen=True)
class ExistingRun:
    """The run that a folder holds, as far as its records can be read.

    Args:
        folder: the folder.
        is_run: whether it holds a run, with or without rounds that are done.
        has_checkpoint: whether there is a checkpoint to go on from.
        facts: what its files state of it; ``None`` if they cannot be read.
        has_score: whether it has ended with a score.
        problem: why a record cannot be read; empty if all can.
    """

    folder: Path
    is_run: bool
    has_checkpoint: bool
    facts: Facts | None = None
    has_score: bool = False
    problem: str = ""

    @classmethod
    def of(cls, folder: Path) -> ExistingRun:
        """Return the run in ``folder``; if there is none, :attr:`is_run` is False."""
        files = RunFiles(folder)
        problem = ""
        facts: Facts | None = None
        has_config = has_score = False
        try:
            has_config = bool(files.config)
            facts = files.facts
            has_score = facts.end is not None and "final" in files.rules_by()
        except ConfigError as error:
            problem = f"its record cannot be read ({error})"
        has_checkpoint = bool(Checkpoints(folder / "checkpoint").series.numbers())
        is_run = has_config or has_checkpoint or (folder / EVENTS).exists()
        return cls(folder, is_run, has_checkpoint, facts, has_score, problem)

    @property
    def has_result(self) -> bool:
        """Whether something would be lost with the run: a checkpoint, a score, or a record that cannot be read."""
        unreadable = bool(self.problem) and (self.folder / EVENTS).exists()
        return self.is_run and (self.has_checkpoint or self.has_score or unreadable)

    def other_code(self, settings: RunSettings) -> str:
        """Return how the code that ran differs from the present code, by its files; empty if it does not."""
        before = recorded_files(self.folder / "code.json")
        code = "unknown"
        if self.facts is not None:
            code = self.facts.code
        elif before:
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
