"""What passes between a method and the machinery: batches, losses, uploads, and the two sides of an exchange.

The data are plain. :class:`Local` and :class:`Server` are what the trainer and the round loop offer to a method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from common.prototypes import PrototypeSet
from common.settings import TrainSettings
from strategies.aggregation import Mean

PrototypeMode = Literal["none", "last_epoch_running", "post_eval", "own"]
"""Where local prototypes come from: nowhere; class means as running sums over the last local epoch (training mode,
before each step); class means of a separate pass in evaluation mode after training; the method's own ``upload``."""


Shape = tuple[int | Literal["samples"] | None, ...]
"""Lengths of a tensor that is expected; see :class:`Expected`."""


@dataclass(frozen=True)
class Client:
    """What the server knows of a client since its registration.

    Args:
        id: ``domain-index``, unique in the federation.
        domain: the domain its data come from.
        samples: training samples N_k.
        class_counts: training samples per class, ``K`` numbers.
        index: position among the federation's clients, by id; 0 .. C-1.
        client_count: number of clients C in the federation.
    """

    id: str
    domain: str
    samples: int
    class_counts: tuple[int, ...]
    index: int = 0
    client_count: int = 1


@dataclass
class Batch:
    """One batch after the forward pass.

    With V views per sample, rows are view-major: row ``v * B + i`` is view ``v`` of sample ``i``; labels are repeated.

    Args:
        images: ``[V*B, 3, H, W]`` float, augmented and normalised.
        labels: ``[V*B]`` int64.
        features: ``[V*B, D]``, the classifier's input.
        logits: ``[V*B, K]``.
        views: V >= 1.
        extra: what else :meth:`Method.compute` gave, by name, one row per image.
    """

    images: Tensor
    labels: Tensor
    features: Tensor
    logits: Tensor
    views: int = 1
    extra: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass
class Losses:
    """A batch's loss terms by name, each already multiplied by its weight; ``total`` is what is differentiated."""

    terms: dict[str, Tensor]

    @property
    def total(self) -> Tensor:
        """The sum of the terms in the order they were given."""
        values = list(self.terms.values())
        total = values[0]
        for value in values[1:]:
            total = total + value
        return total


@dataclass(frozen=True)
class Phase:
    """A stretch of local training in which only some parameters train.

    Args:
        epochs: local epochs, >= 1.
        trainable: whether the parameter of this name trains; ``None`` trains all.
        freeze_statistics: batch-norm layers of which nothing trains normalise with their running statistics and leave
            them alone; otherwise these move in frozen layers too.
        rate: factor on the learning rate, > 0.
    """

    epochs: int
    trainable: Callable[[str], bool] | None = None
    freeze_statistics: bool = False
    rate: float = 1.0


