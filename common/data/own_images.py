"""What the user's own images have in common, in folders and in tables: classes, splits, and how they are read."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from common.config import Count, Fraction, Names, check, checked
from common.data.domain import DataSource, Duplicates
from common.data.image_files import Reading, Resize
from common.data.image_folders import Files, per_class_fraction
from common.data.names import coinciding, name_key, split_of
from common.errors import DataError, nearest
from common.overrides import written_override
from common.text import quantity, shell_line, warn_once


@checked
class OwnImages(DataSource):
    """Base of the data sets of the user's own images.

    Attributes:
        classes: names of the classes, in label order; empty: the sorted union over all domains, which must then all be
            present. On devices that hold one domain each, name the classes, so that all agree on the labels.
        train_fraction: share of each class that is train where nothing says which images are, in (0, 1), rounded down,
            but at least one image.
        duplicates: what becomes of test images that are training images. ``warn`` scores and counts them, ``drop``
            leaves out those with the bytes and class of a training image of their domain, ``refuse`` ends the run
            before its first round. See :data:`~.domain.Duplicates`.
        broken: what becomes of files that are no images: ``refuse`` ends the run and names them all; ``skip`` leaves
            them out, counts and names them.
        range: the values of a file that become black and white, such as ``[0, 1]`` or ``[0, 4095]``; empty: 0 and 255,
            or 0 and 65535 of 16-bit images. A range that ends above 255 is not used for files of 8 bits.
        page: the page of a TIFF that is read, from 1.
        resize: how an image becomes a square: ``squash`` changes its proportions, ``crop`` cuts the longer side,
            ``pad`` adds black to the shorter side.
    """

    own_images = True
    not_read_as = DataSource.not_read_as | {"train_fraction", "duplicates", "broken", "resize"}

    domains: Names = ()
    classes: Names = ()
    train_fraction: Fraction = 0.8
    duplicates: Duplicates = "warn"
    broken: Literal["refuse", "skip"] = "refuse"
    range: tuple[float, ...] = ()
    page: Count = 1
    resize: Resize = "squash"

    def __post_init__(self) -> None:
        super().__post_init__()
        ordered = len(self.range) == 2 and self.range[0] < self.range[1]
        check(
            not self.range or ordered, f"range must be empty or [black, white], in this order; got {list(self.range)}"
        )
        if pair := coinciding(self.classes):
            raise ValueError(f"classes: {pair[0]!r} and {pair[1]!r} are two spellings of one name; keep one of them")

    def read_as(self, domain: str, root: str | None = None) -> dict[str, object]:
        """See :meth:`DataSource.read_as`."""
        return {**super().read_as(domain, root), "classes": self.class_names}

    @property
    def test_follows_training(self) -> str:
        """See :meth:`DataSource.test_follows_training`."""
        if self.broken == "skip":
            return "data.broken=skip"
        return super().test_follows_training

    @property
    def on_duplicates(self) -> Duplicates:
        """``duplicates``."""
        return self.duplicates

    @property
    def reading(self) -> Reading:
        """``resize``, ``range``, ``page`` and ``broken``; images are turned upright."""
        return Reading(self.resize, self.range, self.page, self.broken == "skip")

    def sorted_classes(self, found: Mapping[str, object]) -> tuple[str, ...]:
        """Return the names of classes, sorted.

        Args:
            found: the place of each name, for the message.

        Raises:
            DataError: two are spellings of one name.
        """
        if pair := coinciding(found):
            first, second = pair
            raise DataError(
                f"{self.name}: {first!r} ({found[first]}) and {second!r} ({found[second]}) are two spellings of one "
                "class; give them one name. If they are two classes, give them names that differ in more than case, "
                "space, hyphens and underscores"
            )
        return tuple(sorted(found))

    def check_own(self, root: Path, domain: str) -> None:
        """Check that a device's folder is not named after another domain than the one that it is read as.

        Raises:
            DataError: it is.
        """
        for other in self.domains:
            if other != domain and name_key(other) == name_key(root.name):
                raise DataError(
                    f"{self.name}: {root} is the folder of {other}, and {domain!r} is wanted: give the folder of "
                    f"{domain!r}, or {root.parent} with {domain!r} in it"
                )

    def label_of(self, name: str, place: object) -> int:
        """Return the label of a class name that was read from ``place``.

        Raises:
            DataError: it is none of the classes.
        """
        if name not in self.class_names:
            raise DataError(f"{self.name}: {place}: {name!r} is no class; {nearest(name, self.class_names)}")
        return self.class_names.index(name)

    def divided(self, domain: str, place: str, every: Mapping[str, Files]) -> tuple[Files, Files]:
        """Return the train and the test images of a domain's images by the word of their split.

        Images without one, or of train alone, are divided by ``train_fraction``.

        Raises:
            DataError: some have a split and others none, or there are images to score and none to train on.
        """
        by_split: dict[str, Files] = {}
        for word, files in every.items():
            by_split.setdefault(split_of(word) or word, []).extend(files)
        if len(by_split) == 1 and by_split.keys() <= {"", "train"}:
            ((word, files),) = by_split.items()
            if word:
                warn_once(
                    f"{self.name}: {place}: all images are of {word}, so a share of each class is held out to score"
                )
            return leading(files, self.train_fraction)
        if "" in by_split:
            raise DataError(
                f"{self.name}: {place}: {len(by_split[''])} rows have no split; give every row one, or none"
            )
        scored = "test"
        validation = len(by_split.get("validation", ()))
        self._check_trained(domain, place, by_split)
        if validation and scored in by_split:
            warn_once(f"{self.name}: {place}: {validation} validation images are not read, since it has test images")
        elif validation:
            warn_once(
                f"{self.name}: {place}: there are no test images, so the {validation} validation images are scored"
            )
            scored = "validation"
        return by_split.get("train", []), by_split.get(scored, [])

    def _check_trained(self, domain: str, place: str, by_split: Mapping[str, Files]) -> None:
        """Refuse a domain whose images are all to be scored: none of them may be trained on unasked."""
        counts = {word: len(by_split[word]) for word in ("test", "validation") if word in by_split}
        if "train" in by_split or not counts:
            return
        called = "call the split of all of them train"
        trained = f"add train images, or {called}: a share of each class is then held out to score"
        labels = [label for files in by_split.values() for _, label in files]
        if len(set(labels)) == len(labels):  # of one image of each class, no share can be held out
            called, trained = "call the split of one of them train", "add train images"
        found = " and ".join(quantity(count, f"{word} image") for word, count in counts.items())
        left_out = written_override("protocol.leave_out", [domain])
        raise DataError(
            f"{self.name}: domain {domain!r} in {place} has {found}, and no train images. To train there, {trained}. "
            f"To only score them, {called}, too, and run with {shell_line(['protocol=leave_one_out', left_out])} "
            f"protocol.unseen=whole, or goldfinch evaluate MODEL --split all data={self.name} and the run's other "
            "settings of data"
        )

    def check_parts(self, domain: str, place: object, train: Files, test: Files) -> None:
        """Check that a domain has images of both splits.

        Raises:
            DataError: it has not.
        """
        if train and test:
            return
        missing = "images"
        if train:
            missing = "test images"
            if len({label for _, label in train}) == len(train):
                missing += ", since each of its classes has one image, which is a training image: add images of a class"
        elif test:
            missing = "train images"
        raise DataError(f"{self.name}: domain {domain!r} in {place} has no {missing}. {self.layout()}")


def whole_groups(groups: Sequence[str], labels: Tensor, count: int, draws: torch.Generator) -> Tensor:
    """Return which samples to take so that those of a group stay together: bool [N].

    Groups are tried in random order. One is taken if no more than ``count`` samples are, and each class keeps one.

    Args:
        groups: the group of each of N samples.
        labels: int64 [N].
        count: the most samples to take.
        draws: a CPU generator.
    """
    names = {name: number for number, name in enumerate(sorted(set(groups)))}
    numbers = torch.tensor([names[name] for name in groups])
    chosen = torch.zeros(len(groups), dtype=torch.bool)
    for number in torch.randperm(len(names), generator=draws):
        tried = chosen | (numbers == number)
        if int(tried.sum()) <= count and len(labels[~tried].unique()) == len(labels.unique()):
            chosen = tried
    return chosen


def none_held_out(labels: Sequence[int], groups: Sequence[str], share: float) -> str:
    """Return why a share of a client's samples is held out of training and is none, and what to do.

    Args:
        labels: the class of each sample.
        groups: the group of each; empty if nothing says it.
        share: of the samples, > 0.
    """
    asked = f"protocol.validation={share:g} of them is"
    held = len(labels)
    if not groups:
        several = sum(count for count in Counter(labels).values() if count > 1)
        if several:
            return f"{asked} none: set protocol.validation={math.ceil(50 / several) / 100:g} or more"
        return (
            f"{asked} none, since it has one of each class, which it trains on: give the client more of a class, or "
            "set protocol.validation=0"
        )
    count, smallest = int(share * held + 0.5), min(Counter(groups).values())
    needed = math.ceil(100 * smallest / held) / 100
    if count >= smallest:
        return (
            f"{asked} at most {count}, and each whole group that is as small has all samples of a class: give the "
            "client more groups with that class, or set protocol.validation=0"
        )
    remedy = f"set protocol.validation={needed:g} or more"
    if needed > 0.5:
        remedy = "its largest value, 0.5, is too little: give the client more groups, or set protocol.validation=0"
    return f"{asked} at most {count}, while the smallest whole group has {smallest}: {remedy}"


def leading(files: Files, fraction: float) -> tuple[Files, Files]:
    """Return train and test by FedPall's rule with floor, but a class with one image is a training class.

    An image that is listed several times is as often in one of the two.
    """
    train, test = per_class_fraction(sorted(set(files)), fraction, "floor")
    trained = {label for _, label in train}
    rest: Files = []
    for item in test:
        if item[1] in trained:
            rest.append(item)
        else:  # the first image of a class without training images
            train.append(item)
            trained.add(item[1])
    listed = Counter(files)
    found: list[Files] = []
    for part in (sorted(train, key=lambda item: (item[1], item[0])), rest):
        found.append([item for item in part for _ in range(listed[item])])
    return found[0], found[1]
