"""First-neighbour clustering (FINCH, Sarfraz et al., CVPR 2019) through the finch-clust package."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor

with warnings.catch_warnings():
    # finch-clust warns at import that the optional approximate neighbour search is missing; ours is exact.
    warnings.simplefilter("ignore")
    from finch import FINCH


def partition(rows: Tensor, *, level: int | None = None) -> Tensor:
    """Cluster index of each row, by cosine distance.

    Args:
        rows: ``[N, D]``, N >= 0. One, two and three rows are always one cluster.
        level: 0 is the finest level; ``None`` the coarsest that still has two clusters or more (or the only one).

    Returns:
        ``[N]`` int64 on the device of ``rows``, numbered from 0.

    Raises:
        ValueError: a row is not finite, or ``level`` is negative.
    """
    if level is not None and level < 0:
        raise ValueError(f"FINCH levels count from 0; got {level}")
    if len(rows) == 0:
        return torch.zeros(0, dtype=torch.int64, device=rows.device)
    if not bool(torch.isfinite(rows).all()):
        raise ValueError("FINCH cannot cluster rows that are not finite")
    if len(rows) <= 3:  # a fact of first neighbours, so the package need not be asked
        return torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    levels, _, _ = FINCH(
        np.ascontiguousarray(rows.detach().cpu().float().numpy()),
        distance="cosine",
        ensure_early_exit=False,
        ann_threshold=1_000_000,
        verbose=False,
    )
    column = levels.shape[1] - 1 if level is None else min(level, levels.shape[1] - 1)
    return torch.from_numpy(np.ascontiguousarray(levels[:, column]).astype(np.int64)).to(rows.device)
