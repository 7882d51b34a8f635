"""Data sets in folders ``<domain>/<class>/<image>``; a rule, or list files, splits them into train and test."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from common.config import Fraction, checked
from common.data.batches import Split
from common.data.domain import DataSource, Domain, Duplicates, search_roots
from common.data.image_files import Reading, decode_files, image_files, states_of, subdirectory, without_duplicates
from common.data.layouts import below, directories, found_in, has_same_names, moved_up, near_folder, read_as_folders
from common.data.names import normal_name, split_of
from common.errors import DataError, some_of
from common.overrides import written_override
from common.text import shell_line

SEPARATED = re.compile(r"\.\w+\s*([;,])\s*\d+$")
"""A line of a list in which a semicolon or a comma is between file and label."""

Files = list[tuple[Path, int]]
SplitRule = Literal["index_rule", "lists", "per_class_fraction"]


@checked
class ImageFolders(DataSource):
    """Base of the data sets in class folders.

    Attributes:
        split: how a domain is split into train and test. ``index_rule``: image i of the domain, in the order of class
            folders and file names, is train if i % 10 <= 7 (FPL's Office code). ``lists``: the data set's list files.
            ``per_class_fraction``: the first images of each class are train (FedPall).
        train_fraction: the share of each class that ``per_class_fraction`` trains on, in (0, 1).
        duplicates: what becomes of test images that are training images. ``warn`` scores and counts them, ``drop``
            leaves out those with the bytes and class of a training image of their domain, ``refuse`` ends the run
            before its first round. See :data:`~.domain.Duplicates`. The papers keep all. The train split, and every
            client's share of it, stays the same.
    """

    owner_decides: ClassVar[bool] = False
    not_read_as: ClassVar[frozenset[str]] = DataSource.not_read_as | {"split", "train_fraction", "duplicates"}
    known_classes: ClassVar[tuple[str, ...]] = ()
    wanted: ClassVar[str] = ""  # where to put which files, a sentence
    class_aliases: ClassVar[Mapping[str, Sequence[str]]] = {}
    domain_aliases: ClassVar[Mapping[str, Sequence[str]]] = {}  # other names of the domains' directories
    folders: ClassVar[tuple[str, ...]] = ()  # possible names of the data set's own directory under the root
    list_files: ClassVar[tuple[tuple[str, str], ...]] = (("train_list.txt", "test_list.txt"),)
    rounding: ClassVar[Literal["round", "floor"]] = (
        "round"  # of the images of a class that per_class_fraction trains on
    )
    list_folders: ClassVar[tuple[str, ...]] = ()  # folders next to the domains that may hold the list files

    split: SplitRule = "index_rule"
    train_fraction: Fraction = 0.8
    duplicates: Duplicates = "warn"

    @property
    def class_names(self) -> tuple[str, ...]:
        """``known_classes``."""
        return self.known_classes

    @property
    def on_duplicates(self) -> Duplicates:
        """``duplicates``."""
        return self.duplicates

    def layout(self) -> str:
        """See :meth:`DataSource.layout`."""
        return self.wanted

    def lists(self, directory: Path, domain: str) -> tuple[Path, Path]:
        """Return the list files of the train and of the test split of ``domain``, near its directory.

        Raises:
            DataError: no list files were found.
        """
        above = directory.parent
        places = [above]
        for base in (above, above.parent):
            places += [base / name for name in self.list_folders]
        places.append(directory)
        wanted: list[str] = []
        for patterns in self.list_files:
            wanted.append(" and ".join(patterns).format(domain=domain))
        for place in filter(Path.is_dir, places):
            for patterns in self.list_files:
                train, test = (self._list_file(place, pattern, domain) for pattern in patterns)
                if train is not None and test is not None:
                    return train, test
        raise DataError(
            f"{self.name}: split=lists needs {' or '.join(wanted)} in {above}; {found_in(above)}. Put them there, or "
            "take a split by a rule: data.split=per_class_fraction (80 % of each class is train) or "
            "data.split=index_rule"
        )

    def _list_file(self, place: Path, pattern: str, domain: str) -> Path | None:
        """Return the list file in ``place`` with a name of the pattern, ignoring case and separators."""
        wanted = {normal_name(pattern.format(domain=name)) for name in self._names(domain)}
        for path in sorted(place.glob("*.txt")):
            if normal_name(path.name) in wanted and path.is_file():
                return path
        return None

    def directory(self, domain: str) -> Path:
        """Return the domain's directory: under the root, or under one of ``folders`` in it.

        Raises:
            DataError: the directory was not found, or two are of that name.
        """
        candidates = list(search_roots(self, self.folders))
        for candidate in candidates:
            found = subdirectory(candidate, self._names(domain))
            if found is not None:
                return found
        searched = ", ".join(str(path / domain) for path in candidates)
        root = candidates[0]
        raise DataError(
            f"{self.name}: domain {domain!r} is not there; looked for {searched}; {found_in(root)}. "
            f"{self._other_place(root, domain)}"
        )

    def _other_place(self, root: Path, domain: str) -> str:
        """Return what to do if the domain is not under the root."""
        if self._holds_classes(root):
            advice = f"give the folder above it, {root.parent}"
            if not any(self._is_domain(root.name, name) for name in self.domains):
                link = shell_line(["ln", "-s", root, root.parent / domain])
                advice = f"if it is {domain!r}, {link} and give the folder above it, {root.parent}"
            return f"{root} holds class folders and is the folder of one domain: {advice}"
        for place in below(root):
            found = [subdirectory(place, self._names(name)) for name in self.domains]
            if all(path is not None and self._holds_classes(path) for path in found):
                return f"The domains are deeper: give {written_override('data.root', str(place))}"
        advice = read_as_folders(root, self.image_size, self._all_names())
        if not advice:
            advice = near_folder(domain, [folder for folder in directories(root) if self._holds_classes(folder)])
        return f"{advice}. {self.layout()}".removeprefix(". ")

    def _check_classes(self, directory: Path) -> None:
        """Check that a domain's directory holds the class folders: with lists any of them, otherwise all."""
        missing = [name for name in self.class_names if subdirectory(directory, self._class_names(name)) is None]
        if not missing or (self.split == "lists" and len(missing) < len(self.class_names)):
            return
        count = f"{len(missing)} of {len(self.class_names)} are"
        raise DataError(
            f"class folder {directory / missing[0]} is missing ({count}); {found_in(directory)}. "
            f"{self._other_classes(directory, missing[0])}"
        )

    def _other_classes(self, directory: Path, missing: str) -> str:
        """Return what to do if a class folder is not in the domain's directory."""
        for folder in directories(directory):
            deeper = not split_of(folder.name) and self._holds_classes(folder)
            if deeper and not has_same_names(folder, directory):
                return moved_up(folder, directory)
        advice = read_as_folders(directory.parent, self.image_size, self._all_names())
        return advice or near_folder(missing, directories(directory)) or "Put that class's images there"

    def own_directory(self, domain: str) -> Path:
        """Return the domain's directory on a device, where the root may be the domain's own.

        Raises:
            DataError: the directory was not found, or the root is named after another domain.
        """
        root = next(search_roots(self, ()))
        try:
            return self.directory(domain)
        except DataError:
            if not (self._is_domain(root.name, domain) or self._holds_classes(root)):
                raise
        for other in self.known_domains:
            if other != domain and self._is_domain(root.name, other):
                raise DataError(
                    f"{self.name}: {root} is the folder of {other}, and {domain!r} is wanted: give the folder of "
                    f"{domain!r}, or {root.parent} with {domain!r} in it"
                )
        return root

    def _holds_classes(self, root: Path) -> bool:
        return any(subdirectory(root, self._class_names(name)) is not None for name in self.class_names)

    def _class_names(self, name: str) -> tuple[str, ...]:
        """Return the names that a class's directory may have."""
        return (name, *self.class_aliases.get(name, ()))

    def _names(self, domain: str) -> tuple[str, ...]:
        """Return the names that a domain's directory may have."""
        return (domain, *self.domain_aliases.get(domain, ()))

    def _all_names(self) -> list[str]:
        """Return the names that the directories of all domains may have."""
        return [name for domain in self.domains for name in self._names(domain)]

    def _is_domain(self, name: str, domain: str) -> bool:
        """Return whether ``name`` is a domain's, ignoring case and separators."""
        return normal_name(name) in map(normal_name, self._names(domain))

    def find_files(self, domain: str) -> None:
        """See :meth:`DataSource.find_files`. The images are listed, and none is decoded."""
        directory = self.directory(domain)
        train, test = self._divide(directory, domain)
        self._check_parts(domain, directory, train, test)
        states_of([path for path, _ in (*train, *test)], directory)

    def _read(self, domain: str) -> Domain:
        return self._read_from(self.directory(domain), domain)

    def _read_own(self, domain: str) -> Domain:
        return self._read_from(self.own_directory(domain), domain)

    def _read_from(self, directory: Path, domain: str) -> Domain:
        train, test = self._divide(directory, domain)
        if self.duplicates == "drop":
            test = without_duplicates(test, train, directory)
        self._check_parts(domain, directory, train, test)
        return read_images(domain, train, test, self.image_size, directory)

    def _check_parts(self, domain: str, directory: Path, train: Files, test: Files) -> None:
        """Check that a domain has images of both splits."""
        for part, files in (("train", train), ("test", test)):
            if not files:
                rule = f"split={self.split}"
                if self.split == "lists":
                    rule = "its list files"
                raise DataError(f"{self.name}: domain {domain!r} in {directory} has no {part} images by {rule}")

    def _divide(self, directory: Path, domain: str) -> tuple[Files, Files]:
        self._check_classes(directory)
        if self.split == "lists":
            train_list, test_list = self.lists(directory, domain)
            return self._listed(directory, domain, train_list), self._listed(directory, domain, test_list)
        files: Files = []
        for label, name in enumerate(self.class_names):
            folder = subdirectory(directory, self._class_names(name)) or directory / name
            found = image_files(folder)
            if not found:
                raise DataError(f"class folder {folder} has no images; put that class's images there")
            files += [(path, label) for path in found]
        if self.split == "index_rule":
            return index_rule(files)
        return per_class_fraction(files, self.train_fraction, self.rounding)

    def _listed(self, directory: Path, domain: str, path: Path) -> Files:
        """Return the files of ``domain`` in a list file with lines ``domain/class/file`` and an optional label."""
        labels: dict[str, int] = {}
        folders: list[Path | None] = []
        for label, name in enumerate(self.class_names):
            folders.append(subdirectory(directory, self._class_names(name)))
            for each in self._class_names(name):
                labels[normal_name(each)] = label
        found: Files = []
        others: dict[str, None] = {}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            # File names may contain spaces: only a last word that is a number is the label.
            text = line.strip()
            words = text.rsplit(maxsplit=1)
            if len(words) == 2 and words[1].isdigit():
                text = words[0]
            parts = text.split("/")
            if parts == [""]:
                continue
            if len(parts) < 3 or ".." in parts or SEPARATED.search(text):
                raise DataError(f"{path}, line {number}: expected domain/class/file, got {line!r}{list_advice(text)}")
            others[parts[-3]] = None
            if self._is_domain(parts[-3], domain) and normal_name(parts[-2]) in labels:
                label = labels[normal_name(parts[-2])]
                folder = folders[label] or directory / parts[-2]
                found.append((folder / parts[-1], label))
        if not found:
            raise DataError(
                f"{self.name}: {path} lists no image of domain {domain!r} and its classes: its lines begin with "
                f"{some_of(list(others), 5)}/; expected domain/class/file"
            )
        return sorted(found, key=lambda item: (item[1], item[0].name))


def list_advice(line: str) -> str:
    """Return what to change in a line of a list file; empty if nothing is known."""
    if "\\" in line:
        return ": write paths with / instead of \\ (sed -i 's:\\\\:/:g')"
    if found := SEPARATED.search(line):
        return f": put a space between file and label, not {found[1]!r}"
    return ""


def read_images(
    name: str, train: Files, test: Files, image_size: int, directory: Path, reading: Reading | None = None
) -> Domain:
    """Return the domain with the decoded images of ``train`` and ``test``; see :func:`~.image_files.decode_files`.

    Args:
        name: the domain's name.
        train: files with their labels.
        test: likewise.
        image_size: height and width of the images, pixels.
        directory: the domain's directory, which holds all files.
        reading: how the files become arrays; ``None`` is the default.

    Raises:
        DataError: a file is not an image, or lies outside ``directory``.
    """
    files = [path for path, _ in (*train, *test)]
    return decoded_domain(name, train, test, *decode_files(files, image_size, directory, reading or Reading()))


def decoded_domain(name: str, train: Files, test: Files, images: Tensor, kept: Sequence[int]) -> Domain:
    """Return the domain of decoded images.

    Args:
        name: the domain's name.
        train: files with their labels.
        test: likewise.
        images: uint8 [N, 3, H, W], of the files that are images.
        kept: their positions in ``train`` followed by ``test``.
    """
    every = [*train, *test]
    paths: list[Path] = []
    labels: list[int] = []
    for index in kept:
        path, label = every[index]
        paths.append(path)
        labels.append(label)
    targets = torch.tensor(labels, dtype=torch.int64)
    count = sum(index < len(train) for index in kept)
    splits = Split(images[:count], targets[:count]), Split(images[count:], targets[count:])
    return Domain(name, *splits, tuple(paths[:count]), tuple(paths[count:]))


def index_rule(files: Files) -> tuple[Files, Files]:
    """Return train and test: an image is train if its position in ``files`` is 0..7 modulo 10 (FPL's Office code)."""
    train: Files = []
    test: Files = []
    for index, item in enumerate(files):
        if index % 10 <= 7:
            train.append(item)
        else:
            test.append(item)
    return train, test


def per_class_fraction(files: Files, fraction: float, rounding: str) -> tuple[Files, Files]:
    """Return train and test: the leading ``fraction`` of each class, rounded or floored, is train (FedPall's code)."""
    by_class: dict[int, Files] = {}
    for item in files:
        by_class.setdefault(item[1], []).append(item)
    train: Files = []
    test: Files = []
    for label in sorted(by_class):
        members = by_class[label]
        if rounding == "round":
            count = round(fraction * len(members))
        else:
            count = int(fraction * len(members) + 1e-9)
        train += members[:count]
        test += members[count:]
    return train, test
