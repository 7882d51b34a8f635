"""What folders hold: classes, splits and domains; and for a layout that is not read, what was found and what helps."""

import difflib
import re
import shlex
from collections.abc import Collection, Iterator
from pathlib import Path

from common.data.image_files import image_files, is_image
from common.data.names import coinciding, normal_name, split_of
from common.errors import DataError, some_of
from common.overrides import quoted_override
from common.text import shell_line

_NOT_OURS = (".", "__", "@")
"""Prefixes of folders that programs create: hidden ones, __pycache__, __MACOSX, a file server's @eaDir."""

MAX_PLACES = 200
"""Folders that are looked into for a layout that is read."""

MAX_FOUND = 8
"""Names in a message of what a folder holds."""


def directories(parent: Path) -> list[Path]:
    """Return the folders in ``parent`` that may be domains or classes, sorted: neither caches nor those of programs."""
    found: list[Path] = []
    for path in sorted(parent.iterdir()):
        if not path.is_dir() or path.name.startswith(_NOT_OURS):
            continue
        if path.name.casefold() == "cache" or (path / "CACHEDIR.TAG").exists():
            continue
        found.append(path)
    return found


def part_folders(directory: Path) -> tuple[Path | None, Path | None]:
    """Return the folders of a domain's train and test images; ``None`` for one that does not exist.

    Words of splits count in any case. A folder of validation images is that of the test images if there is no other.

    Raises:
        DataError: two folders are of one split.
    """
    found: dict[str, Path] = {}
    for path in directories(directory):
        part = split_of(path.name)
        if part in found:
            raise DataError(f"folder: {found[part]} and {path} are both of the {part} images; join them")
        if part:
            found[part] = path
    return found.get("train"), found.get("test", found.get("validation"))


def has_parts(directory: Path) -> bool:
    """Return whether a folder holds both a folder of train images and one of test images."""
    return None not in part_folders(directory)


def bases(directory: Path) -> list[Path]:
    """Return the folders that hold a domain's class folders: its train and test folders if it has both, else itself."""
    train, test = part_folders(directory)
    if train is None or test is None:
        return [directory]
    return [train, test]


def found_in(place: Path) -> str:
    """Return what a folder holds, for messages: ``found in photos: cat/, dog/, notes.txt``."""
    if not place.is_dir():
        return f"{place} does not exist"
    names: list[str] = []
    for path in sorted(place.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            names.append(f"{path.name}/")
        else:
            names.append(path.name)
    if not names:
        return f"{place} is empty"
    return f"found in {place}: {some_of(names, MAX_FOUND)}"


def near_folder(name: str, parent: Path) -> str:
    """Return what to do if a folder in ``parent`` is called much like ``name``; empty if none is."""
    names = [path.name for path in directories(parent)]
    close = difflib.get_close_matches(name.casefold(), [each.casefold() for each in names], n=1, cutoff=0.5)
    for each in names:
        if close and each.casefold() == close[0]:
            return f"if {each}/ is meant, rename it to {name}, and others likewise"
    return ""


def moved_up(inner: Path, outer: Path) -> str:
    """Return what to do if the class folders that ``outer`` should hold are in ``inner``, a folder in it."""
    command = f"mv {shlex.quote(str(inner))}/* {shlex.quote(str(outer))}/"
    return f"the class folders are one level deeper, in {inner.name}/: move them up ({command})"


def below(root: Path) -> Iterator[Path]:
    """Yield ``root``, the folders in it, and the folders in those: at most :data:`MAX_PLACES`."""
    level = [root]
    count = 0
    for _ in range(3):
        deeper: list[Path] = []
        for place in level:
            if count == MAX_PLACES:
                return
            count += 1
            yield place
            deeper += directories(place)
        level = deeper


def read_as_folders(root: Path, image_size: int, names: Collection[str]) -> str:
    """Return the command that reads the images under ``root`` as they lie, by ``data=folder``; empty if it cannot.

    Args:
        root: it, or a folder up to two levels below, holds a folder for each of several domains, all with the same
            classes.
        image_size: of the data set that was asked for.
        names: of its domains. If fewer than half of the folders have one, they are another data set.
    """
    expected = {normal_name(name) for name in names}
    for place in below(root):
        domains = _domains_in(place)
        known = [domain for domain in domains if normal_name(domain) in expected]
        if len(domains) < 2 or 2 * len(known) < len(domains):
            continue
        settings = ["data=folder", written_override("data.root", str(place))]
        if len(domains) < len(directories(place)):
            settings.append(f"data.domains=[{','.join(map(_quoted, domains))}]")
        settings.append(f"data.image_size={image_size}")
        return f"data=folder reads the folders as they are: {shell_line(['goldfinch', 'run', *settings])}"
    return ""


def written_override(key: str, value: str) -> str:
    """Return ``key=value``, quoted where Hydra needs it."""
    if re.fullmatch(r"[\w./-]+", value, re.ASCII):
        return f"{key}={value}"
    return quoted_override(key, value)


def _quoted(name: str) -> str:
    return written_override("", name).removeprefix("=")


def _domains_in(place: Path) -> list[str]:
    """Return the folders in ``place`` with the same class folders; none if two folders' classes differ."""
    found: list[str] = []
    classes: set[str] = set()
    for folder in directories(place):
        if split_of(folder.name):
            return []
        inside = _classes_in(folder)
        if len(inside) < 2:
            continue
        if found and inside != classes:
            return []
        found.append(folder.name)
        classes = inside
    return found


def _classes_in(domain: Path) -> set[str]:
    """Return the names of a domain's class folders; none if ``data=folder`` would refuse them."""
    try:
        places = bases(domain)
    except DataError:
        return set()
    found: set[str] = set()
    for place in dict.fromkeys([domain, *places]):
        if image_files(place):
            return set()
    for place in places:
        for folder in directories(place):
            deeper = any(any(map(is_image, each.rglob("*"))) for each in directories(folder))
            if deeper or not any(map(is_image, folder.iterdir())):
                return set()
            found.add(folder.name)
    if coinciding(found):
        return set()
    return found
