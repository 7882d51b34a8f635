"""Open a run's folder: for a new run, or to resume it after checking that settings, data and code are the same."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.choices import folder_options
from common.errors import CheckpointError, ConfigError, some_of, writing
from common.regular_files import read_small
from common.run_config import CLASS_NAMES, contradictions, yaml_of
from common.settings import RunSettings
from common.storage import write_json, write_text
from common.text import printable, shell_line
from common.versions import code_files, differing, package_versions
from common.wire.messages import Registration
from server.run.checkpoint import BEST, Checkpoint, Checkpoints
from server.run.events import Listener
from server.run.files import RunFiles, check_version
from server.run.history import CSV_COPIES, History, append_lines
from server.run.schema import EVENTS, REPLIES, SCORES, read_lines
from server.run.summary import SUMMARY, summary_of
from strategies.core.participants import DATA_FIELDS

MAX_NAMED = 5
"""Largest number of changed settings, files and packages that a message names."""

ELSEWHERE = "add output=DIR to do it as a new run in another folder"
"""What to do with settings that a run cannot be resumed with."""

INTERRUPTED = "interrupted"
"""The event of a part of a run that ended before its last round, with the reason."""

ENDINGS = ("finish", "failed", "stopped", INTERRUPTED)
"""Events of which one ends each part of a run, unless its process was killed."""

KILLED = "the part before ended without a word: its process was killed, or its machine stopped"
"""Why a part ended that has none of :data:`ENDINGS`, as the part after it records."""


@dataclass(frozen=True, eq=False)
class RunStart:
    """The state in which a run starts.

    Args:
        history: the run's files; :func:`take_over` drops a resumed run's rounds after the checkpoint.
        checkpoint: the checkpoint that the run is resumed from; ``None`` if it is new.
        check: what the clients registered before; empty if the run is new.
        seconds: wall seconds of the parts before.
        attempt: the largest number of a part before, also of one that ended without a checkpoint.
        replaces: whether the folder still holds another run, which :func:`take_over` removes.
    """

    history: History
    checkpoint: Checkpoint | None
    check: ResumeCheck
    seconds: float = 0.0
    attempt: int = 0
    replaces: bool = False


def open_run(settings: RunSettings, listeners: Sequence[Listener]) -> RunStart:
    """Open a run's folder: resume from its newest checkpoint if ``resume`` is set, else start a new run.

    Without a checkpoint, a new run is started in either case.

    Args:
        settings: the run's settings.
        listeners: called with every event of the history.

    Raises:
        CheckpointError: see :func:`check_resumable`.
    """
    checkpoint = check_resumable(settings)
    folder = settings.output_folder
    if checkpoint is None:
        replaces = settings.overwrite and holds_rounds(folder)
        if not replaces:
            begin_anew(settings)
        return RunStart(_history(settings, listeners, at_once=not replaces), None, ResumeCheck(), replaces=replaces)
    done = checkpoint.state.round
    scored = done
    if not settings.method.scores_new_state:  # a round's state is scored in the next round
        scored -= 1
    history = _history(settings, listeners, (done, scored))
    if _was_killed(folder):
        history.event(INTERRUPTED, round=done, reason=KILLED)
    check = ResumeCheck.of(folder, anyway=settings.resume == "anyway")
    changed = changed_code(folder, settings.own_packages, resumed=True)
    if changed:
        history.event("code changed", round=done, reason=changed)
    attempts = [entry.get("attempt", 0) for entry in read_lines(folder / EVENTS)]
    attempt = max([checkpoint.attempt, *attempts])
    return RunStart(history, checkpoint, check, max(checkpoint.seconds, _seconds_of_end(folder)), attempt)


def holds_rounds(folder: Path) -> bool:
    """Return whether the folder has the events or a checkpoint of a run."""
    return (folder / EVENTS).exists() or bool(Checkpoints(folder / "checkpoint").series.numbers())


def begin_anew(settings: RunSettings) -> None:
    """Remove what a new run would take for its own, and write ``config.yaml`` and ``code.json``."""
    folder = settings.output_folder
    with writing(folder, "another output="):
        (folder / SUMMARY).unlink(missing_ok=True)
        shutil.rmtree(folder / "clients", ignore_errors=True)  # no other run can use an old run's client states
        for name in (EVENTS, SCORES, REPLIES, *CSV_COPIES):
            (folder / name).unlink(missing_ok=True)
        for kind in ("round", BEST):
            Checkpoints(folder / "checkpoint", kind=kind).clear()
        write_config(settings)
        changed_code(folder, settings.own_packages, resumed=False)


def _seconds_of_end(folder: Path) -> float:
    """Return the wall seconds of a run that has ended, with those after its last checkpoint; 0 for any other."""
    end = RunFiles(folder).facts.end
    if end is None:
        return 0.0
    return end.seconds


def record_interruption(folder: Path, reason: str) -> None:
    """Append the event of a part that ends at once, such as while another thread waits for a silent SuperLink.

    A finished run in the folder, which was to be replaced or goes on later, stays as it is.
    """
    if not (folder / SUMMARY).exists():
        append_lines(folder / EVENTS, [{"event": INTERRUPTED, "time": round(time.time(), 3), "reason": reason}])


def _was_killed(folder: Path) -> bool:
    """Return whether the last part of a run has no event of its end."""
    last = ""
    for entry in read_lines(folder / EVENTS):
        last = entry["event"]
    return last not in ENDINGS


def check_resumable(settings: RunSettings) -> Checkpoint | None:
    """Check that a resumed run's settings agree with the rounds that are done; return the checkpoint to go on from.

    The check only reads, so that a run that cannot be resumed keeps every byte.
    :data:`common.run_config.CHANGEABLE_ON_RESUME` are the settings that may differ.

    Args:
        settings: the run's settings.

    Returns:
        The newest checkpoint in the run's folder; ``None`` if there is none, or if the run is not to be resumed.

    Raises:
        ConfigError: an older version of Goldfinch wrote the folder.
        CheckpointError: no checkpoint can be read; a record of the rounds that are done is missing; a setting
            contradicts them; or ``train.rounds`` is less than they are, or differs although the run follows a schedule
            over all rounds.
    """
    if not settings.resume:
        return None
    check_version(settings.output_folder)
    checkpoints = Checkpoints(settings.output_folder / "checkpoint")
    checkpoint = checkpoints.load()
    if checkpoint is None:
        return None
    RunFiles(settings.output_folder).check_whole()
    _check_settings(settings, checkpoint)
    _check_rounds(settings, checkpoint, checkpoints.series.numbers())
    return checkpoint


def has_finished(settings: RunSettings) -> bool:
    """Return whether a run that is to be resumed ended with a whole score, and its settings ask for nothing more.

    To resume such a run would only score its last state again.

    Args:
        settings: the run's settings, which agree with the rounds that are done (:func:`check_resumable`).
    """
    folder = settings.output_folder
    if not settings.resume or not (folder / "config.yaml").exists():
        return False
    files = RunFiles(folder)
    try:
        facts, summary = files.facts, summary_of(files)
    except ConfigError:
        return False
    if not summary:
        return False
    total = settings.train.rounds if settings.method.trains else 0
    ended = facts.rounds == total or facts.early_stop is not None  # Ctrl-C ends a run in order, too
    whole = ended and summary["average"] is not None and not summary["missing"]
    if summary.get("validation", {}).get("missing"):
        whole = False
    same = not contradictions(settings.raw, files.config_file, changeable=())
    return whole and same and facts.identity == settings.identity


def _check_settings(settings: RunSettings, checkpoint: Checkpoint) -> None:
    """Refuse settings that contradict the rounds that are done.

    Raises:
        CheckpointError: a setting differs; the message has its values now and before, and what to do.
    """
    folder = settings.output_folder
    parts: list[str] = []
    if checkpoint.method != settings.method.name:
        parts.append(f"method={settings.method.name}, which was {checkpoint.method}")
    if checkpoint.seed != settings.seed:
        parts.append(f"seed={settings.seed}, which was {checkpoint.seed}")
    parts += changed_settings(settings, without=("method", "seed", "data.root"))  # told above; images may have moved
    if not parts and checkpoint.identity == settings.identity:
        return
    differ = some_of(parts, MAX_NAMED) or "they differ from config.yaml, which was changed or is of another version"
    own = shell_line(["goldfinch", "resume", folder, *folder_options()])
    raise CheckpointError(
        f"{folder} cannot go on with other settings than up to round {checkpoint.state.round}, which is done: "
        f"{differ}. Leave out what differs ({own} takes the run's own settings), or {ELSEWHERE}"
    )


def _check_rounds(settings: RunSettings, checkpoint: Checkpoint, kept: Sequence[int]) -> None:
    """Refuse fewer rounds than are done, and another number of rounds of a run that follows a schedule over them.

    Args:
        settings: the run's settings.
        checkpoint: the newest checkpoint.
        kept: the rounds with a checkpoint, ascending.

    Raises:
        CheckpointError: the number of rounds does not fit the checkpoint.
    """
    folder, rounds, done = settings.output_folder, settings.train.rounds, checkpoint.state.round
    if settings.scheduled and checkpoint.rounds != rounds:
        raise CheckpointError(
            f"this run of {checkpoint.method} follows a schedule over all rounds, and the rounds up to {done} "
            f"followed that of train.rounds={checkpoint.rounds}; with train.rounds={rounds} the result would be "
            f"neither's: resume with train.rounds={checkpoint.rounds}, or {ELSEWHERE}"
        )
    if rounds >= done:
        return
    if rounds in kept:
        export = shell_line(["goldfinch", "export", folder, "--round", rounds, "--to"])
        model = f"{export} DIR takes the model after round {rounds}"
    else:
        numbers = ", ".join(map(str, kept))
        model = f"the state after round {rounds} is not kept (rounds.checkpoints; kept are {numbers})"
    raise CheckpointError(
        f"train.rounds={rounds}, and {folder} is at round {done}: a run cannot be resumed to fewer. "
        f"Use train.rounds={done} or more, or {ELSEWHERE}; {model}"
    )


def changed_settings(settings: RunSettings, without: Sequence[str] = ()) -> list[str]:
    """Return which settings contradict those of the run in the output folder, each as ``KEY=NOW, which was BEFORE``.

    Args:
        settings: the present settings.
        without: settings that are left out.

    Raises:
        ConfigError: the folder's ``config.yaml`` cannot be read.
    """
    parts: list[str] = []
    for key, (now, before) in contradictions(settings.raw, settings.output_folder / "config.yaml").items():
        if key not in without:
            parts.append(f"{key}={_shown(now)}, which was {_shown(before)}")
    return parts


def _shown(value: Any) -> str:
    """Return a setting's value for a message."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return printable(str(value))[:100]


