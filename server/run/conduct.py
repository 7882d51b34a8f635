"""Do one run from its settings and an engine, and write its files: config, history, checkpoints, summary."""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.data.names import check_names
from common.errors import DISK_ADVICE, ConfigError, EngineError, writing
from common.metrics import RoundScore, best_round, peak_bytes, states
from common.regular_files import read_small
from common.run_config import CLASS_NAMES, attack_text, yaml_of
from common.scores import RunScores, test_images
from common.settings import RunSettings
from common.storage import write_json, write_text
from common.versions import package_versions, processor
from server.run.accounting import require_accountant
from server.run.checkpoint import Checkpoints
from server.run.engine import Engine
from server.run.events import Listener
from server.run.history import CSV_COPIES, PARTS, History
from server.run.measures import described, resolutions_of
from server.run.resume import check_resumable
from server.run.rounds import RoundLoop
from server.run.schema import REPLIES, stream_lines
from server.run.trackers import tracker_settings, tracking
from strategies.core.last_batch import joined_clients
from strategies.core.method import Method


def prepare_output(settings: RunSettings) -> None:
    """Check the output folder, make it and write ``config.yaml``, before any process is started.

    A run in the folder is overwritten only with ``overwrite``, and with ``resume`` its settings must agree with the
    rounds that are done (:func:`server.run.resume.check_resumable`). :func:`run_federation` checks this again under its
    lock, because another process may have started a run here in between.

    Raises:
        ConfigError: the folder holds a run and neither ``resume`` nor ``overwrite`` is set, another process writes to
            the folder, it cannot be written, or the library of a tracker is missing.
        CheckpointError: the run cannot be resumed with these settings; the folder is as it was.
    """
    if settings.resume and settings.overwrite:
        raise ConfigError("resume=true goes on with a run and overwrite=true replaces it: choose one")
    tracker_settings(settings)
    require_accountant(settings)
    with run_lock(settings.output_folder):
        _begin(settings)


def _begin(settings: RunSettings) -> None:
    """Check and write the folder as :func:`prepare_output` does; the caller holds the lock."""
    folder = settings.output_folder
    taken = (folder / "checkpoint").is_dir() and any((folder / "checkpoint").iterdir())
    if taken and not (settings.resume or settings.overwrite):
        raise ConfigError(
            f"{folder} already holds a run; add resume=true to go on with it, overwrite=true to replace it, "
            "or choose another output="
        )
    check_resumable(settings)
    check_names("class", settings.data.class_names)
    if settings.resume and (folder / "config.yaml").exists():
        return
    with writing(folder, "another output="):
        (folder / "summary.json").unlink(missing_ok=True)
        if not settings.resume:  # no other run can use an old run's client states
            shutil.rmtree(folder / "clients", ignore_errors=True)
            for name in CSV_COPIES:
                (folder / name).unlink(missing_ok=True)
        named = {**settings.raw, CLASS_NAMES: list(settings.data.class_names)}
        write_text(folder / "config.yaml", yaml_of(named))


def check_not_in_a_run(folder: Path) -> None:
    """Refuse a folder inside a run's folder: tables and reports of that run would include both runs.

    Raises:
        ConfigError: the folder is inside a run's folder.
    """
    for parent in folder.absolute().parents:
        if (parent / "config.yaml").exists() and (parent / "events.jsonl").exists():
            raise ConfigError(f"{folder} lies in the folder of a run, {parent}: choose another output=")


def check_holds_no_runs(folder: Path) -> None:
    """Refuse a folder that other runs lie below, such as a sweep's.

    Raises:
        ConfigError: one does.
    """
    below = (path.parent for path in folder.glob("*/**/events.jsonl") if (path.parent / "config.yaml").exists())
    if (found := next(below, None)) is not None:
        raise ConfigError(f"{folder} holds other runs, such as {found}: choose another output=, such as {folder}/NAME")


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
        folder.mkdir(parents=True, exist_ok=True)
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
        EngineError: which file it was, why, and what to do.
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
    settings: RunSettings,
    engine: Engine,
    listeners: Sequence[Listener] = (),
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Run all rounds, write ``summary.json``, and return its content.

    A resumed run's wall seconds include all parts of the run; of a part that crashed, up to its last complete round.

    Args:
        settings: the run's settings.
        engine: how clients are reached. It is closed at the end.
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
        _begin(settings)
        finished = 0.0
        if settings.resume:
            finished = _earlier_seconds(settings)  # which include the last scoring, unlike the checkpoint's
        rounds = RoundLoop(settings, engine, tracked, stop)
        try:
            rounds.run()
        except BaseException as error:
            rounds.record_end(error)
            raise
        finally:
            engine.close()
        summary = summary_of(settings, rounds, rounds.seconds() + max(0.0, finished - rounds.earlier_seconds))
        write_json(folder / "summary.json", summary)
    if rounds.problem:
        raise EngineError(rounds.problem)
    return summary


def _earlier_seconds(settings: RunSettings) -> float:
    """Return the wall seconds in the summary of the run that is resumed; 0 without one."""
    path = settings.output_folder / "summary.json"
    try:
        return float(json.loads(read_small(path))["wall_seconds"])
    except (OSError, ValueError, KeyError):
        return 0.0


