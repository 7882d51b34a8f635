"""The nets that single methods bring: sizes, shapes and gradients."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from strategies.fedadg import FeatureDiscriminator, FeatureGenerator, TaskHead, scaled_one_hot
from strategies.fedsr import ClassGaussians, GaussianLayer
from strategies.parts.server_nets import Discriminator


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)  # layers and inputs made directly in a test


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(("clients", "count"), [(4, 1_314_816), (5, 1_315_328)])
def test_discriminator_counts_of_fedpall(clients, count):
    assert parameters(Discriminator(2048, clients)) == count


def test_feature_generator():
    network = FeatureGenerator(512, 7)
    assert parameters(network) == (2048 + 7) * 4096 + 4096 + 4096 * 512 + 512
    bound = 0.5 * math.sqrt(6 / (2055 + 4096))
    assert 0.99 * bound < float(network.fc1.weight.detach().abs().max()) < 1.0001 * bound
    classes = scaled_one_hot(torch.tensor([0, 6]), 7, 0.6)
    noise = torch.randn(2, network.noise_size)
    features = network(noise, classes)
    assert features.shape == (2, 512)
    assert bool((features >= 0).all())
    assert not torch.equal(features, network(noise, classes.flip(0)))  # the class matters


def test_feature_discriminator():
    network = FeatureDiscriminator(512, 7)
    assert network.projection.weight.shape == (1024, 519)
    assert network.projection.bias is None
    assert float(network.projection.weight.detach().norm()) == pytest.approx(1.0, abs=1e-5)
    assert parameters(network) == 519 * 1024 + 1024 * 1024 + 1024 + 1024 + 1
    features = 100 * torch.rand(3, 512)
    first = network(features, scaled_one_hot(torch.tensor([0, 1, 2]), 7))
    second = network(features, scaled_one_hot(torch.tensor([3, 4, 5]), 7))
    assert first.shape == (3,)
    assert bool(((first > 0) & (first < 1)).all())
    assert not torch.equal(first, second)


def test_task_head_is_linear_in_the_features():
    head = TaskHead(6, 4)
    assert parameters(head) == 6 * 6 + 6 + 6 * 4 + 4
    a, b = torch.randn(2, 6), torch.randn(2, 6)
    torch.testing.assert_close(head(a + b) + head(torch.zeros(2, 6)), head(a) + head(b))


def test_gaussian_layer_halves():
    layer = GaussianLayer(5, 3)
    features = torch.randn(4, 5)
    mean, deviation = layer(features)
    torch.testing.assert_close(mean, F.linear(features, layer.fc.weight[:3], layer.fc.bias[:3]))
    raw = F.linear(features, layer.fc.weight[3:], layer.fc.bias[3:])
    torch.testing.assert_close(deviation, torch.log(1 + torch.exp(raw)))


def test_class_gaussians_start_as_released_and_stay_positive():
    table = ClassGaussians(3, 4)
    means, deviations, scale = table(torch.tensor([2, 0]))
    assert torch.equal(means, torch.zeros(2, 4))
    torch.testing.assert_close(deviations, torch.full((2, 4), math.log(1 + math.e)))
    torch.testing.assert_close(scale, torch.tensor(1.0))
    with torch.no_grad():
        table.raw_scale.fill_(-30.0)
        table.raw_deviations.fill_(-30.0)
    means, deviations, scale = table(torch.tensor([1]))
    assert bool(torch.isfinite(torch.log(scale)))
    assert bool(torch.isfinite(torch.log(deviations)).all())
