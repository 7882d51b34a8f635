"""What a domain is, and what every data set offers: domains, each with a train and a test split."""

from __future__ import annotations

import dataclasses
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field

from common.config import Names, check, checked
from common.data.batches import Augmentation, Split
from common.data.image_files import Reading
from common.data.names import check_names
from common.errors import DataError, nearest

ImageSize = Annotated[int, Field(ge=8, le=512)]
"""Side of square images, pixels."""

Duplicates = Literal["refuse", "warn", "drop"]
"""What becomes of test images that are training images. ``warn``: they are scored, and a warning counts them. ``drop``:
those with the same bytes as a training image of their domain are not scored, and a warning counts the others.
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
    """

    name: str
    train: Split
    test: Split
    train_files: tuple[Path, ...] = ()
    test_files: tuple[Path, ...] = ()

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

    domains: Names
    image_size: ImageSize = 32
    augmentation: Augmentation = field(default_factory=Augmentation)
    root: str | None = None

    def __post_init__(self) -> None:
        check(len(self.domains) > 0, "domains must name at least one domain")
        check_names("domain", self.domains)
        for domain in self.domains:
            # Domain names become client ids and folder names.
            allowed = domain.strip() == domain != "" and not domain.startswith(".") and not set(domain) & set("/\\:\n")
            check(allowed, f"domains: {domain!r} cannot be a name; use letters, digits, - and _")
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
            if place not in self._sources:
                self._sources[place] = dataclasses.replace(self, augmentation=Augmentation(), root=place)
            return _load(self._sources[place], domain, own=own and bool(root) and place is not None)

    @cached_property
    def _sources(self) -> dict[str | None, DataSource]:
        """This data set by the folder of its files, without augmentation: what domains are read from."""
        return {}

    def check_files(self) -> None:
        """Check that the files of all domains are where they are expected, without reading them.

        Raises:
            DataError: they are not; the message says what to put where.
        """
        if self.generated:
            return
        source = dataclasses.replace(self, augmentation=Augmentation(), root=self._root())
        for domain in self.domains:
            source.find_files(domain)

    def find_files(self, domain: str) -> None:  # noqa: B027  # a data set without files has nothing to find
        """Raise a :class:`DataError` if the files of ``domain`` are not under ``self.root``. By default, do nothing."""

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
    if own:
        found = source._read_own(domain)
    else:
        found = source._read(domain)
    for part, split in (("train", found.train), ("test", found.test)):
        if not len(split):
            place = ""
            if source.root:
                place = f" under {source.root}"
            raise DataError(
                f"{source.name}: domain {domain!r}{place} has no {part} images; add some, or leave the domain out"
            )
        if int(split.labels.min()) < 0 or int(split.labels.max()) >= source.class_count:
            worst = int(split.labels.max())
            raise DataError(f"{source.name}: domain {domain!r} has the label {worst}, of {source.class_count} classes")
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
