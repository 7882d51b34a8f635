"""Flower's run configuration (``flwr run --run-config``) as overrides; small, for a process that imports no torch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from common.overrides import quoted_override

KEYS = {
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
    plain = {key: run_config[name] for name, key in KEYS.items() if run_config.get(name, "") != ""}
    words = [quoted_override(key, value) if key == "output" else f"{key}={value}" for key, value in plain.items()]
    return " ".join([*map(shlex.quote, words), str(run_config.get("overrides", ""))]).strip()
