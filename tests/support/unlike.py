"""Honest clients that are unlike each other: rare looks, few classes, few samples, and one client with most of them."""

from __future__ import annotations

from typing import ClassVar

import torch
from support.toy import Toy

from common.config import checked
from common.data.batches import Split
from common.data.domain import Domain
from common.numerics import generator

SAMPLES = {"large": 80, "rare": 10, "inverted": 10, "one_class": 10, "two_classes": 9, "eight": 8}
"""Training samples by domain. With batches of eight the nine leave a last batch of one."""


@checked
class Unlike(Toy):
    """A class of ten is the row and the half of a brighter block; each domain is one client.

    ``rare`` has stripes over its images, ``inverted`` has dark blocks on a bright ground, ``one_class`` has class 3
    only, ``two_classes`` has 1 and 7; ``large`` has 80 of the 127 samples.
    """

    name: ClassVar[str] = "unlike"
    known_domains: ClassVar[tuple[str, ...]] = tuple(SAMPLES)

    domains: tuple[str, ...] = tuple(SAMPLES)

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(f"block {number}" for number in range(10))

    def _read(self, domain: str) -> Domain:
        labels = torch.arange(SAMPLES[domain]) % 10
        if domain == "one_class":
            labels = torch.full_like(labels, 3)
        if domain == "two_classes":
            labels = 1 + 6 * (torch.arange(SAMPLES[domain]) % 2)
        return Domain(domain, self._draw(domain, "train", labels), self._draw(domain, "test", torch.arange(10)))

    def _draw(self, domain: str, part: str, labels: torch.Tensor) -> Split:
        draws = generator(0, "unlike", domain, part)
        size = self.image_size
        images = torch.full((len(labels), 3, size, size), 60.0)
        for image, label in zip(images, labels.tolist(), strict=True):
            row, half = divmod(label, 2)
            image[:, 3 * row : 3 * row + 3, half * size // 2 : (half + 1) * size // 2] += 120
        if domain == "rare":
            images[:, :, :, ::2] *= 0.2
            images[:, 1:] = 0
        if domain == "inverted":
            images = 255 - images
        images += 12 * torch.randn(images.shape, generator=draws)
        return Split(images.clamp(0, 255).to(torch.uint8), labels)
