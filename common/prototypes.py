"""Prototype sets, 0..n weighted feature vectors per class, and the functions that make them.

A *prototype* is a feature vector that represents a class. Classes may have different numbers of prototypes, also none.
A set is stored as three arrays sorted by class, which are sent, saved and read by kernels without conversion.

Samples are clustered with FINCH (Sarfraz et al., CVPR 2019), by the authors' package finch-clust. A level joins every
point to its nearest other point (cosine, lowest index on ties); the connected components are its clusters, and the
means of their *original* rows are the next level's points. ``clustering="torch"`` computes the same where the package
cannot: on the rows' device, and for any number of rows in bounded memory. Where two distances differ by no more than
their rounding, the two may take another one for the nearest, and clusters can differ.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from common.extras import libraries_of
from common.numerics import NORM_FLOOR, full_precision


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
        there = object.__new__(PrototypeSet)  # as it is: the checks of a new set would wait for a GPU
        for name in ("vectors", "labels", "weights"):
            object.__setattr__(there, name, getattr(self, name).to(device))
        return there

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


# ---- class means, FINCH clusters and unbiased prototypes -------------------------------------------------------------


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
        self.counts.index_add_(0, labels, torch.ones_like(labels, dtype=torch.int64))

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
    prototypes: PrototypeSet, *, level: int | None = None, clustering: Clustering = "finch-clust"
) -> PrototypeSet:
    """FINCH clusters of each class's rows, each cluster reduced to its mean (FPL Eq. 4; FedPLVM; FINCH* of FedPLCC).

    A cluster's weight is the sum of its members' weights, which makes this FINCH* of FedPLCC when the weights are
    sample counts.

    Args:
        prototypes: rows to cluster, class by class.
        level: FINCH level, 0 the finest; ``None`` the coarsest level that still has two clusters or more (or the only
            one). A level beyond the last is the last.
        clustering: the implementation of FINCH, see :func:`common.prototypes.partition`.
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
            vectors.append(rows[members].double().mean(0).float())
            labels.append(label)
            weights.append(row_weights[members].double().sum().float())
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


# ---- clustering (FINCH) ----------------------------------------------------------------------------------------------


BLOCK_ELEMENTS = 2**24
"""Most similarities in memory at a time (64 MiB of float32)."""

MAX_ROWS = 10_000
"""Most rows for the package, which keeps all their similarities in memory: 1 GB for this number."""

Clustering = Literal["finch-clust", "torch"]


def partition(rows: Tensor, *, level: int | None = None, clustering: Clustering = "finch-clust") -> Tensor:
    """Return the cluster index of each row, by cosine distance.

    Args:
        rows: ``[N, D]``, N >= 0. One, two and three rows are always one cluster.
        level: 0 is the finest level; ``None`` the coarsest that still has two clusters or more (or the only one).
        clustering: the implementation: the package, exact and on one CPU thread, or ``torch``, which may decide near
            ties otherwise.

    Returns:
        ``[N]`` int64 on the device of ``rows``, numbered from 0 in the order of each cluster's first row.

    Raises:
        ValueError: a row is not finite, ``level`` is negative, or there are too many rows for the package.
    """
    if level is not None and level < 0:
        raise ValueError(f"FINCH levels count from 0; got {level}")
    if clustering not in ("finch-clust", "torch"):
        raise ValueError(f"clustering must be finch-clust or torch; got {clustering!r}")
    if len(rows) == 0:
        return torch.zeros(0, dtype=torch.int64, device=rows.device)
    rows = rows.detach().to(torch.float32)
    if not bool(torch.isfinite(rows).all()):
        raise ValueError("FINCH cannot cluster rows that are not finite")
    if len(rows) <= 3:  # the graph of first neighbours is always connected
        return torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    if clustering == "torch":
        return _by_torch(rows, level)
    return _by_package(rows, level)


def _by_torch(rows: Tensor, level: int | None) -> Tensor:
    labels, count = _components(first_neighbours(rows))
    done = 0
    while count > 1 and done != level:
        means = torch.zeros(count, rows.shape[1], dtype=torch.float64, device=rows.device)
        means.index_add_(0, labels, rows.double())
        means /= torch.bincount(labels, minlength=count)[:, None]
        joined, fewer = _components(first_neighbours(means))
        if fewer == 1:
            break
        labels, count = joined[labels], fewer
        done += 1
    return labels


def first_neighbours(points: Tensor) -> Tensor:
    """``[N]`` int64: the nearest other point of each of ``points [N, D]``, N >= 2, by cosine; ties: the lowest index.

    A zero vector is equally far from all. At most 64 MiB of similarities are in memory at a time.
    """
    count = len(points)
    lengths = torch.linalg.vector_norm(points, dim=1, keepdim=True)
    units = points / torch.where(lengths == 0, 1.0, lengths)
    block = max(1, BLOCK_ELEMENTS // count)
    nearest = []
    with full_precision(points.device, 0.0):
        for first in range(0, count, block):
            similarity = (units[first : first + block] @ units.T).clamp_max_(1.0)  # duplicates tie at exactly 1
            similarity.diagonal(first).fill_(-math.inf)
            nearest.append(similarity.argmax(1))  # documented: the first of several maxima
    return torch.cat(nearest)


def _components(neighbour: Tensor) -> tuple[Tensor, int]:
    """Return the weakly connected components of the graph ``i -> neighbour[i]``, and their number.

    Every point reaches the cycle of its component by following the edges. The lowest index of that cycle names the
    component. Doubling the stride takes ``log2 N`` steps.
    """
    count = len(neighbour)
    reached, lowest = neighbour, torch.arange(count, device=neighbour.device)
    for _ in range(max(1, math.ceil(math.log2(count)))):
        lowest = torch.minimum(lowest, lowest[reached])
        reached = reached[reached]
    return _numbered(lowest[reached])


def _numbered(names: Tensor) -> tuple[Tensor, int]:
    """Replace names by numbers from 0, in the order in which they first appear."""
    unique, inverse = torch.unique(names, return_inverse=True)
    index = torch.arange(len(names), device=names.device)
    first = torch.full((len(unique),), len(names), device=names.device).scatter_reduce_(0, inverse, index, "amin")
    rank = torch.empty_like(first)
    rank[first.argsort()] = torch.arange(len(unique), device=names.device)
    return rank[inverse], len(unique)


def _by_package(rows: Tensor, level: int | None) -> Tensor:
    if len(rows) > MAX_ROWS:
        raise ValueError(
            f"finch-clust would need the similarities of {len(rows)} rows of one class in memory; at most {MAX_ROWS} "
            "rows are supported. Set method.clustering=torch, which works block by block"
        )
    finch, threads = _package()
    with threads.limit(limits=1):  # another number of threads may round a near tie the other way
        levels, _, _ = finch(
            rows.cpu().contiguous().numpy(), ensure_early_exit=False, ann_threshold=MAX_ROWS, verbose=False
        )  # exact: neighbours are approximated above the threshold only
    column = levels.shape[1] - 1
    if level is not None:
        column = min(level, column)
    return _numbered(torch.from_numpy(levels[:, column].astype("int64")).to(rows.device))[0]


@lru_cache
def _package() -> tuple[Any, Any]:
    """Return finch-clust's function, and the control of its threads. Importing them takes a second."""
    with warnings.catch_warnings(), libraries_of("clustering", "clustering with method.clustering=finch-clust"):
        warnings.simplefilter("ignore")  # finch-clust warns that the optional approximate neighbour search is missing
        from finch.finch import FINCH
        from threadpoolctl import ThreadpoolController

    return FINCH, ThreadpoolController()
