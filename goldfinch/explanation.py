"""Describes settings: key, type, range, default, meaning and the papers' values, from the classes' own docstrings."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic.fields import FieldInfo

from common.choices import choices_of
from common.composition import compose_config, setting_keys
from common.config import class_of, search_ranges, with_defaults
from common.errors import ConfigError, nearest
from common.overlays import GROUPS, leaves, printed_values
from common.regular_files import read_small
from goldfinch.papers import PAPERS, cited
from goldfinch.readings import lines_of

NAMES_OF_TYPES: dict[Any, str] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
    type(None): "null",
    Any: "any value",
}

OVER_OTHERS = ("experiment", *GROUPS)
"""Groups whose choices set the keys of other groups."""

SYMBOLS = {"Gt": ">", "Ge": ">=", "Lt": "<", "Le": "<="}
"""Comparison of each kind of limit that pydantic puts into a type."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting, described.

    Args:
        key: the key as it is written in an override, such as ``method.temperature``.
        kind: its type and range as text; empty if no class declares it.
        default: the value in ``conf/``, as it is written in an override.
        meaning: what it does, from the docstring of its class.
        search: the range that ``goldfinch compare`` searches, as text; empty if it is not searched.
        published: the values that papers print, as text by data set.
    """

    key: str
    kind: str
    default: str
    meaning: str
    search: str = ""
    published: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a choice of a group is, and its settings.

    Args:
        title: how the choice is written in an override, such as ``method=fpl``.
        text: what the choice is, from the docstring of its class or the comment of its file.
        settings: its settings, in the order of its file.
    """

    title: str
    text: str
    settings: Sequence[Setting]


def explain(name: str) -> Explanation:
    """Describe a group (``train``), a choice (``fpl``, ``protocol.fpl_office``) or a setting (``method.temperature``).

    Raises:
        ConfigError: there is no such group, choice or setting, or several groups have a choice of this name.
    """
    base = compose_config(())
    group, _, rest = name.partition(".")
    if group in base["choices"] or choices_of(group):
        chosen, _, key = rest.partition(".")
        if not rest:
            return _explain_choice(group, base["choices"].get(group))
        if chosen in choices_of(group):
            return _only(_explain_choice(group, chosen), f"{group}.{key}".removesuffix("."))
        return _only(_explain_choice(group, base["choices"].get(group)), name)
    if name in base and name != "choices":
        return _explain_run(base, name)
    return _explain_choice(_group_of(name), name)


def _group_of(choice: str) -> str:
    """Return the one group with a choice of this name."""
    groups = [*compose_config(())["choices"], *OVER_OTHERS]
    matching: list[str] = []
    names: set[str] = set(groups)
    for group in groups:
        options = choices_of(group)
        names.update(options)
        if choice in options:
            matching.append(group)
    if not matching:
        for setting in setting_keys(compose_config(())):
            if setting.rpartition(".")[2] == choice:
                names.add(setting)
        raise ConfigError(
            f"{choice}: no such group, choice or setting{_similar(choice, names)}; goldfinch list shows groups and "
            "choices, goldfinch list train the settings of a group"
        )
    if len(matching) > 1:
        written = " or ".join(f"{group}.{choice}" for group in matching)
        raise ConfigError(f"{choice} is a choice of several groups: write {written}")
    return matching[0]


def _similar(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=3)
    if not close:
        return ""
    return f"; did you mean {' or '.join(close)}?"


def _only(explanation: Explanation, key: str) -> Explanation:
    """Return the explanation of one setting, or of those below ``key``; of all where ``key`` is the group itself."""
    if "." not in key:
        return explanation
    kept: list[Setting] = []
    for setting in explanation.settings:
        if setting.key == key or setting.key.startswith(f"{key}."):
            kept.append(setting)
    if not kept:
        known = [setting.key for setting in explanation.settings]
        raise ConfigError(f"{key}: no such setting of {explanation.title}; {nearest(key, known)}")
    return Explanation(explanation.title, "", kept)


def _explain_choice(group: str, choice: str | None) -> Explanation:
    if group in OVER_OTHERS or choice is None:
        return _explain_file(group, choice)
    composed = compose_config([f"{group}={choice}"])
    node = composed[group]
    target = _class_of_group(group, node)
    if target is None:
        settings = [Setting(key, "", _written(value), "") for key, value in leaves(node, group)]
        return Explanation(f"{group}={choice}", _comment(group, choice), settings)
    node = with_defaults(node, group, target)  # of a class of the user's the composition has what is written alone
    published: dict[str, Mapping[str, Any]] = {}
    if group == "method":
        for data in choices_of("data"):
            overlay = printed_values(choice, data)
            if overlay is not None:
                published[data] = overlay.values
    parts = [_comment(group, choice), _description(target)]
    if group == "method" and choice in PAPERS:
        parts.append(f"Paper: {cited(choice)}")
        parts += lines_of(choice)
    text = "\n\n".join(part for part in parts if part)
    return Explanation(f"{group}={choice}", text, list(_settings(target, node, group, published)))


def _explain_file(group: str, choice: str | None) -> Explanation:
    """Describe a choice that sets the keys of other groups, such as an experiment."""
    options = choices_of(group)
    if choice is None:
        raise ConfigError(f"{group}: name one of its choices, such as {group}.{min(options)}; goldfinch list {group}")
    content = yaml.safe_load(read_small(options[choice]))
    settings: list[Setting] = []
    for item in content.pop("defaults", ()):
        if isinstance(item, Mapping):
            for key, value in item.items():
                settings.append(Setting(str(key).removeprefix("override /"), "choice", _written(value), ""))
    for key, value in leaves(content):
        settings.append(Setting(key, "", _written(value), ""))
    return Explanation(f"{group}={choice}", _comment(group, choice), settings)


