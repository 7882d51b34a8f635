"""Per-FedAvg: Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach.

Alireza Fallah, Aryan Mokhtari, Asuman Ozdaglar. NeurIPS 2020. arXiv:2002.07948. Here in first order.
"""

from collections.abc import Iterator
from itertools import count, islice
from typing import ClassVar

import torch
from torch import Tensor

from common.config import Natural, NonNegative, checked
from strategies.core.method import ClientContext, Losses, Method
from strategies.core.readings import Point
from strategies.parts.edits import displace, restore


@checked
class PerFedAvg(Method):
    """FedAvg of a model that is to be good one gradient step away (Eq. 3), by first-order MAML (FO).

    A pair of batches makes a step: ``w' = w - a grad L(w; b1)``, then ``w <- w - b grad L(w'; b2)``. The inner step
    is plain SGD; the outer one is the run's optimiser. The last of an odd number of batches is skipped, as in the
    released code; a client with one batch only splits it in two, where that code would never train. Batch norm needs
    two samples, so an only batch of fewer than four is both of its pair. With ``inner_rate=0`` it is SGD on every other
    batch.

    FedPall's table scores the averaged model as it is, the default. ``adapt_steps`` scores what the method is meant
    for: each client's model after this number of steps on its own training batches.

    A pair of batches is one step, so an epoch moves the model half as far as FedAvg's: on glyphs it is after 10 rounds
    where FedAvg is after 5. Give it twice the local epochs for the same number of steps.

    Payload: the model's state both ways. Client state: none.

    Args:
        inner_rate: a, >= 0; ``None`` takes the run's learning rate, which is b. (FedPall: both 0.01.)
        adapt_steps: steps with ``inner_rate`` before each score, >= 0; more than the batches of an epoch go on with
            further epochs.
    """

    readings: ClassVar[tuple[Point, ...]] = (
        Point("steps before a score", 1, 1, setting="adapt_steps", tables={"fedpall": 0}),
        Point("last of an odd number of batches", released="skipped", ours="released"),
        Point("a single batch", released="never trains", ours="is halved; under four samples it is both halves"),
    )

    inner_rate: NonNegative | None = None
    adapt_steps: Natural = 0

    @property
    def personal(self) -> bool:
        """Whether scores are of models that were adapted to their client."""
        return self.adapt_steps > 0

    @property
    def adapts(self) -> bool:
        """Return whether the model takes gradient steps before each score."""
        return self.adapt_steps > 0

    def adapt(self, local: ClientContext) -> None:
        """``w <- w - a grad L(w)`` on training batches of the client's own."""
        local.model.train()
        for images, labels in islice(self._adaptation_batches(local), self.adapt_steps):
            local.model.zero_grad(set_to_none=True)  # the optimiser has no parameters before training
            local.backward(self.loss(local.forward(images, labels), local).total)
            displace(local.model, -self._inner(local))

    def _adaptation_batches(self, local: ClientContext) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield training batches of the client's own without end, epoch after epoch."""
        yield from local.batches("adapt")
        for epoch in count(2):
            yield from local.batches("adapt", epoch)

    def step(self, local: ClientContext, images: Tensor, labels: Tensor) -> Losses:
        """Take one step per pair of batches; the first batch of a pair waits for the second."""
        if local.batches_per_epoch == 1:
            half = len(labels) // local.views // 2
            if half < 2:  # batch norm needs two rows
                return self._pair_step(local, (images, labels), (images, labels))
            # rows are view-major: the first half of the samples, in every view
            first = torch.arange(len(labels), device=labels.device) % (len(labels) // local.views) < half
            return self._pair_step(local, (images[first], labels[first]), (images[~first], labels[~first]))
        held: list[tuple[Tensor, Tensor]] = local.cached("held back", list)
        if local.batch % 2 == 0:
            held[:] = [(images, labels)]
            return Losses({})
        return self._pair_step(local, held.pop(), (images, labels))

    def _pair_step(self, local: ClientContext, inner: tuple[Tensor, Tensor], outer: tuple[Tensor, Tensor]) -> Losses:
        local.backward(self.loss(local.forward(*inner), local).total)
        origin = displace(local.model, -self._inner(local))
        losses = self.loss(local.forward(*outer), local)
        local.backward(losses.total)
        restore(origin)
        self.edit_gradients(local)
        local.optimizer.step()
        return losses

    def _inner(self, local: ClientContext) -> float:
        if self.inner_rate is None:
            return local.learning_rate
        return self.inner_rate
