"""The words that make a run again, from the configuration it left."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.choices import choices_of
from common.config import compose_config
from common.errors import ConfigError, GoldfinchError
from common.overrides import escaped, quoted_override
from common.settings import LOCATION_KEYS, flat
from server.results.run import Run

_NO_NAME = r"^\d|[^\w-]"
"""What in a key is no part of a name, and cannot be quoted in Hydra's grammar."""

LONGEST = 20_000
"""Characters of a setting in words: Hydra's parser takes seconds for more."""


def repeat_command(config: Mapping[str, Any]) -> str:
    """``goldfinch run ...`` with only what differs from the defaults; folders of the machine are left out."""
    choices = {key: value for key, value in config.get("choices", {}).items() if key not in ("experiment", "tracker")}
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
            base = flat(compose_config(groups, own=()))
        except GoldfinchError:  # an option of another version's conf/
            if not groups:
                return "goldfinch run"
            groups.pop()
    own = [group for group, choice in choices.items() if "." in str(choice)]  # a class that no file describes
    values = [
        _override(key, value)
        for key, value in flat(config, LOCATION_KEYS).items()
        if (key in base or key.partition(".")[0] in own) and base.get(key) != value and not key.endswith("_target_")
    ]
    return " ".join(["goldfinch run", *(shlex.quote(item) for item in [*sorted(groups), *values])])


def export_command(run: Run) -> str:
    """``goldfinch export ...`` for the run's model, or for its first client's own."""
    words = ["goldfinch", "export", str(run.folder), "--to", str(Path("models", str(run.summary["method"])))]
    return shlex.join([*words, *(["--client", client] if (client := own_model_of(run)) else [])])


def own_model_of(run: Run) -> str | None:
    """The first client that keeps a model of its own in the run's folder."""
    return next(iter(run.registrations), None) if run.personal and (run.folder / "clients").is_dir() else None


def overrides_of(run: Run) -> list[str]:
    """The overrides that compose the whole configuration of ``run`` again, on every engine, into the same folder.

    Raises:
        ConfigError: the folder holds no run, or one with a setting that is too long.
    """
    classes = {group: node.get("_target_") for group, node in run.config.items() if isinstance(node, Mapping)}
    words = [
        f"{group}={choice if choice in choices_of(group) else classes.get(group) or choice}"
        for group, choice in run.config.get("choices", {}).items()
        if choice is not None and group != "tuned"
    ]
    for key, value in run.config.items():
        if key in ("choices", "experiment"):  # an experiment's settings are among the others
            continue
        leaves = value if isinstance(value, Mapping) else {}
        if long := [name for name, leaf in (leaves or {key: value}).items() if len(repr(leaf)) > LONGEST]:
            raise ConfigError(
                f"{run.config_file}: {key}.{long[0]} is too long to be said again; go on with the words "
                "that the run was started with: goldfinch run ... resume=true"
            )
        words += [_override(f"{key}.{name}", leaf) for name, leaf in leaves.items()] or [_override(key, value)]
    return [*words, quoted_override("output", run.folder.absolute())]


def _override(key: str, value: Any) -> str:
    if isinstance(value, str):
        plain = value.replace("_", "").replace("-", "").isalnum() and not value.isdigit()
        return f"{key}={value}" if plain and value not in ("null", "true", "false") else quoted_override(key, value)
    return f"{key}={_literal(value)}"


def _literal(value: Any) -> str:
    """``value`` in Hydra's grammar."""
    if isinstance(value, str):
        return quoted_override("", value)[1:]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{escaped(name, _NO_NAME)}:{_literal(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_literal, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
