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
    """Return ``goldfinch run ...`` with the settings that differ from the defaults, without folders of this machine.

    The method and the data set are always named. A choice that this machine does not have stays in the command, with
    all settings of its group: the command repeats the run where the choice is known, and fails elsewhere.
    """
    choices: dict[str, Any] = {}
    for group, choice in config.get("choices", {}).items():
        if group not in ("experiment", "tracker"):
            choices[group] = choice
    defaults = compose_config([])["choices"]
    groups: list[str] = []
    known: list[str] = []
    for group, choice in choices.items():
        if group in ("method", "data") or defaults.get(group) != choice:
            groups.append(f"{group}={choice}")
            if _composes(groups[-1]):
                known.append(groups[-1])
    base = flat(compose_config(known, own=()))
    places = {key.partition(".")[0] for key in base}  # a record has more, such as the names of the classes
    for item in groups:
        if item not in known:
            base = _without(base, item.partition("=")[0])
    values: list[str] = []
    for key, value in flat(config, LOCATION_KEYS).items():
        differs = key not in base or base[key] != value
        if differs and key.partition(".")[0] in places and not key.endswith("_target_"):
            values.append(override(key, value))
    return shell_line(["goldfinch", "run", *sorted(groups), *values, *folder_options()])


def _composes(item: str) -> bool:
    """Return whether this machine has a choice, such as ``method=fpl``."""
    try:
        compose_config([item], own=())
    except GoldfinchError:
        return False
    return True


def _without(settings: Mapping[str, Any], group: str) -> dict[str, Any]:
    """Return flat settings without those of a group."""
    return {key: value for key, value in settings.items() if not key.startswith(f"{group}.")}


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
