"""How long an update may be: what is longer is scaled down to the bound, and the client still counts.

A hostile client can scale its update until it outvotes everybody else in an average. Norm clipping takes that from it
(Sun et al., "Can You Really Backdoor Federated Learning?", 2019) and, unlike refusal, costs the honest client of a hard
domain no more than a shorter step.

The bound of a client is

    min(MOST * factor * usual, max(factor * middle * ratio, GROWTH * own))

with ``middle`` the median length of the exchange, which fewer than half of the clients cannot move beyond the honest
ones'; ``usual`` the larger of it and its own median over the last :data:`MEMORY` exchanges of the kind; ``ratio`` how
many more batches the client has than the median one, at most :data:`MAX_RATIO`, since the samples are its own word;
and ``own`` the median of the client's last :data:`MEMORY` lengths *as they were let in*.

So who moves as it did before is not cut when the others have finished, and a client that is long by nature is cut less
every third round until it is not cut at all. One that turns hostile is held to what it did before. History cannot be
talked up: what it holds was let in, so that a patient liar climbs as slowly as an honest client, by :data:`GROWTH` in
three rounds, and never beyond :data:`MOST` times the bound of the others. That much is the price of not telling a hard
domain from a hostile one.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from common.prototypes import PrototypeSet
from common.settings import TrainSettings
from common.storage.state import GlobalState
from strategies.core.context import ServerContext
from strategies.core.exchange import Client, Update, UploadSpec

LEAST = 3
"""With two answers the median lies half-way to the hostile one."""

MEMORY = 5
"""Exchanges that are remembered. Missing ones count as 0: an own length says nothing before the third."""

MOST = 4.0
"""How much its history may raise a client's bound above the others' at most."""

GROWTH = 1.25
"""How much longer than its own median length a client may go."""

MAX_RATIO = 2.0
"""How much more registered batches may raise the bound at most; the rest is earned by history."""

STILL = 0.02
"""Parameters that moved by less than this share of their own length did not go far, whatever the others did: near the
end, when most clients have learned all they can, an honest one that has not would stand out."""

BLOCK_ELEMENTS = 2**20
"""Elements that are compared at a time: four MiB. Smaller ones cost more in calls than they save in the cache."""


@dataclass(frozen=True)
class Part:
    """Tensors of an update whose length is bounded together.

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


@dataclass
class Bounds:
    """The lengths that are let in, and what they were in earlier exchanges.

    Args:
        factor: > 1, see the module; of everything but parameters a domain has a scale of its own, so that it is
            squared there.
        clients: clients of the federation, registered or not.
        lengths: by exchange and part, ``[clients + 1, MEMORY]`` float64: each client's last lengths at its index, in
            the last row the exchanges' medians; newest last, 0 where there was none. What a checkpoint must keep.
    """

    factor: float
    clients: int
    lengths: dict[str, Tensor] = field(default_factory=dict)

    def find(
        self, updates: Sequence[Update], state: GlobalState, expected: UploadSpec, server: ServerContext
    ) -> dict[str, dict[str, tuple[float, float, float]]]:
        """Length, bound and median of every part that is too long, by client id and part.

        Parts are the parameters, by their distance from the shared state; each tensor of running statistics, by its
        norm, since a domain's are its own from the first batch on, however near the others lie together (scaled, a
        variance stays positive); prototypes and tables with a row per sample, by the longest row; further tensors,
        those of one net or kind together, by their norm. Integers have no length. A part
        that fewer than :data:`LEAST` clients sent, or whose median is 0, gives no scale and is not bounded.

        Args:
            updates: of all participants that passed the gate.
            state: what they were sent.
            expected: what the exchange's uploads carry.
            server: names of parameters, the training settings and the exchange's name.
        """
        batches = {update.client.id: _batches(update.client, server.train) for update in updates}
        found: dict[str, dict[str, tuple[float, float, float]]] = {}
        for name, part in _parts(expected, server).items():
            measured = {update.client: _length(update, part, state) for update in updates if _sent(update, part)}
            if len(measured) < LEAST:
                continue
            middle = statistics.median(measured.values())
            if name == "parameters":
                middle = max(middle, STILL * _norm([state.weights[each] for each in part.names]))
            key = f"{server.exchange}/{name}"
            past = self.lengths.setdefault(key, torch.zeros(self.clients + 1, MEMORY, dtype=torch.float64))
            if not middle:
                continue
            own = past.median(1).values.tolist()  # of an odd number: the middle one
            most = MOST * max(middle, own[-1])
            factor = self.factor ** (1 if name == "parameters" else 2)
            usual = statistics.median(batches[client.id] for client in measured)
            past[-1] = _push(past[-1], middle)
            for client, length in measured.items():
                ratio = min(MAX_RATIO, max(1.0, batches[client.id] / usual)) if name == "parameters" else 1.0
                bound = min(factor * most, max(factor * middle * ratio, GROWTH * own[client.index]))
                past[client.index] = _push(past[client.index], min(length, bound))
                if length > bound:
                    found.setdefault(client.id, {})[name] = (length, bound, middle)
        return found

    def clip(
        self, update: Update, state: GlobalState, expected: UploadSpec, server: ServerContext, most: Mapping[str, float]
    ) -> Update:
        """The update with the parts that ``most`` names scaled down to the lengths that it gives."""
        parts = _parts(expected, server)
        weights, extra, prototypes = dict(update.weights), dict(update.extra), update.prototypes
        for name, bound in most.items():
            part = parts[name]
            if part.holder == "prototypes":
                prototypes = PrototypeSet(_short_rows(prototypes.vectors, bound), prototypes.labels, prototypes.weights)
            elif part.by_row:
                extra |= {each: _short_rows(extra[each], bound) for each in part.names}
            else:
                share = bound / _length(update, part, state)
                if part.moved:
                    weights |= {each: torch.lerp(state.weights[each], weights[each], share) for each in part.names}
                else:
                    held = weights if part.holder == "weights" else extra
                    held |= {each: held[each] * share for each in part.names}
        return replace(update, weights=weights, prototypes=prototypes, extra=extra)


