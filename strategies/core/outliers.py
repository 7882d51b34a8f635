"""Updates far longer than the others of their exchange: the gate's one check that needs all answers.

A hostile client can scale its update until it outvotes everybody else in an average. Here its length is compared with
the median of the participants', which fewer than half of them cannot move beyond the honest ones'.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from common.settings import TrainSettings
from common.storage.state import GlobalState
from strategies.core.exchange import Client, Expected, Update
from strategies.core.sides import Server

LEAST = 3
"""With two answers the median lies half-way to the hostile one."""

STILL = 0.02
"""Parameters that moved by less than this share of their own length did not go far, whatever the others did: near the
end, when most clients have learned all they can, an honest one that has not would stand out."""

BLOCK_ELEMENTS = 2**20
"""Elements that are compared at a time: four MiB. Smaller ones cost more in calls than they save in the cache."""

PARAMETERS = "its parameters' distance from the shared state"


def outliers(
    updates: Sequence[Update], state: GlobalState, expected: Expected, server: Server, factor: float
) -> dict[str, str]:
    """Why updates are refused, by client id; empty if none is, or with fewer than :data:`LEAST` of them.

    The parameters' L2 distance from the shared state may be ``factor`` times the median, which counts as at least
    :data:`STILL` of the shared parameters' norm; and longer by as much as the client's batches exceed the median
    client's, since honest updates grow with the steps taken. Of everything else a domain has a scale of its own, and
    variances are squares, so that the bound is ``factor`` squared: the norm of the running statistics, the longest
    prototype, the norm of further tensors of fixed shape (those of one net or kind together), and the longest row of
    those with a row per sample. A part whose median is 0 gives no scale and is not compared.

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
    still = STILL * _norm(tensor for name, tensor in state.weights.items() if name in server.parameters)
    reasons: dict[str, str] = {}
    for part in dict.fromkeys(part for each in lengths.values() for part in each):
        found = {client: each[part] for client, each in lengths.items() if part in each}
        middle = statistics.median(found.values()) if len(found) >= LEAST else 0.0
        for client, length in found.items() if middle else ():
            if part == PARAMETERS:
                limit = factor * max(1.0, batches[client] / usual) * max(1.0, still / middle)
            else:
                limit = factor**2
            if length > limit * middle and client not in reasons:
                reasons[client] = (
                    f"{part} is {length:.3g}, {length / middle:.3g} times the round's median; at most {limit:.3g} "
                    f"times are let in (rounds.outlier_factor={factor:g})"
                )
    return reasons


def _lengths(update: Update, state: GlobalState, expected: Expected, server: Server) -> dict[str, float]:
    """What is compared, under the words that a refusal uses."""
    lengths = {}
    floating = {name: tensor for name, tensor in update.weights.items() if tensor.is_floating_point()}
    trained = [(tensor, state.weights[name]) for name, tensor in floating.items() if name in server.parameters]
    measured = [tensor for name, tensor in floating.items() if name not in server.parameters]
    if trained:
        lengths[PARAMETERS] = _distance(trained)
    if measured:
        lengths["the length of its running statistics"] = _norm(measured)
    if len(update.prototypes):
        lengths["the length of its longest prototype"] = _longest_row(update.prototypes.vectors)
    kinds: dict[str, list[Tensor]] = {}
    for name, tensor in update.extra.items():
        if tensor.is_floating_point() and tensor.numel():
            if all(isinstance(length, int) for length in expected.extra[name][1]):
                kinds.setdefault(re.split(r"[/.]", name)[0], []).append(tensor)
            else:
                lengths[f"the longest row of its {name}"] = _longest_row(tensor)
    return lengths | {f"the length of its {kind}": _norm(tensors) for kind, tensors in kinds.items()}


def _distance(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """L2 norm of all differences together.

    Block by block, since to allocate a difference as large as the model costs more than to compute it.
    """
    difference = torch.empty(min(BLOCK_ELEMENTS, max(one.numel() for one, _ in pairs)), device=pairs[0][0].device)
    squares = 0.0
    for one, other in pairs:
        for left, right in zip(
            one.reshape(-1).split(BLOCK_ELEMENTS), other.reshape(-1).split(BLOCK_ELEMENTS), strict=True
        ):
            torch.sub(left, right, out=difference[: len(left)])
            squares += float(torch.linalg.vector_norm(difference[: len(left)])) ** 2
    return math.sqrt(squares)


def _norm(tensors: Iterable[Tensor]) -> float:
    return float(nn.utils.get_total_norm(tensors))


def _longest_row(rows: Tensor) -> float:
    return float(torch.linalg.vector_norm(rows.flatten(1) if rows.ndim > 1 else rows[:, None], dim=1).max())


def _batches(client: Client, train: TrainSettings) -> int:
    """Batches of one local epoch."""
    batches = math.ceil(client.samples / train.batch_size)
    return batches if train.local_steps is None else min(batches, train.local_steps)
