import random
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.nn import functional as F

from common.choices import CONF
from common.config import build, checked
from common.models.base import GROUP_WIDTH, Model, ModelError, initialised, pool
from common.models.specs import (
    AlexNet,
    DigitCNN,
    DigitCNNPooled,
    FedBNDigit,
    ModelSpec,
    ResNet10,
    ResNet10PLVM,
    Small,
    TorchvisionResNet,
)
from common.settings import load_settings
from strategies.core.method import Method, build_model
from strategies.fedbn import norm_state_names

CHOICES = sorted(path.stem for path in (CONF / "model").glob("*.yaml") if path.stem != "timm")  # an extra
SIZES = {"resnet10_plvm": 64, "resnet50": 64, "resnet18": 64, "fedbn_digit": 28, "alexnet": 64}
CAM = [Small(), DigitCNNPooled(), ResNet10PLVM(), TorchvisionResNet(18)]


def choice(name: str) -> ModelSpec:
    spec = build(OmegaConf.to_container(OmegaConf.load(CONF / "model" / f"{name}.yaml")), "model")
    assert isinstance(spec, ModelSpec)
    return spec


def images(count: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def multiply_adds(model: Model, size: int) -> int:
    """Multiply-adds of convolutions and linear layers for one image."""
    total = 0

    def count(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        nonlocal total
        positions = output[0, 0].numel() if isinstance(module, nn.Conv2d) else 1
        total += module.weight.numel() * positions

    hooks = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    with torch.no_grad():
        model.eval()(images(1, size))
    for hook in hooks:
        hook.remove()
    return total


@pytest.mark.parametrize(
    ("spec", "size", "classes", "count"),
    [
        (ResNet10(), 32, 10, 4_903_242),  # FPL
        (ResNet10(norm="group"), 32, 10, 4_903_242),  # group norm has the same affine parameters
        (ResNet10PLVM(), 64, 10, 4_906_314),
        (TorchvisionResNet(18), 32, 1000, 11_689_512),  # torchvision's published count for ResNet-18
        (TorchvisionResNet(50), 64, 1000, 25_557_032),  # and ResNet-50
        (TorchvisionResNet(50, "multilayer"), 64, 10, 23_508_032 + 1_318_922),  # FedPall
        (TorchvisionResNet(50, "multilayer"), 64, 7, 23_508_032 + 1_317_383),
        (DigitCNN(), 32, 10, 4_547_466),
        (DigitCNNPooled(), 32, 10, 507_530),
        (FedBNDigit(), 28, 10, 14_219_210),
        (AlexNet(), 256, 10, 12_974_154),  # FDSE (second-hand)
        (Small(), 32, 10, 136_730),
        (Small(features=512), 32, 10, 362_522),
        (ResNet10(width=32), 32, 10, 1_228_970),
    ],
)
def test_parameter_counts(spec, size, classes, count):
    assert sum(parameter.numel() for parameter in spec.build(classes, size, 0).parameters()) == count


@pytest.mark.parametrize(
    ("spec", "size", "millions"),
    [(ResNet10(), 32, 253), (ResNet10PLVM(), 64, 67.5), (Small(), 32, 1.78), (TorchvisionResNet(18), 224, 1814)],
)
def test_cost_pins_strides_and_pooling(spec, size, millions):
    # parameter counts do not see strides, padding or pooling; multiply-adds do
    assert multiply_adds(spec.build(10, size, 0), size) / 1e6 == pytest.approx(millions, rel=3e-3)


def test_torchvision_networks_compute_what_torchvision_computes():
    from torchvision.models import resnet18

    model = TorchvisionResNet(18).build(10, 64, 0)
    reference = resnet18(num_classes=10)
    missing = reference.load_state_dict(model.backbone.state_dict(), strict=False)
    assert missing.unexpected_keys == []
    assert sorted(missing.missing_keys) == ["fc.bias", "fc.weight"]
    reference.fc.load_state_dict(model.head.state_dict())
    batch = images(4, 64)
    torch.testing.assert_close(model(batch)[1], reference(batch))


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_returns_features_and_logits(name):
    size = SIZES.get(name, 32)
    model = choice(name).build(7, size, 3)
    assert {key.split(".")[0] for key in model.state_dict()} == {"backbone", "head"}
    batch = images(4, size)
    features, logits = model(batch)
    assert features.shape == (4, model.feature_size)
    assert logits.shape == (4, model.class_count) == (4, 7)
    assert features.dtype == logits.dtype == torch.float32
    if name != "torchvision":  # its networks end in all kinds of activations
        assert bool((features >= 0).all())
    assert bool((features > 0).any(dim=1).all())
    model.eval()
    features, logits = model(batch)
    torch.testing.assert_close(model.features(batch), features)
    torch.testing.assert_close(model.classify(features), logits)
    F.cross_entropy(logits, torch.tensor([0, 1, 2, 6])).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", CHOICES)
def test_weights_are_a_function_of_the_seed_alone(name):
    size = SIZES.get(name, 32)
    spec = choice(name)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = spec.build(10, size, 5).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(999)
    again = spec.build(10, size, 5).state_dict()
    other = spec.build(10, size, 6).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    weights = [key for key, value in first.items() if value.ndim >= 2]
    assert weights
    assert not any(torch.equal(first[key], other[key]) for key in weights)


def test_initialisation_is_the_same_in_several_threads():
    expected = Small().build(10, 32, 1).state_dict()
    built: list[dict[str, torch.Tensor]] = []
    threads = [threading.Thread(target=lambda: built.append(Small().build(10, 32, 1).state_dict())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 8
    assert all(torch.equal(state[key], expected[key]) for state in built for key in expected)


def test_initialised_restores_the_state_after_an_error():
    torch.manual_seed(4)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="shape"), initialised(0, "x"):
        torch.randn(3) @ torch.randn(4, 2)
    assert torch.equal(torch.get_rng_state(), before)
    with initialised(0, "x"):  # the lock was released
        a = torch.randn(3)
    with initialised(0, "y"):
        b = torch.randn(3)
    assert not torch.equal(a, b)


class Scaled(Small):
    """Its weights are torch's, times one number of NumPy and one of Python."""

    def _construct(self, class_count, image_size):
        model = super()._construct(class_count, image_size)
        with torch.no_grad():
            model.head.weight.mul_(float(np.random.rand()) * random.random())  # noqa: NPY002  # as one's own code may
        return model


@checked
class Extended(Method):
    """Adds a layer, without a word on its seed."""

    def extend(self, model, client_count, seed):
        model.further = torch.nn.Linear(4, 4)
        return model


class Still(Small):
    """A network that was left in evaluation mode."""

    def _construct(self, class_count, image_size):
        return super()._construct(class_count, image_size).eval()


def test_what_one_s_own_network_or_method_draws_depends_on_the_seed_alone():
    settings = load_settings(["data=glyphs", "model=small", f"method={__name__}.Extended"])
    built = []
    for number in (1, 2):
        torch.manual_seed(number)
        np.random.seed(number)  # noqa: NPY002
        random.seed(number)
        state = np.random.get_state()[1].tolist()  # noqa: NPY002
        extended = build_model(settings, 4)
        built.append({**extended.state_dict(), "scaled": Scaled().build(10, 32, 5).head.weight})
        assert np.random.get_state()[1].tolist() == state  # noqa: NPY002
    assert built[0].keys() == built[1].keys() > {"further.weight", "scaled"}
    for name, value in built[0].items():
        assert torch.equal(value, built[1][name]), name
    other = build_model(replace(settings, seed=1), 4)
    assert not torch.equal(other.state_dict()["further.weight"], built[0]["further.weight"])


def test_a_network_in_evaluation_mode_as_a_whole_is_refused():
    with pytest.raises(ModelError, match="evaluation mode as a whole"):
        Still().build(10, 32, 0)


def test_resnet10_starts_as_torch_makes_it():
    # std of torch's default for a convolution: sqrt(1 / (3 fan_in)); of FedPLVM's, He's: sqrt(2 / fan_out)
    name = "backbone.layer4.0.conv2.weight"
    default = ResNet10().build(10, 32, 0).state_dict()[name]
    assert float(default.std()) == pytest.approx((1 / (3 * 512 * 9)) ** 0.5, rel=0.01)
    stem = ResNet10PLVM().build(10, 64, 0).state_dict()["backbone.conv1.weight"]
    assert float(stem.std()) == pytest.approx((2 / (64 * 25)) ** 0.5, rel=0.05)


@pytest.mark.parametrize("name", [name for name in CHOICES if name != "by_domain"])  # whose networks refuse them
def test_too_small_images_are_refused_and_the_smallest_work(name):
    spec = choice(name)
    smallest = spec.minimum_image_size
    with pytest.raises(ValueError, match=rf"{smallest - 1}x{smallest - 1}.*too small.*{smallest} or more"):
        spec.build(10, smallest - 1, 0)
    features, _ = spec.build(10, smallest, 0).eval()(images(2, smallest))
    assert features.shape[0] == 2


def test_no_classes_are_refused():
    with pytest.raises(ModelError, match="nothing to learn of one class"):
        Small().build(0, 32, 0)


@pytest.mark.parametrize(
    "spec",
    [Small("group"), ResNet10("group"), FedBNDigit("group"), TorchvisionResNet(18, "multilayer", norm="group")],
)
def test_group_norm_replaces_all_batch_norm(spec):
    model = spec.build(10, 32, 0)
    groups = [module for module in model.modules() if isinstance(module, nn.GroupNorm)]
    assert groups
    assert all(module.num_channels // module.num_groups == GROUP_WIDTH for module in groups)
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    batch = images(3, 32)
    together, alone = model(batch)[1], torch.cat([model(row[None])[1] for row in batch])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)  # no image depends on its batch


@pytest.mark.parametrize(
    "spec",
    [Small("none"), ResNet10("none"), ResNet10PLVM("none"), TorchvisionResNet(18, norm="none"), FedBNDigit("none")],
    ids=["small", "resnet10", "resnet10_plvm", "resnet18", "fedbn_digit"],
)
def test_a_network_without_normalisation_trains(spec):
    model = spec.build(4, 32, 0).train()
    assert norm_state_names(model) == set()
    assert not any(isinstance(module, nn.GroupNorm) for module in model.modules())
    features, logits = model(images(4, 32))
    assert features.abs().max() < 100, "features must not grow with the depth"
    F.cross_entropy(logits, torch.arange(4)).backward()
    assert any(bool(parameter.grad.any()) for parameter in model.parameters())


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("spec", [DigitCNN, DigitCNNPooled], ids=["digit_cnn", "digit_cnn_gap"])
def test_the_digit_networks_can_be_normalised(spec, norm):
    kind = nn.BatchNorm2d if norm == "batch" else nn.GroupNorm
    plain = spec().build(10, 32, 0)
    model = spec(norm=norm).build(10, 32, 0)
    assert not any(isinstance(module, (nn.BatchNorm2d, nn.GroupNorm)) for module in plain.modules())
    assert any(isinstance(module, kind) for module in model.modules())
    assert model(images(2, 32))[1].shape == (2, 10)


@pytest.mark.parametrize("spec", CAM)
def test_mean_of_a_class_activation_map_is_the_logit_without_bias(spec):
    model = spec.build(6, 64, 1).eval()
    assert model.supports_cam
    batch, labels = images(3, 64), torch.tensor([0, 5, 2])
    with torch.no_grad():
        maps = model.feature_maps(batch)
        features, logits = model(batch)
        activation = model.class_activation_maps(maps, labels)
    assert maps.ndim == 4
    assert maps.shape[2] > 1
    assert bool((maps >= 0).all())
    assert torch.equal(pool(maps), features)
    expected = logits[torch.arange(3), labels] - model.head.bias[labels]
    torch.testing.assert_close(activation.mean(dim=(1, 2)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", [DigitCNN(), FedBNDigit(), TorchvisionResNet(18, "multilayer")])
def test_networks_without_class_activation_maps_are_an_error(spec):
    model = spec.build(10, 32, 0)
    assert not model.supports_cam
    with pytest.raises(ModelError, match="global average pooling and one linear layer"):
        model.feature_maps(images(1, 32))
    with pytest.raises(ModelError, match="digit_cnn_gap"):
        model.class_activation_maps(torch.rand(1, 2, 2, 2), torch.tensor([0]))


@pytest.mark.long
@pytest.mark.parametrize("name", CHOICES)
def test_channels_last_gives_the_same_result(name):
    size = SIZES.get(name, 32)
    model = choice(name).build(10, size, 0).eval()
    batch = images(2, size)
    with torch.no_grad():
        expected = model(batch)
        model.to(memory_format=torch.channels_last)
        result = model(batch.to(memory_format=torch.channels_last))
    for got, wanted in zip(result, expected, strict=True):
        rounding = 1e-5 * max(1.0, float(wanted.abs().max()))  # of sums over fifty layers, in another order
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=5 * rounding)


def test_bfloat16_autocast_runs():
    model = Small().build(10, 32, 0)
    with torch.autocast("cpu", torch.bfloat16):
        features, logits = model(images(4, 32))
    assert bool(torch.isfinite(logits).all())
    assert bool((features >= 0).all())
