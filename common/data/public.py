"""Public images: an unlabelled set, equal on all devices."""

import hashlib

import torch
from torch import Tensor

from common.config import AtLeastTwo, check, checked
from common.data.domain import DataSource
from common.errors import DataError
from common.numerics import generator


@checked
class PublicImages:
    """Some training images of one domain of any data set; the labels are not used.

    Attributes:
        source: the data set.
        domain: one of its domains.
        samples: number of images, >= 2; the choice depends on nothing but the number of images.
    """

    source: DataSource
    domain: str
    samples: AtLeastTwo = 512

    def __post_init__(self) -> None:
        check(self.domain in self.source.domains, f"domain {self.domain!r} is not one of {list(self.source.domains)}")

    def load(self, root: str | None = None) -> Tensor:
        """Return the images, uint8 [samples, 3, H, W].

        Args:
            root: the folder of the files instead of ``source.root`` (a node's data-dir).

        Raises:
            DataError: the domain cannot be read or has too few images.
        """
        images = self.source.load(self.domain, root, own=False).train.images
        if len(images) < self.samples:
            raise DataError(
                f"the public set {self.source.name}/{self.domain} has {len(images)} images, {self.samples} are asked "
                "for: lower method.public.samples or choose another set"
            )
        chosen = torch.randperm(len(images), generator=generator(0, "public images", len(images)))[: self.samples]
        return images[chosen]


def fingerprint(images: Tensor) -> Tensor:
    """Return 63 bits of the SHA-256 over shape and pixels, int64 scalar: equal on devices with the same images."""
    digest = hashlib.sha256(repr(tuple(images.shape)).encode())
    digest.update(images.cpu().contiguous().numpy().tobytes())
    return torch.tensor(int.from_bytes(digest.digest()[:8], "big") >> 1)
