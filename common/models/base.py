"""The base of all networks: a backbone that computes features, and a head that classifies them.

Features are the input of the last classifier and come out of a ReLU, so features and prototypes are non-negative and
every cosine between them lies in [0, 1]. Only networks of other libraries (:mod:`common.models.torchvision`) may end in
another activation.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, Self

import torch
from torch import Tensor, nn

from common.errors import ConfigError
from common.numerics import GLOBAL_GENERATORS, seeded_globals

Norm = Literal["batch", "group", "none"]
"""Normalisation of a network. ``batch`` scales by the batch in training and by running statistics in evaluation;
``group`` by each image alone, the same in both; ``none`` does not normalise."""

GROUP_WIDTH = 16
"""Channels per group of a GroupNorm (Wu and He, ECCV 2018, table 3: as good as a fixed count of groups, any width)."""

_DEVICE: ContextVar[str] = ContextVar("device", default="cpu")
"""Where layers are constructed: ``meta`` has shapes and no memory."""


@contextmanager
def shapes_only() -> Iterator[None]:
    """Build networks inside without memory for their weights, on the device ``meta``."""
    token = _DEVICE.set("meta")
    try:
        yield
    finally:
        _DEVICE.reset(token)


class ModelError(ConfigError, ValueError):
    """A network that cannot be built, or lacks what a method needs."""


@contextmanager
def initialised(seed: int, *key: str | int) -> Iterator[None]:
    """Layers constructed inside draw their weights from the random stream of ``(seed, *key)``, on the CPU, in float32.

    torch's layers use the global random state, and one's own may use those of NumPy and Python. The function seeds them
    for the block and restores them afterwards.
    """
    with GLOBAL_GENERATORS, seeded_globals(seed, *key), torch.device(_DEVICE.get()):
        yield


def norm_2d(norm: Norm, channels: int) -> nn.Module:
    """The normalisation of feature maps ``[B, channels, U, V]``; groups are of 16 channels or, if need be, of more."""
    if norm == "none":
        return nn.Identity()
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    return _group_norm(channels)


def norm_1d(norm: Norm, channels: int) -> nn.Module:
    """Return the normalisation of feature vectors ``[B, channels]``."""
    if norm == "none":
        return nn.Identity()
    if norm == "batch":
        return nn.BatchNorm1d(channels)
    return _group_norm(channels)


def _group_norm(channels: int) -> nn.GroupNorm:
    groups = max(1, channels // GROUP_WIDTH)
    while channels % groups:  # 88 channels cannot be five groups
        groups -= 1
    return nn.GroupNorm(groups, channels)


class PooledBackbone(nn.Module):
    """A backbone that ends in global average pooling: features are the mean over positions of non-negative maps."""

    def maps(self, images: Tensor) -> Tensor:
        """Return ``[B, L, U, V]`` float, >= 0: the maps of ``images [B, 3, H, W]`` before pooling."""
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        """Return ``[B, L]``: the features of ``images [B, 3, H, W]``."""
        return pool(self.maps(images))


def pool(maps: Tensor) -> Tensor:
    """Return ``[B, L]``: global average pooling of ``maps [B, L, U, V]``."""
    return maps.mean(dim=(2, 3))


class Model(nn.Module):
    """``head(backbone(images))``; state-dict names begin with ``backbone.`` and ``head.``.

    Args:
        backbone: images ``[B, 3, H, W]`` float to features ``[B, D]``.
        head: features ``[B, D]`` to logits ``[B, K]``.
        feature_size: ``D``.
        class_count: ``K``.

    Attributes:
        frozen: the backbone does not train and stays in evaluation mode. Features ``[B, D]`` may then be given in the
            place of images; they pass through unchanged.
        still: the names of the parts that were built in evaluation mode and stay in it.
    """

    backbone: nn.Module
    head: nn.Module

    def __init__(self, backbone: nn.Module, head: nn.Module, feature_size: int, class_count: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.feature_size = feature_size
        self.class_count = class_count
        self.frozen = False
        self.still: frozenset[str] = frozenset()

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode; :attr:`still` parts stay in evaluation mode."""
        super().train(mode)
        for name, part in self.named_modules():
            if name in self.still:
                part.training = False
        return self

    def hold_still(self) -> None:
        """Keep the parts that are in evaluation mode now in it, whatever mode the network is set to.

        Raises:
            ModelError: the whole network is.
        """
        if not self.training:
            raise ModelError("the network is in evaluation mode as a whole, so nothing of it would learn: call train()")
        self.still = frozenset(name for name, part in self.named_modules() if not part.training)

    def features(self, images: Tensor) -> Tensor:
        """Return ``[B, D]``: what the last classifier reads (and prototypes are made of)."""
        if self.frozen and images.ndim == 2:
            return images
        return self.backbone(images)

    def classify(self, features: Tensor) -> Tensor:
        """Return ``[B, K]``: logits of ``features [B, D]``."""
        return self.head(features)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(features [B, D], logits [B, K])`` of ``images [B, 3, H, W]``."""
        features = self.features(images)
        return features, self.classify(features)

    @property
    def supports_cam(self) -> bool:
        """Whether class activation maps are defined: global average pooling followed by one linear layer."""
        return isinstance(self.backbone, PooledBackbone) and isinstance(self.head, nn.Linear)

    def feature_maps(self, images: Tensor) -> Tensor:
        """Return ``[B, L, U, V]``, >= 0: the last maps; ``pool`` of them is :meth:`features`.

        Raises:
            ModelError: the network has no class activation maps (see :attr:`supports_cam`).
        """
        self._require_cam()
        assert isinstance(self.backbone, PooledBackbone)
        return self.backbone.maps(images)

    def class_activation_maps(self, maps: Tensor, labels: Tensor) -> Tensor:
        """Return ``[B, U, V]``: ``sum_l W[y, l] maps[l]`` for each image's label (Zhou et al., CVPR 2016, Eq. 2).

        The bias is left out (it is the same at every position), so the mean over positions is the logit minus the
        bias.

        Args:
            maps: ``[B, L, U, V]`` from :meth:`feature_maps`.
            labels: ``[B]`` int64, < K.

        Raises:
            ModelError: the network has no class activation maps.
        """
        self._require_cam()
        assert isinstance(self.head, nn.Linear)
        return torch.einsum("bl,bluv->buv", self.head.weight[labels], maps)

    def _require_cam(self) -> None:
        if not self.supports_cam:
            raise ModelError(
                f"class activation maps need a network that ends in global average pooling and one linear layer; this "
                f"one is {type(self.backbone).__name__} + {type(self.head).__name__}; choose model=digit_cnn_gap, "
                f"small, resnet10 or resnet18, or model.head=linear"
            )


class MultilayerHead(nn.Module):
    """``D -> 512 -> 512 -> K`` with normalisation and ReLU after the first two layers (FedPall's classifier).

    For D = 2048 it has 1,318,922 parameters with 10 classes and 1,317,383 with 7. With batch normalisation a training
    batch needs two images or more.
    """

    def __init__(
        self, feature_size: int, class_count: int, hidden_size: int = 512, norm: Norm = "batch", *, bias: bool = True
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(feature_size, hidden_size, bias)
        self.bn1 = norm_1d(norm, hidden_size)
        self.fc2 = nn.Linear(hidden_size, hidden_size, bias)
        self.bn2 = norm_1d(norm, hidden_size)
        self.fc3 = nn.Linear(hidden_size, class_count, bias)

    def forward(self, features: Tensor) -> Tensor:
        """Return ``[B, K]``: logits of ``features [B, D]``."""
        hidden = torch.relu(self.bn1(self.fc1(features)))
        hidden = torch.relu(self.bn2(self.fc2(hidden)))
        return self.fc3(hidden)
