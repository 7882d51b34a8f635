"""Composes a configuration with Hydra, and checks the keys of its overrides; errors name the nearest valid choice."""

import difflib
import threading
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common import overlays
from common.choices import ALLOWED, CONF, FOLDERS, choices_of, imports_of, trust
from common.config import with_defaults
from common.errors import ConfigError, UnknownKeyError, nearest
from common.overlays import Overlay
from common.overrides import parse_overrides, quoted_override, unescaped
from common.round_settings import RoundSettings, TrainSettings
from common.versions import OURS

CLASSES: Mapping[str, type] = {"train": TrainSettings, "rounds": RoundSettings}
"""The classes of the groups whose files name none."""

GROUPS_OF_CLASSES = frozenset(ALLOWED) - {"engine"}
"""The groups of which a class can be chosen by its dotted name. Of an engine its device is."""

_HYDRA = threading.Lock()
"""Hydra keeps its initialisation in one global object, so one thread composes at a time."""

SIMILAR = 0.8
"""Smallest similarity of an unknown key to the last part of a setting at which it is suggested, from 0 to 1."""


def compose_config(overrides: Sequence[str], own: Sequence[str] | None = None) -> dict[str, Any]:
    """Return Hydra's composition of ``conf/config.yaml`` with ``overrides``, as plain containers.

    The key ``choices`` holds the name of the option that was chosen in each group.
    ``method._target_=package.module.Class``, or shorter ``method=package.module.Class``, chooses a class that no file
    describes: its settings are its own defaults and those that are given.

    Args:
        overrides: ``key=value`` each.
        own: the overrides that the user gave, by default all. The classes that they name may be imported
            (:func:`trust`).

    Raises:
        ConfigError: an override cannot be parsed, or names a group, option or key that does not exist.
    """
    parsed = _parse(overrides)
    if own is None:
        own = overrides
    trust_overrides(own)  # not a class that a tuned file names, which the user may not have written
    classes: list[Override] = []
    options: dict[str, Override] = {}
    settings: list[Override] = []
    for item in parsed:
        if item.key_or_group in overlays.GROUPS:
            continue
        if item.key_or_group.endswith("._target_"):
            classes.append(item)
        elif _names_class(item):
            _store_class(item)
            options[item.key_or_group] = item
        elif _check_group(item):
            options[item.key_or_group] = item
        else:
            settings.append(item)
    overlay = _overlay_in(parsed, options)
    try:
        base = _composed(_lines(options, overlay), tuple(FOLDERS))
        _check_has_no_other_group(base)
        named = {item.key_or_group.removesuffix("._target_"): item for item in classes}
        replaced: dict[str, str] = {}
        for key, item in named.items():
            if _target_at(key, item, base) != item.value():
                replaced[key] = str(item.value())
        # The keys of a user's class are not known here: build() checks them against the class.
        of_classes = [group for group, item in options.items() if _names_class(item)]
        unlisted = tuple(f"{key}." for key in [*replaced, *of_classes, *base.groups_of_own_classes])
        for item in settings:
            if not item.key_or_group.startswith(unlisted):
                _check_key(item, base)
        composed = OmegaConf.create(dict(base), flags={"struct": True})
        for key, name in replaced.items():
            OmegaConf.update(composed, key, {"_target_": name}, merge=False)
        for item in settings:
            added = item.key_or_group.startswith(unlisted)
            anew = isinstance(item.value(), dict) and _is_dictionary(item.key_or_group, composed)
            OmegaConf.update(composed, item.key_or_group, item.value(), merge=not anew, force_add=added or anew)
        plain = typing.cast("dict[str, Any]", OmegaConf.to_container(composed, resolve=True))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(str(error).strip()) from error
    chosen: dict[str, str] = {}
    for group, name in base.choices.items():
        if group in plain:
            chosen[group] = replaced.get(group, name)
    if overlay is not None:
        overlays.check_choices(overlay, chosen)
    return {**plain, "choices": chosen}


