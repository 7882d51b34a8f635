"""A method's server half without a federation: made-up clients, their updates, and the server they report to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from common.numerics import generator
from common.prototypes import PrototypeSet
from common.round_settings import TrainSettings
from common.storage import GlobalState
from strategies.core.aggregation import Mean
from strategies.core.method import Client, Method, Update

CLASSES, FEATURES = 3, 4
SIZES = (10, 30, 20)
COUNTER = "norm.num_batches_tracked"
PARAMETERS = frozenset({"layer.weight", "layer.bias"})
BUFFERS = frozenset({"norm.running_mean", COUNTER})


def model_state(*key: str | int) -> dict[str, Tensor]:
    """Two parameters, a statistic and a counter, of random values."""
    draws = generator(0, "halves", *key)
    return {
        "layer.weight": torch.randn(3, 2, generator=draws),
        "layer.bias": torch.randn(3, generator=draws),
        "norm.running_mean": torch.randn(3, generator=draws),
        "norm.running_var": torch.rand(3, generator=draws) + 0.5,
        COUNTER: torch.tensor(4),
    }


def clients(sizes: Sequence[int] = SIZES) -> list[Client]:
    return [Client(f"c-{i}", f"c{i}", size, (size, 0, 0), i, len(sizes)) for i, size in enumerate(sizes)]


@dataclass
class Half:
    """Implements :class:`strategies.core.method.ServerContext` as far as the methods under test look at it."""

    clients: Sequence[Client] = field(default_factory=clients)
    client_count: int = len(SIZES)
    shared: Mapping[str, Tensor] = field(default_factory=lambda: model_state("initial"))
    parameters: frozenset[str] = PARAMETERS
    class_count: int = CLASSES
    feature_size: int = FEATURES
    exchange: str = "train"
    scoring: bool = True
    round: int = 1
    rounds: int = 10
    train: TrainSettings = field(default_factory=TrainSettings)
    aggregation: Mean = field(default_factory=Mean)
    largest_share: float = 1.0


@dataclass
class LossSide:
    """Implements :class:`strategies.core.method.ClientContext` as far as the prototype losses look at it."""

    prototypes: PrototypeSet
    round: int = 1
    rounds: int = 10

    def cached(self, name: str, make: Any) -> Any:
        return make()


def updates(
    number: int = 1,
    who: Sequence[int] = (0, 1, 2),
    prototypes: Mapping[int, PrototypeSet] | None = None,
    extra: Mapping[int, Mapping[str, Tensor]] | None = None,
) -> list[Update]:
    """Round ``number``'s updates of the clients at positions ``who``, with random weights."""
    everyone = clients()
    return [
        Update(
            model_state("client", number, index),
            (prototypes or {}).get(index, PrototypeSet.empty(FEATURES)),
            (extra or {}).get(index, {}),
            client=everyone[index],
        )
        for index in who
    ]


def run_server(method: Method, rounds: Sequence[Sequence[Update]], server: Any = None) -> list[GlobalState]:
    """The states after each of ``rounds``, the initial one first."""
    server = server or Half()
    states = [method.initial_state(server.shared, server)]
    for sent in rounds:
        states.append(method.aggregate(states[-1], sent, server))
    return states


def elements(tensor: Tensor) -> list[float]:
    """The values as Python floats (float64), flat."""
    return [float(value) for value in tensor.flatten().tolist()]
