"""How many samples a client counts for: its own word, as far as it does not outvote the others.

What a method weighs by samples, a client could decide alone by registering a billion of them. So a client counts for at
most ``rounds.largest_client`` times the median client's samples, which fewer than half of the clients cannot move
beyond the honest ones', and in an average for at most the share ``rounds.largest_share`` of all that are averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from strategies.core.exchange import Client, Update

LEAST = 3
"""Of fewer clients either may be the honest one."""


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


def counted(updates: Sequence[Update], clients: Sequence[Client], share: float) -> list[Update]:
    """The updates as they count: the clients' samples as ``clients`` has them, and of the sum no more than ``share``.

    The weights of a client's prototypes, which are samples too, are reduced alike.
    """
    known = {client.id: client for client in clients}
    senders = [known[update.client.id] for update in updates]
    if len(senders) >= LEAST:
        senders = at_most(senders, largest([client.samples for client in senders], share))
    found = []
    for update, client in zip(updates, senders, strict=True):
        if client.samples < update.samples:
            factor = client.samples / update.samples
            prototypes = replace(update.prototypes, weights=update.prototypes.weights * factor)
            update = replace(update, client=client, prototypes=prototypes)
        found.append(update)
    return found
