"""Aggregation rules that bear some hostile clients, for weights and prototypes (conf/aggregation/).

Every client counts the same under them: the samples that a device registers are its own word. They assume that honest
updates lie close together, which clients of different domains strain; docs/results/poisoning.md shows where they cost
more than they save.

Flower has functions of these names on lists of numpy arrays (``flwr.server.strategy.aggregate``). They are the tests'
oracle and not used here: the method contract works on named tensors without Flower, prototype sets are ragged, and
Flower's multi-Krum weighs the chosen ones by the samples they claim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from common.config import Count, Natural, checked
from common.errors import ConfigError
from common.prototypes import PrototypeSet, class_means
from strategies.core.aggregation import Mean, average, number_by_number


@checked
class RobustRule(Mean, ABC):
    """What the rules have in common: prototypes are treated class by class, one row per client.

    A client's row is the mean of its rows of the class. A class that fewer clients hold than the rule needs is guarded
    against as many hostile ones as they allow; what a single client says of a class is taken as it is.
    """

    robust: ClassVar[bool] = True

    def check(self, method: str, averages: bool, participants: int) -> None:
        """See :meth:`strategies.core.aggregation.Mean.check`."""
        if not averages:
            raise ConfigError(
                f"method={method}: the server makes other things than averages of what it is sent, "
                f"or nothing, and aggregation={self._name} would not protect it; set aggregation=mean"
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
        """Which rows of ``table [n, D]`` float64, one per client, a clustering is made of: indices, ascending."""

    @abstractmethod
    def _one(self, table: Tensor) -> Tensor:
        """``[D]``: one row for ``table [n, D]`` float64, n >= 1, whatever the rule needs otherwise."""

    def _need(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        if len(states) < self.min_answers:
            raise ValueError(f"{self._name} needs {self.min_answers} states; got {len(states)}")

    def totals(self, states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """See :meth:`strategies.core.aggregation.Mean.totals`."""
        combined = self.combine(states, [1.0] * len(states))
        return {name: len(states) * tensor.double() for name, tensor in combined.items()}

    def class_means(self, sets: Sequence[PrototypeSet], *, sample_weighted: bool = False) -> PrototypeSet:  # noqa: ARG002
        """One row per class; its weight is the sum of all rows' weights. Clients count the same."""
        rows = PrototypeSet.concatenate(sets)
        if not len(rows):
            return rows
        tables = _tables(sets)
        masses = rows.weights.new_zeros(int(rows.labels[-1]) + 1, dtype=torch.float64)
        masses.index_add_(0, rows.labels, rows.weights.double())
        vectors = torch.stack([self._one(table).float() for _, table in tables.values()])
        labels = torch.tensor(list(tables))
        return PrototypeSet(vectors, labels, masses[labels].float())

    def rows(self, sets: Sequence[PrototypeSet]) -> PrototypeSet:
        """The rows of those clients that the rule trusts in the row's class."""
        kept: list[set[int]] = [set() for _ in sets]
        for label, (holders, table) in _tables(sets).items():
            for index in self._chosen(table).tolist():
                kept[holders[index]].add(label)
        parts = []
        for labels, part in zip(kept, sets, strict=True):
            mask = torch.isin(part.labels, torch.tensor(sorted(labels), dtype=torch.int64))
            parts.append(PrototypeSet(part.vectors[mask], part.labels[mask], part.weights[mask]))
        return PrototypeSet.concatenate(parts)


def _tables(sets: Sequence[PrototypeSet]) -> dict[int, tuple[list[int], Tensor]]:
    """By class, ascending: positions of the sets that hold it, and their mean rows ``[n, D]`` float64."""
    count = 1 + max((part.classes[-1] for part in sets if len(part)), default=-1)
    means = [class_means(part.vectors, part.labels, count) for part in sets]
    tables = {}
    for label in range(count):
        holders = [position for position, part in enumerate(means) if label in part.classes]
        if holders:
            tables[label] = (holders, torch.cat([means[position].of_class(label) for position in holders]).double())
    return tables


def _nearest(table: Tensor, count: int) -> Tensor:
    """Indices, ascending, of the ``count`` rows nearest to the coordinate-wise median; of equals, the first."""
    distances = torch.linalg.vector_norm(table - _middle(table), dim=1)
    return torch.sort(distances, stable=True).indices[:count].sort().values