def _history(
    settings: RunSettings, listeners: Sequence[Listener], until: tuple[int, int] = (-1, -1), *, at_once: bool = False
) -> History:
    """Return the run's files; ``until`` are the last rounds with replies and with scores of a resumed run."""
    return History(
        settings.output_folder,
        *until,
        listeners,
        at_once=at_once,
        scorers={"test": settings.test_scorers, "validation": settings.validation_scorers},
        metric=settings.rounds.metric,
        measures=settings.further_measures,
    )


def take_over(settings: RunSettings, start: RunStart, done: int) -> None:
    """Drop what a resumed run writes again, write its settings, and remove its summary if rounds are left.

    Until here a resumed run keeps its records, and so does a run that is replaced: if clients are missing or have other
    data, nothing is lost.

    Args:
        settings: the run's settings; nothing happens unless they resume or replace a run.
        start: the state in which the run starts.
        done: rounds that are done.
    """
    if start.replaces:
        begin_anew(settings)
    if start.replaces or start.checkpoint is not None:
        start.history.rewind()
    if not settings.resume:
        return
    folder = settings.output_folder
    write_config(settings)
    if done < settings.train.rounds:
        (folder / SUMMARY).unlink(missing_ok=True)


def write_config(settings: RunSettings) -> None:
    """Write a run's ``config.yaml``: its settings, and the classes by label."""
    named = {**settings.raw, CLASS_NAMES: list(settings.data.class_names)}
    write_text(settings.output_folder / "config.yaml", yaml_of(named))


