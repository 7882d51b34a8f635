"""The networks that can be chosen with ``model=...``: frozen dataclasses that build a :class:`Model` from a seed."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import ClassVar, Literal

from torch import nn

from common.config import Count, checked
from common.models.base import Model, ModelError, MultilayerHead, Norm, initialised
from common.models.convolutional import (
    AlexNetBackbone,
    DigitBackbone,
    DigitPooledBackbone,
    FedBNDigitBackbone,
    SmallBackbone,
)
from common.models.pretrained import load_pretrained, start_from
from common.models.residual import ResidualBackbone
from common.models.trial import try_on


@checked
class ModelSpec(ABC):
    """A network that can be built for any number of classes, image size and seed; ``norm`` is its normalisation.

    Args:
        pretrained: the folder of an exported model of the same network that it starts from, but for the classifier
            where the classes differ. ``None``: weights of the seed.
        freeze: ``backbone``: the backbone keeps its initial weights and statistics, and only the classifier trains.
            Features are then computed once on each device if training images are not augmented.
        norm: a field of the networks with normalisation: ``batch``, ``group`` (which keeps no running statistics) or
            ``none``.
    """

    minimum_image_size: ClassVar[int] = 1
    """Side in pixels below which a layer would have nothing left to halve."""
    channels_last: ClassVar[bool] = False
    """Whether training was measured faster with channels last in memory (docs/performance.md)."""

    pretrained: Path | None = field(default=None, kw_only=True)
    freeze: Literal["none", "backbone"] = field(default="none", kw_only=True)

    def build(self, class_count: int, image_size: int, seed: int, classes: Sequence[str] = ()) -> Model:
        """The network on the CPU in float32, in training mode; its weights depend on ``seed`` and what it starts from.

        Args:
            class_count: K, >= 2.
            image_size: side of the square input images in pixels.
            seed: the run's seed.
            classes: their names, where they are known.

        Raises:
            ModelError: fewer than two classes, images too small for this network, weights to start from that do not
                fit, or a network of the user's own whose features or logits have other sizes than it states.
        """
        if class_count < 2:
            raise ModelError(f"there is nothing to learn of one class: add images of a second to {list(classes)}")
        if image_size < self.minimum_image_size:
            raise ModelError(
                f"images of {image_size}x{image_size} pixels are too small for {type(self).__name__}, which needs "
                f"{self.minimum_image_size} or more; set a larger image size for the data, or choose another model"
            )
        with initialised(seed, "initialisation"):
            model = self._construct(class_count, image_size)
            if self.freeze == "backbone":
                model.backbone.eval().requires_grad_(False)
            model.hold_still()
            try_on(model, image_size, type(self))
        if self.pretrained is not None:
            start_from(model, self.pretrained, classes)
        model.frozen = self.freeze == "backbone"
        return model

    def of(self, domain: str) -> "ModelSpec":  # noqa: ARG002
        """Return the network of the clients of a domain: this one for every domain."""
        return self

    @abstractmethod
    def _construct(self, class_count: int, image_size: int) -> Model:
        """Return the network, with weights from the current random state."""


def _linear(backbone: nn.Module, feature_size: int, class_count: int) -> Model:
    return Model(backbone, nn.Linear(feature_size, class_count), feature_size, class_count)


@checked
class Small(ModelSpec):
    """Five convolutions to 128 features, 136,730 parameters with 10 classes: for runs on a few CPU cores.

    Args:
        features: channels of the last convolution and size of a feature; 512 is that of the papers' ResNet-10.
    """

    norm: Norm = "batch"
    features: Count = 128
    minimum_image_size: ClassVar[int] = 9
    channels_last = True

    def _construct(self, class_count: int, image_size: int) -> Model:  # noqa: ARG002 - pooled, any size fits
        return _linear(SmallBackbone(self.norm, self.features), self.features, class_count)


@checked
class ResNet10(ModelSpec):
    """The ResNet-10 of FPL (FedAPC and FedPLCC too): 512 features, 4,903,242 parameters with 10 classes.

    3x3 convolution without pooling, four blocks of 64, 128, 256, 512 channels, linear classifier; 253 million
    multiply-adds per 32x32 image. Convolutions start as torch makes them, as in the released code.

    Args:
        width: channels of the first of the four blocks, which have 1, 2, 4 and 8 times this number; features are the
            last of these. 32 halves the network: 256 features, 1,228,970 parameters with 10 classes.
    """

    norm: Norm = "batch"
    width: Count = 64
    minimum_image_size: ClassVar[int] = 5
    channels_last = True

    def _construct(self, class_count: int, image_size: int) -> Model:  # noqa: ARG002 - pooled, any size fits
        backbone = ResidualBackbone((1, 1, 1, 1), stem="plain", norm=self.norm, kaiming=False, width=self.width)
        return _linear(backbone, backbone.feature_size, class_count)


@checked
class ResNet10PLVM(ModelSpec):
    """The ResNet-10 of FedPLVM's own code: 512 features, 4,906,314 parameters with 10 classes, for 64x64 and up.

    5x5 convolution with stride 2 and 3x3 max pooling before the same four blocks; He initialisation.
    """

    norm: Norm = "batch"
    minimum_image_size: ClassVar[int] = 19

    def _construct(self, class_count: int, image_size: int) -> Model:  # noqa: ARG002 - pooled, any size fits
        backbone = ResidualBackbone((1, 1, 1, 1), stem="wide", norm=self.norm)
        return _linear(backbone, backbone.feature_size, class_count)


@checked
class TorchvisionResNet(ModelSpec):
    """torchvision's ResNet-18 (512 features) or ResNet-50 (2048 features), with a linear or a multilayer head.

    Args:
        depth: 18 or 50.
        head: ``linear``, or ``multilayer``: D-512-512-K with normalisation (FedPall: ResNet-50, 23,508,032 +
            1,318,922 parameters with 10 classes).
        pretrained_file: a safetensors file with torchvision's names (``conv1.weight`` ...) that the backbone starts
            from; its classifier ``fc.*`` is ignored. ``None``: random weights.
    """

    depth: Literal[18, 50] = 18
    head: Literal["linear", "multilayer"] = "linear"
    norm: Norm = "batch"
    pretrained_file: Path | None = None
    minimum_image_size: ClassVar[int] = 17

    def _construct(self, class_count: int, image_size: int) -> Model:  # noqa: ARG002 - pooled, any size fits
        deep = self.depth == 50
        backbone = ResidualBackbone((3, 4, 6, 3) if deep else (2, 2, 2, 2), bottleneck=deep, norm=self.norm)
        size = backbone.feature_size
        if self.pretrained_file is not None:
            load_pretrained(backbone, self.pretrained_file)
        if self.head == "linear":
            return _linear(backbone, size, class_count)
        return Model(backbone, MultilayerHead(size, class_count, norm=self.norm), size, class_count)


@checked
class DigitCNN(ModelSpec):
    """RandConv's digit network: 1024 features, 4,547,466 parameters at 32x32; no class activation maps."""

    norm: Norm = "none"
    minimum_image_size: ClassVar[int] = 16

    def _construct(self, class_count: int, image_size: int) -> Model:
        return _linear(DigitBackbone(image_size, self.norm), DigitBackbone.feature_size, class_count)


