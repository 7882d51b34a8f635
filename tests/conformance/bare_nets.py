"""Bare loops of methods with nets or draws of their own, and of those without an average of models.

Initial weights are those that the library draws from the seed. So are random numbers: a loop seeds
:func:`common.numerics.generator` with the key that the library documents, and draws in the order in which the equations
need the numbers. What is drawn by sample needs the order of samples, which the loop draws likewise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations

import torch
import torch.nn.functional as F
from bare_loops import (
    PLAIN,
    TRAIN,
    Features,
    FedAvgLoop,
    FedDynLoop,
    OwnPartLoop,
    State,
    class_means,
    floating,
    own_models,
)
from support.toy import CLASSES, DOMAINS
from torch import Tensor, nn

from common.models.base import Model, MultilayerHead
from common.models.specs import Small
from common.numerics import generator
from common.settings import RunSettings
from common.storage import under_prefix
from strategies.core.method import server_context

SLOW = {**TRAIN, "learning_rate": 0.005}
"""Smaller steps, for methods in which rounding grows to the size of a step within two rounds."""

PAIRS = {**SLOW, "batch_size": 6}
"""Five batches of the first client, the last of which joins its one sample to the fourth; four; three."""

LAYERS = {"fc1": 0, "bn1": 1, "fc2": 3, "bn2": 4, "fc3": 6}
"""The library's names of the layers of a net on features, and their places in :func:`net_on_features`."""


class SmallMultilayer(Small):
    """The small network with a multilayer classifier, whose batch normalisation FedPall leaves to each client."""

    def _construct(self, class_count: int, image_size: int) -> Model:
        model = super()._construct(class_count, image_size)
        model.head = MultilayerHead(model.feature_size, class_count)
        return model


class DrawingLoop(FedAvgLoop):
    """A loop that draws: by the key (seed, purpose, round, client), as the library does."""

    def draws(self, *purpose: str | int) -> torch.Generator:
        return generator(self.settings.seed, *purpose, self.round, f"{self.client}-0")

    def epoch_draws(self) -> tuple[Tensor, torch.Generator]:
        """The order of the epoch's samples, and the generator of what is drawn for its images afterwards."""
        draws = self.draws("epoch", self.epoch)
        return torch.randperm(len(self.labels[self.client]), generator=draws), draws

    def ordered_batch(self) -> tuple[Tensor, Tensor]:
        order, _ = self.epoch_draws()
        return self.images[self.client][order], self.labels[self.client][order]


# ---- without a federation --------------------------------------------------------------------------------------------


class PooledLoop(FedAvgLoop):
    """One client has all images."""

    def __init__(self, settings: RunSettings, dtype: torch.dtype) -> None:
        super().__init__(settings, dtype)
        self.images = {"pooled": torch.cat(list(self.images.values()))}
        self.labels = {"pooled": torch.cat(list(self.labels.values()))}


class SingleSetLoop(FedAvgLoop):
    """Each client goes on with its own model."""

    def start(self) -> State:
        return self.kept[self.client] or self.initial

    def finish(self, state: State) -> None:
        self.kept[self.client] = state

    def merge(self, models: Mapping[str, State]) -> State:
        return self.received

    def train(self) -> State:
        super().train()
        return own_models(self.kept)


class PerFedAvgLoop(DrawingLoop):
    """Pairs of batches; the last of an odd number is skipped."""

    settings_of_training = PAIRS

    def on_the_device(self) -> tuple[State, Features]:
        model, images, labels = self.model, self.images[self.client], self.labels[self.client]
        model.load_state_dict(self.start(), strict=False)
        rate = self.method.inner_rate
        if rate is None:
            rate = SLOW["learning_rate"]
        optimizer = self.optimizer(model.parameters())
        model.train()
        for self.epoch in range(1, int(TRAIN["epochs"]) + 1):
            batches = list(self.epoch_draws()[0].split(6))
            if len(batches[-1]) == 1:
                single = batches.pop()
                batches[-1] = torch.cat([batches[-1], single])
            for inner, outer in zip(batches[::2], batches[1::2], strict=False):
                model.zero_grad()
                F.cross_entropy(model(images[inner])[1], labels[inner]).backward()
                place = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
                with torch.no_grad():
                    for name, parameter in model.named_parameters():
                        parameter.sub_(rate * self.gradients()[name])
                model.zero_grad()
                F.cross_entropy(model(images[outer])[1], labels[outer]).backward()
                with torch.no_grad():
                    for name, parameter in model.named_parameters():
                        parameter.copy_(place[name])
                optimizer.step()
        return floating(model.state_dict()), (images, labels)


