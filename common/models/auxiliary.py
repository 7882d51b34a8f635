"""Small networks that some methods need besides the model: discriminators, generators, projections, Gaussians.

All take and return features ``[B, D]``. Make them inside ``common.models.base.initialised(seed, purpose, ...)``, so
that their first weights depend on the seed alone. None draws random numbers on its own: noise is an argument.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.models.base import Model, MultilayerHead


class Discriminator(MultilayerHead):
    """Which client does a feature come from: ``D -> 512 -> 512 -> C``, batch norm and ReLU in between, no biases.

    FedPall's amplifier (ICCV 2025) and ADCOL's discriminator. For D = 2048 it has 1,314,816 parameters with 4 clients
    and 1,315,328 with 5. In training mode a batch needs two rows or more.
    """

    def __init__(self, feature_size: int, client_count: int, hidden_size: int = 512) -> None:
        super().__init__(feature_size, client_count, hidden_size, bias=False)


class ProjectionHead(nn.Module):
    """MOON's projection ``D -> D -> P`` with a ReLU between (Li et al., CVPR 2021); P is 256."""

    def __init__(self, feature_size: int, projection_size: int = 256) -> None:
        super().__init__()
        self.fc1 = nn.Linear(feature_size, feature_size)
        self.fc2 = nn.Linear(feature_size, projection_size)

    def forward(self, features: Tensor) -> Tensor:
        """``[B, P]``: projections of ``features [B, D]``; they may be negative."""
        return self.fc2(torch.relu(self.fc1(features)))


def with_projection(model: Model, projection_size: int = 256) -> Model:
    """MOON's network: ``model``'s backbone, a projection, and one linear layer that reads the projection.

    The projection becomes part of the backbone, so it is what ``features`` returns. ``model``'s own head is left out.
    """
    backbone = nn.Sequential(model.backbone, ProjectionHead(model.feature_size, projection_size))
    head = nn.Linear(projection_size, model.class_count)
    return Model(backbone, head, projection_size, model.class_count)


class FeatureGenerator(nn.Module):
    """FedADG's distribution generator: noise and class to a feature, ``N + K -> 4096 -> D`` (LeakyReLU, then ReLU).

    Weights start from Xavier's uniform distribution with gain 0.5, as in the released code.
    """

    def __init__(self, feature_size: int, class_count: int, noise_size: int = 2048, hidden_size: int = 4096) -> None:
        super().__init__()
        self.noise_size = noise_size
        self.fc1 = nn.Linear(noise_size + class_count, hidden_size)
        self.fc2 = nn.Linear(hidden_size, feature_size)
        for layer in (self.fc1, self.fc2):
            nn.init.xavier_uniform_(layer.weight, gain=0.5)

    def forward(self, noise: Tensor, classes: Tensor) -> Tensor:
        """``[B, D]``, >= 0: features for ``noise [B, noise_size]`` and (scaled) one-hot ``classes [B, K]``."""
        hidden = F.leaky_relu(self.fc1(torch.cat([noise, classes], dim=1)))
        return torch.relu(self.fc2(hidden))


class FeatureDiscriminator(nn.Module):
    """FedADG's discriminator: is a feature of a class generated (towards 1) or extracted (towards 0).

    Feature and class pass a projection ``D + K -> 1024`` without bias, whose first weights are scaled to unit Frobenius
    norm, then ``1024 -> 1024 -> 1`` with LeakyReLU, then a sigmoid.
    """

    def __init__(self, feature_size: int, class_count: int, hidden_size: int = 1024) -> None:
        super().__init__()
        self.projection = nn.Linear(feature_size + class_count, hidden_size, bias=False)
        self.fc1 = nn.Linear(hidden_size, hidden_size)
        self.fc2 = nn.Linear(hidden_size, 1)
        with torch.no_grad():
            self.projection.weight.div_(self.projection.weight.norm())

    def forward(self, features: Tensor, classes: Tensor) -> Tensor:
        """``[B]`` in (0, 1), for ``features [B, D]`` and (scaled) one-hot ``classes [B, K]``."""
        hidden = self.projection(torch.cat([features, classes], dim=1))
        return torch.sigmoid(self.fc2(F.leaky_relu(self.fc1(hidden)))).squeeze(1)


