"""Checked, frozen dataclasses: built from a configuration and written back; errors name the nearest valid choice."""

import dataclasses
import difflib
import dis
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Set
from functools import cache, cached_property, wraps
from itertools import repeat
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    SupportsFloat,
    SupportsIndex,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import pydantic
from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import is_pydantic_dataclass

from common.choices import trusted
from common.errors import PARTS, ConfigError, nearest
from common.text import warn_once

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
Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""What the integer columns of tables and databases hold."""
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
    ranges: dict[str, Search] = {}
    for name, hint in get_type_hints(target, include_extras=True).items():
        for mark in getattr(hint, "__metadata__", ()):
            if isinstance(mark, Search):
                ranges.setdefault(name, mark)
    return ranges


def _distinct(values: tuple[str, ...]) -> tuple[str, ...]:
    check(len(set(values)) == len(values), f"a name is repeated: {list(values)}")
    return values


Names = Annotated[tuple[str, ...], AfterValidator(_distinct)]
"""Names without repetition."""


def _named(value: str) -> str:
    check(value != "", "must name a folder; an empty text would be the present one, which is written as .")
    return value


FolderName = Annotated[str, AfterValidator(_named)]
"""A folder, in words."""


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def checked(target: type[T]) -> type[T]:
    """Return ``target`` as a frozen dataclass that checks its values by the types of its fields; a decorator.

    Values are not converted, except an int to a float: 1.5 is no int, "yes" and 1 are no bool, True is no int.
    Infinite numbers and NaN are refused. Ranges are part of a type, such as :data:`Positive`. Conditions on several
    fields are checked in ``__post_init__``, which raises ``ValueError`` (:func:`check`). A warning names what is spelt
    almost like something of a base that ``target`` does not override.

    What a class of the user's own overrides must be as Goldfinch's base declares it: values now, what functions return
    whenever they return (:func:`returned`).

    Raises:
        TypeError: ``target`` overrides something by what is not as the base declares it.
        ValueError: an object is constructed with a value of another type or out of range (pydantic's
            ``ValidationError``).
    """
    if target.__module__.partition(".")[0] not in PARTS:  # Goldfinch's own are checked by mypy
        _hold_to_declarations(target)
    _say_misspelt(target)
    config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True, validate_default=True
    )
    return typing.cast("type[T]", pydantic.dataclasses.dataclass(target, frozen=True, config=config))


def _hold_to_declarations(target: type) -> None:
    """Check what a class overrides against the declarations of Goldfinch's bases, and make its functions check it."""
    annotations, members = inspect.get_annotations(target), dict(vars(target))
    for name in {**annotations, **members}:
        declared = _declaration(target, name)
        if declared is None or name.startswith("__"):
            continue
        base, replaced, hint = declared
        where, own = f"{target.__name__}.{name}", members.get(name)
        if inspect.isfunction(replaced):
            if isinstance(own, property | cached_property):
                raise TypeError(f"{where} is a property, and a function of {base.__name__}: leave out @property")
            if inspect.isfunction(own):
                _check_function(own, replaced, where, base)
                setattr(target, name, _returning(own, hint, f"{where}()"))
        elif inspect.isfunction(own):
            raise TypeError(f"{where} is a function, and a property of {base.__name__}: write @property above it")
        elif isinstance(own, property):
            setattr(target, name, own.getter(_returning(typing.cast("Any", own.fget), hint, where)))
        elif isinstance(own, cached_property):
            own.func = _returning(own.func, hint, where)
        elif name in annotations and "ClassVar" not in str(annotations[name]):
            if not isinstance(replaced, property | cached_property):
                raise TypeError(f"{where} is a field, and no setting of {base.__name__}: write {name}: ClassVar[...]")
        elif wrong := _misfit(own, hint, where):
            raise TypeError(wrong)


def _declaration(target: type, name: str) -> tuple[type, object, Any] | None:
    """Return Goldfinch's base of ``target`` that declares ``name``, what it has there, and the type of it."""
    for base in target.__mro__[1:]:
        if base.__module__.partition(".")[0] not in PARTS:
            continue
        replaced, hint = vars(base).get(name), _hints_of(base).get(name)
        if get_origin(hint) is ClassVar:
            return base, replaced, get_args(hint)[0]
        function = getattr(replaced, "fget", None) or getattr(replaced, "func", replaced)
        if inspect.isfunction(function):
            return base, replaced, _hints_of(function).get("return", Any)
    return None


@cache
def _hints_of(owner: Any) -> dict[str, Any]:
    try:
        return get_type_hints(owner)
    except NameError:  # a name that only type checkers import
        return {}