def _middle(values: Tensor) -> Tensor:
    """Median over the first dimension, float64; the mean of the two middle ones of an even number."""
    ordered = values.sort(0).values
    return (ordered[(len(values) - 1) // 2].double() + ordered[len(values) // 2].double()) / 2


@checked
class CoordinateRule(RobustRule):
    """A rule that looks at each number by itself, such as one weight of the net over all clients."""

    def combine(self, states: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> dict[str, Tensor]:  # noqa: ARG002
        """Number by number, in the tensors' own dtypes; integers (counters) are the lower median."""
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
    """The coordinate-wise median (Yin et al., ICML 2018): bears fewer than half hostile clients.

    Of the rows that a method clusters, those of the smallest majority stay, nearest to the class's median.
    """

    @property
    def min_answers(self) -> int:
        """Of two answers the median is the mean."""
        return 3

    def _one(self, table: Tensor) -> Tensor:
        return _middle(table)

    def _chosen(self, table: Tensor) -> Tensor:
        return _nearest(table, len(table) // 2 + 1)


@checked
class StatisticsMedian(Mean):
    """The average of everything but the running statistics, whose median of the clients is taken number by number.

    Bears fewer than half clients that scale their variances, which a bound on the length cannot (docs/results/
    poisoning.md); a rare domain's statistics then hardly count.
    """

    def combine(self, states: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> dict[str, Tensor]:
        """As :meth:`Mean.combine`, but for running means and variances."""
        statistics = {
            name: number_by_number([state[name] for state in states], _middle).to(first.dtype)
            for name, first in states[0].items()
            if name.endswith(("running_mean", "running_var"))
        }
        return super().combine(states, shares) | statistics


@checked
class TrimmedMean(CoordinateRule):
    """The coordinate-wise mean without the ``attackers`` largest and smallest values (Yin et al., ICML 2018).

    Of the rows that a method clusters, those of the ``attackers`` clients farthest from the class's median go. With
    ``attackers=0`` it is the mean with equal weights.

    Args:
        attackers: hostile clients to bear in a round, >= 0; more than twice as many must answer.
    """

    attackers: Natural = 1

    @property
    def _name(self) -> str:
        return "trimmed_mean"

    @property
    def min_answers(self) -> int:
        """One value must be left."""
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
    """The update whose nearest others are nearest (Krum), or the mean of several (multi-Krum; Blanchard et al., 2017).

    A client's score is the sum of squared distances to its ``n - attackers - 2`` nearest others, over all
    floating-point tensors; the ``keep`` clients of the lowest scores are averaged with equal weights. Counters are
    those of the best client.

    Args:
        attackers: hostile clients to bear in a round, f >= 0; n >= 2 f + 3 must answer.
        keep: clients that are kept, >= 1; ``null`` keeps n - f (multi-Krum).
    """

    attackers: Natural = 1
    keep: Count | None = 1

    @property
    def _name(self) -> str:
        return "krum" if self.keep == 1 else "multi_krum"

    @property
    def min_answers(self) -> int:
        """Blanchard et al.'s ``2 f + 2 < n``."""
        return 2 * self.attackers + 3

    def after_refusals(self, refused: int, answers: int) -> Krum:
        """See :meth:`strategies.core.aggregation.Mean.after_refusals`."""
        return replace(self, attackers=max(0, self.attackers - refused, self._borne(answers)))

    def _borne(self, count: int) -> int:
        return min(self.attackers, (count - 3) // 2)

    def combine(self, states: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> dict[str, Tensor]:  # noqa: ARG002
        """The kept clients' states, averaged."""
        self._need(states)
        chosen = self._best(_distances(states))
        return average([states[index] for index in chosen], [1.0] * len(chosen))

    def _best(self, distances: Tensor) -> list[int]:
        """Indices of the kept clients by their squared ``distances [n, n]``, the best first; of equals, the first."""
        count = len(distances)
        if count < 3:  # two clients are as far from each other as the other way round
            return list(range(count))
        attackers = self._borne(count)
        nearest = distances.clone().fill_diagonal_(torch.inf).sort(1).values[:, : count - attackers - 2]
        order = torch.sort(nearest.sum(1), stable=True).indices.tolist()
        return order[: count - attackers if self.keep is None else min(self.keep, count)]

    def _one(self, table: Tensor) -> Tensor:
        return table[self._chosen(table)].mean(0)

    def _chosen(self, table: Tensor) -> Tensor:
        return torch.tensor(self._best((table[:, None] - table).square().sum(2))).sort().values


def _distances(states: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """``[n, n]`` float64: squared distances between the states' floating-point tensors."""
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
