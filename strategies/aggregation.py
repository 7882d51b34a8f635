"""Averaging of model states, in client-id order and float64, so that the result does not depend on arrival."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from strategies.exchange import Update

BLOCK_ELEMENTS = 2**18
"""Elements that are summed at a time: two MiB of float64."""


def average(states: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """``sum_k weights_k * states_k / sum_k weights_k`` over named tensors.

    Floating-point tensors are accumulated in float64 one state at a time and returned in their own dtype. Integer
    tensors (batch-norm counters) cannot be averaged and are copied from the first state.

    Raises:
        ValueError: no states, names that differ, or weights that do not sum to a positive number.
    """
    if not states:
        raise ValueError("there is nothing to average")
    total = float(sum(weights))
    if not total > 0:
        raise ValueError(f"weights must sum to a positive number; got {total}")
    shares = [weight / total for weight in weights]
    result: dict[str, Tensor] = {}
    for name, first in states[0].items():
        if first.is_floating_point():
            result[name] = _weighted_sum([state[name] for state in states], shares)
        else:
            result[name] = first.clone()
    return result


def _weighted_sum(parts: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """``sum_k shares_k * parts_k`` in float64, block by block, so that the sums stay in the processor's cache.

    Every element sees the same operations in the same order as without blocks: the result is the same to the last bit.
    """
    first = parts[0]
    rows = [part.reshape(-1) for part in parts]
    result = torch.empty(first.numel(), dtype=first.dtype, device=first.device)
    sums = torch.empty(min(BLOCK_ELEMENTS, len(result)), dtype=torch.float64, device=first.device)
    terms = torch.empty_like(sums)
    for start in range(0, len(result), BLOCK_ELEMENTS):
        block = slice(start, min(start + BLOCK_ELEMENTS, len(result)))
        total, term = sums[: block.stop - start].zero_(), terms[: block.stop - start]
        for row, share in zip(rows, shares, strict=True):
            total.add_(term.copy_(row[block]), alpha=share)
        result[block] = total
    return result.view(first.shape)


def average_weights(updates: Sequence[Update], *, uniform: bool = False) -> dict[str, Tensor]:
    """The average of the updates' model states: by samples N_k (FedAvg), or every client equal."""
    return average([update.weights for update in updates], [1.0 if uniform else update.samples for update in updates])
