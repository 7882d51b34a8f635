"""How an order of samples is cut into batches."""

from __future__ import annotations

import torch
from torch import Tensor


def split_batches(order: Tensor, size: int, last: str) -> list[Tensor]:
    """``order`` cut into batches of ``size``; what becomes of a short last one is ``last`` (keep, drop or merge).

    A last batch of one sample joins the batch before it, since batch normalisation cannot train on it.
    """
    batches = list(order.split(size))
    if len(batches) > 1:
        short = len(batches[-1])
        if short < size and last == "drop":
            batches.pop()
        elif short == 1 or (short < size and last == "merge"):
            tail = batches.pop()
            batches[-1] = torch.cat([batches[-1], tail])
    return batches
