"""FedADG: Federated Learning with Domain Generalization (Zhang et al., 2021)."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from common.config import BelowOne, Count, Natural, Positive, Search, checked
from common.losses import cross_entropy, least_squares_generator
from common.models.auxiliary import FeatureDiscriminator, FeatureGenerator, TaskHead, scaled_one_hot
from common.models.base import Model, initialised
from strategies.core.method import Averaging, Batch, Local, Losses, Phase, Weighting
from strategies.parts.adversaries import Game, descend, outside, pursuit, separation

GENERATOR, DISCRIMINATOR = "generator", "discriminator"


@checked
class FedADG(Averaging):
    """Features of every client and class adversarially aligned with a reference distribution that is learned with them.

    A generator G, shared like the model, makes reference features of a class from noise; a discriminator D, which stays
    on the device, tells them from the network's. A round is ``train.epochs`` epochs of cross-entropy, then
    ``adversarial_epochs`` in which every batch (features z, labels y) takes three steps: D maximises ``mean D(G, y)^2 +
    mean (1 - D(z, y))^2``; the network minimises ``(1 - weight) cross-entropy + weight mean (1 - D(z, y))^2``; G
    minimises ``mean (1 - D(G, y))^2``. ``adversarial_epochs=smoothing=0, head=model, weighting=samples`` is FedAvg.

    Payload: the state of network and generator both ways. Client state: the discriminator.

    Args:
        adversarial_epochs: >= 0 (released: 7, after 5 epochs of cross-entropy).
        weight: share of the adversarial term in the network's loss, in [0, 1).
        rate: factor on the learning rate of discriminator and generator, > 0 (released: 0.007 beside 0.01). The
            network trains at the run's rate throughout.
        smoothing: label smoothing, in [0, 1) (released: 0.01 on PACS, 0.2 on VLCS).
        condition: what a class's entry of the one-hot vector is, > 0 (released: 0.6).
        fidelity: the game: as above; ``released``, where G never trains; or the code's for PACS. See docs/methods.md.
        head: ``task`` is the paper's own ``D -> D -> K``; ``model`` keeps the network's.
        noise_size, hidden_size, discriminator_size: ``null`` is 4, 8 and 2 times the feature size, as released.
        weighting: networks and generators are averaged ``uniform``-ly (released), or by ``samples``.
    """

    fedavg_at: ClassVar[Mapping[str, Any] | None] = {
        "adversarial_epochs": 0,
        "smoothing": 0.0,
        "head": "model",
        "weighting": "samples",
    }

    adversarial_epochs: Natural = 7
    weight: Annotated[BelowOne, Search(0.01, 0.5)] = 0.15
    rate: Annotated[Positive, Search(0.05, 1.0)] = 0.7
    smoothing: BelowOne = 0.01
    condition: Positive = 0.6
    fidelity: Game = "paper"
    head: Literal["task", "model"] = "task"
    noise_size: Count | None = None
    hidden_size: Count | None = None
    discriminator_size: Count | None = None
    weighting: Weighting = "uniform"

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
        return set(filter(outside(DISCRIMINATOR), model.state_dict()))

    def phases(self, epochs: int) -> tuple[Phase, ...]:
        """Cross-entropy, then the adversarial epochs; the run's optimiser moves the network only."""
        network = outside(GENERATOR, DISCRIMINATOR)
        adversarial = Phase(self.adversarial_epochs, network)
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
        pair, game, rate = (discriminator, classes), self.fidelity, self.rate
        separated = descend(local, DISCRIMINATOR, rate, lambda: separation(game, *pair, reference, features))
        losses = self.loss(batch, local)
        losses.terms["cross_entropy"] = (1 - self.weight) * losses.terms["cross_entropy"]
        losses.terms["alignment"] = self.weight * least_squares_generator(discriminator(batch.features, classes))
        local.backward(losses.total)
        self.edit_gradients(local)
        local.optimizer.step()
        terms = {**losses.terms, "separation": separated}
        if self.fidelity != "released":
            terms["pursuit"] = descend(local, GENERATOR, rate, lambda: pursuit(game, *pair, generator(noise, classes)))
        return Losses(terms)