# ---- nets on the server ----------------------------------------------------------------------------------------------


def net_on_features(inputs: int, outputs: int, *, bias: bool) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 512, bias),
        nn.BatchNorm1d(512),
        nn.ReLU(),
        nn.Linear(512, 512, bias),
        nn.BatchNorm1d(512),
        nn.ReLU(),
        nn.Linear(512, outputs, bias),
    )


class ServerNet:
    """A net on features with the library's initial weights; one optimiser for the whole run keeps its momentum."""

    def __init__(self, name: str, loop: FedAvgLoop, *, outputs: int, bias: bool) -> None:
        self.name = name
        context = server_context(loop.settings, loop.model, len(DOMAINS))
        initial = under_prefix(f"{name}/", loop.method.initial_state(context.shared, context).extra)
        self.net = net_on_features(context.feature_size, outputs, bias=bias).to(loop.dtype)
        for layer, place in LAYERS.items():
            self.net[place].load_state_dict(under_prefix(f"{layer}.", initial))
        how = loop.method.server_training
        self.epochs = how.epochs
        self.optimizer = torch.optim.SGD(
            self.net.parameters(), lr=how.learning_rate, momentum=how.momentum, weight_decay=how.weight_decay
        )

    def train_on(self, features: Tensor, labels: Tensor) -> None:
        self.net.train().requires_grad_(True)
        for _ in range(self.epochs):
            self.optimizer.zero_grad()
            F.cross_entropy(self.net(features), labels).backward()
            self.optimizer.step()

    def on_a_device(self, features: Tensor) -> Tensor:
        """Logits by the statistics of the batch, of a net that does not train."""
        hidden = features
        for layer in self.net:
            if isinstance(layer, nn.BatchNorm1d):
                hidden = F.batch_norm(hidden, None, None, layer.weight.detach(), layer.bias.detach(), training=True)
            elif isinstance(layer, nn.Linear):
                bias = None if layer.bias is None else layer.bias.detach()
                hidden = F.linear(hidden, layer.weight.detach(), bias)
            else:
                hidden = hidden.relu()
        return hidden

    def named(self) -> State:
        found: State = {}
        for layer, place in LAYERS.items():
            for name, tensor in floating(self.net[place].state_dict()).items():
                found[f"server/{self.name}/{layer}.{name}"] = tensor
        return found


def distance_from_uniform(logits: Tensor) -> Tensor:
    """KL(uniform || prediction), mean over samples."""
    share = 1 / logits.shape[1]
    return (share * (math.log(share) - logits.log_softmax(1))).sum(1).mean()


