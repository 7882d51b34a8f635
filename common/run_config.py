"""A run's ``config.yaml``: reading it without importing what it names, and which of its settings change the result.

Nothing here imports torch: tables and lists read runs without it.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.choices import imports_of, trusted
from common.errors import ConfigError
from common.regular_files import read_small
from common.text import printable

FOLDER_KEYS = ("output", "resume", "overwrite")
"""Settings of a run's folder, and of what becomes of a run that is in it."""

LOCATION_KEYS = (*FOLDER_KEYS, "data.root", "choices", "experiment", "tracker")
"""Settings, and groups of them, of a run's folders and trackers, or that repeat others."""

NOT_THE_RESULT = (
    *(*LOCATION_KEYS, "engine", "train.device", "train.capture"),
    *("rounds.deadline", "rounds.registration", "rounds.failures", "rounds.checkpoints", "rounds.memory"),
)
"""Settings, and groups of them, that do not change a run's results; ``data.root`` does if the images are one's own."""

OWN_IMAGES = ("common.data.folder.Folder", "common.data.table.Table")
"""Goldfinch's readers of the user's own images; another ``data.root`` holds others, as for a reader of one's own."""

CLASS_NAMES = "class_names"
"""Entry of ``config.yaml`` for its readers: the classes by label, which the folders had when the run began."""

MAX_CONFIG_LENGTH = 100_000
"""Characters of the longest ``config.yaml`` that is read; those of our runs have about 3,000."""

SCORING_SETTINGS = ("rounds.last_rounds", "rounds.evaluate_every", "rounds.test_samples", "rounds.test")
"""Settings that change which scores a run has, but not its state."""

NOT_THE_IDENTITY = ("data.root", "train.rounds", "train.patience", *SCORING_SETTINGS)
"""Settings that a run's identity is without: its state after a round is the same, or each device has its own."""

CHANGEABLE_ON_RESUME = ("train.rounds", "train.patience", "rounds.last_rounds")
"""Settings that change the result, with which a run may be resumed otherwise than it began.

These settings say when the run ends and how many scores are averaged, so the scores that the run has stay comparable
with those that follow. The other :data:`SCORING_SETTINGS` decide which rounds and images are scored: with other values,
one history would hold scores of both kinds. ``train.rounds`` cannot be less than the rounds that are done, and cannot
change in a run that follows a schedule over all rounds.
"""


def flat(settings: Mapping[str, Any], without: Sequence[str] = (), prefix: str = "") -> dict[str, Any]:
    """Return nested settings by ``a.b.c`` keys; lists stay values.

    Args:
        settings: nested mappings.
        without: keys of settings, and of groups of them, to leave out.
        prefix: the key of ``settings`` itself, with a dot at its end.
    """
    flattened: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if name in without:
            continue
        if isinstance(value, Mapping):
            flattened |= flat(value, without, f"{name}.")
        else:
            flattened[name] = value
    return flattened


def attack_text(raw: Mapping[str, Any]) -> str:
    """Return a run's attack and its hostile clients, such as ``sign_flip by signs-0``; empty without one."""
    node = raw.get("attack") or {}
    clients = node.get("clients", [])
    if not clients:
        return ""
    name = str(raw["choices"].get("attack") or node.get("_target_")).rpartition(".")[2]
    return f"{name} by {', '.join(map(printable, clients))}"


def identity_of(raw: Mapping[str, Any]) -> str:
    """Return 16 hex digits over the settings that change the result, without :data:`NOT_THE_IDENTITY`."""
    return _digest(result_settings(raw, NOT_THE_IDENTITY))


def configuration_of(raw: Mapping[str, Any]) -> str:
    """Return :func:`identity_of` without the seed."""
    return _digest(result_settings(raw, (*NOT_THE_IDENTITY, "seed")))


def scoring_of(raw: Mapping[str, Any]) -> str:
    """Return 16 hex digits over the settings that change which scores a run has, but not its state."""
    scoring: dict[str, Any] = {}
    for key, value in flat(raw).items():
        if key in SCORING_SETTINGS:
            scoring[key] = value
    return _digest(scoring)


def _digest(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]


