"""Composes a configuration with Hydra and builds checked, frozen dataclasses; errors name the nearest valid choice."""

import dataclasses
import difflib
import importlib
import pkgutil
import re
import sys
import threading
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

import pydantic
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import is_pydantic_dataclass

from common import overlays
from common.choices import CONF, FOLDERS, choices_of, imports_of, trust, trusted
from common.errors import ConfigError, UnknownKeyError, nearest
from common.overlays import Overlay
from common.overrides import parse_overrides, quoted_override, unescaped
from common.text import shell_line
from common.versions import OURS

_HYDRA = threading.Lock()
"""Hydra keeps its initialisation in one global object, so one thread composes at a time."""

SIMILAR = 0.8
"""Smallest similarity of an unknown key to the last part of a setting at which it is suggested, from 0 to 1."""

T = TypeVar("T")

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
"""In (0, 1]."""
ZeroToOne = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
"""In [0, 1)."""
Fraction = Annotated[float, Field(gt=0, lt=1)]
"""In (0, 1)."""
Natural = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
AtLeastTwo = Annotated[int, Field(ge=2)]


class Search(NamedTuple):
    """Range in which ``goldfinch compare`` searches a field; part of its type: ``Annotated[float, Search(1, 9)]``.

    Args:
        low, high: the ends, both within the field's own range.
        log: draw the logarithm uniformly instead of the value.
    """

    low: float
    high: float
    log: bool = True


def search_ranges(target: type) -> dict[str, Search]:
    """Return the range of every field of ``target`` that ``goldfinch compare`` searches."""
    found: dict[str, Search] = {}
    for name, hint in get_type_hints(target, include_extras=True).items():
        for mark in getattr(hint, "__metadata__", ()):
            if isinstance(mark, Search):
                found.setdefault(name, mark)
    return found


def _distinct(values: tuple[str, ...]) -> tuple[str, ...]:
    check(len(set(values)) == len(values), f"a name is repeated: {list(values)}")
    return values


Names = Annotated[tuple[str, ...], AfterValidator(_distinct)]
"""Names without repetition."""


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
        base, choices = _composed(_lines(options, overlay), tuple(FOLDERS))
        _check_has_no_other_group(base)
        named = {item.key_or_group.removesuffix("._target_"): item for item in classes}
        replaced: dict[str, str] = {}
        for key, item in named.items():
            if _target_at(key, item, base) != item.value():
                replaced[key] = str(item.value())
        composed = OmegaConf.create(base, flags={"struct": True})
        for key, name in replaced.items():
            OmegaConf.update(composed, key, {"_target_": name}, merge=False)
        # No file lists the keys of a user's class: build() checks them against the class.
        of_classes = [group for group, item in options.items() if _names_class(item)]
        unlisted = tuple(f"{key}." for key in [*replaced, *of_classes, *_groups_of_own_classes(base)])
        for item in settings:
            added = item.key_or_group.startswith(unlisted)
            if not added:
                _check_key(item, base)
            anew = isinstance(item.value(), dict) and _is_dictionary(item.key_or_group, composed)
            OmegaConf.update(composed, item.key_or_group, item.value(), merge=not anew, force_add=added or anew)
        plain = typing.cast("dict[str, Any]", OmegaConf.to_container(composed, resolve=True))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(str(error).strip()) from error
    chosen: dict[str, str] = {}
    for group, name in choices.items():
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
        _, choices = _composed(_lines(options, None), tuple(FOLDERS))
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
    defaults, _ = _composed((), tuple(FOLDERS))
    if "_target_" not in defaults.get(group, {}):
        _check_group(item)
    ConfigStore.instance().store(name, {"_target_": name}, group=group)


def _check_has_no_other_group(base: Mapping[str, Any]) -> None:
    """Refuse a key that no file of ``conf/`` has at the top, such as of an experiment in a folder of the user's own.

    Raises:
        ConfigError: there is one; the message names the nearest.
    """
    known, _ = _composed((), tuple(FOLDERS))
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


def _groups_of_own_classes(base: Mapping[str, Any]) -> list[str]:
    """Return the groups with a chosen file that names a class outside Goldfinch."""
    found: list[str] = []
    for group, node in base.items():
        if isinstance(node, dict) and "_target_" in node:
            package = str(node["_target_"]).partition(".")[0]
            if package not in OURS:
                found.append(group)
    return found


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