def summary_of(settings: RunSettings, rounds: RoundLoop, seconds: float) -> dict[str, Any]:
    """Return the content of ``summary.json``. Accuracies are in per cent.

    A run that never held a round has no ``scores``. If the last state could not be scored, there is no score by the
    rule ``final``. ``average``, ``worst`` and ``spread`` are ``null`` in both cases. ``stopped_early`` is there only if
    ``train.patience`` ended the run before its last round. ``missing`` has the domains that the final score lacks, with
    the last round that scored each; ``partial`` is whether there are any. ``images`` has the test images of
    each domain. ``joined_batches`` has the clients whose last batch of one sample joined the one before it, if there
    are any (:mod:`strategies.core.last_batch`).
    """
    history, folder = rounds.history, settings.output_folder
    scores = history.scores()
    rules: dict[str, dict[str, Any]] = {}
    if rounds.trained:
        rules = scores.rules(settings.rounds.last_rounds, settings.unseen_domains)
    if rounds.problem:
        rules.pop("final", None)
    final = rules.get("final", {})
    best = best_round(states(scores.validated(), scores.skipped))
    registrations = rounds.registry.registrations
    private = rounds.privacy_report()
    samples = {client: registrations[client].samples for client in sorted(registrations)}
    joined = joined_clients(settings, rounds.federation.new_model, samples)
    return {
        "method": settings.method.name,
        "data": settings.data.name,
        CLASS_NAMES: list(settings.data.class_names),
        "protocol": settings.choices.get("protocol", ""),
        "model": settings.choices.get("model", ""),
        "seed": settings.seed,
        "key": rounds.registry.key,
        "identity": settings.identity,
        "scoring": settings.scoring,
        "code": code_that_ran(settings, history),
        "configuration": settings.configuration,
        "rounds": rounds.state.round,
        "rounds_held": len(history.rounds("round done")),
        "rounds_skipped": len(history.rounds("round skipped")),
        **({"stopped_early": _early_stop(settings, rounds)} if rounds.stopped_early else {}),
        "answers": history.answers(),
        "scored": _scored(settings.method),
        "bound": settings.method.bound,
        **({"attack": attack_text(settings.raw)} if settings.attack.clients else {}),
        "accuracy": final.get("accuracy", {}),
        "average": final.get("average"),
        "worst": final.get("worst"),
        "spread": final.get("spread"),
        "missing": final.get("missing", {}),
        "partial": bool(final.get("missing")),
        "unseen": list(settings.unseen_domains),
        "scores": rules,
        "images": test_images(scores.lines),
        **({"validation": _validation(best, settings.rounds.metric)} if best else {}),
        **_further(scores),
        "state_sha256": rounds.state.sha256(),
        "bytes": bytes_total(stream_lines(folder / REPLIES)),
        "bytes_by_part": bytes_by_part(stream_lines(folder / REPLIES)),
        **({"privacy": private} if private else {}),
        "wall_seconds": round(seconds, 3),
        "server_peak_bytes": peak_bytes(),
        "clients": samples,
        "counts_less": history.counts_less(),
        **({"joined_batches": joined} if joined else {}),
        "splits": {client: registrations[client].split for client in sorted(registrations)},
        "processor": processor(),
        "versions": package_versions(),
    }


def _further(scores: RunScores) -> dict[str, Any]:
    """Return the entry ``metrics``: what ``rounds.scores`` and ``own_metric`` came to in the last scored round."""
    if not scores.measures:
        return {}
    accuracies = scores.tested()
    found = described(scores.measures)
    resolutions: dict[str, float] = {}
    if accuracies:
        resolutions = resolutions_of(scores.events, accuracies[-1].round)
    for metric, entry in found.items():
        entry |= {"domains": {}, "average": None, "worst": None}
        by_round = scores.tested(metric)
        if by_round and by_round[-1].round == accuracies[-1].round:
            score = by_round[-1]
            entry |= {"domains": dict(score.accuracy), "average": score.average, "worst": score.worst}
            entry["missing"] = dict(score.missing)
            if metric in resolutions:
                entry["resolution"] = resolutions[metric]
    return {"metrics": found}


def _early_stop(settings: RunSettings, rounds: RoundLoop) -> dict[str, Any]:
    return {
        "rounds_planned": settings.train.rounds,
        "patience": settings.train.patience,
        "best_round": rounds.federation.best,
    }


def _scored(method: Method) -> str:
    if not method.trains:
        return "exported model"
    if method.personal:
        return "own model"
    return "global model"


def _validation(score: RoundScore, metric: str) -> dict[str, Any]:
    found = {"round": score.round, "average": score.average, "missing": dict(score.missing)}
    if metric != "accuracy":
        found["metric"] = metric
    return found


def code_that_ran(settings: RunSettings, history: History) -> str:
    """Return the hash of the run's code, with ``(changed)`` if the run was resumed with other code."""
    if history.rounds("code changed"):
        return f"{settings.code} (changed)"
    return settings.code


def bytes_total(replies: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the bytes to (``down``) and from (``up``) all clients over the run."""
    total = {"up": 0, "down": 0}
    for line in replies:
        for direction in total:
            total[direction] += line.get(f"bytes_{direction}", 0)
    return total


def bytes_by_part(replies: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the bytes by direction and part over all lines of ``replies.jsonl``, with each direction's total."""
    sums = {direction: dict.fromkeys((*PARTS, "total"), 0) for direction in ("down", "up")}
    for line in replies:
        for direction, parts in sums.items():
            for part in PARTS:
                parts[part] += line.get(f"bytes_{direction}_{part}", 0)
            parts["total"] += line.get(f"bytes_{direction}", 0)
    return sums
