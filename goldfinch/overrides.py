"""The keyword arguments of :func:`goldfinch.run` and its like, and the overrides that they become.

A keyword is written once: as a field of the classes here, with its type. Type checkers and editors read the fields by
``Unpack``, ``help()`` and notebooks by :func:`with_signature`, and :data:`SETTINGS` is made of them.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, TypedDict, TypeVar, get_type_hints

from common.errors import ConfigError, nearest
from common.overrides import SHORT, quoted_override

Option = str | type | None
"""The name of an option of a group of ``conf/``, or a class of your own; ``None`` is as if it were not given."""

Place = str | Path | None

Options = str | type | Sequence[str | type] | None
Places = str | Path | Sequence[str | Path] | None
"""One for all runs of a sweep, or several."""


class SharedKeywords(TypedDict, total=False):
    """The settings that all runs of a comparison may share."""

    data: Option
    protocol: Option
    model: Option
    engine: Option
    aggregation: Option
    privacy: Option
    views: Option
    experiment: str | None
    tracker: Option
    attack: Option
    own_metric: Option
    tuned: Place
    resume: bool | None
    overwrite: bool | None
    rounds: int | None
    epochs: int | None
    batch_size: int | None
    learning_rate: float | None
    device: str | None


class RunKeywords(SharedKeywords, total=False):
    """The settings of one run."""

    method: Option
    seed: int | None
    output: Place


class SweepKeywords(TypedDict, total=False):
    """The settings of a sweep: one value for all runs, or several with a run for each."""

    method: Options
    data: Options
    protocol: Options
    model: Options
    engine: Option
    aggregation: Options
    privacy: Options
    views: Options
    experiment: str | Sequence[str] | None
    tracker: Option
    attack: Options
    own_metric: Option
    tuned: Places
    seed: int | Sequence[int] | None
    overwrite: bool | None
    rounds: int | Sequence[int] | None
    epochs: int | Sequence[int] | None
    batch_size: int | Sequence[int] | None
    learning_rate: float | Sequence[float] | None
    device: str | None


SETTINGS = {name: SHORT.get(name, name) for name in get_type_hints(RunKeywords)}
"""Keyword arguments, and the settings of ``conf/`` that they stand for."""

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def with_signature(keywords: type) -> Callable[[Decorated], Decorated]:
    """Return a decorator that names the keywords in a function's signature, where Python itself has ``**keywords``.

    Args:
        keywords: the ``TypedDict`` of the keywords.
    """

    def decorate(function: Decorated) -> Decorated:
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())[:-1]
        for name, hint in get_type_hints(keywords).items():
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint))
        named: Any = function
        named.__signature__ = signature.replace(parameters=parameters)
        return function

    return decorate


WORD = re.compile(r"[A-Za-z_][\w.-]*")
OTHER_WORDS = frozenset({"true", "false", "null", "nan", "inf"})
"""Words that Hydra does not read as strings."""


def overrides_of(
    settings: Mapping[str, Any] | None, keywords: Mapping[str, Any], given: Sequence[str] = (), *, sweep: bool = False
) -> list[str]:
    """Return an override for each keyword argument that is not ``None`` and each entry of ``settings``, then ``given``.

    Args:
        settings: values by the key that ``goldfinch run`` takes, such as ``{"method.temperature": 0.05}``.
        keywords: values by the names of :data:`SETTINGS`.
        given: overrides as texts.
        sweep: whether a list or range means one run for each of its values; otherwise it is one value.

    Raises:
        ConfigError: a keyword is unknown; the message names the nearest one. Or an argument is of another type.
    """
    if not isinstance(settings or {}, Mapping):
        raise ConfigError(f"settings={settings!r}: expected a dictionary, such as settings={{'train.rounds': 5}}")
    for item in given:
        if not isinstance(item, str):
            raise ConfigError(f"{item!r}: expected a text such as 'train.rounds=5'; a dictionary is settings={{...}}")
    values: dict[str, Any] = {}
    for name, value in keywords.items():
        if name not in SETTINGS:
            remedy = nearest(name, list(SETTINGS))
            raise ConfigError(f"unknown argument {name!r}: {remedy}; other settings go into settings={{'key': value}}")
        if value is not None:
            values[SETTINGS[name]] = value
    values.update(settings or {})
    overrides: list[str] = []
    for key, value in values.items():
        plain = value.tolist() if hasattr(value, "tolist") else value  # of NumPy, pandas and PyTorch
        if sweep and isinstance(plain, Sequence) and not isinstance(plain, str):
            overrides.append(f"{key}={','.join(map(_literal, plain))}")
        else:
            overrides.append(f"{key}={_literal(plain)}")
    return [*overrides, *given]


def _literal(value: Any) -> str:
    """Return a value in the grammar of Hydra's overrides; a string is quoted if Hydra could read it as another type.

    Raises:
        ConfigError: the value is of a type that no setting has, such as a set.
    """
    if isinstance(value, str) and WORD.fullmatch(value) and value.lower() not in OTHER_WORDS:
        return value
    if isinstance(value, type):
        return dotted_name(value)
    if isinstance(value, str | Path):
        return quoted_override("", value).removeprefix("=")
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, Sequence):
        return f"[{','.join(map(_literal, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_literal(item)}' for key, item in value.items())}}}"
    if not isinstance(value, Real):
        kind = type(value).__name__
        raise ConfigError(f"{value!r}: expected a text, a number, True or False, a list or a dictionary, not a {kind}")
    return str(value)


def check_jobs(jobs: object) -> None:
    """Refuse a number of processes that is no whole number, 1 or more, as ``--jobs`` does.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(jobs, int) or jobs < 1:
        raise ConfigError(f"jobs={jobs!r}: expected a whole number, 1 or more")


def dotted_name(target: type) -> str:
    """Return the name by which a class is imported.

    Raises:
        ConfigError: it is defined inside a function, so that no name finds it.
    """
    if "<locals>" in target.__qualname__:
        raise ConfigError(
            f"{target.__qualname__} is defined inside a function, and is found by no name: define it at the top of a "
            "module or of a notebook's cell"
        )
    return f"{target.__module__}.{target.__qualname__}"


def check_reachable(values: Mapping[str, object], processes: str) -> None:
    """Check that other processes can import the classes that settings name.

    Args:
        values: the settings by key; several values of a sweep are one text.
        processes: whose they are, such as ``engine=ray``.

    Raises:
        ConfigError: a class of a notebook or of the program itself, which only this process has.
    """
    for key, value in values.items():
        found = re.search(r"(?:^|[\[, '\"])__main__\.(\w+)", str(value))
        if found:
            raise ConfigError(
                f"{key.removesuffix('._target_')}: {found[1]} is defined in the notebook or program that calls, and "
                f"the processes of {processes} cannot import it: put it into a module of an installed package, or run "
                "it by goldfinch.run with engine=inline"
            )
