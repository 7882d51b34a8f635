"""First-neighbour clustering (FINCH, Sarfraz et al., CVPR 2019), by the authors' package finch-clust.

A level joins every point to its nearest other point (cosine, lowest index on ties); the connected components are its
clusters, and the means of their *original* rows are the next level's points. ``torch`` computes the same where the
package cannot: on the rows' device, and for any number of rows in bounded memory.
"""

import math
import warnings
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from common.errors import libraries_of
from common.precision import full_precision

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
        clustering: the implementation: the package, exact and on one CPU thread, or ``torch``.

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
