"""Commands that repeat or export a run, from its recorded configuration."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.choices import folder_options
from common.composition import compose_config
from common.errors import GoldfinchError
from common.overrides import escaped, quoted_override
from common.run_config import LOCATION_KEYS, flat
from common.text import shell_line
from goldfinch.record import RunRecord

_NO_NAME = r"^\d|[^\w-]"
"""What cannot be part of a key in Hydra's grammar without an escape."""


def repeat_command(config: Mapping[str, Any]) -> str:
    """Return ``goldfinch run ...`` with the settings that differ from the defaults, without folders of this machine."""
    choices: dict[str, Any] = {}
    own: list[str] = []
    for group, choice in config.get("choices", {}).items():
        if group not in ("experiment", "tracker"):
            choices[group] = choice
            if "." in str(choice):  # a class that no file of conf/ describes
                own.append(group)
    try:
        defaults = compose_config([])["choices"]
    except GoldfinchError:
        defaults = {}
    groups: list[str] = []
    for group, choice in choices.items():
        if group in ("method", "data") or defaults.get(group) != choice:
            groups.append(f"{group}={choice}")
    base: dict[str, Any] | None = None
    while base is None:
        try:
            base = flat(compose_config(groups, own=()))
        except GoldfinchError:  # an option of another version's conf/
            if not groups:
                return "goldfinch run"
            groups.pop()
    values: list[str] = []
    for key, value in flat(config, LOCATION_KEYS).items():
        known = key in base or key.partition(".")[0] in own
        if known and base.get(key) != value and not key.endswith("_target_"):
            values.append(override(key, value))
    return shell_line(["goldfinch", "run", *sorted(groups), *values])


def export_command(run: RunRecord) -> str:
    """Return ``goldfinch export ...`` for the run's model, or for the model of its first client."""
    arguments = ["goldfinch", "export", str(run.folder), "--to", str(Path("models", run.facts.method))]
    client = own_model_of(run)
    if client:
        arguments += ["--client", client]
    return shell_line([*arguments, *folder_options()])


def own_model_of(run: RunRecord) -> str | None:
    """Return the first client that keeps a model of its own in the run's folder; ``None`` without one."""
    if run.personal and (run.folder / "clients").is_dir():
        return next(iter(run.registrations), None)
    return None


def override(key: str, value: Any) -> str:
    """Return ``key=value`` in Hydra's grammar; ``value`` may hold mappings and lists."""
    if not isinstance(value, str):
        return f"{key}={_literal(value)}"
    letters = value.replace("_", "").replace("-", "")
    if letters.isalnum() and not value.isdigit() and value not in ("null", "true", "false"):
        return f"{key}={value}"
    return quoted_override(key, value)


def _literal(value: Any) -> str:
    """Return ``value`` in Hydra's grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return quoted_override("", value)[1:]
    if isinstance(value, Mapping):
        items = [f"{escaped(name, _NO_NAME)}:{_literal(item)}" for name, item in value.items()]
        return "{" + ",".join(items) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_literal, value)) + "]"
    return repr(value)
