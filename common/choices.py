"""What can be chosen: the folders that hold the files of every group, and the classes that may be imported for them."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from common.errors import ConfigError

CONF = Path(__file__).resolve().parent.parent / "conf"

FOLDERS = [CONF]
"""Where the choices of the groups are; :func:`search` adds to it."""

_SAID: set[str] = set()
"""What the user of this process has named to be imported, besides what the files of :data:`FOLDERS` name."""


def search(folder: Path) -> None:
    """Look for choices in ``folder`` too, which is laid out as ``conf/``; its user trusts the classes that it names.

    Raises:
        ConfigError: it is not there, holds no choice of any group, or one whose name is taken.
    """
    if folder.resolve() in FOLDERS:
        return
    found = {path.name: choices_of(path.name, [folder]) for path in CONF.iterdir() if path.is_dir()}
    if not any(found.values()):
        raise ConfigError(f"--config-dir {folder}: it has no file such as method/NAME.yaml; see conf/ for the groups")
    for group, choices in found.items():
        for name in choices.keys() & choices_of(group).keys():
            raise ConfigError(f"{choices[name]}: there is a {group}={name} already; choose another name")
    FOLDERS.append(folder.resolve())
    _named_in.cache_clear()


def choices_of(group: str, folders: Sequence[Path] | None = None) -> dict[str, Path]:
    """The file of each choice of a group in ``folders``, by default :data:`FOLDERS`; none if there is no such group."""
    places = [folder / group for folder in (FOLDERS if folders is None else folders)] if group.isidentifier() else []
    return {path.stem: path for place in places for path in sorted(place.glob("*.yaml"))}


def trust(names: Iterable[str]) -> None:
    """Let these dotted names be imported in this process: its user has named them, not a file from elsewhere."""
    _SAID.update(names)


def trusted(name: object, where: str) -> bool:
    """Whether the dotted ``name`` may be imported for the key ``where``.

    That is what the files of its group name, below a group's own keys data sets too (a method's public images), and
    what the user has named: :func:`trust`.
    """
    group, _, deeper = where.partition(".")
    known = _named_in(group, "") | _named_in("data") if deeper else _named_in(group)
    return isinstance(name, str) and (name in _SAID or name in known)


@lru_cache
def _named_in(group: str, start: str = "^") -> frozenset[str]:
    """What the files of a group name to be imported: at the beginning of a line, or anywhere if ``start`` is empty."""
    pattern = start + r"\b(?:_target_|device): (\w+(?:\.\w+)+)"
    texts = [path.read_text() for path in choices_of(group).values()]
    return frozenset(name for text in texts for name in re.findall(pattern, text, re.MULTILINE))


def imports_of(node: object, where: str = "") -> Iterator[tuple[str, object]]:
    """What a configuration has imported: each dotted name, with the key that it is for."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key == "_target_" or (where, key) == ("engine", "device"):
                yield where, value
            else:
                yield from imports_of(value, f"{where}.{key}".removeprefix("."))
    elif isinstance(node, list | tuple):
        for item in node:
            yield from imports_of(item, where)
