import pytest
from torch import nn

from common.models.specs import FedBNDigit, ResNet10, Small, TorchvisionResNet
from strategies.fedbn import norm_state_names
from strategies.fedrep import FedRep

COUNTER = "num_batches_tracked"


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
    assert everything - FedRep().shared_names(model) == {name for name in everything if name.startswith("head.")}
    buffers = everything - set(dict(model.named_parameters()))
    assert buffers < norm_state_names(model) < everything
    assert {name.rpartition(".")[2] for name in buffers} == {"running_mean", "running_var", COUNTER}


def test_group_norm_does_not_count():
    model = ResNet10("group").build(10, 32, 0)
    assert norm_state_names(model) == set()
    assert set(model.state_dict()) == set(dict(model.named_parameters()))


def test_batch_norm_is_known_by_its_type():
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


def test_a_normalisation_layer_alone_has_plain_names():
    assert norm_state_names(nn.BatchNorm1d(2, track_running_stats=False)) == {"weight", "bias"}
