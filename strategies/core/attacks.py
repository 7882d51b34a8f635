"""Attacks: what hostile clients of a simulation send, to try filters and rules of aggregation on (``attack=``).

Hostile clients train honestly, with the run's method, and change what they send; under a label flip they change their
training labels. Hostile clients know what the honest clients send in the same exchange. An attack of one's own is a
class that derives from :class:`Attack`. A device of a deployment refuses the setting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from common.config import Names, NonNegative, Positive, check, checked
from common.data.batches import Split
from common.numerics import generator
from common.prototypes import PrototypeSet
from common.wire.messages import Registration, Request
from common.wire.payload import Payload

AT_THE_BOUND = 1000.0
"""A factor so large that a bound scales the update down to exactly the longest that is accepted."""

USUAL = 1.0
"""The factor of an attack on updates unless another is set; those of the literature are 1 to 10."""

MANY_SAMPLES = 9_000_000
"""The samples that a client registers that lies about their number; ``rounds.max_samples`` allows ten million."""


@dataclass(frozen=True)
class Seen:
    """What a hostile client knows when it sends.

    Args:
        message: what all participants of the exchange received.
        request: the request to the hostile client.
        honest: what the honest clients send in the exchange, by client id, ascending.
        clients: the ids of all clients of the run, ascending.
        seed: the run's seed.
    """

    message: Payload
    request: Request
    honest: Mapping[str, Payload]
    clients: Sequence[str]
    seed: int


@checked
class NoAttack:
    """No client is hostile."""

    clients: ClassVar[tuple[str, ...]] = ()


@checked
class Attack:
    """Base of the attacks. By itself it changes nothing.

    Args:
        clients: ids of the hostile clients, such as ``signs-0``; at least one.
    """

    clients: Names = ()

    def __post_init__(self) -> None:
        check(bool(self.clients), "no client is hostile: name them, such as attack.clients=[signs-0]")

    def data(self, split: Split, class_count: int) -> Split:  # noqa: ARG002
        """Return the samples that a hostile client trains on, made of its own; ``class_count`` is K."""
        return split

    def registered(self, registration: Registration) -> Registration:
        """Return the registration that a hostile client sends instead of its own."""
        return registration

    def sent(self, payload: Payload, seen: Seen) -> Payload | None:  # noqa: ARG002
        """Return what a hostile client sends instead of the payload; ``None`` if its reply is lost."""
        return payload


@checked
class SignFlip(Attack):
    """The update with the opposite sign, ``strength`` times as long; prototypes too.

    Args:
        strength: the factor of step and prototypes; 1 keeps their lengths.
    """

    strength: Positive = USUAL

    def sent(self, payload: Payload, seen: Seen) -> Payload | None:
        """Reverse the update's step and prototypes, and scale both by ``strength``."""
        steps = {name: -self.strength * step for name, step in steps_of(payload, seen.message).items()}
        changed = stepped(payload, seen.message, steps)
        if payload.prototypes is None:
            return changed
        return replace(changed, prototypes=_scaled(payload.prototypes, -self.strength))


@checked
class Framing(Attack):
    """The opposite of the update of one honest client, which the seed draws.

    Args:
        strength: the factor of the update.
    """

    strength: Positive = USUAL

    def sent(self, payload: Payload, seen: Seen) -> Payload | None:
        """Send the opposite of the framed client's step; no step if that client sends none."""
        against: Mapping[str, Tensor] = {}
        framed = next((client for client in drawn(seen.clients, seen.seed) if client not in self.clients), "")
        if framed in seen.honest:
            against = steps_of(seen.honest[framed], seen.message)
        return stepped(payload, seen.message, {name: -self.strength * step for name, step in against.items()})


