"""Residual backbones (He et al., CVPR 2016), built from torchvision's blocks; all end in global average pooling."""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from common.models.base import Norm, PooledBackbone, norm_2d

Stem = Literal["plain", "wide", "torchvision"]
"""How images enter.

``plain``: 3x3 convolution, stride 1, no pooling (RethinkFL's nets for 32x32 images). ``wide``: 5x5 convolution, stride
2, padding 1, then 3x3 max pooling, stride 2 (FedPLVM). ``torchvision``: 7x7 convolution, stride 2, padding 3, then 3x3
max pooling, stride 2.
"""


WIDTH = 64
"""Channels of the first stage in torchvision's networks."""


class ResidualBackbone(PooledBackbone):
    """Stem and four stages; parameter names are torchvision's (``conv1``, ``bn1``, ``layer1.0.conv1`` ...).

    Args:
        blocks: residual blocks per stage.
        bottleneck: three-layer blocks (ResNet-50) instead of two-layer ones.
        stem: see :data:`Stem`.
        norm: ``batch``, ``group`` or ``none``. Without normalisation each residual branch starts at zero, so that the
            features of a deep network do not grow with every block.
        kaiming: convolutions start from He's normal distribution (fan out), as in torchvision; otherwise from torch's
            own default, as in RethinkFL.
        width: channels of the first stage; the four stages have 1, 2, 4 and 8 times this number, with bottlenecks four
            times as many.

    ``feature_size`` is 8 times ``width``, or 32 times with bottlenecks.
    """

    def __init__(
        self,
        blocks: tuple[int, int, int, int],
        *,
        bottleneck: bool = False,
        stem: Stem = "torchvision",
        norm: Norm = "batch",
        kaiming: bool = True,
        width: int = WIDTH,
    ) -> None:
        super().__init__()
        # torchvision takes a second or two to import, which every process of a run with another net would pay too
        from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

        block = Bottleneck if bottleneck else BasicBlock
        network = ResNet(block, list(blocks), num_classes=1, norm_layer=partial(norm_2d, norm))
        if width != WIDTH:
            resize(network, block, blocks, width, kaiming)
        pooling: nn.Module = network.maxpool
        if stem == "plain":
            network.conv1 = nn.Conv2d(3, width, 3, stride=1, padding=1, bias=False)
            pooling = nn.Identity()
        elif stem == "wide":
            network.conv1 = nn.Conv2d(3, width, 5, stride=2, padding=1, bias=False)
        self.conv1: nn.Conv2d = network.conv1
        self.bn1: nn.Module = network.bn1
        self.pooling = pooling
        self.layer1: nn.Module = network.layer1
        self.layer2: nn.Module = network.layer2
        self.layer3: nn.Module = network.layer3
        self.layer4: nn.Module = network.layer4
        self.feature_size: int = 8 * width * block.expansion
        for module in self.modules():
            if isinstance(module, nn.Conv2d) and not kaiming:
                module.reset_parameters()
        if norm == "none":
            for module in self.modules():
                if isinstance(module, BasicBlock):
                    nn.init.zeros_(module.conv2.weight)
                elif isinstance(module, Bottleneck):
                    nn.init.zeros_(module.conv3.weight)
        if kaiming and stem != "torchvision":
            nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")

    def maps(self, images: Tensor) -> Tensor:
        """Return ``[B, feature_size, U, V]``, >= 0: the last stage's output for ``images [B, 3, H, W]``."""
        hidden = self.pooling(torch.relu(self.bn1(self.conv1(images))))
        return self.layer4(self.layer3(self.layer2(self.layer1(hidden))))


def resize(network: Any, block: Any, blocks: tuple[int, int, int, int], width: int, kaiming: bool) -> None:
    """Replace the stages of torchvision's network, with 64 channels in the first, by stages of another width.

    Args:
        network: a ``torchvision.models.ResNet``; stem and stages are replaced.
        block: the class of its blocks.
        blocks: blocks per stage.
        width: channels of the first stage, >= 1.
        kaiming: whether convolutions start from He's normal distribution.
    """
    network.inplanes = width
    network.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
    network.bn1 = network._norm_layer(width)
    for stage, count in enumerate(blocks):
        stride = 1 if stage == 0 else 2
        setattr(network, f"layer{stage + 1}", network._make_layer(block, width * 2**stage, count, stride=stride))
    if kaiming:
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
