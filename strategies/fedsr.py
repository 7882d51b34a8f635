"""FedSR: A Simple and Effective Domain Generalization Method for Federated Learning.

A. Tuan Nguyen, Philip Torr, Ser-Nam Lim. NeurIPS 2022. OpenReview:mrt90D00aQX.
"""

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.config import NonNegative, Search, checked
from common.models.base import Model, initialised
from common.numerics import generator, working_dtype
from common.prototypes import PrototypeSet
from strategies.core.method import Averaging, Batch, ClientContext, Losses, Weighting
from strategies.core.readings import Point

GAUSSIANS = "class_gaussians"
"""The module of the model that stays on the device."""


TEST_SAMPLES = 20
"""Draws per test image, as released."""


@checked
class FedSR(Averaging):
    """FedAvg of a probabilistic network, with simple features: short ones (L2R), close to a Gaussian per class (CMI).

    A network ends in a Gaussian over as many latent features as the backbone has; training classifies one draw ``z =
    mean + deviation * noise``, testing averages the class probabilities of 20 draws. Local loss: cross-entropy ``+ norm
    * ||z|| + divergence * KL(N(C mean, (C deviation)^2) || N(r_m^y, (r_s^y)^2))``, the last summed over features. Since
    the network differs, no setting is FedAvg; ``norm=divergence=0`` is FedAvg of the probabilistic network.

    Payload: the network's state both ways. Client state: the class Gaussians r_m, r_s and the scale C.

    Args:
        norm: weight of L2R, >= 0 (released for PACS: 0.01).
        divergence: weight of CMI, >= 0 (released for PACS: 0.001).
        fidelity: L2R is the mean squared length (``paper``) or the mean length (``released``); the latter made the
            published numbers and its weight belongs to it, so it is the default. No other reading follows it.
        weighting: how the server averages: ``uniform`` (the released code), or by ``samples``.
    """

    readings: ClassVar[tuple[Point, ...]] = (
        Point(
            "L2R",
            "paper",
            "released",
            setting="fidelity",
            meanings={"paper": "the mean squared length", "released": "the mean length"},
        ),
        Point("average of models", released="uniform", setting="weighting", tables={"fedgca": "samples"}),
        Point("steps of a round", released="five", ours="all batches of train.epochs; train.local_steps=5"),
        Point("momentum of the clients' optimiser", released="kept from round to round", ours="new in each round"),
        Point("scale C", released="free, and its logarithm is lost below 0", ours="a softplus"),
    )

    norm: Annotated[NonNegative, Search(1e-4, 0.1)] = 0.01
    divergence: Annotated[NonNegative, Search(1e-5, 0.1)] = 0.001
    fidelity: Literal["paper", "released"] = "released"
    weighting: Weighting = "uniform"

    def extend(self, model: nn.Module, client_count: int, seed: int) -> nn.Module:  # noqa: ARG002
        """Return the model's backbone under a Gaussian layer and a linear classifier, and the class Gaussians."""
        assert isinstance(model, Model)
        with initialised(seed, "probabilistic network"):
            extended = ProbabilisticModel(model, model.feature_size)
        extended.add_module(GAUSSIANS, ClassGaussians(model.class_count, extended.feature_size))
        return extended

    def shared_names(self, model: nn.Module) -> set[str]:
        """Return all names except those of the class Gaussians."""
        return {name for name in model.state_dict() if not name.startswith(f"{GAUSSIANS}.")}

    def compute(
        self, model: nn.Module, images: Tensor, local: ClientContext
    ) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        """Return one draw of the features and its logits; in evaluation the mean and log-probabilities."""
        assert isinstance(model, ProbabilisticModel)
        mean, deviation = model.distribution(images)
        gaussian = {"mean": mean, "deviation": deviation}
        if model.training:
            features = sample(mean, deviation, local.cached("noise", lambda: local.generator("latent noise")))
            return features, model.classify(features), gaussian
        draws = local.generator("latent noise of tests")  # the same for every batch: batches are not ordered
        return mean, model.average(mean, deviation, draws, TEST_SAMPLES), gaussian

    def inference(self, model: nn.Module, prototypes: PrototypeSet, seed: int) -> nn.Module:  # noqa: ARG002
        """Return the model with the same draws for every image, ten times as many as in a test."""
        assert isinstance(model, ProbabilisticModel)
        draws = generator(seed, "latent noise of tests")
        return FixedDraws(model, torch.randn(10 * TEST_SAMPLES, model.feature_size, generator=draws))

    def loss(self, batch: Batch, local: ClientContext) -> Losses:
        """Return cross-entropy, L2R and CMI of the drawn features, over all views."""
        terms = {"cross_entropy": batch.cross_entropy()}
        if self.norm:
            terms["norm"] = self.norm * feature_norm(batch.features, squared=self.fidelity == "paper")
        if self.divergence:
            gaussians = local.model.get_submodule(GAUSSIANS)
            assert isinstance(gaussians, ClassGaussians)
            terms["divergence"] = self.divergence * gaussian_class_divergence(
                batch.extra["mean"],
                batch.extra["deviation"],
                batch.labels,
                gaussians.means,
                gaussians.deviations,
                gaussians.scale,
            )
        return Losses(terms)


