"""One run from settings and an engine to the files a person opens: config, history, checkpoints, summary."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from common.errors import ConfigError
from common.files import write_json, write_text
from common.metrics import summarise
from common.settings import RunSettings
from common.versions import package_versions, peak_bytes
from server.engine import Engine
from server.history import Listener
from server.rounds import Rounds
from server.trackers.base import report_of, tracking


def prepare_output(settings: RunSettings) -> None:
    """Make the output folder and write ``config.yaml``; a run that is there already is never overwritten silently.

    Raises:
        ConfigError: the folder holds a run and neither ``resume`` nor ``overwrite`` was said, or cannot be written; or
            the chosen report's library is missing.
    """
    folder = settings.output_folder
    report_of(settings)
    try:
        taken = (folder / "checkpoint").is_dir() and any((folder / "checkpoint").iterdir())
        if taken and not (settings.resume or settings.overwrite):
            raise ConfigError(
                f"{folder} already holds a run; add resume=true to go on with it, overwrite=true to replace it, "
                "or choose another output="
            )
        folder.mkdir(parents=True, exist_ok=True)
        if not (settings.resume and (folder / "config.yaml").exists()):
            (folder / "summary.json").unlink(missing_ok=True)
            if not settings.resume:  # an old run's client states are of no use to any other
                shutil.rmtree(folder / "clients", ignore_errors=True)
            write_text(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(dict(settings.raw))))
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}; choose another output=") from error


def conduct(
    settings: RunSettings,
    engine: Engine,
    listeners: Sequence[Listener] = (),
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Run all rounds and write ``summary.json``; its content.

    A resumed run's wall seconds count all its parts.
    """
    started = time.perf_counter()
    with tracking(settings, listeners) as told:
        rounds = Rounds(settings, engine, told, stop)
        try:
            rounds.run()
        finally:
            engine.close()
    earlier = _earlier_seconds(settings) if settings.resume else 0.0
    summary = summary_of(settings, rounds, earlier + time.perf_counter() - started)
    write_json(settings.output_folder / "summary.json", summary)
    return summary


def _earlier_seconds(settings: RunSettings) -> float:
    path = settings.output_folder / "summary.json"
    try:
        return float(json.loads(path.read_text())["wall_seconds"])
    except (OSError, ValueError, KeyError):
        return 0.0


def summary_of(settings: RunSettings, rounds: Rounds, seconds: float) -> dict[str, Any]:
    """What ``summary.json`` says of a run. Accuracies are in per cent."""
    scores = rounds.history.round_scores()
    rules = summarise(scores, settings.rounds.last_rounds)
    final = rules.get("final", {})
    registrations = rounds.roster.registrations
    return {
        "method": settings.method.name,
        "data": settings.data.name,
        "protocol": settings.choices.get("protocol", ""),
        "model": settings.choices.get("model", ""),
        "seed": settings.seed,
        "identity": settings.identity,
        "configuration": settings.configuration,
        "rounds": rounds.state.round,
        "scored": "own model" if settings.method.personal else "global model",
        "accuracy": final.get("accuracy", {}),
        "average": final.get("average"),
        "worst": final.get("worst"),
        "spread": final.get("spread"),
        "scores": rules,
        "state_sha256": rounds.state.sha256(),
        "bytes": rounds.history.bytes_total(),
        "wall_seconds": round(seconds, 3),
        "server_peak_bytes": peak_bytes(),
        "clients": {client: registrations[client].samples for client in sorted(registrations)},
        "splits": {client: registrations[client].split for client in sorted(registrations)},
        "versions": package_versions(),
    }


def read_summary(folder: Path) -> dict[str, Any]:
    """``summary.json`` of a finished run.

    Raises:
        ConfigError: there is none.
    """
    path = folder / "summary.json"
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{folder} holds no finished run: {path.name} is missing") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a run's summary")
    return content
