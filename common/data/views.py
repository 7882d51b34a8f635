"""Extra views of a batch: random convolutions that change texture and keep shape, or more of the data's augmentation.

A view needs no label and no statistics of the data; it acts on normalised images, on their device. All draws come from
the generator that is passed in and are made on the CPU, so that every device sees the same views.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import AfterValidator, Field
from torch import Tensor
from torch.nn import functional as F

from common.config import Count, Natural, NonNegative, ZeroToOne, check, checked

SPREAD_FLOOR = 1e-5
"""Added to a channel's variance before its root is divided by."""


def _odd(size: int) -> int:
    check(size % 2 == 1, f"{size} is even; images keep their size only under odd kernels")
    return size


KernelSize = Annotated[Count, AfterValidator(_odd)]
KernelSizes = Annotated[tuple[KernelSize, ...], Field(min_length=1)]


@checked
class Views(ABC):
    """How a batch is extended.

    Args:
        count: J, the number of extra views of every image, >= 0; 0 leaves batches as they are.
    """

    before_augmentation: ClassVar[bool] = False
    """Whether a batch is extended before the data's own augmentation, so that every view has draws of its own."""

    count: Natural = 0

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
                batches.append(self.view(images, generator))
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

    def __post_init__(self) -> None:
        check(self.count == 0, f"views=none has no extra views, so count must be 0; got {self.count}")

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

    count: Natural = 1

    def view(self, images: Tensor, generator: torch.Generator) -> Tensor:  # noqa: ARG002 - the augmentation draws
        """Return the images, which the data's augmentation then changes one by one."""
        return images


