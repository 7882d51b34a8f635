"""FedADG: Federated Learning with Domain Generalization.

Liling Zhang, Xinyu Lei, Yichun Shi, Hongyu Huang, Chao Chen. 2021. arXiv:2111.10487.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.config import BelowOne, Natural, Positive, Search, checked
from common.errors import ConfigError
from common.models.base import Model, initialised
from common.numerics import working_dtype
from common.settings import RunSettings
from strategies.core.method import Averaging, Batch, ClientContext, Losses, Phase, Weighting
from strategies.core.readings import Point

GENERATOR, DISCRIMINATOR = "generator", "discriminator"

Game = Literal["paper", "released", "released_pacs"]
"""The game of generator and discriminator; see ``fidelity``."""


CONDITIONS: Mapping[Game, float] = {"paper": 0.6, "released": 0.6, "released_pacs": 0.7}
"""A class's entry of the one-hot vector that generator and discriminator receive, as in the code for VLCS or PACS."""


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
        adversarial_epochs: >= 0 (released: 7 after 3 epochs of cross-entropy on PACS, 10 after 5 on VLCS).
        weight: share of the adversarial term in the network's loss, in [0, 1).
        rate: factor on the learning rate of discriminator and generator, > 0 (released: 0.7). The network trains at
            the run's rate throughout.
        smoothing: share of a target that the other classes have together, as in the released code, in [0, 1 - 1/K] for
            K classes (released: 0.01 on PACS, 0.2 on VLCS).
        fidelity: the game: as above; ``released``, the code for VLCS, where G never trains; or ``released_pacs``, the
            code for PACS, with its own discriminator, one-hot entry and initial classifier. On glyphs (small net, seed
            0) the discriminator wins within a round in all three, and the alignment then has no gradient.
        head: ``task`` is the paper's own ``D -> D -> K``; ``model`` keeps the network's.
        weighting: networks and generators are averaged ``uniform``-ly (released), or by ``samples``.
    """

    readings: ClassVar[tuple[Point, ...]] = (
        Point(
            "game",
            "paper",
            "released",
            setting="fidelity",
            meanings={
                "paper": "the generator trains",
                "released": "the generator never trains",
                "released_pacs": "least-squares GANs, with the nets of the code for PACS",
            },
            tables={"fedgca_pacs": "released_pacs"},
        ),
        Point("classifier", "task", "task", setting="head"),
        Point("epochs of the game", released=7, setting="adversarial_epochs"),
        Point("rate of generator and discriminator", released=0.7, setting="rate"),
        Point("average of models", released="uniform", setting="weighting"),
        Point("smoothed labels", released="1 - smoothing, and the other classes share the rest", ours="released"),
        Point("rate", released="every round begins a warm-up over 500 epochs (PACS: 100)", ours="the run's"),
        Point("features for D", released="of an evaluation pass", ours="of the training pass"),
        Point("weights that are sent", released="the best on validation samples", ours="the last"),
    )

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
    fidelity: Game = "paper"
    head: Literal["task", "model"] = "task"
    weighting: Weighting = "uniform"

    def check(self, settings: RunSettings) -> None:
        """Refuse a second smoothing of labels (``train.label_smoothing``)."""
        super().check(settings)
        if settings.train.label_smoothing:
            raise ConfigError(
                f"train.label_smoothing={settings.train.label_smoothing:g}: method={settings.choices['method']} "
                "smooths labels by a setting of its own; set method.smoothing instead"
            )

    def extend(self, model: nn.Module, client_count: int, seed: int) -> nn.Module:  # noqa: ARG002
        """Return the network with the paper's head, and with generator and discriminator.

        Raises:
            ConfigError: so much smoothing that another class would have a larger target than the label's.
        """
        assert isinstance(model, Model)
        size, classes = model.feature_size, model.class_count
        if self.smoothing * classes > classes - 1:
            raise ConfigError(
                f"method.smoothing={self.smoothing:g} must be at most 1 - 1/{classes} with {classes} classes"
            )
        with initialised(seed, "adversarial nets"):
            pacs = self.fidelity == "released_pacs"
            if self.head == "task":
                model.head = TaskHead(size, classes, kaiming=pacs)
            # with ResNet-18's 512 features these are the released sizes: 2048, 4096 and 1024
            model.add_module(GENERATOR, FeatureGenerator(size, classes, 4 * size, 8 * size))
            discriminator = PacsDiscriminator if pacs else FeatureDiscriminator
            model.add_module(DISCRIMINATOR, discriminator(size, classes, 2 * size))
        return model

    def shared_names(self, model: nn.Module) -> set[str]:
        """Return all names except those of the discriminator."""
        return set(filter(outside_nets(DISCRIMINATOR), model.state_dict()))

    def phases(self, epochs: int) -> tuple[Phase, ...]:
        """Return two phases: cross-entropy, then the adversarial epochs; the run's optimiser moves the network only."""
        network = outside_nets(GENERATOR, DISCRIMINATOR)
        adversarial = Phase(self.adversarial_epochs, network)
        if not self.adversarial_epochs:
            return (Phase(epochs, network),)
        return (Phase(epochs, network), adversarial)

    def loss(self, batch: Batch, local: ClientContext) -> Losses:
        """Return cross-entropy with smoothed labels, over all views."""
        over_all_classes = 0.0
        if self.smoothing:  # torch's smoothing gives the label's class its part, too
            over_all_classes = self.smoothing * local.class_count / (local.class_count - 1)
        return Losses({"cross_entropy": batch.cross_entropy(over_all_classes)})

    def step(self, local: ClientContext, images: Tensor, labels: Tensor) -> Losses:
        """Take one step; in the second phase one each of the discriminator, the network and the generator."""
        if local.phase == 0:
            return super().step(local, images, labels)
        generator = local.model.get_submodule(GENERATOR)
        discriminator = local.model.get_submodule(DISCRIMINATOR)
        assert isinstance(generator, FeatureGenerator)
        batch = local.forward(images, labels)
        features = batch.features.detach()
        classes = scaled_one_hot(labels, local.class_count, CONDITIONS[self.fidelity])
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


