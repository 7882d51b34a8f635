"""From Hydra's composed configuration to checked, frozen dataclasses; every mistake names the nearest valid choice."""

import dataclasses
import importlib
import re
import threading
import types
import typing
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

import pydantic
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import is_pydantic_dataclass
from yaml import YAMLError

from common.choices import CONF, FOLDERS, choices_of, imports_of, trust, trusted
from common.errors import ConfigError, nearest
from common.overrides import parse_overrides, quoted_override, restored
from common.versions import CODE

_HYDRA = threading.Lock()
"""Hydra keeps what it was initialised with in one global object."""

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
    """Where ``goldfinch tune`` looks for a field's value: part of its type, such as ``Annotated[float, Search(1, 9)]``.

    Args:
        low, high: the ends, both within the field's own range.
        log: whether the logarithm is drawn evenly, and not the value.
    """

    low: float
    high: float
    log: bool = True


def searched(target: type) -> dict[str, Search]:
    """The fields of ``target`` that are searched, with where."""
    hints = get_type_hints(target, include_extras=True)
    marks = {
        name: [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Search)]
        for name, hint in hints.items()
    }
    return {name: found[0] for name, found in marks.items() if found}


def _distinct(values: tuple[str, ...]) -> tuple[str, ...]:
    check(len(set(values)) == len(values), f"names one twice: {list(values)}")
    return values


Names = Annotated[tuple[str, ...], AfterValidator(_distinct)]
"""Names of which none comes twice."""


def with_tuned(overrides: Sequence[str]) -> list[str]:
    """``overrides`` with ``tuned=FILE``, or the name of a file in ``conf/tuned``, replaced by what the file says.

    What the user says wins over the file; ``tuned=none`` is none.

    Raises:
        ConfigError: there is no such file, it is not what ``goldfinch tune`` writes, or is of another method or data.
    """
    names = [item.partition("=")[2].strip("'\"") for item in overrides if item.startswith("tuned=")]
    rest = [item for item in overrides if not item.startswith("tuned=")]
    if not names or names[-1] == "none":
        return rest
    known = choices_of("tuned")
    path = Path(names[-1]) if names[-1].endswith(".yaml") else known.get(names[-1], Path())
    if not path.is_file():
        raise ConfigError(f"tuned={names[-1]}: no such file; goldfinch tune writes one; {nearest(names[-1], known)}")
    try:
        content = construct(Tuned, dict(OmegaConf.to_container(OmegaConf.load(path))))  # type: ignore[arg-type]  # checked
    except (OSError, ValueError, TypeError, YAMLError, OmegaConfBaseException, ConfigError) as error:
        raise ConfigError(f"{path} is not what goldfinch tune writes: {error}") from error
    for key, value in (("method", content.method), ("data", content.data)):
        said = [item.partition("=")[2] for item in rest if item.startswith(f"{key}=")]
        if said and said[-1] != value:
            raise ConfigError(f"tuned={names[-1]} was found for {key}={value}, not {said[-1]}: tune that one, too")
        rest = rest if said else [f"{key}={value}", *rest]
    return [*(f"{key}={value!r}" for key, value in content.values.items()), *rest]


def printed_values(method: str, data: str) -> "Printed | None":
    """Return the settings with which a paper's results of ``method`` on ``data`` were made.

    They are in ``conf/printed/<method>.yaml``: weights, temperatures and the server's epochs. The protocol, the net and
    local training are those of an experiment.

    Args:
        method: a choice of ``conf/method/``.
        data: a choice of ``conf/data/``.

    Returns:
        The settings, or ``None`` if the file has none for this data set.

    Raises:
        ConfigError: the file is not as it must be.
    """
    path = choices_of("printed").get(method)
    if path is None:
        return None
    try:
        content: Any = OmegaConf.to_container(OmegaConf.load(path))
        node = content.get(data)
    except (OSError, ValueError, AttributeError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} does not hold printed settings by data set: {error}") from error
    return None if node is None else build(node, f"{path.name}: {data}", Printed)