@checked
class Noise(Attack):
    """A random step, which the seed draws, from a client that registers nine million samples.

    Args:
        strength: the deviation of the noise in each tensor, as a multiple of that of the honest step.
    """

    strength: Positive = USUAL

    def registered(self, registration: Registration) -> Registration:
        """Claim about :data:`MANY_SAMPLES` samples in all, in the classes' true proportions."""
        counts = [count * MANY_SAMPLES // registration.samples for count in registration.class_counts]
        return replace(registration, samples=sum(counts), class_counts=counts)

    def sent(self, payload: Payload, seen: Seen) -> Payload | None:
        """Take a random step, in each tensor with the standard deviation of the honest step times ``strength``."""
        draws = generator(seen.seed, "noise", seen.request.client, seen.request.round)
        steps: dict[str, Tensor] = {}
        for name, step in steps_of(payload, seen.message).items():
            deviation = step.std() if step.numel() > 1 else step.abs().sum()
            steps[name] = self.strength * deviation * torch.randn(step.shape, generator=draws)
        return stepped(payload, seen.message, steps)


@checked
class LabelFlip(Attack):
    """Hostile clients train honestly with label K - 1 - y in place of y."""

    def data(self, split: Split, class_count: int) -> Split:
        """Return the samples with label K - 1 - y in place of y."""
        return replace(split, labels=class_count - 1 - split.labels)


@checked
class PrototypeRoll(Attack):
    """Each class is sent another class's prototype; a method without prototypes is not attacked.

    Args:
        strength: the factor of the prototypes.
    """

    strength: Positive = USUAL

    def sent(self, payload: Payload, seen: Seen) -> Payload | None:  # noqa: ARG002
        """Send each class's prototypes under the next class's label, scaled by ``strength``.

        Labels and weights stay: of a class with fewer prototypes than the next, some are sent again.
        """
        if payload.prototypes is None or not len(payload.prototypes):
            return payload
        rows = payload.prototypes
        vectors = rows.vectors.clone()
        for place, label in enumerate(rows.classes):
            others = rows.of_class(rows.classes[place - 1])
            own = rows.labels == label
            vectors[own] = others[torch.arange(int(own.sum())) % len(others)]
        return replace(payload, prototypes=_scaled(replace(rows, vectors=vectors), self.strength))


@checked
class Variances(Attack):
    """Running variances of batch normalisation are too large.

    Args:
        strength: their factor.
    """

    strength: Positive = AT_THE_BOUND

    def sent(self, payload: Payload, seen: Seen) -> Payload | None:  # noqa: ARG002
        """Scale the running variances by ``strength``."""
        weights = dict(payload.weights)
        for name, tensor in payload.weights.items():
            if name.endswith("running_var"):
                weights[name] = self.strength * tensor
        return replace(payload, weights=weights)


@checked
class LittleIsEnough(Attack):
    """The mean of the honest updates minus some of their standard deviations (Baruch et al., NeurIPS 2019).

    With one honest client it is that client's update.

    Args:
        strength: the number of standard deviations.
    """

    strength: NonNegative = 1.5

    def sent(self, payload: Payload, seen: Seen) -> Payload | None:
        """Take the honest clients' mean step minus ``strength`` of their standard deviations."""
        steps: dict[str, Tensor] = {}
        for name, stacked in honest_steps(seen).items():
            steps[name] = stacked.mean(0)
            if len(stacked) > 1:  # one client has no deviation
                steps[name] = steps[name] - self.strength * stacked.std(0)
        return stepped(payload, seen.message, steps)


@checked
class InnerProduct(Attack):
    """The negative mean of the honest updates (Xie et al., UAI 2019).

    Args:
        strength: its factor.
    """

    strength: Positive = USUAL

    def sent(self, payload: Payload, seen: Seen) -> Payload | None:
        """Take the honest clients' mean step times ``-strength``."""
        steps = {name: -self.strength * stacked.mean(0) for name, stacked in honest_steps(seen).items()}
        return stepped(payload, seen.message, steps)


@checked
class Absent(Attack):
    """Every update is lost: what remains if a defence recognises hostile clients at once."""

    def sent(self, payload: Payload, seen: Seen) -> Payload | None:  # noqa: ARG002
        """Lose the reply."""
        return None


# ---- what attacks are made of ----------------------------------------------------------------------------------------


def drawn(clients: Sequence[str], seed: int) -> list[str]:
    """Return the clients in a random order that the seed determines."""
    order = torch.randperm(len(clients), generator=generator(seed, "hostile")).tolist()
    return [clients[index] for index in order]


def steps_of(payload: Payload, message: Payload) -> dict[str, Tensor]:
    """Return by name, ascending, how far each parameter moved; running statistics and counters are none."""
    steps: dict[str, Tensor] = {}
    for name, tensor in sorted(payload.weights.items()):
        if tensor.is_floating_point() and "running_" not in name and name in message.weights:
            steps[name] = tensor - message.weights[name]
    return steps


def stepped(payload: Payload, message: Payload, steps: Mapping[str, Tensor]) -> Payload:
    """Return the payload with other steps, in the dtypes of the message; running statistics stay honest."""
    moved: dict[str, Tensor] = {}
    for name, step in steps.items():
        moved[name] = (message.weights[name] + step).to(message.weights[name].dtype)
    return replace(payload, weights={**payload.weights, **moved})


def honest_steps(seen: Seen) -> dict[str, Tensor]:
    """Return the steps of the honest clients by parameter, ``[n, ...]`` each; empty without an honest client."""
    steps = [steps_of(payload, seen.message) for payload in seen.honest.values()]
    if not steps:
        return {}
    stacked: dict[str, Tensor] = {}
    for name in steps[0]:
        stacked[name] = torch.stack([step[name] for step in steps])
    return stacked


def _scaled(prototypes: PrototypeSet, factor: float) -> PrototypeSet:
    return PrototypeSet(factor * prototypes.vectors, prototypes.labels, prototypes.weights)
