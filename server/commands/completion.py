"""Completion of settings and their values, and of the names that ``list``, ``explain`` and ``figure`` take.

The shell waits for every call, so nothing here imports torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from common.choices import CONF, choices_of
from common.errors import GoldfinchError

CLASSES = {"train": "common.settings.TrainSettings", "rounds": "common.settings.RoundSettings"}
"""The classes of the groups with files that name none."""


def overrides_for(ctx: click.Context, incomplete: str) -> list[str]:
    """Return the continuations of an override.

    Bash splits ``method=fpl`` into three words and completes the last; the other shells complete the whole.

    Args:
        ctx: the command's context, with the words before.
        incomplete: the word to complete.
    """
    before: list[str] = []
    for value in ctx.params.values():
        if isinstance(value, list | tuple):
            before += [str(word) for word in value]
    if before and before[-1] == "=":
        return _values(before[-2], incomplete, before[:-2])
    if before and not incomplete and "=" not in whole_words(before)[-1]:  # click takes "=" for an empty word
        return _values(before[-1], "", before[:-1])
    key, equals, value = incomplete.partition("=")
    if equals:
        return [f"{key}={found}" for found in _values(key, value, before)]
    keys = [found for found in _keys(before) if found.startswith(incomplete)]
    if len(keys) == 1:
        values = _values(keys[0], "", before)
        return [f"{keys[0]}={found}" for found in values]
    return [f"{key}=" for key in keys]


def names_for(incomplete: str) -> list[str]:
    """Return the groups and ``group.choice`` that begin with ``incomplete``, for ``goldfinch explain``."""
    found = [f"{group}.{choice}" for group in groups() for choice in choices_of(group)]
    methods = choices_of("method")
    return [name for name in (*groups(), *methods, *found) if name.startswith(incomplete)]


def groups_for(incomplete: str) -> list[str]:
    """Return the groups that begin with ``incomplete``, for ``goldfinch list``."""
    return [group for group in [*groups(), "alterations"] if group.startswith(incomplete)]


def groups() -> list[str]:
    """Return the groups of ``conf/``, sorted."""
    return sorted(path.name for path in CONF.iterdir() if path.is_dir())


def whole_words(words: Sequence[str]) -> list[str]:
    """Return overrides as they were typed, from words that bash has split at ``=``.

    >>> whole_words(["method", "=", "fpl", "seed=0"])
    ['method=fpl', 'seed=0']
    """
    found: list[str] = []
    joined = False
    for word in words:
        if found and (joined or word == "="):
            found[-1] += word
        else:
            found.append(word)
        joined = word == "="
    return found


def _composed(before: Sequence[str]) -> Mapping[str, Any]:
    """Return the configuration with the chosen groups; the default one if the overrides cannot be composed."""
    from common.config import compose_config

    chosen: list[str] = []
    for word in whole_words(before):
        key, _, value = word.partition("=")
        if value in choices_of(key):
            chosen.append(word)
    try:
        return compose_config(chosen)
    except GoldfinchError:
        return compose_config(())


def _keys(before: Sequence[str]) -> list[str]:
    composed = _composed(before)
    keys = ["experiment", "tuned", "printed", *composed["choices"]]
    for name, value in composed.items():
        if name != "choices":
            keys += _leaves(name, value)
    return sorted(set(keys))


def _leaves(name: str, value: Any) -> Iterable[str]:
    if not isinstance(value, Mapping):
        return [name]
    found: list[str] = []
    for key, item in value.items():
        if key != "_target_":
            found += _leaves(f"{name}.{key}", item)
    return found


def _values(key: str, incomplete: str, before: Sequence[str]) -> list[str]:
    """Return the values of a setting that begin with ``incomplete``; its default if any value is possible."""
    found = list(choices_of(key))
    if not found:
        found = _values_of_setting(key, _composed(before))
    return [value for value in found if value.startswith(incomplete)]


def _values_of_setting(key: str, composed: Mapping[str, Any]) -> list[str]:
    if key == "printed":
        return ["true", "false"]
    node: Any = composed
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return []
        node = node[part]
    if isinstance(node, bool):
        return ["true", "false"]
    group, _, name = key.partition(".")
    target = CLASSES.get(group)
    if target is None and isinstance(composed[group], Mapping):
        target = composed[group].get("_target_")
    choices = literals(str(target)).get(name)
    if choices:
        return choices
    if node is None:
        return ["null"]
    if isinstance(node, str | int | float):
        return [str(node)]
    return []


def literals(target: str) -> dict[str, list[str]]:
    """Return the fields of a class that are ``Literal``, with their values, from its source.

    Args:
        target: the class, ``module.Class``, of Goldfinch.
    """
    module, _, name = target.rpartition(".")
    path = CONF.parent.joinpath(*module.split(".")).with_suffix(".py")
    found: dict[str, list[str]] = {}
    if not path.is_file():
        return found
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    found[field.target.id] = _literal_values(field.annotation)
    return found


def _literal_values(annotation: ast.expr) -> list[str]:
    values: list[str] = []
    for node in ast.walk(annotation):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
            for item in ast.walk(node.slice):
                if isinstance(item, ast.Constant):
                    values.append(str(item.value))
    return values
