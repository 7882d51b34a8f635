"""How long an update may be: a longer one is scaled down to its bound, and the client still counts.

A hostile client can scale its update until it dominates the average. Norm clipping prevents that (Sun et al., "Can You
Really Backdoor Federated Learning?", 2019). Unlike refusal, it costs the honest client of a hard domain no more than a
shorter step.

The bound of a client is

    factor * max(median, usual) * ratio

- ``median`` is the median length of the exchange. Fewer than half of the clients cannot move it beyond honest lengths.
- ``usual`` is the median of the medians of the last :data:`MEMORY` exchanges of this kind, so that one exchange of
  short updates does not cut the next.
- ``ratio`` is the client's number of batches over the median number, at least 1, so that a small client has the bound
  of the others, and at most :data:`MAX_RATIO`, because the server cannot check how many samples a client has.

What a client sent earlier does not raise its bound: a client that behaves well for ten rounds and then turns hostile
would gain by it. A client that pushes in a harmful direction with updates within the bound is not found.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from common.errors import ConfigError
from common.prototypes import PrototypeSet
from common.round_settings import TrainSettings
from common.settings import RunSettings
from common.storage import GlobalState
from strategies.core.context import ServerContext
from strategies.core.exchange import Client, Update, UploadSpec

MIN_UPDATES = 3
"""Fewest updates that give a bound. With two, the median lies half-way to the hostile one."""

MEMORY = 5
"""Exchanges with medians that are remembered."""

MAX_RATIO = 2.0
"""Largest factor by which registered batches raise a bound."""

STILL = 0.02
"""The median counts as at least this share of the parameters' own norm. Otherwise, when most clients have converged, an
honest client that has not would be scaled."""

BLOCK_ELEMENTS = 2**20
"""Elements that are compared at a time: four MiB. Smaller ones cost more in calls than they save in the cache."""


@dataclass(frozen=True)
class Part:
    """Tensors of an update with one bound on their length.

    Args:
        holder: the field of the update.
        names: of the tensors in it.
        by_row: the length is that of the longest row, and each row is scaled by itself; otherwise it is the L2 norm of
            all tensors together.
        moved: the norm is that of their difference from the shared state.
    """

    holder: str
    names: tuple[str, ...] = ()
    by_row: bool = False
    moved: bool = False


class Excess(NamedTuple):
    """A part of an update that is too long.

    Args:
        length: the part's length.
        bound: the length that is accepted.
    """

    length: float
    bound: float


@dataclass
class Bounds:
    """Finds updates that are too long, and remembers the median lengths of earlier exchanges.

    Args:
        factor: >= 1, see the module. The factor is squared for everything except parameters, because statistics and
            prototypes differ in scale from domain to domain.
        medians: by exchange and part, ``[MEMORY]`` float64: the last exchanges' median lengths, newest last, 0 where
            there was none. A checkpoint must keep them.
    """

    factor: float
    medians: dict[str, Tensor] = field(default_factory=dict)

    def find(
        self, updates: Sequence[Update], state: GlobalState, expected: UploadSpec, server: ServerContext
    ) -> dict[str, dict[str, Excess]]:
        """Return every part that is too long, by client id and part; remember the medians of this exchange.

        The parts are

        - the parameters, by the norm of their difference from the shared state;
        - each tensor of running statistics by its own norm, not by its difference from the shared state, because
          statistics differ between domains from the first batch on. A variance stays positive when it is scaled;
        - prototypes, and tables with one row per sample, by the norm of the longest row;
        - further tensors, those of one net or kind together, by their norm.

        Integers have no length. A part that fewer than :data:`MIN_UPDATES` clients sent, or with median 0, has no
        bound.

        Args:
            updates: of all participants that passed the gate.
            state: the state that the participants were sent.
            expected: what the exchange's uploads carry.
            server: names of parameters, the training settings and the exchange's name.
        """
        batches: dict[str, int] = {}
        for update in updates:
            batches[update.client.id] = _batches(update.client, server.train)
        excesses: dict[str, dict[str, Excess]] = {}
        for name, part in _parts(expected, server).items():
            lengths: dict[Client, float] = {}
            for update in updates:
                if _has(update, part):
                    lengths[update.client] = _length(update, part, state)
            if len(lengths) < MIN_UPDATES:
                continue
            median = statistics.median(lengths.values())
            if name == "parameters":
                median = max(median, STILL * _norm([state.weights[each] for each in part.names]))
            if not median:
                continue
            for client, excess in self._compare(name, f"{server.exchange}/{name}", lengths, median, batches).items():
                excesses.setdefault(client, {})[name] = excess
        return excesses

    def _compare(
        self, name: str, key: str, lengths: Mapping[Client, float], median: float, batches: Mapping[str, int]
    ) -> dict[str, Excess]:
        """Return the clients that exceed their bounds on one part; remember the median under ``key``."""
        past = self.medians.setdefault(key, torch.zeros(MEMORY, dtype=torch.float64))
        usual = max(median, float(past.median()))  # MEMORY is odd, so this is the middle value
        self.medians[key] = torch.cat([past[1:], past.new_tensor([median])])
        usual_batches = statistics.median([batches[client.id] for client in lengths])
        factor = self.factor
        if name != "parameters":
            factor = self.factor**2
        excesses: dict[str, Excess] = {}
        for client, length in lengths.items():
            ratio = 1.0
            if name == "parameters":
                ratio = min(MAX_RATIO, max(1.0, batches[client.id] / usual_batches))
            bound = factor * usual * ratio
            if length > bound:
                excesses[client.id] = Excess(length, bound)
        return excesses

    def scale(
        self,
        update: Update,
        state: GlobalState,
        expected: UploadSpec,
        server: ServerContext,
        limits: Mapping[str, float],
    ) -> Update:
        """Return the update with each part that ``limits`` names scaled down to the length given there."""
        parts = _parts(expected, server)
        weights, extra, prototypes = dict(update.weights), dict(update.extra), update.prototypes
        for name, bound in limits.items():
            part = parts[name]
            if part.holder == "prototypes":
                vectors = _scaled_rows(prototypes.vectors, bound)
                prototypes = PrototypeSet(vectors, prototypes.labels, prototypes.weights)
                continue
            tensors = weights
            if part.holder == "extra":
                tensors = extra
            share = bound / _length(update, part, state)
            for each in part.names:
                if part.by_row:
                    tensors[each] = _scaled_rows(tensors[each], bound)
                elif part.moved:
                    tensors[each] = torch.lerp(state.weights[each], tensors[each], share)
                else:
                    tensors[each] = tensors[each] * share
        return replace(update, weights=weights, prototypes=prototypes, extra=extra)


def least_answers(settings: RunSettings) -> int:
    """Return how many answers ``rounds.outliers=clip`` needs; 0 for a row of tables that is a bound itself."""
    clips = settings.rounds.outliers == "clip" and settings.method.bound is None
    return MIN_UPDATES if clips else 0


def check_bounds(settings: RunSettings, client_count: int) -> None:
    """Refuse a bound in rounds that ask too few clients for one.

    Raises:
        ConfigError: the bound would protect nothing.
    """
    asked = settings.rounds.sampled(client_count)
    if asked < least_answers(settings):
        raise ConfigError(
            f"rounds.outliers=clip needs {MIN_UPDATES} answers a round and {asked} clients are asked, so no update "
            "would be bounded: take more clients, a larger rounds.participation, or rounds.outliers=off"
        )


def _parts(expected: UploadSpec, server: ServerContext) -> dict[str, Part]:
    """Return the parts that have a bound in an exchange, by the name that the record uses."""
    parts: dict[str, Part] = {}
    if expected.weights:
        trained = tuple(name for name in server.shared if name in server.parameters)
        if trained:
            parts["parameters"] = Part("weights", trained, moved=True)
        for name, tensor in server.shared.items():
            if name not in server.parameters and tensor.is_floating_point():
                parts[name] = Part("weights", (name,))
    if expected.prototypes:
        parts["prototypes"] = Part("prototypes", by_row=True)
    kinds: dict[str, list[str]] = {}
    for name, (dtype, shape) in expected.extra.items():
        if dtype.is_floating_point and all(isinstance(length, int) for length in shape):
            kinds.setdefault(re.split(r"[/.]", name)[0], []).append(name)
        elif dtype.is_floating_point:
            parts[f"{name} by row"] = Part("extra", (name,), by_row=True)
    for kind, names in kinds.items():
        parts[kind] = Part("extra", tuple(names))
    return parts


def _tensors(update: Update, part: Part) -> list[Tensor]:
    """Return the tensors of the update that belong to a part."""
    if part.holder == "prototypes":
        return [update.prototypes.vectors]
    tensors = update.weights
    if part.holder == "extra":
        tensors = update.extra
    return [tensors[name] for name in part.names]


def _has(update: Update, part: Part) -> bool:
    """Return whether the update has at least one number of the part."""
    return any(tensor.numel() for tensor in _tensors(update, part))


def _length(update: Update, part: Part, state: GlobalState) -> float:
    """Return the length of a part, as :class:`Part` defines it."""
    tensors = _tensors(update, part)
    if part.by_row:
        return float(_row_norms(tensors[0]).max())
    if part.moved:
        return _distance(tensors, [state.weights[name] for name in part.names])
    return _norm(tensors)


def _distance(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the L2 norm of all differences together.

    The differences are computed block by block, because allocating one as large as the model takes longer than
    computing it.
    """
    largest = max(tensor.numel() for tensor in tensors)
    difference = torch.empty(min(BLOCK_ELEMENTS, largest), device=tensors[0].device)
    squares = 0.0
    for tensor, other in zip(tensors, others, strict=True):
        blocks = tensor.reshape(-1).split(BLOCK_ELEMENTS)
        other_blocks = other.reshape(-1).split(BLOCK_ELEMENTS)
        for left, right in zip(blocks, other_blocks, strict=True):
            torch.sub(left, right, out=difference[: len(left)])
            squares += float(torch.linalg.vector_norm(difference[: len(left)])) ** 2
    return math.sqrt(squares)


def _norm(tensors: Sequence[Tensor]) -> float:
    """Return the L2 norm of all tensors together."""
    squares = 0.0
    for tensor in tensors:
        squares += float(torch.linalg.vector_norm(tensor)) ** 2
    return math.sqrt(squares)


def _row_norms(rows: Tensor) -> Tensor:
    """Return ``[n]``: the L2 norm of each row of ``rows [n, ...]``."""
    return torch.linalg.vector_norm(rows.unsqueeze(-1).flatten(1), dim=1)


def _scaled_rows(rows: Tensor, bound: float) -> Tensor:
    """Return ``rows``, those longer than ``bound`` scaled down to it; the other rows keep every bit."""
    norms = _row_norms(rows)
    shares = torch.where(norms > bound, bound / norms, torch.ones_like(norms))
    return rows * shares.view(-1, *[1] * (rows.ndim - 1))


def _batches(client: Client, train: TrainSettings) -> int:
    """Return the number of batches in one local epoch."""
    batches = math.ceil(client.samples / train.batch_size)
    if train.local_steps is not None:
        batches = min(batches, train.local_steps)
    return batches
