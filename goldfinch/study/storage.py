"""Where the studies of a comparison are kept, and how any number of processes share their work.

Optuna keeps the studies: in a journal in the comparison's folder, or in a database. A piece of work, such as a trial,
is an entry of a study. Optuna gives each entry to one process. A process that works sends heartbeats; the work of one
that sends none is free again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import optuna
import sqlalchemy.engine
import sqlalchemy.exc
from optuna.exceptions import ExperimentalWarning, StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, fail_stale_trials
from optuna.storages._heartbeat import BaseHeartbeat
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.storages.journal._file import get_lock_file
from optuna.trial import FrozenTrial, Trial, TrialState

from common.errors import CheckpointError, ConfigError, GoldfinchError
from common.regular_files import check_regular

JOURNAL = "journal.log"
MAX_JOURNAL = 2**30
"""Largest journal that is read, in bytes."""

BLOCK = 2**16
"""Bytes of the journal's end that are read at once."""

STORAGE_VARIABLE = "GOLDFINCH_STORAGE"
"""Environment variable in place of ``--storage``."""

HEARTBEAT = 15
"""Seconds between the heartbeats of a process that works."""

SILENCE = 60
"""Seconds without a heartbeat after which another process takes the work over."""

OPENINGS = 5
"""Attempts to open a database, one a second."""

DONE = (TrialState.COMPLETE, TrialState.PRUNED)

Task = Mapping[str, Any]
"""A piece of work: user attributes that only its entries have."""


class Journal(JournalFileBackend):
    """Optuna's journal, in which a line that a full disk or a kill cut short is no part of the line after it."""

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append entries, each on a line, after the last whole line: readers count lines, so a torn one has to go.

        Raises:
            OSError: the disk is full or cannot be written; it names the journal.
        """
        lines = "".join(f"{json.dumps(entry, separators=(',', ':'))}\n" for entry in logs)
        try:
            with get_lock_file(self._lock), Path(self._file_path).open("rb+") as stream:
                stream.truncate(_end_of_lines(stream))
                stream.seek(0, os.SEEK_END)
                stream.write(lines.encode())
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._file_path) from error


def _end_of_lines(stream: BinaryIO) -> int:
    """Return the size of a file without the line at its end that no line break follows."""
    end = stream.seek(0, os.SEEK_END)
    rest = b""
    while end and b"\n" not in rest:
        begin = max(0, end - BLOCK)
        stream.seek(begin)
        rest = stream.read(end - begin)
        end = begin
    return end + rest.rfind(b"\n") + 1


class FolderStorage(JournalStorage, BaseHeartbeat):
    """Optuna's journal with heartbeats, which Optuna itself has for databases alone.

    Its lines are JSON. Optuna unpickles snapshots of backends that store them, which its file is none of.

    A heartbeat is an attribute of a trial that changes. A process takes a trial to be stale if it has seen no change
    for :data:`SILENCE` seconds by its own clock, so the clocks of machines need not agree.

    Args:
        path: the journal.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(Journal(str(path), lock_obj=JournalFileOpenLock(str(path))))
        self._seen: dict[int, tuple[object, float]] = {}

    def record_heartbeat(self, trial_id: int) -> None:
        """Change the trial's attribute, unless another process has taken the trial over."""
        with contextlib.suppress(UpdateFinishedTrialError):
            self.set_trial_system_attr(trial_id, "heartbeat", time.time())

    def _get_stale_trial_ids(self, study_id: int) -> list[int]:
        stale: list[int] = []
        now = time.monotonic()
        for trial in self.get_all_trials(study_id, deepcopy=False, states=(TrialState.RUNNING,)):
            number, beat = trial._trial_id, trial.system_attrs.get("heartbeat")
            last, since = self._seen.get(number, (self, now))
            if beat != last:
                self._seen[number] = (beat, now)
            elif now - since > SILENCE:
                stale.append(number)
        return stale

    def get_heartbeat_interval(self) -> int:
        """Return :data:`HEARTBEAT`."""
        return HEARTBEAT

    def get_heartbeat_stale_trial_callback(self) -> None:
        """Return nothing to call: :func:`take` finds the work that is free."""

    get_failed_trial_callback = get_heartbeat_stale_trial_callback  # its name in Optuna 4


class DatabaseStorage(RDBStorage):
    """Optuna's storage in a database, with its heartbeats from the moment in which a process takes a trial.

    Optuna sends the first one a moment later. A process that ended in between would keep the trial for ever.
    """

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        """Set the state, and send a heartbeat before it is ``RUNNING``."""
        if state is TrialState.RUNNING:
            self.record_heartbeat(trial_id)
        return super().set_trial_state_values(trial_id, state, values)


def storage_of(output: Path, url: str = "") -> BaseStorage:
    """Return the storage of a comparison's studies, for ``optuna.load_study`` too.

    Args:
        output: the folder of the comparison.
        url: a database, as SQLAlchemy writes it; empty is the journal in ``output``.

    Raises:
        ConfigError: the database's driver is not installed, or the database cannot be used.
        CheckpointError: the journal is damaged.
    """
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    if not url:
        path = (output / JOURNAL).absolute()
        _check_journal(path)
        with damage(path):
            return FolderStorage(path)
    driver = _driver(url)
    with warnings.catch_warnings(), database_errors():
        warnings.simplefilter("ignore", ExperimentalWarning)
        try:
            return _database(url)
        except ImportError as error:
            raise ConfigError(
                f"storage {driver}://: the database's driver is not installed ({error.__cause__}): "
                "pip install 'psycopg[binary]' for postgresql+psycopg://, or leave storage out and let all processes "
                "share the output folder"
            ) from error


