"""The border between the images that a device trains on and those that it scores: each image is on one side, for good.

A score has no noise: it is an exact function of each image that is scored. So an image that a private run trained on
must never be scored, in no run, and one that was scored must never be claimed as protected. All settings of a run come
from the server, the split of the data among them. Therefore the device remembers the side of each image, beside its
ledgers, and refuses a run that would move an image to another side.

An image is known by its file and not by its content. If equal content made two images one, then a copy of a test image
among the training images would be refused, and the refusal would tell that it is there.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from client.private_folder import PrivateFolder
from common.data.domain import DataSource, Domain
from common.errors import DataError, ImageSideError, RepeatedImageError

FOLDER = ".border"
"""Folder of the border, beside the ledgers of domains. No domain's name begins with a dot."""

BORDER = "border.json"

SCORED = "scored"
"""The side of the images that are scored. The side of a domain's training images is :func:`trained_on`."""

NOT_THE_SPLIT = frozenset({"domains", "image_size", "augmentation", "root", "resize"})
"""Settings of every data set that do not decide which image is a training image."""


def trained_on(domain: str) -> str:
    """Return the side of the images that are trained on as samples of ``domain``.

    A domain's ledger counts what is released of its images. So an image belongs to one domain: a server that names the
    same folder in another way would else find another ledger.
    """
    return f"trained on as {domain}"


@dataclass(frozen=True)
class Images:
    """Images of one domain, by name.

    Args:
        domain: the domain's name.
        names: one name for each image, equal in every run.
        split: what decides which image a name means: that names are files, or the settings and sizes of a data set in
            which they are places.
        groups: the group of each image; empty without groups. All images of a group are on one side.
    """

    domain: str
    names: tuple[str, ...]
    split: str
    groups: tuple[str, ...] = ()


def training_images(source: DataSource, domain: Domain, rows: Tensor) -> Images:
    """Return the images at ``rows`` (int64 [n]) of a domain's train split."""
    names = _names(source, domain, "train", domain.train_files, len(domain.train))
    groups = [domain.train_groups[row] for row in rows.tolist() if domain.train_groups]
    return _images(source, domain, [names[row] for row in rows.tolist()], groups)


def scored_images(source: DataSource, domain: Domain, *, whole: bool) -> Images:
    """Return the images of a domain's test split; with ``whole`` those of its train split as well."""
    names = _names(source, domain, "test", domain.test_files, len(domain.test))
    groups = domain.test_groups
    if whole:
        names = [*_names(source, domain, "train", domain.train_files, len(domain.train)), *names]
        groups = domain.train_groups + groups
    return _images(source, domain, names, groups)


def check_single(images: Images) -> None:
    """Check that no image is there twice, so that one image is one sample (``privacy.unit=sample``).

    A class mean moves by as many shares as samples change. If a file is three samples, whoever replaces it changes
    three.

    Args:
        images: the training images of a client, one for each sample.

    Raises:
        RepeatedImageError: an image is there twice, by its path, by a link, or by its place in the data set.
    """
    times = Counter(_keys_on_disk(images))
    most = max(times.values(), default=1)
    if most > 1:
        raise RepeatedImageError(
            f"{images.domain}: {len(images.names)} training samples are {len(times)} images, and one of them is "
            f"{most} samples. privacy.unit=sample covers the change of one sample. Choose privacy.unit=group with "
            "data.group=COLUMN, a column of the table with one name for all rows of an image, such as that of the "
            "images or of the patients; privacy.unit=client, which covers the change of any number; or list each image "
            "once"
        )


def check_grouped(images: Images) -> None:
    """Check that all samples of one image are of one group (``privacy.unit=group``).

    Args:
        images: the training images of a client, one for each sample.

    Raises:
        RepeatedImageError: an image is of two groups.
    """
    groups: dict[Hashable, str] = {}
    for key, group in zip(_keys_on_disk(images), images.groups, strict=True):
        if groups.setdefault(key, group) != group:
            raise RepeatedImageError(
                f"{images.domain}: one image is a sample of the group {groups[key]!r} and of {group!r}. "
                "privacy.unit=group covers the change of one group. Give all rows of an image one group, or choose "
                "privacy.unit=client"
            )


def _keys_on_disk(images: Images) -> list[Hashable]:
    """Return a key of each image, equal for all names of a file."""
    known: dict[str, Hashable] = {}
    for name in images.names:
        if name not in known:
            known[name] = _on_disk(name)
    return [known[name] for name in images.names]


