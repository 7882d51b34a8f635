"""Exports of networks of the user's own, whose settings and layers Goldfinch does not know."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from support.runs import run
from support.toy import toy_settings
from torch import Tensor, nn

from common.choices import trust
from common.config import checked
from common.exports import load_model
from common.models.base import Model
from common.models.specs import ModelSpec
from goldfinch.commands.export import export
from goldfinch.record import RunRecord


class Scaled(nn.Linear):
    """A linear layer whose outputs are multiplied by ``factor``."""

    factor = 1.0

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features) * self.factor


FACTORS = {"narrow": 2.0, None: 1.0}


@checked
class Own(ModelSpec):
    """A network with a setting that is named as that of a file of torchvision's networks, and is none.

    Args:
        weights: the factor of the outputs; a text is 2, and ``None`` is 1.
        lazy: whether the first layer finds the number of its inputs by itself.
    """

    weights: float | str | None = None
    lazy: bool = False

    def _construct(self, class_count: int, image_size: int) -> Model:
        first: nn.Module = nn.Linear(3 * image_size**2, 8)
        if self.lazy:
            first = nn.LazyLinear(8)
        head = Scaled(8, class_count)
        head.factor = FACTORS.get(self.weights, self.weights)
        return Model(nn.Sequential(nn.Flatten(), first, nn.ReLU()), head, 8, class_count)


@pytest.mark.parametrize(
    "network", [Own(weights=-5.0), Own(weights="narrow"), Own(lazy=True)], ids=["number", "text", "layer"]
)
def test_an_own_network_leaves_as_it_was_scored(network: Own, tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path / "run")
    target = f"{Own.__module__}.{Own.__name__}"
    trust([target])
    node = {"_target_": target, **asdict(network)}
    run(replace(settings, model=network, raw={**settings.raw, "model": node}))
    export(tmp_path / "run", tmp_path / "model")
    model = load_model(tmp_path / "model")
    assert isinstance(model.net.head, Scaled)
    assert model.net.head.factor == FACTORS.get(network.weights, network.weights)
    assert model(torch.zeros(2, 3, 16, 16))["probabilities"].shape == (2, len(RunRecord(tmp_path / "run").class_names))
