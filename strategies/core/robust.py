"""Aggregation rules that tolerate some hostile clients, for weights and prototypes (conf/aggregation/).

Under them all clients count the same, because the server cannot check how many samples a device has. They assume that
honest updates lie close together, which is less true of clients of different domains; docs/results/poisoning.md shows
where they cost more accuracy than they save.

Flower has functions of these names on lists of numpy arrays (``flwr.server.strategy.aggregate``). The tests compare
with them. They are not used here, because methods work on named tensors without Flower, clients send different numbers
of prototypes, and Flower's multi-Krum weighs the chosen clients by the samples that they registered.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from common.config import AtLeastTwo, BelowOne, Count, Fraction, Natural, Positive, checked
from common.errors import ConfigError
from common.numerics import generator
from common.prototypes import PrototypeSet, class_means
from strategies.core.aggregation import Mean, RuleContext, average, number_by_number

STATISTICS = ("running_mean", "running_var")
"""Ends of the names of batch normalisation's running statistics."""


@checked
class RobustRule(Mean, ABC):
    """Base of the robust rules: prototypes are combined class by class, with one row per client.

    A client's row is the mean of its rows of the class. If fewer clients hold a class than the rule needs, the rule
    tolerates as many hostile ones among them as it can; the row of a single client is used as it is.
    """

    robust: ClassVar[bool] = True

    def after_refusals(self, refused: int, answers: int) -> RobustRule:  # noqa: ARG002
        """See :meth:`strategies.core.aggregation.Mean.after_refusals`."""
        return self

    def in_exchange(self, context: RuleContext) -> RobustRule:  # noqa: ARG002
        """See :meth:`strategies.core.aggregation.Mean.in_exchange`."""
        return self

    def check(self, method: str, averages: bool, participants: int) -> None:
        """See :meth:`strategies.core.aggregation.Mean.check`."""
        if not averages:
            raise ConfigError(
                f"method={method}: the server does not only average what clients send, so "
                f"aggregation={self._name} would not protect it; set aggregation=mean"
            )
        if participants < self.min_participants:
            raise ConfigError(
                f"aggregation={self._name} needs {self.min_participants} answers a round "
                f"and {participants} clients are asked: take more clients, a larger rounds.participation, "
                "a smaller aggregation.attackers, or aggregation=mean"
            )

    @property
    def min_participants(self) -> int:
        """Fewest clients to ask in a round; more than ``min_answers`` if the rule can do with fewer answers."""
        return self.min_answers

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
            if name.endswith(STATISTICS):
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


