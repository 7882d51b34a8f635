"""What can be chosen: the folders with the files of every group, and the classes that a configuration may import."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path

import yaml

from common.errors import ConfigError
from common.regular_files import read_small

CONF = Path(__file__).resolve().parent.parent / "conf"

FOLDERS = [CONF]
"""Folders with the choices of the groups. :func:`search` adds to it."""

ALLOWED: dict[str, tuple[str, ...]] = {
    "aggregation": ("strategies.core",),
    "attack": ("strategies.core.attacks",),
    "data": ("common.data", "torchvision.transforms.v2"),
    "engine": ("client.local.local_device",),
    "method": ("strategies",),
    "model": ("common.models",),
    "own_metric": ("common.own_metric",),
    "privacy": ("common.privacy",),
    "protocol": ("common.data.protocols",),
    "tracker": ("goldfinch.trackers", "server.run.trackers"),
    "views": ("common.data.views",),
}
"""Goldfinch's packages and modules that a configuration may import from, by group."""

ENTRY_POINTS = "goldfinch"
"""The group of entry points with which an installed package declares its modules and classes."""

_OWN_NAMES: set[str] = set()
"""Dotted names the user of this process allowed, besides those in the files of :data:`FOLDERS`."""


def search(folder: Path) -> None:
    """Add ``folder``, laid out as ``conf/``, to the folders with choices, and allow the classes that its files name.

    Raises:
        ConfigError: the folder does not exist, holds no choice of any group, or one that exists already.
    """
    if folder.resolve() in FOLDERS:
        return
    groups = [path.name for path in sorted(CONF.iterdir()) if path.is_dir()]
    choices_by_group = {group: choices_of(group, [folder]) for group in groups}
    if not any(choices_by_group.values()):
        raise ConfigError(f"--config-dir {folder}: it has no file such as method/NAME.yaml; see conf/ for the groups")
    for group, choices in choices_by_group.items():
        known = choices_of(group)
        for name, path in choices.items():
            if name in known:
                raise ConfigError(f"{path}: there is a {group}={name} already; choose another name")
    FOLDERS.append(folder.resolve())
    _names_in_files.cache_clear()


def folder_options() -> list[str]:
    """Return ``--config-dir=DIR`` for each folder that was added, for a command that is to find the same choices.

    A folder below the working directory is relative to it.
    """
    here = Path.cwd().resolve()
    options: list[str] = []
    for folder in FOLDERS[1:]:
        place = folder
        if place.is_relative_to(here):
            place = place.relative_to(here)
        options.append(f"--config-dir={place}")
    return options


def choices_of(group: str, folders: Sequence[Path] | None = None) -> dict[str, Path]:
    """Return the file of each choice of a group by the choice's name; empty if there is no such group.

    Args:
        group: the group's name, such as ``method``.
        folders: the folders to search, by default :data:`FOLDERS`.
    """
    files: dict[str, Path] = {}
    if not group.isidentifier():
        return files
    if folders is None:
        folders = FOLDERS
    for folder in folders:
        for path in sorted((folder / group).glob("*.yaml")):
            files[path.stem] = path
    return files


def trust(names: Iterable[str]) -> None:
    """Allow this process to import these dotted names: its user named them, not a file from elsewhere."""
    _OWN_NAMES.update(names)


def trusted(name: object, where: str) -> bool:
    """Return whether the dotted ``name`` may be imported for the key ``where``.

    Goldfinch's own classes are allowed by group (:data:`ALLOWED`). A class of the user's is allowed if a file of the
    group names it (:data:`FOLDERS`), the user does (:func:`trust`), or an installed package declares it
    (:data:`ENTRY_POINTS`). Below a group's own keys, data sets are allowed too, such as a method's public images.
    """
    if not isinstance(name, str):
        return False
    if name in _OWN_NAMES:
        return True
    group, _, deeper = where.partition(".")
    groups = [group]
    if deeper:
        groups.append("data")
    for each in groups:
        for place in ALLOWED.get(each, ()):
            if name == place or name.startswith(f"{place}."):
                return True
        if name in _names_in_files(each):
            return True
    if group == "engine":  # its device may be any function, and a module has many
        return False
    return any(name == place or name.startswith(f"{place}.") for place in _declared())


@lru_cache
def _declared() -> tuple[str, ...]:
    """Return the modules and classes that installed packages declare as entry points; none of them is imported."""
    names: list[str] = []
    for point in entry_points(group=ENTRY_POINTS):
        names.append(point.value.replace(":", "."))
    return tuple(names)


@lru_cache
def _names_in_files(group: str) -> frozenset[str]:
    """Return the dotted names in the files of a group.

    Raises:
        ConfigError: a file is not valid YAML.
    """
    names: set[str] = set()
    for path in choices_of(group).values():
        try:
            content = yaml.safe_load(read_small(path))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"{path} cannot be read: {error}; correct or remove the file") from error
        names.update(str(name) for _, name in imports_of(content, group))
    return frozenset(names)


def imports_of(node: object, where: str = "") -> Iterator[tuple[str, object]]:
    """Yield every dotted name that a configuration would import, after the key it is imported for.

    Args:
        node: a configuration, or a part of it.
        where: the key of ``node`` in the whole configuration.
    """
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key == "_target_" or (where, key) == ("engine", "device"):
                yield where, value
            else:
                yield from imports_of(value, f"{where}.{key}".removeprefix("."))
    elif isinstance(node, list | tuple):
        for item in node:
            yield from imports_of(item, where)
