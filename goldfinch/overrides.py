"""Turn keyword arguments into the overrides of ``goldfinch run``."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import ConfigError, nearest
from common.overrides import Override, quoted_override
from common.run_config import FOLDER_KEYS

KEPT = ["method", "data", "protocol", "model", "engine", "aggregation", "privacy", "views", "experiment", "tracker"]
KEPT += ["attack", "own_metric", "tuned", "seed", *FOLDER_KEYS]
TRAIN = ["rounds", "epochs", "batch_size", "learning_rate", "device"]
SETTINGS = dict(zip(KEPT, KEPT, strict=True)) | {name: f"train.{name}" for name in TRAIN}
"""Keyword arguments, and the settings of ``conf/`` that they stand for."""

WORD = re.compile(r"[A-Za-z_][\w.-]*")
OTHER_WORDS = frozenset({"true", "false", "null", "nan", "inf"})
"""Words that Hydra does not read as strings."""


def overrides_of(settings: Mapping[str, Any] | None, keywords: Mapping[str, Any], *, sweep: bool = False) -> list[str]:
    """Return one override for each keyword argument that is not ``None``, and for each entry of ``settings``.

    Args:
        settings: values by the key that ``goldfinch run`` takes, such as ``{"method.temperature": 0.05}``.
        keywords: values by the names of :data:`SETTINGS`.
        sweep: whether a list or range means one run for each of its values; otherwise it is one value.

    Raises:
        ConfigError: a keyword is unknown; the message names the nearest one.
    """
    values: dict[str, Any] = {}
    for name, value in keywords.items():
        if name not in SETTINGS:
            remedy = nearest(name, list(SETTINGS))
            raise ConfigError(f"unknown argument {name!r}: {remedy}; other settings go into settings={{'key': value}}")
        if value is not None:
            values[SETTINGS[name]] = value
    values.update(settings or {})
    overrides: list[str] = []
    for key, value in values.items():
        if sweep and isinstance(value, Sequence) and not isinstance(value, str):
            overrides.append(f"{key}={','.join(map(_literal, value))}")
        else:
            overrides.append(f"{key}={_literal(value)}")
    return overrides


def _literal(value: Any) -> str:
    """Return a value in the grammar of Hydra's overrides; a string is quoted if Hydra could read it as another type."""
    if isinstance(value, str) and WORD.fullmatch(value) and value.lower() not in OTHER_WORDS:
        return value
    if isinstance(value, type):
        return _dotted_name(value)
    if isinstance(value, str | Path):
        return quoted_override("", value).removeprefix("=")
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, Sequence):
        return f"[{','.join(map(_literal, value))}]"
    return str(value)


def _dotted_name(target: type) -> str:
    """Return the name by which a class is imported.

    Raises:
        ConfigError: it is defined inside a function, so that no name finds it.
    """
    if "<locals>" in target.__qualname__:
        raise ConfigError(
            f"{target.__qualname__} is defined inside a function, and is found by no name: define it at the top of a "
            "module or of a notebook's cell"
        )
    return f"{target.__module__}.{target.__qualname__}"


def check_reachable(overrides: Sequence[Override], engine: str) -> None:
    """Check that a run's other processes can import the classes that overrides name.

    Args:
        overrides: the run's.
        engine: the run's engine.

    Raises:
        ConfigError: a class of a notebook or of the program itself, which only this process has, and an engine with
            other processes.
    """
    for item in overrides:
        name = str(item.value)
        if name.startswith("__main__.") and engine != "inline":
            raise ConfigError(
                f"{item.key}: {name.removeprefix('__main__.')} is defined in the notebook or program that calls, and "
                f"the processes of engine={engine} cannot import it: put it into a module of an installed package, or "
                "take engine=inline"
            )
