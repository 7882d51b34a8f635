"""Ten digits from seven sources, in their public formats. "Digits" means a different choice of them in every paper."""

from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.config import Names, checked
from common.data.batches import Split
from common.data.cache import cached
from common.data.digit_files import (
    Arrays,
    existing,
    read_class_folders,
    read_listed,
    read_mat,
    read_mnist,
    read_usps,
)
from common.data.domain import DataSource, Domain, search_roots
from common.data.layouts import found_in
from common.data.names import normal_name
from common.data.value_ranges import sliver_of
from common.errors import DataError
from common.extras import libraries_of
from common.regular_files import file_state

_VERSION = 2  # raise when reading changes

# Per domain: the directories or archives that may hold it (relative to the root), and what to put there.
_PLACES: dict[str, tuple[tuple[str, ...], str]] = {
    "mnist": (
        ("MNIST/raw", "mnist/raw", "MNIST/MNIST/raw", "MNIST", "mnist"),
        "MNIST/raw/train-images-idx3-ubyte.gz and its three siblings",
    ),
    "usps": (("USPS", "usps"), "USPS/usps.bz2 and USPS/usps.t.bz2 (LIBSVM)"),
    "svhn": (("SVHN", "svhn"), "SVHN/train_32x32.mat and SVHN/test_32x32.mat"),
    "mnist_m": (
        ("MNIST-M", "MNIST_M", "mnist_m", "MNISTM"),
        "MNIST-M/mnist_m.tar.gz, or unpacked MNIST-M/mnist_m/ with its label lists",
    ),
    "syn": (
        ("SYN", "syn", "synthetic_digits"),
        "SYN/{imgs_train,imgs_valid}/{0..9}/*.png, the set of 10,000 + 2,000 images",
    ),
    "synth_digits": (
        ("SynthDigits", "synth_digits", "synthdigits", "SYN", "syn", "synthetic_digits"),
        "SynthDigits/synth_train_32x32.mat and synth_test_32x32.mat, Ganin's set of 479,400 + 9,553 images",
    ),
    "computer_fonts": (
        ("CHARS74K-FNT", "chars74k_fnt", "computer_fonts"),
        "CHARS74K-FNT/EnglishFnt_digits_28x28.tar.gz, the digits of Chars74K's EnglishFnt with train and test lists",
    ),
}


_GANINS = ("synth_train_32x32.mat", "synth_test_32x32.mat")
"""Files of Ganin's set, which also lie in folders that are named as those of the small set."""


@checked
class Digits(DataSource):
    """Digits from ``<root>[/digits]/<set>``; see ``layout``.

    ``syn`` and ``synth_digits`` are two different sets that papers both call synthetic digits: the small image folder
    of FPL, FedAPC and FedPLCC (test 2,000), and Ganin's large one of FedBN and FedPall. ``computer_fonts`` is neither
    and must never be reported as one of them.

    Attributes:
        split: ``standard`` keeps each set's own train and test; ``pooled`` joins them and divides 80/20, stratified
            by class with seed 0, as FedPall's code does with scikit-learn.
    """

    name: ClassVar[str] = "digits"
    owner_decides: ClassVar[bool] = False
    not_read_as: ClassVar[frozenset[str]] = DataSource.not_read_as | {"split"}
    known_domains: ClassVar[tuple[str, ...]] = tuple(_PLACES)

    domains: Names = ("mnist", "usps", "svhn", "mnist_m")
    split: Literal["standard", "pooled"] = "standard"

    @property
    def class_names(self) -> tuple[str, ...]:
        """The digits 0 to 9."""
        return tuple(map(str, range(10)))

    def layout(self) -> str:
        """See :meth:`DataSource.layout`."""
        wanted = "; ".join(f"{domain}: {_PLACES[domain][1]}" for domain in self.domains)
        return f"Put the sets there (or in digits/): {wanted}."

    def find_files(self, domain: str) -> None:
        """See :meth:`DataSource.find_files`. The files are read, which are few, and kept in the cache."""
        self._read(domain)

    def _read(self, domain: str) -> Domain:
        place = self._place(domain)
        key: list[str | int] = [_VERSION, domain, self.image_size, *_state(place)]

        def build() -> dict[str, Tensor]:
            found: dict[str, Tensor] = {}
            for part in ("train", "test"):
                images, labels = _arrays(domain, place, part == "train", self.image_size)
                if len(images) != len(labels):
                    raise DataError(
                        f"digits: {domain} in {place} has {len(images)} {part} images but {len(labels)} labels"
                    )
                if labels.min(initial=0) < 0 or labels.max(initial=0) > 9:
                    raise DataError(f"digits: {domain} in {place} has labels that are not digits 0..9")
                if sliver := sliver_of(images):
                    low, high = sliver
                    raise DataError(
                        f"digits: the {part} images of {domain} in {place} hold {low} to {high} of 0 to 255; fetch the "
                        "published files"
                    )
                found[f"{part}_images"] = resized(images, self.image_size)
                found[f"{part}_labels"] = torch.from_numpy(labels)
            return found

        arrays = cached(f"digits-{domain}", key, build)
        train = Split(_rgb(arrays["train_images"]), arrays["train_labels"])
        test = Split(_rgb(arrays["test_images"]), arrays["test_labels"])
        if self.split == "pooled":
            train, test = pooled(train, test)
        return Domain(domain, train, test)

    def _place(self, domain: str) -> Path:
        """Return the directory or archive of ``domain``: in the root, in its ``digits``, or the root itself."""
        names, wanted = _PLACES[domain]
        roots = list(search_roots(self, ("digits", "Digits")))
        for root in roots:
            for name in names:
                if _may_hold(domain, root / name):
                    return root / name
        for name in names:
            if roots[0].name in name.split("/"):
                return roots[0]
        hint = ""
        if domain == "syn" and any(existing(root / name, _GANINS) for root in roots for name in names):
            hint = f" {_GANINS[0]} there is of another domain: synth_digits in data.domains."
        elif domain in ("syn", "synth_digits") and any(existing(root, _PLACES["computer_fonts"][0]) for root in roots):
            hint = " The computer-font digits found there are another domain: computer_fonts in data.domains."
        places = " or ".join(map(str, roots))
        raise DataError(f"digits: {domain} is not in {places}; {found_in(roots[0])}; put {wanted} there.{hint}")