@dataclass
class ResumeCheck:
    """Compares what clients register with what they registered in the rounds that are done.

    Args:
        registrations: the last registration of each client, by client id; none for a new run.
        anyway: accept clients with changed data.
        changed: clients with changed data that have registered so far, and the fields that differ.
    """

    registrations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    anyway: bool = False
    changed: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, folder: Path, *, anyway: bool) -> ResumeCheck:
        """Return the check for the run in ``folder``, from its event log."""
        registrations: dict[str, Mapping[str, Any]] = {}
        for entry in read_lines(folder / EVENTS):
            if entry["event"] == "registered":
                registrations[entry.get("client", "")] = entry
        return cls(registrations, anyway)

    def refuses(self, registration: Registration) -> str:
        """Return why a client cannot go on, because its data have changed; empty if it can."""
        known = self.registrations.get(registration.client, {})
        other = [key for key in DATA_FIELDS if known.get(key, "") not in ("", getattr(registration, key))]
        if not other:
            return ""
        self.changed.append(f"{registration.client} ({', '.join(other)})")
        if self.anyway:
            return ""
        return f"its data are not what they were in the rounds that are done: {', '.join(other)}"

    def check(self) -> None:
        """Refuse to go on with changed data, unless ``anyway`` is set.

        Raises:
            CheckpointError: clients have changed data.
        """
        if self.changed and not self.anyway:
            raise CheckpointError(
                f"the rounds that are done had other data of {', '.join(self.changed)}: restore them, start again "
                "with overwrite=true, or accept the change with resume=anyway"
            )


def changed_code(folder: Path, own: tuple[str, ...] = (), *, resumed: bool) -> str:
    """Return which code files and package versions differ from those of the run so far, and rewrite ``code.json``.

    Args:
        folder: the run's folder.
        own: the user's own packages; their code is compared too.
        resumed: whether the run is resumed; a new run has no differences.
    """
    path, now = folder / "code.json", {**code_files(own), **package_versions()}
    before: dict[str, str] = {}
    try:
        if resumed and path.exists():
            before = dict(json.loads(read_small(path)))
    except (OSError, ValueError, TypeError, RecursionError):
        return "code.json, which records the code of the rounds that are done, cannot be read"
    finally:
        write_json(path, now)
    if not before:
        return ""
    versions = package_versions()
    changed = differing(before, now)
    parts: list[str] = []
    for name in changed[:MAX_NAMED]:
        if name in versions:
            parts.append(f"{name} {before.get(name)} -> {now.get(name)}")
        else:
            parts.append(name)
    if len(changed) > MAX_NAMED:
        parts.append(f"{len(changed) - MAX_NAMED} more")
    return printable(", ".join(parts))
