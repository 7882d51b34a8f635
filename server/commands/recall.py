"""A run's own configuration as the words that make it again, on every engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from common.config import quoted_override
from common.errors import ConfigError


def overrides_of(folder: Path) -> list[str]:
    """The overrides that compose the configuration in ``folder/config.yaml``.

    Raises:
        ConfigError: there is none.
    """
    try:
        raw: Any = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
        choices = raw.pop("choices")
    except (OSError, KeyError, AttributeError) as error:
        raise ConfigError(f"{folder} holds no run: config.yaml is missing or not a run's") from error
    words = [f"{group}={choice}" for group, choice in choices.items() if choice is not None]
    for key, value in raw.items():
        if key == "experiment":  # its settings are among the others
            continue
        leaves = value if isinstance(value, Mapping) else {}
        words += [_word(f"{key}.{name}", leaf) for name, leaf in leaves.items()] or [_word(key, value)]
    return [*words, quoted_override("output", folder.absolute())]


def _word(key: str, value: Any) -> str:
    return quoted_override(key, value) if isinstance(value, str) else f"{key}={_literal(value)}"


def _literal(value: Any) -> str:
    """``value`` in Hydra's grammar."""
    if isinstance(value, str):
        return quoted_override("", value)[1:]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_literal(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_literal, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)
