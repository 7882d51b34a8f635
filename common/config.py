"""From Hydra's composed configuration to checked, frozen dataclasses; every mistake names the nearest valid choice."""

from __future__ import annotations

import dataclasses
import importlib
import math
import shlex
import threading
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.errors import ConfigError, nearest

_HYDRA = threading.Lock()
"""Hydra keeps what it was initialised with in one global object."""

CONF = Path(__file__).resolve().parent.parent / "conf"


def split_overrides(text: str) -> list[str]:
    """The overrides in one string, split as a shell splits words."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"overrides {text!r}: {error}; quote values that contain spaces") from error


def quoted_override(key: str, value: object) -> str:
    """``key='value'`` with the value quoted for Hydra's grammar, which reads ``=``, commas and spaces otherwise."""
    text = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"{key}='{text}'"


def compose_config(overrides: Sequence[str], conf: Path = CONF) -> dict[str, Any]:
    """Hydra's composition of ``conf/config.yaml`` with ``overrides``, as plain containers.

    ``choices`` holds the name of the option that was chosen in each group.

    Raises:
        ConfigError: an override cannot be parsed, or names a group, option or key that does not exist.
    """
    parsed = _parse(overrides)
    with _HYDRA, initialize_config_dir(config_dir=str(conf), version_base="1.3"):
        groups = [item for item in parsed if _check_group(item, conf)]
        try:
            base = OmegaConf.to_container(compose("config", [str(item.input_line) for item in groups]))
            for item in parsed:
                if item not in groups:
                    _check_key(item, typing.cast("dict[str, Any]", base))
            composed = compose("config", list(overrides), return_hydra_config=True)
            choices = {str(group): str(name) for group, name in composed.hydra.runtime.choices.items()}
            OmegaConf.set_struct(composed, False)
            composed.pop("hydra")
            plain = typing.cast("dict[str, Any]", OmegaConf.to_container(composed, resolve=True))
            return {**plain, "choices": {group: name for group, name in choices.items() if group in plain}}
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(str(error).strip()) from error


def _parse(overrides: Sequence[str]) -> list[Override]:
    for item in overrides:
        if "=" not in item and not item.startswith("~"):
            raise ConfigError(f"override {item!r} is not of the form key=value")
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(f"an override cannot be read: {error}") from error
    several = next((item.input_line for item in parsed if item.is_sweep_override() or item.value() == "*"), None)
    if several:
        raise ConfigError(f"{several}: a run has one value of each setting; use sweep: goldfinch sweep {several}")
    return parsed


def _check_group(item: Override, conf: Path) -> bool:
    """Whether ``item`` chooses an option of a config group; an unknown option is an error."""
    group = conf / item.key_or_group
    if "." in item.key_or_group or not group.is_dir():
        return False
    options = [path.stem for path in group.glob("*.yaml")]
    chosen = item.value()
    for choice in chosen if isinstance(chosen, list) else [chosen]:
        if choice is None and item.key_or_group != "experiment":
            raise ConfigError(f"{item.key_or_group}=null: one must be chosen; {nearest('', options)}")
        if choice is not None and str(choice) not in options:
            raise ConfigError(f"{item.key_or_group}={choice}: no such choice; {nearest(str(choice), options)}")
    return True


def _check_key(item: Override, base: dict[str, Any]) -> None:
    if item.is_add() or item.is_delete():
        raise ConfigError(f"{item.input_line}: keys cannot be added or removed; set an existing key with key=value")
    node: Any = base
    walked: list[str] = []
    for part in item.key_or_group.split("."):
        if not isinstance(node, Mapping) or part not in node:
            where = ".".join(walked)
            choices = [str(key) for key in node if not str(key).startswith("_")] if isinstance(node, Mapping) else []
            full = ".".join([*walked, part])
            raise ConfigError(f"{full}: no such key{f' in {where}' if where else ''}; {nearest(part, choices)}")
        walked.append(part)
        node = node[part]


def build(node: Mapping[str, Any], where: str, target: type | None = None) -> Any:
    """The dataclass that ``node`` describes, with every field's type and range checked.

    Args:
        node: keys are field names; ``_target_`` names the class as ``module.Class`` unless ``target`` is given.
        where: the key of ``node`` in the configuration, for messages.
        target: the dataclass to build.

    Raises:
        ConfigError: unknown key, wrong type, or a value the class refuses (its ``ValueError``).
    """
    if target is None:
        target = _import(node.get("_target_"), where)
    hints = typing.get_type_hints(target)
    fields = {field.name: field for field in dataclasses.fields(target) if field.init}
    values: dict[str, Any] = {}
    for key, value in node.items():
        if key == "_target_":
            continue
        if key not in fields:
            raise ConfigError(f"{where}.{key}: no such key; {nearest(str(key), fields)}")
        values[key] = coerce(value, hints[key], f"{where}.{key}")
    try:
        return target(**values)
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _import(path: object, where: str) -> type:
    if not isinstance(path, str) or "." not in path:
        raise ConfigError(f"{where}: _target_ must be written module.Class; got {path!r}")
    module_name, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{where}: cannot import {path}: {error}") from error
    if not dataclasses.is_dataclass(found):
        raise ConfigError(f"{where}: {path} is not a dataclass")
    return typing.cast("type", found)


def coerce(value: Any, hint: Any, where: str) -> Any:
    """``value`` as ``hint`` says, without losing anything (1 is a float, 1.5 is no int, "yes" is no bool).

    Raises:
        ConfigError: the value is of another type.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        for option in arguments:
            try:
                return coerce(value, option, where)
            except ConfigError:
                continue
        raise ConfigError(f"{where}={value!r}: expected {_name(hint)}")
    if origin is Literal:
        if value in arguments:
            return value
        raise ConfigError(f"{where}={value!r}: {nearest(str(value), map(str, arguments))}")
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis and isinstance(value, list | tuple):
        return tuple(coerce(item, arguments[0], f"{where}[{index}]") for index, item in enumerate(value))
    if origin in (dict, Mapping):
        if isinstance(value, Mapping):
            return {str(key): coerce(item, arguments[1], f"{where}.{key}") for key, item in value.items()}
    elif isinstance(hint, type):
        if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
            return build(value, where, None if "_target_" in value else hint)
        if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
            if not math.isfinite(value):
                raise ConfigError(f"{where}={value!r}: a number must be finite")
            return float(value)
        if hint is Path and isinstance(value, str):
            return Path(value)
        if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
            return value
    raise ConfigError(f"{where}={value!r}: expected {_name(hint)}, got {type(value).__name__}")


def _name(hint: Any) -> str:
    if isinstance(hint, type) and typing.get_origin(hint) is None:
        return hint.__name__
    return str(hint).replace("typing.", "")


def check(condition: bool, message: str) -> None:
    """Raise ``ValueError(message)`` unless ``condition``; for range checks in ``__post_init__``."""
    if not condition:
        raise ValueError(message)
