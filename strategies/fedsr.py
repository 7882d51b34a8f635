"""FedSR: a simple and effective domain generalisation method for federated learning (Nguyen et al., NeurIPS 2022)."""

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from common.config import Count, Natural, NonNegative, Search, checked
from common.losses import cross_entropy, feature_norm, gaussian_class_divergence
from common.models.auxiliary import ClassGaussians, FixedDraws, ProbabilisticModel, sample
from common.models.base import Model, initialised
from common.prototypes import PrototypeSet
from common.seeding import generator
from strategies.core.method import Averaging, Batch, Local, Losses, Weighting

GAUSSIANS = "class_gaussians"
"""The module of the model that stays on the device."""


@checked
class FedSR(Averaging):
    """FedAvg of a probabilistic network, with simple features: short ones (L2R), close to a Gaussian per class (CMI).

    A network ends in a Gaussian over Z latent features; training classifies one draw ``z = mean + deviation * noise``,
    testing averages the class probabilities of ``test_samples`` draws. Local loss: cross-entropy ``+ norm * ||z|| +
    divergence * KL(N(C mean, (C deviation)^2) || N(r_m^y, (r_s^y)^2))``, the last summed over features. Since the
    network differs, no setting is FedAvg; ``norm=divergence=0`` is FedAvg of the probabilistic network.

    The released code takes five optimiser steps a round (``train.local_steps=5``) and averages clients equally
    (``weighting=uniform``, which by default is by samples, as in the rows beside it in FedGCA's tables); it leaves C a
    free number, whose logarithm is lost once it turns negative. Here C is positive, in either fidelity.

    Payload: the network's state both ways. Client state: the class Gaussians r_m, r_s and the scale C.

    Args:
        norm: weight of L2R, >= 0 (released for PACS: 0.01).
        divergence: weight of CMI, >= 0 (released for PACS: 0.001).
        fidelity: L2R is the mean squared length (``paper``) or the mean length (``released``); the latter made the
            published numbers and its weight belongs to it, so it is the default.
        latent_size: Z, >= 1; ``null`` is the backbone's feature size (released: 512 on ResNet-18, its own).
        test_samples: draws per test image, >= 0; 0 classifies the mean.
        weighting: how the server averages: by ``samples``, or ``uniform`` (the released code).
    """

    norm: Annotated[NonNegative, Search(1e-4, 0.1)] = 0.01
    divergence: Annotated[NonNegative, Search(1e-5, 0.1)] = 0.001
    fidelity: Literal["paper", "released"] = "released"
    latent_size: Count | None = None
    test_samples: Natural = 20
    weighting: Weighting = "samples"

    def extend(self, model: nn.Module, client_count: int, seed: int) -> nn.Module:  # noqa: ARG002
        """The model's backbone under a Gaussian layer and a linear classifier, beside the class Gaussians."""
        assert isinstance(model, Model)
        with initialised(seed, "probabilistic network"):
            extended = ProbabilisticModel(model, self.latent_size or model.feature_size)
        extended.add_module(GAUSSIANS, ClassGaussians(model.class_count, extended.feature_size))
        return extended

    def shared_names(self, model: nn.Module) -> set[str]:
        """Everything but the class Gaussians."""
        return {name for name in model.state_dict() if not name.startswith(f"{GAUSSIANS}.")}

    def compute(self, model: nn.Module, images: Tensor, local: Local) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        """In training, one draw of the features and its logits; in evaluation, the mean and log-probabilities."""
        assert isinstance(model, ProbabilisticModel)
        mean, deviation = model.distribution(images)
        gaussian = {"mean": mean, "deviation": deviation}
        if model.training:
            features = sample(mean, deviation, local.cached("noise", lambda: local.generator("latent noise")))
            return features, model.classify(features), gaussian
        if self.test_samples == 0:
            return mean, model.classify(mean), gaussian
        draws = local.generator("latent noise of tests")  # the same for every batch: batches are not ordered
        return mean, model.average(mean, deviation, draws, self.test_samples), gaussian

    def inference(self, model: nn.Module, prototypes: PrototypeSet, seed: int) -> nn.Module:
        """The same draws for every image, ten times as many as a test makes of each, so that they count for little."""
        assert isinstance(model, ProbabilisticModel)
        if self.test_samples == 0:
            return super().inference(model, prototypes, seed)
        draws = generator(seed, "latent noise of tests")
        return FixedDraws(model, torch.randn(10 * self.test_samples, model.feature_size, generator=draws))

    def loss(self, batch: Batch, local: Local) -> Losses:
        """Cross-entropy, L2R and CMI of the drawn features, over all views."""
        terms = {"cross_entropy": cross_entropy(batch.logits, batch.labels)}
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
