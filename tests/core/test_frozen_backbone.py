"""``model.freeze=backbone``: only the classifier trains, and features are computed once on each device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.exchanges import local_exchange
from support.runs import run
from support.toy import Toy, toy_settings
from torch import Tensor, nn

from client.device import Device
from common.choices import CONF
from common.config import checked
from common.data.batches import Augmentation
from common.errors import ConfigError
from common.models.base import Model, shapes_only
from common.models.specs import ModelSpec
from common.settings import RunSettings, load_settings
from goldfinch.papers import NAMES
from goldfinch.readings import plain_methods
from goldfinch.record import RunRecord
from goldfinch.run_model import RunModel
from strategies.core.exchange import Phase
from strategies.core.method import build_model
from strategies.fedavg import FedAvg

PLAIN = Augmentation(mean=(0.5,), std=(0.25,))
METHODS = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))


def frozen(method: str, output: Path, augmentation: Augmentation = PLAIN, **more: Any) -> RunSettings:
    data = replace(Toy(), augmentation=augmentation)
    train = {"epochs": 2, **more.pop("train", {})}
    return toy_settings(method, output, overrides=("model.freeze=backbone",), data=data, train=train, **more)


def passes(settings: RunSettings, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each call of a backbone appends its number of images."""
    counts: list[int] = []
    kind = type(build_model(settings, 3).backbone)
    forward = kind.forward

    def counted(self: nn.Module, images: torch.Tensor) -> torch.Tensor:
        counts.append(len(images))
        return forward(self, images)

    monkeypatch.setattr(kind, "forward", counted)
    return counts


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.long
def test_every_method_trains_the_classifier_alone_or_refuses_with_the_reason(method: str, tmp_path: Path) -> None:
    settings = frozen(method, tmp_path, train={"rounds": 1, "epochs": 1})
    if method in ("fdse", "fedsr"):  # layers of their own take the place of the backbone's, or follow them
        with pytest.raises(ConfigError, match=r"set model\.freeze=none"):
            run(settings)
        return
    if method == "fedrep":  # it trains classifier and backbone one after the other
        with pytest.raises(ConfigError, match=r"nothing to train in phase 2 of a round: set model\.freeze=none"):
            run(settings)
        assert not tmp_path.joinpath("events.jsonl").exists(), "before the run begins"
        return
    run(settings)
    initial = build_model(settings, 3).state_dict()
    state = RunModel(RunRecord(tmp_path)).checkpoint.state.weights
    for name, tensor in state.items():
        if name.startswith("backbone."):
            assert torch.equal(tensor, initial[name]), name
    heads = [name for name in state if name.startswith("head.")]
    assert not heads or any(not torch.equal(state[name], initial[name]) for name in heads)


def test_the_page_names_the_methods_that_cannot_run_this_way(tmp_path: Path) -> None:
    settings, refused = frozen("fedavg", tmp_path), []
    for name, method in plain_methods().items():
        try:
            build_model(replace(settings, method=method), 3)
        except ConfigError:
            refused.append(NAMES[name])
    page = (CONF.parent / "docs" / "training.md").read_text()
    assert f"- {', '.join(refused)} and `privacy.update_clip` cannot run this way." in page


def test_features_are_computed_once_on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = frozen("fpl", tmp_path)
    counts = passes(settings, monkeypatch)
    done = run(settings)
    samples = sum(int(row["samples"]) for row in done.replies() if row["round"] == "1")
    tested = sum(int(row["count"]) for row in done.scores("test") if row["round"] == "0")
    assert sum(counts) == samples + tested


def test_the_cache_changes_nothing_but_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = run(frozen("fpl", tmp_path / "cached"))
    monkeypatch.setattr(Device, "_feature_cache", lambda self, state: None)
    computed = run(frozen("fpl", tmp_path / "computed"))
    first, second = (RunModel(RunRecord(done.folder)).checkpoint.state for done in (cached, computed))
    for name, tensor in first.weights.items():
        torch.testing.assert_close(tensor, second.weights[name], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first.prototypes.vectors, second.prototypes.vectors, rtol=1e-4, atol=1e-5)


