"""Overrides as words: ``key=value`` in Hydra's grammar, and what is done about the letters that it does not know.

For a process that imports no torch.
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
    """The overrides in one string, split as a shell splits words."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"overrides {text!r}: {error}; quote values that contain spaces") from error


def quoted_override(key: str, value: object) -> str:
    """``key='value'`` with the value quoted for Hydra's grammar, which reads ``=``, commas and spaces otherwise."""
    text = escaped(str(value), r"\\|\$(?=u[0-9a-f]+\$)")  # what looks like an escape is none
    return "{}='{}'".format(key, text.replace("'", "\\'"))


def escaped(text: str, letters: str = r"[^\x00-\x7f]") -> str:
    """``text`` with ``letters``, by default those that Hydra's grammar knows in quotes only, as ``$u<number>$``.

    >>> escaped("Zürich"), restored(escaped("Zürich"))
    ('Z$ufc$rich', 'Zürich')
    """
    return re.sub(letters, lambda found: f"$u{ord(found[0]):x}$", text)


def restored(value: Any) -> Any:
    """``value``, a text or containers of them, with the letters that :func:`escaped` wrote otherwise."""
    if isinstance(value, str):
        return re.sub(r"\$u([0-9a-f]+)\$", lambda found: chr(int(found[1], 16)), value)
    if isinstance(value, Mapping):
        return {restored(key): restored(item) for key, item in value.items()}
    return [restored(item) for item in value] if isinstance(value, list) else value


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Hydra's reading of ``overrides``, in which letters that its grammar does not know are :func:`escaped`.

    Raises:
        ConfigError: one cannot be read.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser  # which a device's thin app does not need
    from hydra.errors import HydraException

    for item in overrides:
        if "=" not in item and not item.startswith("~"):
            raise ConfigError(f"override {item!r} is not of the form key=value")
    try:
        return OverridesParser.create().parse_overrides([escaped(item) for item in overrides])
    except (HydraException, RecursionError) as error:
        advice = "a value with other signs than letters, digits, - _ . / is quoted: 'data.domains=[\"A & B\",C]'"
        raise ConfigError(f"an override cannot be read: {restored(str(error))}\n{advice}") from error


# ---- Flower's run configuration (flwr run --run-config) -------------------------------------------------------------

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
"""Settings with a key of their own in ``[tool.flwr.app.config]``; an empty text there leaves the setting as it is."""


def overrides_in(run_config: Mapping[str, object]) -> str:
    """The overrides, as a shell would write them: those of the plain keys, then ``overrides``, which wins.

    >>> overrides_in({"method": "fpl", "rounds": 5, "seed": "", "overrides": "train.epochs=2"})
    'method=fpl train.rounds=5 train.epochs=2'
    """
    plain = {key: run_config[name] for name, key in RUN_CONFIG.items() if run_config.get(name, "") != ""}
    words = [quoted_override(key, value) if key == "output" else f"{key}={value}" for key, value in plain.items()]
    return " ".join([*map(shlex.quote, words), str(run_config.get("overrides", ""))]).strip()
