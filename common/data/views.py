"""Extra views of a batch: random convolutions that change texture and keep shape, or more of the data's augmentation.

A view needs no label and no statistics of the data; it acts on normalised images, on their device. All draws come from
the generator that is passed in and are made on the CPU, so that every device sees the same views.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from common.config import Count, Natural, ZeroToOne, checked

SPREAD_FLOOR = 1e-5
"""Added to a channel's variance before its root is divided by."""


KERNEL_SIZES = (1, 3, 5, 7)
"""Sizes of a random convolution's kernel (the paper's), of which one is drawn for each view."""


@checked
class Views(ABC):
    """How a batch is extended.

    Args:
        count: J, the number of extra views of every image, >= 0; 0 leaves batches as they are.
    """

    before_augmentation: ClassVar[bool] = False
    """Whether a batch is extended before the data's own augmentation, so that every view has draws of its own."""

    count: Natural = 1

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """``[(1 + count) * B, C, H, W]``: the images themselves, then one whole batch per view, in the same order.

        Args:
            images: ``[B, C, H, W]`` float, normalised; memory format, dtype and device are kept. No gradient flows.
            generator: a CPU generator; the same state gives the same views.
        """
        if self.count == 0:
            return images
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            batches = [images]
            for _ in range(self.count):
                batches.append(self.view(images.clone(), generator))  # one that works in place keeps the images
            return torch.cat(batches)

    def repeat(self, labels: Tensor) -> Tensor:
        """``[(1 + count) * B]``: ``labels [B]`` (or any rows ``[B, ...]``) in the order of the extended batch."""
        if self.count == 0:
            return labels
        return torch.cat([labels] * (1 + self.count))

    @abstractmethod
    def view(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return one view ``[B, C, H, W]`` of ``images [B, C, H, W]``."""


@checked
class NoViews(Views):
    """No extra views."""

    count: Natural = field(default=0, init=False)

    def view(self, images: Tensor, generator: torch.Generator) -> Tensor:  # noqa: ARG002 - draws nothing
        """Return the images."""
        return images


@checked
class Augmented(Views):
    """The data's own augmentation, drawn again for every view: FedAPC's multi-view reading, for any method.

    Args:
        count: J; a step sees 1 + J augmentations of each image, none of which is the original.
    """

    before_augmentation: ClassVar[bool] = True

    def view(self, images: Tensor, generator: torch.Generator) -> Tensor:  # noqa: ARG002 - the augmentation draws
        """Return the images, which the data's augmentation then changes one by one."""
        return images


@checked
class RandConv(Views):
    """Convolution with a random kernel, fresh for every view and batch (Xu et al., ICLR 2021).

    Its size is one of :data:`KERNEL_SIZES`.

    Args:
        count: J.
        mix: RC_mix: ``a * convolved + (1 - a) * images`` with one ``a ~ U(0, 1)`` per view; otherwise the convolved
            images alone.
        identity_probability: RC_img: probability, per view, that the images stay as they are (0.5 in the paper).
        repeats: passes with the same kernel, each standardised before the next, >= 1; 1 is RandConv, more repeat it
            as Pro-RandConv does.
        random_repeats: draw the passes uniformly from 1..repeats for every view.
    """

    mix: bool = True
    identity_probability: ZeroToOne = 0.0
    repeats: Count = 1
    random_repeats: bool = False

    def view(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return the convolved (and mixed) images, or the images themselves."""
        if self.identity_probability > 0 and _uniform(generator) < self.identity_probability:
            return images
        kernel = draw_kernel(images, _choose(KERNEL_SIZES, generator), generator)
        convolved = convolve(images, kernel)
        repeats = self.repeats
        if self.random_repeats:
            repeats = _choose(range(1, self.repeats + 1), generator)
        for _ in range(repeats - 1):
            convolved = convolve(standardise(convolved), kernel)
        if not self.mix:
            return convolved
        return torch.lerp(images, convolved, _uniform(generator))


def draw_kernel(images: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Return ``[C, C, size, size]``: weights from N(0, 1 / (C size^2)), which keeps the mean square of a flat image."""
    channels = images.shape[1]
    kernel = torch.randn(channels, channels, size, size, generator=generator) / math.sqrt(channels * size * size)
    return kernel.to(images.device, images.dtype)


def convolve(images: Tensor, kernel: Tensor) -> Tensor:
    """Return ``[B, C, H, W]``: stride 1, zero padding ``size // 2``, no bias.

    Args:
        images: ``[B, C, H, W]``.
        kernel: ``[C, C, size, size]``, odd size.
    """
    return F.conv2d(images, kernel, padding=kernel.shape[-1] // 2)


def standardise(images: Tensor) -> Tensor:
    """``[B, C, H, W]``: every channel of every image with mean 0 and standard deviation 1 (flat channels become 0)."""
    variance, mean = torch.var_mean(images, dim=(2, 3), keepdim=True, correction=0)
    return (images - mean) * torch.rsqrt(variance + SPREAD_FLOOR)


def _uniform(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator))


def _choose(options: Sequence[int], generator: torch.Generator) -> int:
    return options[int(torch.randint(len(options), (), generator=generator))]
