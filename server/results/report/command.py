"""The command that makes a run again, from the configuration it left."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from common.config import compose_config, quoted_override
from common.errors import GoldfinchError
from common.settings import flat

PLACES = ("output", "resume", "overwrite", "data.root", "choices.", "report.")


def repeat_command(config: Mapping[str, Any]) -> str:
    """``goldfinch run ...`` with only what differs from the defaults; folders of the machine are left out."""
    choices = {key: value for key, value in config.get("choices", {}).items() if key not in ("experiment", "report")}
    try:
        defaults = compose_config([])
    except GoldfinchError:
        defaults = {"choices": {}}
    groups = [
        f"{key}={value}"
        for key, value in choices.items()
        if key in ("method", "data") or defaults["choices"].get(key) != value
    ]
    base: dict[str, Any] | None = None
    while base is None:
        try:
            base = flat(compose_config(groups))
        except GoldfinchError:  # an option of another version's conf/
            if not groups:
                return "goldfinch run"
            groups.pop()
    values = [
        _override(key, value)
        for key, value in flat(config).items()
        if key in base and base[key] != value and not key.startswith(PLACES) and not key.endswith("_target_")
    ]
    return " ".join(["goldfinch run", *(shlex.quote(item) for item in [*sorted(groups), *values])])


def _override(key: str, value: Any) -> str:
    if isinstance(value, str):
        plain = value.replace("_", "").replace("-", "").isalnum() and not value.isdigit()
        return f"{key}={value}" if plain and value not in ("null", "true", "false") else quoted_override(key, value)
    return f"{key}={_literal(value)}"


def _literal(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(_literal(item) for item in value)}]"
    return str(value)
