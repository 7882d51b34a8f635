"""Networks of torchvision and timm by their names: features, weights from files, a whole run, export and prediction."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.runs import BackwardsEngine, run
from support.toy import toy_settings
from torch import nn
from torchvision.models import get_model

from common.exports.model import load_model
from common.models.base import ModelError
from common.models.torchvision import NamedNetwork, Timm, Torchvision
from goldfinch.commands.export import export
from goldfinch.record import RunRecord
from goldfinch.run_model import RunModel
from server.engines.inline import InlineEngine

NAMES = {"mobilenet_v3_small": 32, "resnet18": 32, "vit_b_32": 32, "shufflenet_v2_x0_5": 32, "regnet_y_400mf": 32}
needs_timm = pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="the extra timm is not installed")
NETWORKS = [
    *(pytest.param(Torchvision(name=name), size, id=name) for name, size in NAMES.items()),
    pytest.param(Timm(name="mobilenetv3_small_050"), 32, id="timm", marks=needs_timm),
    pytest.param(Timm(name="vit_tiny_patch16_224"), 32, id="timm-transformer", marks=needs_timm),
]


def images(count: int, size: int) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def test_group_norm_takes_the_place_of_every_batch_norm() -> None:
    model = Torchvision(name="mobilenet_v3_small", norm="group").build(7, 32, 0)
    assert not [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert [module for module in model.modules() if isinstance(module, nn.GroupNorm)]


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "an unknown name": ({"name": "resnet19"}, 32, "did you mean 'resnet18'"),
    "no linear classifier": ({"name": "squeezenet1_0"}, 64, "its classifier is not linear"),
    "images too small": ({"name": "alexnet"}, 32, r"cannot take images of 32x32.*set data\.image_size"),
    "no multiple of a patch": ({"name": "vit_b_32"}, 40, r"cannot take images of 40x40"),
    "nothing to replace": ({"name": "vit_b_32", "norm": "group"}, 32, "has no batch normalisation"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case: str) -> None:
    fields, size, reason = REFUSED[case]
    with pytest.raises(ModelError, match=reason):
        Torchvision(**fields).build(7, size, 0)


def test_timm_that_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ModelError, match=r"\[timm\]"):
        Timm().build(7, 32, 0)


def test_dropout_of_a_library_acts_in_training_unless_it_is_off() -> None:
    model = Torchvision(name="mobilenet_v3_small").build(7, 32, 3).eval()
    off = Torchvision(name="mobilenet_v3_small", dropout=False).build(7, 32, 3).eval()
    assert torch.equal(model(images(4, 32))[0], off(images(4, 32))[0])
    model.train()
    assert not torch.equal(model(images(4, 32))[0], model(images(4, 32))[0])


@pytest.mark.long
def test_a_run_with_dropout_repeats_whatever_the_order_of_the_clients(tmp_path: Path) -> None:
    states: dict[str, str] = {}
    for name, words, engine in (
        ("first", [], InlineEngine),
        ("backwards", [], BackwardsEngine),
        ("without", ["model.dropout=false"], InlineEngine),
    ):
        overrides = ("model=torchvision", "model.name=mobilenet_v3_small", *words)
        settings = toy_settings("fedavg", tmp_path / name, overrides=overrides, train={"rounds": 1})
        states[name] = run(settings, engine(settings)).sha256
    assert states["first"] == states["backwards"] != states["without"]


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "size"), NETWORKS)
def test_features_are_what_the_classifier_reads_and_nothing_is_drawn(spec: NamedNetwork, size: int) -> None:
    model = replace(spec, dropout=False).build(7, size, 3).train()
    before = torch.get_rng_state()
    features, logits = model(images(4, size))
    assert features.shape == (4, model.feature_size)
    torch.testing.assert_close(logits, features @ model.head.weight.T + model.head.bias)
    assert not model.supports_cam
    torch.testing.assert_close(model(images(4, size))[0], features)
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_of_a_file_compute_what_torchvision_computes(tmp_path: Path) -> None:
    network = get_model("mobilenet_v3_small", num_classes=1000).eval()
    torch.save(network.state_dict(), tmp_path / "imagenet.pth")
    model = Torchvision(name="mobilenet_v3_small", weights=tmp_path / "imagenet.pth").build(7, 32, 0).eval()
    network.classifier[3] = nn.Identity()
    torch.testing.assert_close(model.features(images(4, 32)), network(images(4, 32)))


class Harmful:
    """An object that runs a function when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return print, ("unpickled",)


def test_files_that_are_no_weights_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"layer": Harmful()}, tmp_path / "harmful.pth")
    torch.save({"conv1.weight": torch.zeros(1)}, tmp_path / "other.pth")
    (tmp_path / "coloured.pth").write_bytes(b"\x80\x02c\x1b[31mevil\nclass\n.")
    reasons = {
        "harmful.pth": r"cannot be read as a state dict.*: Unsupported global: GLOBAL print [^.]*; write one",
        "coloured.pth": r"such a file: Unsupported global: GLOBAL \\x1b\[31mevil\.class [^.]*; write one",
        "other.pth": r"another network: it lacks .*check model\.name",
        "missing.pth": "no such file",
    }
    for name, reason in reasons.items():
        with pytest.raises(ModelError, match=reason):
            Torchvision(name="mobilenet_v3_small", weights=tmp_path / name).build(7, 32, 0)
    assert "unpickled" not in capsys.readouterr().out


# ---- a run -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_is_exported_and_predicts_without_its_weights_file(tmp_path: Path) -> None:
    path = tmp_path / "start.safetensors"
    torch.manual_seed(0)
    save_file(get_model("mobilenet_v3_small").state_dict(), path)
    overrides = ("model=torchvision", "model.name=mobilenet_v3_small", f"model.weights='{path}'")
    # Random weights of this network do not bear the toy's learning rate: FedAvg diverges from one start in six.
    train = {"rounds": 1, "learning_rate": 0.001}
    run(toy_settings("fpl", tmp_path / "run", overrides=overrides, train=train))
    export(tmp_path / "run", tmp_path / "model")
    expected = RunModel(RunRecord(tmp_path / "run")).inference()
    path.unlink()
    model = load_model(tmp_path / "model")
    assert str(path) not in (tmp_path / "model" / "model.json").read_text()
    batch = torch.rand(3, 3, 16, 16)
    torch.testing.assert_close(model(batch)["probabilities"], expected(model.prepare(batch))[1].softmax(1))