@lru_cache(maxsize=256)
def _composed(groups: tuple[str, ...], folders: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the unresolved composition with the options of ``groups``, and all choices; cached, as Hydra is slow."""
    places = ",".join(quoted_override("", f"file://{folder}")[1:] for folder in folders[1:])
    with _HYDRA, initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        composed = compose("config", [*groups, f"hydra.searchpath=[{places}]"], return_hydra_config=True)
    choices = {str(group): str(name) for group, name in composed.hydra.runtime.choices.items()}
    OmegaConf.set_struct(composed, False)
    composed.pop("hydra")
    return typing.cast("dict[str, Any]", OmegaConf.to_container(composed)), choices


def _parse(overrides: Sequence[str]) -> list[Override]:
    """Return the parsed overrides of one run."""
    parsed = parse_overrides(overrides)
    for item in parsed:
        item.key_or_group, item.input_line = unescaped(item.key_or_group), unescaped(item.input_line)
        if item.is_sweep_override() or item.value() == "*":
            line = item.input_line
            key, _, text = line.partition("=")
            remedy = f"a value with a comma is quoted: {shell_line([quoted_override(key, text)])}"
            if key != "output":
                remedy = f"use sweep: goldfinch sweep {line}; {remedy}"
            raise ConfigError(f"{line}: a run has one value of each setting; {remedy}")
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


def _target_at(key: str, item: Override, base: dict[str, Any]) -> object:
    """Return the class at ``key`` of ``base``.

    Raises:
        ConfigError: no class can be chosen at the key of ``item``.
    """
    present: object = OmegaConf.select(OmegaConf.create(base), f"{key}._target_")
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


def _check_key(item: Override, base: dict[str, Any]) -> None:
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


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def checked(target: type[T]) -> type[T]:
    """Return ``target`` as a frozen dataclass that checks its values by the types of its fields; a decorator.

    Values are not converted, except an int to a float: 1.5 is no int, "yes" and 1 are no bool, True is no int.
    Infinite numbers and NaN are refused. Ranges are part of a type, such as :data:`Positive`. Conditions on several
    fields are checked in ``__post_init__``, which raises ``ValueError`` (:func:`check`).

    Raises:
        ValueError: an object is constructed with a value of another type or out of range (pydantic's
            ``ValidationError``).
    """
    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
    return typing.cast("type[T]", pydantic.dataclasses.dataclass(target, frozen=True, config=config))


def check(condition: bool, message: str) -> None:
    """Raise ``ValueError(message)`` unless ``condition`` holds; for conditions on fields, in ``__post_init__``."""
    if not condition:
        raise ValueError(message)


def build(node: Mapping[str, Any], where: str, target: type | None = None) -> Any:
    """Return the :func:`checked` object that ``node`` describes.

    Args:
        node: keys are field names; ``_target_`` names the class as ``module.Class`` unless ``target`` is given.
        where: the key of ``node`` in the configuration, for messages.
        target: the class to build.

    Raises:
        ConfigError: unknown key, wrong type, or a value the class refuses.
    """
    if target is None:
        target = class_of(node.get("_target_"), where)
    hints = get_type_hints(target)
    values: dict[str, Any] = {}
    for name, value in node.items():
        key = str(name)
        if key != "_target_":
            values[key] = _convert(value, hints.get(key), f"{where}.{key}")
    return construct(target, values, where)


def construct(target: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Return ``target(**values)``; a ``ConfigError`` names every mistake below the key ``where``."""
    try:
        return target(**values)
    except ValidationError as error:
        raise ConfigError(mistakes(error, target, where)) from error


def to_config(value: Any, hint: Any = None) -> Any:
    """Return plain containers from which :func:`build` builds an equal ``value``.

    Args:
        value: a :func:`checked` object, or a field's value.
        hint: the type of the field that holds ``value``. An object of another class gets a ``_target_``.
    """
    if dataclasses.is_dataclass(value):
        kind = type(value)
        hints = get_type_hints(kind)
        node: dict[str, Any] = {}
        if kind is not hint and kind not in get_args(hint):
            node["_target_"] = f"{kind.__module__}.{kind.__qualname__}"
        for each in dataclasses.fields(value):
            node[each.name] = to_config(getattr(value, each.name), hints[each.name])
        return node
    if isinstance(value, Mapping):
        return {key: to_config(item, hint) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_config(item, hint) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def _convert(value: Any, hint: Any, where: str) -> Any:
    """Return ``value`` as the first type in ``hint`` that it fits, unchanged if it fits none.

    Types that YAML does not have are built: objects from mappings, tuples from lists, paths from strings.
    """
    options = (hint,)
    if isinstance(hint, types.UnionType):
        options = get_args(hint)
    for option in options:
        origin, arguments = get_origin(option), get_args(option)
        if isinstance(value, Mapping) and is_pydantic_dataclass(option):
            if "_target_" in value:
                return build(value, where)
            return build(value, where, option)
        if isinstance(value, Mapping) and origin in (dict, Mapping):
            return {str(key): _convert(item, arguments[1], f"{where}.{key}") for key, item in value.items()}
        if isinstance(value, list | tuple) and origin is tuple:
            return tuple(_convert(item, arguments[0], f"{where}[{index}]") for index, item in enumerate(value))
        if isinstance(value, str) and option is Path:
            return Path(value)
    return value


MAX_MISTAKES = 3
"""Mistakes that one error message lists."""


def mistakes(error: ValidationError, target: type, where: str = "") -> str:
    """Return the first mistakes in ``target``'s values: the key, the value, and the allowed or the nearest ones."""
    found = error.errors(include_url=False)[:MAX_MISTAKES]
    return "; ".join(_mistake(dict(each), target, where) for each in found)


def _mistake(found: dict[str, Any], target: type, where: str) -> str:
    place, kind, value, reason = found["loc"], found["type"], found["input"], found["msg"]
    key = where
    for part in place:
        if isinstance(part, int):
            key += f"[{part}]"
        else:
            key += f".{part}"
    key = key.removeprefix(".")
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        known: list[str] = []
        if len(place) == 1:
            known = [field.name for field in dataclasses.fields(target)]
        return f"{key}: no such key; {nearest(str(place[-1]), known)}"
    if kind == "missing":
        return f"{key}: a value is missing"
    if kind == "value_error":
        return f"{key}: {found['ctx']['error']}".removeprefix(": ")
    if kind == "string_type" and isinstance(value, int | float):
        return f"{key}={value!r}: must be text; write it in quotes: '\"{value}\"'"
    if kind == "literal_error":
        reason = nearest(str(value), re.findall(r"[^\s',]+(?='|$)", found["ctx"]["expected"]))
    return f"{key}={value!r:.200}: {reason.replace('Input should', 'must')}"


def _import_advice(module_name: str, error: ImportError) -> str:
    """Return what to do about a module that cannot be imported: it is elsewhere, misspelt, or fails itself."""
    package, _, rest = module_name.partition(".")
    missing = ""
    if isinstance(error, ModuleNotFoundError):
        missing = error.name or ""
    if missing == package:
        return (
            "put the module's folder on PYTHONPATH (PYTHONPATH=. for the current folder), or install its package where "
            "Goldfinch is installed (pip install -e .)"
        )
    if not rest or not f"{module_name}.".startswith(f"{missing}."):
        return f"{module_name} was found, and is itself at fault: correct that import"
    parent, _, name = missing.rpartition(".")
    places = getattr(sys.modules[parent], "__path__", ())
    modules = [each.name for each in pkgutil.iter_modules(places)]
    return f"{parent} is in {', '.join(places) or sys.modules[parent].__file__}: {nearest(name, modules)}"


def class_of(path: object, where: str) -> type:
    """Import the :func:`checked` class of a dotted name.

    Args:
        path: the name, ``module.Class``.
        where: the key that it is imported for.

    Raises:
        ConfigError: the name is not one that may be imported for this key, or is no checked class.
    """
    if not isinstance(path, str) or "." not in path:
        raise ConfigError(f"{where}: _target_ must be written module.Class; got {path!r}")
    if not trusted(path, where):
        raise ConfigError(
            f"{where}: {path} is not one of Goldfinch's own, and imported only if you name it: {where}._target_={path}"
        )
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{where}: cannot import {path}: {error}; {_import_advice(module_name, error)}") from error
    found = getattr(module, name, None)
    if found is None:
        classes = [each for each in vars(module) if is_pydantic_dataclass(getattr(module, each))]
        raise ConfigError(f"{where}: {module_name} ({module.__file__}) has no class {name}; {nearest(name, classes)}")
    if not is_pydantic_dataclass(found):
        raise ConfigError(f"{where}: {path} is not a checked dataclass; decorate it with common.config.checked")
    return typing.cast("type", found)
