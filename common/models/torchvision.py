"""Any classification network of torchvision or timm, cut before its classifier."""

import warnings
from abc import abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from common.config import checked
from common.errors import nearest
from common.extras import install_command
from common.models.base import Model, ModelError, norm_2d
from common.models.pretrained import load_weights
from common.models.specs import ModelSpec

AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")
"""Classifiers in the middle of GoogLeNet and Inception, which these networks are built without."""

ADVICE = "check model.name, take model.norm=batch, and for a transformer the image size that the file was made for"


@checked
class NamedNetwork(ModelSpec):
    """A network that a library builds by name, with a linear classifier on its features.

    Features are the input of the library's classifier. Unlike those of the other networks they may be negative.

    Args:
        name: the network's name in the library.
        dropout: whether the network's own dropout and stochastic depth act in training.
        norm: ``batch`` leaves the network's own normalisation; ``group`` replaces every batch normalisation.
        weights: a safetensors file, or a state dict of ``torch.save``, with the library's names, that the network
            starts from; the classifier in it is ignored. ``None``: weights of the seed. See docs/training.md.
    """

    name: str
    dropout: bool = True
    norm: Literal["batch", "group"] = "batch"
    weights: Path | None = None
    minimum_image_size = 1

    def _construct(self, class_count: int, image_size: int) -> Model:
        network, classifier = self._network(class_count, image_size)
        head = network.get_submodule(classifier)
        if not isinstance(head, nn.Linear):
            raise ModelError(f"model.name={self.name}: its classifier is not linear, so it has no features to share")
        network.set_submodule(classifier, nn.Identity())
        if not self.dropout:
            _remove_dropout(network)
        if self.norm == "group":
            self._use_group_norm(network)
        size = head.in_features
        self._check_features(network, size, image_size)
        if self.weights is not None:
            load_weights(network, self.weights, "model.weights", (f"{classifier}.", *AUXILIARY), ADVICE)
        return Model(network, head, size, class_count)

    @abstractmethod
    def _network(self, class_count: int, image_size: int) -> tuple[nn.Module, str]:
        """Return the library's network with random weights, and the name of its classifier."""

    def _use_group_norm(self, network: nn.Module) -> None:
        names = [name for name, module in network.named_modules() if isinstance(module, nn.BatchNorm2d)]
        if not names:
            raise ModelError(f"model.norm=group: {self.name} has no batch normalisation; leave model.norm=batch")
        for name in names:
            before = network.get_submodule(name)
            assert isinstance(before, nn.BatchNorm2d)
            after: nn.Module = norm_2d("group", before.num_features)
            for extra in before.children():  # timm's layers hold their activation
                after = nn.Sequential(after, extra)
            network.set_submodule(name, after)

    def _check_features(self, network: nn.Module, size: int, image_size: int) -> None:
        """Pass one image through the network.

        Raises:
            ModelError: the images do not fit the network, or its output is no feature vector.
        """
        device = next(network.parameters()).device
        training = network.training
        try:
            with torch.no_grad():
                features = network.eval()(torch.zeros(1, 3, image_size, image_size, device=device))
        except Exception as error:  # each network says in its own way that nothing is left to halve
            raise _too_small(self.name, image_size, error) from error
        network.train(training)
        if not isinstance(features, Tensor) or features.shape != (1, size):
            raise ModelError(f"model.name={self.name} gives no vector of {size} features per image; choose another")


@checked
class Torchvision(NamedNetwork):
    """Any classification network of torchvision, by its name: resnet18, mobilenet_v3_small, convnext_tiny, vit_b_16 ...

    SqueezeNet has no linear classifier and is refused.
    """

    name: str = "mobilenet_v3_small"

    def _network(self, class_count: int, image_size: int) -> tuple[nn.Module, str]:
        from torchvision import models  # takes seconds to import, which runs with other networks need not pay

        names = models.list_models(module=models)
        if self.name not in names:
            raise ModelError(f"model.name={self.name}: torchvision has no such network; {nearest(self.name, names)}")
        options: dict[str, Any] = {}
        if self.name.startswith("vit_"):
            options["image_size"] = image_size
        elif self.name.startswith("maxvit"):
            options["input_size"] = (image_size, image_size)
        elif self.name in ("googlenet", "inception_v3"):
            options |= {"aux_logits": False, "init_weights": False}
        # RegNet computes its widths with tensors, which the device meta cannot do
        place = torch.device("cpu") if self.name.startswith("regnet") else nullcontext()
        with place:
            network = _built(
                self.name, image_size, lambda: models.get_model(self.name, num_classes=class_count, **options)
            )
        return network, _last_linear(network)


@checked
class Timm(NamedNetwork):
    """Any image classification network of timm (the extra ``timm``), by its name."""

    name: str = "mobilenetv3_small_050"

    def _network(self, class_count: int, image_size: int) -> tuple[nn.Module, str]:
        try:
            import timm
        except ImportError as error:
            raise ModelError(
                f"model=timm needs the package timm, which cannot be imported ({error}): "
                f"{install_command('timm')}, or choose model=torchvision"
            ) from error
        if not timm.is_model(self.name):
            close = get_close_matches(self.name, timm.list_models())  # of more than a thousand
            raise ModelError(
                f"model.name={self.name}: timm has no such network; close are {', '.join(close) or 'none'}, and "
                "timm.list_models() lists all"
            )

        def build() -> nn.Module:
            try:  # transformers are built for one size of images
                return timm.create_model(self.name, num_classes=class_count, img_size=image_size)
            except TypeError:
                return timm.create_model(self.name, num_classes=class_count)

        network = _built(self.name, image_size, build)
        return network, _last_linear(network)


def _built(name: str, image_size: int, build: Callable[[], nn.Module]) -> nn.Module:
    """Return ``build()``.

    Raises:
        ModelError: the network cannot be built for images of this size.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # remarks on initialisation and on features that are not used here
            return build()
    except (AssertionError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise _too_small(name, image_size, error) from error


def _too_small(name: str, image_size: int, error: Exception) -> ModelError:
    return ModelError(
        f"model.name={name} cannot take images of {image_size}x{image_size} pixels ({error}); set data.image_size to "
        "the size that the network was made for (often 224), or choose another model"
    )


def _last_linear(network: nn.Module) -> str:
    """Return the name of the network's last linear layer: its classifier."""
    last = ""
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear):
            last = name
    return last


def _remove_dropout(network: nn.Module) -> None:
    """Set the probability of every dropout and stochastic depth to 0; nothing is then drawn."""
    for module in network.modules():
        if isinstance(module, nn.Dropout) or type(module).__name__ == "StochasticDepth":
            module.p = cast(Any, 0.0)
        elif type(module).__name__ == "DropPath":
            module.drop_prob = cast(Any, 0.0)
