"""FedADG: Federated Learning with Domain Generalization (Zhang et al., 2021)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from common.config import BelowOne, Count, Natural, Positive, checked
from common.losses import cross_entropy, least_squares_discriminator, least_squares_generator
from common.models.auxiliary import FeatureDiscriminator, FeatureGenerator, TaskHead, scaled_one_hot
from common.models.base import Model, initialised
from common.storage.state import GlobalState
from strategies.core.method import Batch, Local, Losses, Method, Phase, Server, Update

GENERATOR, DISCRIMINATOR = "generator", "discriminator"


@checked
class FedADG(Method):
    """Features of every client and class adversarially aligned with a reference distribution that is learned with them.

    A generator G, shared like the model, makes reference features of a class from noise; a discriminator D, which stays
    on the device, tells them from the network's. A round is ``train.epochs`` epochs of cross-entropy, then
    ``adversarial_epochs`` in which every batch (features z, labels y) takes three steps:
    D maximises ``mean D(G, y)^2 + mean (1 - D(z, y))^2``; the network minimises ``(1 - weight) cross-entropy + weight
    mean (1 - D(z, y))^2``; G minimises ``mean (1 - D(G, y))^2``. ``adversarial_epochs=smoothing=0, head=model,
    weighting=samples`` is FedAvg.

    Payload: the state of network and generator both ways. Client state: the discriminator.

    Args:
        adversarial_epochs: >= 0 (released: 7 after 5 epochs, or after 3, of cross-entropy; here one after one).
        weight: share of the adversarial term in the network's loss, in [0, 1).
        rate: factor on the learning rate in the adversarial epochs, > 0 (released: 0.007 after 0.01).
        smoothing: label smoothing, in [0, 1) (released: 0.01 on PACS, 0.2 on VLCS).
        condition: what a class's entry of the one-hot vector is, > 0 (released: 0.6).
        fidelity: ``paper``: as above. ``released``: G's output is cut off from its own step, so it never trains; the
            paper's is the default, since a reference that does not adapt is not the method. In both D soon wins
            outright (its objective reaches 2), and the alignment has no gradient left. ``released_pacs``, the code's
            PACS branch, is the game of least-squares GANs and stays level: D minimises ``mean (1 - D(G, y))^2 + mean
            D(z, y)^2``, G minimises ``mean D(G, y)^2``.
        head: ``task`` is the paper's own ``D -> D -> K``; ``model`` keeps the network's.
        noise_size, hidden_size: of the generator; ``null`` is 4 and 8 times the feature size, the released 2048 and
            4096 for 512 features.
        discriminator_size: ``null`` is twice the feature size, the released 1024 for 512 features.
        weighting: clients count equally (released), or by their samples.
    """

    fedavg_at: ClassVar[Mapping[str, Any] | None] = {
        "adversarial_epochs": 0,
        "smoothing": 0.0,
        "head": "model",
        "weighting": "samples",
    }

    adversarial_epochs: Natural = 1
    weight: BelowOne = 0.15
    rate: Positive = 0.7
    smoothing: BelowOne = 0.01
    condition: Positive = 0.6
    fidelity: Literal["paper", "released", "released_pacs"] = "paper"
    head: Literal["task", "model"] = "task"
    noise_size: Count | None = None
    hidden_size: Count | None = None
    discriminator_size: Count | None = None
    weighting: Literal["uniform", "samples"] = "uniform"

    def extend(self, model: nn.Module, client_count: int, seed: int) -> nn.Module:  # noqa: ARG002
        """The network with the paper's head, generator and discriminator beside it."""
        assert isinstance(model, Model)
        size, classes = model.feature_size, model.class_count
        with initialised(seed, "adversarial nets"):
            if self.head == "task":
                model.head = TaskHead(size, classes)
            noise, hidden = self.noise_size or 4 * size, self.hidden_size or 8 * size
            model.add_module(GENERATOR, FeatureGenerator(size, classes, noise, hidden))
            model.add_module(DISCRIMINATOR, FeatureDiscriminator(size, classes, self.discriminator_size or 2 * size))
        return model

    def shared_names(self, model: nn.Module) -> set[str]:
        """Everything but the discriminator."""
        return {name for name in model.state_dict() if not name.startswith(f"{DISCRIMINATOR}.")}

    def phases(self, epochs: int) -> tuple[Phase, ...]:
        """Cross-entropy, then the adversarial epochs; the run's optimiser moves the network only."""

        def network(name: str) -> bool:
            return not name.startswith((f"{GENERATOR}.", f"{DISCRIMINATOR}."))

        adversarial = Phase(self.adversarial_epochs, network, rate=self.rate)
        return (Phase(epochs, network), adversarial)[: 2 if self.adversarial_epochs else 1]

    def loss(self, batch: Batch, local: Local) -> Losses:  # noqa: ARG002
        """Cross-entropy with smoothed labels, over all views."""
        return Losses({"cross_entropy": cross_entropy(batch.logits, batch.labels, self.smoothing)})

    def step(self, local: Local, images: Tensor, labels: Tensor) -> Losses:
        """In the second phase, one step each of the discriminator, the network and the generator."""
        if local.phase == 0:
            return super().step(local, images, labels)
        generator, discriminator = (local.model.get_submodule(name) for name in (GENERATOR, DISCRIMINATOR))
        assert isinstance(generator, FeatureGenerator)
        batch = local.forward(images, labels)
        features = batch.features.detach()
        classes = scaled_one_hot(labels, local.class_count, self.condition)
        draws = local.cached("noise", lambda: local.generator("generator noise"))
        noise = torch.rand(len(labels), generator.noise_size, generator=draws).to(local.device)
        reference = generator(noise, classes)  # without a graph, since the generator is frozen but in its own step

        def separation() -> Tensor:
            scores = discriminator(reference, classes), discriminator(features, classes)
            if self.fidelity == "released_pacs":
                return least_squares_generator(scores[0]) + least_squares_generator(1 - scores[1])
            return least_squares_discriminator(*scores)

        def pursuit() -> Tensor:
            scores = discriminator(generator(noise, classes), classes)
            return least_squares_generator(1 - scores if self.fidelity == "released_pacs" else scores)

        separated = self._descend(local, DISCRIMINATOR, separation)
        losses = self.loss(batch, local)
        losses.terms["cross_entropy"] = (1 - self.weight) * losses.terms["cross_entropy"]
        losses.terms["alignment"] = self.weight * least_squares_generator(discriminator(batch.features, classes))
        local.backward(losses.total)
        self.edit_gradients(local)
        local.optimizer.step()
        terms = {**losses.terms, "separation": separated}
        if self.fidelity != "released":
            terms["pursuit"] = self._descend(local, GENERATOR, pursuit)
        return Losses(terms)

    def _descend(self, local: Local, name: str, objective: Callable[[], Tensor]) -> Tensor:
        """One step of an added net on ``objective()``, with an optimiser of its own; the objective's value."""
        net = local.model.get_submodule(name)
        optimizer = local.cached(f"{name} optimizer", lambda: local.make_optimizer(net.parameters(), self.rate))
        net.requires_grad_(True)
        value = objective()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)  # nothing is left for the network's step to clip or edit
        net.requires_grad_(False)
        return value.detach()

    def aggregate(self, state: GlobalState, updates: Sequence[Update], server: Server) -> GlobalState:
        """The mean of networks and generators."""
        weights = server.aggregation.average(updates, uniform=self.weighting == "uniform")
        return GlobalState(state.round, weights, state.prototypes, state.extra)
