"""Averaging of model states, in client-id order and float64, so that the result does not depend on arrival.

What a method weighs by samples, a client could decide alone by registering a billion of them. So a client counts for at
most ``rounds.largest_client`` times the median client's samples, which fewer than half of the clients cannot move
beyond the honest ones', and in an average for at most the share ``rounds.largest_share`` of all that are averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from common.config import checked
from common.prototypes import PrototypeSet, unbiased_prototypes
from strategies.core.exchange import Client, Update

BLOCK_ELEMENTS = 2**18
"""Elements that are summed at a time: two MiB of float64."""

STACKED_ELEMENTS = 2**23
"""Of all participants together, that are compared at a time."""

MIN_CLIENTS = 3
"""Fewest clients for a limit on one client's share: two have no majority."""


def average(states: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """``sum_k weights_k * states_k / sum_k weights_k`` over named tensors.

    Floating-point tensors are accumulated in float64 one state at a time and returned in their own dtype. Of integers
    (batch-norm counters), which cannot be averaged, the result is the lower median.

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
            result[name] = torch.stack([state[name] for state in states]).median(0).values
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


def number_by_number(parts: Sequence[Tensor], combine: Callable[[Tensor], Tensor]) -> Tensor:
    """What ``combine`` makes of the ``n`` parts, by blocks, ``[n, block]`` to ``[block]``: each number by itself."""
    rows = [part.reshape(-1) for part in parts]
    size = max(1, STACKED_ELEMENTS // len(rows))
    blocks = [combine(torch.stack([row[at : at + size] for row in rows])) for at in range(0, len(rows[0]), size)]
    return torch.cat(blocks).view(parts[0].shape) if blocks else parts[0].clone()


@checked
class Mean:
    """The average: what a method does unless a rule of :mod:`strategies.core.robust` stands in for it.

    A rule combines what the participants of an exchange sent, in client-id order. It is reached by a method's server
    half as ``server.aggregation``, so that one setting serves every method whose uploads are averaged.
    """

    robust: ClassVar[bool] = False
    """Whether clients count the same whatever samples they registered, and some may be left out."""

    @property
    def min_answers(self) -> int:
        """How many answers the rule needs; a round with fewer is skipped."""
        return 1

    def after_refusals(self, refused: int, answers: int) -> Mean:  # noqa: ARG002
        """The rule for an exchange in which the gate let in ``answers`` answers and refused ``refused`` others.

        Where too few are left, a refused one counts as one of those to bear. Without it a hostile client could stop a
        federation of just as many clients as the rule needs: by being refused. Where enough are left nothing changes,
        since the refused one may have been honest.
        """
        return self

    def check(self, method: str, averages: bool, participants: int) -> None:
        """Whether the rule means anything for a method of this name with so many participants a round.

        Args:
            method: its name.
            averages: whether averages are all that its server makes of uploads.
            participants: clients that are asked in a round.

        Raises:
            ConfigError: it does not; the message says why and what to set.
        """

    def average(self, updates: Sequence[Update], *, uniform: bool = False) -> dict[str, Tensor]:
        """The average of the updates' model states: by samples N_k (FedAvg), or every client equal.

        Raises:
            ValueError: there are fewer updates than the rule needs.
        """
        shares = [1.0 if uniform else update.samples for update in updates]
        return self.combine([update.weights for update in updates], shares)

    def combine(self, states: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> dict[str, Tensor]:
        """One state of the participants' states; ``shares`` are their weights in an average. See :func:`average`."""
        return average(states, shares)

    def totals(self, states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The sum of the participants' tensors, float64: how many participate times what the rule makes of them."""
        return {
            name: number_by_number([state[name] for state in states], lambda stacked: stacked.double().sum(0))
            for name in states[0]
        }

    def class_means(self, sets: Sequence[PrototypeSet], *, sample_weighted: bool = False) -> PrototypeSet:
        """One row per class of the participants' sets: the mean over all rows, see :func:`unbiased_prototypes`."""
        return unbiased_prototypes(PrototypeSet.concatenate(sets), sample_weighted=sample_weighted)

    def rows(self, sets: Sequence[PrototypeSet]) -> PrototypeSet:
        """The participants' rows that a clustering is made of: all of them, by class and then in client order."""
        return PrototypeSet.concatenate(sets)


# ---- how many samples a client counts for ----------------------------------------------------------------------------


def at_most(clients: Sequence[Client], most: float) -> list[Client]:
    """The clients, those with more samples than ``most`` with so many."""
    return [client if client.samples <= most else replace(client, samples=max(1, int(most))) for client in clients]


def largest(samples: Sequence[int], share: float) -> float:
    """The number c that makes ``max_k min(N_k, c) <= share * sum_k min(N_k, c)``, as large as can be.

    Where there is none, since there are fewer numbers than ``1 / share``, it is the smallest one: all count the same.
    """
    ordered = sorted(samples)
    for capped in range(len(ordered) if len(ordered) * share >= 1 else 0):
        rest, left = ordered[: len(ordered) - capped], 1 - share * capped
        if left <= 0:
            break
        if rest[-1] * left <= share * sum(rest):
            return share * sum(rest) / left
    return float(ordered[0])


def cap_samples(updates: Sequence[Update], clients: Sequence[Client], share: float) -> list[Update]:
    """The updates as they count: the clients' samples as ``clients`` has them, and of the sum no more than ``share``.

    The weights of a client's prototypes, which are samples too, are reduced alike.
    """
    known = {client.id: client for client in clients}
    senders = [known[update.client.id] for update in updates]
    if len(senders) >= MIN_CLIENTS:
        senders = at_most(senders, largest([client.samples for client in senders], share))
    found = []
    for update, client in zip(updates, senders, strict=True):
        if client.samples < update.samples:
            factor = client.samples / update.samples
            prototypes = replace(update.prototypes, weights=update.prototypes.weights * factor)
            update = replace(update, client=client, prototypes=prototypes)
        found.append(update)
    return found
