"""Composes a configuration with Hydra, and checks the keys of its overrides; errors name the nearest valid choice."""

import contextlib
import difflib
import threading
import typing
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common import overlays
from common.choices import ALLOWED, CONF, FOLDERS, choices_of, imports_of, trust
from common.config import with_defaults
from common.errors import ConfigError, UnknownKeyError, nearest
from common.overlays import Overlay
from common.overrides import TRANSFORM, Override, Overrides, parse_overrides, quoted_override
from common.round_settings import RoundSettings, TrainSettings
from common.text import shell_line
from common.versions import OURS

CLASSES: Mapping[str, type] = {"train": TrainSettings, "rounds": RoundSettings}
"""The classes of the groups whose files name none."""

GROUPS_OF_CLASSES = frozenset(ALLOWED) - {"engine"}
"""The groups whose class an override can choose by its dotted name. An engine has such a class only for its device."""

_HYDRA = threading.Lock()
"""Hydra keeps its initialisation in one global object, so one thread composes at a time."""

VALUES_OF_OTHERS = ("experiment", *overlays.GROUPS)
"""The groups whose files set values of other groups' keys, and have none of their own."""

BROUGHT = {
    "augmentation": "did you mean data.augmentation.transform={value}?",
    "lr": "did you mean train.learning_rate={value}?",
    "clients": "the protocol decides the clients; goldfinch list protocol",
}
"""Names that people bring from elsewhere, and what to write."""

TABLES = (".csv", ".tsv", ".parquet")
"""Suffixes of files that ``data.path`` names."""

SIMILAR = 0.8
"""Smallest similarity of an unknown key to the last part of a setting at which it is suggested, from 0 to 1."""


class Composition:
    """What overrides choose, composed by Hydra, and their values.

    A composition is made in two steps, since most classes import torch, which takes seconds. The constructor reports
    mistakes in the choices, and in settings whose classes do not need torch. :meth:`config` reports the others.

    ``method._target_=package.module.Class``, or shorter ``method=package.module.Class``, chooses a class that no file
    describes: its settings are its own defaults and those that are given.

    Args:
        overrides: ``key=value`` each.
        own: the overrides that the user gave, by default all. The classes that they name may be imported
            (:func:`trust`).

    Attributes:
        overrides: the overrides, read.
        overlay: the overlay that they choose; ``None`` without one.

    Raises:
        ConfigError: an override cannot be read, or names a group, option or key that does not exist.
    """

    def __init__(self, overrides: Overrides, own: Overrides | None = None) -> None:
        self.overrides = parse_overrides(overrides)
        for item in self.overrides:
            if item.several:
                key, _, text = item.text.partition("=")
                remedy = f"a value with a comma is quoted: {shell_line([quoted_override(key, text)])}"
                if key != "output":
                    remedy = f"use sweep: goldfinch sweep {item.text}; {remedy}"
                raise ConfigError(f"{item.text}: a run has one value of each setting; {remedy}")
        if own is None:
            own = self.overrides
        trust_overrides(own)  # not a class that a tuned file names, which the user may not have written
        self._classes: dict[str, Override] = {}
        self._options: dict[str, Override] = {}
        self._settings: list[Override] = []
        for item in self.overrides:
            self._sort(item)
        with _told():
            self.overlay = self._overlay()
            self._base = _composed(self._lines(self.overlay), tuple(FOLDERS))
            _check_has_no_other_group(self._base)
            for item in self._settings:
                if not self._base.needs_import(item.key.partition(".")[0]):
                    _check_key(item, self._base)

    def _sort(self, item: Override) -> None:
        if item.key in overlays.GROUPS:
            return
        if item.key.endswith("._target_"):
            self._classes[item.key.removesuffix("._target_")] = item
        elif _names_class(item):
            _store_class(item)
            self._options[item.key] = item
        elif _check_group(item):
            self._options[item.key] = item
        else:
            self._settings.append(item)

    def value(self, key: str) -> Any:
        """Return the value of a setting that is in no group, or in one without a class."""
        for item in reversed(self._settings):
            if item.key == key:
                return item.value
        value: Any = self._base
        for part in key.split("."):
            value = value.get(part)
        return value

    def config(self) -> dict[str, Any]:
        """Return the configuration as plain containers, with the defaults of all classes.

        The key ``choices`` holds the name of the option that was chosen in each group.

        Raises:
            ConfigError: an override names a key that does not exist, or a class cannot be imported.
        """
        with _told():
            replaced: dict[str, str] = {}
            for key, item in self._classes.items():
                if _target_at(key, item, self._base) != item.value:
                    replaced[key] = str(item.value)
            # The keys of a user's class are not known here: build() checks them against the class.
            of_classes = [group for group, item in self._options.items() if _names_class(item)]
            unlisted = tuple(f"{key}." for key in [*replaced, *of_classes, *self._base.groups_of_own_classes])
            for item in self._settings:
                if not item.key.startswith(unlisted):
                    _check_key(item, self._base)
            composed = OmegaConf.create(dict(self._base), flags={"struct": True})
            for key, name in replaced.items():
                OmegaConf.update(composed, key, {"_target_": name}, merge=False, force_add=key == TRANSFORM)
            for item in self._settings:
                added = item.key.startswith(unlisted)
                anew = isinstance(item.value, dict) and _is_dictionary(item.key, composed)
                OmegaConf.update(composed, item.key, item.value, merge=not anew, force_add=added or anew)
            plain = typing.cast("dict[str, Any]", OmegaConf.to_container(composed, resolve=True))
        chosen: dict[str, str] = {}
        for group, name in self._base.choices.items():
            if group in plain:
                chosen[group] = replaced.get(group, name)
        if self.overlay is not None:
            overlays.check_choices(self.overlay, chosen)
        return {**plain, "choices": chosen}

    def _overlay(self) -> Overlay | None:
        """Return the overlay that the overrides ``printed=`` and ``tuned=`` choose; ``None`` if they choose none.

        Raises:
            ConfigError: both choose an overlay, or there is none of this name, or none for the method and the data set.
        """
        chosen: dict[str, str] = {}
        for item in self.overrides:
            if item.key in overlays.GROUPS:
                chosen[item.key] = overlays.option_of(item.key, item.value)
        groups = [group for group in overlays.GROUPS if chosen.get(group, overlays.NONE) != overlays.NONE]
        if not groups:
            return None
        if len(groups) > 1:
            raise ConfigError("printed= and tuned= both choose the method's settings: leave one out")
        name = chosen[groups[0]]
        if name == overlays.FITTING:
            choices = _composed(self._lines(None), tuple(FOLDERS)).choices
            overlay = overlays.fitting_overlay(choices["method"], choices["data"])
        else:
            overlay = overlays.find_overlay(groups[0], name)
        if overlay.method not in choices_of("method"):
            own = self._options.get("method")
            if own is None or own.value != overlay.method:
                raise ConfigError(
                    f"{groups[0]}={name}: {overlay.method} is not one of Goldfinch's own methods, and imported only if "
                    f"you name it: method={overlay.method}"
                )
        return overlay

    def _lines(self, overlay: Overlay | None) -> tuple[str, ...]:
        """Return the overrides that Hydra composes."""
        lines = [item.text for item in self._options.values()]
        if overlay is not None:
            lines.append(quoted_override(overlay.group, overlay.option))
        return tuple(lines)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Turn an error of Hydra's into one of ours."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(str(error).strip()) from error


