"""First-neighbour clustering (FINCH, Sarfraz et al., CVPR 2019) on the device that holds the rows.

A level joins every point to its nearest other point (cosine, lowest index on ties); the connected components are its
clusters, and the means of their *original* rows are the next level's points. The implementation here is blockwise
matrix products, argmax and pointer jumping; the authors' package finch-clust is the reference it is tested against.
"""

from __future__ import annotations

import math
import warnings
from typing import Literal

import torch
from torch import Tensor

from common.precision import full_precision

BLOCK_ELEMENTS = 2**24
"""Most similarities held at a time (64 MiB of float32)."""

Implementation = Literal["auto", "torch", "package"]


def partition(rows: Tensor, *, level: int | None = None, implementation: Implementation = "auto") -> Tensor:
    """Cluster index of each row, by cosine distance.

    Args:
        rows: ``[N, D]``, N >= 0. One, two and three rows are always one cluster.
        level: 0 is the finest level; ``None`` the coarsest that still has two clusters or more (or the only one).
        implementation: ``torch`` (``auto``, as it is the faster: docs/kernels.md) or ``package``, finch-clust.

    Returns:
        ``[N]`` int64 on the device of ``rows``, numbered from 0 in the order of each cluster's first row.

    Raises:
        ValueError: a row is not finite, or ``level`` is negative.
    """
    if level is not None and level < 0:
        raise ValueError(f"FINCH levels count from 0; got {level}")
    if implementation not in ("auto", "torch", "package"):
        raise ValueError(f"implementation must be auto, torch or package; got {implementation!r}")
    if len(rows) == 0:
        return torch.zeros(0, dtype=torch.int64, device=rows.device)
    rows = rows.detach().to(torch.float32)
    if not bool(torch.isfinite(rows).all()):
        raise ValueError("FINCH cannot cluster rows that are not finite")
    if len(rows) <= 3:  # a fact of first neighbours: their graph is connected
        return torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    return _by_package(rows, level) if implementation == "package" else _by_torch(rows, level)


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

    A zero vector is equally far from all. No more than 64 MiB of similarities are held at a time.
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
    """Weakly connected components of the graph ``i -> neighbour[i]``, and how many there are.

    Following its arrow often enough brings every point onto the one cycle of its component, which is then named by its
    lowest index. Doubling the stride makes that ``log2 N`` steps.
    """
    count = len(neighbour)
    reached, lowest = neighbour, torch.arange(count, device=neighbour.device)
    for _ in range(max(1, math.ceil(math.log2(count)))):
        lowest = torch.minimum(lowest, lowest[reached])
        reached = reached[reached]
    return _numbered(lowest[reached])


def _numbered(names: Tensor) -> tuple[Tensor, int]:
    """Names replaced by numbers from 0, in the order in which they first appear."""
    unique, inverse = torch.unique(names, return_inverse=True)
    index = torch.arange(len(names), device=names.device)
    first = torch.full((len(unique),), len(names), device=names.device).scatter_reduce_(0, inverse, index, "amin")
    rank = torch.empty_like(first)
    rank[first.argsort()] = torch.arange(len(unique), device=names.device)
    return rank[inverse], len(unique)


def _by_package(rows: Tensor, level: int | None) -> Tensor:
    with warnings.catch_warnings():
        # finch-clust warns at import that the optional approximate neighbour search is missing; ours is exact.
        warnings.simplefilter("ignore")
        from finch.finch import FINCH
    levels, _, _ = FINCH(
        rows.cpu().contiguous().numpy(),
        distance="cosine",
        ensure_early_exit=False,
        ann_threshold=1_000_000,
        verbose=False,
    )
    column = levels.shape[1] - 1 if level is None else min(level, levels.shape[1] - 1)
    return _numbered(torch.from_numpy(levels[:, column].astype("int64")).to(rows.device))[0]
