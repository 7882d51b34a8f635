import pytest
from torch import nn

from common.models.partition import (
    body_names,
    buffer_names,
    counter_names,
    head_names,
    norm_state_names,
    parameter_names,
)
from common.models.specs import FedBNDigit, ResNet10, Small, TorchvisionResNet


def test_shortcut_normalisation_of_resnet50_is_found():
    # a filter on "bn" in the name misses these 20: four shortcuts, each with two parameters and three buffers
    model = TorchvisionResNet(50, "multilayer").build(10, 64, 0)
    names = norm_state_names(model)
    shortcuts = {name for name in names if ".downsample.1." in name}
    assert len(shortcuts) == 20
    assert shortcuts == {name for name in names if "bn" not in name}
    assert len(names) == 5 * (53 + 2)  # 53 in the backbone, two in the head
    assert {name for name in names if name.startswith("head.")} == {
        f"head.bn{index}.{name}"
        for index in (1, 2)
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }


@pytest.mark.parametrize("spec", [Small(), ResNet10(), FedBNDigit(), TorchvisionResNet(18, "multilayer")])
def test_parts_cover_the_state_without_overlap(spec):
    model = spec.build(10, 32, 0)
    everything = set(model.state_dict())
    assert body_names(model) | head_names(model) == everything
    assert not body_names(model) & head_names(model)
    assert parameter_names(model) | buffer_names(model) == everything
    assert not parameter_names(model) & buffer_names(model)
    assert buffer_names(model) < norm_state_names(model) < everything
    assert counter_names(model) < buffer_names(model)
    assert len(buffer_names(model)) == 3 * len(counter_names(model))


def test_names_of_the_small_network():
    model = Small().build(10, 32, 0)
    assert head_names(model) == {"head.weight", "head.bias"}
    assert counter_names(model) == {f"backbone.bn{index}.num_batches_tracked" for index in range(1, 6)}


def test_group_norm_counts_only_when_asked():
    model = ResNet10("group").build(10, 32, 0)
    assert norm_state_names(model) == set()
    names = norm_state_names(model, "all")
    assert len(names) == 2 * 12  # stem, four blocks of two, three shortcuts
    assert buffer_names(model) == counter_names(model) == set()


def test_all_kinds_of_normalisation_by_type():
    module = nn.Sequential(
        nn.Conv2d(3, 4, 1),
        nn.InstanceNorm2d(4, affine=True),
        nn.LayerNorm([4, 2, 2]),
        nn.RMSNorm([4, 2, 2]),
        nn.BatchNorm3d(4, affine=False),
        nn.BatchNorm1d(4, track_running_stats=False),
        nn.GroupNorm(2, 4, affine=False),
    )
    assert norm_state_names(module) == {
        "4.running_mean",
        "4.running_var",
        "4.num_batches_tracked",
        "5.weight",
        "5.bias",
    }
    extra = {"1.weight", "1.bias", "2.weight", "2.bias", "3.weight"}
    assert norm_state_names(module, "all") == norm_state_names(module) | extra


def test_a_normalisation_layer_alone_has_plain_names():
    assert norm_state_names(nn.BatchNorm1d(2, track_running_stats=False)) == {"weight", "bias"}
