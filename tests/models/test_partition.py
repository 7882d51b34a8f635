import pytest
from torch import nn

from common.models.specs import FedBNDigit, ResNet10, Small, TorchvisionResNet
from strategies.fedbn import norm_state_names
from strategies.fedrep import FedRep


@pytest.mark.parametrize("spec", [Small(), ResNet10(), FedBNDigit(), TorchvisionResNet(18, "multilayer")])
def test_parts_cover_the_state_without_overlap(spec):
    model = spec.build(10, 32, 0)
    everything = set(model.state_dict())
    assert everything - FedRep().shared_names(model) == {name for name in everything if name.startswith("head.")}
    buffers = everything - set(dict(model.named_parameters()))
    assert buffers < norm_state_names(model) < everything
    assert {name.rpartition(".")[2] for name in buffers} == {"running_mean", "running_var", "num_batches_tracked"}


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
