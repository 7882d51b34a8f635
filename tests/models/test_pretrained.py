import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file
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


def test_batch_counters_may_be_missing(file, tmp_path):
    state = {name: value for name, value in resnet18().state_dict().items() if "num_batches_tracked" not in name}
    path = tmp_path / "no_counters.safetensors"
    save_file(state, path)
    TorchvisionResNet(18, pretrained_file=path).build(10, 64, 0)


def resnet_with(**tensors: torch.Tensor) -> bytes:
    """Return a file of ResNet-18's weights in which some tensors are others."""
    return save(resnet18().state_dict() | {name.replace("__", "."): tensor for name, tensor in tensors.items()})


UNFIT = {
    "no file": (18, "batch", None, "no such file; write one with"),
    "half a file": (18, "batch", lambda: resnet_with()[:1000], "not a readable safetensors file"),
    "another depth": (50, "batch", resnet_with, r"belongs to another network.*model\.depth"),
    "another shape": (
        18,
        "batch",
        lambda: resnet_with(conv1__weight=torch.zeros(64, 3, 3, 3)),
        "other shapes for conv1",
    ),
    "an unknown tensor": (18, "batch", lambda: resnet_with(layer5__weight=torch.zeros(2)), "unknown tensors layer5"),
    "another norm": (18, "group", resnet_with, r"model\.norm"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_file_that_does_not_fit_is_refused(case, tmp_path):
    depth, norm, content, message = UNFIT[case]
    path = tmp_path / "weights.safetensors"
    if content is not None:
        path.write_bytes(content())
    with pytest.raises(ConfigError, match=message):
        TorchvisionResNet(depth, norm=norm, pretrained_file=path).build(10, 64, 0)


# ---- from a model that was exported ----------------------------------------------------------------------------------

CLASSES = ("cat", "dog", "owl")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    state = Small().build(3, 16, seed=5).state_dict()
    write_tensors(folder / "model.safetensors", state, {"goldfinch": json.dumps({"classes": CLASSES})})
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
        (lambda folder: Small("group", pretrained=folder), "another network: backbone"),
        (lambda folder: Small(pretrained=folder / "absent"), "no exported model.*goldfinch export RUN --to"),
        (lambda folder: Small(pretrained=folder.parent), "no exported model"),
    ],
    ids=["architecture", "norm", "absent", "another folder"],
)
def test_weights_that_do_not_fit_are_named(spec, message, exported):
    with pytest.raises(ModelError, match=message):
        spec(exported).build(3, 16, 0, CLASSES)


def test_a_checkpoint_is_no_exported_model(tmp_path):
    write_tensors(tmp_path / "model.safetensors", {"x": torch.zeros(1)}, {"goldfinch": '{"round": 1}'})
    with pytest.raises(ModelError, match="no exported model"):
        Small(pretrained=tmp_path).build(3, 16, 0, CLASSES)