@checked
class CenteredClipping(RobustRule):
    """The centre plus the mean of the clients' differences from it, each scaled down to a radius.

    Karimireddy, He and Jaggi, Learning from History for Byzantine Robust Optimization, ICML 2021, equation (CC):

        v <- v + 1/n * sum_i (x_i - v) * min(1, r / |x_i - v|)

    x_i is a client's model. The centre starts from the model that the clients were sent, plus ``momentum`` times the
    step of the last exchange. A checkpoint keeps that step. The radius r is ``radius`` times the median of the
    distances |x_i - v|, because no fixed length fits all networks and rounds. Running statistics have a radius of their
    own, so that they do not hide the parameters. Counters are the lower median.

    Tensors that are not the model, and class means, have no such history: their centre starts from the coordinate-wise
    median. If a method clusters rows, it uses all of them: the rows of a client are moved towards the class's centre by
    as much as their mean is scaled down.

    Args:
        radius: of the clipping, as a multiple of the median distance, > 0. With a large one the rule is the mean.
        iterations: steps of the equation, >= 1.
        momentum: share of the last step that the centre starts with, in [0, 1).
    """

    radius: Positive = 1.0
    iterations: Count = 1
    momentum: BelowOne = 0.9

    @property
    def _name(self) -> str:
        return "centered_clipping"

    @property
    def min_answers(self) -> int:
        """Three, because of two answers both have the median distance."""
        return 3

    def in_exchange(self, context: RuleContext) -> RobustRule:
        """Return the rule with the centre of the exchange."""
        return _CenteredClippingInExchange(**vars(self), context=context)

    def combine(self, states: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> dict[str, Tensor]:  # noqa: ARG002
        """Clip about the coordinate-wise median."""
        self._need(states)
        centre: dict[str, Tensor] = {}
        for name, first in states[0].items():
            if first.is_floating_point():
                parts = [state[name] for state in states]
                centre[name] = number_by_number(parts, _middle).to(first.dtype)
        return self._about(centre, states)

    def _about(self, centre: Mapping[str, Tensor], states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the combined state, with the centre to start from, which has the floating-point tensors."""
        combined: dict[str, Tensor] = {}
        parameters: list[str] = []
        statistics: list[str] = []
        for name, first in states[0].items():
            if not first.is_floating_point():
                combined[name] = torch.stack([state[name] for state in states]).median(0).values
            elif name.endswith(STATISTICS):
                statistics.append(name)
            else:
                parameters.append(name)
        for names in (parameters, statistics):
            group = {name: centre[name] for name in names}
            for _ in range(self.iterations):
                factors = self._factors(_lengths(states, group))
                group = average([group, *states], factors.tolist()) if names else group
            combined.update(group)
        return {name: combined[name] for name in states[0]}

    def _factors(self, distances: Tensor) -> Tensor:
        """Return the shares ``[1 + n]`` of the centre and the clients, from the clients' ``distances [n]`` to it."""
        radius = self.radius * _middle(distances)
        factors = (radius / distances.clamp(min=1e-30)).clamp(max=1.0) / len(distances)
        return torch.cat([1.0 - factors.sum(0, keepdim=True), factors]).clamp(min=0.0)

    def _one(self, table: Tensor) -> Tensor:
        centre = _middle(table)
        for _ in range(self.iterations):
            factors = self._factors(torch.linalg.vector_norm(table - centre, dim=1))
            centre = factors @ torch.cat([centre[None], table])
        return centre

    def rows(self, sets: Sequence[PrototypeSet]) -> PrototypeSet:
        """Return all rows; those of clients far from the class's centre are moved towards it."""
        vectors = [part.vectors.clone() for part in sets]
        for label, (holders, table) in _tables(sets).items():
            centre = self._one(table)
            distances = torch.linalg.vector_norm(table - centre, dim=1)
            radius = self.radius * _middle(distances)
            for holder, distance in zip(holders, distances, strict=True):
                if distance > radius:
                    own = sets[holder].labels == label
                    far = vectors[holder][own].double()
                    vectors[holder][own] = torch.lerp(centre, far, radius / distance).to(vectors[holder].dtype)
        parts: list[PrototypeSet] = []
        for moved, part in zip(vectors, sets, strict=True):
            parts.append(PrototypeSet(moved, part.labels, part.weights))
        return PrototypeSet.concatenate(parts)

    def _chosen(self, table: Tensor) -> Tensor:
        return torch.arange(len(table))


@dataclass(frozen=True, eq=False)
class _CenteredClippingInExchange(CenteredClipping):
    """Centred clipping that knows the model that clients were sent, and the step of the last exchange."""

    context: RuleContext = field(kw_only=True)

    def combine_models(self, states: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> dict[str, Tensor]:  # noqa: ARG002
        """Clip about the model that was sent plus the momentum, and remember the step."""
        self._need(states)
        sent, memory, exchange = self.context.sent, self.context.memory, self.context.exchange
        centre: dict[str, Tensor] = {}
        for name, first in states[0].items():
            if first.is_floating_point():
                centre[name] = sent[name]
                if f"{exchange}/{name}" in memory and not name.endswith(STATISTICS):
                    centre[name] = sent[name] + self.momentum * memory[f"{exchange}/{name}"]
        combined = self._about(centre, states)
        for name in centre:
            if self.momentum and not name.endswith(STATISTICS):
                memory[f"{exchange}/{name}"] = combined[name] - sent[name]
        return combined


def _lengths(states: Sequence[Mapping[str, Tensor]], centre: Mapping[str, Tensor]) -> Tensor:
    """Return ``[n]`` float64: the distance of each state from the centre, over the centre's tensors."""
    squares = torch.zeros(len(states), dtype=torch.float64)
    for position, state in enumerate(states):
        for name, middle in centre.items():
            squares[position] += (state[name].double() - middle.double()).square().sum().cpu()
    return squares.sqrt()


@checked
class Bucketing(RobustRule):
    """A robust rule over the means of small groups of clients, which are drawn anew in every exchange.

    Karimireddy, He and Jaggi, Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing, ICLR 2022. The means
    of ``size`` clients differ less than the clients do, so that the rule leaves out less of honest, unusual clients. A
    group with a hostile client is hostile as a whole. The groups follow from the run's seed, the round and the
    exchange. The last group is smaller if ``size`` does not divide the number of clients. Groups are smaller if too few
    updates are left for as many groups as the rule needs; otherwise a hostile client of five could stop the federation
    by being left out. Counters are the lower median.

    Args:
        size: clients in a group at most, >= 2.
        rule: the rule over the groups' means.
    """

    size: AtLeastTwo = 2
    rule: RobustRule = field(default_factory=GeometricMedian)

    def __post_init__(self) -> None:
        if isinstance(self.rule, Bucketing):
            raise ConfigError("aggregation.rule: bucketing cannot be the rule of bucketing; choose another one")

    @property
    def min_answers(self) -> int:
        """Answers that the rule needs, with groups of one client."""
        return self.rule.min_answers

    @property
    def min_participants(self) -> int:
        """Clients that give as many groups of ``size`` as the rule needs."""
        return self.size * (self.rule.min_answers - 1) + 1

    def after_refusals(self, refused: int, answers: int) -> Bucketing:
        """See :meth:`strategies.core.aggregation.Mean.after_refusals`; each refused client spoils one group."""
        return replace(self, rule=self.rule.after_refusals(refused, -(-answers // self.size)))

    def in_exchange(self, context: RuleContext) -> RobustRule:
        """Return the rule with the groups of the exchange."""
        return _BucketingInExchange(size=self.size, rule=self.rule.in_exchange(context), context=context)

    def combine(self, states: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> dict[str, Tensor]:  # noqa: ARG002
        """Combine the means of the groups."""
        self._need(states)
        means = self._means(states)
        return self.rule.combine(means, [1.0] * len(means))

    def combine_models(self, states: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> dict[str, Tensor]:  # noqa: ARG002
        """Combine the means of the groups of models."""
        self._need(states)
        means = self._means(states)
        return self.rule.combine_models(means, [1.0] * len(means))

    def _generator(self) -> torch.Generator:
        return generator(0, "bucketing")

    def _groups(self, count: int, size: int) -> list[list[int]]:
        """Return the groups of ``count`` clients, each in ascending order."""
        order = torch.randperm(count, generator=self._generator()).tolist()
        groups: list[list[int]] = []
        for start in range(0, count, size):
            groups.append(sorted(order[start : start + size]))
        return groups

    def _fitting_size(self, count: int) -> int:
        """Return the largest group size up to ``size`` with which ``count`` clients give the groups the rule needs."""
        size = self.size
        while size > 1 and math.ceil(count / size) < self.rule.min_answers:
            size -= 1
        return size

    def _means(self, states: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        means: list[dict[str, Tensor]] = []
        for group in self._groups(len(states), self._fitting_size(len(states))):
            means.append(average([states[position] for position in group], [1.0] * len(group)))
        return means

    def _one(self, table: Tensor) -> Tensor:
        rows: list[Tensor] = []
        for group in self._groups(len(table), self.size):
            rows.append(table[group].mean(0))
        return self.rule._one(torch.stack(rows))

    def _chosen(self, table: Tensor) -> Tensor:
        groups = self._groups(len(table), self.size)
        rows = torch.stack([table[group].mean(0) for group in groups])
        chosen: list[int] = []
        for position in self.rule._chosen(rows).tolist():
            chosen.extend(groups[position])
        return torch.tensor(sorted(chosen))


@dataclass(frozen=True, eq=False)
class _BucketingInExchange(Bucketing):
    """Bucketing with the groups of one exchange."""

    context: RuleContext = field(kw_only=True)

    def _generator(self) -> torch.Generator:
        return generator(self.context.seed, "bucketing", self.context.exchange, self.context.round)
