"""Updates far longer than the others of their exchange: the gate's one check that needs all answers.

A hostile client can scale its update until it outvotes everybody else in an average. Here its length is compared with
the median of the participants', which fewer than half of them cannot move beyond the honest ones'.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from common.settings import TrainSettings
from common.state import GlobalState
from strategies.exchange import Client, Expected, Server, Update

LEAST = 3
"""With two answers the median lies half-way to the hostile one."""

_WORDS = {
    "parameters": "its parameters' distance from the shared state",
    "statistics": "the length of its running statistics",
    "prototypes": "the length of its longest prototype",
    "extra": "the length of its further tensors",
    "rows": "the length of its longest row",
}


def outliers(
    updates: Sequence[Update], state: GlobalState, expected: Expected, server: Server, factor: float
) -> dict[str, str]:
    """Why updates are refused, by client id; empty if none is, or with fewer than :data:`LEAST` of them.

    What is compared, part by part: the L2 distance of the trainable parameters from the shared state; the norm of the
    other floating-point weights (running statistics); the longest prototype; of further tensors, the norm of those of
    fixed shape together, and the longest row of those with a row per sample. Parameters and further tensors of fixed
    shape may be longer by as much as the client's batches exceed the median client's, since honest ones grow with the
    steps taken. Running statistics are a domain's own and hold variances, which are squares: their bound is the
    square of ``factor``. A part whose median is 0 gives no scale and is not compared.

    Args:
        updates: of all participants that passed the gate.
        state: what they were sent.
        expected: what the exchange's uploads carry.
        server: names of parameters, and the training settings.
        factor: > 1, how many medians are let in.
    """
    if len(updates) < LEAST:
        return {}
    lengths = {update.client.id: _lengths(update, state, expected, server) for update in updates}
    batches = {update.client.id: _batches(update.client, server.train) for update in updates}
    usual = statistics.median(batches.values())
    reasons: dict[str, str] = {}
    for part, words in _WORDS.items():
        found = {client: each[part] for client, each in lengths.items() if part in each}
        middle = statistics.median(found.values()) if len(found) >= LEAST else 0.0
        for client, length in found.items() if middle else ():
            limit = factor**2 if part == "statistics" else factor
            if part in ("parameters", "extra"):
                limit *= max(1.0, batches[client] / usual)
            if length > limit * middle and client not in reasons:
                reasons[client] = (
                    f"{words} is {length:.3g}, {length / middle:.3g} times the round's median; at most {limit:.3g} "
                    f"times are let in (rounds.outlier_factor={factor:g})"
                )
    return reasons


def _lengths(update: Update, state: GlobalState, expected: Expected, server: Server) -> dict[str, float]:
    lengths = {}
    floating = {name: tensor for name, tensor in update.weights.items() if tensor.is_floating_point()}
    trained = [tensor - state.weights[name] for name, tensor in floating.items() if name in server.parameters]
    measured = [tensor for name, tensor in floating.items() if name not in server.parameters]
    if trained:
        lengths["parameters"] = _norm(trained)
    if measured:
        lengths["statistics"] = _norm(measured)
    if len(update.prototypes):
        lengths["prototypes"] = _longest_row(update.prototypes.vectors)
    fixed, by_row = _kinds(update.extra, expected)
    if fixed:
        lengths["extra"] = _norm(fixed)
    if by_row:
        lengths["rows"] = max(map(_longest_row, by_row))
    return lengths


def _kinds(extra: Mapping[str, Tensor], expected: Expected) -> tuple[list[Tensor], list[Tensor]]:
    """Floating-point tensors of fixed shape, and those with as many rows as the client likes or has samples."""
    fixed: list[Tensor] = []
    by_row: list[Tensor] = []
    for name, tensor in extra.items():
        if tensor.is_floating_point() and tensor.numel():
            own = all(isinstance(length, int) for length in expected.extra[name][1])
            (fixed if own else by_row).append(tensor)
    return fixed, by_row


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in tensors))


def _longest_row(rows: Tensor) -> float:
    return float(torch.linalg.vector_norm(rows.flatten(1) if rows.ndim > 1 else rows[:, None], dim=1).max())


def _batches(client: Client, train: TrainSettings) -> int:
    """Batches of one local epoch."""
    batches = math.ceil(client.samples / train.batch_size)
    return batches if train.local_steps is None else min(batches, train.local_steps)
