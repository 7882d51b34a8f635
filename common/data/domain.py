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
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from common.config import Names, check, checked
from common.data.augmentation import Augmentation
from common.data.batches import Split
from common.errors import DataError, nearest

ImageSize = Annotated[int, Field(ge=8, le=512)]
"""Side of square images, pixels."""

DATA_VARIABLE = "GOLDFINCH_DATA"

_load_lock = threading.Lock()


@dataclass(frozen=True, eq=False)
class Domain:
    """One domain (a camera, a country, a scanner) with its train and its test split."""

    name: str
    train: Split
    test: Split

    @cached_property
    def whole(self) -> Split:
        """Train and test split together, in this order."""
        return Split(torch.cat([self.train.images, self.test.images]), torch.cat([self.train.labels, self.test.labels]))


@checked
class DataSource(ABC):
    """A data set made of domains; its fields say which, how large, and where the files are.

    Attributes:
        domains: names of the domains in use, in client order.
        image_size: height and width of the images, pixels, 8..512.
        augmentation: applied in batches by the trainer; not part of what is loaded.
        root: directory of the files; ``None`` means the environment variable GOLDFINCH_DATA.
    """

    name: ClassVar[str]
    known_domains: ClassVar[tuple[str, ...]] = ()
    generated: ClassVar[bool] = False
    """Whether there is nowhere to look."""

    domains: Names
    image_size: ImageSize = 32
    augmentation: Augmentation = field(default_factory=Augmentation)
    root: str | None = None

    def __post_init__(self) -> None:
        check(len(self.domains) > 0, "domains must name at least one domain")
        for domain in self.domains:
            # Domain names become client ids and folder names.
            plain = domain.strip() == domain != "" and not domain.startswith(".") and not set(domain) & set("/\\:\n")
            check(plain, f"domains: {domain!r} cannot be a name; use letters, digits, - and _")
            if self.known_domains and domain not in self.known_domains:
                raise ValueError(f"domains: {self.name} has no {domain!r}; {nearest(domain, self.known_domains)}")

    @property
    @abstractmethod
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; a label is an index into it."""

    @cached_property
    def class_count(self) -> int:
        """Number of classes K."""
        return len(self.class_names)

    def load(self, domain: str, root: str | None = None) -> Domain:
        """The domain's images and labels, read once per process and cached on disk where decoding costs time.

        Only this domain's files are read, so that a device needs no other domain's data.

        Args:
            domain: one of ``domains``.
            root: where to look instead of ``self.root`` (a node's data-dir).

        Raises:
            DataError: unknown domain, missing or damaged files, or an empty split.
        """
        if domain not in self.domains:
            close = nearest(domain.lower(), self.domains)
            raise DataError(f"domain {domain!r} is not one of this run's data.domains of {self.name}; {close}")
        with _load_lock:
            return _load(dataclasses.replace(self, augmentation=Augmentation(), root=self._root(root)), domain)

    def layout(self) -> str:
        """Which files are expected where, in a sentence for error messages; empty for generated data."""
        return ""

    def _root(self, root: str | None = None) -> str | None:
        chosen = root or self.root or os.environ.get(DATA_VARIABLE)
        return None if self.generated or not chosen else str(Path(chosen).expanduser().absolute())

    @abstractmethod
    def _read(self, domain: str) -> Domain:
        """Read ``domain`` from ``self.root``, which is already resolved."""


@lru_cache(maxsize=32)
def _load(source: DataSource, domain: str) -> Domain:
    found = source._read(domain)
    for part, split in (("train", found.train), ("test", found.test)):
        if not len(split):
            place = f" under {source.root}" if source.root else ""
            raise DataError(f"{source.name}: domain {domain!r}{place} has no {part} images; add some, or drop it")
        if int(split.labels.min()) < 0 or int(split.labels.max()) >= source.class_count:
            worst = int(split.labels.max())
            raise DataError(f"{source.name}: domain {domain!r} has the label {worst}, of {source.class_count} classes")
    return found


def search_roots(source: DataSource, folders: tuple[str, ...]) -> Iterator[Path]:
    """Directories where the files of ``source`` may lie: the root itself, then ``folders`` in it.

    Raises:
        DataError: no root is set, or it is not a directory.
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
    yield from (root / folder for folder in folders if (root / folder).is_dir())
