"""Averaging of model states, in client-id order and float64, so that the result does not depend on arrival."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from strategies.exchange import Update


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
    result: dict[str, Tensor] = {}
    for name, first in states[0].items():
        if not first.is_floating_point():
            result[name] = first.clone()
            continue
        accumulator = torch.zeros_like(first, dtype=torch.float64)
        for state, weight in zip(states, weights, strict=True):
            accumulator.add_(state[name].to(torch.float64), alpha=weight / total)
        result[name] = accumulator.to(first.dtype)
    return result


def average_weights(updates: Sequence[Update], *, uniform: bool = False) -> dict[str, Tensor]:
    """The average of the updates' model states: by samples N_k (FedAvg), or every client equal."""
    return average([update.weights for update in updates], [1.0 if uniform else update.samples for update in updates])
