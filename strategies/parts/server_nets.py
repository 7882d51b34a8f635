"""Nets that train on features: ADCOL's discriminator, FedPall's classifier and amplifier, RUCR's classifier.

A server's net lives in ``GlobalState.extra`` as named tensors, its state under ``NAME/...`` and the momentum of its
optimiser under ``momentum/NAME/...``, so that it continues after a round or a crash.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from common.config import BelowOne, Count, NonNegative, Positive, checked
from common.data.batches import split_batches
from common.losses import cross_entropy
from common.models.base import MultilayerHead, initialised
from common.storage import under_prefix, with_prefix
from strategies.core.method import ClientContext, ServerContext, Update

MOMENTUM = "momentum/"


class Discriminator(MultilayerHead):
    """A net that predicts the client of a feature: ``D -> 512 -> 512 -> C``, batch norm and ReLU in between, no biases.

    FedPall's amplifier (ICCV 2025) and ADCOL's discriminator. For D = 2048 it has 1,314,816 parameters with 4 clients
    and 1,315,328 with 5. In training mode a batch needs two rows or more.
    """

    def __init__(self, feature_size: int, client_count: int, hidden_size: int = 512) -> None:
        super().__init__(feature_size, client_count, hidden_size, bias=False)


@checked
class NetTraining:
    """How a net trains on features: SGD, batches of the run's ``train.batch_size``.

    Args:
        epochs: passes over the features per round, >= 1 (FedPall and ADCOL: 3; 1 on Digits).
        learning_rate: > 0.
        momentum: in [0, 1); a server's net keeps its momentum from round to round.
        weight_decay: L2 coefficient, >= 0.
    """

    epochs: Count = 3
    learning_rate: Positive = 0.01
    momentum: BelowOne = 0.9
    weight_decay: NonNegative = 1e-5


def train_net(
    net: nn.Module,
    features: Tensor,
    labels: Tensor,
    training: NetTraining,
    draws: torch.Generator,
    *,
    batch_size: int,
    velocity: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Train ``net`` in place by cross-entropy, in its current mode.

    A last batch of one row joins the batch before it if the net has batch normalisation, which cannot train on it.

    Args:
        net: ``[B, D]`` to logits.
        features: ``[N, D]`` float32.
        labels: ``[N]`` int64.
        training: the optimiser's settings.
        draws: shuffles the rows.
        batch_size: rows per batch.
        velocity: momentum so far, by parameter name; ``None`` starts at zero.

    Returns:
        The momentum afterwards, by parameter name; zeros where nothing trained.
    """
    named = dict(net.named_parameters())
    optimizer = torch.optim.SGD(
        named.values(), lr=training.learning_rate, momentum=training.momentum, weight_decay=training.weight_decay
    )
    for name, parameter in named.items():
        if velocity and training.momentum:
            optimizer.state[parameter]["momentum_buffer"] = velocity[name].clone()
    epochs = training.epochs
    single = not any(isinstance(layer, _BatchNorm) and layer.training for layer in net.modules())
    if len(features) < 2 and not single:
        epochs = 0
    for _ in range(epochs):
        order = torch.randperm(len(features), generator=draws).to(features.device)
        for rows in split_batches(order, batch_size, "keep", single=single):
            optimizer.zero_grad(set_to_none=True)
            cross_entropy(net(features[rows]), labels[rows]).backward()
            optimizer.step()
    momenta: dict[str, Tensor] = {}
    for name, parameter in named.items():
        buffer = optimizer.state[parameter].get("momentum_buffer")
        if buffer is None:
            buffer = torch.zeros_like(parameter)
        momenta[name] = buffer
    return momenta


def initial_net(name: str, net: nn.Module) -> dict[str, Tensor]:
    """Return the state of ``net`` and its momentum, which is zero, as entries of ``GlobalState.extra``."""
    zeros = {item: torch.zeros_like(parameter) for item, parameter in net.named_parameters()}
    return _entries(name, net, zeros)


def sent_rows(updates: Sequence[Update], name: str) -> Tensor:
    """Concatenate the updates' tables of this name, with one row per sample that the client counts for.

    A client may count for fewer samples than it registered, see :mod:`strategies.core.aggregation`. Then its rows are
    taken at even distances.
    """
    tables: list[Tensor] = []
    for update in updates:
        table = update.extra[name]
        rows = torch.arange(update.samples) * len(table) // update.samples
        tables.append(table[rows])
    return torch.cat(tables)


def retrain(
    name: str,
    net: nn.Module,
    extra: Mapping[str, Tensor],
    features: Tensor,
    labels: Tensor,
    training: NetTraining,
    server: ServerContext,
) -> dict[str, Tensor]:
    """Train a server's net on all clients' features; return its new entries in ``extra``.

    ``net`` is any net of the right shape; its weights are replaced.
    """
    net.load_state_dict(under_prefix(f"{name}/", extra))
    velocity = under_prefix(f"{MOMENTUM}{name}/", extra)
    with torch_threads(server.train.threads):
        velocity = train_net(
            net.train(),
            features,
            labels,
            training,
            server.generator("train", name),
            batch_size=server.train.batch_size,
            velocity=velocity,
        )
    return _entries(name, net, velocity)


def _entries(name: str, net: nn.Module, velocity: Mapping[str, Tensor]) -> dict[str, Tensor]:
    state = {item: tensor.detach().clone() for item, tensor in net.state_dict().items()}
    return with_prefix(f"{name}/", state) | with_prefix(f"{MOMENTUM}{name}/", velocity)


def sent_net(name: str, extra: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of a server's net, without its momentum, under its names in ``extra``."""
    prefix = f"{name}/"
    return with_prefix(prefix, under_prefix(prefix, extra))


def new_discriminator(name: str, server: ServerContext) -> Discriminator:
    """Return a net that predicts the client of a feature, with initial weights keyed by (seed, ``name``)."""
    with initialised(server.seed, name):
        return Discriminator(server.feature_size, server.client_count)


def received_discriminator(name: str, local: ClientContext) -> Discriminator:
    """Return the net that the server sent under ``name``, built once per exchange.

    Gradients pass through the net, but the net does not train. Batch norm uses the statistics of the batch, as in
    FedPall's released code.
    """

    def make() -> Discriminator:
        with torch.device("meta"):
            net = Discriminator(local.feature_size, local.client.client_count)
        received = under_prefix(f"{name}/", local.extra)
        net.load_state_dict({key: tensor.clone() for key, tensor in received.items()}, assign=True)
        return net.train().requires_grad_(False)

    return local.cached(f"received {name}", make)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Within the context, torch uses ``count`` threads, because another number may round differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
