"""Nets inside the model that a method trains by steps of its own, beside the run's optimiser (FedADG)."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from common.losses import least_squares_discriminator, least_squares_generator
from strategies.core.method import Local

Game = Literal["paper", "released", "released_pacs"]


def outside(*nets: str) -> Callable[[str], bool]:
    """Whether the tensor of this name belongs to none of ``nets``."""
    return lambda name: not name.startswith(tuple(f"{net}." for net in nets))


def separation(game: Game, judge: nn.Module, classes: Tensor, reference: Tensor, own: Tensor) -> Tensor:
    """What the discriminator ``judge`` minimises, of reference features and the network's, both ``[B, D]``."""
    first, second = judge(reference, classes), judge(own, classes)
    if game == "released_pacs":
        return least_squares_generator(first) + least_squares_generator(1 - second)
    return least_squares_discriminator(first, second)


def pursuit(game: Game, judge: nn.Module, classes: Tensor, reference: Tensor) -> Tensor:
    """What the generator minimises, of the features ``[B, D]`` it made."""
    scores = judge(reference, classes)
    return least_squares_generator(1 - scores if game == "released_pacs" else scores)


def descend(local: Local, name: str, rate: float, objective: Callable[[], Tensor]) -> Tensor:
    """One step of the net ``name`` on ``objective()``, with an optimiser of its own; the objective's value."""
    net = local.model.get_submodule(name)
    optimizer = local.cached(f"{name} optimizer", lambda: local.make_optimizer(net.parameters(), rate))
    net.requires_grad_(True)
    value = objective()
    value.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # nothing is left for the network's step to clip or edit
    net.requires_grad_(False)
    return value.detach()