def _check_function(own: types.FunctionType, replaced: types.FunctionType, where: str, base: type) -> None:
    """Refuse a function that cannot be called like the one in whose place it is, or that returns nothing instead."""
    parameters = inspect.signature(replaced).parameters.values()
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    try:
        inspect.signature(own).bind(*names)
    except TypeError as error:
        raise TypeError(f"{where}: {error}; that of {base.__name__} has ({', '.join(names)})") from error
    if "None" not in str(replaced.__annotations__.get("return")) and _no_value(own):
        raise TypeError(f"{where} returns nothing, and that of {base.__name__} returns a value: add return")


def _returning(function: Callable[..., Any], hint: Any, where: str) -> Callable[..., Any]:
    """Return ``function``, which then checks what it returns."""
    if hint in (Any, types.NoneType):
        return function

    @wraps(function)
    def checking(*given: Any, **named: Any) -> Any:
        return returned(function(*given, **named), hint, where)

    return checking


LIKE = 0.8
"""How alike two names are, as ``difflib`` measures it, where one is probably the other misspelt."""


def _say_misspelt(target: type) -> None:
    """Warn of what is spelt almost like something that the bases have and ``target`` does not override."""
    fields = inspect.get_annotations(target).keys()
    own = {name for name in vars(target).keys() - fields if not name.startswith("_")}
    inherited: set[str] = set()
    for base in target.__mro__[1:-1]:
        inherited |= vars(base).keys()
    for name in sorted(own - inherited):
        close = difflib.get_close_matches(name, inherited - own, n=1, cutoff=LIKE)
        if close:
            warn_once(
                f"{target.__module__}.{target.__name__}.{name} overrides nothing; did you mean {close[0]}? If not, "
                "another name ends this warning"
            )


def _no_value(function: types.FunctionType) -> bool:
    """Return whether a function returns ``None`` wherever it returns; one that only raises does not."""
    values: list[object] = []
    last: object = function
    for instruction in dis.get_instructions(function):
        if instruction.opname == "RETURN_CONST":
            values.append(instruction.argval)
        elif instruction.opname == "RETURN_VALUE":
            values.append(last)
        last = instruction.argval if instruction.opname == "LOAD_CONST" else function
    return bool(values) and all(value is None for value in values) and not inspect.isgeneratorfunction(function)


def check(condition: bool, message: str) -> None:
    """Raise ``ValueError(message)`` unless ``condition`` holds; for conditions on fields, in ``__post_init__``."""
    if not condition:
        raise ValueError(message)


def returned(value: Any, hint: Any, where: str) -> Any:
    """Return ``value``, of a class that may be the user's own, if it is of a type.

    Args:
        value: what a function returned.
        hint: the type that the function declares.
        where: the function, for the message.

    Raises:
        ConfigError: it is of another type, or a part of it is.
    """
    if wrong := _misfit(value, hint, where):
        raise ConfigError(wrong)
    return value


ALIKE: Mapping[Any, type] = {int: SupportsIndex, float: SupportsFloat, dict: Mapping, set: Set, frozenset: Set}
"""What is taken for a type besides: numbers of NumPy and PyTorch, and other mappings and sets."""


def _misfit(value: object, hint: Any, where: str) -> str:
    """Return what of a value is not of its declared type, and what it must be; empty if all of it fits."""
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        return _misfit(value, arguments[0], where)
    if kind in (Union, types.UnionType):
        fits = any(not _misfit(value, each, where) for each in arguments)
    elif kind is Literal:
        fits = isinstance(value, str | int) and value in arguments
    elif kind is tuple and arguments[1:] != (...,):
        fits = isinstance(value, tuple) and len(value) == len(arguments)
    else:
        fits = kind is Any or not isinstance(kind, type) or isinstance(value, ALIKE.get(kind, kind))
    if fits:
        wrong = (_misfit(part, its, where + place) for place, part, its in _parts(value, kind, arguments))
        return next(filter(None, wrong), "")
    found = f"a {type(value).__name__}"
    if value is None or isinstance(value, str | int | float):
        found = repr(value)[:100]
    if kind is Literal:
        return f"{where} is {found}; {nearest(str(value), arguments)}"
    remedy = ""
    if arguments[1:] == (...,) and not _misfit(value, arguments[0], where):
        remedy = "; a tuple of one is written (it,)"
    wanted = re.sub(r"\w[\w.]*\.(?=\w)", "", inspect.formatannotation(hint))
    return f"{where} is {found}, and must be {wanted}{remedy}"


