"""Overrides: ``key=value`` in Hydra's grammar, with an escape for the characters that the grammar does not know.

This module imports neither torch nor Hydra when it is loaded, for processes that start quickly.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


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
    return re.sub(letters, lambda found: f"$u{ord(found[0]):x}$", text)


def unescaped(value: Any) -> Any:
    """Return ``value``, a text or containers of texts, with the characters that :func:`escaped` replaced."""
    if isinstance(value, str):
        return re.sub(r"\$u([0-9a-f]+)\$", lambda found: chr(int(found[1], 16)), value)
    if isinstance(value, Mapping):
        return {unescaped(key): unescaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(unescaped, value))
    return value


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Return Hydra's parse of ``overrides``. Characters that its grammar does not know are :func:`escaped` in it.

    Raises:
        ConfigError: one cannot be read.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser  # which a device's thin app does not need
    from hydra.errors import HydraException

    for item in overrides:
        if "=" not in item and not item.startswith("~"):
            raise ConfigError(f"{item!r} is not of the form key=value; {_meant(item)}")
    try:
        return OverridesParser.create().parse_overrides(list(map(escaped, overrides)))
    except (HydraException, RecursionError) as error:
        advice = "quote a value with characters other than letters, digits, - _ . /: 'data.domains=[\"A & B\",C]'"
        raise ConfigError(f"an override cannot be read: {unescaped(str(error))}\n{advice}") from error


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

RUN_CONFIG = {
    "method": "method",
    "data": "data",
    "protocol": "protocol",
    "rounds": "train.rounds",
    "epochs": "train.epochs",
    "learning-rate": "train.learning_rate",
    "seed": "seed",
    "output": "output",
}
"""Settings by their keys in ``[tool.flwr.app.config]``; an empty text there leaves the setting unchanged."""


def overrides_in(run_config: Mapping[str, object]) -> str:
    """Return the overrides of a run configuration as one shell-quoted text.

    Those of the plain keys come first, then ``overrides``, which wins.

    >>> overrides_in({"method": "fpl", "rounds": 5, "seed": "", "overrides": "train.epochs=2"})
    'method=fpl train.rounds=5 train.epochs=2'
    """
    parts: list[str] = []
    for name, key in RUN_CONFIG.items():
        value = run_config.get(name, "")
        if value == "":
            continue
        if key == "output":
            parts.append(shlex.quote(quoted_override(key, value)))
        else:
            parts.append(shlex.quote(f"{key}={value}"))
    parts.append(str(run_config.get("overrides", "")))
    return " ".join(parts).strip()
