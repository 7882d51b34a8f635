"""How prototype sets are made: class means, FINCH clusters, unbiased and weighted prototypes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.precision import NORM_FLOOR
from common.prototypes.finch import Clustering, partition
from common.prototypes.set import PrototypeSet


class ClassSums:
    """Running per-class sums of features: class means without keeping the features.

    Sums are kept in float64, so that the mean does not depend on how samples fall into batches beyond float32 features.
    """

    def __init__(self, class_count: int, feature_size: int, device: torch.device | str = "cpu") -> None:
        self.sums = torch.zeros(class_count, feature_size, dtype=torch.float64, device=device)
        self.counts = torch.zeros(class_count, dtype=torch.int64, device=device)

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Add ``features [B, D]`` (detached here) of ``labels [B]``."""
        self.sums.index_add_(0, labels, features.detach().to(self.sums.dtype))
        self.counts.index_add_(0, labels, torch.ones_like(labels))

    def means(self) -> PrototypeSet:
        """One prototype per class that was seen: its mean, weighted by its sample count. Absent classes have no row."""
        seen = self.counts.nonzero().flatten()
        counts = self.counts[seen]
        return PrototypeSet((self.sums[seen] / counts[:, None]).float(), seen, counts.float())


def class_means(features: Tensor, labels: Tensor, class_count: int) -> PrototypeSet:
    """Means of ``features [N, D]`` per class of ``labels [N]``, weighted by sample count."""
    sums = ClassSums(class_count, features.shape[1], features.device)
    sums.add(features, labels)
    return sums.means()


def cluster_prototypes(
    prototypes: PrototypeSet,
    *,
    level: int | None = None,
    weighted_mean: bool = False,
    clustering: Clustering = "finch-clust",
) -> PrototypeSet:
    """FINCH clusters of each class's rows, each cluster reduced to its mean (FPL Eq. 4; FedPLVM; FINCH* of FedPLCC).

    A cluster's weight is the sum of its members' weights, which makes this FINCH* of FedPLCC when the weights are
    sample counts.

    Args:
        prototypes: rows to cluster, class by class.
        level: FINCH level, 0 the finest; ``None`` the coarsest level that still has two clusters or more (or the only
            one). A level beyond the last is the last.
        weighted_mean: cluster vector = weighted mean of its members instead of the plain mean.
        clustering: who finds the clusters, see :func:`common.prototypes.finch.partition`.
    """
    vectors: list[Tensor] = []
    labels: list[int] = []
    weights: list[Tensor] = []
    offsets = prototypes.offsets(max(prototypes.classes, default=-1) + 1).tolist()
    for label in prototypes.classes:
        rows = prototypes.vectors[offsets[label] : offsets[label + 1]]
        row_weights = prototypes.weights[offsets[label] : offsets[label + 1]]
        clusters = partition(rows, level=level, clustering=clustering)
        for cluster in range(int(clusters.max()) + 1):
            members = clusters == cluster
            mass = row_weights[members].double()
            chosen = rows[members].double()
            if weighted_mean and float(mass.sum()) > 0:
                mean = (chosen * mass[:, None]).sum(0) / mass.sum()
            else:
                mean = chosen.mean(0)
            vectors.append(mean.float())
            labels.append(label)
            weights.append(mass.sum().float())
    if not vectors:
        return PrototypeSet.empty(prototypes.feature_size, prototypes.vectors.device)
    device = prototypes.vectors.device
    return PrototypeSet(torch.stack(vectors), torch.tensor(labels, device=device), torch.stack(weights).to(device))


def unbiased_prototypes(prototypes: PrototypeSet, *, sample_weighted: bool = False) -> PrototypeSet:
    """One row per class: the mean of the class's rows, each counted once (FPL Eq. 8's unbiased prototype).

    With ``sample_weighted`` rows count by their weight instead (FedProc, RUCR, FedPall). The weight of the result is
    the sum of the rows' weights.
    """
    if not len(prototypes):
        return prototypes
    present, inverse, counts = torch.unique_consecutive(prototypes.labels, return_inverse=True, return_counts=True)
    masses = prototypes.weights.double()
    totals = torch.zeros(len(present), dtype=torch.float64, device=masses.device).index_add_(0, inverse, masses)
    shares = masses if sample_weighted else torch.ones_like(masses)
    divisor = totals if sample_weighted else counts.double()
    sums = torch.zeros(len(present), prototypes.feature_size, dtype=torch.float64, device=masses.device)
    sums.index_add_(0, inverse, prototypes.vectors.double() * shares[:, None])
    return PrototypeSet((sums / divisor.clamp_min(NORM_FLOOR)[:, None]).float(), present, totals.float())


def normalise_weights(prototypes: PrototypeSet) -> PrototypeSet:
    """Weights divided by their class's total, so that each class has total mass 1 (FedPLCC). Zero totals stay zero."""
    if not len(prototypes):
        return prototypes
    class_count = int(prototypes.labels[-1]) + 1
    totals = torch.zeros(class_count, dtype=torch.float64, device=prototypes.weights.device)
    totals.index_add_(0, prototypes.labels, prototypes.weights.double())
    shares = prototypes.weights.double() / totals[prototypes.labels].clamp_min(NORM_FLOOR)
    return PrototypeSet(prototypes.vectors, prototypes.labels, shares.float())


def carry_over(current: PrototypeSet, previous: PrototypeSet) -> PrototypeSet:
    """``current`` plus the rows of ``previous`` for classes nobody reported this time (official FedProc)."""
    missing = sorted(set(previous.classes) - set(current.classes))
    if not missing:
        return current
    keep = torch.isin(previous.labels, torch.tensor(missing, device=previous.labels.device))
    kept = PrototypeSet(previous.vectors[keep], previous.labels[keep], previous.weights[keep])
    return PrototypeSet.concatenate([current, kept])


def total_rows(sets: Sequence[PrototypeSet]) -> int:
    """Number of rows over ``sets``."""
    return sum(len(part) for part in sets)