def _parts(value: Any, kind: object, arguments: tuple[Any, ...]) -> Iterator[tuple[str, object, Any]]:
    """Yield the parts of a value that its type says something of: the place of each, the part, and its type."""
    if kind is tuple:
        theirs = repeat(arguments[0]) if arguments[1:] == (...,) else arguments
        for index, (part, its) in enumerate(zip(value, theirs, strict=False)):
            yield f"[{index}]", part, its
    elif isinstance(kind, type) and issubclass(kind, Mapping) and arguments:
        for key, part in value.items():
            yield f": the key {key!r}", key, arguments[0]
            yield f"[{key!r}]", part, arguments[1]
    elif isinstance(kind, type) and issubclass(kind, Set) and arguments:
        for part in value:
            yield "{...}", part, arguments[0]
    elif isinstance(kind, type) and dataclasses.is_dataclass(kind) and not is_pydantic_dataclass(kind):
        for each in dataclasses.fields(kind):
            if each.init:
                yield f".{each.name}", getattr(value, each.name), _hints_of(kind).get(each.name, Any)


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
    hints, defaults = get_type_hints(target), _defaults_of(target)
    values: dict[str, Any] = {}
    for name, value in node.items():
        key = str(name)
        if key != "_target_":
            values[key] = _given(defaults.get(key), value, hints.get(key), f"{where}.{key}")
    return construct(target, values, where)


def _given(default: object, value: Any, hint: Any, where: str) -> Any:
    """Return a field's value; of an object that is the field's default, ``value`` may give some fields alone."""
    if not dataclasses.is_dataclass(default) or isinstance(default, type):
        return _convert(value, hint, where)
    if not isinstance(value, Mapping) or "_target_" in value:
        return _convert(value, hint, where)
    kind = type(default)
    hints = get_type_hints(kind)
    values: dict[str, Any] = {each.name: getattr(default, each.name) for each in dataclasses.fields(kind) if each.init}
    for name, item in value.items():
        key = str(name)
        values[key] = _given(values.get(key), item, hints.get(key), f"{where}.{key}")
    return construct(kind, values, where)


def _defaults_of(target: type) -> dict[str, Any]:
    """Return the defaults of a class's fields, of those that have one."""
    defaults: dict[str, Any] = {}
    if not dataclasses.is_dataclass(target):
        return defaults
    for each in dataclasses.fields(target):
        if each.init and each.default is not dataclasses.MISSING:
            defaults[each.name] = each.default
        elif each.init and each.default_factory is not dataclasses.MISSING:
            defaults[each.name] = each.default_factory()
    return defaults


def construct(target: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Return ``target(**values)``; a ``ConfigError`` names every mistake below the key ``where``."""
    if inspect.isabstract(target):
        lacking = ", ".join(sorted(vars(target)["__abstractmethods__"]))
        raise ConfigError(f"{where}: {target.__name__} does not define {lacking}; add it, or correct its spelling")
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
    if hasattr(value, "as_config"):
        return value.as_config()
    if dataclasses.is_dataclass(value):
        kind = type(value)
        hints = get_type_hints(kind)
        node: dict[str, Any] = {}
        if kind is not hint and kind not in get_args(hint):
            node["_target_"] = f"{kind.__module__}.{kind.__qualname__}"
        for each in dataclasses.fields(value):
            if each.init:
                node[each.name] = to_config(getattr(value, each.name), hints[each.name])
        return node
    if isinstance(value, Mapping):
        return {key: to_config(item, hint) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_config(item, hint) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def with_defaults(node: Mapping[str, Any], where: str, target: type | None = None) -> dict[str, Any]:
    """Return the settings in ``node`` and, for every other field of their class, its default, as plain containers.

    Of an object that is a field's default, ``node`` may give some fields alone. An object that ``node`` gives with a
    ``_target_`` stays as it is. Defaults that are not :func:`plain <is_plain>` are left out.

    Args:
        node: values by the names of the class's fields.
        where: the key of ``node`` in the configuration, for messages.
        target: the class; by default the one that ``_target_`` of ``node`` names.

    Raises:
        ConfigError: the class cannot be imported.
    """
    named: dict[str, Any] = {}
    if target is None:
        named["_target_"] = node.get("_target_")
        target = class_of(named["_target_"], where)
    return {**named, **_over(_defaults_of(target), node, target)}


def _over(defaults: Mapping[str, Any], node: Mapping[str, Any], target: type) -> dict[str, Any]:
    """Return the values in ``node``, and the fields of ``target`` in ``defaults`` that it lacks as plain containers."""
    hints = get_type_hints(target)
    values: dict[str, Any] = {}
    for name, default in defaults.items():
        if name not in node:
            plain = to_config(default, hints[name])
            if is_plain(plain):
                values[name] = plain
            continue
        given = node[name]
        if dataclasses.is_dataclass(default) and isinstance(given, Mapping) and "_target_" not in given:
            parts = {each.name: getattr(default, each.name) for each in dataclasses.fields(default) if each.init}
            given = _over(parts, given, type(default))
        values[name] = given
    return {**values, **{name: given for name, given in node.items() if name not in values}}


def is_plain(value: Any) -> bool:
    """Return whether YAML can express ``value`` and it names no class, so that a configuration may hold it unasked."""
    if isinstance(value, Mapping):
        return "_target_" not in value and all(map(is_plain, value.values()))
    if isinstance(value, list):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


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
            if "_target_" in value and hasattr(option, "from_config"):
                return option.from_config(value, where)
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
    errors = error.errors(include_url=False)[:MAX_MISTAKES]
    return "; ".join(_mistake(dict(each), target, where) for each in errors)


def _mistake(mistake: dict[str, Any], target: type, where: str) -> str:
    place, kind, value, reason = mistake["loc"], mistake["type"], mistake["input"], mistake["msg"]
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
            known = [field.name for field in dataclasses.fields(target) if field.init]
        return f"{key}: no such key; {nearest(str(place[-1]), known)}"
    if kind == "missing":
        return f"{key}: a value is missing"
    if kind == "value_error":
        return f"{key}: {mistake['ctx']['error']}".removeprefix(": ")
    if kind == "string_type" and isinstance(value, int | float):
        return f"{key}={value!r}: must be text; write it in quotes: '\"{value}\"'"
    if kind in ("tuple_type", "list_type") and isinstance(value, str):
        return f"{key}={value}: must be a list: {key}=[{value}]"
    if kind == "literal_error":
        reason = nearest(str(value), re.findall(r"[^\s',]+(?='|$)", mistake["ctx"]["expected"]))
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


def _module(name: str, path: str, where: str) -> types.ModuleType:
    """Import the module ``name`` for the dotted name ``path``."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{where}: cannot import {path}: {error}; {_import_advice(name, error)}") from error
    except Exception as error:
        raise ConfigError(
            f"{where}: cannot import {path}: {type(error).__name__}: {error}{_place_in(name, error)}; correct it there"
        ) from error