def yaml_of(raw: Mapping[str, Any]) -> str:
    """Return the composed configuration as the text of a ``config.yaml``."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(raw)))


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of a run's ``config.yaml``. No class that it names is imported here.

    Raises:
        ConfigError: the file cannot be read, or is no run's configuration.
    """
    try:
        content: Any = OmegaConf.to_container(OmegaConf.create(yaml_text(path)))
    except (OSError, ValueError, RecursionError, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not _is_record(content):
        raise ConfigError(f"{path} is not a run's configuration")
    return {str(key): value for key, value in content.items() if key != CLASS_NAMES}


def read_class_names(path: Path) -> list[str]:
    """Return the classes by label that a run's ``config.yaml`` names; empty if it names none.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        content = yaml.safe_load(yaml_text(path))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    names = content.get(CLASS_NAMES) if isinstance(content, dict) else None
    if not isinstance(names, list):
        return []
    return list(map(str, names))


def check_trusted(content: Mapping[str, Any], path: Path) -> None:
    """Check that a recorded configuration names only classes that may be imported, before any of it is built.

    Args:
        content: the configuration, or some groups of it.
        path: its file, for messages.

    Raises:
        ConfigError: it names another class (:func:`common.choices.trusted`).
    """
    for where, name in imports_of(content):
        if where == "own_metric":  # its values can be read without it; class_of checks its name before an import
            continue
        if not trusted(name, where):
            shown = printable(str(name))[:200]
            key = f"{where}._target_"
            if where == "engine":
                key = "engine.device"
            raise ConfigError(
                f"{path}: {key}={shown} is not one of Goldfinch's own, and a class that only a folder names is not "
                "imported. If it is yours, use --config-dir with the folder that names it, or declare it as an entry "
                "point of its package, see docs/add-a-method.md"
            )


def yaml_text(path: Path) -> str:
    """Return the text of a YAML file that a run or a comparison has written; it may come from elsewhere.

    Raises:
        OSError: it is no regular file.
        ValueError: it is no text, too large, or has aliases.
    """
    text = read_small(path)
    if len(text) > MAX_CONFIG_LENGTH or _has_aliases(text):
        raise ValueError("it is too large, or refers to parts of itself, which Goldfinch never writes")
    return text


def sent_config(text: str) -> dict[str, Any]:
    """Return the composed configuration that ``goldfinch run`` sent as JSON to the run's other processes.

    Raises:
        ConfigError: ``text`` cannot be read, or is no run's configuration.
    """
    try:
        if len(text) > MAX_CONFIG_LENGTH:
            raise ValueError(f"it has {len(text)} characters, and at most {MAX_CONFIG_LENGTH} are read")
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the configuration that was sent with the run cannot be read: {error}") from error
    if not _is_record(content):
        raise ConfigError("what was sent with the run is not a configuration; submit it by goldfinch run")
    return {str(key): value for key, value in content.items()}


def _has_aliases(text: str) -> bool:
    """Return whether a YAML text refers to parts of itself, which can make a short text a huge object."""
    if "*" not in text:
        return False
    return any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text))


def _is_record(content: Any) -> bool:
    """Return whether ``content`` has all entries that are read from a run's configuration without further checks."""
    if not isinstance(content, dict):
        return False
    for group in ("method", "data", "protocol", "model", "train", "rounds", "choices"):
        if not isinstance(content.get(group), dict):
            return False
    for group in ("views", "aggregation", "attack", "own_metric", "privacy", "engine", "tracker"):
        if not isinstance(content.get(group), dict | None):
            return False
    hostile = (content.get("attack") or {}).get("clients", [])
    if not isinstance(hostile, list) or not all(isinstance(client, str) for client in hostile):
        return False
    for number in (content.get("seed"), content["train"].get("rounds"), content["rounds"].get("last_rounds")):
        if not isinstance(number, int):
            return False
    names = [content["method"].get("_target_"), *content["choices"]]
    names += filter(None, content["choices"].values())
    for name in names:
        if not isinstance(name, str) or printable(name) != name:
            return False
    return isinstance(content["data"].get("domains"), list | None)


def contradictions(
    raw: Mapping[str, Any], path: Path, changeable: Sequence[str] = CHANGEABLE_ON_RESUME
) -> dict[str, tuple[Any, Any]]:
    """Return the settings that have other values in a resumed run than in the rounds that are done.

    Args:
        raw: the composed configuration of the resumed run.
        path: the ``config.yaml`` of the rounds that are done.
        changeable: settings that may differ.

    Returns:
        By ``a.b.c`` keys, the value now and the value before, ``None`` for a missing one; empty without the file.
        Of a group with another option, the option alone is among them, by the group's name.
    """
    if not path.exists():
        return {}
    recorded = read_config(path)
    written: Any = OmegaConf.to_container(OmegaConf.create(yaml_of(raw)))
    before = result_settings(recorded, changeable)
    now = result_settings(written, changeable)
    differing: dict[str, tuple[Any, Any]] = {}
    for key in sorted(before | now):
        if before.get(key) == now.get(key):
            continue
        group = key.partition(".")[0]
        options = written["choices"].get(group), recorded["choices"].get(group)
        if options[0] != options[1]:
            differing[group] = options
        else:
            differing[key] = (now.get(key), before.get(key))
    return differing


def result_settings(raw: Mapping[str, Any], without: Sequence[str] = ()) -> dict[str, Any]:
    """Return every setting that changes a run's results, by ``a.b.c`` keys, without those that ``without`` names."""
    settings = flat(raw, (*NOT_THE_RESULT, *without))
    data = raw.get("data") or {}
    reader = str(data.get("_target_", ""))
    own = reader in OWN_IMAGES or not reader.startswith("common.")
    if own and "root" in data and "data.root" not in without:
        settings["data.root"] = data["root"]
    return settings
