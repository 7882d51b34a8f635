"""Open a run's folder: for a new run, or to resume it after checking that settings, data and code are the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from common.metrics import RoundScore
from common.regular_files import read_small
from common.run_config import differing, yaml_of
from common.settings import RunSettings
from common.storage import write_json, write_text
from common.versions import code_files, package_versions
from common.wire.messages import Registration, printable
from server.run.checkpoint import Checkpoint, Checkpoints, check_belongs, check_length
from server.run.history import History
from server.run.schema import read_lines
from server.trackers.events import Listener

MAX_NAMED = 5
"""Largest number of changed files and packages that a message names."""

_DATA = ("samples", "class_counts", "split", "content")


@dataclass(frozen=True, eq=False)
class RunStart:
    """The state in which a run starts.

    Args:
        history: the run's files; for a resumed run, without the rounds after the checkpoint.
        checkpoint: the checkpoint that the run is resumed from; ``None`` if it is new.
        check: what the clients registered before; empty if the run is new.
    """

    history: History
    checkpoint: Checkpoint | None
    check: ResumeCheck


def open_run(
    settings: RunSettings, checkpoints: Checkpoints, best: Checkpoints, listeners: Sequence[Listener]
) -> RunStart:
    """Open a run's folder: resume from its newest checkpoint if ``resume`` is set, else start a new run.

    Without a checkpoint, a new run is started in either case.

    Args:
        settings: the run's settings.
        checkpoints: the folder's checkpoints; removed if the run is new.
        best: the checkpoint of the best round; removed if the run is new.
        listeners: called with every event of the history.

    Raises:
        CheckpointError: no checkpoint can be read, or they belong to another run.
    """
    checkpoint: Checkpoint | None = None
    if settings.resume:
        checkpoint = checkpoints.load()
    folder = settings.output_folder
    if checkpoint is None:
        checkpoints.clear()
        best.clear()
        changed_code(folder, settings.own_packages, resumed=False)
        return RunStart(_history(settings, listeners, -1, -1), None, ResumeCheck())
    differ = differing(settings.raw, folder / "config.yaml")
    check_belongs(checkpoint, settings.method.name, settings.identity, settings.seed, differ)
    if settings.scheduled:
        check_length(checkpoint, settings.train.rounds)
    done = checkpoint.state.round
    scored = done
    if not settings.method.scores_new_state:  # a round's state is scored in the next round
        scored -= 1
    history = _history(settings, listeners, done, scored)
    check = ResumeCheck.of(folder, anyway=settings.resume == "anyway")
    changed = changed_code(folder, settings.own_packages, resumed=True)
    if changed:
        history.event("code changed", round=done, reason=changed)
    return RunStart(history, checkpoint, check)


def _history(settings: RunSettings, listeners: Sequence[Listener], keep_until: int, scores_until: int) -> History:
    return History(
        settings.output_folder,
        keep_until,
        scores_until,
        listeners,
        scorers=settings.test_scorers,
        validators=settings.validation_scorers,
        metric=settings.rounds.metric,
        measures=settings.further_measures,
    )


def take_over(settings: RunSettings, done: int) -> None:
    """Write a resumed run's settings, and remove its summary if rounds are left.

    Args:
        settings: the run's settings; nothing happens unless they resume a run.
        done: rounds that are done.
    """
    if not settings.resume:
        return
    folder = settings.output_folder
    write_text(folder / "config.yaml", yaml_of(settings.raw))
    if done < settings.train.rounds:
        (folder / "summary.json").unlink(missing_ok=True)


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
        for entry in read_lines(folder / "events.jsonl"):
            if entry["event"] == "registered":
                registrations[entry.get("client", "")] = entry
        return cls(registrations, anyway)

    def refuses(self, registration: Registration) -> str:
        """Return why a client cannot go on, because its data have changed; empty if it can."""
        known = self.registrations.get(registration.client, {})
        other = [key for key in _DATA if known.get(key, "") not in ("", getattr(registration, key))]
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
    changed = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    parts: list[str] = []
    for name in changed[:MAX_NAMED]:
        if name in versions:
            parts.append(f"{name} {before.get(name)} -> {now.get(name)}")
        else:
            parts.append(name)
    if len(changed) > MAX_NAMED:
        parts.append(f"{len(changed) - MAX_NAMED} more")
    return printable(", ".join(parts))


def best_of(scores: Sequence[RoundScore]) -> dict[str, float]:
    """Return the highest accuracy over ``scores`` of each domain, and of ``average`` and ``worst`` of whole scores."""
    best: dict[str, float] = {}
    for score in scores:
        values = dict(score.accuracy)
        if not score.missing:
            values["average"] = score.average
            values["worst"] = score.worst
        for name, value in values.items():
            best[name] = max(value, best.get(name, value))
    return best