def _driver(url: str) -> str:
    """Return the name of a database's driver. No message repeats the URL, which can hold a password.

    Raises:
        ConfigError: it is no URL of a database.
    """
    try:
        found = sqlalchemy.engine.make_url(url)
        if "://" in url and re.fullmatch(r"[a-z0-9_+]+", found.drivername):
            return found.drivername
    except (ValueError, sqlalchemy.exc.ArgumentError):  # such as a port that is no number
        pass
    raise ConfigError(
        f"storage: {len(url)} characters, which are not shown, are no URL of a database; write it as "
        "postgresql+psycopg://USER@HOST:PORT/DATABASE, with a number as the port. An output "
        "folder can be one that all machines see"
    )


def _database(url: str) -> DatabaseStorage:
    """Return the storage in a database. Of processes that make its tables at the same moment, all but one try again."""
    for _ in range(OPENINGS - 1):
        with contextlib.suppress(sqlalchemy.exc.DBAPIError):
            return _open_database(url)
        time.sleep(1.0)
    return _open_database(url)


def _open_database(url: str) -> DatabaseStorage:
    options = {"pool_pre_ping": True}
    return DatabaseStorage(url, engine_kwargs=options, heartbeat_interval=HEARTBEAT, grace_period=SILENCE)


@contextlib.contextmanager
def database_errors() -> Iterator[None]:
    """Within the context, an error of the database becomes a :class:`ConfigError` with its first line.

    Raises:
        ConfigError: there was one.
    """
    try:
        yield
    except (StorageInternalError, sqlalchemy.exc.SQLAlchemyError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ConfigError(
            f"storage: {type(cause).__name__}: {str(cause).partition(chr(10))[0]}; once the database can be used, "
            "the same command goes on"
        ) from error


def _check_journal(path: Path) -> None:
    """Check that the journal, if there is one, can be read without blocking.

    Raises:
        CheckpointError: it is no regular file.
    """
    try:
        check_regular(path, MAX_JOURNAL)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise CheckpointError(f"{error}; delete it to search again, or choose another folder") from error


@contextlib.contextmanager
def damage(path: object) -> Iterator[None]:
    """Within the context, an error that content of another kind causes becomes a :class:`CheckpointError`.

    Args:
        path: what is read, for the message.

    Raises:
        CheckpointError: there was one.
    """
    try:
        yield
    except (AssertionError, LookupError, RecursionError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, GoldfinchError):
            raise
        raise CheckpointError(
            f"{path} is damaged or from another program: {error}; delete it to search again, or choose another folder"
        ) from error


# ---- work that processes share ---------------------------------------------------------------------------------------


class _TakenError(Exception):
    """Another process has this work."""


def entries(study: optuna.Study, tasks: Sequence[Task], again: Collection[int] = ()) -> dict[int, FrozenTrial]:
    """Return the entry of each task that a process has done, does or is about to do, by the task's index.

    Args:
        study: Optuna's study.
        tasks: pieces of work.
        again: numbers of entries that do not count, since their work is to be done again.
    """
    entries_by_index: dict[int, FrozenTrial] = {}
    for trial in study.get_trials(deepcopy=False):
        if trial.state is TrialState.FAIL or trial.number in again:
            continue
        for index, task in enumerate(tasks):
            if task.items() <= trial.user_attrs.items():
                entries_by_index.setdefault(index, trial)
    return entries_by_index


def take(
    study: optuna.Study,
    tasks: Sequence[Task],
    values: Callable[[Task], dict[str, float]],
    work: Callable[[Trial], float],
    tell: Callable[[FrozenTrial], None],
    again: Collection[int] = (),
) -> bool:
    """Do one of the tasks that no process has done or does, and return whether there was one.

    Of several entries for the same task the first counts, so it does not matter if two processes add one at the same
    time. An entry fails if its process was interrupted, or sends no heartbeat; the next call adds another one.

    Args:
        study: Optuna's study.
        tasks: pieces of work, the first of them first.
        values: called with a task, returns Optuna's parameters of its entry.
        work: called with the entry, returns its score. If the entry was taken over meanwhile, every report to it raises
            ``UpdateFinishedTrialError``, which ends the work.
        tell: called with the entry of work that was done here.
        again: as for :func:`entries`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        fail_stale_trials(study)
    held = entries(study, tasks, again)
    free = [task for index, task in enumerate(tasks) if index not in held]
    if free:
        study.enqueue_trial(values(free[0]), user_attrs=dict(free[0]))
    elif not any(trial.state is TrialState.WAITING for trial in held.values()):
        return False
    errors: list[Exception] = []

    def objective(trial: Trial) -> float:
        first = [entry.number for entry in entries(study, tasks, again).values()]
        if trial.number not in first:
            raise _TakenError
        try:
            return work(trial)
        except (optuna.TrialPruned, UpdateFinishedTrialError):
            raise
        except Exception as error:
            errors.append(error)
            raise

    def ended(study: optuna.Study, trial: FrozenTrial) -> None:  # noqa: ARG001
        if trial.state in DONE:
            tell(trial)

    try:
        study.optimize(objective, n_trials=1, catch=(_TakenError,), callbacks=[ended])
    except (ValueError, UpdateFinishedTrialError):  # Optuna's, of an entry that was taken over
        if errors:
            raise
    return True
