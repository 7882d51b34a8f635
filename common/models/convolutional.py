"""Small convolutional backbones: one for a few CPU cores, and the papers' digit networks."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.models.base import Norm, PooledBackbone, norm_1d, norm_2d


class SmallBackbone(PooledBackbone):
    """Five normalised convolutions of 16 (5x5), 32, 64, 64 and 128 channels; all but the fourth halve the image.

    At 32x32 the last maps are 2x2 and every position sees three quarters of each side or more. Tried with 600 MNIST and
    732 SVHN images: halving early and once more at the end learns faster than wider layers or 4x4 maps of the same
    cost. 135,440 parameters, 1.8 million multiply-adds at 32x32.

    Args:
        norm: the normalisation.
        feature_size: channels of the last convolution, >= 1.
    """

    def __init__(self, norm: Norm = "batch", feature_size: int = 128) -> None:
        super().__init__()
        self.feature_size = feature_size
        bias = norm == "none"  # a normalisation has a bias of its own
        self.conv1 = nn.Conv2d(3, 16, 5, stride=2, padding=2, bias=bias)
        self.bn1 = norm_2d(norm, 16)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=bias)
        self.bn2 = norm_2d(norm, 32)
        self.conv3 = nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=bias)
        self.bn3 = norm_2d(norm, 64)
        self.conv4 = nn.Conv2d(64, 64, 3, padding=1, bias=bias)
        self.bn4 = norm_2d(norm, 64)
        self.conv5 = nn.Conv2d(64, feature_size, 3, stride=2, padding=1, bias=bias)
        self.bn5 = norm_2d(norm, feature_size)

    def maps(self, images: Tensor) -> Tensor:
        """Return ``[B, D, U, V]``, >= 0, with D features; U = V = 2 at 32x32."""
        hidden = torch.relu(self.bn1(self.conv1(images)))
        hidden = torch.relu(self.bn2(self.conv2(hidden)))
        hidden = torch.relu(self.bn3(self.conv3(hidden)))
        hidden = torch.relu(self.bn4(self.conv4(hidden)))
        return torch.relu(self.bn5(self.conv5(hidden)))


class DigitBackbone(nn.Module):
    """Two 5x5 convolutions and two fully connected layers of 1024 (RandConv's digit network, Xu et al., ICLR 2021).

    With a linear head for 10 classes it has 4,547,466 parameters at 32x32. As published, it does not normalise.
    The network flattens its maps, so it has no class activation maps and its size depends on ``image_size``.
    """

    feature_size = 1024

    def __init__(self, image_size: int, norm: Norm = "none") -> None:
        super().__init__()
        side = ((image_size - 4) // 2 - 4) // 2
        self.conv1 = nn.Conv2d(3, 64, 5)
        self.bn1 = norm_2d(norm, 64)
        self.conv2 = nn.Conv2d(64, 128, 5)
        self.bn2 = norm_2d(norm, 128)
        self.fc1 = nn.Linear(128 * side * side, 1024)
        self.fc2 = nn.Linear(1024, 1024)

    def forward(self, images: Tensor) -> Tensor:
        """Return ``[B, 1024]``, >= 0: features of ``images [B, 3, image_size, image_size]``."""
        hidden = F.max_pool2d(torch.relu(self.bn1(self.conv1(images))), 2)
        hidden = F.max_pool2d(torch.relu(self.bn2(self.conv2(hidden))), 2)
        return torch.relu(self.fc2(torch.relu(self.fc1(hidden.flatten(1)))))


class DigitPooledBackbone(PooledBackbone):
    """The two convolutions of :class:`DigitBackbone`, a 3x3 one to 256 maps, then global average pooling.

    With a linear head for 10 classes it has 507,530 parameters, at any image size. The default is not to normalise.
    """

    feature_size = 256

    def __init__(self, norm: Norm = "none") -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 5)
        self.bn1 = norm_2d(norm, 64)
        self.conv2 = nn.Conv2d(64, 128, 5)
        self.bn2 = norm_2d(norm, 128)
        self.conv3 = nn.Conv2d(128, 256, 3, padding=1)
        self.bn3 = norm_2d(norm, 256)

    def maps(self, images: Tensor) -> Tensor:
        """Return ``[B, 256, U, V]``, >= 0; U = V = 5 at 32x32."""
        hidden = F.max_pool2d(torch.relu(self.bn1(self.conv1(images))), 2)
        hidden = F.max_pool2d(torch.relu(self.bn2(self.conv2(hidden))), 2)
        return torch.relu(self.bn3(self.conv3(hidden)))


class FedBNDigitBackbone(nn.Module):
    """Three 5x5 convolutions and fully connected layers of 2048 and 512, each normalised (Li et al., ICLR 2021).

    At 28x28 its first fully connected layer reads 6272 numbers, as published. The network flattens its maps,
    so it has no class activation maps.
    """

    feature_size = 512

    def __init__(self, image_size: int, norm: Norm = "batch") -> None:
        super().__init__()
        side = image_size // 2 // 2
        self.conv1 = nn.Conv2d(3, 64, 5, padding=2)
        self.bn1 = norm_2d(norm, 64)
        self.conv2 = nn.Conv2d(64, 64, 5, padding=2)
        self.bn2 = norm_2d(norm, 64)
        self.conv3 = nn.Conv2d(64, 128, 5, padding=2)
        self.bn3 = norm_2d(norm, 128)
        self.fc1 = nn.Linear(128 * side * side, 2048)
        self.bn4 = norm_1d(norm, 2048)
        self.fc2 = nn.Linear(2048, 512)
        self.bn5 = norm_1d(norm, 512)

    def forward(self, images: Tensor) -> Tensor:
        """Return ``[B, 512]``, >= 0: features of ``images [B, 3, image_size, image_size]``."""
        hidden = F.max_pool2d(torch.relu(self.bn1(self.conv1(images))), 2)
        hidden = F.max_pool2d(torch.relu(self.bn2(self.conv2(hidden))), 2)
        hidden = torch.relu(self.bn3(self.conv3(hidden))).flatten(1)
        hidden = torch.relu(self.bn4(self.fc1(hidden)))
        return torch.relu(self.bn5(self.fc2(hidden)))


class AlexNetBackbone(nn.Module):
    """Five convolutions and two fully connected layers of 1024, each normalised: the AlexNet of FedBN (ICLR 2021).

    Pooling to 6x6 positions before the fully connected layers makes its size independent of the images. The network
    flattens its maps, so it has no class activation maps. There is no dropout, as in FDSE's code.
    """

    feature_size = 1024

    def __init__(self, norm: Norm = "batch") -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 11, stride=4, padding=2)
        self.bn1 = norm_2d(norm, 64)
        self.conv2 = nn.Conv2d(64, 192, 5, padding=2)
        self.bn2 = norm_2d(norm, 192)
        self.conv3 = nn.Conv2d(192, 384, 3, padding=1)
        self.bn3 = norm_2d(norm, 384)
        self.conv4 = nn.Conv2d(384, 256, 3, padding=1)
        self.bn4 = norm_2d(norm, 256)
        self.conv5 = nn.Conv2d(256, 256, 3, padding=1)
        self.bn5 = norm_2d(norm, 256)
        self.fc1 = nn.Linear(256 * 6 * 6, 1024)
        self.bn6 = norm_1d(norm, 1024)
        self.fc2 = nn.Linear(1024, 1024)
        self.bn7 = norm_1d(norm, 1024)

    def forward(self, images: Tensor) -> Tensor:
        """``[B, 1024]``, >= 0: features of ``images [B, 3, H, W]``, H and W >= 63."""
        hidden = F.max_pool2d(torch.relu(self.bn1(self.conv1(images))), 3, 2)
        hidden = F.max_pool2d(torch.relu(self.bn2(self.conv2(hidden))), 3, 2)
        hidden = torch.relu(self.bn3(self.conv3(hidden)))
        hidden = torch.relu(self.bn4(self.conv4(hidden)))
        hidden = F.max_pool2d(torch.relu(self.bn5(self.conv5(hidden))), 3, 2)
        hidden = F.adaptive_avg_pool2d(hidden, 6).flatten(1)
        hidden = torch.relu(self.bn6(self.fc1(hidden)))
        return torch.relu(self.bn7(self.fc2(hidden)))
