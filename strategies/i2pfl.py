"""I2PFL: Mitigating Domain Shift in Federated Learning via Intra- and Inter-Domain Prototypes.

Huy Q. Le, Ye Lin Tun, Yu Qiao, Minh N. H. Nguyen, Keon Oh Kim, Eui-Nam Huh, Choong Seon Hong. 2025. arXiv:2501.08521.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from common.config import BelowOne, NonNegative, Positive, Search, checked
from common.losses import prototype_contrast
from common.numerics import numpy_generator
from common.prototypes import PrototypeSet
from common.storage import GlobalState
from strategies.core.aggregation import cap_shares
from strategies.core.method import (
    Averaging,
    Batch,
    ClientContext,
    Losses,
    PrototypeMode,
    ServerContext,
    Update,
)
from strategies.core.readings import Point
from strategies.parts.sent_prototypes import carry_over

MIXUP = 0.4
"""Alpha of the Beta distribution of gamma, which is drawn for each sample."""


@checked
class I2PFL(Averaging):
    """FedAvg plus contrast with reweighted global prototypes (GPCL) and alignment with MixUp prototypes (APA).

    Across domains, the server weighs the clients' means of a class by their squared distance from the mean of these
    means, so that unusual domains count more, and smooths the result over the rounds. GPCL contrasts features with
    these prototypes. Within a domain, the features of a batch are mixed with features of other classes, ``gamma z_i +
    (1 - gamma) z_j`` with gamma ~ Beta(0.4, 0.4), and APA pulls each feature towards the mean of its class's mixed
    features. ``contrast=alignment=0`` is FedAvg. With ``alignment=0 reweight=false smoothing=0`` the loss is FPL's at
    ``clusters=global consistency=0 prototype_mode=post_eval``.

    Only the abstract and the introduction of the paper could be read, and no code was found. The formulas come from
    other people's reading notes; docs/methods.md says which readings were taken.

    Payload: the model's state, and one vector and count per class, both ways. Client state: none. Server state: the
    smoothed prototypes.

    Args:
        temperature: tau of GPCL, > 0.
        contrast: weight of GPCL, >= 0.
        alignment: weight of APA, >= 0: the mean of squares over batch and dimensions between features and the means of
            the batch's mixed features.
        smoothing: what the old prototypes count for, in [0, 1); the printed formula gives the new ones 0.99, which is
            ``smoothing=0.01``. 0 does not smooth.
        reweight: weigh clients' means by their distance; otherwise all count the same. A weight is at most
            ``rounds.largest_share``.
    """

    readings: ClassVar[tuple[Point, ...]] = (
        Point(
            "what 0.99 multiplies",
            0.01,
            setting="smoothing",
            meanings={"0.99": "the old prototypes", "0.01": "new ones"},
            tables={"i2pfl": 0.99},
        ),
        Point("reduction of APA", "the sum over classes", ours="the mean over samples and dimensions"),
        Point("mean of mixed features", "over the batch", ours="paper"),
        Point("gamma", ours="one per sample"),
        Point("local prototypes", ours="a pass after training, without MixUp"),
    )

    fedavg_at: ClassVar[Mapping[str, Any] | None] = {"contrast": 0.0, "alignment": 0.0}
    averages: ClassVar[bool] = False

    temperature: Annotated[Positive, Search(0.02, 1.0)] = 0.07
    contrast: Annotated[NonNegative, Search(0.01, 10.0)] = 1.0
    alignment: Annotated[NonNegative, Search(0.01, 10.0)] = 10.0
    smoothing: BelowOne = 0.99
    reweight: bool = True

    @property
    def prototypes_from(self) -> PrototypeMode:
        """Return ``post_eval``: a pass after local training."""
        return "post_eval"

    def loss(self, batch: Batch, local: ClientContext) -> Losses:
        """Return cross-entropy + GPCL + APA; without GPCL before there are prototypes."""
        terms = {"cross_entropy": batch.cross_entropy()}
        if self.contrast and len(local.prototypes):
            contrast = prototype_contrast(batch.features, batch.labels, local.prototypes, temperature=self.temperature)
            terms["contrast"] = self.contrast * contrast
        if self.alignment:
            draws = local.cached("mixup", lambda: numpy_generator(local.seed, "mixup", local.round, local.client.id))
            mixed = mix(batch.features.detach(), batch.labels, MIXUP, draws)
            rows, present = batch_means(mixed, batch.labels, local.class_count)
            distance = distance_to(batch.features, batch.labels, rows.to(mixed.dtype), present)
            terms["alignment"] = self.alignment * distance
        return Losses(terms)

    def aggregate_prototypes(
        self, state: GlobalState, updates: Sequence[Update], server: ServerContext
    ) -> PrototypeSet:
        """Return the reweighted mean of each class, smoothed; a class that no client reported keeps its prototype."""
        sets = [update.prototypes for update in updates]
        if self.reweight:
            means = reweighted_means(PrototypeSet.concatenate(sets), server.largest_share)
        else:
            means = server.aggregation.class_means(sets)
        return carry_over(smoothed(means, state.prototypes, self.smoothing), state.prototypes)


# ---- the device's half -----------------------------------------------------------------------------------------------


def mix(features: Tensor, labels: Tensor, alpha: float, draws: np.random.Generator) -> Tensor:
    """Return ``gamma z_i + (1 - gamma) z_j`` with j drawn from the samples of other classes than that of i.

    A sample of a batch without another class stays as it is.

    Args:
        features: ``[B, D]`` z.
        labels: ``[B]`` int64.
        alpha: gamma ~ Beta(alpha, alpha), one per sample; > 0.
        draws: gives B gammas and then B partners.
    """
    shares = torch.from_numpy(draws.beta(alpha, alpha, len(labels)))
    places = torch.from_numpy(draws.random(len(labels))).to(labels.device)
    others = labels[:, None] != labels[None, :]
    counts = others.sum(1)
    chosen = (places * counts).long() + 1  # the n-th sample of another class, from 1
    partners = ((others.cumsum(1) == chosen[:, None]) & others).long().argmax(1)
    partners = torch.where(counts > 0, partners, torch.arange(len(labels), device=labels.device))
    gamma = shares.to(features.device, features.dtype)[:, None]
    return torch.where(counts[:, None] > 0, gamma * features + (1 - gamma) * features[partners], features)


def batch_means(rows: Tensor, labels: Tensor, class_count: int) -> tuple[Tensor, Tensor]:
    """Return the mean row of each class, ``[K, D]``, zero where it has none, and which classes have one, ``[K]``."""
    members = one_hot(labels, class_count).to(rows.dtype)
    counts = members.sum(0)
    return members.T @ rows / counts.clamp_min(1)[:, None], counts > 0


def distance_to(features: Tensor, labels: Tensor, rows: Tensor, present: Tensor) -> Tensor:
    """Return how far features are from constant rows of their classes: mean of ``(z_i - row_{y_i})^2``.

    Args:
        features: ``[B, D]``.
        labels: ``[B]`` int64.
        rows: ``[K, D]``, in the dtype of ``features``.
        present: ``[K]`` bool, which classes have a row; the others add 0.
    """
    squares = (features - rows[labels]).square().mean(1)
    return torch.where(present[labels], squares, torch.zeros_like(squares)).mean()


# ---- the server's half -----------------------------------------------------------------------------------------------


def reweighted_means(rows: PrototypeSet, largest_share: float) -> PrototypeSet:
    """Return ``sum_j d_j p_j / sum_j d_j`` of each class, where ``d_j = ||p_j - mean_j p_j||^2``.

    If all rows of a class are equal, and so for a single row, it is their mean. The weight of the result is the sum of
    the rows' weights.

    Args:
        rows: the clients' means, one row per client and class.
        largest_share: largest share of a row among three or more of its class, in (0, 1].
    """
    vectors: list[Tensor] = []
    weights: list[Tensor] = []
    for label in rows.classes:
        members = rows.of_class(label).double()
        mean = members.mean(0)
        distances = (members - mean).square().sum(1)
        shares = torch.tensor(cap_shares(distances.tolist(), largest_share), dtype=torch.float64)
        if float(shares.sum()) > 0:
            mean = (shares[:, None] * members).sum(0) / shares.sum()
        vectors.append(mean.float())
        weights.append(rows.weights[rows.labels == label].sum())
    if not vectors:
        return PrototypeSet.empty(rows.feature_size)
    return PrototypeSet(torch.stack(vectors), torch.tensor(rows.classes), torch.stack(weights))


def smoothed(new: PrototypeSet, old: PrototypeSet, smoothing: float) -> PrototypeSet:
    """Return ``(1 - smoothing) new + smoothing old`` for the classes of ``new``; a class without an old row is new.

    Args:
        new: one row per class.
        old: one row per class.
        smoothing: in [0, 1).
    """
    vectors: list[Tensor] = []
    for label, row in zip(new.labels.tolist(), new.vectors, strict=True):
        if label in old.classes:
            row = ((1 - smoothing) * row.double() + smoothing * old.of_class(label)[0].double()).float()
        vectors.append(row)
    if not vectors:
        return new
    return PrototypeSet(torch.stack(vectors), new.labels, new.weights)