# ---- its losses and steps --------------------------------------------------------------------------------------------


def least_squares_discriminator(reference_scores: Tensor, feature_scores: Tensor) -> Tensor:
    """Return the discriminator's loss: ``-(mean D(reference)^2 + mean (1 - D(feature))^2)``.

    ``reference_scores`` are those of samples from the distribution generator, ``feature_scores`` those of the
    (detached) features; any shape. Bounded below by -2 for scores in [0, 1].
    """
    reference = reference_scores.to(working_dtype(reference_scores))
    feature = feature_scores.to(working_dtype(feature_scores))
    return -(reference.square().mean() + (1.0 - feature).square().mean())


def least_squares_generator(scores: Tensor) -> Tensor:
    """Return ``mean (1 - D)^2``, which the feature extractor and the generator minimise on their features."""
    return (1.0 - scores.to(working_dtype(scores))).square().mean()


def outside_nets(*nets: str) -> Callable[[str], bool]:
    """Return a function that tells whether the tensor with a name belongs to none of ``nets``."""
    return lambda name: not name.startswith(tuple(f"{net}." for net in nets))


def separation(game: Game, judge: nn.Module, classes: Tensor, reference: Tensor, own: Tensor) -> Tensor:
    """Return the loss of the discriminator ``judge`` for reference features and the network's, both ``[B, D]``."""
    first, second = judge(reference, classes), judge(own, classes)
    if game == "released_pacs":
        return least_squares_generator(first) + least_squares_generator(1 - second)
    return least_squares_discriminator(first, second)


def pursuit(game: Game, judge: nn.Module, classes: Tensor, reference: Tensor) -> Tensor:
    """Return the generator's loss for its features ``[B, D]``."""
    scores = judge(reference, classes)
    if game == "released_pacs":
        scores = 1 - scores
    return least_squares_generator(scores)


def descend(local: ClientContext, name: str, rate: float, objective: Callable[[], Tensor]) -> Tensor:
    """Take one step of the net ``name`` on ``objective()``, with an optimiser of its own; return its value."""
    net = local.model.get_submodule(name)
    optimizer = local.cached(f"{name} optimizer", lambda: local.make_optimizer(net.parameters(), rate))
    net.requires_grad_(True)
    value = objective()
    value.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # nothing is left for the network's step to clip or edit
    net.requires_grad_(False)
    return value.detach()


# ---- its nets --------------------------------------------------------------------------------------------------------


