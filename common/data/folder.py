"""Bring your own: any directory of class folders is a domain."""

from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch

from common.config import Fraction, Names, checked
from common.data.batches import Split
from common.data.domain import DATA_VARIABLE, DataSource, Domain, ImageSize, search_roots
from common.data.image_files import (
    SUFFIXES,
    check_within,
    class_folders,
    decode,
    image_files,
    is_image,
    without_duplicates,
)
from common.data.image_folders import Duplicates, Files, per_class_fraction
from common.errors import DataError, nearest

_PARTS = (("train",), ("test", "val", "valid", "validation"))
_NOT_OURS = (".", "__", "@")
"""What names of folders begin with that programs made: hidden ones, __pycache__, __MACOSX, a file server's @eaDir."""


@checked
class Folder(DataSource):
    """``<root>/<domain>/<class>/<image>``, or ``<root>/<domain>/{train,test}/<class>/<image>``.

    As a node's data-dir, the root may also be the domain's own directory. Without train and test folders the leading
    ``train_fraction`` of each class, by file name, is train. A class a domain lacks is a class without samples.

    Attributes:
        domains: names of the domains; empty: all directories found under ``root``, which must then be set.
        classes: names of the class folders, in label order; empty: the sorted union over all domains, which then all
            have to be there. On devices that hold one domain each, name them, so that all agree on the labels.
        train_fraction: share of each class that is train, in (0, 1), rounded down but never below one image.
        duplicates: ``drop``: without the test images that are, byte for byte, training images of the same domain;
            ``keep``: all.
    """

    name: ClassVar[str] = "folder"

    domains: Names = ()
    image_size: ImageSize = 32
    classes: Names = ()
    train_fraction: Fraction = 0.8
    duplicates: Duplicates = "keep"

    def __post_init__(self) -> None:
        if not self.domains:
            if self.root is None or not Path(self.root).expanduser().is_dir():
                raise ValueError(
                    "name the domains (data.domains=[a,b]), or set data.root to a directory that holds one directory "
                    f"per domain; data.root={self.root} {'is not set' if self.root is None else 'is not there'}"
                )
            object.__setattr__(self, "domains", tuple(path.name for path in _directories(Path(self.root).expanduser())))
        super().__post_init__()

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """``classes``, or the sorted union of the class folders of all domains.

        Raises:
            DataError: ``classes`` is empty, and a domain is not under the root or has an empty class folder.
        """
        if self.classes:
            return self.classes
        root = self._root()
        if root is None:
            raise DataError(f"folder: name the classes (data.classes=[a,b]), or set data.root or {DATA_VARIABLE}")
        found: set[str] = set()
        for domain in self.domains:
            directory = Path(root) / domain
            if not directory.is_dir():
                raise DataError(
                    f"folder: the classes are the union over all domains, but {directory} is not there; put it there, "
                    "or name the classes (data.classes=[a,b]) so that every device agrees on the labels"
                )
            found.update(map(_class_name, (path for base in _bases(directory) for path in _directories(base))))
        if not found:
            raise DataError(f"folder: no class folders in any domain under {root}; {self.layout()}")
        return tuple(sorted(found))

    def layout(self) -> str:
        """See :meth:`DataSource.layout`."""
        return "Put images there as <domain>/<class>/*.png, or <domain>/{train,test}/<class>/*.png."

    def directory(self, domain: str) -> Path:
        """``<root>/<domain>``, or the root itself when it is the domain's own directory.

        Raises:
            DataError: neither is there.
        """
        (root,) = search_roots(self, ())
        if (root / domain).is_dir():
            return root / domain
        names = {path.name for base in _bases(root) for path in _directories(base)}
        if root.name == domain or (self.classes and names & set(self.classes)):
            return root
        close = nearest(domain, [path.name for path in _directories(root)])
        raise DataError(f"folder: domain {domain!r} is not in {root}; {close}. {self.layout()}")

    def _read(self, domain: str) -> Domain:
        directory = self.directory(domain)
        class_names = self.class_names
        for base in dict.fromkeys([directory, *_bases(directory)]):
            if loose := image_files(base):
                raise DataError(f"folder: {loose[0]} lies in no class folder; move it into one, or take it out")
        for base in _bases(directory):
            for folder in _directories(base):
                if folder.name in class_names:
                    _class_name(folder)
                elif image_files(folder):
                    close = nearest(folder.name, class_names)
                    raise DataError(f"folder: {folder} is not one of data.classes; {close}")
        parts = [_part(directory, names) for names in _PARTS]
        if parts[0] is None or parts[1] is None:
            files = class_folders(directory, class_names, exact=True)
            train, test = _leading(files, self.train_fraction)
        else:
            train, test = (class_folders(part, class_names, exact=True) for part in parts if part is not None)
        if self.duplicates == "drop":
            check_within([path for path, _ in (*train, *test)], directory)
            test = without_duplicates(test, train)
        if not train or not test:
            missing = "images" if not train and not test else "train images" if not train else "test images"
            raise DataError(f"folder: domain {domain!r} in {directory} has no {missing}. {self.layout()}")
        images = decode([path for path, _ in (*train, *test)], self.image_size, directory)
        labels = torch.tensor([label for _, label in (*train, *test)], dtype=torch.int64)
        count = len(train)
        return Domain(domain, Split(images[:count], labels[:count]), Split(images[count:], labels[count:]))


def _directories(parent: Path) -> list[Path]:
    """The folders that may be domains or classes: none that programs made for themselves, and no caches."""
    return sorted(
        path
        for path in parent.iterdir()
        if path.is_dir()
        and not path.name.startswith(_NOT_OURS)
        and path.name.casefold() != "cache"
        and not (path / "CACHEDIR.TAG").exists()
    )


def _class_name(folder: Path) -> str:
    """The name of a class folder.

    Raises:
        DataError: it holds no images, or some in folders below it.
    """
    for below in _directories(folder):
        if deeper := min(filter(is_image, below.rglob("*")), default=None):
            raise DataError(f"folder: {deeper} lies deeper than its class folder {folder}; move such images up into it")
    if not any(map(is_image, folder.iterdir())):
        kinds = ", ".join(sorted(SUFFIXES))
        raise DataError(f"folder: class folder {folder} has no images ({kinds}); put some there, or remove it")
    return folder.name


def _part(directory: Path, names: tuple[str, ...]) -> Path | None:
    return next((directory / name for name in names if (directory / name).is_dir()), None)


def _bases(directory: Path) -> list[Path]:
    """Where the class folders of a domain lie: its train and test folders when it has both, else itself."""
    train, test = (_part(directory, names) for names in _PARTS)
    return [directory] if train is None or test is None else [train, test]


def _leading(files: Files, fraction: float) -> tuple[Files, Files]:
    """As FedPall's rule with floor, but a class of one image is a training class."""
    train, test = per_class_fraction(files, fraction, "floor")
    absent = {label for _, label in files} - {label for _, label in train}
    moved: Files = [next(item for item in test if item[1] == label) for label in sorted(absent)]
    return sorted([*train, *moved], key=lambda item: (item[1], item[0])), [item for item in test if item not in moved]
