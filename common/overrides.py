"""Overrides: ``key=value`` in Hydra's grammar, with an escape for the characters that the grammar does not know.

This module imports neither torch nor Hydra when it is loaded, for processes that start quickly.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.errors import ConfigError


def split_overrides(text: str) -> list[str]:
    """Return the overrides in one string, split as a shell splits a command.

    Raises:
        ConfigError: a quote is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"overrides {text!r}: {error}; quote values that contain spaces") from error


def quoted_override(key: str, value: object) -> str:
    """Return ``key='value'`` with the value quoted, since Hydra's grammar gives ``=``, commas and spaces a meaning."""
    text = escaped(str(value), r"\\|\$(?=u[0-9a-f]+\$)")  # also escapes what would be read as an escape
    quoted = text.replace("'", "\\'")
    return f"{key}='{quoted}'"


def written_override(key: str, value: object) -> str:
    """Return ``key=value``, or ``key=[value,...]`` of a list, quoted where Hydra needs it."""
    if isinstance(value, list):
        return f"{key}=[{','.join(written_override('', item).removeprefix('=') for item in value)}]"
    number = re.fullmatch(r"[-+]?[\d_.]+(e[-+]?\d+)?|nan|inf|null|true|false", str(value), re.IGNORECASE)
    if re.fullmatch(r"[\w./-]+(:[\w.-]+)?", str(value), re.ASCII) and not number:  # which Hydra would make of a text
        return f"{key}={value}"
    return quoted_override(key, value)


def escaped(text: str, letters: str = r"[^\x00-\x7f]") -> str:
    """Return ``text`` with some characters written as ``$u<number>$``.

    Args:
        text: any text.
        letters: a regular expression of the characters; by default those that Hydra's grammar knows in quotes only.

    >>> escaped("Zürich"), unescaped(escaped("Zürich"))
    ('Z$ufc$rich', 'Zürich')
    """
    return re.sub(letters, lambda match: f"$u{ord(match[0]):x}$", text)


def unescaped(value: Any) -> Any:
    """Return ``value``, a text or containers of texts, with the characters that :func:`escaped` replaced."""
    if isinstance(value, str):
        return re.sub(r"\$u([0-9a-f]+)\$", lambda match: chr(int(match[1], 16)), value)
    if isinstance(value, Mapping):
        return {unescaped(key): unescaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(unescaped, value))
    return value


SHORT = {name: f"train.{name}" for name in ("rounds", "epochs", "batch_size", "learning_rate", "device")}
"""Settings that are written without their group: on the command line, in Python, and for ``flwr run``.

``rounds`` is also a group, whose options are words: with a number it is the setting.
"""

TRANSFORM = "data.augmentation.transform"
"""The setting whose value is an object by its dotted name, with that object's settings below it."""


@dataclass(frozen=True)
class Override:
    """One override, read once: every function that takes overrides takes it in place of its text.

    Args:
        text: the override as the user wrote it, such as ``train.rounds=5``.
        key: the setting or group, such as ``train.rounds``.
        value: what it becomes, in plain containers; ``None`` if there are several values.
        several: whether it has several values, which only a sweep takes.
        values: the several values, each as it is written in an override.
        changes_keys: whether it adds a key or removes one (``+key=value``, ``~key``).
    """

    text: str
    key: str
    value: Any
    several: bool = False
    values: tuple[str, ...] = ()
    changes_keys: bool = False


Overrides = Sequence[str | Override]
"""Overrides as text, or read already."""


def parse_overrides(overrides: Overrides) -> list[Override]:
    """Return ``overrides`` read by Hydra's grammar; what was read before stays as it is.

    Characters that the grammar does not know are :func:`escaped` for it.

    Raises:
        ConfigError: one cannot be read.
    """
    texts = [item for item in overrides if isinstance(item, str)]
    read = iter(_read(texts))
    return [next(read) if isinstance(item, str) else item for item in overrides]


