"""The user's own images: every directory of class folders is a domain."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from common.config import check, checked
from common.data.domain import DATA_VARIABLE, Domain, ImageSize, search_roots
from common.data.image_files import states_of, without_duplicates
from common.data.image_folders import Files, read_images
from common.data.layouts import (
    ANY,
    bases,
    directories,
    has_parts,
    images_below,
    layout_advice,
    loose_images,
    not_read,
    nothing_read,
    paths_to,
    roles_of,
    with_images,
)
from common.data.names import name_key, split_of, unfit
from common.data.own_images import OwnImages
from common.errors import DataError, nearest, some_of
from common.overrides import written_override
from common.text import printable, quantity, shell_line, warn_once

MAX_SHOWN = 5
"""Names in one message."""

NAME_CLASSES = "name the classes (data.classes=[a,b]) so that every device agrees on the labels"
"""What helps where not all domains are there."""

Placed = tuple[Path, str, str]
"""An image with the word of its split, or an empty text, and the name of its class."""


@checked
class Folder(OwnImages):
    """``<root>/<domain>/<class>/<image>``, or ``<root>/<domain>/{train,test}/<class>/<image>``.

    As a node's data-dir, the root may also be the domain's own directory. A root with train and test folders is one
    domain. Without such folders the leading ``train_fraction`` of each class, by file name, is train. A domain may lack
    a class: it has no samples of it. Words of splits (:func:`~common.data.names.split_of`) count in any case. Hidden
    folders and those of systems are not read.

    Attributes:
        domains: names of the domains; empty: all directories with images under ``root``, which must then be set.
        classes: names of the class folders.
        path: what the folders from the root to the images are, such as ``split/domain/class`` or ``domain/any/class``;
            the root is one domain without ``domain``, and a last ``any`` stands for any number of folders. Empty:
            ``domain/class`` or ``domain/split/class``, by what is there.
    """

    name: ClassVar[str] = "folder"
    owner_decides: ClassVar[bool] = False

    image_size: ImageSize = 32
    path: str = ""

    def __post_init__(self) -> None:
        roles = self.path.split("/")
        known = set(roles) <= {"domain", "split", "class", ANY} and roles.count("class") == 1
        known = known and roles.count("domain") < 2 and roles.count("split") < 2
        check(not self.path or known, f"path: {self.path!r} must be domain, split, class and {ANY} with / between them")
        for name in self.classes:
            check(not name.startswith("."), f"classes: {name!r} is a hidden folder, which is not read; rename it")
        if not self.domains:
            if self.root is None or not Path(self.root).expanduser().is_dir():
                state = f"={self.root} is no directory"
                if self.root is None:
                    state = f" is not set ({DATA_VARIABLE} alone names no domains)"
                raise ValueError(
                    "name the domains (data.domains=[a,b]), or set data.root to a directory that holds one directory "
                    f"per domain; data.root{state}"
                )
            object.__setattr__(self, "domains", self._found_domains(Path(self.root).expanduser().absolute()))
        super().__post_init__()

    def _found_domains(self, root: Path) -> tuple[str, ...]:
        """Return the names of the folders with images, and say which folders with or without images are not read."""
        if "domain" not in (self.path or "domain").split("/"):
            return (root.name,)
        found = with_images(root)
        if not self.path and has_parts(root):
            if others := [folder.name for folder in found if not split_of(folder.name)]:
                one = written_override("data.domains", [root.name])
                raise DataError(
                    f"folder: {root} holds train and test images, and {some_of(others, 3)}: data.path=domain/class "
                    f"reads each as a domain; {one} reads the splits of one domain, and counts the others"
                )
            return (root.name,)
        if not found:
            raise DataError(f"folder: {nothing_read(root)}")
        if self.path and not self.path.startswith("domain/"):
            names: set[str] = set()
            for place in {path.parent for path in images_below(root)}:
                if roles := roles_of(place.relative_to(root).parts, self.path):
                    self._check_names(place, root, self.path)
                    names.add(roles["domain"])
            if names:
                return tuple(sorted(names))
        for folder in found:
            check_name("domain", folder, root)
        if self.path and not self.path.startswith("domain/"):
            return tuple(folder.name for folder in found)
        _warn_of(root, not_read(root, deep=False))
        if loose := loose_images(root):
            _warn_of(root, [f"{quantity(len(loose), 'image')} in no folder of a domain, such as {loose[0].name}"])
        grids = {tuple(inside.name for inside in directories(folder) if loose_images(inside)) for folder in found}
        if not self.path and len(found) > 1 and len(grids) == 1 and () not in grids:
            warn_once(
                f"folder: {root}: domains are {some_of([folder.name for folder in found], MAX_SHOWN)}, and classes, in "
                f"each of them, {some_of(list(*grids), MAX_SHOWN)}; data.path=class/domain if it is the other way round"
            )
        return tuple(folder.name for folder in found)

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """``classes``, or the sorted union of the class folders of all domains.

        Raises:
            DataError: ``classes`` is empty, and a domain is not under the root or holds images in no class folder.
        """
        if self.classes:
            return self.classes
        root = self._root()
        if root is None:
            raise DataError(f"folder: name the classes (data.classes=[a,b]), or set data.root or {DATA_VARIABLE}")
        if not Path(root).is_dir():
            raise DataError(
                f"folder: {root}, which data.root or {DATA_VARIABLE} names, is no folder; name the one that holds the "
                "folders of the domains. On a server without images, name the classes: data.classes=[a,b]"
            )
        if len(self.domains) > 1 and self.path and "domain" not in self.path.split("/"):
            raise DataError(
                f"folder: data.path={self.path} has no domain, so {root} holds the images of one: {NAME_CLASSES}; in a "
                "simulation, put domain where its folder is"
            )
        found: dict[str, Path] = {}
        for domain in self.domains:
            directory = self._place(Path(root), domain)
            if not directory.is_dir():
                if not self.path and (deeper := paths_to(Path(root), domain)):
                    raise DataError(f"folder: {directory} does not exist; data.path={deeper[0]} reads {domain}")
                raise DataError(
                    f"folder: the classes are the union over all domains, but {directory} does not exist; "
                    f"{_domains_near(domain, Path(root))}. Put it there, or {NAME_CLASSES}"
                )
            own: dict[str, Path] = {}
            for path, _, name in self._placed(directory, domain, Path(root)):
                own.setdefault(name, path.parent)
            if not own:
                raise DataError(
                    f"folder: the classes are the union over all domains, but {directory} has no images of "
                    f"{domain!r}. Put them there, or {NAME_CLASSES}. {self.layout()}"
                )
            for name, place in own.items():
                found.setdefault(name, place)
        return self.sorted_classes(found)

    def layout(self) -> str:
        """See :meth:`DataSource.layout`."""
        return (
            "Put images there as <domain>/<class>/*.png, or <domain>/{train,test}/<class>/*.png. Lists of images and "
            "folders of save_to_disk are data=table."
        )

    # ---- where a domain is -------------------------------------------------------------------------------------------

    def _place(self, root: Path, domain: str) -> Path:
        """Return the folder that holds a domain's images: its own, or the root if that is the only one or holds all."""
        if self.path and not self.path.startswith("domain/"):
            return root
        if not self.path and root.name == domain and not (root / domain).is_dir() and root.is_dir() and has_parts(root):
            return root
        return root / domain

    def directory(self, domain: str) -> Path:
        """Return ``<root>/<domain>``; the root itself if it is the only domain, or if ``path`` says that it holds all.

        Raises:
            DataError: it does not exist.
        """
        (root,) = search_roots(self, ())
        found = self._place(root, domain)
        if found.is_dir():
            return found
        remedy = f"{_domains_near(domain, root)}. {self.layout()}"
        if root.name == domain or self._is_a_domain(root):
            remedy = f"{root} is the folder of one domain: {self._as_one(root, domain)}"
        raise DataError(f"folder: domain {domain!r} is not in {root}; {remedy}")

    def _as_one(self, root: Path, domain: str) -> str:
        """Return what reads a folder that holds the images of one domain."""
        if root.name in self.domains:
            return f"give the folder above it, {root.parent}"
        settings = [written_override("data.path", self._pattern(root))]
        if len(self.domains) > 1:
            settings.append(written_override("data.domains", [domain]))
        return f"{shell_line(settings)} reads it as {domain!r} alone"

    def own_directory(self, domain: str) -> Path:
        """Return the domain's directory on a device, where the root may be the domain's own.

        Raises:
            DataError: the directory was not found, or the root is named after another domain.
        """
        (root,) = search_roots(self, ())
        if (root / domain).is_dir() or not (root.name == domain or self._is_a_domain(root)):
            return self.directory(domain)
        self.check_own(root, domain)
        return root

    def _is_a_domain(self, root: Path) -> bool:
        """Return whether ``root`` holds what a domain's folder does: known class folders."""
        pattern = self._pattern(root)
        for path in images_below(root):
            roles = roles_of(path.relative_to(root).parts[:-1], pattern)
            if roles and roles["class"] in self.classes:
                return True
        return False

    def _pattern(self, directory: Path) -> str:
        """Return what the folders from a domain's own folder to its images are."""
        if self.path:
            return "/".join(role for role in self.path.split("/") if role != "domain")
        if bases(directory) == [directory]:
            return "class"
        return "split/class"

    def _bases(self, directory: Path) -> list[Path]:
        """Return the folders that hold a domain's class folders; ``path`` says what is in its own."""
        if self.path:
            return [directory]
        return bases(directory)

    def find_files(self, domain: str) -> None:
        """See :meth:`DataSource.find_files`. The images are listed, and none is decoded."""
        source = self
        if not self.classes:  # whatever is missing of other domains
            source = replace(self, domains=(domain,))
        directory = self.directory(domain)
        train, test = source._divide(directory, domain)
        self.check_parts(domain, directory, train, test)
        states_of([path for path, _ in (*train, *test)], directory)

    # ---- what is in it -----------------------------------------------------------------------------------------------

    def _read(self, domain: str) -> Domain:
        return self._read_from(self.directory(domain), domain)

    def _read_own(self, domain: str) -> Domain:
        return self._read_from(self.own_directory(domain), domain)

    def _read_from(self, directory: Path, domain: str) -> Domain:
        train, test = self._divide(directory, domain)
        if self.duplicates == "drop":
            test = without_duplicates(test, train, directory)
        self.check_parts(domain, directory, train, test)
        return read_images(domain, train, test, self.image_size, directory, self.reading)

    def _divide(self, directory: Path, domain: str) -> tuple[Files, Files]:
        """Return the train and the test images of a domain, and log what in its folder is not read."""
        root = Path(self.root or directory)
        every: dict[str, Files] = {}
        for path, split, name in self._placed(directory, domain, root):
            if name not in self.class_names:
                raise DataError(f"folder: {path.parent} is not one of data.classes; {nearest(name, self.class_names)}")
            every.setdefault(split, []).append((path, self.class_names.index(name)))
        parts = self._bases(directory)
        apart: list[Path] = []
        if parts != [directory]:
            apart = [folder for folder in directories(directory) if folder not in parts]
        _warn_of(directory, not_read(directory, apart))
        for files in every.values():
            files.sort(key=lambda item: (item[1], item[0]))
        return self.divided(domain, str(directory), every)

    def _placed(self, directory: Path, domain: str, root: Path) -> Iterator[Placed]:
        """Yield the images of a domain, each with its split and its class."""
        # Where a domain is not root/domain, the images of all may be in the root.
        whole = directory == root and "domain" in self.path.split("/")[1:]
        pattern = self._pattern(directory)
        if whole and any(roles_of(path.relative_to(root).parts[:-1], self.path) for path in images_below(root)):
            pattern = self.path
        start, parts = directory, self._bases(directory)
        places = [directory] if parts == [directory] else [directory, *parts]
        for number, place in enumerate(places):
            below: Sequence[Path] | Iterator[Path] = images_below(place)
            if len(places) > 1 and number == 0:
                below = loose_images(place)  # of other folders beside those of splits, none is read
            for path in below:
                names = path.relative_to(start).parts[:-1]
                roles = roles_of(names, pattern)
                if not roles:
                    raise self._misplaced(path, names, directory, root)
                if roles.get("domain", domain) == domain:
                    self._check_names(path.parent, start, pattern)
                    yield path, roles.get("split", ""), roles["class"]

    def _check_names(self, place: Path, start: Path, pattern: str) -> None:
        """Check the names of the folders from ``start`` to a folder of images."""
        for name, role in zip(place.relative_to(start).parts, pattern.split("/"), strict=False):
            start = start / name
            if role in ("domain", "class"):
                check_name(role, start, Path(self.root or start.parent))

    def _misplaced(self, path: Path, names: Sequence[str], directory: Path, root: Path) -> DataError:
        """Return the error of an image that lies otherwise than the others should, or than ``path`` says."""
        inside = None
        if directory == root and not self.path and not has_parts(root):  # on a device
            root, inside = directory.parent, directory
        where = f"does not lie as data.path={self.path} says"
        if not self.path:
            where = "lies in no class folder"
            if level := self._pattern(directory).count("/") + 1 < len(names):
                where = f"lies deeper than its class folder {path.parents[len(names) - level]}"
        return DataError(f"folder: {path} {where}; {layout_advice(root, inside, self.path)}")


