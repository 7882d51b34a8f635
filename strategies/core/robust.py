"""Aggregation rules that tolerate some hostile clients, for weights and prototypes (conf/aggregation/).

Under them all clients count the same, because the server cannot check how many samples a device has. They assume that
honest updates lie close together, which is less true of clients of different domains; docs/results/poisoning.md shows
where they cost more accuracy than they save.

Flower has functions of these names on lists of numpy arrays (``flwr.server.strategy.aggregate``). The tests compare
with them. They are not used here, because methods work on named tensors without Flower, clients send different numbers
of prototypes, and Flower's multi-Krum weighs the chosen clients by the samples that they registered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from common.config import Count, Fraction, Natural, checked
from common.errors import ConfigError
from common.prototypes import PrototypeSet, class_means
from strategies.core.aggregation import Mean, average, number_by_number


@checked
class RobustRule(Mean, ABC):
    """Base of the robust rules: prototypes are combined class by class, with one row per client.

    A client's row is the mean of its rows of the class. If fewer clients hold a class than the rule needs, the rule
    tolerates as many hostile ones among them as it can; the row of a single client is used as it is.
    """

    robust: ClassVar[bool] = True

    def check(self, method: str, averages: bool, participants: int) -> None:
        """See :meth:`strategies.core.aggregation.Mean.check`."""
        if not averages:
            raise ConfigError(
                f"method={method}: the server does not only average what clients send, so "
                f"aggregation={self._name} would not protect it; set aggregation=mean"
            )
        if participants < self.min_answers:
            raise ConfigError(
                f"aggregation={self._name} needs {self.min_answers} answers a round "
                f"and {participants} clients are asked: take more clients, a larger rounds.participation, "
                "a smaller aggregation.attackers, or aggregation=mean"
            )

    @property
    def _name(self) -> str:
        return type(self).__name__.lower()

    @abstractmethod
    def _chosen(self, table: Tensor) -> Tensor:
        """Return the indices, ascending, of the rows that a clustering uses; ``table [n, D]`` has one per client."""

    @abstractmethod
    def _one(self, table: Tensor) -> Tensor:
        """Combine ``table [n, D]`` float64 into one row ``[D]``, also if n >= 1 is below ``min_answers``."""

    def _need(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        if len(states) < self.min_answers:
            raise ValueError(f"{self._name} needs {self.min_answers} states; got {len(states)}")

    def totals(self, states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """See :meth:`strategies.core.aggregation.Mean.totals`."""
        totals: dict[str, Tensor] = {}
        for name, tensor in self.combine(states, [1.0] * len(states)).items():
            totals[name] = len(states) * tensor.double()
        return totals

    def class_means(self, sets: Sequence[PrototypeSet], *, sample_weighted: bool = False) -> PrototypeSet:  # noqa: ARG002
        """Return one row per class; its weight is the sum of all rows' weights. Clients count the same."""
        rows = PrototypeSet.concatenate(sets)
        if not len(rows):
            return rows
        tables = _tables(sets)
        masses = rows.weights.new_zeros(int(rows.labels[-1]) + 1, dtype=torch.float64)
        masses.index_add_(0, rows.labels, rows.weights.double())
        vectors: list[Tensor] = []
        for _, table in tables.values():
            vectors.append(self._one(table).float())
        labels = torch.tensor(list(tables))
        return PrototypeSet(torch.stack(vectors), labels, masses[labels].float())

    def rows(self, sets: Sequence[PrototypeSet]) -> PrototypeSet:
        """Return the rows of those clients that the rule chooses in the row's class."""
        chosen: dict[int, set[int]] = {}
        for label, (holders, table) in _tables(sets).items():
            for index in self._chosen(table).tolist():
                chosen.setdefault(holders[index], set()).add(label)
        parts: list[PrototypeSet] = []
        for position, part in enumerate(sets):
            labels = sorted(chosen.get(position, set()))
            mask = torch.isin(part.labels, torch.tensor(labels, dtype=torch.int64))
            parts.append(PrototypeSet(part.vectors[mask], part.labels[mask], part.weights[mask]))
        return PrototypeSet.concatenate(parts)


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


def _nearest(table: Tensor, count: int) -> Tensor:
    """Return the indices, ascending, of the ``count`` rows nearest to the coordinate-wise median."""
    distances = torch.linalg.vector_norm(table - _middle(table), dim=1)
    return torch.sort(distances, stable=True).indices[:count].sort().values


