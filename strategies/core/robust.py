"""The geometric median, and the base of a rule of one's own that tolerates hostile clients, for weights and prototypes.

Under such a rule all clients count the same, because the server cannot check how many samples a device has. A rule
assumes that honest updates lie close together, which is less true of clients of different domains;
docs/results/poisoning.md shows where it costs more accuracy than it saves.

Flower's strategies (``FedMedian``, ``FedTrimmedAvg``, ``Krum``, ``Bulyan``) are not used here, because methods work on
named tensors without Flower, and clients send different numbers of prototypes. docs/methods.md shows how a class of
one's own becomes a rule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from common.config import checked
from common.errors import ConfigError
from common.prototypes import PrototypeSet, class_means
from strategies.core.aggregation import STACKED_ELEMENTS, Mean, average


@checked
class RobustRule(Mean, ABC):
    """Base of a robust rule: prototypes are combined class by class, with one row per client.

    A rule defines ``combine``, ``combine_rows``, ``chosen_rows`` and ``min_answers``. A client's row is the mean of its
    rows of the class. If fewer clients hold a class than the rule needs, the rule tolerates as many hostile ones among
    them as it can; the row of a single client is used as it is.
    """

    robust: ClassVar[bool] = True

    def check(self, method: str, averages: bool, participants: int) -> None:
        """Refuse a method whose server does more than average, and a round with too few participants.

        Raises:
            ConfigError: the rule would not protect the method, or needs more answers than clients are asked.
        """
        if not averages:
            raise ConfigError(
                f"method={method}: the server does not only average what clients send, so "
                f"aggregation={self._name} would not protect it; set aggregation=mean, and where devices are not "
                "trusted also rounds=guarded"
            )
        if participants < self.min_answers:
            raise ConfigError(
                f"aggregation={self._name} needs {self.min_answers} answers a round and {participants} clients are "
                "asked: take more clients, a larger rounds.participation, or aggregation=mean"
            )

    @property
    def _name(self) -> str:
        return type(self).__name__.lower()

    @abstractmethod
    def chosen_rows(self, table: Tensor) -> Tensor:
        """Return the indices, ascending, of the rows that a clustering uses; ``table [n, D]`` has one per client."""

    @abstractmethod
    def combine_rows(self, table: Tensor) -> Tensor:
        """Combine ``table [n, D]`` float64, a row per client, into ``[D]``; n >= 1 may be below ``min_answers``."""

    def _need(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        if len(states) < self.min_answers:
            raise ValueError(f"{self._name} needs {self.min_answers} states; got {len(states)}")

    def totals(self, states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the rule's average of the tensors times their number, in float64."""
        totals: dict[str, Tensor] = {}
        for name, tensor in self.combine(states, [1.0] * len(states)).items():
            totals[name] = len(states) * tensor.double()
        return totals

    def class_means(self, sets: Sequence[PrototypeSet], *, sample_weighted: bool = False) -> PrototypeSet:  # noqa: ARG002
        """Return one row per class; its weight is that of the median client times the number of those that hold it."""
        tables = _tables(sets)
        if not tables:
            return PrototypeSet.concatenate(sets)
        vectors: list[Tensor] = []
        weights: list[Tensor] = []
        for label, (holders, table) in tables.items():
            vectors.append(self.combine_rows(table).float())
            masses = [sets[holder].weights[sets[holder].labels == label].sum() for holder in holders]
            weights.append(len(holders) * torch.stack(masses).median())
        return PrototypeSet(torch.stack(vectors), torch.tensor(list(tables)), torch.stack(weights))

    def rows(self, sets: Sequence[PrototypeSet]) -> PrototypeSet:
        """Return the rows of those clients that the rule chooses in the row's class; a client's weigh 1 together."""
        parts: list[PrototypeSet] = []
        for label, (holders, table) in _tables(sets).items():
            for index in self.chosen_rows(table).tolist():
                sent = sets[holders[index]]
                own = sent.labels == label
                weights = sent.weights[own]
                parts.append(PrototypeSet(sent.vectors[own], sent.labels[own], weights / weights.sum()))
        return PrototypeSet.concatenate(parts or sets)


def _tables(sets: Sequence[PrototypeSet]) -> dict[int, tuple[list[int], Tensor]]:
    """Return by class, ascending: the positions of the sets that hold it, and their mean rows ``[n, D]`` float64."""
    count = 0
    for part in sets:
        if len(part):
            count = max(count, 1 + part.classes[-1])
    means = [class_means(part.vectors, part.labels, count) for part in sets]
    tables: dict[int, tuple[list[int], Tensor]] = {}
    for label in range(count):
        holders: list[int] = []
        rows: list[Tensor] = []
        for position, part in enumerate(means):
            if label in part.classes:
                holders.append(position)
                rows.append(part.of_class(label))
        if holders:
            tables[label] = (holders, torch.cat(rows).double())
    return tables