@checked
class DigitCNNPooled(ModelSpec):
    """The digit network with global average pooling, so that class activation maps exist: 256 features, 507,530."""

    norm: Norm = "none"
    minimum_image_size: ClassVar[int] = 16

    def _construct(self, class_count: int, image_size: int) -> Model:  # noqa: ARG002 - pooled, any size fits
        return _linear(DigitPooledBackbone(self.norm), DigitPooledBackbone.feature_size, class_count)


@checked
class FedBNDigit(ModelSpec):
    """FedBN's digit network: 512 features, 14,219,210 parameters at 28x28 with 10 classes; no class activation maps."""

    norm: Norm = "batch"
    minimum_image_size: ClassVar[int] = 4
    channels_last = True

    def _construct(self, class_count: int, image_size: int) -> Model:
        backbone = FedBNDigitBackbone(image_size, self.norm)
        return _linear(backbone, FedBNDigitBackbone.feature_size, class_count)


@checked
class AlexNet(ModelSpec):
    """The AlexNet of FedBN and FDSE: 1024 features, 12,974,154 parameters with 10 classes; for 63x63 and up."""

    norm: Norm = "batch"
    minimum_image_size: ClassVar[int] = 63

    def _construct(self, class_count: int, image_size: int) -> Model:  # noqa: ARG002 - pooled, any size fits
        return _linear(AlexNetBackbone(self.norm), AlexNetBackbone.feature_size, class_count)
