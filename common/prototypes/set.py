"""Prototype sets, 0..n weighted feature vectors per class, and the functions that make them.

A *prototype* is a feature vector that represents a class. Classes may have different numbers of prototypes, also none.
A set is stored as three arrays sorted by class, which are sent, saved and read by kernels without conversion.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from common.precision import NORM_FLOOR
from common.prototypes.finch import Clustering, partition


@dataclass(frozen=True, eq=False)
class PrototypeSet:
    """0..n weighted feature vectors per class, sorted by class (stable: equal classes keep their order).

    Args:
        vectors: ``[M, D]`` float32. ``M = 0`` is legal (an empty set keeps its ``D``).
        labels: ``[M]`` int64, class of each row, >= 0.
        weights: ``[M]`` float32, >= 0: sample counts, or shares where a method normalises them.

    Raises:
        ValueError: shapes do not agree, or a label or weight is negative.
    """

    vectors: Tensor
    labels: Tensor
    weights: Tensor

    def __post_init__(self) -> None:
        vectors = self.vectors.to(torch.float32)
        labels = self.labels.to(torch.int64)
        weights = self.weights.to(torch.float32)
        if vectors.ndim != 2 or labels.ndim != 1 or weights.ndim != 1:
            raise ValueError(
                f"a PrototypeSet takes vectors [M, D], labels [M] and weights [M]; got {tuple(vectors.shape)}, "
                f"{tuple(labels.shape)} and {tuple(weights.shape)}"
            )
        if not len(vectors) == len(labels) == len(weights):
            raise ValueError(f"{len(vectors)} vectors, {len(labels)} labels and {len(weights)} weights do not match")
        if len(labels):
            if bool((labels < 0).any()):
                raise ValueError(f"prototype labels must be >= 0; got {int(labels.min())}")
            if bool((weights < 0).any()):
                raise ValueError(f"prototype weights must be >= 0; got {float(weights.min())}")
            if bool((labels[1:] < labels[:-1]).any()):
                order = torch.sort(labels, stable=True).indices
                vectors, labels, weights = vectors[order], labels[order], weights[order]
        object.__setattr__(self, "vectors", vectors.contiguous())
        object.__setattr__(self, "labels", labels.contiguous())
        object.__setattr__(self, "weights", weights.contiguous())

    @classmethod
    def empty(cls, feature_size: int = 0, device: torch.device | str = "cpu") -> PrototypeSet:
        """Return the set with no rows, of a known feature size."""
        return cls(
            torch.zeros(0, feature_size, device=device),
            torch.zeros(0, dtype=torch.int64, device=device),
            torch.zeros(0, device=device),
        )

    @classmethod
    def concatenate(cls, sets: Iterable[PrototypeSet]) -> PrototypeSet:
        """Return all rows of ``sets`` in one set; within a class, rows keep the order of ``sets``."""
        parts = list(sets)
        filled = [part for part in parts if len(part)]
        if not filled:
            return cls.empty(max((part.feature_size for part in parts), default=0))
        sizes = {part.feature_size for part in filled}
        if len(sizes) > 1:
            raise ValueError(f"prototype sets of different feature sizes cannot be joined: {sorted(sizes)}")
        return cls(
            torch.cat([part.vectors for part in filled]),
            torch.cat([part.labels for part in filled]),
            torch.cat([part.weights for part in filled]),
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PrototypeSet):
            return NotImplemented
        return (
            torch.equal(self.vectors, other.vectors)
            and torch.equal(self.labels, other.labels)
            and torch.equal(self.weights, other.weights)
        )

    __hash__ = None  # type: ignore[assignment]  # compared by value, so not hashable

    @property
    def feature_size(self) -> int:
        """``D``."""
        return self.vectors.shape[1]

    @cached_property
    def classes(self) -> list[int]:
        """The classes that have at least one row, ascending."""
        return torch.unique_consecutive(self.labels).tolist()

    @cached_property
    def normalised(self) -> Tensor:
        """``[M, D]``: rows at unit length (zero rows stay zero), computed once per set."""
        return normalise_rows(self.vectors)

    def offsets(self, class_count: int) -> Tensor:
        """``[K + 1]`` int64: rows of class ``c`` are ``offsets[c]:offsets[c + 1]``. Computed once per ``class_count``.

        Raises:
            ValueError: a label is ``>= class_count``.
        """
        cache: dict[int, Tensor] = self.__dict__.setdefault("_offsets", {})
        if class_count not in cache:
            if len(self) and int(self.labels[-1]) >= class_count:
                raise ValueError(f"prototype of class {int(self.labels[-1])} where only {class_count} classes exist")
            edges = torch.arange(class_count + 1, device=self.labels.device)
            cache[class_count] = torch.searchsorted(self.labels, edges)
        return cache[class_count]

    def of_class(self, label: int) -> Tensor:
        """Return ``[n, D]``: the rows of one class, in order (n may be 0)."""
        return self.vectors[self.labels == label]

    def to(self, device: torch.device | str) -> PrototypeSet:
        """Return the same set on ``device`` (itself when it is there already)."""
        if self.vectors.device == torch.device(device):
            return self
        return PrototypeSet(self.vectors.to(device), self.labels.to(device), self.weights.to(device))

    def rows_per_class(self, class_count: int) -> tuple[Tensor, Tensor]:
        """One row per class as a dense table: ``([K, D] vectors, [K] bool present)``; absent classes are zero rows.

        Raises:
            ValueError: a class has more than one row (take :func:`unbiased_prototypes` first).
        """
        if len(self.classes) != len(self):
            raise ValueError("this set has several prototypes per class; reduce it with unbiased_prototypes first")
        table = self.vectors.new_zeros(class_count, self.feature_size)
        table[self.labels] = self.vectors
        present = torch.zeros(class_count, dtype=torch.bool, device=self.labels.device)
        present[self.labels] = True
        return table, present


def normalise_rows(rows: Tensor) -> Tensor:
    """Return ``[M, D]``: each row divided by its length, or by 1e-12 where it is shorter (so zero rows stay zero)."""
    return rows / rows.norm(dim=1, keepdim=True).clamp_min(NORM_FLOOR)


# ---- class means, FINCH clusters, unbiased and weighted prototypes ---------------------------------------------------


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
    """Return means of ``features [N, D]`` per class of ``labels [N]``, weighted by sample count."""
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
        clustering: the implementation of FINCH, see :func:`common.prototypes.finch.partition`.
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
    """Return one row per class: the mean of the class's rows, each counted once (FPL Eq. 8's unbiased prototype).

    With ``sample_weighted`` rows count by their weight instead (FedProc, RUCR, FedPall). The weight of the result is
    the sum of the rows' weights.
    """
    if not len(prototypes):
        return prototypes
    present, inverse, counts = torch.unique_consecutive(prototypes.labels, return_inverse=True, return_counts=True)
    masses = prototypes.weights.double()
    totals = torch.zeros(len(present), dtype=torch.float64, device=masses.device).index_add_(0, inverse, masses)
    shares, divisor = torch.ones_like(masses), counts.double()
    if sample_weighted:
        shares, divisor = masses, totals
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
    """Return ``current`` plus the rows of ``previous`` for classes that it lacks (official FedProc)."""
    missing = sorted(set(previous.classes) - set(current.classes))
    if not missing:
        return current
    keep = torch.isin(previous.labels, torch.tensor(missing, device=previous.labels.device))
    kept = PrototypeSet(previous.vectors[keep], previous.labels[keep], previous.weights[keep])
    return PrototypeSet.concatenate([current, kept])
