"""Do one run from its settings and an engine, and write its files: config, history, checkpoints, summary."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from common.data.names import check_names
from common.errors import DISK_ADVICE, ConfigError, EngineError, writing
from common.settings import RunSettings, inspect_run
from common.storage import write_json
from server.run.accounting import require_accountant
from server.run.checkpoint import Checkpoints
from server.run.deployment import check_writable, share_with_group
from server.run.engine import Engine
from server.run.events import Listener
from server.run.existing import Decision, Step, decide
from server.run.files import RunFiles
from server.run.resume import begin_anew
from server.run.rounds import RoundLoop
from server.run.summary import SUMMARY, summary_of
from server.run.trackers import tracker_settings, tracking


def prepare_output(settings: RunSettings) -> None:
    """Check the output folder, make it and write ``config.yaml``, before any process is started.

    The folder's content decides (:func:`server.run.existing.decide`). A run that is replaced stays whole until the
    clients of the new one have registered, so that nothing is lost if it cannot begin. :func:`run_federation` decides
    again under its lock, because another process may have started a run here in between.

    Raises:
        ConfigError: the folder holds a run and neither ``resume`` nor ``overwrite`` is set, or files that a run would
            replace; it lies in the folder of a run or holds such folders; another process writes to the folder; it
            cannot be written; or the library of a tracker is missing.
        CheckpointError: the run cannot be resumed with these settings; the folder is as it was.
    """
    if settings.resume and settings.overwrite:
        raise ConfigError("resume=true goes on with a run and overwrite=true replaces it: choose one")
    tracker_settings(settings)
    require_accountant(settings)
    check_not_in_a_run(settings.output_folder)
    check_holds_no_runs(settings.output_folder)
    with run_lock(settings.output_folder):
        check_writable(settings.output_folder)
        decision = _checked(settings)
        if decision.step is Step.START and not decision.replaces:
            begin_anew(settings)


def _checked(settings: RunSettings) -> Decision:
    """Return what the run does with what its folder holds; the caller holds the lock.

    Raises:
        ConfigError: the folder holds a run that may be neither continued nor replaced.
        CheckpointError: the run cannot be resumed with these settings.
    """
    decision = decide(settings)
    if decision.step is Step.KEEP:
        raise ConfigError(decision.reason)
    check_names("class", settings.data.class_names)
    return decision


def check_not_in_a_run(folder: Path) -> None:
    """Refuse a folder inside a run's folder: tables and reports of that run would include both runs.

    Raises:
        ConfigError: the folder is inside a run's folder.
    """
    for parent in folder.absolute().parents:
        if (parent / "config.yaml").exists() and (parent / "events.jsonl").exists():
            raise ConfigError(f"{folder} lies in the folder of a run, {parent}: choose another output folder")


def check_holds_no_runs(folder: Path) -> None:
    """Refuse a folder that other runs lie below, such as a sweep's.

    Raises:
        ConfigError: a run lies below the folder.
    """
    below = (path.parent for path in folder.glob("*/**/events.jsonl") if (path.parent / "config.yaml").exists())
    run = next(below, None)
    if run is not None:
        raise ConfigError(f"{folder} holds other runs, such as {run}: choose another output=, such as {folder}/NAME")


class FolderInUseError(ConfigError):
    """Another process writes to the folder."""


@contextlib.contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock on ``folder``, which only one process can have at a time; the folder is made.

    A submitted run goes on after its terminal is closed, so it could otherwise be resumed while it still runs. On a
    file system without locks, nothing is checked.

    Args:
        folder: the folder.

    Raises:
        FolderInUseError: another process holds the lock.
        ConfigError: the folder cannot be made.
    """
    with writing(folder, "another output="):
        if not folder.exists():
            folder.mkdir(parents=True, exist_ok=True)
            share_with_group(folder)
        handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FolderInUseError(
                f"another process is writing a run to {folder}: let it finish or stop it "
                "(a submitted run: flwr list, flwr stop), or choose another output="
            ) from error
        except OSError:  # a network file system without locks
            pass
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Replace the errors of a full, read-only or broken disk by one with a message; other errors pass.

    Raises:
        EngineError: the message names the file, the cause, and what to do.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ADVICE:
            raise
        place = error.filename or folder
        if Checkpoints(folder / "checkpoint").series.numbers():
            kept = f"the last complete round is kept in {folder / 'checkpoint'}"
        else:
            kept = "no round was complete yet"
        raise EngineError(
            f"{place}: {error.strerror}; {DISK_ADVICE[error.errno]}, then go on with resume=true: {kept}"
        ) from error


def run_federation(
    settings: RunSettings, engine: Engine, listeners: Sequence[Listener] = (), stop: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """Run all rounds, write ``summary.json``, and return its content.

    A run that is replaced stays whole until the clients of the new one have registered.
    A resumed run's wall seconds include all parts of the run; of a part that crashed, up to its last complete round.

    Args:
        settings: the run's settings.
        engine: how clients are reached; closed at the end.
        listeners: called with every event.
        stop: called before every round; ``True`` ends the run.

    Raises:
        ConfigError: another process writes to the same folder, or it holds a run.
        CheckpointError: the run cannot be resumed with these settings; the folder is as it was.
        EngineError: the disk is full or cannot be written; no round was held, or the last state could not be scored
            (then there is a summary without a final score); or see :meth:`server.run.rounds.RoundLoop.run`.
    """
    folder = settings.output_folder
    with run_lock(folder), storage_errors(folder), tracking(settings, listeners) as tracked:
        _checked(settings)
        if engine.simulated:  # all data are here
            inspect_run(settings)
        rounds = RoundLoop(settings, engine, tracked, stop)
        try:
            rounds.run()
        except BaseException as error:
            rounds.folder.record_error(error)
            raise
        finally:
            engine.close()
        summary = summary_of(RunFiles(folder))
        write_json(folder / SUMMARY, summary)
    if rounds.problem:
        raise EngineError(rounds.problem)
    return summary
