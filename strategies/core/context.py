"""The two sides of an exchange: what a method may use on the device and on the server."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from common.numerics import generator
from common.prototypes import PrototypeSet
from common.round_settings import TrainSettings
from strategies.core.aggregation import Mean
from strategies.core.exchange import Batch, Client, Measured


class Optimizer(Protocol):
    """What a step uses of an optimiser: PyTorch's have it, and :class:`client.optimizer.SGD`."""

    param_groups: list[dict[str, Any]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients, or set them to zero."""

    def step(self) -> object:
        """Take one step along the gradients."""


class ClientContext(Protocol):
    """The device's side of one exchange: what a method's client half may use. Implemented by the trainer."""

    model: nn.Module
    client: Client
    round: int
    rounds: int
    learning_rate: float
    """Learning rate of this round, as ``train.schedule`` gives it."""
    exchange: str
    seed: int
    device: torch.device
    train: TrainSettings
    class_count: int
    feature_size: int
    views: int
    phase: int
    """Position of the current phase in :meth:`Method.phases`, from 0."""
    batch: int
    """Position of the current batch in its local epoch, from 0."""
    weights: Mapping[str, Tensor]
    """Shared model state as received, on the device."""
    prototypes: PrototypeSet
    """Global prototypes as received, on the device; empty until the server has made some."""
    extra: Mapping[str, Tensor]
    """Further tensors as received, on the device."""
    kept: Mapping[str, Tensor]
    """The client's own named tensors from its last participation, on the device; empty at first."""
    optimizer: Optimizer
    data_root: str | None
    """Folder of this device's data, for methods that read more than its own split; ``None``: as configured."""

    @property
    def batches_per_epoch(self) -> int:
        """The number of batches of one local epoch, at most ``train.local_steps``."""

    def forward(self, images: Tensor, labels: Tensor) -> Batch:
        """Run a forward pass of the model in its current mode."""

    def backward(self, loss: Tensor) -> None:
        """Clear the gradients and differentiate ``loss``."""

    def frozen(self, name: str, weights: Mapping[str, Tensor] | None = None) -> nn.Module:
        """Return a copy of the model in evaluation mode that does not train, made once per exchange under ``name``.

        Without ``weights`` the copy is the model as it was when training began.
        """

    def reference(self) -> Mapping[str, Tensor]:
        """Return the trainable parameters by name as they were when training began: the w^t of proximal terms."""

    def cached(self, name: str, make: Callable[[], Any]) -> Any:
        """Return ``make()`` on the first call with ``name`` in this exchange, and the same object afterwards."""

    def make_optimizer(self, parameters: Iterable[nn.Parameter], rate: float = 1.0) -> Optimizer:
        """Return a new optimiser of the run's kind, with ``rate`` times the learning rate of this round.

        With SGD it has what :class:`Optimizer` has, and no more.
        """

    def generator(self, *purpose: str | int) -> torch.Generator:
        """Return random numbers keyed by (seed, purpose, round, client)."""

    def features(self, *, augmented: int = 0, training_mode: bool = False) -> tuple[Tensor, Tensor]:
        """Return features ``[N, D]`` and labels ``[N]`` of the whole training split in one pass without gradients.

        Rows are in the order of the split. If ``augmented`` > 0, features are averaged over this number of augmented
        views of each sample. In ``training_mode`` batches are shuffled and normalised with their own statistics, and
        the running statistics are updated.
        """

    def validate(self) -> Measured:
        """Score the model as it is on the client's validation samples, without training; it is left unchanged.

        Without ``protocol.validation`` it is scored on the client's training samples, not augmented.
        """

    def prepare(self, images: Tensor, draws: torch.Generator | None = None) -> Tensor:
        """Return uint8 images ``[B, 3, H, W]`` as model input: augmented with ``draws``, or as for testing."""

    def batches(self, *purpose: str | int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the training batches of one epoch: images as model input, augmented, and labels.

        The order is keyed by ``purpose``.
        """


@dataclass(frozen=True)
class ServerContext:
    """The server's side of one exchange: what a method's server half may use in addition to state and updates.

    Every exchange has an object of its own.
    """

    rounds: int
    seed: int
    class_count: int
    feature_size: int
    client_count: int
    """Clients of the federation, registered or not."""
    train: TrainSettings
    device: torch.device
    shared: Mapping[str, Tensor]
    """An example of the shared model state: names, shapes and dtypes (the initial state)."""
    parameters: frozenset[str]
    """Which names of the shared state are trainable parameters; the others are buffers."""
    new_model: Callable[[], nn.Module]
    """Makes a model of the run's architecture with its initial weights."""
    aggregation: Mean
    """How updates are combined: the average, or a robust rule in its place (conf/aggregation/)."""
    clients: Sequence[Client] = ()
    """All registered clients, by id."""
    round: int = 0
    exchange: str = "train"
    scoring: bool = True
    """Whether devices score the model in this exchange."""
    largest_share: float = 1.0
    """A client's largest share of an average (``rounds.largest_share``), for methods that make shares of their own."""

    def generator(self, *purpose: str | int) -> torch.Generator:
        """Return random numbers keyed by (seed, purpose, round)."""
        return generator(self.seed, "server", *purpose, self.round)