ITERATIONS = 100
"""Steps of Weiszfeld's algorithm. It starts from the mean of the smallest majority around the medoid: from the mean of
all, three of seven hostile clients at the gate's bound would still be far away after so many steps."""

SMOOTHING = 1e-6
"""Smallest distance that is divided by, as a share of the median distance."""


@checked
class GeometricMedian(RobustRule):
    """The geometric median: the state with the smallest sum of distances to the clients' states.

    Known as RFA (Pillutla, Kakade and Harchaoui, Robust Aggregation for Federated Learning, IEEE TSP 2022). The
    smoothed Weiszfeld algorithm computes the median over all floating-point tensors together. The median tolerates
    hostile clients if they are fewer than half. Counters are no part of it: their result is the plain lower median, see
    :func:`~strategies.core.aggregation.average`. If a method clusters rows, those of the smallest majority of clients
    nearest to the class's geometric median are used.
    """

    @property
    def _name(self) -> str:
        return "geometric_median"

    @property
    def min_answers(self) -> int:
        """Return three, because every point between two answers is a geometric median of the two."""
        return 3

    def combine(self, states: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> dict[str, Tensor]:  # noqa: ARG002
        """Average the states with the shares that give the geometric median."""
        self._need(states)
        return average(states, _shares(_products(states)).tolist())

    def combine_rows(self, table: Tensor) -> Tensor:
        """Return the geometric median of the rows."""
        rows = [{"row": row} for row in table]
        return _shares(_products(rows)) @ table

    def chosen_rows(self, table: Tensor) -> Tensor:
        """Return the smallest majority, the nearest to the geometric median."""
        return _majority(torch.linalg.vector_norm(table - self.combine_rows(table), dim=1))


def _shares(products: Tensor) -> Tensor:
    """Return the shares ``[n]`` of the geometric median from :func:`_products`.

    Every iterate is an average of the points with shares b, so its squared distance from point j is
    ``G_jj - 2 (G b)_j + b' G b``, and the points themselves are not needed.
    """
    squares = products.diagonal()
    shares = torch.zeros_like(squares)
    near = _majority(squares)
    shares[near] = 1.0 / len(near)
    for _ in range(ITERATIONS):
        means = products @ shares
        distances = (squares - 2 * means + shares @ means).clamp(min=0.0).sqrt()
        smallest = SMOOTHING * float(distances.median())
        if smallest == 0.0:  # half of the points or more are equal to the average
            return shares
        shares = 1.0 / distances.clamp(min=smallest)
        shares /= shares.sum()
    return shares


def _majority(distances: Tensor) -> Tensor:
    """Return the indices, ascending, of the smallest majority of ``distances [n]``, the nearest."""
    majority = len(distances) // 2 + 1
    return torch.sort(distances, stable=True).indices[:majority].sort().values


def _products(states: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Return ``[n, n]`` float64: the scalar products of the states' floating-point tensors, seen from the medoid.

    The medoid is the state with the smallest median distance from all. If fewer than half of the states are hostile, it
    lies among the honest ones, so these have short differences, which stay exact however long a hostile one is. In the
    squared distances from a hostile state, or from the mean, rounding would hide them.
    """
    squares = torch.zeros(len(states), len(states), dtype=torch.float64)
    for block in _blocks(states):
        squares += torch.cdist(block, block, compute_mode="donot_use_mm_for_euclid_dist").square()
    medoid = int(squares.median(1).values.argmin())
    products = torch.zeros_like(squares)
    for block in _blocks(states):
        differences = block - block[medoid]
        for row, difference in enumerate(differences):
            products[row, : row + 1] += (differences[: row + 1] * difference).sum(1)
    return products + products.tril(-1).T


def _blocks(states: Sequence[Mapping[str, Tensor]]) -> Iterator[Tensor]:
    """Yield ``[n, block]`` float64: the numbers of the states' floating-point tensors, one block after the other."""
    size = max(1, STACKED_ELEMENTS // len(states))
    for name, tensor in states[0].items():
        if tensor.is_floating_point():
            parts = [state[name].reshape(-1).split(size) for state in states]
            for part in zip(*parts, strict=True):
                yield torch.stack(part).double()
