"""Prototypes over rounds, as a run records them; their size is bounded."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from common.prototypes import PrototypeSet
from common.storage import Bundle, Series, split_tensors, under_prefix, with_prefix

MAX_ROUNDS = 40
"""Prototypes of at most this many rounds are kept; a longer run keeps every second, fourth ... round."""

MAX_VALUES = 2**20
"""Largest number of float32 values of one file's uploaded prototypes (4 MiB); of more, evenly spaced rows are kept."""


@dataclass(frozen=True)
class Page:
    """The prototypes of one round.

    Args:
        round: the round.
        prototypes: the global set after the round.
        uploaded: the rows that clients sent in the round, in one set.
        owners: ``[M]`` int64, for each uploaded row the index of its client in ``clients``.
        clients: ids of the clients that sent rows.
    """

    round: int
    prototypes: PrototypeSet
    uploaded: PrototypeSet
    owners: Tensor
    clients: tuple[str, ...]


class PrototypeLog:
    """``prototypes/round-*.safetensors``: the global prototypes and those that clients sent, for the map over rounds.

    Args:
        folder: the run's folder ``prototypes``, created with the first page.
        keep_until: pages of later rounds are removed; ``-1`` removes all.
    """

    def __init__(self, folder: Path, keep_until: int = -1) -> None:
        self.series = Series(folder)
        self.series.prune_except(range(keep_until + 1))

    def add(self, number: int, prototypes: PrototypeSet, uploads: Sequence[tuple[str, PrototypeSet]]) -> None:
        """Keep a round's prototypes, if it has some, and then remove older rounds beyond :data:`MAX_ROUNDS`."""
        filled = [(client, part) for client, part in uploads if len(part)]
        if not filled and not len(prototypes):
            return
        owners, parts = [], []
        limit = MAX_VALUES // max(1, len(filled))
        for index, (_, part) in enumerate(filled):
            step = -(-part.vectors.numel() // limit)  # rounded up
            parts.append(PrototypeSet(part.vectors[::step], part.labels[::step], part.weights[::step]))
            owners += [index] * len(parts[-1])
        joined = PrototypeSet.concatenate(parts)
        if len(parts) > 1:  # concatenate sorts by class, stably, and the owners must follow
            labels = torch.cat([part.labels for part in parts])
            order = torch.sort(labels, stable=True).indices
            owners = torch.tensor(owners)[order].tolist()
        tensors = Bundle(prototypes=prototypes, extra={"owners": torch.tensor(owners, dtype=torch.int64)}).tensors()
        tensors |= with_prefix("uploaded/", Bundle(prototypes=joined).tensors())
        self.series.write(number, tensors, {"clients": [client for client, _ in filled]})
        self.series.prune_except(kept_rounds(number))


def read_pages(folder: Path) -> list[Page]:
    """Return the rounds that were kept, ascending; files that cannot be read are left out."""
    pages: list[Page] = []
    series = Series(folder)
    for number in series.numbers():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            _, tensors, facts = series.read(number)
            page, uploaded = split_tensors(tensors), split_tensors(under_prefix("uploaded/", tensors))
            if page.prototypes is not None and uploaded.prototypes is not None:
                clients = tuple(facts["clients"])
                pages.append(Page(number, page.prototypes, uploaded.prototypes, page.extra["owners"], clients))
    return pages


def kept_rounds(last: int) -> set[int]:
    """Return the rounds of ``1..last`` that are kept: all, or the first, the last, and every 2nd, 4th, 8th ... one."""
    stride = 1
    while last // stride > MAX_ROUNDS - 2:
        stride *= 2
    return {1, last} | set(range(stride, last + 1, stride))