def compose_config(overrides: Overrides, own: Overrides | None = None) -> dict[str, Any]:
    """Return the configuration that ``overrides`` compose; see :class:`Composition`."""
    return Composition(overrides, own).config()


def changed_config(config: Mapping[str, Any], overrides: Overrides) -> dict[str, Any]:
    """Return a composed configuration with further overrides, such as a run's that is resumed.

    A group of which an override chooses another option is composed from ``conf/``; all other settings stay as they are
    in ``config``.

    Args:
        config: the composed configuration.
        overrides: ``key=value`` each, the user's own.

    Raises:
        ConfigError: an override cannot be read, or names a group, option or key that does not exist.
    """
    groups: list[str] = []
    for group, choice in config["choices"].items():
        if choice is None or group in overlays.GROUPS:
            continue
        node = config.get(group)
        if choice not in choices_of(group) and isinstance(node, Mapping) and node.get("_target_"):
            choice = node["_target_"]  # a class that no file of conf/ describes
        groups.append(f"{group}={choice}")
    overrides = parse_overrides(overrides)
    composition = Composition([*groups, *overrides], own=overrides)
    fresh = composition.config()
    changed = dict(config)
    if composition.overlay is not None:
        for key in composition.overlay.values:
            _take(changed, fresh, key)
    recorded = OmegaConf.create(dict(config))
    for item in overrides:
        if item.key in overlays.GROUPS:
            continue
        key = item.key.removesuffix("._target_")
        same_class = _names_class(item) and OmegaConf.select(recorded, f"{key}._target_") == item.value
        if not same_class and item.text not in groups:
            _take(changed, fresh, key)
    return changed


def _store_class(item: Override) -> None:
    """Make the class that ``item`` names an option of Hydra's, without settings, as no file describes it.

    Raises:
        ConfigError: no class can be chosen for the group.
    """
    if item.key not in GROUPS_OF_CLASSES:
        _check_group(item)
    ConfigStore.instance().store(item.value, {"_target_": item.value}, group=item.key)


def _check_has_no_other_group(base: "_Composed") -> None:
    """Refuse a key that no file of ``conf/`` has at the top, such as of an experiment in a folder of the user's own.

    Raises:
        ConfigError: there is one; the message names the nearest.
    """
    known = _top_keys()
    for key in base:
        if key not in known:
            raise UnknownKeyError(_no_such_key(str(key), known, ""))