class TaskHead(nn.Module):
    """FedADG's classifier ``D -> D -> K``: two linear layers with nothing between them, as in the released code."""

    def __init__(self, feature_size: int, class_count: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(feature_size, feature_size)
        self.fc2 = nn.Linear(feature_size, class_count)

    def forward(self, features: Tensor) -> Tensor:
        """``[B, K]``: logits of ``features [B, D]``."""
        return self.fc2(self.fc1(features))


def scaled_one_hot(labels: Tensor, class_count: int, scale: float = 1.0) -> Tensor:
    """``[B, K]`` float32: ``scale`` at each label's class, 0 elsewhere (FedADG conditions on 0.6)."""
    return F.one_hot(labels, class_count).to(torch.float32) * scale


class GaussianLayer(nn.Module):
    """A Gaussian per image: one linear layer ``D -> 2 Z`` whose halves are the mean and, by softplus, the deviation.

    FedSR (Nguyen et al., NeurIPS 2022): ``p(z | x) = N(mean(x), diag(deviation(x)^2))``.
    """

    def __init__(self, feature_size: int, latent_size: int) -> None:
        super().__init__()
        self.fc = nn.Linear(feature_size, 2 * latent_size)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """``(mean [B, Z], deviation [B, Z] > 0)`` of ``features [B, D]``."""
        mean, raw = self.fc(features).chunk(2, dim=1)
        return mean, F.softplus(raw)


class GaussianBackbone(nn.Module):
    """A backbone and a :class:`GaussianLayer`; as a plain backbone it gives the mean."""

    def __init__(self, backbone: nn.Module, feature_size: int, latent_size: int) -> None:
        super().__init__()
        self.network = backbone
        self.gaussian = GaussianLayer(feature_size, latent_size)

    def forward(self, images: Tensor) -> Tensor:
        """``[B, Z]``: the mean, which may be negative."""
        return self.gaussian(self.network(images))[0]


class ProbabilisticModel(Model):
    """FedSR's network: ``model``'s backbone, a Gaussian over Z latent features, one linear layer.

    ``features`` (and so ``forward``) give the mean; training takes a :func:`sample`, testing averages over some with
    :meth:`average`. ``model``'s own head is left out.
    """

    backbone: GaussianBackbone

    def __init__(self, model: Model, latent_size: int) -> None:
        backbone = GaussianBackbone(model.backbone, model.feature_size, latent_size)
        super().__init__(backbone, nn.Linear(latent_size, model.class_count), latent_size, model.class_count)

    def distribution(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """``(mean [B, Z], deviation [B, Z] > 0)`` of ``images [B, 3, H, W]``."""
        mean, deviation = self.backbone.gaussian(self.backbone.network(images))
        return mean, deviation

    def average(self, mean: Tensor, deviation: Tensor, generator: torch.Generator, samples: int = 20) -> Tensor:
        """``[B, K]``: the logarithm of the class probabilities averaged over ``samples`` draws of the features."""
        draws = [F.log_softmax(self.classify(sample(mean, deviation, generator)), dim=1) for _ in range(samples)]
        return torch.stack(draws).logsumexp(dim=0) - math.log(samples)


class FixedDraws(nn.Module):
    """A probabilistic network that averages the class probabilities over the same draws ``[S, Z]`` for every image."""

    draws: Tensor

    def __init__(self, model: ProbabilisticModel, draws: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("draws", draws, persistent=False)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The mean ``[B, Z]`` and log-probabilities ``[B, K]`` of prepared images."""
        mean, deviation = self.model.distribution(images)
        features = mean + deviation * self.draws[:, None]
        logits = self.model.classify(features).log_softmax(2).logsumexp(0)
        return mean, logits - math.log(len(features))


def sample(mean: Tensor, deviation: Tensor, generator: torch.Generator) -> Tensor:
    """``[B, Z]``: one draw ``mean + deviation * noise``, differentiable in both; noise is drawn on the CPU."""
    noise = torch.randn(mean.shape, generator=generator).to(mean.device, mean.dtype)
    return mean + deviation * noise


class ClassGaussians(nn.Module):
    """FedSR's learned reference Gaussian of every class, and the scale of features against it. Local to a client.

    All positive quantities are softplus of a free parameter, so their logarithms exist. They start as in the released
    code: means 0, deviations softplus(1), scale 1 (there a free number that may turn negative).
    """

    def __init__(self, class_count: int, latent_size: int) -> None:
        super().__init__()
        self.means = nn.Parameter(torch.zeros(class_count, latent_size))
        self.raw_deviations = nn.Parameter(torch.ones(class_count, latent_size))
        self.raw_scale = nn.Parameter(torch.tensor(math.log(math.e - 1.0)))  # softplus of it is 1

    @property
    def deviations(self) -> Tensor:
        """``[K, Z]`` > 0."""
        return F.softplus(self.raw_deviations)

    @property
    def scale(self) -> Tensor:
        """Scalar > 0: C."""
        return F.softplus(self.raw_scale)

    def forward(self, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``(r_m [B, Z], r_s [B, Z] > 0, C scalar > 0)`` for ``labels [B]``."""
        return self.means[labels], self.deviations[labels], self.scale