@dataclass(frozen=True, eq=False)
class Download:
    """What the server sends to one client in one exchange."""

    weights: Mapping[str, Tensor] = field(default_factory=dict)
    prototypes: PrototypeSet | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Upload:
    """What a client answers, and what it keeps.

    Args:
        weights: model state to send; ``None`` sends the shared part of the trained model.
        prototypes: prototype set to send.
        extra: further tensors to send.
        local: named tensors to keep on the device besides the unshared part of the model. Kept tensors that are not
            named here stay as they were.
    """

    weights: Mapping[str, Tensor] | None = None
    prototypes: PrototypeSet | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    local: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Update:
    """A client's upload as the server's half sees it, after the gate."""

    client: Client
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    prototypes: PrototypeSet = field(default_factory=PrototypeSet.empty)
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Training samples of the client, as registered."""
        return self.client.samples


@dataclass(frozen=True)
class Expected:
    """What an exchange's uploads must carry; the gate refuses anything else. See also :meth:`Method.inspect`.

    Args:
        weights: the whole shared model state, or nothing.
        prototypes: a prototype set.
        most_rows: largest number of prototype rows per class; ``None`` allows one per training sample.
        extra: dtype and shape of each further tensor by name; ``None`` in a shape allows any length, ``samples`` is
            the number of training samples that the client registered.
    """

    weights: bool = True
    prototypes: bool = False
    most_rows: int | None = 1
    extra: Mapping[str, tuple[torch.dtype, Shape]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Trained:
    """What local training left.

    Args:
        prototypes: local class means, as the method's ``prototypes_from`` says; empty for ``none`` and ``own``.
        steps: optimiser steps taken.
        losses: mean of each loss term over the last epoch.
    """

    prototypes: PrototypeSet
    steps: int
    losses: Mapping[str, float]


class Local(Protocol):
    """The device's side of one exchange: what a method's client half may use. Implemented by the trainer."""

    model: nn.Module
    client: Client
    round: int
    rounds: int
    exchange: str
    seed: int
    device: torch.device
    train: TrainSettings
    class_count: int
    feature_size: int
    views: int
    phase: int
    """Which of :meth:`Method.phases` is under way, from 0."""
    batch: int
    """Position of the present batch in its local epoch, from 0."""
    weights: Mapping[str, Tensor]
    """Shared model state as received, on the device."""
    prototypes: PrototypeSet
    """Global prototypes as received, on the device; empty before the first."""
    extra: Mapping[str, Tensor]
    """Further tensors as received, on the device."""
    kept: Mapping[str, Tensor]
    """The client's own named tensors from its last participation, on the device; empty at first."""
    optimizer: torch.optim.Optimizer
    data_root: str | None
    """Where this device's data are, for methods that read more than its own split; ``None`` is the configuration's."""

    def forward(self, images: Tensor, labels: Tensor) -> Batch:
        """A forward pass of the model in its present mode."""

    def backward(self, loss: Tensor) -> None:
        """Clear the gradients and differentiate ``loss``."""

    def frozen(self, name: str, weights: Mapping[str, Tensor] | None = None) -> nn.Module:
        """A copy of the model in evaluation mode that does not train, made once per exchange under ``name``.

        Without ``weights`` it is the model as it was when training began.
        """

    def reference(self) -> Mapping[str, Tensor]:
        """The trainable parameters by name as they were when training began: the w^t of proximal terms."""

    def cached(self, name: str, make: Callable[[], Any]) -> Any:
        """``make()`` the first time ``name`` is asked for in this exchange, the same object afterwards."""

    def make_optimizer(self, parameters: Iterable[nn.Parameter], rate: float = 1.0) -> torch.optim.Optimizer:
        """A fresh optimiser of the run's kind, with ``rate`` times its learning rate."""

    def generator(self, *purpose: str | int) -> torch.Generator:
        """Random numbers keyed by (seed, purpose, round, client)."""

    def features(self, *, augmented: int = 0, training_mode: bool = False) -> tuple[Tensor, Tensor]:
        """Features ``[N, D]`` and labels ``[N]`` of the whole training split in one pass without gradients.

        Rows are in the order of the split. ``augmented`` > 0 passes over so many augmented views per sample instead,
        averaged per sample. In ``training_mode`` shuffled training batches are normalised with their own statistics,
        and the running statistics move.
        """

    def prepare(self, images: Tensor, draws: torch.Generator | None = None) -> Tensor:
        """uint8 images ``[B, 3, H, W]`` as the model takes them: augmented with ``draws``, or as for testing."""

    def batches(self, *purpose: str | int) -> Iterator[tuple[Tensor, Tensor]]:
        """Training batches of one epoch: images, augmented and formatted, and labels; order keyed by ``purpose``."""


class Server(Protocol):
    """The server's side of one exchange: what a method's server half may use besides state and updates."""

    round: int
    rounds: int
    exchange: str
    seed: int
    class_count: int
    feature_size: int
    client_count: int
    """Clients of the federation, registered or not."""
    clients: Sequence[Client]
    """All registered clients, by id."""
    train: TrainSettings
    device: torch.device
    shared: Mapping[str, Tensor]
    """An example of the shared model state: names, shapes and dtypes (the initial state)."""
    parameters: frozenset[str]
    """Which names of the shared state are trainable parameters; the others are buffers."""
    aggregation: Mean
    """How uploads become one: the average, or a robust rule in its place (conf/aggregation/)."""

    def generator(self, *purpose: str | int) -> torch.Generator:
        """Random numbers keyed by (seed, purpose, round)."""

    def new_model(self) -> nn.Module:
        """A model of the run's architecture with its initial weights."""


def feature_size(model: nn.Module) -> int:
    """D of a model that returns (features, logits)."""
    size: Any = model.feature_size
    return int(size)
