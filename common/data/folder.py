"""The user's own images: every directory of class folders, or with a list of images, is a domain."""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

import torch

from common.config import Count, Fraction, Names, check, checked
from common.data.batches import Split
from common.data.cache import warn_once
from common.data.domain import DATA_VARIABLE, DataSource, Domain, Duplicates, ImageSize, search_roots
from common.data.image_files import (
    HEIF_SUFFIXES,
    SUFFIXES,
    Reading,
    Resize,
    class_folders,
    image_files,
    is_image,
    without_duplicates,
)
from common.data.image_folders import Files, dropping, per_class_fraction, read_images
from common.data.layouts import bases, directories, has_parts, part_folders
from common.data.listings import SavedSet, decode_saved, is_saved, leading_rows, read_list, saved_sets
from common.data.names import coinciding, name_key, split_of
from common.errors import DataError, nearest, some_of
from common.extras import install_command


@checked
class Folder(DataSource):
    """``<root>/<domain>/<class>/<image>``, ``<root>/<domain>/{train,test}/<class>/<image>``, or a list in each domain.

    As a node's data-dir, the root may also be the domain's own directory. A root with train and test folders is one
    domain. Without such folders the leading ``train_fraction`` of each class, by file name, is train. A domain may lack
    a class: it has no samples of it. Words of splits (:data:`~common.data.names.SPLIT_WORDS`) count in any case.
    A domain's directory may also be one that ``save_to_disk`` of Hugging Face's ``datasets`` wrote.

    Attributes:
        domains: names of the domains; empty: all directories under ``root``, which must then be set.
        classes: names of the class folders, in label order; empty: the sorted union over all domains, which must then
            all be present. On devices that hold one domain each, name the classes, so that all agree on the labels.
        train_fraction: share of each class that is train, in (0, 1), rounded down, but at least one image.
        duplicates: what becomes of test images that are training images: see :data:`~.domain.Duplicates`.
        broken: what becomes of files that are no images: ``refuse`` ends the run and names them all; ``skip`` leaves
            them out, counts and names them.
        range: the values of a file that become black and white, such as ``[0, 1]`` or ``[0, 4095]``; empty: 0 and 255,
            or 0 and 65535 of 16-bit images.
        page: the page of a TIFF that is read, from 1.
        resize: how an image becomes a square: ``squash`` changes its proportions, ``crop`` cuts the longer side,
            ``pad`` adds black to the shorter side.
        listing: name of a CSV or Parquet file in each domain's directory that lists its images, instead of class
            folders; empty: class folders. Its columns are ``path`` (relative to the domain's directory), ``label`` (a
            class name) and, optionally, ``split`` (``train`` or ``test``).
    """

    name: ClassVar[str] = "folder"
    own_images: ClassVar[bool] = True

    domains: Names = ()
    image_size: ImageSize = 32
    classes: Names = ()
    train_fraction: Fraction = 0.8
    duplicates: Duplicates = "warn"
    broken: Literal["refuse", "skip"] = "refuse"
    range: tuple[float, ...] = ()
    page: Count = 1
    resize: Resize = "squash"
    listing: str = ""

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
        ordered = len(self.range) == 2 and self.range[0] < self.range[1]
        check(
            not self.range or ordered, f"range must be empty or [black, white], in this order; got {list(self.range)}"
        )
        if pair := coinciding(self.classes):
            raise ValueError(f"classes: {pair[0]!r} and {pair[1]!r} are two spellings of one name; keep one of them")
        check(
            Path(self.listing).name == self.listing,
            f"listing: {self.listing!r} must be the name of a file in each domain's folder",
        )

    @property
    def test_follows_training(self) -> str:
        """See :meth:`DataSource.test_follows_training`."""
        if self.broken == "skip":
            return "data.broken=skip"
        return dropping(self.duplicates)

    @property
    def on_duplicates(self) -> Duplicates:
        """``duplicates``."""
        return self.duplicates

    @property
    def reading(self) -> Reading:
        """``resize``, ``range``, ``page`` and ``broken``."""
        return Reading(self.resize, self.range, self.page, self.broken == "skip")

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
        if pair := coinciding(found):
            first, second = pair
            raise DataError(
                f"folder: {first!r} ({found[first]}) and {second!r} ({found[second]}) are two spellings of one class; "
                "give them one name. If they are two classes, give them names that differ in more than case, space, "
                "hyphens and underscores"
            )
        return tuple(sorted(found))

    def _classes_in(self, directory: Path) -> dict[str, Path]:
        """Return the names of a domain's classes, each with the place where it was found first."""
        found: dict[str, Path] = {}
        if self.listing:
            for item in read_list(directory, self.listing):
                found.setdefault(item.label, directory / self.listing)
            return found
        if is_saved(directory):
            return dict.fromkeys(_saved_names(directory), directory)
        for base in bases(directory):
            for folder in directories(base):
                found.setdefault(_class_name(folder), folder)
        return found

    def layout(self) -> str:
        """See :meth:`DataSource.layout`."""
        if self.listing:
            return f"Put {self.listing} into each domain's folder, with the columns path, label and, optionally, split."
        return "Put images there as <domain>/<class>/*.png, or <domain>/{train,test}/<class>/*.png."

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
        """Return whether ``root`` holds what a domain's folder does: a saved set, the list, or known class folders."""
        if is_saved(root) or (self.listing and (root / self.listing).is_file()):
            return True
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
        if is_saved(directory) and not self.listing:
            return self._read_saved(domain, directory)
        if self.listing:
            train, test = self._listed(directory)
        else:
            train, test = self._in_class_folders(directory)
        if self.duplicates == "drop":
            test = without_duplicates(test, train, directory)
        if not train or not test:
            missing = "images"
            if train:
                missing = "test images"
            elif test:
                missing = "train images"
            raise DataError(f"folder: domain {domain!r} in {directory} has no {missing}. {self.layout()}")
        return read_images(domain, train, test, self.image_size, directory, self.reading)

    def _in_class_folders(self, directory: Path) -> tuple[Files, Files]:
        """Return the train and test files of class folders, and warn of files that are not read."""
        self._check_folders(directory)
        _warn_of_skipped(directory)
        _warn_of_unread(directory)
        train_folder, test_folder = part_folders(directory)
        if train_folder is None or test_folder is None:
            return _leading(class_folders(directory, self.class_names, exact=True), self.train_fraction)
        train = class_folders(train_folder, self.class_names, exact=True)
        return train, class_folders(test_folder, self.class_names, exact=True)

    def _listed(self, directory: Path) -> tuple[Files, Files]:
        """Return the train and test files of the domain's list.

        Raises:
            DataError: a label is not one of the classes, or only some lines have a split.
        """
        train: Files = []
        test: Files = []
        every: Files = []
        for listed in read_list(directory, self.listing):
            item = (listed.path, self._label(listed.label, directory / self.listing))
            every.append(item)
            if listed.part == "train":
                train.append(item)
            elif listed.part == "test":
                test.append(item)
        if not train and not test:
            return _leading(sorted(every), self.train_fraction)
        if len(train) + len(test) < len(every):
            raise DataError(f"folder: {directory / self.listing}: give every line a split (train or test), or none")
        return train, test

    def _label(self, name: str, place: Path) -> int:
        """Return the label of a class name that was read from ``place``.

        Raises:
            DataError: it is none of the classes.
        """
        if name not in self.class_names:
            raise DataError(f"folder: {place}: {name!r} is no class; {nearest(name, self.class_names)}")
        return self.class_names.index(name)

    def _read_saved(self, domain: str, directory: Path) -> Domain:
        """Return the domain of a folder that Hugging Face's datasets wrote."""
        train, test = saved_sets(directory)
        if test is not None:
            trained, train_rows = self._whole(train)
            tested, rows = self._without_duplicates(test, train)
            return Domain(domain, trained, tested, _row_names(train, train_rows), _row_names(test, rows))
        whole, rows = self._whole(train)
        digests = train.digests() if self.duplicates == "drop" else []
        train_places, test_places = leading_rows(whole.labels.tolist(), self.train_fraction)
        if digests:
            known = {digests[rows[place]] for place in train_places}
            test_places = [place for place in test_places if digests[rows[place]] not in known]
        splits = whole.subset(torch.tensor(train_places)), whole.subset(torch.tensor(test_places))
        names = _row_names(train, rows)
        train_names = tuple(names[place] for place in train_places)
        return Domain(domain, *splits, train_names, tuple(names[place] for place in test_places))

    def _whole(self, saved: SavedSet) -> tuple[Split, list[int]]:
        """Return the images of a saved set, and the row of each."""
        labels = [self._label(name, saved.folder) for name in saved.labels()]
        if not labels:
            raise DataError(f"folder: {saved.folder} has no images")
        images, rows = decode_saved(saved, self.image_size, self.reading)
        return Split(images, torch.tensor([labels[row] for row in rows], dtype=torch.int64)), rows

    def _without_duplicates(self, test: SavedSet, train: SavedSet) -> tuple[Split, Sequence[int]]:
        """Return the test images and their rows; with ``duplicates=drop`` without those of ``train``, byte for byte."""
        whole, rows = self._whole(test)
        if self.duplicates != "drop":
            return whole, rows
        known = set(train.digests())
        digests = test.digests()
        kept = [place for place, row in enumerate(rows) if digests[row] not in known]
        return whole.subset(torch.tensor(kept, dtype=torch.int64)), [rows[place] for place in kept]

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


def _saved_names(directory: Path) -> set[str]:
    """Return the names of the classes of a folder that Hugging Face's datasets wrote."""
    names: set[str] = set()
    for saved in saved_sets(directory):
        if saved is not None:
            names.update(saved.names or saved.labels())
    return names


def _row_names(saved: SavedSet, rows: Sequence[int]) -> tuple[Path, ...]:
    """Return a path for each row, as if the images of a saved set were files in its folder."""
    return tuple(saved.folder / f"row {row}" for row in rows)


def _is_one_domain(root: Path, domain: str) -> bool:
    """Return whether the root is itself the only domain: it has that name, and folders of train and test images."""
    return root.name == domain and not (root / domain).is_dir() and root.is_dir() and has_parts(root)


def _leading(files: Files, fraction: float) -> tuple[Files, Files]:
    """Return train and test by FedPall's rule with floor, but a class with one image is a training class."""
    train, test = per_class_fraction(files, fraction, "floor")
    trained = {label for _, label in train}
    rest: Files = []
    for item in test:
        if item[1] in trained:
            rest.append(item)
        else:  # the first image of a class without training images
            train.append(item)
            trained.add(item[1])
    return sorted(train, key=lambda item: (item[1], item[0])), rest
