"""Averages over clients, in client-id order and float64, so that the result does not depend on the order of arrival.

A client that registers a billion samples dominates an average by samples. Two settings limit it, both off by default:
a client counts for at most ``rounds.largest_client`` times the median client's samples, and in an average for at most
the share ``rounds.largest_share``. Fewer than half of the clients cannot move the median beyond honest numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from common.config import checked
from common.errors import ConfigError
from common.prototypes import PrototypeSet, unbiased_prototypes
from strategies.core.exchange import Client, Update

BLOCK_ELEMENTS = 2**17
"""Elements that are summed at a time: 1 MiB of float64. Less leaves a second thread without work, more the cache."""

SMALL_ELEMENTS = 2**14
"""Tensors with at most so many elements are joined before they are summed."""

STACKED_ELEMENTS = 2**23
"""Elements of all participants together that are combined at a time."""

MIN_CLIENTS = 3
"""Fewest clients for a limit on one client's share: two have no majority."""


def average(states: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """Return ``sum_k weights_k * states_k / sum_k weights_k`` over named tensors.

    Floating-point tensors are accumulated in float64, one state at a time, and returned in their own dtype. Integers
    and truth values (batch norm's counters) cannot be averaged; their result is the lower median.

    Args:
        states: the clients' tensors by name.
        weights: one number per state, >= 0.

    Raises:
        ValueError: no states, names or shapes that differ, or weights that do not sum to a positive number.
    """
    if not states:
        raise ValueError("there is nothing to average")
    total = float(sum(weights))
    if not total > 0:
        raise ValueError(f"weights must sum to a positive number; got {total}")
    shares = [weight / total for weight in weights]
    shapes = {name: tensor.shape for name, tensor in states[0].items()}
    for state in states[1:]:
        if {name: tensor.shape for name, tensor in state.items()} != shapes:
            raise ValueError("the states have tensors of different names or shapes")
    result: dict[str, Tensor] = {}
    for names in _groups(states[0]):
        if states[0][names[0]].is_floating_point():
            result |= _weighted_sums(states, names, shares)
            continue
        for name in names:
            stacked = torch.stack([state[name] for state in states])
            if stacked.dtype == torch.bool:
                stacked = stacked.to(torch.uint8)
            result[name] = stacked.median(0).values.to(states[0][name].dtype)
    return {name: result[name] for name in shapes}


def _groups(state: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names in groups of one dtype and device; a tensor that fills a block has a group of its own.

    Each operation costs as much for ten numbers as for a thousand, and half of a network's tensors have few.
    """
    groups: list[list[str]] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[str], int]] = {}
    for name, tensor in state.items():
        if tensor.numel() > SMALL_ELEMENTS:
            groups.append([name])
            continue
        kind = tensor.dtype, tensor.device
        names, size = open_groups.get(kind, ([], 0))
        if not names or size + tensor.numel() > BLOCK_ELEMENTS:
            names, size = [], 0
            groups.append(names)
        names.append(name)
        open_groups[kind] = names, size + tensor.numel()
    return groups


def _weighted_sums(
    states: Sequence[Mapping[str, Tensor]], names: Sequence[str], shares: Sequence[float]
) -> dict[str, Tensor]:
    """Return ``sum_k shares_k * states_k`` of some tensors in float64, block by block.

    The sums stay in the processor's cache, and of each state one block is copied at a time. Every element goes through
    the same operations in the same order as without blocks, so the result is bit-equal.
    """
    first = [states[0][name] for name in names]
    rows: list[Tensor] = []
    if len(names) == 1:
        rows = [state[names[0]].reshape(-1) for state in states]
    sizes = [tensor.numel() for tensor in first]
    result = torch.empty(sum(sizes), dtype=first[0].dtype, device=first[0].device)
    size = max(1, min(BLOCK_ELEMENTS, len(result)))
    sums = torch.empty(size, dtype=torch.float64, device=result.device)
    terms = torch.empty_like(sums)
    for start in range(0, len(result), size):
        block = slice(start, min(start + size, len(result)))
        total, term = sums[: block.stop - start].zero_(), terms[: block.stop - start]
        for position, share in enumerate(shares):
            if rows:
                row = rows[position][block]
            else:  # together they fit in one block
                row = torch.cat([states[position][name].reshape(-1) for name in names])
            total.add_(term.copy_(row), alpha=share)
        result[block] = total
    parts = zip(names, first, result.split(sizes), strict=True)
    return {name: part.view(tensor.shape) for name, tensor, part in parts}


def number_by_number(parts: Sequence[Tensor], combine: Callable[[Tensor], Tensor]) -> Tensor:
    """Combine ``n`` tensors of one shape element by element.

    Args:
        parts: the tensors.
        combine: maps ``[n, block]`` to ``[block]``; called for one block of elements after the other.
    """
    rows = [part.reshape(-1) for part in parts]
    size = max(1, STACKED_ELEMENTS // len(rows))
    blocks: list[Tensor] = []
    for start in range(0, len(rows[0]), size):
        stacked = torch.stack([row[start : start + size] for row in rows])
        blocks.append(combine(stacked))
    if not blocks:
        return parts[0].clone()
    return torch.cat(blocks).view(parts[0].shape)


@checked
class Mean:
    """The average, which every method uses unless a rule of :mod:`strategies.core.robust` replaces it.

    A rule combines what the participants of an exchange sent, in client-id order. A method's server half uses it as
    ``server.aggregation``, so that one setting serves every method that averages uploads.
    """

    robust: ClassVar[bool] = False
    """Whether all clients count the same, regardless of their samples, and some may be left out."""

    @property
    def min_answers(self) -> int:
        """Fewest answers that the rule needs; a round with fewer is skipped."""
        return 1

    def check(self, method: str, averages: bool, participants: int) -> None:  # noqa: ARG002
        """Check that the rule can be combined with a method.

        Args:
            method: the method's name.
            averages: whether the method's server only averages uploads; see :attr:`Method.averages`.
            participants: clients that are asked in a round.

        Raises:
            ConfigError: the rule cannot be combined with the method; the message says why and what to set.
        """
        if type(self).average is not Mean.average and type(self).combine is Mean.combine:
            raise ConfigError(f"{type(self).__name__}: override combine, not average alone: some methods call only it")

    def filters(self) -> Sequence[Any]:
        """Return the rule's own filters (:class:`strategies.core.filters.Filter`), new ones for each run; none here.

        The rule's filters apply after those of the settings and before the average. A filter may remember earlier
        exchanges.
        """
        return ()

    def average(self, updates: Sequence[Update], *, uniform: bool = False) -> dict[str, Tensor]:
        """Return the average of the updates' model states.

        Args:
            updates: the updates, by client id.
            uniform: weigh every client equally instead of by its samples N_k (FedAvg).

        Raises:
            ValueError: there are fewer updates than the rule needs.
        """
        shares: list[float] = [1.0] * len(updates)
        if not uniform:
            shares = [update.samples for update in updates]
        return self.combine([update.weights for update in updates], shares)

    def combine(self, states: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> dict[str, Tensor]:
        """Return one state of the participants' states, weighed by ``shares``. See :func:`average`."""
        return average(states, shares)

    def totals(self, states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the sum of the participants' tensors in float64: their number times the rule's average."""
        totals: dict[str, Tensor] = {}
        for name in states[0]:
            totals[name] = number_by_number([state[name] for state in states], _float64_sum)
        return totals

    def class_means(self, sets: Sequence[PrototypeSet], *, sample_weighted: bool = False) -> PrototypeSet:
        """Return one prototype per class: the mean over all rows of the sets, see :func:`unbiased_prototypes`."""
        return unbiased_prototypes(PrototypeSet.concatenate(sets), sample_weighted=sample_weighted)

    def rows(self, sets: Sequence[PrototypeSet]) -> PrototypeSet:
        """Return the rows that a clustering uses: all rows of the sets, by class and then in client order."""
        return PrototypeSet.concatenate(sets)


def _float64_sum(stacked: Tensor) -> Tensor:
    return stacked.double().sum(0)


# ---- how many samples a client counts for ----------------------------------------------------------------------------


def limit_samples(clients: Sequence[Client], limit: float) -> list[Client]:
    """Return the clients; the samples of those that have more than ``limit`` are set to ``limit``."""
    limited: list[Client] = []
    for client in clients:
        if client.samples > limit:
            client = replace(client, samples=max(1, int(limit)))
        limited.append(client)
    return limited


def sample_limit(samples: Sequence[float], share: float) -> float:
    """Return the largest number c of samples at which no client counts for more than ``share`` of all samples.

    The limit is the largest c with ``max_k min(N_k, c) <= share * sum_k min(N_k, c)``.

    With ``share=1`` there is no limit: c is infinite. If there are fewer numbers than ``1 / share`` there is no such c;
    the smallest number is returned, so that all clients count the same.

    Args:
        samples: the clients' samples N_k.
        share: largest share of one client, in (0, 1].
    """
    if share == 1:
        return math.inf
    ordered = sorted(samples)
    if len(ordered) * share < 1:
        return float(ordered[0])
    for capped in range(len(ordered)):
        rest, left = ordered[: len(ordered) - capped], 1 - share * capped
        if left <= 0:
            break
        if rest[-1] * left <= share * sum(rest):
            return share * sum(rest) / left
    return float(ordered[0])


def cap_shares(shares: Sequence[float], largest_share: float) -> list[float]:
    """Return the shares, lowered so that none exceeds ``largest_share`` of their sum; those of two clients unchanged.

    Args:
        shares: weight of each client, > 0, not normalised.
        largest_share: largest part of the sum, in (0, 1].
    """
    if len(shares) < MIN_CLIENTS:
        return list(shares)
    limit = sample_limit(shares, largest_share)
    return [min(share, limit) for share in shares]


def cap_samples(updates: Sequence[Update], clients: Sequence[Client], share: float) -> list[Update]:
    """Return the updates with the samples that they count for.

    The weights of a client's prototypes are numbers of samples too, and are reduced by the same factor.

    Args:
        updates: the updates, by client id.
        clients: the clients with the samples that they count for at most.
        share: largest share of one client in the sum of all samples.
    """
    registered = {client.id: client for client in clients}
    senders = [registered[update.client.id] for update in updates]
    if len(senders) >= MIN_CLIENTS:
        senders = limit_samples(senders, sample_limit([client.samples for client in senders], share))
    capped: list[Update] = []
    for update, client in zip(updates, senders, strict=True):
        if client.samples < update.samples:
            factor = client.samples / update.samples
            prototypes = replace(update.prototypes, weights=update.prototypes.weights * factor)
            update = replace(update, client=client, prototypes=prototypes)
        capped.append(update)
    return capped
