"""What a domain is, and what every data set offers: domains, each with a train and a test split."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field

from common.config import FolderName, Names, check, checked
from common.data.batches import Augmentation, Split
from common.data.image_files import Reading
from common.data.names import DOMAIN_NAMES, can_be_domain, check_names
from common.errors import DataError, nearest
from common.numerics import seeded_globals

ImageSize = Annotated[int, Field(ge=8, le=512)]
"""Side of square images, pixels."""

Duplicates = Literal["refuse", "warn", "drop"]
"""What becomes of test images that are training images. ``warn``: they are scored, and a warning counts them. ``drop``:
those with the bytes and class of a training image of their domain are not scored, and a warning counts the others.
``refuse``: the run ends before its first round."""

DATA_VARIABLE = "GOLDFINCH_DATA"

_load_lock = threading.Lock()


@dataclass(frozen=True, eq=False)
class Domain:
    """One domain (a camera, a country, a scanner) with its train and its test split.

    Attributes:
        name: the domain's name.
        train: the images that clients may train on.
        test: the images that are scored.
        train_files: a path for each training image that no other image has, whatever the settings of the data set;
            empty if its images have none. A private device remembers images by it.
        test_files: likewise, of each test image.
        train_groups: the name of each training image's group, such as its patient; empty if nothing says it.
        test_groups: likewise, of each test image.
    """

    name: str
    train: Split
    test: Split
    train_files: tuple[Path, ...] = ()
    test_files: tuple[Path, ...] = ()
    train_groups: tuple[str, ...] = ()
    test_groups: tuple[str, ...] = ()

    @cached_property
    def whole(self) -> Split:
        """The train split followed by the test split."""
        return Split(torch.cat([self.train.images, self.test.images]), torch.cat([self.train.labels, self.test.labels]))

    @cached_property
    def partitions(self) -> dict[str, Any]:
        """What protocols computed of this domain for all of its clients, by protocol and seed."""
        return {}


@checked
class DataSource(ABC):
    """Base of the data sets. A data set has domains; its fields name them, the image size and the folder of the files.

    Attributes:
        domains: names of the domains in use, in client order.
        image_size: height and width of the images, pixels, 8..512.
        augmentation: applied to batches by the trainer, not when images are loaded.
        root: directory of the files; ``None`` means the environment variable GOLDFINCH_DATA.
    """

    name: ClassVar[str]
    known_domains: ClassVar[tuple[str, ...]] = ()
    generated: ClassVar[bool] = False
    """True if the images are generated and need no files."""
    own_images: ClassVar[bool] = False
    """True if the images are the user's own, who can correct them. An image with two labels is then refused."""
    owner_decides: ClassVar[bool] = True
    """True if the images' folders do not say what their labels are, so that a private device asks its owner."""
    not_read_as: ClassVar[frozenset[str]] = frozenset({"domains", "image_size", "augmentation", "root"})
    """Settings that choose neither files, nor cells, nor what a label is; see :meth:`read_as`."""

    domains: Names
    image_size: ImageSize = 32
    augmentation: Augmentation = field(default_factory=Augmentation)
    root: FolderName | None = None

    def __post_init__(self) -> None:
        kind = type(self).__name__
        check(hasattr(self, "name"), f'{kind} has no name; write name: ClassVar[str] = "{kind.lower()}" there')
        check(len(self.domains) > 0, "domains must name at least one domain")
        check_names("domain", self.domains)
        for domain in self.domains:
            check(can_be_domain(domain), f"domains: {domain!r} cannot be a name; {DOMAIN_NAMES}")
            if self.known_domains and domain not in self.known_domains:
                raise ValueError(f"domains: {self.name} has no {domain!r}; {nearest(domain, self.known_domains)}")

    @property
    @abstractmethod
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; a label is an index into it."""

    @property
    def test_follows_training(self) -> str:
        """The setting by which the content of training images decides which images are scored; empty without one.

        With such a setting there is no differential privacy: the number of scored images would tell of training images.
        """
        if self.on_duplicates == "warn":
            return ""
        return f"data.duplicates={self.on_duplicates}"

    @property
    def grouped(self) -> bool:
        """Whether each image has a group, see :attr:`Domain.train_groups`."""
        return False

    @property
    def on_duplicates(self) -> Duplicates:
        """What becomes of test images that are training images."""
        return "warn"

    @property
    def reading(self) -> Reading:
        """How image files become arrays; exported models repeat it."""
        return Reading()

    @cached_property
    def class_count(self) -> int:
        """Number of classes K."""
        return len(self.class_names)

    @property
    def classes_sha256(self) -> str:
        """SHA-256 of the names of the classes, by label; equal where a label is the same class."""
        return hashlib.sha256(json.dumps(self.class_names).encode()).hexdigest()

    def load(self, domain: str, root: str | None = None, *, own: bool = True) -> Domain:
        """Return the domain's images and labels, read once per process, and cached on disk if decoding takes time.

        Only this domain's files are read, so a device needs the data of no other domain.

        Args:
            domain: one of ``domains``.
            root: the folder of the files instead of ``self.root`` (a node's data-dir).
            own: whether ``root`` may be the folder of this domain, as on a device that has no other. Without ``root``,
                as in a simulation, it never is: every domain would get the same images.

        Raises:
            DataError: unknown domain, missing or damaged files, or an empty split.
        """
        if domain not in self.domains:
            close = nearest(domain.lower(), self.domains)
            raise DataError(f"domain {domain!r} is not one of this run's data.domains of {self.name}; {close}")
        place = self._root(root)
        with _load_lock:
            return _load(self._at(place), domain, own=own and bool(root) and place is not None)

    @staticmethod
    def forget() -> None:
        """Let :meth:`load` read every domain again from now on, since files may have changed."""
        _load.cache_clear()

    def read_as(self, domain: str, root: str | None = None) -> dict[str, object]:  # noqa: ARG002
        """Return what decides which files or cells of a domain are images and labels: values by setting.

        All settings are among them but those of :attr:`not_read_as`. A setting that leaves the choice to the data has
        the value that they decide.

        Args:
            domain: one of ``domains``.
            root: as in :meth:`load`.

        Raises:
            DataError: the data do not decide.
        """
        if self.generated:
            return {}
        values: dict[str, object] = {}
        for each in dataclasses.fields(self):
            if each.name not in self.not_read_as:
                values[each.name] = getattr(self, each.name)
        return values

    def undecided(self, domain: str, decided: Collection[str]) -> DataSource:
        """Return this data set of one domain, with the defaults of the settings in :meth:`read_as`.

        Args:
            domain: one of ``domains``.
            decided: settings that stay as they are.
        """
        defaults: dict[str, Any] = {"domains": (domain,)}
        for each in dataclasses.fields(self):
            if each.name in self.not_read_as or each.name in decided:
                continue
            if each.default is not dataclasses.MISSING:
                defaults[each.name] = each.default
            elif each.default_factory is not dataclasses.MISSING:
                defaults[each.name] = each.default_factory()
        return dataclasses.replace(self, **defaults)

    def _at(self, place: str | None) -> Self:
        """Return this data set with its files in a folder, and without augmentation."""
        if place not in self._sources:
            self._sources[place] = dataclasses.replace(self, augmentation=Augmentation(), root=place)
        return self._sources[place]

    @cached_property
    def _sources(self) -> dict[str | None, Self]:
        """This data set by the folder of its files, without augmentation: what domains are read from."""
        return {}

    def check_files(self, domains: Collection[str] = ()) -> None:
        """Check that the files of ``domains``, by default of all, are there; files of single images are not decoded.

        Raises:
            DataError: they are not; the message says what to put where.
        """
        if self.generated:
            return
        for domain in domains or self.domains:
            self._at(self._root()).find_files(domain)

    def find_files(self, domain: str) -> None:  # noqa: B027  # a data set without files has nothing to find
        """Raise a :class:`DataError` if :meth:`load` would not find what ``domain`` needs. By default, do nothing."""

    def layout(self) -> str:
        """Return a sentence for error messages that says where to put which files; empty for generated data."""
        return ""

    def _root(self, root: str | None = None) -> str | None:
        chosen = root or self.root or os.environ.get(DATA_VARIABLE)
        if self.generated or not chosen:
            return None
        return str(Path(chosen).expanduser().absolute())

    @abstractmethod
    def _read(self, domain: str) -> Domain:
        """Return ``domain`` read from ``self.root``, an absolute path."""

    def _read_own(self, domain: str) -> Domain:
        """Return ``domain`` read from ``self.root``, which may be its own folder on a device that has no other."""
        return self._read(domain)


@lru_cache(maxsize=32)
def _load(source: DataSource, domain: str, *, own: bool) -> Domain:
    read = source._read_own if own else source._read
    where = f"{source.name}: domain {domain!r}"
    try:
        with seeded_globals(0, "read", domain):
            found = read(domain)
    except ValueError as error:  # such as arrays that do not fit together
        raise DataError(f"{where}: {error}") from error
    if found.name != domain:
        raise DataError(f"{where} was read as Domain({found.name!r}, ...)")
    for part, split in (("train", found.train), ("test", found.test)):
        if not len(split):
            place = f" under {source.root}" if source.root else ""
            raise DataError(f"{where}{place} has no {part} images; add some, or leave it out")
        if split.images.shape[2:] != (source.image_size, source.image_size):
            raise DataError(
                f"{source.name}: the {part} images of {domain!r} are {list(split.images.shape)}, and data.image_size "
                f"is {source.image_size}: set it to their side, or let the data set resize them"
            )
        for label in (int(split.labels.min()), int(split.labels.max())):
            if not 0 <= label < source.class_count:
                raise DataError(f"{where} has the label {label}, of {source.class_count} classes")
        for kind in (f"{part}_files", f"{part}_groups"):
            given = len(getattr(found, kind))
            if given not in (0, len(split)):
                raise DataError(f"{where}: {kind} must have an entry for each of {len(split)} images; got {given}")
    return found


def search_roots(source: DataSource, folders: tuple[str, ...]) -> Iterator[Path]:
    """Yield the directories that may hold the files of ``source``: the root, then the existing ``folders`` in it.

    Raises:
        DataError: no root is set, or the root is not a directory.
    """
    if source.root is None:
        raise DataError(
            f"{source.name} is read from files and no directory was given: set data.root=DIR, the node's data-dir, "
            f"or the environment variable {DATA_VARIABLE}. {source.layout()}"
        )
    root = Path(source.root)
    if not root.is_dir():
        raise DataError(f"{source.name}: {root} is not a directory. {source.layout()}")
    yield root
    for folder in folders:
        if (root / folder).is_dir():
            yield root / folder