def changed_config(config: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a composed configuration with further overrides, such as a run's that is resumed.

    A group of which an override chooses another option is composed from ``conf/``; all other settings stay as they are
    in ``config``. Settings that ``config`` does not have, as of an earlier version, are the defaults of ``conf/``.

    Args:
        config: the composed configuration.
        overrides: ``key=value`` each, the user's own.

    Raises:
        ConfigError: an override cannot be parsed, or names a group, option or key that does not exist.
    """
    groups: list[str] = []
    for group, choice in config["choices"].items():
        if choice is None or group in overlays.GROUPS:
            continue
        node = config.get(group)
        if choice not in choices_of(group) and isinstance(node, Mapping) and node.get("_target_"):
            choice = node["_target_"]  # a class that no file of conf/ describes
        groups.append(f"{group}={choice}")
    fresh = compose_config([*groups, *overrides], own=overrides)
    changed: dict[str, Any] = {}
    for key, value in fresh.items():
        before = config.get(key, value)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            before = {**value, **before}
        changed[key] = before
    recorded = OmegaConf.create(dict(config))
    parsed = _parse([*groups, *overrides])
    chosen = {item.key_or_group: item for item in parsed}
    overlay = _overlay_in(parsed, {group: chosen[group] for group in ("method", "data")})
    if overlay is not None:
        for key in overlay.values:
            _take(changed, fresh, key)
    for item in parsed:
        if item.key_or_group in overlays.GROUPS:
            continue
        key = item.key_or_group.removesuffix("._target_")
        same_class = _names_class(item) and OmegaConf.select(recorded, f"{key}._target_") == item.value()
        if not same_class and str(item.input_line) not in groups:
            _take(changed, fresh, key)
    return changed


def _overlay_in(parsed: Sequence[Override], options: Mapping[str, Override]) -> Overlay | None:
    """Return the overlay that the overrides ``printed=`` and ``tuned=`` choose; ``None`` if they choose none.

    Args:
        parsed: all overrides of a run.
        options: those that choose an option, by group. With ``printed=true`` the method and the data set decide.

    Raises:
        ConfigError: both choose an overlay, or there is none of this name, or none for the method and the data set.
    """
    chosen = dict.fromkeys(overlays.GROUPS, overlays.NONE)
    for item in parsed:
        if item.key_or_group in chosen:
            chosen[item.key_or_group] = overlays.option_of(item.key_or_group, item.value())
    groups = [group for group, name in chosen.items() if name != overlays.NONE]
    if not groups:
        return None
    if len(groups) > 1:
        raise ConfigError("printed= and tuned= both choose the method's settings: leave one out")
    name = chosen[groups[0]]
    if name == overlays.FITTING:
        choices = _composed(_lines(options, None), tuple(FOLDERS)).choices
        overlay = overlays.fitting_overlay(choices["method"], choices["data"])
    else:
        overlay = overlays.find_overlay(groups[0], name)
    if overlay.method not in choices_of("method"):
        own = options.get("method")
        if own is None or own.value() != overlay.method:
            raise ConfigError(
                f"{groups[0]}={name}: {overlay.method} is not one of Goldfinch's own methods, and imported only if you "
                f"name it: method={overlay.method}"
            )
    return overlay


def _lines(options: Mapping[str, Override], overlay: Overlay | None) -> tuple[str, ...]:
    """Return the overrides that Hydra composes."""
    lines = [str(item.input_line) for item in options.values()]
    if overlay is not None:
        lines.append(quoted_override(overlay.group, overlay.option))
    return tuple(lines)


def _store_class(item: Override) -> None:
    """Make the class that ``item`` names an option of Hydra's, without settings, as no file describes it.

    Raises:
        ConfigError: no class can be chosen for the group.
    """
    group, name = item.key_or_group, str(item.value())
    if group not in GROUPS_OF_CLASSES:
        _check_group(item)
    ConfigStore.instance().store(name, {"_target_": name}, group=group)


def _check_has_no_other_group(base: "_Composed") -> None:
    """Refuse a key that no file of ``conf/`` has at the top, such as of an experiment in a folder of the user's own.

    Raises:
        ConfigError: there is one; the message names the nearest.
    """
    known = _composed((), tuple(FOLDERS))
    for key in base:
        if key not in known:
            raise UnknownKeyError(_no_such_key(str(key), known, ""))


def _take(changed: dict[str, Any], fresh: Mapping[str, Any], key: str) -> None:
    """Set the value, or the whole group, at ``key`` of ``changed`` to that of ``fresh``."""
    *parents, last = key.split(".")
    for part in parents:
        changed[part] = dict(changed[part])
        changed, fresh = changed[part], fresh[part]
    changed[last] = fresh[last]
    if not parents and last in fresh["choices"]:
        changed["choices"] = {**changed["choices"], last: fresh["choices"][last]}


def trust_overrides(overrides: Sequence[str]) -> None:
    """Allow this process to import the classes that ``overrides`` name; they must be the user's own."""
    for item in _parse(overrides):
        if _names_class(item):
            nested: object = {"_target_": item.value()}
        else:
            nested = item.value()
        for part in reversed(item.key_or_group.removesuffix("._target_").split(".")):
            nested = {part: nested}
        trust(str(name) for _, name in imports_of(nested))


class _Composed(Mapping[str, Any]):
    """Hydra's composition of some options: the nodes of the groups, and the settings that are in no group.

    A node gets the defaults of its class when it is read, because most of the classes import torch: a mistake in
    ``train`` is told before that, which takes seconds. Interpolations are not resolved.

    Args:
        nodes: the composition, with the values of the files alone.
        choices: the chosen option of each group.
    """

    def __init__(self, nodes: Mapping[str, Any], choices: Mapping[str, str]) -> None:
        self.choices = choices
        self._nodes = nodes
        self._whole: dict[str, Any] = {}
        self.groups_of_own_classes: list[str] = []
        for group, node in nodes.items():
            if isinstance(node, Mapping) and "_target_" in node and not _is_ours(node):
                self.groups_of_own_classes.append(group)

    def __getitem__(self, key: str) -> Any:
        if key not in self._whole:
            node = self._nodes[key]
            if key in CLASSES or (isinstance(node, Mapping) and "_target_" in node and _is_ours(node)):
                node = with_defaults(node, key, CLASSES.get(key))
            self._whole[key] = node
        return self._whole[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)


def _is_ours(node: Mapping[str, Any]) -> bool:
    return str(node["_target_"]).partition(".")[0] in OURS


@lru_cache(maxsize=256)
def _composed(groups: tuple[str, ...], folders: tuple[Path, ...]) -> _Composed:
    """Return the composition with the options of ``groups``; cached, as Hydra is slow."""
    places = ",".join(quoted_override("", f"file://{folder}")[1:] for folder in folders[1:])
    with _HYDRA, initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        composed = compose("config", [*groups, f"hydra.searchpath=[{places}]"], return_hydra_config=True)
    choices = {str(group): str(name) for group, name in composed.hydra.runtime.choices.items()}
    OmegaConf.set_struct(composed, False)
    composed.pop("hydra")
    return _Composed(typing.cast("dict[str, Any]", OmegaConf.to_container(composed)), choices)


def _parse(overrides: Sequence[str]) -> list[Override]:
    """Return the parsed overrides of one run."""
    parsed = parse_overrides(overrides)
    for item in parsed:
        item.key_or_group, item.input_line = unescaped(item.key_or_group), unescaped(item.input_line)
        if item.is_sweep_override() or item.value() == "*":
            line = item.input_line
            raise ConfigError(f"{line}: a run has one value of each setting; use sweep: goldfinch sweep {line}")
        item._value = unescaped(item.value())
    return parsed


def _names_class(item: Override) -> bool:
    """Return whether ``item`` chooses a class by its dotted name instead of an option."""
    key, value = item.key_or_group, item.value()
    if not isinstance(value, str):
        return False
    if key.endswith("._target_"):
        return True
    options = choices_of(key)
    return "." in value and bool(options) and value not in options


def _is_dictionary(key: str, composed: DictConfig) -> bool:
    """Return whether a setting is a dictionary of the user's keys, such as counts by domain, which is given anew."""
    node = OmegaConf.select(composed, key)
    return "." in key and isinstance(node, DictConfig) and "_target_" not in node


def _target_at(key: str, item: Override, base: Mapping[str, Any]) -> object:
    """Return the class at ``key`` of ``base``.

    Raises:
        ConfigError: no class can be chosen at the key of ``item``.
    """
    node: Any = base
    for part in [*key.split("."), "_target_"]:
        if not isinstance(node, Mapping) or part not in node:
            node = None
            break
        node = node[part]
    present: object = node
    if present is None:
        _check_group(item)
        _check_key(item, base)
    return present


def _check_group(item: Override) -> bool:
    """Return whether ``item`` chooses an option of a config group.

    Raises:
        ConfigError: the group has no such option.
    """
    group, chosen = item.key_or_group, item.value()
    options = choices_of(group)
    if not options:
        return False
    if not isinstance(chosen, list):
        chosen = [chosen]
    for choice in chosen:
        if choice is None and group != "experiment":
            raise ConfigError(f"{group}=null: one must be chosen; {nearest('', options)}")
        if choice is not None and str(choice) not in options:
            raise ConfigError(f"{group}={choice}: no such choice; {nearest(str(choice), options)}")
    return True


FORMER: Mapping[str, str] = {
    "data.listing": "data.listing: no such key; lists of images are data=table, and data.path names the list",
}
"""Keys that exist no more, and what to write now."""


def _check_key(item: Override, base: Mapping[str, Any]) -> None:
    if item.is_add() or item.is_delete():
        raise ConfigError(f"{item.input_line}: keys cannot be added or removed; set an existing key with key=value")
    node: Any = base
    where = ""
    for part in item.key_or_group.split("."):
        if not isinstance(node, Mapping) or part not in node:
            known = node if isinstance(node, Mapping) else {}
            meant = ""
            if not (where and difflib.get_close_matches(part, map(str, known), cutoff=0.5)):
                meant = _nearest_setting(item.key_or_group, str(item.input_line).partition("=")[2], base)
            if meant:
                raise UnknownKeyError(f"{item.key_or_group}: no such key; did you mean {meant}?")
            raise UnknownKeyError(FORMER.get(item.key_or_group) or _no_such_key(part, node, where))
        where = f"{where}.{part}".removeprefix(".")
        node = node[part]


def _nearest_setting(key: str, value: str, base: Mapping[str, Any]) -> str:
    """Return what to write instead of an unknown key, such as ``train.epochs=3``; empty if no setting is spelt like it.

    A key without a dot is compared with the last parts of all settings; of any other, the last part must be the same.
    """
    cutoff = SIMILAR
    if "." in key:
        cutoff = 1.0
    by_name: dict[str, list[str]] = {}
    for name in setting_keys(base):
        by_name.setdefault(name.rpartition(".")[2], []).append(name)
    close = difflib.get_close_matches(key.rpartition(".")[2], by_name, n=1, cutoff=cutoff)
    if not close:
        return ""
    return " or ".join([f"{name}={value}" for name in by_name[close[0]]])


def setting_keys(node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the key of every setting that is not a mapping."""
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from setting_keys(value, f"{prefix}{name}.")
        elif not str(name).startswith("_"):
            yield f"{prefix}{name}"


def _no_such_key(part: str, node: Any, where: str) -> str:
    known: list[str] = []
    if isinstance(node, Mapping):
        known = [str(key) for key in node if not str(key).startswith("_")]
    if not where:
        return f"{part}: no such key; {nearest(part, known)}"
    return f"{where}.{part}: no such key in {where}; {nearest(part, known)}"