@lru_cache
def _top_keys() -> Mapping[str, None]:
    """Return the groups with settings of their own, and the settings that are in no group, of ``conf/config.yaml``."""
    content = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))
    keys: dict[str, None] = {}
    for item in content.pop("defaults"):
        if isinstance(item, Mapping):
            keys.update(dict.fromkeys(item))
    keys.update(dict.fromkeys(content))
    for group in VALUES_OF_OTHERS:
        del keys[group]
    return keys


def _take(changed: dict[str, Any], fresh: Mapping[str, Any], key: str) -> None:
    """Set the value, or the whole group, at ``key`` of ``changed`` to that of ``fresh``."""
    *parents, last = key.split(".")
    for part in parents:
        changed[part] = dict(changed[part])
        changed, fresh = changed[part], fresh[part]
    changed[last] = fresh[last]
    if not parents and last in fresh["choices"]:
        changed["choices"] = {**changed["choices"], last: fresh["choices"][last]}


def trust_overrides(overrides: Overrides) -> None:
    """Allow this process to import the classes that ``overrides`` name; they must be the user's own."""
    for item in parse_overrides(overrides):
        nested = item.value
        if _names_class(item):
            nested = {"_target_": item.value}
        for part in reversed(item.key.removesuffix("._target_").split(".")):
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
            if self.needs_import(group) and not _is_ours(node):
                self.groups_of_own_classes.append(group)

    def needs_import(self, key: str) -> bool:
        """Return whether the node at ``key`` names a class that must be imported before its settings are known."""
        node = self._nodes.get(key)
        return isinstance(node, Mapping) and "_target_" in node

    def __getitem__(self, key: str) -> Any:
        if key not in self._whole:
            node = self._nodes[key]
            if key in CLASSES or (self.needs_import(key) and _is_ours(node)):
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


def _names_class(item: Override) -> bool:
    """Return whether ``item`` chooses a class by its dotted name instead of an option."""
    key, value = item.key, item.value
    if not isinstance(value, str):
        return False
    if key.endswith("._target_"):
        return True
    options = choices_of(key)
    is_path = "/" in value or Path(value).suffix in (".py", ".yaml", *TABLES)
    return "." in value and not is_path and bool(options) and value not in options


def _remedy(group: str, choice: str, options: Iterable[str]) -> str:
    """Return what to write in the place of ``choice``, which may be the path of what a setting names otherwise."""
    path = Path(choice)
    if path.suffix == ".py":
        return f"write its dotted name: {group}={'.'.join(path.with_suffix('').parts)}.NAME"
    if group == "data" and path.suffix in TABLES:
        return shell_line(["data=table", quoted_override("data.path", choice)])
    if group == "data" and "/" in choice:
        return f"a folder of images is {shell_line(['data=folder', quoted_override('data.root', choice)])}"
    return nearest(choice.removesuffix(".yaml"), options)


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
    if present is None and key != TRANSFORM:  # which nothing else chooses
        _check_group(item)
        _check_key(item, base)
    return present


def _check_group(item: Override) -> bool:
    """Return whether ``item`` chooses an option of a config group.

    Raises:
        ConfigError: the group has no such option.
    """
    group, chosen = item.key, item.value
    options = choices_of(group)
    if not options:
        return False
    _check_sets(item)
    if isinstance(chosen, list):
        several = ",".join(map(str, chosen))
        raise ConfigError(f"{item.text}: a run has one {group}; use sweep: goldfinch sweep {group}={several}")
    if chosen is None and group != "experiment":
        raise ConfigError(f"{group}=null: one must be chosen; {nearest('', options)}")
    if chosen is not None and str(chosen) not in options:
        raise ConfigError(f"{group}={chosen}: no such choice; {_remedy(group, str(chosen), options)}")
    return True


def _check_sets(item: Override) -> None:
    if item.changes_keys:
        raise ConfigError(f"{item.text}: keys cannot be added or removed; set an existing key with key=value")


def _check_key(item: Override, base: Mapping[str, Any]) -> None:
    _check_sets(item)
    node: Any = base
    where = ""
    for part in item.key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            known = node if isinstance(node, Mapping) else {}
            meant = ""
            value = item.text.partition("=")[2]
            if part in BROUGHT:
                raise UnknownKeyError(f"{item.key}: no such key; {BROUGHT[part].format(value=value)}")
            if not (where and difflib.get_close_matches(part, map(str, known), cutoff=0.5)):
                meant = _nearest_setting(item.key, value, base)
            if meant:
                raise UnknownKeyError(f"{item.key}: no such key; did you mean {meant}?")
            raise UnknownKeyError(_no_such_key(part, node, where))
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
        return f"{part}: no such key; {nearest(part, [*known, *VALUES_OF_OTHERS])}"
    return f"{where}.{part}: no such key in {where}; {nearest(part, known)}"
