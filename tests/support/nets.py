"""For methods that train nets on features: a server half with models and random numbers, and their training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from support.halves import CLASSES, FEATURES, SIZES, Half
from support.own_states import own_state
from support.runs import Recorded, Run
from torch import Tensor, nn

from common.data.batches import split_batches
from common.models.base import Model, initialised
from common.numerics import generator
from common.prototypes import PrototypeSet
from common.round_settings import TrainSettings
from server.run.checkpoint import Checkpoints
from strategies.core.method import Client, Update

Matrix = list[list[float]]


@dataclass
class NetHalf(Half):
    """A server that can also build the run's model, here a linear head on features of four."""

    seed: int = 0
    train: TrainSettings = field(default_factory=lambda: TrainSettings(batch_size=8))

    def generator(self, *purpose: str | int) -> torch.Generator:
        return generator(self.seed, "server", *purpose, self.round)

    def new_model(self) -> nn.Module:
        with initialised(self.seed, "initialisation"):
            return Model(nn.Identity(), nn.Linear(FEATURES, CLASSES), FEATURES, CLASSES)


def net_update(
    index: int, prototypes: PrototypeSet | None = None, counts: Sequence[int] = (), **extra: Tensor
) -> Update:
    """What client ``index`` of three sent: it has as many samples as ``counts`` say, or its features, or as usual."""
    held = tuple(counts) or (len(extra.get("features", range(SIZES[index]))), 0, 0)
    client = Client(f"c-{index}", f"c{index}", sum(held), held, index, len(SIZES))
    return Update({}, prototypes or PrototypeSet.empty(FEATURES), extra, client=client)


def numbers(tensor: Tensor) -> Matrix:
    """Rows as Python floats."""
    rows: Matrix = tensor.detach().double().tolist()
    return rows


def epochs(
    count: int, rows: int, batch_size: int, draws: torch.Generator, *, single: bool = True
) -> Iterator[list[list[int]]]:
    """The batches of each epoch, from the draws that the net training makes; ``single`` keeps a batch of one."""
    for _ in range(count):
        order = torch.randperm(rows, generator=draws)
        yield [batch.tolist() for batch in split_batches(order, batch_size, "keep", single=single)]


def epoch(
    net: nn.Module, optimizer: torch.optim.Optimizer, features: Tensor, labels: Tensor, batches: list[list[int]]
) -> None:
    """One pass of the optimiser over the rows in the order of ``batches``, on the mean cross-entropy of each."""
    for rows in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(features[rows]), labels[rows]).backward()
        optimizer.step()


def unit(row: Sequence[float]) -> list[float]:
    length = max(math.sqrt(sum(x * x for x in row)), 1e-12)
    return [x / length for x in row]


def weighted_means(
    sets: Sequence[PrototypeSet], scale: Callable[[Sequence[float]], list[float]]
) -> Mapping[int, list[float]]:
    """Per class ``sum_k n_k scale(m_k) / sum_k n_k`` in loops over the clients' class means."""
    result = {}
    for label in sorted({label for part in sets for label in part.labels.tolist()}):
        total, mass = [0.0] * sets[0].feature_size, 0.0
        for part in sets:
            for vector, own, weight in zip(
                numbers(part.vectors), part.labels.tolist(), part.weights.tolist(), strict=True
            ):
                if own == label:
                    mass += weight
                    total = [t + weight * x for t, x in zip(total, scale(vector), strict=True)]
        result[label] = [t / mass for t in total]
    return result


def class_means_of(*rows: tuple[int, float, int]) -> PrototypeSet:
    """One made-up class mean for each (label, weight, key)."""
    vectors = torch.stack([torch.rand(FEATURES, generator=generator(0, "means", key)) * 3 for _, _, key in rows])
    return PrototypeSet(vectors, torch.tensor([r[0] for r in rows]), torch.tensor([r[1] for r in rows]))


def trained(done: Run, exchange: str | None = None) -> list[Recorded]:
    """The messages that asked for training, or those of one exchange."""
    asked = [item for item in done.messages if item.request.train]
    return [item for item in asked if exchange in (None, item.request.exchange)]


def shared_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of the last checkpoint of the run in ``folder``."""
    checkpoint = Checkpoints(folder / "checkpoint").load()
    assert checkpoint is not None
    return dict(checkpoint.state.weights)


def kept(folder: Path) -> dict[str, dict[str, Tensor]]:
    """What each client of the run in ``folder`` keeps, by client."""
    found = (path for of_run in (folder / "clients").glob("*") for path in of_run.iterdir())
    return {path.name: own_state(path) for path in found}
