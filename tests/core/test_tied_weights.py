"""A network may hold one tensor under two names; the global state has the same numbers under both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.runs import run
from support.toy import toy_settings
from torch import Tensor, nn

from common.config import checked
from common.models.base import Model
from common.models.specs import ModelSpec
from goldfinch.record import RunRecord
from goldfinch.run_model import RunModel


class TiedBackbone(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.again = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)
        self.again.weight = self.first.weight

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.again(F.relu(self.first(self.stem(images))))).mean((2, 3))


@checked
class Tied(ModelSpec):
    """A network with one weight in two places."""

    def _construct(self, class_count: int, image_size: int) -> Model:
        return Model(TiedBackbone(), nn.Linear(8, class_count), 8, class_count)


@pytest.mark.parametrize("method", ["fedavg", "fedopt", "feddyn", "scaffold"])
def test_a_tied_tensor_is_one(method: str, tmp_path: Path) -> None:
    settings = replace(toy_settings(method, tmp_path), model=Tied())
    run(settings)
    weights = RunModel(RunRecord(tmp_path)).checkpoint.state.weights
    first, again = weights["backbone.first.weight"], weights["backbone.again.weight"]
    assert torch.equal(first, again)
