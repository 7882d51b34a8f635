"""Data sets kept as ``<domain>/<class>/<image>`` with a rule, or list files, that divides them into train and test."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import torch

from common.config import Fraction, checked
from common.data.batches import Split
from common.data.domain import DataSource, Domain, search_roots
from common.data.image_files import (
    check_within,
    class_folders,
    decode,
    normal_name,
    subdirectory,
    without_duplicates,
)
from common.errors import DataError

Files = list[tuple[Path, int]]
SplitRule = Literal["index_rule", "lists", "per_class_fraction"]
Duplicates = Literal["keep", "drop"]
"""``drop``: a domain's test split loses the images that have the same bytes as one of its training images."""


@checked
class ImageFolders(DataSource):
    """Base of the data sets in class folders.

    Attributes:
        split: how a domain divides into train and test. ``index_rule``: the i-th image of the domain (class folders
            and files sorted, counted through) is train if i % 10 <= 7 (FPL's Office code). ``lists``: the data set's
            list files. ``per_class_fraction``: the leading share of each class is train (FedPall).
        train_fraction: that share, in (0, 1).
        rounding: how many images that share of a class is: FedPall rounds for Office and floors for PACS.
        duplicates: ``keep``: all images, as in the papers. ``drop``: without the test images that are, byte for byte,
            training images of the same domain. The train split, and so every client's share of it, stays the same.
    """

    known_classes: ClassVar[tuple[str, ...]] = ()
    wanted: ClassVar[str] = ""  # what to put where, a sentence
    class_aliases: ClassVar[Mapping[str, Sequence[str]]] = {}
    folders: ClassVar[tuple[str, ...]] = ()  # names the data set's own directory may have under the root
    list_files: ClassVar[tuple[tuple[str, str], ...]] = (("train_list.txt", "test_list.txt"),)
    list_folders: ClassVar[tuple[str, ...]] = ()  # beside the domains, may hold the list files

    split: SplitRule = "index_rule"
    train_fraction: Fraction = 0.8
    rounding: Literal["round", "floor"] = "round"
    duplicates: Duplicates = "keep"

    @property
    def class_names(self) -> tuple[str, ...]:
        """``known_classes``."""
        return self.known_classes

    def layout(self) -> str:
        """See :meth:`DataSource.layout`."""
        return self.wanted

    def lists(self, directory: Path, domain: str) -> tuple[Path, Path]:
        """The list files of the train and of the test split of ``domain``, around its directory.

        Raises:
            DataError: there are none.
        """
        above = directory.parent
        places = [above, *(base / name for base in (above, above.parent) for name in self.list_folders), directory]
        names = [(train.format(domain=domain), test.format(domain=domain)) for train, test in self.list_files]
        for place in places:
            for train, test in names:
                if (place / train).is_file() and (place / test).is_file():
                    return place / train, place / test
        wanted = " or ".join(f"{train} and {test}" for train, test in names)
        raise DataError(f"{self.name}: split=lists needs {wanted} in {above}; put them there, or choose another split")

    def directory(self, domain: str) -> Path:
        """The domain's directory: under the root, under one of ``folders`` in it, or the root itself.

        Raises:
            DataError: it is nowhere.
        """
        candidates = list(search_roots(self, self.folders))
        for candidate in candidates:
            found = subdirectory(candidate, domain)
            if found is not None:
                return found
        root = candidates[0]
        if normal_name(root.name) == normal_name(domain) or any(
            subdirectory(root, name) is not None for name in self.class_names
        ):
            return root
        searched = ", ".join(str(path / domain) for path in candidates)
        raise DataError(f"{self.name}: domain {domain!r} is not there; looked for {searched}. {self.layout()}")

    def _read(self, domain: str) -> Domain:
        directory = self.directory(domain)
        train, test = self._divide(directory, domain)
        if self.duplicates == "drop":
            check_within([path for path, _ in (*train, *test)], directory)
            test = without_duplicates(test, train)
        for part, files in (("train", train), ("test", test)):
            if not files:
                rule = f"split={self.split}" if self.split != "lists" else "its list files"
                raise DataError(f"{self.name}: domain {domain!r} in {directory} has no {part} images by {rule}")
        images = decode([path for path, _ in (*train, *test)], self.image_size, directory)
        labels = torch.tensor([label for _, label in (*train, *test)], dtype=torch.int64)
        count = len(train)
        return Domain(domain, Split(images[:count], labels[:count]), Split(images[count:], labels[count:]))

    def _divide(self, directory: Path, domain: str) -> tuple[Files, Files]:
        if self.split == "lists":
            train, test = (self._listed(directory, domain, path) for path in self.lists(directory, domain))
            return train, test
        files = class_folders(directory, self.class_names, aliases=self.class_aliases)
        if self.split == "index_rule":
            return index_rule(files)
        return per_class_fraction(files, self.train_fraction, self.rounding)

    def _listed(self, directory: Path, domain: str, path: Path) -> Files:
        """The files of ``domain`` in a list file whose lines are ``domain/class/file`` with an optional label."""
        labels: dict[str, int] = {}
        for label, name in enumerate(self.class_names):
            labels.update({normal_name(each): label for each in (name, *self.class_aliases.get(name, ()))})
        found: Files = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            # File names may contain spaces: only a last word that is a number is the label.
            words = line.strip().rsplit(maxsplit=1)
            parts = (words[0] if len(words) == 2 and words[1].isdigit() else line.strip()).split("/")
            if parts == [""]:
                continue
            if len(parts) < 3 or ".." in parts:
                raise DataError(f"{path}, line {number}: expected domain/class/file, got {line!r}")
            if normal_name(parts[-3]) == normal_name(domain) and normal_name(parts[-2]) in labels:
                found.append((directory / parts[-2] / parts[-1], labels[normal_name(parts[-2])]))
        return sorted(found, key=lambda item: (item[1], item[0].name))


def index_rule(files: Files) -> tuple[Files, Files]:
    """Train: the images whose place in ``files`` is 0..7 modulo 10; test: 8 and 9 (FPL's code for Office-Caltech)."""
    train = [item for index, item in enumerate(files) if index % 10 <= 7]
    return train, [item for index, item in enumerate(files) if index % 10 > 7]


def per_class_fraction(files: Files, fraction: float, rounding: str) -> tuple[Files, Files]:
    """Train: the leading ``fraction`` of each class, rounded or floored; test: the rest (FedPall's code)."""
    train: Files = []
    test: Files = []
    for label in sorted({label for _, label in files}):
        members = [item for item in files if item[1] == label]
        count = round(fraction * len(members)) if rounding == "round" else int(fraction * len(members) + 1e-9)
        train += members[:count]
        test += members[count:]
    return train, test