def _may_hold(domain: str, place: Path) -> bool:
    """Return whether ``place`` exists and may hold the domain: of the two synthetic sets, the one that is there."""
    if domain == "syn":
        return place.exists() and existing(place, _GANINS) is None
    if domain == "synth_digits" and normal_name(place.name) in ("syn", "syntheticdigits"):
        return existing(place, _GANINS) is not None
    return place.exists()


def resized(images: np.ndarray, image_size: int) -> Tensor:
    """Return uint8 [N, 1 or 3, S, S], S = ``image_size``, of uint8 [N, H, W] or [N, H, W, 3]: bilinear, antialiased."""
    if images.ndim == 3:
        tensor = torch.from_numpy(images.copy())[:, None]
    else:
        tensor = torch.from_numpy(images).permute(0, 3, 1, 2)
    if tensor.shape[2:] == (image_size, image_size):
        return tensor.contiguous()
    parts = [
        F.interpolate(part.contiguous(), (image_size, image_size), mode="bilinear", antialias=True)
        for part in tensor.split(4096)
    ]
    return torch.cat(parts)


def pooled(train: Split, test: Split) -> tuple[Split, Split]:
    """Return train and test joined and split again, 80/20, stratified by class with seed 0."""
    with libraries_of("datasets", "data.split=pooled"):
        from sklearn.model_selection import train_test_split  # slow to import, and needed only here

    images, labels = torch.cat([train.images, test.images]), torch.cat([train.labels, test.labels])
    places = np.arange(len(labels))
    try:
        chosen = train_test_split(places, test_size=0.2, random_state=0, stratify=labels.numpy())
    except ValueError as error:
        raise DataError(f"split=pooled needs at least two images of each class: {error}") from error
    whole = Split(images, labels)
    return whole.subset(torch.from_numpy(chosen[0])), whole.subset(torch.from_numpy(chosen[1]))


def _rgb(images: Tensor) -> Tensor:
    """Return three channels; those of grey images are views of the same bytes until samples are copied."""
    return images.expand(-1, 3, -1, -1)


def _state(place: Path) -> list[str | int]:
    """Return name and state of every file of the domain, for the cache's key."""
    files = [place]
    if place.is_dir():
        files = sorted(path for path in place.rglob("*") if path.is_file())
    state: list[str | int] = [str(place)]
    for path in files:
        state += [str(path.relative_to(place.parent)), *file_state(path)]
    return state


def _arrays(domain: str, place: Path, train: bool, image_size: int) -> Arrays:
    part = "test"
    if train:
        part = "train"
    if domain == "mnist":
        return read_mnist(place, train)
    if domain == "usps":
        return read_usps(place, train)
    if domain == "svhn":
        return read_mat(place / f"{part}_32x32.mat")
    if domain == "synth_digits":
        return read_mat(place / f"synth_{part}_32x32.mat")
    if domain == "syn":
        names: tuple[str, ...] = ("imgs_valid", "imgs_val", "imgs_test", "valid", "val", "test")
        if train:
            names = ("imgs_train", "train")
        folder = existing(place, names)
        if folder is None:
            raise DataError(f"syn: {place / names[0]} is missing; put {_PLACES['syn'][1]} there")
        return read_class_folders(folder, image_size)
    if domain == "mnist_m":
        place = existing(place, ("mnist_m.tar.gz", "mnist_m.tar", "mnist_m_unpacked")) or place
        if place.is_dir() and (place / "mnist_m").is_dir():
            place = place / "mnist_m"
        folder_name = f"mnist_m_{part}"
        if not place.is_dir():  # in the archive
            folder_name = f"mnist_m/{folder_name}"
        return read_listed(place, f"{folder_name}_labels.txt", image_size, lambda name: f"{folder_name}/{name}")
    place = existing(place, ("EnglishFnt_digits_28x28.tar.gz",)) or place
    inside = "English/"
    if place.is_dir() and not (place / "English").is_dir():
        inside = ""
    return read_listed(place, f"{inside}{part}.txt", image_size, lambda name: f"{inside}{name}")
