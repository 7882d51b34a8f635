"""The user's own images: every directory of class folders is a domain."""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from common.config import checked
from common.data.domain import DATA_VARIABLE, Domain, ImageSize, search_roots
from common.data.image_files import (
    HEIF_SUFFIXES,
    SUFFIXES,
    class_folders,
    image_files,
    is_image,
    without_duplicates,
)
from common.data.image_folders import Files, read_images
from common.data.layouts import bases, directories, has_parts, part_folders
from common.data.names import name_key, split_of
from common.data.own_images import OwnImages, leading
from common.errors import DataError, nearest, some_of
from common.extras import install_command
from common.text import warn_once


@checked
class Folder(OwnImages):
    """``<root>/<domain>/<class>/<image>``, or ``<root>/<domain>/{train,test}/<class>/<image>``.

    As a node's data-dir, the root may also be the domain's own directory. A root with train and test folders is one
    domain. Without such folders the leading ``train_fraction`` of each class, by file name, is train. A domain may lack
    a class: it has no samples of it. Words of splits (:data:`~common.data.names.SPLIT_WORDS`) count in any case.

    Attributes:
        domains: names of the domains; empty: all directories under ``root``, which must then be set.
        classes: names of the class folders.
    """

    name: ClassVar[str] = "folder"

    image_size: ImageSize = 32

    def __post_init__(self) -> None:
        if not self.domains:
            if self.root is None or not Path(self.root).expanduser().is_dir():
                state = "does not exist"
                if self.root is None:
                    state = "is not set"
                raise ValueError(
                    "name the domains (data.domains=[a,b]), or set data.root to a directory that holds one directory "
                    f"per domain; data.root={self.root} {state}"
                )
            root = Path(self.root).expanduser().absolute()
            found = tuple(path.name for path in directories(root))
            if has_parts(root):  # train/ and test/ of one domain are no two domains
                found = (root.name,)
            object.__setattr__(self, "domains", found)
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
        if not Path(root).is_dir():
            raise DataError(
                f"folder: {root}, which data.root or {DATA_VARIABLE} names, is no folder; name the one that holds the "
                "folders of the domains. On a server without images, name the classes: data.classes=[a,b]"
            )
        found: dict[str, Path] = {}
        for domain in self.domains:
            directory = Path(root) / domain
            if _is_one_domain(Path(root), domain):
                directory = Path(root)
            if not directory.is_dir():
                raise DataError(
                    f"folder: the classes are the union over all domains, but {directory} does not exist; "
                    f"{_domains_near(domain, Path(root))}. Put it there, or name the classes (data.classes=[a,b]) so "
                    "that every device agrees on the labels"
                )
            for name, place in self._classes_in(directory).items():
                found.setdefault(name, place)
        if not found:
            raise DataError(f"folder: no class folders in any domain under {root}; {self.layout()}")
        return self.sorted_classes(found)

    def _classes_in(self, directory: Path) -> dict[str, Path]:
        """Return the names of a domain's classes, each with the place where it was found first."""
        found: dict[str, Path] = {}
        for base in bases(directory):
            for folder in directories(base):
                found.setdefault(_class_name(folder), folder)
        return found

    def layout(self) -> str:
        """See :meth:`DataSource.layout`."""
        return (
            "Put images there as <domain>/<class>/*.png, or <domain>/{train,test}/<class>/*.png. Lists of images and "
            "folders of save_to_disk are data=table."
        )

    def directory(self, domain: str) -> Path:
        """Return ``<root>/<domain>``; the root itself if it holds train and test folders and nothing names domains.

        Raises:
            DataError: it does not exist.
        """
        (root,) = search_roots(self, ())
        if (root / domain).is_dir():
            return root / domain
        if _is_one_domain(root, domain):
            return root
        remedy = f"{_domains_near(domain, root)}. {self.layout()}"
        if root.name == domain or self._is_a_domain(root):
            remedy = f"{root} is the folder of one domain: give the folder above it, {root.parent}"
        raise DataError(f"folder: domain {domain!r} is not in {root}; {remedy}")

    def own_directory(self, domain: str) -> Path:
        """Return the domain's directory on a device, where the root may be the domain's own.

        Raises:
            DataError: the directory was not found, or the root is named after another domain.
        """
        (root,) = search_roots(self, ())
        if (root / domain).is_dir() or not (root.name == domain or self._is_a_domain(root)):
            return self.directory(domain)
        for other in self.domains:
            if other != domain and name_key(other) == name_key(root.name):
                raise DataError(
                    f"folder: {root} is the folder of {other}, and {domain!r} is wanted: give the folder of "
                    f"{domain!r}, or {root.parent} with {domain!r} in it"
                )
        return root

    def _is_a_domain(self, root: Path) -> bool:
        """Return whether ``root`` holds what a domain's folder does: known class folders."""
        for base in bases(root):
            if any(path.name in self.classes for path in directories(base)):
                return True
        return False

    def find_files(self, domain: str) -> None:
        """See :meth:`DataSource.find_files`."""
        self.directory(domain)

    def _read(self, domain: str) -> Domain:
        return self._read_from(self.directory(domain), domain)

    def _read_own(self, domain: str) -> Domain:
        return self._read_from(self.own_directory(domain), domain)

    def _read_from(self, directory: Path, domain: str) -> Domain:
        train, test = self._in_class_folders(directory)
        if self.duplicates == "drop":
            test = without_duplicates(test, train, directory)
        self.check_parts(domain, directory, train, test)
        return read_images(domain, train, test, self.image_size, directory, self.reading)

    def _in_class_folders(self, directory: Path) -> tuple[Files, Files]:
        """Return the train and test files of class folders, and warn of files that are not read."""
        self._check_folders(directory)
        _warn_of_skipped(directory)
        _warn_of_unread(directory)
        train_folder, test_folder = part_folders(directory)
        if train_folder is None or test_folder is None:
            return leading(class_folders(directory, self.class_names, exact=True), self.train_fraction)
        train = class_folders(train_folder, self.class_names, exact=True)
        return train, class_folders(test_folder, self.class_names, exact=True)

    def _check_folders(self, directory: Path) -> None:
        """Check that all images of a domain lie directly in folders of the known classes.

        Raises:
            DataError: an image lies elsewhere; the message names it or its folder.
        """
        class_names = self.class_names
        for base in dict.fromkeys([directory, *bases(directory)]):
            if loose := image_files(base):
                raise DataError(f"folder: {loose[0]} lies in no class folder; move it into one, or take it out")
        for base in bases(directory):
            for folder in directories(base):
                if folder.name in class_names:
                    _class_name(folder)
                elif image_files(folder):
                    close = nearest(folder.name, class_names)
                    raise DataError(f"folder: {folder} is not one of data.classes; {close}")