@checked
class RandConv(Views):
    """Convolution with a random kernel, fresh for every view and batch (Xu et al., ICLR 2021).

    Args:
        count: J.
        kernel_sizes: odd sizes, one drawn uniformly per view.
        mix: RC_mix: ``a * convolved + (1 - a) * images`` with one ``a ~ U(0, 1)`` per view; otherwise the convolved
            images alone.
        identity_probability: RC_img: probability, per view, that the images stay as they are (0.5 in the paper).
        repeats: passes with the same kernel, each standardised before the next, >= 1; 1 is RandConv, more repeat it
            as Pro-RandConv does.
        random_repeats: draw the passes uniformly from 1..repeats for every view.
    """

    count: Natural = 1
    kernel_sizes: KernelSizes = (1, 3, 5, 7)
    mix: bool = True
    identity_probability: ZeroToOne = 0.0
    repeats: Count = 1
    random_repeats: bool = False

    def view(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return the convolved (and mixed) images, or the images themselves."""
        if self.identity_probability > 0 and _uniform(generator) < self.identity_probability:
            return images
        kernel = draw_kernel(images, _choose(self.kernel_sizes, generator), generator)
        convolved = convolve(images, kernel)
        repeats = self.repeats
        if self.random_repeats:
            repeats = _choose(range(1, self.repeats + 1), generator)
        for _ in range(repeats - 1):
            convolved = convolve(standardise(convolved), kernel)
        if not self.mix:
            return convolved
        return torch.lerp(images, convolved, _uniform(generator))


@checked
class ProgressiveRandConv(Views):
    """One random convolution block, applied again and again (Pro-RandConv, Choi et al., CVPR 2023).

    The block is a convolution with a small kernel, then each channel standardised per image, then a random scale and
    shift per channel, then tanh. A smooth random field displaces the sampling positions of the convolution. The block
    is applied L times with the same draws, L uniform in 1..repeats. Few passes change texture a little, many change it
    a lot, and shape stays.

    Args:
        count: J.
        kernel_size: odd.
        repeats: the largest L, >= 1.
        smoothing: multiply the kernel by a Gaussian of width U(0, 1), which keeps fine detail.
        offset: largest standard deviation, in pixels, of the displacements (drawn from U(0, offset)); 0 does not
            displace. The paper: 0.2 for digits, 0.5 for larger images.
        contrast: standard deviation of scales and shifts; 0 leaves standardised images and applies no tanh.
    """

    count: Natural = 1
    kernel_size: KernelSize = 3
    repeats: Count = 10
    smoothing: bool = True
    offset: NonNegative = 0.2
    contrast: NonNegative = 0.5

    def view(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return the images after L passes through one random block."""
        passes = _choose(tuple(range(1, self.repeats + 1)), generator)
        kernel = draw_kernel(images, self.kernel_size, generator, smoothing=self.smoothing)
        offsets = None
        if self.offset > 0:
            offsets = self._draw_offsets(images, generator)
        channels = images.shape[1]
        scales = _normal((1, channels, 1, 1), generator, images) * self.contrast
        shifts = _normal((1, channels, 1, 1), generator, images) * self.contrast
        for _ in range(passes):
            images = standardise(convolve(images, kernel, offsets))
            if self.contrast > 0:
                images = torch.tanh(images * scales + shifts)
        return images

    def _draw_offsets(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return ``[1, 2 k^2, H, W]``: displacements in pixels, one smooth field per kernel tap and axis."""
        height, width = images.shape[2:]
        spread = self.offset * _uniform(generator)
        fields = smooth_fields(2 * self.kernel_size**2, height, width, generator)
        return (spread * fields)[None].to(images.device, images.dtype)


@checked
class AugMix(Views):
    """AugMix's mixing (Hendrycks et al., ICLR 2020) with random convolutions as the operations.

    Each chain applies 1..depth random convolutions, standardised in between; an image's view is
    ``m * image + (1 - m) * sum_i w_i chain_i`` with ``w ~ Dirichlet(1, ..., 1)`` and ``m ~ Beta(1, 1)`` per image.

    Args:
        count: J.
        chains: >= 1.
        depth: longest chain, >= 1; each chain's length is uniform in 1..depth.
        kernel_sizes: odd sizes, one drawn uniformly per convolution.
    """

    count: Natural = 1
    chains: Count = 3
    depth: Count = 3
    kernel_sizes: KernelSizes = (1, 3, 5, 7)

    def view(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return the convex mixture of the images and their chains."""
        batch = len(images)
        # exponential draws divided by their sum are Dirichlet(1); Beta(1, 1) is uniform
        exponential = torch.empty(batch, self.chains).exponential_(generator=generator)
        shares = (exponential / exponential.sum(1, keepdim=True)).to(images.device, images.dtype)
        kept = torch.rand(batch, 1, 1, 1, generator=generator).to(images.device, images.dtype)
        mixture = torch.zeros_like(images)
        for chain in range(self.chains):
            mixture += shares[:, chain, None, None, None] * self._chain(images, generator)
        return torch.lerp(mixture, images, kept)

    def _chain(self, images: Tensor, generator: torch.Generator) -> Tensor:
        length = _choose(tuple(range(1, self.depth + 1)), generator)
        for step in range(length):
            kernel = draw_kernel(images, _choose(self.kernel_sizes, generator), generator)
            images = convolve(standardise(images) if step else images, kernel)
        return images


def draw_kernel(images: Tensor, size: int, generator: torch.Generator, *, smoothing: bool = False) -> Tensor:
    """Return ``[C, C, size, size]``: weights from N(0, 1 / (C size^2)), which keeps the mean square of a flat image.

    With ``smoothing``, multiplied by ``exp(-(i^2 + j^2) / (2 s^2))``, ``s ~ U(0, 1)``, around the centre.
    """
    channels = images.shape[1]
    kernel = torch.randn(channels, channels, size, size, generator=generator) / math.sqrt(channels * size * size)
    if smoothing:
        width = max(_uniform(generator), 1e-4)
        squares = (torch.arange(size, dtype=torch.float32) - size // 2).square()
        kernel = kernel * torch.exp(-(squares[:, None] + squares) / (2 * width * width))
    return kernel.to(images.device, images.dtype)


def convolve(images: Tensor, kernel: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Return ``[B, C, H, W]``: stride 1, zero padding ``size // 2``, no bias.

    Args:
        images: ``[B, C, H, W]``.
        kernel: ``[C, C, size, size]``, odd size.
        offsets: ``[1, 2 size^2, H, W]`` displacements (vertical, horizontal per tap) in pixels, shared by the batch.
    """
    padding = kernel.shape[-1] // 2
    if offsets is None:
        return F.conv2d(images, kernel, padding=padding)
    from torchvision.ops import deform_conv2d  # here, since torchvision is slow to import and few views need it

    shared = offsets.expand(len(images), -1, -1, -1)
    displaced: Tensor = deform_conv2d(images.contiguous(), shared.contiguous(), kernel, padding=padding)
    return displaced.contiguous(memory_format=_memory_format(images))


def standardise(images: Tensor) -> Tensor:
    """``[B, C, H, W]``: every channel of every image with mean 0 and standard deviation 1 (flat channels become 0)."""
    variance, mean = torch.var_mean(images, dim=(2, 3), keepdim=True, correction=0)
    return (images - mean) * torch.rsqrt(variance + SPREAD_FLOOR)


def smooth_fields(count: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """``[count, height, width]`` float32: Gaussian random fields of mean 0 and mean square 1, amplitude ~ 1/frequency.

    White noise is divided by its frequency in the Fourier domain, which makes neighbouring values alike.
    """
    noise = torch.randn(count, height, width, generator=generator)
    frequency = torch.hypot(torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)[None, :])
    frequency[0, 0] = math.inf  # no constant part: fields displace both ways
    fields = torch.fft.irfft2(torch.fft.rfft2(noise) / frequency, s=(height, width))
    return fields / fields.square().mean(dim=(1, 2), keepdim=True).sqrt().clamp_min(1e-12)


def _memory_format(images: Tensor) -> torch.memory_format:
    last = images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def _uniform(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator))


def _normal(shape: tuple[int, ...], generator: torch.Generator, like: Tensor) -> Tensor:
    return torch.randn(shape, generator=generator).to(like.device, like.dtype)


def _choose(options: Sequence[int], generator: torch.Generator) -> int:
    return options[int(torch.randint(len(options), (), generator=generator))]
