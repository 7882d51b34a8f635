import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torchvision.models import resnet18

from common.errors import ConfigError
from common.models.base import ModelError
from common.models.specs import ResNet10, Small, TorchvisionResNet
from common.storage import write_tensors


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    network = resnet18(num_classes=13)
    with torch.no_grad():
        network.bn1.running_mean.fill_(0.25)
    path = tmp_path_factory.mktemp("weights") / "resnet18.safetensors"
    save_file(network.state_dict(), path)
    return path


def test_backbone_starts_from_the_file_and_head_from_the_seed(file):
    plain = TorchvisionResNet(18).build(10, 64, 0).state_dict()
    model = TorchvisionResNet(18, pretrained_file=file).build(10, 64, 0)
    torch.manual_seed(7)
    reference = resnet18(num_classes=13).state_dict()
    state = model.state_dict()
    assert torch.equal(state["backbone.layer3.1.conv2.weight"], reference["layer3.1.conv2.weight"])
    assert torch.equal(state["backbone.bn1.running_mean"], torch.full((64,), 0.25))
    assert torch.equal(state["head.weight"], plain["head.weight"])
    assert not torch.equal(state["backbone.conv1.weight"], plain["backbone.conv1.weight"])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (lambda file: TorchvisionResNet(18, pretrained_file=file.parent / "none"), "no such file; write one with"),
        (lambda file: TorchvisionResNet(50, pretrained_file=file), r"belongs to another network.*model\.depth"),
        (lambda file: TorchvisionResNet(18, norm="group", pretrained_file=file), r"model\.norm"),
    ],
    ids=["no file", "another depth", "another norm"],
)
def test_a_file_that_does_not_fit_is_refused(spec, message, file):
    with pytest.raises(ConfigError, match=message):
        spec(file).build(10, 64, 0)


# ---- from a model that was exported ----------------------------------------------------------------------------------

CLASSES = ("cat", "dog", "owl")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    state = Small().build(3, 16, seed=5).state_dict()
    description = json.dumps({"classes": CLASSES, "method": "fedavg"})
    write_tensors(folder / "model.safetensors", state, {"goldfinch": description})
    return folder


def test_equal_classes_keep_their_classifier(exported):
    started = Small(pretrained=exported).build(3, 16, 0, CLASSES).state_dict()
    source = Small().build(3, 16, 5).state_dict()
    assert all(torch.equal(started[name], source[name]) for name in source)


@pytest.mark.parametrize("classes", [("dog", "cat", "owl"), ("cat", "dog"), ()], ids=["order", "number", "unknown"])
def test_other_classes_get_a_new_classifier(classes, exported):
    count = len(classes) or 3
    started = Small(pretrained=exported).build(count, 16, 0, classes).state_dict()
    source, fresh = Small().build(3, 16, 5).state_dict(), Small().build(count, 16, 0).state_dict()
    for name in source:
        assert torch.equal(started[name], fresh[name] if name.startswith("head.") else source[name])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (lambda folder: ResNet10(pretrained=folder), "another network"),
        (lambda folder: Small("group", pretrained=folder), r"another network: backbone.*its method \(fedavg\)"),
        (lambda folder: Small(pretrained=folder / "absent"), "no exported model.*goldfinch export RUN --to"),
    ],
    ids=["architecture", "norm", "absent"],
)
def test_weights_that_do_not_fit_are_named(spec, message, exported):
    with pytest.raises(ModelError, match=message):
        spec(exported).build(3, 16, 0, CLASSES)


def test_a_checkpoint_is_no_exported_model(tmp_path):
    write_tensors(tmp_path / "model.safetensors", {"x": torch.zeros(1)}, {"goldfinch": '{"round": 1}'})
    with pytest.raises(ModelError, match="no exported model"):
        Small(pretrained=tmp_path).build(3, 16, 0, CLASSES)