def test_augmented_images_are_passed_through_the_backbone_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = frozen("fedavg", tmp_path, Augmentation(crop_padding=1, mean=(0.5,), std=(0.25,)))
    counts = passes(settings, monkeypatch)
    done = run(settings)
    samples = sum(int(row["samples"]) for row in done.replies() if row["round"] == "1")
    tested = sum(int(row["count"]) for row in done.scores("test") if row["round"] == "0")
    assert sum(counts) == 2 * 2 * samples + tested


def test_noise_on_the_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"privacy\.update_clip=null"):
        load_settings(["model.freeze=backbone", "privacy=gaussian", "privacy.update_clip=1"])


class OwnBackbone(nn.Module):
    """A stem that the user has frozen, and layers that train."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.stem.eval().requires_grad_(False)
        self.rest = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8))

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.rest(self.stem(images))).mean((2, 3))


@checked
class OwnNetwork(ModelSpec):
    """A network with a frozen stem."""

    def _construct(self, class_count: int, image_size: int) -> Model:
        return Model(OwnBackbone(), nn.Linear(8, class_count), 8, class_count)


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fedrep"])
def test_what_an_own_network_freezes_stays_as_it_is(method: str, tmp_path: Path) -> None:
    settings = replace(toy_settings(method, tmp_path), model=OwnNetwork())
    local = local_exchange(settings)
    initial = local.state.copy()
    local.method.adapt(local)
    local.score(local.split)
    local.run()
    for name, tensor in local.state.tensors().items():
        if name.startswith("backbone.stem."):
            assert torch.equal(tensor, initial[name]), name
    trained = local.model.get_parameter("backbone.rest.0.weight")
    assert not torch.equal(trained, initial["backbone.rest.0.weight"])
    assert trained.requires_grad
    assert not local.model.get_parameter("backbone.stem.0.weight").requires_grad


def test_a_part_built_in_evaluation_mode_stays_in_it_in_the_network_that_a_method_makes_of_it(tmp_path: Path) -> None:
    model = build_model(replace(toy_settings("fedsr", tmp_path), model=OwnNetwork()), 3)
    modes = {name: part.training for name, part in model.train().named_modules() if "stem" in name}
    assert modes
    assert not any(modes.values()), modes
    assert model.training


@checked
class Wrapped(FedAvg):
    """A method whose network is none of Goldfinch's."""

    def extend(self, model: nn.Module, client_count: int, seed: int) -> nn.Module:
        return nn.Sequential(model)


def test_a_method_must_return_the_network_that_it_extends(tmp_path: Path) -> None:
    settings = replace(toy_settings("fedavg", tmp_path), method=Wrapped())
    with pytest.raises(ConfigError, match=r"extend\(\) is a Sequential, and must be Model"):
        build_model(settings, 3)


def test_a_phase_must_train_a_part_that_the_network_does_not_freeze(tmp_path: Path) -> None:
    method = StemOnly()
    settings = replace(toy_settings("fedavg", tmp_path), model=OwnNetwork(), method=method)
    with pytest.raises(ConfigError, match="nothing to train in phase 1"):
        build_model(settings, 3)


@checked
class StemOnly(FedAvg):
    """A method that trains what the network freezes."""

    def phases(self, epochs: int) -> tuple[Phase, ...]:
        return (Phase(epochs, lambda name: name.startswith("backbone.stem.")),)


def test_built_in_networks_hold_nothing_still(tmp_path: Path) -> None:
    for name in sorted(path.stem for path in (CONF / "model").glob("*.yaml")):
        if name in ("by_domain", "timm", "torchvision"):
            continue
        with shapes_only():
            model = load_settings([f"model={name}"]).model.build(4, 64, 0)
        assert not model.still, name
        assert all(parameter.requires_grad for parameter in model.parameters()), name