def _domains_near(domain: str, root: Path) -> str:
    """Return a sentence that names the folder under ``root`` that is closest to ``domain``, or all folders there."""
    if not root.is_dir():
        return f"{root} does not exist"
    return nearest(domain, [path.name for path in directories(root)])


def _class_name(folder: Path) -> str:
    """Return the name of a class folder.

    Raises:
        DataError: the folder has no images, or has some in folders below it.
    """
    for below in directories(folder):
        if deeper := min(filter(is_image, below.rglob("*")), default=None):
            raise DataError(f"folder: {deeper} lies deeper than its class folder {folder}; move such images up into it")
    if not any(map(is_image, folder.iterdir())):
        kinds = ", ".join(sorted(SUFFIXES))
        skipped = _skipped([folder])
        others = ""
        if skipped:
            others = f", but {skipped}"
        raise DataError(f"folder: class folder {folder} has no images ({kinds}){others}; put some there, or remove it")
    return folder.name


def _warn_of_skipped(directory: Path) -> None:
    """Log how many files of each suffix are not read in a domain's class folders."""
    folders: list[Path] = []
    for base in bases(directory):
        folders += directories(base)
    skipped = _skipped(folders)
    if skipped:
        warn_once(f"folder: {directory}: not read: {skipped}; {', '.join(sorted(SUFFIXES))} are")


def _warn_of_unread(directory: Path) -> None:
    """Log which folders next to a domain's train and test folders are not read, with the number of their images.

    A folder of validation images that is read as that of the test images is logged too.
    """
    parts = bases(directory)
    if parts == [directory]:
        return
    _, test = part_folders(directory)
    if test is not None and split_of(test.name) == "validation":
        warn_once(f"folder: {directory}: there are no test images, so those of {test.name}/ are scored")
    unread: list[str] = []
    for folder in directories(directory):
        if folder not in parts:
            count = sum(map(is_image, folder.rglob("*")))
            unread.append(f"{folder.name}/ ({count} images)")
    if unread:
        read = " and ".join(f"{base.name}/" for base in parts)
        warn_once(
            f"folder: {directory}: not read: {some_of(unread, 5)}; only {read} are. Move images there that are to be "
            "trained on or scored"
        )


def _skipped(folders: Sequence[Path]) -> str:
    """Return the files that are not images by their suffix, counted: "12 .heic (convert them to JPEG), 1 .txt"."""
    counts: Counter[str] = Counter()
    for folder in folders:
        for path in folder.iterdir():
            if path.is_file() and not path.name.startswith(".") and not is_image(path):
                counts[path.suffix.lower() or "without a suffix"] += 1
    parts: list[str] = []
    for suffix, count in sorted(counts.items()):
        hint = ""
        if suffix in HEIF_SUFFIXES:
            hint = f" ({install_command('heif')} reads them, or convert them to JPEG)"
        elif suffix == ".avif":
            hint = " (convert them to JPEG)"
        parts.append(f"{count} {suffix}{hint}")
    return ", ".join(parts)


def _is_one_domain(root: Path, domain: str) -> bool:
    """Return whether the root is itself the only domain: it has that name, and folders of train and test images."""
    return root.name == domain and not (root / domain).is_dir() and root.is_dir() and has_parts(root)
