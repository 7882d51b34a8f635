"""A ResNet-10 and made-up images."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

TRAIN_IMAGES, TEST_IMAGES = 8, 8


def build() -> nn.Module:
    """A ResNet with one block per stage, for ten classes."""
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10)


def images(count: int) -> tuple[Tensor, Tensor]:
    """``count`` images ``[count, 3, 32, 32]`` with labels."""
    draw = torch.Generator().manual_seed(0)
    return torch.rand(count, 3, 32, 32, generator=draw), torch.arange(count) % 10