def _domains_near(domain: str, root: Path) -> str:
    """Return a sentence that names the folder under ``root`` that is closest to ``domain``, or all folders there."""
    if not root.is_dir():
        return f"{root} does not exist"
    return nearest(domain, [path.name for path in directories(root)])


def check_name(kind: str, folder: Path, root: Path) -> None:
    """Refuse a folder whose name cannot be that of a domain or a class.

    Raises:
        DataError: it cannot; the message has the command that renames all of that name under ``root``.
    """
    if reason := unfit(kind, folder.name):
        bare = printable(folder.name.lstrip("=+-@ ")).replace("\\", "_") or kind
        if unfit(kind, bare):
            bare += "_"
        folders = sorted(Path(above, name) for above, names, _ in os.walk(root) for name in names)
        same = [place for place in folders if place.name == folder.name] or [folder]
        taken = {name_key(place.name) for place in folders if place.name != folder.name}
        new, number = bare, 1
        while name_key(new) in taken:  # one name for the folders of all sites, and no other class is joined
            number += 1
            new = f"{bare}_{number}"
        command = " && ".join(shell_line(["mv", "-n", place, place.with_name(new)]) for place in reversed(same))
        raise DataError(f"folder: {printable(str(folder))}: the name of a {kind} {reason}; rename it: {command}")


def _warn_of(place: Path, found: Sequence[str]) -> None:
    """Log what in a folder is not read."""
    if found:
        warn_once(f"folder: {place}: not read: {some_of(found, MAX_SHOWN)}")
