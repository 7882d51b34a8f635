"""Clients that do nothing, for Goldfinch: the method and the small net of bench/round_overhead.py.

Chosen with ``method=fedavg method._target_=no_op.NoOp`` and ``model=small model._target_=no_op.Tiny`` where this folder
is on PYTHONPATH.
"""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from common.config import checked
from common.models.base import Model, Norm
from common.models.specs import ModelSpec
from strategies.core.method import Phase
from strategies.fedavg import FedAvg


@checked
class NoOp(FedAvg):
    """FedAvg without local training: the model goes to the device and comes back."""

    def phases(self, epochs: int) -> tuple[Phase, ...]:  # noqa: ARG002
        """None."""
        return ()


class TinyBackbone(nn.Module):
    """27 means over parts of the image, and one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(27, 27)

    def forward(self, images: Tensor) -> Tensor:
        """``[B, 27]`` of ``images [B, 3, H, W]``."""
        return F.relu(self.layer(F.adaptive_avg_pool2d(images, 3).flatten(1)))


@checked
class Tiny(ModelSpec):
    """1,036 parameters with 10 classes."""

    norm: Norm = "batch"
    minimum_image_size: ClassVar[int] = 3

    def _construct(self, class_count: int, image_size: int) -> Model:  # noqa: ARG002 - pooled, any size fits
        return Model(TinyBackbone(), nn.Linear(27, class_count), 27, class_count)