def _parts(expected: UploadSpec, server: ServerContext) -> dict[str, Part]:
    """What is bounded in an exchange, by the words that the record uses."""
    parts: dict[str, Part] = {}
    if expected.weights:
        trained = tuple(name for name, tensor in server.shared.items() if name in server.parameters)
        parts |= {"parameters": Part("weights", trained, moved=True)} if trained else {}
        parts |= {
            name: Part("weights", (name,))
            for name, tensor in server.shared.items()
            if name not in server.parameters and tensor.is_floating_point()
        }
    if expected.prototypes:
        parts["prototypes"] = Part("prototypes", by_row=True)
    kinds: dict[str, list[str]] = {}
    for name, (dtype, shape) in expected.extra.items():
        if dtype.is_floating_point and all(isinstance(length, int) for length in shape):
            kinds.setdefault(re.split(r"[/.]", name)[0], []).append(name)
        elif dtype.is_floating_point:
            parts[f"{name} by row"] = Part("extra", (name,), by_row=True)
    return parts | {kind: Part("extra", tuple(names)) for kind, names in kinds.items()}


def _sent(update: Update, part: Part) -> bool:
    if part.holder == "prototypes":
        return len(update.prototypes) > 0
    return any(getattr(update, part.holder)[name].numel() for name in part.names)


def _length(update: Update, part: Part, state: GlobalState) -> float:
    if part.by_row:
        rows = update.prototypes.vectors if part.holder == "prototypes" else update.extra[part.names[0]]
        return float(_row_norms(rows).max())
    if part.moved:
        return _distance([(update.weights[name], state.weights[name]) for name in part.names])
    return _norm([getattr(update, part.holder)[name] for name in part.names])


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


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(torch.linalg.vector_norm(tensor)) ** 2 for tensor in tensors))


def _row_norms(rows: Tensor) -> Tensor:
    """``[n]``: the L2 norm of each row, whatever its shape."""
    return torch.linalg.vector_norm(rows.flatten(1) if rows.ndim > 1 else rows[:, None], dim=1)


def _short_rows(rows: Tensor, bound: float) -> Tensor:
    """``rows`` with those longer than ``bound`` scaled to it; the others keep every bit."""
    norms = _row_norms(rows)
    shares = torch.where(norms > bound, bound / norms, torch.ones_like(norms))
    return rows * shares.view(-1, *[1] * (rows.ndim - 1))


def _push(past: Tensor, newest: float) -> Tensor:
    return torch.cat([past[1:], past.new_tensor([newest])])


def _batches(client: Client, train: TrainSettings) -> int:
    """Batches of one local epoch."""
    batches = math.ceil(client.samples / train.batch_size)
    return batches if train.local_steps is None else min(batches, train.local_steps)