def _read(texts: Sequence[str]) -> list[Override]:
    if not texts:
        return []
    from hydra.core.override_parser.overrides_parser import OverridesParser  # which a device's thin app does not need
    from hydra.errors import HydraException

    for text in texts:
        if "=" not in text and not text.startswith("~"):
            raise ConfigError(f"{text!r} is not of the form key=value; {_meant(text)}")
        if text.endswith("=") and text.count("=") == 1:
            raise ConfigError(
                f"{text} has no value, as if a variable of the shell were unset; give one, or leave {text[:-1]} out"
            )
    overrides: list[Override] = []
    parser = OverridesParser.create()
    text = ""
    try:
        for text in texts:
            (item,) = parser.parse_overrides([escaped(text)])
            key, changes_keys = unescaped(item.key_or_group), item.is_add() or item.is_delete()
            if item.is_discrete_sweep():
                values = tuple(unescaped(value) for value in item.sweep_string_iterator())
                overrides.append(_in_full(Override(text, key, None, True, values, changes_keys)))
            elif item.is_sweep_override() or item.value() == "*":
                overrides.append(_in_full(Override(text, key, None, True, (), changes_keys)))
            else:
                overrides.append(_in_full(Override(text, key, unescaped(item.value()), changes_keys=changes_keys)))
    except (HydraException, RecursionError) as error:
        key, _, value = text.partition("=")
        example = "'data.domains=[\"A & B\",C]'"
        if not set(value) & set("[]{}()'\"\\"):
            example = f"'{key}=\"{value}\"'"
        raise ConfigError(
            f"{text:.200} cannot be read: close each bracket, and quote a value with characters other than letters, "
            f"digits, - _ . /, as in {example}"
        ) from error
    return overrides


def _in_full(item: Override) -> Override:
    """Return an override of a :data:`SHORT` setting with its whole key, and every other one as it is.

    A class that is the value of a setting gets the key of its name.
    """
    if item.key == TRANSFORM and isinstance(item.value, str):
        key = f"{TRANSFORM}._target_"
        return replace(item, text=key + item.text.removeprefix(TRANSFORM), key=key)
    if item.key not in SHORT or item.changes_keys:
        return item
    if item.key == "rounds" and not _is_numbers(item):
        return item
    key = SHORT[item.key]
    return replace(item, text=key + item.text.removeprefix(item.key), key=key)


def _is_numbers(item: Override) -> bool:
    if item.values:
        return all(value.isdigit() for value in item.values)
    return isinstance(item.value, int | float) and not isinstance(item.value, bool)


def _meant(word: str) -> str:
    """Return what to write instead of a word that is no setting: the choice of this name, or where settings are."""
    from common.choices import CONF, choices_of  # reads YAML, which a process that starts quickly does without

    groups = sorted(path.name for path in CONF.iterdir() if path.is_dir())
    written: list[str] = []
    for group in groups:
        written += [f"{group}={choice}" for choice in choices_of(group) if choice.lower() == word.lower()]
    if written:
        return f"did you mean {' or '.join(written)}?"
    return "goldfinch list shows the settings"


# ---- Flower's run configuration (flwr run --run-config) -------------------------------------------------------------

CONFIGURATION = "configuration"
"""The key under which ``goldfinch run`` sends the composed configuration as JSON; the other keys are then not read."""

RUN_CONFIG = ("method", "data", "protocol", "rounds", "epochs", "learning-rate", "seed", "output")
"""Keys of ``[tool.flwr.app.config]``, settings with ``-`` for ``_``; an empty text there leaves one unchanged."""


def overrides_in(run_config: Mapping[str, object]) -> str:
    """Return the overrides of a run configuration as one shell-quoted text.

    The overrides of the plain keys come first, then ``overrides``, which wins.

    >>> overrides_in({"method": "fpl", "rounds": 5, "seed": "", "overrides": "train.epochs=2"})
    'method=fpl rounds=5 train.epochs=2'
    """
    parts: list[str] = []
    for name in RUN_CONFIG:
        key, value = name.replace("-", "_"), run_config.get(name, "")
        if value == "":
            continue
        if key == "output":
            parts.append(shlex.quote(quoted_override(key, value)))
        else:
            parts.append(shlex.quote(f"{key}={value}"))
    parts.append(str(run_config.get("overrides", "")))
    return " ".join(parts).strip()