def with_printed(overrides: Sequence[str]) -> list[str]:
    """Return ``overrides`` with ``printed=true`` replaced by the printed settings of the method on the data set.

    Other overrides win over the printed settings. ``printed=false`` is as without.

    Raises:
        ConfigError: no settings are on file for the method and the data set, or ``tuned`` chooses settings as well.
    """
    asked = [item.partition("=")[2].lower() for item in overrides if item.startswith("printed=")]
    rest = [item for item in overrides if not item.startswith("printed=")]
    if not asked or asked[-1] == "false":
        return rest
    if asked[-1] != "true":
        raise ConfigError(f"printed={asked[-1]}: true takes what a paper prints for the data set, false does not")
    if any(item.startswith("tuned=") and item != "tuned=none" for item in rest):
        raise ConfigError("printed=true and tuned= both choose the method's settings: leave one out")
    choices = compose_config(rest, said=())["choices"]
    method, data = choices["method"], choices["data"]
    found = printed_values(method, data)
    if found is None:
        known = [f"method={name} data={each}" for name in choices_of("printed") for each in _printed_data(name)]
        raise ConfigError(
            f"printed=true: conf/printed/ has no settings for method={method} data={data}; leave printed=true out to "
            f"take the method's defaults; there are {', '.join(known)}"
        )
    return [*found.overrides, *rest]


def _printed_data(method: str) -> list[str]:
    """The data sets for which ``conf/printed/<method>.yaml`` has settings."""
    return [data for data in choices_of("data") if printed_values(method, data) is not None]


def compose_config(overrides: Sequence[str], said: Sequence[str] | None = None) -> dict[str, Any]:
    """Hydra's composition of ``conf/config.yaml`` with ``overrides``, as plain containers.

    ``choices`` holds the name of the option that was chosen in each group. ``method._target_=package.module.Class``, or
    shorter ``method=package.module.Class``, chooses a class that no file describes: its settings are its own defaults
    and those that are given.

    Args:
        overrides: ``key=value`` each.
        said: those of the overrides that are the user's own, who is trusted (:func:`trust`) with the classes that they
            name; ``None``: all.

    Raises:
        ConfigError: an override cannot be parsed, or names a group, option or key that does not exist.
    """
    parsed = _parse(with_tuned(with_printed(overrides)))
    trust_said(overrides if said is None else said)  # a tuned file is not the user's word
    classes = [item for item in parsed if _names_class(item)]
    groups = [item for item in parsed if item not in classes and _check_group(item)]
    try:
        base, choices = _composed(tuple(str(item.input_line) for item in groups), tuple(FOLDERS))
        named = {item.key_or_group.removesuffix("._target_"): item for item in classes}
        own = {key: str(item.value()) for key, item in named.items() if _target_at(key, item, base) != item.value()}
        composed = OmegaConf.create(base, flags={"struct": True})
        for key, name in own.items():
            OmegaConf.update(composed, key, {"_target_": name}, merge=False)
        targets = {group: str(node.get("_target_", CODE[0])) for group, node in base.items() if isinstance(node, dict)}
        strangers = {group for group, name in targets.items() if name.partition(".")[0] not in CODE}
        for item in (item for item in parsed if item not in groups and item not in classes):
            added = item.key_or_group.startswith(tuple(f"{key}." for key in own.keys() | strangers))
            if not added:  # else no file says what keys there are, and build() asks the class
                _check_key(item, base)
            OmegaConf.update(composed, item.key_or_group, item.value(), force_add=added)
        plain = typing.cast("dict[str, Any]", OmegaConf.to_container(composed, resolve=True))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(str(error).strip()) from error
    return {**plain, "choices": {group: own.get(group, name) for group, name in choices.items() if group in plain}}


def trust_said(overrides: Sequence[str]) -> None:
    """Let the classes be imported that ``overrides``, a user's own words, name."""
    for item in _parse(overrides):
        nested: object = {"_target_": item.value()} if _names_class(item) else item.value()
        for part in reversed(item.key_or_group.removesuffix("._target_").split(".")):
            nested = {part: nested}
        trust(str(name) for _, name in imports_of(nested))