class AdcolLoop(SingleSetLoop):
    """All features of a pass with the batch's statistics go to the server, whose net learns whose they are."""

    def __init__(self, settings: RunSettings, dtype: torch.dtype) -> None:
        super().__init__(settings, dtype)
        self.judge = ServerNet("discriminator", self, outputs=len(DOMAINS), bias=False)
        self.sent: dict[str, Tensor] = {}

    def loss(self, features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        value = F.cross_entropy(logits, labels)
        return value + self.method.divergence * distance_from_uniform(self.judge.on_a_device(features))

    def finish(self, state: State) -> None:
        with torch.no_grad():
            self.sent[self.client] = self.model.train()(self.images[self.client])[0]
        self.kept[self.client] = floating(self.model.state_dict())

    def owners(self) -> Tensor:
        return torch.cat([torch.full((len(sent),), place) for place, sent in enumerate(self.sent.values())])

    def merge(self, models: Mapping[str, State]) -> State:
        self.judge.train_on(torch.cat(list(self.sent.values())), self.owners())
        return super().merge(models)

    def train(self) -> State:
        return super().train() | self.judge.named()


class FedPallLoop(AdcolLoop, DrawingLoop):
    """The released code's readings; the server's classifier replaces the clients' but for batch normalisation."""

    network = SmallMultilayer()

    def __init__(self, settings: RunSettings, dtype: torch.dtype) -> None:
        SingleSetLoop.__init__(self, settings, dtype)
        self.judge = ServerNet("amplifier", self, outputs=len(DOMAINS), bias=False)
        self.classifier = ServerNet("classifier", self, outputs=CLASSES, bias=True)
        self.sent = {}
        self.rows: Tensor | None = None

    def begin(self) -> None:
        for layer in ("fc1", "fc2", "fc3") if self.method.swap_classifier else ():
            self.model.head.get_submodule(layer).load_state_dict(self.classifier.net[LAYERS[layer]].state_dict())

    def loss(self, features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        value = super().loss(features, logits, labels)
        if self.rows is None:
            return value
        units = F.normalize(features, dim=1)
        own = (units * F.normalize(self.rows, dim=1)[labels]).sum(1) / self.method.temperature
        everything = units @ self.rows.T / self.method.temperature
        return value + self.method.contrast * (everything.logsumexp(1) - own).mean()

    def merge(self, models: Mapping[str, State]) -> State:
        self.rows = unit_means({domain: (self.sent[domain], self.labels[domain]) for domain in DOMAINS})
        protected = []
        for self.client in DOMAINS:
            draws = self.draws("protection")
            low, size = self.method.mix_low, self.rows.shape[1]
            share = round(float(low + (1 - low) * torch.rand(1, 1, generator=draws)), 2)
            mask = torch.zeros(size, dtype=self.dtype)
            mask[torch.randperm(size, generator=draws)[: math.floor(self.method.mask_share * size)]] = 1
            own = self.sent[self.client]
            protected.append(mask * (share * own + (1 - share) * self.rows[self.labels[self.client]]))
        self.classifier.train_on(torch.cat(protected), torch.cat(list(self.labels.values())))
        self.judge.train_on(torch.cat(protected), self.owners())
        return self.received

    def train(self) -> State:
        return super().train() | self.classifier.named()


def unit_means(found: Mapping[str, Features]) -> Tensor:
    """The mean by samples of the clients' class means, each at unit length."""
    rows = []
    for label in range(CLASSES):
        total, count = torch.zeros(()), 0
        for features, labels in found.values():
            held = int((labels == label).sum())
            if held:
                total = total + held * F.normalize(class_means((features, labels))[label], dim=0)
                count += held
        rows.append(total / count)
    return torch.stack(rows)


class RucrLoop(DrawingLoop):
    """The classifier of the averaged model trains again on synthetic features, from the second round on."""

    rows: Tensor | None = None

    def features_of(self, client: str) -> Tensor:
        with torch.no_grad():
            features: Tensor = self.model.eval()(self.images[client])[0]
        return features

    def begin(self) -> None:
        if self.rows is None:
            return
        draws = self.draws("synthesise")
        labels = torch.arange(CLASSES).repeat_interleave(50)
        own = F.normalize(self.features_of(self.client), dim=1)
        own = own[torch.randint(len(own), (len(labels),), generator=draws)]
        share = (0.8 - 0.6 * torch.rand(len(labels), 1, generator=draws)).to(self.dtype)
        self.kept[self.client] = share * self.rows[labels] + (1 - share) * own, labels

    def loss(self, features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        value = F.cross_entropy(logits, labels)
        if self.rows is None:
            return value
        everyone = torch.cat(list(self.labels.values()))
        ratios = torch.bincount(everyone, minlength=CLASSES) / len(everyone)
        scores = F.normalize(features, dim=1) @ F.normalize(self.rows, dim=1).T / self.method.temperature
        scores = scores + F.one_hot(labels, CLASSES) * ratios.to(self.dtype).log()
        return value + self.method.contrast * F.cross_entropy(scores, labels)

    def merge(self, models: Mapping[str, State]) -> State:
        merged = super().merge(models)
        self.model.load_state_dict(merged, strict=False)
        heads: dict[str, State] = {}
        epochs = self.method.rebalance_epochs
        if epochs is None:
            epochs = int(TRAIN["epochs"])
        for domain in DOMAINS if self.rows is not None else ():
            features, labels = self.kept[domain]
            weight = merged["head.weight"].clone().requires_grad_()
            bias = merged["head.bias"].clone().requires_grad_()
            for _ in range(epochs):
                value = F.cross_entropy(features @ weight.T + bias, labels)
                steps = torch.autograd.grad(value, (weight, bias))
                with torch.no_grad():
                    weight -= self.method.rebalance_rate * steps[0]
                    bias -= self.method.rebalance_rate * steps[1]
            heads[domain] = {"head.weight": weight.detach(), "head.bias": bias.detach()}
        self.rows = unit_means({domain: (self.features_of(domain), self.labels[domain]) for domain in DOMAINS})
        if heads:
            for name in ("head.weight", "head.bias"):
                merged[name] = sum((share * heads[domain][name] for domain, share in self.shares().items()), 0.0)  # type: ignore[assignment]
        return merged


# ---- draws in every step ---------------------------------------------------------------------------------------------


class FedAdgLoop(OwnPartLoop, DrawingLoop):
    """Cross-entropy, then the game of the paper's three steps; the discriminator stays on the device."""

    uniform = True

    def stays(self, name: str) -> bool:
        return name.startswith("discriminator.")

    def loss(self, features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        smooth = self.method.smoothing
        likelihood = logits.log_softmax(1)
        own = likelihood.gather(1, labels[:, None])[:, 0]
        others = likelihood.sum(1) - own
        return -((1 - smooth) * own + smooth / (CLASSES - 1) * others).mean()

    def classes(self, labels: Tensor) -> Tensor:
        return 0.6 * F.one_hot(labels, CLASSES).to(self.dtype)

    def judged(self, features: Tensor, labels: Tensor) -> Tensor:
        """D(feature, class)."""
        judge = self.model.discriminator
        hidden = torch.cat([features, self.classes(labels)], 1) @ judge.projection.weight.T
        hidden = F.leaky_relu(hidden @ judge.fc1.weight.T + judge.fc1.bias, 0.01)
        return (hidden @ judge.fc2.weight.T + judge.fc2.bias)[:, 0].sigmoid()

    def generated(self, noise: Tensor, labels: Tensor) -> Tensor:
        """G(noise, class)."""
        maker = self.model.generator
        hidden = torch.cat([noise, self.classes(labels)], 1) @ maker.fc1.weight.T + maker.fc1.bias
        return (F.leaky_relu(hidden, 0.01) @ maker.fc2.weight.T + maker.fc2.bias).relu()

    def on_the_device(self) -> tuple[State, Features]:
        model, method = self.model, self.method
        model.load_state_dict(self.start(), strict=False)
        model.train()
        network = [*model.backbone.parameters(), *model.head.parameters()]
        optimizer = self.optimizer(network)
        for self.epoch in range(1, int(TRAIN["epochs"]) + 1):
            images, labels = self.ordered_batch()
            model.zero_grad()
            self.loss(*model(images), labels).backward()
            optimizer.step()
        optimizer = self.optimizer(network)
        of_the_judge = self.optimizer(model.discriminator.parameters(), method.rate)
        of_the_maker = self.optimizer(model.generator.parameters(), method.rate)
        draws = self.draws("generator noise")
        for _ in range(method.adversarial_epochs):
            self.epoch += 1
            images, labels = self.ordered_batch()
            features, logits = model(images)
            noise = torch.rand(len(labels), 4 * features.shape[1], generator=draws).to(self.dtype)
            reference = self.judged(self.generated(noise, labels).detach(), labels)
            own = self.judged(features.detach(), labels)
            model.zero_grad()
            (-reference.square().mean() - (1 - own).square().mean()).backward()
            of_the_judge.step()
            model.zero_grad()
            alignment = (1 - self.judged(features, labels)).square().mean()
            value = (1 - method.weight) * self.loss(features, logits, labels) + method.weight * alignment
            value.backward()
            optimizer.step()
            model.zero_grad()
            (1 - self.judged(self.generated(noise, labels), labels)).square().mean().backward()
            of_the_maker.step()
        state = floating(model.state_dict())
        self.finish(state)
        return state, (images, labels)


class FedSrLoop(OwnPartLoop, DrawingLoop):
    """One draw of every sample's Gaussian; each client learns Gaussians of the classes of its own."""

    uniform = True

    def batch(self) -> tuple[Tensor, Tensor]:
        return self.ordered_batch()

    def stays(self, name: str) -> bool:
        return name.startswith("class_gaussians.")

    def begin(self) -> None:
        self.noise = self.draws("latent noise")

    def forward(self, images: Tensor) -> Features:
        raw = self.model.backbone.network(images)
        layer = self.model.backbone.gaussian.fc
        self.mean, spread = (raw @ layer.weight.T + layer.bias).chunk(2, 1)
        self.deviation = F.softplus(spread)
        draw = torch.randn(self.mean.shape, generator=self.noise).to(self.dtype)
        features = self.mean + self.deviation * draw
        return features, self.model.head(features)

    def loss(self, features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        own = self.model.class_gaussians
        scale, deviations = F.softplus(own.raw_scale), F.softplus(own.raw_deviations)[labels]
        theirs = torch.distributions.Normal(own.means[labels], deviations)
        ours = torch.distributions.Normal(scale * self.mean, scale * self.deviation)
        apart = torch.distributions.kl_divergence(ours, theirs).sum(1).mean()
        value = F.cross_entropy(logits, labels) + self.method.norm * features.norm(dim=1).mean()
        return value + self.method.divergence * apart


class FedGcaLoop(FedDynLoop, DrawingLoop):
    """Each image and a random convolution of it; at 32x32 the maps have four positions."""

    data = replace(PLAIN, image_size=32)

    def batch(self) -> tuple[Tensor, Tensor]:
        images, labels = self.images[self.client], self.labels[self.client]
        _, draws = self.epoch_draws()
        torch.rand(len(labels), 9, generator=draws)  # the library draws these for the augmentation, here of no effect
        size = (1, 3, 5, 7)[int(torch.randint(4, (), generator=draws))]
        kernel = torch.randn(3, 3, size, size, generator=draws).to(self.dtype) / math.sqrt(3 * size**2)
        share = float(torch.rand((), generator=draws))
        view = share * F.conv2d(images, kernel, padding=size // 2) + (1 - share) * images
        return torch.cat([images, view]), torch.cat([labels, labels])

    def forward(self, images: Tensor) -> Features:
        self.seen = images
        self.maps = self.model.backbone.maps(images)
        features = self.maps.mean((2, 3))
        return features, self.model.head(features)

    @staticmethod
    def attention(weight: Tensor, maps: Tensor, labels: Tensor) -> Tensor:
        """Softmax over positions of the class's activation map."""
        return (weight[labels][:, :, None, None] * maps).sum(1).flatten(1).softmax(1)

    def loss(self, features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        frozen = self.global_model()
        with torch.no_grad():
            maps = frozen.backbone.maps(self.seen)
            theirs = frozen.head(maps.mean((2, 3))).softmax(1)
            their_maps = self.attention(frozen.head.weight, maps, labels)
        value = F.cross_entropy(logits, labels)
        ours = logits.softmax(1)
        mean = self.mean_of_views(ours, theirs)
        terms = ours * mean.log() + (1 - ours) * (1 - mean).log()
        if self.method.predictions:
            value = value - self.method.beta * 2 * terms.sum(1).mean()  # the sum over two views
        our_maps = self.attention(self.model.head.weight, self.maps, labels)
        mean = self.mean_of_views(our_maps, their_maps)
        if self.method.maps:
            value = value + self.method.beta * 2 * (our_maps * (our_maps / mean).log()).sum(1).mean()
        return value

    @staticmethod
    def mean_of_views(ours: Tensor, theirs: Tensor) -> Tensor:
        """The mean of the two views' distributions by both models, for each row; no gradient passes."""
        mean = (torch.stack(ours.chunk(2)) + torch.stack(theirs.chunk(2))).sum(0) / 4
        return torch.cat([mean, mean]).detach().clamp(1e-7, 1 - 1e-7)

    def global_model(self) -> nn.Module:
        model: nn.Module = self.settings.model.build(CLASSES, 32, self.settings.seed).to(self.dtype)
        model.load_state_dict(self.received, strict=False)
        return model.eval()


# ---- another network -------------------------------------------------------------------------------------------------


def is_eraser(name: str) -> bool:
    return ".eraser." in name or ".eraser_norm." in name


class FdseLoop(FedAvgLoop):
    """Split layers, the regulariser of the released code, consensus by brute force, erasers mixed by similarity."""

    uniform = True
    settings_of_training = SLOW

    def __init__(self, settings: RunSettings, dtype: torch.dtype) -> None:
        super().__init__(settings, dtype)
        mine = {name: tensor for name, tensor in self.received.items() if is_eraser(name)}
        self.erasers: dict[str, State] = {domain: dict(mine) for domain in DOMAINS}

    def stays(self, name: str) -> bool:
        return ".eraser_norm.running" in name

    def start(self) -> State:
        return {**self.initial, **self.received, **self.erasers[self.client], **(self.kept[self.client] or {})}

    def begin(self) -> None:
        self.running: tuple[Tensor, Tensor] | None = None

    def forward(self, images: Tensor) -> Features:
        hidden = images
        self.channels: list[Tensor] = []
        for place in range(1, 6):
            layer = self.model.backbone.get_submodule(f"conv{place}")
            first = layer.eraser_norm(layer.extractor(hidden))
            second = F.conv2d(first, layer.eraser.weight, padding=1, groups=first.shape[1])
            joined = torch.cat([first, second], 1) + layer.bias[None, :, None, None]
            self.channels.append(joined.mean((0, 2, 3)))
            hidden = self.model.backbone.get_submodule(f"bn{place}")(joined).relu()
        features = hidden.mean((2, 3))
        return features, self.model.head(features)

    def loss(self, features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        value = F.cross_entropy(logits, labels)
        if self.round == 1:
            return value
        depths = [math.exp(self.method.depth_growth * place) for place in range(5)]
        for place, channels in enumerate(self.channels):
            mean, variance = channels.mean(), channels.var()
            if self.running is not None:
                mean = 0.9 * self.running[0] + 0.1 * mean
                variance = 0.9 * self.running[1] + 0.1 * variance
            self.running = mean, variance
            mu = self.received[f"backbone.bn{place + 1}.running_mean"]
            q = self.received[f"backbone.bn{place + 1}.running_var"]
            layer = (mu**2 - mean**2) / (2 * variance) + ((variance / (q + 1e-8)).log() + q / (variance + 1e-8)) / 2
            value = value + self.method.consistency * depths[place] / sum(depths) * layer.mean()
        self.running = mean.detach(), variance.detach()
        return value

    def finish(self, state: State) -> None:
        self.kept[self.client] = {name: tensor for name, tensor in state.items() if self.stays(name)}
        self.trained = getattr(self, "trained", {})
        self.trained[self.client] = {name: tensor for name, tensor in state.items() if not self.stays(name)}

    def merge(self, models: Mapping[str, State]) -> State:
        merged = super().merge(models)
        for name, before in self.received.items():
            sent = torch.stack([models[domain][name] for domain in DOMAINS]).double()
            if is_eraser(name):
                units = F.normalize(sent.flatten(1), dim=1)
                shares = (units @ units.T / self.method.similarity_temperature).softmax(1)
                mixed = torch.einsum("kj,j...->k...", shares, sent).to(self.dtype)
                for place, domain in enumerate(DOMAINS):
                    self.erasers[domain][name] = mixed[place]
            elif name in self.parameters and self.method.consensus == "min_norm":
                moves = (sent - before.double()).flatten(1)
                lengths = moves.norm(dim=1)
                step = lengths.mean() * shortest_of_hull(moves / lengths[:, None])
                merged[name] = (before.double().flatten() + step).view_as(before).to(self.dtype)
        return merged

    def train(self) -> State:
        found = super().train() | own_models(self.kept)
        for name in self.erasers[DOMAINS[0]]:
            found[f"server/erasers/{name}"] = torch.stack([self.erasers[domain][name] for domain in DOMAINS])
        for domain, state in self.trained.items():
            found |= {f"{domain}/local/trained/{name}": tensor for name, tensor in state.items()}
        return found


def shortest_of_hull(vectors: Tensor) -> Tensor:
    """The shortest vector of the hull, by trying each face: on its plane it is perpendicular to the face's edges."""
    best = min(vectors, key=torch.linalg.vector_norm)
    for size in range(2, len(vectors) + 1):
        for face in combinations(range(len(vectors)), size):
            corner, edges = vectors[face[0]], vectors[list(face[1:])] - vectors[face[0]]
            steps = torch.linalg.lstsq(edges @ edges.T, -(edges @ corner)[:, None]).solution[:, 0]
            inside = bool((steps >= 0).all()) and float(steps.sum()) <= 1
            point = corner + steps @ edges
            if inside and point.norm() < best.norm():
                best = point
    return best