def _place_in(module_name: str, error: Exception) -> str:
    """Return the last line of the module's own package that an error passed; empty if there is none."""
    spec = importlib.util.find_spec(module_name.partition(".")[0])
    if isinstance(error, SyntaxError) or spec is None:  # its text has the line
        return ""
    places = tuple(spec.submodule_search_locations or [str(spec.origin)])
    frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename.startswith(places)]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def imported(path: object, where: str, fits: Callable[[object], bool], kind: str = "object") -> object:
    """Import the object of a dotted name.

    Args:
        path: the name, ``module.NAME``.
        where: the key that it is imported for.
        fits: whether an object of the module may be meant, for the message if there is none of this name.
        kind: what messages call such an object.

    Raises:
        ConfigError: the name is not one that may be imported for this key, or there is no such object.
    """
    if not isinstance(path, str) or "." not in path:
        raise ConfigError(f"{where}: the name of a class must be written module.Class; got {path!r}")
    if not trusted(path, where):
        raise ConfigError(
            f"{where}: {path} is not one of Goldfinch's own, and imported only if you name it: by --config-dir with "
            f"the folder whose file does, by an entry point of its package, or for a run by {where}._target_={path} "
            f"(in Python import {path.rpartition('.')[0]} before)"
        )
    module_name, _, name = path.rpartition(".")
    module = _module(module_name, path, where)
    target: object = getattr(module, name, None)
    if target is None and hasattr(module, "__path__") and importlib.util.find_spec(path) is not None:
        target = _module(path, path, where)
    if isinstance(target, types.ModuleType):
        names = [each for each in vars(target) if fits(getattr(target, each))]
        raise ConfigError(f"{where}: {path} is a module; add the name of its {kind}: {path}.NAME; {nearest('', names)}")
    if target is None:
        names = [each for each in vars(module) if fits(getattr(module, each))]
        place = module.__file__ or ", ".join(module.__path__)
        raise ConfigError(f"{where}: {module_name} ({place}) has no {kind} {name}; {nearest(name, names)}")
    return target


def class_of(path: object, where: str) -> type:
    """Import the :func:`checked` class of a dotted name. One that this process has imported already is taken as it is.

    Args:
        path: the name, ``module.Class``.
        where: the key that it is imported for.

    Raises:
        ConfigError: the name is not one that may be imported for this key, or is no checked class.
    """
    module_name, _, name = str(path).rpartition(".")
    loaded = getattr(sys.modules.get(module_name), name, None)
    if isinstance(loaded, type) and is_pydantic_dataclass(loaded) and module_name.partition(".")[0] not in PARTS:
        return loaded
    target = imported(path, where, lambda each: is_pydantic_dataclass(typing.cast("type", each)), "class")
    if not is_pydantic_dataclass(typing.cast("type", target)):
        raise ConfigError(f"{where}: {path} is not a checked dataclass; decorate it with common.config.checked")
    return typing.cast("type", target)
