"""Images with their labels, how a pass over them is cut into batches, and the augmentation of whole batches.

Images are augmented on the training device: per-sample parameters are drawn on the CPU, and each operation is one call
for the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from common.config import Positive, ZeroToOne, check, checked
from common.data.transforms import Transform

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
        for given in (self.images, self.labels):
            check(torch.is_tensor(given), f"images and labels must be tensors: torch.from_numpy; got {type(given)}")
        check(self.images.dtype == torch.uint8, f"images must be uint8, 0 to 255; got {self.images.dtype}")
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


def union_of(splits: Sequence[Split]) -> Split:
    """Return the samples of all ``splits``, one after the other; the split itself if there is one."""
    if len(splits) == 1:
        return splits[0]
    images = torch.cat([split.images for split in splits])
    return Split(images, torch.cat([split.labels for split in splits]))


def split_batches(order: Tensor, size: int, last: str, *, single: bool = False) -> list[Tensor]:
    """Return ``order`` cut into batches. The only batch of a split is always kept.

    Args:
        order: int64 [N], indices of samples.
        size: samples per batch, >= 1.
        last: ``keep``, ``drop`` or ``merge`` a last batch with fewer samples. ``merge`` joins it to the batch before
            it.
        single: whether ``keep`` also keeps a last batch of one sample; otherwise it is joined to the batch before it,
            because batch normalisation of feature vectors cannot train on it.
    """
    batches = list(order.split(size))
    if len(batches) > 1:
        short = len(batches[-1])
        if short < size and last == "drop":
            batches.pop()
        elif (short == 1 and not single) or (short < size and last == "merge"):
            tail = batches.pop()
            batches[-1] = torch.cat([batches[-1], tail])
    return batches


# ---- augmentation ----------------------------------------------------------------------------------------------------


# Columns of the uniform draws; every sample always consumes all of them, so that switching one part on or off
# leaves the other parts' draws as they were.
_TOP, _LEFT, _FLIP, _ANGLE, _ERASE, _AREA, _RATIO, _ERASE_TOP, _ERASE_LEFT = range(9)
_DRAWS = 9
# Columns of the parameters made from the draws.
_CROP, _FLIPPED, _MATRIX, _BOX = slice(0, 2), slice(2, 3), slice(3, 9), slice(9, 13)
_ERASED_AREA = (0.02, 0.33)  # share of the image, as in Zhong et al., "Random Erasing Data Augmentation", AAAI 2020
_ERASED_RATIO = (0.3, 3.3)  # height over width

Normalisation = Literal["fixed", "image"]
"""How images are normalised: by ``mean`` and ``std`` of the settings, or each image by its own."""

SMALLEST_DEVIATION = 1 / 255
"""Smallest standard deviation that an image is divided by, of values in 0..1: one grey level. A flat image is 0."""


@checked
class Augmentation:
    """Random crop, flip, rotation, erasing and a transform of the user's for training; normalisation for both.

    Order: the transform, crop and flip on uint8, scale to 0..1, rotate (outside is black), normalise, erase (to 0,
    which is the mean).

    Attributes:
        crop_padding: pixels of black added on each side before a crop of the original size; 0 is no crop.
        flip: mirror left to right with probability 0.5.
        rotation: largest angle in degrees, 0..180; the angle is uniform in [-rotation, rotation].
        erasing: probability in 0..1 that one rectangle of a sample is erased.
        transform: the dotted name of a torchvision v2 transform or of a ``torch.nn.Module`` of your own, which takes
            an image, uint8 [3, H, W], and returns it changed; its arguments are settings below this one.
        mean: per channel, of images scaled to 0..1; one value or three.
        std: likewise, > 0.
        normalisation: ``fixed`` normalises every image by ``mean`` and ``std``. ``image`` subtracts each image's own
            mean over channels and pixels and divides by its own standard deviation, so that brightness and contrast
            no longer differ between domains; ``mean`` and ``std`` are then not used.
    """

    crop_padding: Annotated[int, Field(ge=0, le=256)] = 0
    flip: bool = False
    rotation: Annotated[float, Field(ge=0, le=180)] = 0.0
    erasing: ZeroToOne = 0.0
    transform: Transform | None = None
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[Positive, ...] = (0.229, 0.224, 0.225)
    normalisation: Normalisation = "fixed"

    def __post_init__(self) -> None:
        for name, values in (("mean", self.mean), ("std", self.std)):
            check(len(values) in (1, 3), f"{name} must have one or three values; got {list(values)}")

    @property
    def random(self) -> bool:
        """Whether training images differ from test images."""
        return bool(self.crop_padding or self.flip or self.rotation or self.erasing or self.transform)

    def train(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return a randomly augmented, normalised copy.

        Args:
            images: uint8 [B, 3, H, W] on any device.
            generator: a CPU generator; ``9 * B`` uniform numbers are always drawn from it, also for parts that are off,
                and one number more for a transform.

        Returns:
            float32 [B, 3, H, W] on the images' device.
        """
        draws = torch.rand(len(images), _DRAWS, generator=generator)
        if self.transform is not None:
            images = self.transform(images, generator)
        # Computed on the CPU, so that every device gets the same numbers, and moved at once.
        parameters = self._parameters(draws, *images.shape[2:]).to(images.device, non_blocking=True)
        images = self._crop_and_flip(images, parameters)
        scaled = images.float().div_(255)
        if self.rotation:
            grid = F.affine_grid(parameters[:, _MATRIX].reshape(-1, 2, 3), list(scaled.shape), align_corners=False)
            scaled = F.grid_sample(scaled, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        normalised = self._normalise(scaled)
        if self.erasing:
            return self._erase(normalised, parameters)
        return normalised

    def test(self, images: Tensor) -> Tensor:
        """Return uint8 [B, 3, H, W] as normalised float32 [B, 3, H, W] on the same device, without augmentation."""
        return self._normalise(images.float().div_(255))

    def _normalise(self, scaled: Tensor) -> Tensor:
        if self.normalisation == "image":
            return standardised(scaled)
        mean, std = _constants(self.mean, self.std, scaled.device)
        return scaled.sub_(mean).div_(std)

    def _parameters(self, draws: Tensor, height: int, width: int) -> Tensor:
        """Return the parameters of each sample: float32 [B, 13], columns as named above."""
        span = 2 * self.crop_padding + 1
        top = (draws[:, _TOP] * span).floor().clamp_(max=span - 1)
        left = (draws[:, _LEFT] * span).floor().clamp_(max=span - 1)
        angle = (2 * draws[:, _ANGLE] - 1) * math.radians(self.rotation)
        cosine, sine, zero = torch.cos(angle), torch.sin(angle), torch.zeros_like(angle)
        # grid_sample's coordinates run from -1 to 1 on both axes, so the off-diagonal terms carry the aspect ratio.
        matrix = (cosine, -sine * height / width, zero, sine * width / height, cosine, zero)
        low, high = _ERASED_AREA
        area = (low + (high - low) * draws[:, _AREA]) * height * width
        low, high = math.log(_ERASED_RATIO[0]), math.log(_ERASED_RATIO[1])
        ratio = torch.exp(low + (high - low) * draws[:, _RATIO])
        tall = (area * ratio).sqrt().round().clamp_(1, height) * (draws[:, _ERASE] < self.erasing)
        wide = (area / ratio).sqrt().round().clamp_(1, width)
        erase_top = (draws[:, _ERASE_TOP] * (height - tall + 1)).floor()
        erase_left = (draws[:, _ERASE_LEFT] * (width - wide + 1)).floor()
        flipped = (draws[:, _FLIP] < 0.5).float()
        return torch.stack([top, left, flipped, *matrix, erase_top, erase_top + tall, erase_left, erase_left + wide], 1)

    def _crop_and_flip(self, images: Tensor, parameters: Tensor) -> Tensor:
        height, width = images.shape[2:]
        padding = self.crop_padding
        if padding:
            padded = F.pad(images, (padding, padding, padding, padding))
            images = _windows(padded, parameters[:, _CROP].long(), height, width)
        if self.flip:
            images = self._flip(images, parameters[:, _FLIPPED] > 0)
        return images

    @staticmethod
    def _flip(images: Tensor, chosen: Tensor) -> Tensor:
        """Return a copy of ``images`` with those of ``chosen`` (bool [B, 1]) mirrored left to right."""
        if images.is_cuda:  # nonzero() would wait for the device
            return torch.where(chosen[:, :, None, None], images.flip(3), images)
        rows = chosen.flatten().nonzero().flatten()
        return images.index_copy(0, rows, images.index_select(0, rows).flip(3))

    def _erase(self, normalised: Tensor, parameters: Tensor) -> Tensor:
        height, width = normalised.shape[2:]
        rows, columns = torch.arange(height, device=normalised.device), torch.arange(width, device=normalised.device)
        top, bottom, left, right = parameters[:, _BOX].unsqueeze(2).unbind(1)
        mask = ((rows >= top) & (rows < bottom))[:, :, None] & ((columns >= left) & (columns < right))[:, None, :]
        return normalised.masked_fill_(mask[:, None], 0.0)


def standardised(images: Tensor) -> Tensor:
    """Return float images ``[B, C, H, W]`` in 0..1, each minus its mean and divided by its standard deviation.

    Mean and standard deviation are over channels and pixels. The deviation is at least :data:`SMALLEST_DEVIATION`.
    """
    centred = images - images.mean((1, 2, 3), keepdim=True)
    deviation = centred.square().mean((1, 2, 3), keepdim=True).sqrt()
    return centred / deviation.clamp_min(SMALLEST_DEVIATION)


def _windows(padded: Tensor, corners: Tensor, height: int, width: int) -> Tensor:
    """Return one window of each image, [B, 3, height, width]; its top and left are the image's row of ``corners``."""
    if padded.is_cuda:
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: [B, 3, span, span, H, W]
        return windows[torch.arange(len(padded), device=padded.device), :, corners[:, 0], corners[:, 1]]
    # on the CPU, copying row after row is two to four times as fast as picking pixel after pixel
    size, strides = (padded.shape[1], height, width), padded.stride()
    starts = (strides[0] * torch.arange(len(padded)) + strides[2] * corners[:, 0] + strides[3] * corners[:, 1]).tolist()
    return torch.stack([padded.as_strided(size, strides[1:], start) for start in starts])


@lru_cache(maxsize=64)
def _constants(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation as [1, C, 1, 1] on the device; moved there once."""
    return torch.tensor(mean, device=device).view(1, -1, 1, 1), torch.tensor(std, device=device).view(1, -1, 1, 1)