@lru_cache(maxsize=256)
def _composed(groups: tuple[str, ...], folders: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """All folders with the options of ``groups``, unresolved, and all choices; kept, as Hydra is slow."""
    places = ",".join(quoted_override("", f"file://{folder}")[1:] for folder in folders[1:])
    with _HYDRA, initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        composed = compose("config", [*groups, f"hydra.searchpath=[{places}]"], return_hydra_config=True)
    choices = {str(group): str(name) for group, name in composed.hydra.runtime.choices.items()}
    OmegaConf.set_struct(composed, False)
    composed.pop("hydra")
    return typing.cast("dict[str, Any]", OmegaConf.to_container(composed)), choices


def _parse(overrides: Sequence[str]) -> list[Override]:
    """The overrides of one run."""
    parsed = parse_overrides(overrides)
    for item in parsed:
        item.key_or_group, item.input_line = restored(item.key_or_group), restored(item.input_line)
        if item.is_sweep_override() or item.value() == "*":
            line = item.input_line
            raise ConfigError(f"{line}: a run has one value of each setting; use sweep: goldfinch sweep {line}")
        item._value = restored(item.value())
    return parsed


def _names_class(item: Override) -> bool:
    """Whether ``item`` chooses a class by its dotted name, not an option."""
    key, value = item.key_or_group, item.value()
    if not isinstance(value, str) or key.endswith("._target_"):
        return isinstance(value, str)
    return "." in value and value not in (choices_of(key) or [value])


def _target_at(key: str, item: Override, base: dict[str, Any]) -> object:
    """The class at ``key`` of ``base``.

    Raises:
        ConfigError: ``item`` has none to choose there.
    """
    present: object = OmegaConf.select(OmegaConf.create(base), f"{key}._target_")
    if present is None:
        _check_group(item)
        _check_key(item, base)
    return present


def _check_group(item: Override) -> bool:
    """Whether ``item`` chooses an option of a config group; an unknown option is an error."""
    options = choices_of(item.key_or_group)
    if not options:
        return False
    chosen = item.value()
    for choice in chosen if isinstance(chosen, list) else [chosen]:
        if choice is None and item.key_or_group != "experiment":
            raise ConfigError(f"{item.key_or_group}=null: one must be chosen; {nearest('', options)}")
        if choice is not None and str(choice) not in options:
            raise ConfigError(f"{item.key_or_group}={choice}: no such choice; {nearest(str(choice), options)}")
    return True


def _check_key(item: Override, base: dict[str, Any]) -> None:
    if item.is_add() or item.is_delete():
        raise ConfigError(f"{item.input_line}: keys cannot be added or removed; set an existing key with key=value")
    node: Any = base
    walked: list[str] = []
    for part in item.key_or_group.split("."):
        if not isinstance(node, Mapping) or part not in node:
            where = ".".join(walked)
            choices = [str(key) for key in node if not str(key).startswith("_")] if isinstance(node, Mapping) else []
            full = ".".join([*walked, part])
            raise ConfigError(f"{full}: no such key{f' in {where}' if where else ''}; {nearest(part, choices)}")
        walked.append(part)
        node = node[part]


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def checked(target: type[T]) -> type[T]:
    """Decorator: ``target`` as a frozen dataclass that checks its values by the types of its fields.

    Nothing is lost on the way: 1 is a float, 1.5 is no int, "yes" and 1 are no bool, True is no int; infinite numbers
    and NaN are refused. Ranges are part of a type, such as :data:`Positive`. What ties several fields together is
    checked in ``__post_init__``, which raises ``ValueError`` (:func:`check`).

    Raises:
        ValueError: (pydantic's ``ValidationError``, when an object is made) a value is of another type or out of range.
    """
    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
    return typing.cast("type[T]", pydantic.dataclasses.dataclass(target, frozen=True, config=config))


@checked
class Tuned:
    """What ``goldfinch tune`` writes: settings of a method on a data set, and how they were found.

    Args:
        method, data: what they are for.
        found: how they were found, in words.
        values: settings by ``a.b`` keys.
    """

    method: str
    data: str
    found: str
    values: dict[str, int | float]


@checked
class Printed:
    """Settings of a method with which a paper's results on one data set were made (``conf/printed/``).

    Args:
        source: the paper, or the released code, that has them.
        values: settings by ``a.b`` keys.
    """

    source: str
    values: dict[str, int | float]

    @property
    def overrides(self) -> list[str]:
        """The settings as overrides."""
        return [f"{key}={value!r}" for key, value in self.values.items()]


def check(condition: bool, message: str) -> None:
    """Raise ``ValueError(message)`` unless ``condition``; for what ties fields together, in ``__post_init__``."""
    if not condition:
        raise ValueError(message)


def build(node: Mapping[str, Any], where: str, target: type | None = None) -> Any:
    """The :func:`checked` object that ``node`` describes.

    Args:
        node: keys are field names; ``_target_`` names the class as ``module.Class`` unless ``target`` is given.
        where: the key of ``node`` in the configuration, for messages.
        target: the class to build.

    Raises:
        ConfigError: unknown key, wrong type, or a value the class refuses.
    """
    if target is None:
        target = _import(node.get("_target_"), where)
    hints = get_type_hints(target)
    given = {str(key): value for key, value in node.items() if key != "_target_"}
    values = {key: _read(value, hints.get(key), f"{where}.{key}") for key, value in given.items()}
    return construct(target, values, where)


def construct(target: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """``target(**values)``, with a ``ConfigError`` that names every mistake below the key ``where``."""
    try:
        return target(**values)
    except ValidationError as error:
        raise ConfigError(mistakes(error, target, where)) from error


def to_config(value: Any, hint: Any = None) -> Any:
    """What :func:`build` makes ``value`` of again: an object has a ``_target_`` unless ``hint`` names its class."""
    if dataclasses.is_dataclass(value):
        hints = get_type_hints(type(value))
        node = {each.name: to_config(getattr(value, each.name), hints[each.name]) for each in dataclasses.fields(value)}
        target = f"{type(value).__module__}.{type(value).__qualname__}"
        return node if type(value) in (hint, *get_args(hint)) else {"_target_": target, **node}
    if isinstance(value, Mapping):
        return {key: to_config(item, hint) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_config(item, hint) for item in value]
    return str(value) if isinstance(value, Path) else value


def _read(value: Any, hint: Any, where: str) -> Any:
    """``value`` with what YAML cannot say, as ``hint`` asks: objects of mappings, tuples of lists, paths of strings."""
    for option in get_args(hint) if isinstance(hint, types.UnionType) else (hint,):
        origin, arguments = get_origin(option), get_args(option)
        if isinstance(value, Mapping) and is_pydantic_dataclass(option):
            return build(value, where, None if "_target_" in value else option)
        if isinstance(value, Mapping) and origin in (dict, Mapping):
            return {str(key): _read(item, arguments[1], f"{where}.{key}") for key, item in value.items()}
        if isinstance(value, list | tuple) and origin is tuple:
            return tuple(_read(item, arguments[0], f"{where}[{index}]") for index, item in enumerate(value))
        if isinstance(value, str) and option is Path:
            return Path(value)
    return value


def mistakes(error: ValidationError, target: type, where: str = "") -> str:
    """The first mistakes in ``target``'s values, each with its key, the value, and what is allowed or nearest."""
    return "; ".join(_mistake(dict(each), target, where) for each in error.errors(include_url=False)[:3])


def _mistake(found: dict[str, Any], target: type, where: str) -> str:
    place, kind, value, told = found["loc"], found["type"], found["input"], found["msg"]
    key = (where + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)).removeprefix(".")
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        known = [field.name for field in dataclasses.fields(target)] if len(place) == 1 else ()
        return f"{key}: no such key; {nearest(str(place[-1]), known)}"
    if kind == "missing":
        return f"{key}: a value is missing"
    if kind == "value_error":
        return f"{key}: {found['ctx']['error']}".removeprefix(": ")
    if kind == "literal_error":
        told = nearest(str(value), re.findall(r"[^\s',]+(?='|$)", found["ctx"]["expected"]))
    return f"{key}={value!r:.200}: {told.replace('Input should', 'must')}"


def _import(path: object, where: str) -> type:
    if not isinstance(path, str) or "." not in path:
        raise ConfigError(f"{where}: _target_ must be written module.Class; got {path!r}")
    if not trusted(path, where):
        raise ConfigError(
            f"{where}: {path} is not one of Goldfinch's own, and imported only if you name it: {where}._target_={path}"
        )
    module_name, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{where}: cannot import {path}: {error}; is it installed beside Goldfinch?") from error
    if not is_pydantic_dataclass(found):
        raise ConfigError(f"{where}: {path} is not a checked dataclass; decorate it with common.config.checked")
    return typing.cast("type", found)