class FeatureGenerator(nn.Module):
    """FedADG's distribution generator: noise and class to a feature, ``N + K -> 4096 -> D`` (LeakyReLU, then ReLU).

    Weights start from Xavier's uniform distribution with gain 0.5, as in the released code.
    """

    def __init__(self, feature_size: int, class_count: int, noise_size: int = 2048, hidden_size: int = 4096) -> None:
        super().__init__()
        self.noise_size = noise_size
        self.fc1 = nn.Linear(noise_size + class_count, hidden_size)
        self.fc2 = nn.Linear(hidden_size, feature_size)
        for layer in (self.fc1, self.fc2):
            nn.init.xavier_uniform_(layer.weight, gain=0.5)

    def forward(self, noise: Tensor, classes: Tensor) -> Tensor:
        """Return ``[B, D]``, >= 0: features for ``noise [B, noise_size]`` and (scaled) one-hot ``classes [B, K]``."""
        hidden = F.leaky_relu(self.fc1(torch.cat([noise, classes], dim=1)))
        return torch.relu(self.fc2(hidden))


class FeatureDiscriminator(nn.Module):
    """The discriminator of FedADG's code for VLCS: is a feature of a class generated (towards 1) or extracted.

    Feature and class pass a projection ``D + K -> 1024`` without bias, then ``1024 -> 1024 -> 1`` with LeakyReLU, then
    a sigmoid. The initial weights of the projection are scaled to unit Frobenius norm.
    """

    def __init__(self, feature_size: int, class_count: int, hidden_size: int = 1024) -> None:
        super().__init__()
        self.projection = nn.Linear(feature_size + class_count, hidden_size, bias=False)
        self.fc1 = nn.Linear(hidden_size, hidden_size)
        self.fc2 = nn.Linear(hidden_size, 1)
        with torch.no_grad():
            self.projection.weight.div_(self.projection.weight.norm())

    def forward(self, features: Tensor, classes: Tensor) -> Tensor:
        """Return ``[B]`` in (0, 1), for ``features [B, D]`` and (scaled) one-hot ``classes [B, K]``."""
        hidden = self.projection(torch.cat([features, classes], dim=1))
        return torch.sigmoid(self.fc2(F.leaky_relu(self.fc1(hidden)))).squeeze(1)


class PacsDiscriminator(nn.Module):
    """The discriminator of FedADG's code for PACS, whose class joins behind the projection.

    The feature passes a projection ``D -> 1024`` without bias; with the class then ``1024 + K -> 1024 -> 1`` with
    LeakyReLU, then a sigmoid. All weights start from Kaiming's uniform distribution, the projection's too.
    """

    def __init__(self, feature_size: int, class_count: int, hidden_size: int = 1024) -> None:
        super().__init__()
        self.projection = nn.Linear(feature_size, hidden_size, bias=False)
        self.fc1 = nn.Linear(hidden_size + class_count, hidden_size)
        self.fc2 = nn.Linear(hidden_size, 1)
        for layer in (self.projection, self.fc1, self.fc2):
            nn.init.kaiming_uniform_(layer.weight)

    def forward(self, features: Tensor, classes: Tensor) -> Tensor:
        """Return ``[B]`` in (0, 1), for ``features [B, D]`` and (scaled) one-hot ``classes [B, K]``."""
        hidden = torch.cat([self.projection(features), classes], dim=1)
        return torch.sigmoid(self.fc2(F.leaky_relu(self.fc1(hidden)))).squeeze(1)


class TaskHead(nn.Module):
    """FedADG's classifier ``D -> D -> K``: two linear layers with nothing between them, as in the released code.

    Args:
        feature_size: D.
        class_count: K.
        kaiming: whether weights start from Kaiming's normal distribution, as in the code for PACS; otherwise from
            torch's own, as in the code for VLCS.
    """

    def __init__(self, feature_size: int, class_count: int, *, kaiming: bool = False) -> None:
        super().__init__()
        self.fc1 = nn.Linear(feature_size, feature_size)
        self.fc2 = nn.Linear(feature_size, class_count)
        if kaiming:
            for layer in (self.fc1, self.fc2):
                nn.init.kaiming_normal_(layer.weight)

    def forward(self, features: Tensor) -> Tensor:
        """Return ``[B, K]``: logits of ``features [B, D]``."""
        return self.fc2(self.fc1(features))


def scaled_one_hot(labels: Tensor, class_count: int, scale: float = 1.0) -> Tensor:
    """Return ``[B, K]`` float32: ``scale`` at each label's class, 0 elsewhere."""
    return F.one_hot(labels, class_count).to(torch.float32) * scale