def _on_disk(name: str) -> Hashable:
    """Return a key of an image's file, equal for all of its paths; the image's name if there is no file."""
    try:
        status = Path(name).stat()
    except (OSError, ValueError):
        return name
    if not status.st_ino:  # some file systems have no numbers
        return name
    return status.st_dev, status.st_ino


def _names(source: DataSource, domain: Domain, part: str, files: Sequence[Path], count: int) -> list[str]:
    if files:
        return [str(path.resolve()) for path in files]
    return [f"{source.name} {domain.name} {part} {row}" for row in range(count)]


def _images(source: DataSource, domain: Domain, names: Sequence[str], groups: Sequence[str]) -> Images:
    return Images(domain.name, tuple(names), _split(source, domain), tuple(groups))


def _split(source: DataSource, domain: Domain) -> str:
    if domain.train_files:
        first = domain.train_files[0]
        if first.exists():
            return "files"
        return f"rows of {first.parent.resolve()}"  # of a table that holds its images; another may hold the same
    settings = {"source": source.name, "train": len(domain.train), "test": len(domain.test)}
    for field in dataclasses.fields(source):
        if field.name not in NOT_THE_SPLIT:
            settings[field.name] = getattr(source, field.name)
    return json.dumps(settings, sort_keys=True, default=str)


class Border(PrivateFolder):
    """The side of each image of a device, in ``border.json``, as hashes that are keyed by the device's secret.

    Args:
        folder: one for all domains of the device; created with the first file.
    """

    needs_secret: ClassVar[str] = BORDER

    def check(self, side: str, images: Images) -> None:
        """Check that no image is on another side.

        Args:
            side: :data:`SCORED`, or :func:`trained_on` of a domain.
            images: the images.

        Raises:
            ImageSideError: an image is on another side, or the data set was split in another way before.
            DataError: the border is damaged, or cannot be read.
        """
        self._add(self._read(), side, self._keyed(images))

    def keep(self, side: str, images: Images) -> None:
        """Record that ``images`` are on ``side``, before any of them is used.

        Raises:
            ImageSideError: as in :meth:`check`; nothing is recorded.
            DataError: the border is damaged, or cannot be written.
        """
        keyed = self._keyed(images)
        with self._locked():
            content = self._read()
            if self._add(content, side, keyed):
                self._write(BORDER, json.dumps(content, separators=(",", ":"), sort_keys=True) + "\n")

    def _keyed(self, images: Images) -> Images:
        """Return the images with hashes in place of all names. A group is kept like an image of its own."""
        texts: list[tuple[str, ...]] = [("domain", images.domain), ("split", images.split)]
        texts += [("image", name) for name in images.names]
        texts += [("group", images.domain, name) for name in dict.fromkeys(images.groups)]
        domain, split, *names = self.keyed_hashes(texts)
        return Images(domain, tuple(names), split)

    @staticmethod
    def _add(content: dict[str, dict[str, str]], side: str, images: Images) -> bool:
        """Add ``images`` on ``side`` to the content of the file; return whether any was new."""
        sides, splits = content["sides"], content["splits"]
        if splits.get(images.domain, images.split) != images.split:
            raise ImageSideError(
                "this device's images were divided into training and test images before, and these settings of data, "
                "or a changed number of images, would divide them in another way; use the settings of the first "
                "private run"
            )
        known = len(sides)
        for name in images.names:
            before = sides.setdefault(name, side)
            if before != side:
                raise ImageSideError(
                    f"an image that this device would use as {side} was {before} before, in a private run, and each "
                    "image keeps its side; use the settings of data and protocol of the first private run"
                )
        splits[images.domain] = images.split
        return len(sides) > known

    def _read(self) -> dict[str, dict[str, str]]:
        path = self.folder / BORDER
        written = self._content(BORDER, "the sides of this device's images")
        if written is None:
            return {"sides": {}, "splits": {}}
        try:
            content = json.loads(written)
            parts: dict[str, dict[str, str]] = {}
            for part in ("sides", "splits"):
                parts[part] = {str(key): str(value) for key, value in content[part].items()}
            return parts
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{path} is damaged, so it is not known which images were trained on, and nothing is sent: restore it; "
                "deleting it forgets them"
            ) from error