# ---- its losses ------------------------------------------------------------------------------------------------------


def feature_norm(features: Tensor, *, squared: bool = False) -> Tensor:
    """Return FedSR's L2R: mean length of ``features [B, D]`` as its code has it, or mean squared length."""
    features = features.to(working_dtype(features))
    if squared:
        return features.square().sum(1).mean()
    return torch.linalg.vector_norm(features, dim=1).mean()


def gaussian_class_divergence(
    mean: Tensor,
    deviation: Tensor,
    labels: Tensor,
    class_mean: Tensor,
    class_deviation: Tensor,
    scale: Tensor | float = 1.0,
) -> Tensor:
    """Return FedSR's CMI: ``KL(N(C m, (C s)^2) || N(r_m, r_s^2))`` to the label's Gaussian, mean over B.

    The divergence is summed over the D dimensions.

    Args:
        mean: ``[B, D]`` of the features' Gaussians.
        deviation: ``[B, D]``, > 0.
        labels: ``[B]`` int64.
        class_mean: ``[K, D]``, learned.
        class_deviation: ``[K, D]``, > 0, learned.
        scale: C > 0, learned; keep it positive (softplus): the released code does not, and its logarithm turns NaN.
    """
    dtype = working_dtype(mean)
    scale = torch.as_tensor(scale, dtype=dtype, device=mean.device)
    scaled_mean, scaled_deviation = scale * mean.to(dtype), scale * deviation.to(dtype)
    target_mean, target_deviation = class_mean.to(dtype)[labels], class_deviation.to(dtype)[labels]
    spread = (scaled_deviation.square() + (scaled_mean - target_mean).square()) / (2.0 * target_deviation.square())
    return (target_deviation.log() - scaled_deviation.log() + spread - 0.5).sum(1).mean()


# ---- its nets --------------------------------------------------------------------------------------------------------


class GaussianLayer(nn.Module):
    """A Gaussian per image: one linear layer ``D -> 2 Z`` gives the mean and, by softplus, the deviation.

    FedSR (Nguyen et al., NeurIPS 2022): ``p(z | x) = N(mean(x), diag(deviation(x)^2))``.
    """

    def __init__(self, feature_size: int, latent_size: int) -> None:
        super().__init__()
        self.fc = nn.Linear(feature_size, 2 * latent_size)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(mean [B, Z], deviation [B, Z] > 0)`` of ``features [B, D]``."""
        mean, raw = self.fc(features).chunk(2, dim=1)
        return mean, F.softplus(raw)


class GaussianBackbone(nn.Module):
    """A backbone and a :class:`GaussianLayer`; as a plain backbone it gives the mean."""

    def __init__(self, backbone: nn.Module, feature_size: int, latent_size: int) -> None:
        super().__init__()
        self.network = backbone
        self.gaussian = GaussianLayer(feature_size, latent_size)

    def forward(self, images: Tensor) -> Tensor:
        """Return ``[B, Z]``: the mean, which may be negative."""
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
        """Return ``(mean [B, Z], deviation [B, Z] > 0)`` of ``images [B, 3, H, W]``."""
        mean, deviation = self.backbone.gaussian(self.backbone.network(images))
        return mean, deviation

    def average(self, mean: Tensor, deviation: Tensor, generator: torch.Generator, samples: int = 20) -> Tensor:
        """Return ``[B, K]``: the logarithm of the mean class probabilities over ``samples`` draws of the features."""
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
        """Return the mean ``[B, Z]`` and log-probabilities ``[B, K]`` of prepared images."""
        mean, deviation = self.model.distribution(images)
        features = mean + deviation * self.draws[:, None]
        logits = self.model.classify(features).log_softmax(2).logsumexp(0)
        return mean, logits - math.log(len(features))


def sample(mean: Tensor, deviation: Tensor, generator: torch.Generator) -> Tensor:
    """Return ``[B, Z]``: one draw ``mean + deviation * noise``, differentiable in both; noise is drawn on the CPU."""
    noise = torch.randn(mean.shape, generator=generator).to(mean.device, mean.dtype)
    return mean + deviation * noise


class ClassGaussians(nn.Module):
    """FedSR's learned reference Gaussian of every class, and the scale of features against it. Local to a client.

    All positive quantities are softplus of a free parameter, so their logarithms exist. The parameters start as in the
    released code: means 0, deviations softplus(1), scale 1 (there a free number that may turn negative).
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
        """Return ``(r_m [B, Z], r_s [B, Z] > 0, C scalar > 0)`` for ``labels [B]``."""
        return self.means[labels], self.deviations[labels], self.scale
