"""Textures: generated images of coloured noise with sharp-edged patches, for methods that need unlabelled images."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from common.config import Names, checked
from common.data.batches import Split
from common.data.cache import cached
from common.data.domain import DataSource, Domain
from common.data.glyph_rendering import SIZE, bilinear, noise_field
from common.numerics import numpy_generator

_VERSION = 1  # the seed, and part of the cache's key; raise it when a pixel changes
_COUNT = {"train": 1024, "test": 64}


@checked
class Textures(DataSource):
    """1024 training and 64 test images of two coloured textures, one seen through random patches of the other.

    A public, unlabelled set that every device generates by itself, equal on all devices. Every label is 0. The images
    are drawn at 32x32 and resized.
    """

    name: ClassVar[str] = "textures"
    known_domains: ClassVar[tuple[str, ...]] = ("textures",)
    generated: ClassVar[bool] = True

    domains: Names = ("textures",)

    @property
    def class_names(self) -> tuple[str, ...]:
        """One class, without a meaning."""
        return ("texture",)

    def _read(self, domain: str) -> Domain:
        key = [_VERSION, self.image_size, *_COUNT.values()]
        tensors = cached(f"textures-{self.image_size}", key, self._draw_all)
        return Domain(domain, _unlabelled(tensors["train"]), _unlabelled(tensors["test"]))

    def _draw_all(self) -> dict[str, Tensor]:
        return {part: self.draw(part) for part in _COUNT}

    def draw(self, part: str) -> Tensor:
        """Return the images of ``train`` or ``test``, not from the cache: uint8 [N, 3, H, W]."""
        draws, count = numpy_generator(_VERSION, "textures", part), _COUNT[part]
        ground, figure = _texture(draws, count), _texture(draws, count)
        height = noise_field(draws, count, 3) + 0.3 * noise_field(draws, count, 8)
        patches = np.clip(8 * (height - 0.65), 0, 1)[..., None]
        images = ground + patches * (figure - ground)
        pixels = (np.clip(_resized(images, self.image_size), 0, 1) * 255 + 0.5).astype(np.uint8)
        return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def _unlabelled(images: Tensor) -> Split:
    return Split(images, torch.zeros(len(images), dtype=torch.int64))


def _texture(draws: np.random.Generator, count: int) -> np.ndarray:
    """Return two colours mixed by noise of a random scale: float64 [count, 32, 32, 3] in 0..1."""
    first, second = draws.random((count, 1, 1, 3)), draws.random((count, 1, 1, 3))
    scales = np.stack([noise_field(draws, count, cells) for cells in (1, 4, 9, 16)])
    chosen = draws.integers(len(scales), size=count)
    mixture = scales[chosen, np.arange(count)][..., None]
    return first + mixture * (second - first)


def _resized(images: np.ndarray, size: int) -> np.ndarray:
    """Return float64 [N, size, size, 3] of float64 [N, 32, 32, 3], bilinear."""
    if size == SIZE:
        return images
    place = np.clip((np.arange(size) + 0.5) * SIZE / size - 0.5, 0, SIZE - 1)
    return np.stack([bilinear(images[..., channel], place[:, None], place) for channel in range(3)], axis=3)