def _middle(values: Tensor) -> Tensor:
    """Return the median over the first dimension, float64; of an even number, the mean of the two middle values."""
    ordered = values.sort(0).values
    return (ordered[(len(values) - 1) // 2].double() + ordered[len(values) // 2].double()) / 2


@checked
class CoordinateRule(RobustRule):
    """A rule that combines each number by itself, such as one weight of the net over all clients."""

    def combine(self, states: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> dict[str, Tensor]:  # noqa: ARG002
        """Combine number by number, in the tensors' own dtypes; integers (counters) are the lower median."""
        self._need(states)
        combined = {}
        for name, first in states[0].items():
            parts = [state[name] for state in states]
            if first.is_floating_point():
                combined[name] = number_by_number(parts, self._one).to(first.dtype)
            else:
                combined[name] = torch.stack(parts).sort(0).values[(len(states) - 1) // 2].clone()
        return combined


@checked
class Median(CoordinateRule):
    """The coordinate-wise median (Yin et al., ICML 2018): tolerates hostile clients if they are fewer than half.

    If a method clusters rows, it uses those of the smallest majority of clients, the nearest to the class's median.
    """

    @property
    def min_answers(self) -> int:
        """Three, because the median of two answers is their mean."""
        return 3

    def _one(self, table: Tensor) -> Tensor:
        return _middle(table)

    def _chosen(self, table: Tensor) -> Tensor:
        return _nearest(table, len(table) // 2 + 1)


@checked
class StatisticsMedian(Mean):
    """The average, except of the running statistics: of these, the median over the clients, number by number.

    It tolerates clients that scale their variances if they are fewer than half; a bound on the length does not stop
    them (docs/results/poisoning.md). The statistics of a rare domain then hardly count.
    """

    def combine(self, states: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> dict[str, Tensor]:
        """Combine as :meth:`Mean.combine` does, except running means and variances."""
        combined = super().combine(states, shares)
        for name, first in states[0].items():
            if name.endswith(("running_mean", "running_var")):
                tensors = [state[name] for state in states]
                combined[name] = number_by_number(tensors, _middle).to(first.dtype)
        return combined


@checked
class TrimmedMean(CoordinateRule):
    """The coordinate-wise mean without the ``attackers`` largest and smallest values (Yin et al., ICML 2018).

    If a method clusters rows, those of the ``attackers`` clients farthest from the class's median are left out. With
    ``attackers=0`` the rule is the mean with equal weights.

    Args:
        attackers: hostile clients to tolerate in a round, >= 0; more than twice as many must answer.
    """

    attackers: Natural = 1

    @property
    def _name(self) -> str:
        return "trimmed_mean"

    @property
    def min_answers(self) -> int:
        """``2 attackers + 1``, so that one value is left."""
        return 2 * self.attackers + 1

    def after_refusals(self, refused: int, answers: int) -> TrimmedMean:
        """See :meth:`strategies.core.aggregation.Mean.after_refusals`."""
        return replace(self, attackers=max(0, self.attackers - refused, self._trimmed(answers)))

    def _trimmed(self, count: int) -> int:
        return min(self.attackers, (count - 1) // 2)

    def _one(self, table: Tensor) -> Tensor:
        cut = self._trimmed(len(table))
        return table.sort(0).values[cut : len(table) - cut].double().mean(0)

    def _chosen(self, table: Tensor) -> Tensor:
        return _nearest(table, len(table) - self._trimmed(len(table)))


@checked
class Krum(RobustRule):
    """The update with the nearest neighbours (Krum), or the mean of several (multi-Krum; Blanchard et al., 2017).

    A client's score is the sum of squared distances to its ``n - attackers - 2`` nearest others, over all
    floating-point tensors; the ``keep`` clients of the lowest scores are averaged with equal weights. Counters are
    those of the best client.

    Args:
        attackers: hostile clients to tolerate in a round, f >= 0; n >= 2 f + 3 must answer.
        keep: clients that are kept, >= 1; ``null`` keeps n - f (multi-Krum).
    """

    attackers: Natural = 1
    keep: Count | None = 1

    @property
    def _name(self) -> str:
        if self.keep == 1:
            return "krum"
        return "multi_krum"

    @property
    def min_answers(self) -> int:
        """Blanchard et al.'s ``2 f + 2 < n``."""
        return 2 * self.attackers + 3

    def after_refusals(self, refused: int, answers: int) -> Krum:
        """See :meth:`strategies.core.aggregation.Mean.after_refusals`."""
        return replace(self, attackers=max(0, self.attackers - refused, self._tolerated(answers)))

    def _tolerated(self, count: int) -> int:
        return min(self.attackers, (count - 3) // 2)

    def combine(self, states: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> dict[str, Tensor]:  # noqa: ARG002
        """Average the states of the kept clients."""
        self._need(states)
        chosen = self._best(_distances(states))
        return average([states[index] for index in chosen], [1.0] * len(chosen))

    def _best(self, distances: Tensor) -> list[int]:
        """Return the indices of the kept clients by their squared ``distances [n, n]``, the best first.

        Of equal clients the first comes first.
        """
        count = len(distances)
        if count < 3:  # two clients have the same distance to each other, so neither is better
            return list(range(count))
        attackers = self._tolerated(count)
        nearest = distances.clone().fill_diagonal_(torch.inf).sort(1).values[:, : count - attackers - 2]
        order = torch.sort(nearest.sum(1), stable=True).indices.tolist()
        if self.keep is None:
            return order[: count - attackers]
        return order[: self.keep]

    def _one(self, table: Tensor) -> Tensor:
        return table[self._chosen(table)].mean(0)

    def _chosen(self, table: Tensor) -> Tensor:
        return torch.tensor(self._best((table[:, None] - table).square().sum(2))).sort().values


@checked
class GeometricMedian(RobustRule):
    """The geometric median: the state with the smallest sum of distances to the clients' states.

    Known as RFA (Pillutla, Kakade and Harchaoui, Robust Aggregation for Federated Learning, IEEE TSP 2022). It is found
    by the smoothed Weiszfeld algorithm over all floating-point tensors together, and tolerates fewer than half of the
    clients. It is an average with shares, so counters are averaged with the same shares. If a method clusters rows,
    those of the smallest majority of clients nearest to the class's geometric median are used.

    Args:
        iterations: steps of the algorithm, >= 1; it starts from the mean.
        smoothing: smallest distance that is divided by, as a share of the median distance, in (0, 1).
    """

    iterations: Count = 100
    smoothing: Fraction = 1e-6

    @property
    def _name(self) -> str:
        return "geometric_median"

    @property
    def min_answers(self) -> int:
        """Three, because every point between two answers is a geometric median of the two."""
        return 3

    def combine(self, states: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> dict[str, Tensor]:  # noqa: ARG002
        """Average the states with the shares that give the geometric median."""
        self._need(states)
        return average(states, self._shares(_distances(states)).tolist())

    def _shares(self, squares: Tensor) -> Tensor:
        """Return the shares ``[n]`` of the geometric median from squared distances ``[n, n]``, both float64.

        Every iterate is an average of the points with shares b, so its squared distance from point j is
        ``sum_i b_i D_ij - 1/2 sum_ik b_i b_k D_ik``, and the points themselves are not needed.
        """
        shares = torch.full((len(squares),), 1.0 / len(squares), dtype=torch.float64)
        for _ in range(self.iterations):
            distances = _from_average(squares, shares)
            smallest = self.smoothing * float(distances.median())
            if smallest == 0.0:  # half of the points or more are equal to the average
                return shares
            shares = 1.0 / distances.clamp(min=smallest)
            shares /= shares.sum()
        return shares

    def _one(self, table: Tensor) -> Tensor:
        shares = self._shares((table[:, None] - table).square().sum(2))
        return shares @ table

    def _chosen(self, table: Tensor) -> Tensor:
        distances = torch.linalg.vector_norm(table - self._one(table), dim=1)
        majority = len(table) // 2 + 1
        return torch.sort(distances, stable=True).indices[:majority].sort().values


def _from_average(squares: Tensor, shares: Tensor) -> Tensor:
    """Return the distance ``[n]`` of each point from the average with ``shares``, by squared distances ``[n, n]``."""
    means = squares @ shares
    return (means - shares @ means / 2).clamp(min=0.0).sqrt()


def _distances(states: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Return ``[n, n]`` float64: the squared distances between the states' floating-point tensors."""
    result = torch.zeros(len(states), len(states), dtype=torch.float64)
    names = [name for name, tensor in states[0].items() if tensor.is_floating_point()]
    for row in range(len(states)):
        for column in range(row):
            square = 0.0
            for name in names:
                difference = states[row][name].double() - states[column][name].double()
                square += float(difference.square().sum())
            result[row, column] = result[column, row] = square
    return result