def _explain_run(base: Mapping[str, Any], name: str) -> Explanation:
    """Describe a setting without a group, such as ``seed``."""
    from common.settings import RunSettings

    hints = get_type_hints(RunSettings, include_extras=True)
    setting = Setting(name, type_text(hints[name]), _written(base[name]), meanings(RunSettings).get(name, ""))
    return Explanation("a run", "", [setting])


def _class_of_group(group: str, node: Mapping[str, Any]) -> type | None:
    """Return the class that a group's settings are checked by; ``None`` if an engine reads them itself."""
    from common.round_settings import RoundSettings, TrainSettings

    if group == "train":
        return TrainSettings
    if group == "rounds":
        return RoundSettings
    if "_target_" in node:
        return class_of(node["_target_"], group)
    return None


def _settings(
    target: type, node: Mapping[str, Any], prefix: str, published: Mapping[str, Mapping[str, Any]]
) -> Iterator[Setting]:
    """Yield the settings in ``node``, which ``target`` checks, and those of the objects below it."""
    hints = get_type_hints(target, include_extras=True)
    texts = meanings(target)
    searched = search_ranges(target)
    for name, value in node.items():
        key = f"{prefix}.{name}"
        if name == "_target_":
            continue
        below = _class_below(hints.get(name), value, key)
        if below is not None:
            yield from _settings(below, value, key, published)
            continue
        search = ""
        if name in searched:
            search = f"{searched[name].low:g} to {searched[name].high:g}"
        values: dict[str, str] = {}
        for data, printed in published.items():
            if key in printed:
                values[data] = _written(printed[key])
        yield Setting(key, type_text(hints.get(name, Any)), _written(value), texts.get(name, ""), search, values)


def _class_below(hint: Any, value: object, key: str) -> type | None:
    """Return the class of a nested object; ``None`` for a plain value."""
    if not isinstance(value, Mapping):
        return None
    options = (hint, *get_args(hint))
    if any(hasattr(option, "from_config") for option in options):
        return None  # it takes an object of any class, such as a transform
    if "_target_" in value:
        return class_of(value["_target_"], key)
    for option in options:
        if inspect.isclass(option) and is_pydantic_dataclass(option):
            return option
    return None


def type_text(hint: Any) -> str:
    """Return a type and its range as text, such as ``number > 0`` or ``mean, sum``.

    >>> type_text(Literal["mean", "sum"])
    'mean or sum'
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return type_text(arguments[0]) + "".join(_limits(arguments[1:]))
    if origin is Literal:
        return " or ".join(map(_written, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(map(type_text, arguments))
    if origin in (list, tuple):
        return f"list of: {type_text(arguments[0])}"
    if origin is not None and issubclass(origin, Mapping):
        return f"names with: {type_text(arguments[1])}"
    if inspect.isclass(hint) and is_pydantic_dataclass(hint):
        return f"an object of {hint.__name__}"
    return NAMES_OF_TYPES.get(hint, getattr(hint, "__name__", str(hint)))


def _limits(marks: Sequence[Any]) -> Iterator[str]:
    for mark in marks:
        limits = [mark]
        if isinstance(mark, FieldInfo):
            limits = list(mark.metadata)
        for limit in limits:
            name = type(limit).__name__
            if name in SYMBOLS:
                yield f", {SYMBOLS[name]} {getattr(limit, name.lower())}"


def meanings(target: type) -> dict[str, str]:
    """Return the text on each field from the sections ``Args`` and ``Attributes`` of a class and of its bases.

    The class's own text wins over that of a base.
    """
    texts: dict[str, str] = {}
    for each in reversed(target.__mro__):
        texts |= _fields_in(each.__doc__ or "")
    return texts


def _fields_in(docstring: str) -> dict[str, str]:
    texts: dict[str, str] = {}
    section = re.search(r"^(?:Args|Attributes):\n((?:[ ]+.*\n?|\n)*)", inspect.cleandoc(docstring), re.MULTILINE)
    if section is None:
        return texts
    for entry in re.split(r"^    (?=\w)", section[1], flags=re.MULTILINE):
        names, colon, text = entry.partition(":")
        if not colon:
            continue
        for name in names.split(","):
            texts[name.strip()] = plain(text)
    return texts


def plain(text: str) -> str:
    """Return a docstring's text in one line, without its markup."""
    without_roles = re.sub(r":\w+:`~?([^`]+)`", r"\1", text)
    return " ".join(re.sub(r"``None``", "null", without_roles).replace("``", "").split())


def _description(target: type) -> str:
    """Return the docstring of a class without its sections."""
    text = inspect.cleandoc(target.__doc__ or "")
    before = re.split(r"^(?:Args|Attributes|Raises|Payload):", text, maxsplit=1, flags=re.MULTILINE)[0]
    return "\n\n".join(plain(part) for part in before.split("\n\n") if part.strip())


def _comment(group: str, choice: str) -> str:
    """Return the comment that a choice's file begins with."""
    path = choices_of(group).get(choice)
    if path is None:
        return ""
    lines: list[str] = []
    for line in read_small(path).splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            lines.append(line.removeprefix("#").removeprefix(" "))
    return "\n".join(lines)


def _written(value: Any) -> str:
    """Return a value as it is written in an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_written, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_written(item)}" for key, item in value.items()) + "}"
    return str(value)
