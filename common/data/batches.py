"""Images with their labels, and how a pass over them is cut into batches."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.config import check

EVALUATION_BATCH = 256
"""Images per batch where images are only scored, on devices and on the server."""


@dataclass(frozen=True, eq=False)
class Split:
    """Images and their labels.

    Attributes:
        images: uint8 [N, 3, H, W], 0..255.
        labels: int64 [N], 0..K-1.
    """

    images: Tensor
    labels: Tensor
    _copies: dict[torch.device, Split] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check(self.images.dtype == torch.uint8, f"images must be uint8; got {self.images.dtype}")
        size, count = list(self.images.shape), list(self.labels.shape)
        check(len(size) == 4 and size[1] == 3, f"images must be [N, 3, H, W]; got {size}")
        check(self.labels.dtype == torch.int64, f"labels must be int64; got {self.labels.dtype}")
        check(count == size[:1], f"{size[0]} images need as many labels; got {count}")

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, indices: Tensor) -> Split:
        """Return the samples at ``indices`` (int64 [M]), in that order: a copy, or itself if all are taken in order."""
        indices = indices.to(self.labels.device)
        if len(indices) == len(self) and torch.equal(indices, torch.arange(len(self), device=indices.device)):
            return self
        return Split(self.images_at(indices), self.labels[indices])

    def images_at(self, indices: Tensor) -> Tensor:
        """Return a copy of the images at ``indices`` (int64 [M], on the images' device), in that order.

        Whole images are copied: on the CPU twenty times as fast as ``images[indices]``, which copies byte by byte.
        """
        return self.images.index_select(0, indices)

    def to(self, device: torch.device | str) -> Split:
        """Return the same samples on ``device``; itself if they are already there.

        The copy lives as long as this split, so that all clients of a process share it.
        """
        device = torch.device(device)
        if self.images.device == device:
            return self
        if device not in self._copies:
            self._copies[device] = Split(self.images.to(device), self.labels.to(device))
        return self._copies[device]

    def class_counts(self, class_count: int) -> Tensor:
        """Return the number of samples per class, int64 [class_count], on the labels' device."""
        return torch.bincount(self.labels, minlength=class_count)


def split_batches(order: Tensor, size: int, last: str) -> list[Tensor]:
    """Return ``order`` cut into batches.

    Args:
        order: int64 [N], indices of samples.
        size: samples per batch, >= 1.
        last: ``keep``, ``drop`` or ``merge`` a last batch with fewer samples. ``merge`` joins it to the batch before
            it. A last batch of one sample is joined also with ``keep``: batch normalisation cannot train on it.
    """
    batches = list(order.split(size))
    if len(batches) > 1:
        short = len(batches[-1])
        if short < size and last == "drop":
            batches.pop()
        elif short == 1 or (short < size and last == "merge"):
            tail = batches.pop()
            batches[-1] = torch.cat([batches[-1], tail])
    return batches
