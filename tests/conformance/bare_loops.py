"""Bare loops of methods, written from their equations: what all loops share, and those of methods that average models.

:mod:`bare_nets` has the loops of methods with nets or draws of their own. A loop has the initial weights and the images
of the toy domains from the library, and nothing else. Every client trains in full batches of images as they are, so
that no order of samples matters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from finch import FINCH
from support.toy import CLASSES, DOMAINS, Toy
from torch import Tensor, nn

from common.models.specs import ModelSpec
from common.settings import RunSettings
from strategies.core.method import build_model

TRAIN = {
    "rounds": 2,
    "epochs": 3,
    "batch_size": 256,
    "learning_rate": 0.05,
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "channels_last": False,
}
"""Settings of local training. No client, and no server with all clients' features, has two batches. Channels come
first, as in a loop: with channels last, rounding alone can part FedAvg on 32x32 images from its loop."""

PLAIN = Toy(augmentation=replace(Toy().augmentation, crop_padding=0))

Features = tuple[Tensor, Tensor]
"""Features ``[N, D]`` and labels ``[N]``."""

State = dict[str, Tensor]


def floating(state: Mapping[str, Tensor]) -> State:
    return {name: tensor.detach().clone() for name, tensor in state.items() if tensor.is_floating_point()}


def cosines(one: Tensor, other: Tensor) -> Tensor:
    return F.normalize(one, dim=1) @ F.normalize(other, dim=1).T


def contrast(scores: Tensor, labels: Tensor, classes: Tensor) -> Tensor:
    """Minus the logarithm of the share that rows of the own class have of all rows; mean over samples."""
    own = torch.where(labels[:, None] == classes, scores, -torch.inf)
    return (scores.logsumexp(1) - own.logsumexp(1)).mean()


def class_means(found: Features) -> dict[int, Tensor]:
    features, labels = found
    return {label: features[labels == label].mean(0) for label in sorted(set(labels.tolist()))}


def finch_groups(rows: Tensor) -> list[list[int]]:
    """FINCH's coarsest partition of the rows, by its authors' package; three rows or fewer are one group."""
    if len(rows) <= 3:
        return [list(range(len(rows)))]
    partition = FINCH(rows.double().numpy(), distance="cosine", verbose=False, ensure_early_exit=False)[0][:, -1]
    return [np.flatnonzero(partition == number).tolist() for number in sorted(set(partition.tolist()))]


class FedAvgLoop:
    """FedAvg: cross-entropy, momentum SGD that is new in each round, average by samples."""

    uniform: ClassVar[bool] = False
    after_training: ClassVar[bool] = False
    """Whether features are those of a pass after training; otherwise those of the last epoch's steps."""
    data: ClassVar[Toy] = PLAIN
    network: ClassVar[ModelSpec | None] = None
    """The network of the run; ``None`` is the default one."""
    settings_of_training: ClassVar[Mapping[str, Any]] = TRAIN

    def __init__(self, settings: RunSettings, dtype: torch.dtype) -> None:
        self.settings, self.method, self.dtype = settings, settings.method, dtype
        self.model: Any = build_model(settings, len(DOMAINS)).to(dtype)
        self.parameters = [name for name, _ in self.model.named_parameters() if not self.stays(name)]
        self.images: dict[str, Tensor] = {}
        self.labels: dict[str, Tensor] = {}
        for domain in DOMAINS:
            split = self.data.load(domain).train
            self.images[domain], self.labels[domain] = self.data.augmentation.test(split.images).to(dtype), split.labels
        self.initial = floating(self.model.state_dict())
        self.received = {name: tensor for name, tensor in self.initial.items() if not self.stays(name)}
        self.round = 0
        self.kept: dict[str, Any] = dict.fromkeys(DOMAINS)

    def train(self) -> State:
        """What the run ends with, by the names that :func:`test_bare_loops.left_by` gives."""
        for self.round in (1, 2):
            models: dict[str, State] = {}
            features: dict[str, Features] = {}
            for client in self.images:
                self.client = client
                models[client], features[client] = self.on_the_device()
            self.collect(features)
            self.received = self.merge(models)
        return self.received

    def stays(self, name: str) -> bool:
        """Whether a tensor of the model is a client's own."""
        return False

    def start(self) -> State:
        """What the client's model starts from."""
        return self.received

    def batch(self) -> tuple[Tensor, Tensor]:
        """Images and labels of one epoch."""
        return self.images[self.client], self.labels[self.client]

    def forward(self, images: Tensor) -> Features:
        """Features and logits."""
        features, logits = self.model(images)
        return features, logits

    def on_the_device(self) -> tuple[State, Features]:
        model = self.model
        model.load_state_dict(self.start(), strict=False)
        self.begin()
        optimizer = self.optimizer(model.parameters())
        model.train()
        for self.epoch in range(1, int(TRAIN["epochs"]) + 1):
            images, labels = self.batch()
            optimizer.zero_grad()
            features, logits = self.forward(images)
            self.loss(features, logits, labels).backward()
            self.edit(images, labels)
            optimizer.step()
        state = floating(model.state_dict())
        self.finish(state)
        if self.after_training:
            with torch.no_grad():
                features = model.eval()(images)[0]
        return state, (features.detach(), labels)

    def optimizer(self, parameters: Iterable[nn.Parameter], rate: float = 1.0) -> torch.optim.Optimizer:
        """The run's optimiser, new, at ``rate`` times its learning rate."""
        train = self.settings_of_training
        return torch.optim.SGD(
            parameters,
            lr=rate * train["learning_rate"],
            momentum=train["momentum"],
            weight_decay=train["weight_decay"],
        )

    def begin(self) -> None: ...

    def loss(self, features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)

    def edit(self, images: Tensor, labels: Tensor) -> None: ...

    def finish(self, state: State) -> None: ...

    def collect(self, features: Mapping[str, Features]) -> None: ...

    def shares(self) -> dict[str, float]:
        if self.uniform:
            return dict.fromkeys(DOMAINS, 1 / len(DOMAINS))
        total = sum(map(len, self.labels.values()))
        return {domain: len(labels) / total for domain, labels in self.labels.items()}

    def merge(self, models: Mapping[str, State]) -> State:
        shares = self.shares()
        merged: State = {}
        for name in self.received:
            merged[name] = sum((shares[domain] * state[name].double() for domain, state in models.items()), 0.0)  # type: ignore[assignment]
            merged[name] = merged[name].to(self.dtype)
        return merged

    def gradients(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            found[name] = parameter.grad
        return found


class FedProxLoop(FedAvgLoop):
    def edit(self, images: Tensor, labels: Tensor) -> None:
        for name, parameter in self.model.named_parameters():
            self.gradients()[name].add_(self.method.mu * (parameter.detach() - self.received[name]))


class FedDynLoop(FedAvgLoop):
    uniform = True

    def begin(self) -> None:
        if self.round == 1:
            self.kept[self.client] = {name: torch.zeros_like(self.received[name]) for name in self.parameters}
            self.h = {name: torch.zeros_like(self.received[name]) for name in self.parameters}

    def edit(self, images: Tensor, labels: Tensor) -> None:
        for name, parameter in self.model.named_parameters():
            pull = self.method.alpha * (parameter.detach() - self.received[name])
            self.gradients()[name].add_(pull - self.kept[self.client][name])

    def finish(self, state: State) -> None:
        for name in self.parameters:
            self.kept[self.client][name] -= self.method.alpha * (state[name] - self.received[name])

    def merge(self, models: Mapping[str, State]) -> State:
        merged = super().merge(models)
        for name in self.parameters:
            moved = sum(state[name] - self.received[name] for state in models.values())
            self.h[name] = self.h[name] - self.method.alpha / len(DOMAINS) * moved
            merged[name] = merged[name] - self.h[name] / self.method.alpha
        return merged


class ScaffoldLoop(FedAvgLoop):
    uniform = True

    def begin(self) -> None:
        if self.round == 1 and self.client == DOMAINS[0]:
            self.c = {name: torch.zeros_like(self.received[name]) for name in self.parameters}
            self.kept = {domain: dict(self.c) for domain in DOMAINS}
            self.new: dict[str, State] = {}

    def edit(self, images: Tensor, labels: Tensor) -> None:
        for name, gradient in self.gradients().items():
            gradient.add_(self.c[name] - self.kept[self.client][name])

    def finish(self, state: State) -> None:
        momentum = TRAIN["momentum"]
        gradients = sum((1 - momentum**step) / (1 - momentum) for step in range(1, int(TRAIN["epochs"]) + 1))
        travelled = TRAIN["learning_rate"] * gradients
        self.new[self.client] = {}
        for name in self.parameters:
            moved = (self.received[name] - state[name]) / travelled
            self.new[self.client][name] = self.kept[self.client][name] - self.c[name] + moved

    def merge(self, models: Mapping[str, State]) -> State:
        for name in self.parameters:
            changes = [self.new[domain][name] - self.kept[domain][name] for domain in DOMAINS]
            self.c[name] = self.c[name] + torch.stack(changes).mean(0)
        self.kept = {domain: dict(state) for domain, state in self.new.items()}
        return super().merge(models)


class FedOptLoop(FedAvgLoop):
    uniform = True

    def merge(self, models: Mapping[str, State]) -> State:
        merged = super().merge(models)
        if self.round == 1:
            self.velocity = {name: torch.zeros_like(self.received[name]) for name in self.parameters}
        for name in self.parameters:
            self.velocity[name] = self.method.momentum * self.velocity[name] + merged[name] - self.received[name]
            merged[name] = self.received[name] + self.method.server_learning_rate * self.velocity[name]
        return merged


class MoonLoop(FedAvgLoop):
    def _frozen(self, state: State) -> Tensor:
        model = deepcopy(self.model)
        model.load_state_dict(state, strict=False)
        with torch.no_grad():
            features: Tensor = model.eval()(self.images[self.client])[0]
        return features

    def loss(self, features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        previous = self.received if self.kept[self.client] is None else self.kept[self.client]
        towards = F.cosine_similarity(features, self._frozen(self.received)) / self.method.temperature
        away = F.cosine_similarity(features, self._frozen(previous)) / self.method.temperature
        terms = -torch.log(towards.exp() / (towards.exp() + away.exp()))
        return F.cross_entropy(logits, labels) + self.method.mu * terms.mean()

    def finish(self, state: State) -> None:
        self.kept[self.client] = state


class FedSamLoop(FedAvgLoop):
    def edit(self, images: Tensor, labels: Tensor) -> None:
        gradients = {name: gradient.clone() for name, gradient in self.gradients().items()}
        length = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
        place = floating(self.model.state_dict())
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.add_(self.method.rho * gradients[name] / length)
        self.model.zero_grad()
        features, logits = self.model(images)
        self.loss(features, logits, labels).backward()
        self.model.load_state_dict(place, strict=False)


class FedProtoLoop(FedAvgLoop):
    """Every client's class means; the global ones are their plain means. With three clients FINCH makes one cluster."""

    by_samples: ClassVar[bool] = False
    rows: Tensor | None = None

    def collect(self, features: Mapping[str, Features]) -> None:
        rows = []
        for label in range(CLASSES):
            means, counts = [], []
            for found in features.values():
                if label in found[1]:
                    means.append(class_means(found)[label])
                    counts.append(float((found[1] == label).sum()) if self.by_samples else 1.0)
            shares = torch.tensor(counts, dtype=self.dtype) / sum(counts)
            rows.append((shares[:, None] * torch.stack(means)).sum(0))
        self.rows = torch.stack(rows)

    def loss(self, features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        value = F.cross_entropy(logits, labels)
        if self.rows is None:
            return value
        return self.with_rows(value, features, labels, self.rows)

    def with_rows(self, value: Tensor, features: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        return value + self.method.consistency * (features - rows[labels]).square().mean()

    def contrast(self, features: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        return contrast(cosines(features, rows) / self.method.temperature, labels, torch.arange(CLASSES))


class FplLoop(FedProtoLoop):
    def with_rows(self, value: Tensor, features: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        value = value + self.method.contrast * self.contrast(features, labels, rows)
        return value + self.method.consistency * (features - rows[labels]).square().mean()


class FedApcLoop(FedProtoLoop):
    after_training = True

    def with_rows(self, value: Tensor, features: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        return value + self.method.contrast * self.contrast(features, labels, rows)


class FedProcLoop(FedProtoLoop):
    after_training = True
    by_samples = True

    def with_rows(self, value: Tensor, features: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        share = (self.round - 1) / int(TRAIN["rounds"])
        return share * value + (1 - share) * self.contrast(features, labels, rows)


class FedDapLoop(FedAvgLoop):
    """A domain has one client here, so that its rows are that client's class means."""

    rows: dict[str, dict[int, Tensor]] | None = None

    def collect(self, features: Mapping[str, Features]) -> None:
        self.rows = {domain: class_means(found) for domain, found in features.items()}

    def loss(self, features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        value = F.cross_entropy(logits, labels)
        if self.rows is None:
            return value
        own = torch.stack([self.rows[self.client][label] for label in labels.tolist()])
        value = value + self.method.alignment * (1 - F.cosine_similarity(features, own)).mean()
        others, classes = [], []
        for domain, means in self.rows.items():
            if domain != self.client:
                others += means.values()
                classes += means
        scores = cosines(features, torch.stack(others)) / self.method.temperature
        return value + self.method.contrast * contrast(scores, labels, torch.tensor(classes))


class ClusterLoop(FedAvgLoop):
    """FINCH on the device, class by class, and again on the server; weights are shares of a class's samples."""

    after_training = True
    clusters: tuple[Tensor, Tensor, Tensor] | None = None

    def collect(self, features: Mapping[str, Features]) -> None:
        rows, classes, weights = [], [], []
        for label in range(CLASSES):
            sent, sizes = [], []
            for vectors, labels in features.values():
                mine = vectors[labels == label]
                for group in finch_groups(mine) if len(mine) else []:
                    sent.append(mine[group].mean(0))
                    sizes.append(float(len(group)))
            total = sum(sizes)
            for group in finch_groups(torch.stack(sent)):
                rows.append(torch.stack([sent[place] for place in group]).mean(0))
                classes.append(label)
                weights.append(sum(sizes[place] for place in group) / total)
        self.clusters = torch.stack(rows), torch.tensor(classes), torch.tensor(weights, dtype=self.dtype)

    def powers(self, features: Tensor, rows: Tensor) -> Tensor:
        return cosines(features, rows).clamp_min(1e-4) ** self.method.alpha


class FedPlvmLoop(ClusterLoop):
    uniform = True

    def loss(self, features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        value = F.cross_entropy(logits, labels)
        if self.clusters is None:
            return value
        rows, classes, _ = self.clusters
        powers = self.powers(features, rows)
        value = value + self.method.contrast * contrast(powers / self.method.temperature, labels, classes)
        means = torch.stack([rows[classes == label].mean(0) for label in range(CLASSES)])
        nearness = F.cosine_similarity(features, means[labels])
        return value + self.method.correction * 2 * (nearness - 1).square().mean()


class FedPlccLoop(ClusterLoop):
    def loss(self, features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        value = F.cross_entropy(logits, labels)
        if self.clusters is None:
            return value
        rows, classes, weights = self.clusters
        powers = self.powers(features, rows)
        scores = powers / self.method.temperature + weights.log()
        value = value + self.method.contrast * contrast(scores, labels, classes)
        pulls = []
        for sample, label in enumerate(labels.tolist()):
            own = (powers[sample] * weights)[classes == label]
            count = max(1, int(np.ceil(self.method.fraction * len(own) - 1e-9)))
            pulls.append(own.sort(descending=True).values[:count].sum())
        return value - self.method.correction * torch.stack(pulls).mean()


class OwnPartLoop(FedAvgLoop):
    """FedAvg of a part of the model; a client keeps the rest from round to round."""

    def start(self) -> State:
        return {**self.initial, **self.received, **(self.kept[self.client] or {})}

    def finish(self, state: State) -> None:
        self.kept[self.client] = {name: tensor for name, tensor in state.items() if self.stays(name)}

    def train(self) -> State:
        return super().train() | own_models(self.kept)


def own_models(kept: Mapping[str, State]) -> State:
    """The clients' tensors by the names that :func:`test_bare_loops.left_by` gives them."""
    return {f"{domain}/model/{name}": tensor for domain, state in kept.items() for name, tensor in state.items()}


class FedBnLoop(OwnPartLoop):
    """Batch normalisation stays on each device."""

    def stays(self, name: str) -> bool:
        return isinstance(self.model.get_submodule(name.rpartition(".")[0]), nn.BatchNorm2d | nn.BatchNorm1d)


class HealLoop(FedAvgLoop):
    """FedHEAL's mask and shares."""

    falls: dict[str, State]

    def merge(self, models: Mapping[str, State]) -> State:
        method, sent, lengths = self.method, {}, {}
        if self.round == 1:
            self.falls = {}
            self.gain = dict.fromkeys(DOMAINS, 0.0)
            self.lead = dict.fromkeys(DOMAINS, 1 / len(DOMAINS))
        for domain, state in models.items():
            falls = {name: (self.received[name] - state[name] >= 0).to(self.dtype) for name in state}
            sent[domain] = {name: torch.ones_like(tensor) for name, tensor in falls.items()}
            if self.round == 2:
                for name, fell in falls.items():
                    before = self.falls[domain][name]
                    same = torch.where(fell > 0, before, 1 - before)
                    sent[domain][name] = (same > method.threshold).to(self.dtype)
            self.falls[domain] = falls
            moved = [((state[name] - self.received[name]) * sent[domain][name]).norm() for name in self.parameters]
            lengths[domain] = float(torch.stack(moved).sum())
        total = sum(lengths.values())
        for domain in DOMAINS:
            share = lengths[domain] / total
            self.gain[domain] = (1 - method.momentum) * self.gain[domain] + method.momentum * share
            self.lead[domain] += self.gain[domain]
        merged: State = {}
        for name, tensor in self.received.items():
            weights = {domain: self.lead[domain] * sent[domain][name] for domain in DOMAINS}
            weight = sum(weights.values())
            mean = sum(weights[domain] * models[domain][name] for domain in DOMAINS) / weight
            merged[name] = torch.where(weight > 0, mean, tensor)
        return merged


class FplHealLoop(HealLoop, FplLoop):
    """FPL's loss, FedHEAL's average."""


class CombinedLoop(FedDynLoop, FplLoop):
    """FPL's loss and FedDyn's correction; batch normalisation is averaged."""


class FedDgGaLoop(FedAvgLoop):
    """Shares that follow the loss of accuracy by averaging, on the training images."""

    def accuracy(self) -> float:
        with torch.no_grad():
            logits = self.model.eval()(self.images[self.client])[1]
        return float((logits.argmax(1) == self.labels[self.client]).to(torch.float64).mean())

    def begin(self) -> None:
        if self.round == 1:
            self.share = dict.fromkeys(DOMAINS, 1 / len(DOMAINS))
            self.gaps: dict[str, float] = {}
        else:
            self.gaps[self.client] = self.accuracy() - self.kept[self.client]

    def finish(self, state: State) -> None:
        if self.round == 1:
            self.kept[self.client] = self.accuracy()

    def shares(self) -> dict[str, float]:
        largest = max((abs(gap) for gap in self.gaps.values()), default=0.0)
        if largest > 0:
            for domain, gap in self.gaps.items():
                step = self.method.step_size / len(DOMAINS) * (1 - (self.round - 1 - 2) / int(TRAIN["rounds"]))
                moved = self.share[domain] - step * gap / largest
                self.share[domain] = min(max(moved, 0.0), 1.0)
            total = sum(self.share.values())
            self.share = {domain: share / total for domain, share in self.share.items()}
        return self.share


class I2pflLoop(FedApcLoop):
    """Without MixUp: prototypes by squared distance from the mean of the clients' means, smoothed."""

    def collect(self, features: Mapping[str, Features]) -> None:
        before, rows = self.rows, []
        for label in range(CLASSES):
            means = torch.stack([class_means(found)[label] for found in features.values() if label in found[1]])
            distances = (means - means.mean(0)).square().sum(1)
            rows.append((distances[:, None] / distances.sum() * means).sum(0))
        self.rows = torch.stack(rows)
        if before is not None:
            self.rows = self.method.smoothing * before + (1 - self.method.smoothing) * self.rows


class FedRepLoop(OwnPartLoop):
    """The head of its own trains for the received body, then the body for one epoch."""

    def stays(self, name: str) -> bool:
        return name.startswith("head.")

    def on_the_device(self) -> tuple[State, Features]:
        model, images, labels = self.model, self.images[self.client], self.labels[self.client]
        model.load_state_dict(self.start(), strict=False)
        model.train()
        for part, epochs in (("head.", self.method.head_epochs or int(TRAIN["epochs"])), ("backbone.", 1)):
            optimizer = self.optimizer(tensor for name, tensor in model.named_parameters() if name.startswith(part))
            for _ in range(epochs):
                model.zero_grad()
                features, logits = model(images)
                self.loss(features, logits, labels).backward()
                optimizer.step()
        state = floating(model.state_dict())
        self.finish(state)
        return state, (features.detach(), labels)


class FcclPlusLoop(FedAvgLoop):
    """Distillation from the own model of the round before; after training, one step of Adam per public batch."""

    uniform = True

    def loss(self, features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        value = F.cross_entropy(logits, labels)
        if self.kept[self.client] is None:
            return value
        heat = self.method.distillation_temperature
        teacher = deepcopy(self.model)
        teacher.load_state_dict(self.kept[self.client], strict=False)
        with torch.no_grad():
            taught = F.softmax(teacher.eval()(self.images[self.client])[1] / heat, dim=1)
        terms = taught * (taught.log() - F.log_softmax(logits / heat, dim=1))
        others = torch.arange(CLASSES) != labels[:, None]
        return value + self.method.distillation * heat**2 * (terms * others).sum(1).mean()

    def alike(self, features: Tensor) -> Tensor:
        """Cosines of a batch over the temperature, without those of an image with itself."""
        found = cosines(features, features) / self.method.similarity_temperature
        return found[~torch.eye(len(features), dtype=torch.bool)].view(len(features), -1)

    def merge(self, models: Mapping[str, State]) -> State:
        method = self.method
        public = PLAIN.augmentation.test(method.public.load(None)).to(self.dtype).split(method.public_batch)
        means: list[list[Tensor]] = [[] for _ in public]
        similar: list[list[Tensor]] = [[] for _ in public]
        for domain, state in models.items():
            self.kept[domain] = dict(state)
            self.model.load_state_dict(state, strict=False)
            self.model.train()
            for place, images in enumerate(public):
                with torch.no_grad():
                    features, logits = self.model(images)
                means[place].append(logits)
                similar[place].append(self.alike(features))
        after: dict[str, State] = {}
        for domain, state in models.items():
            self.model.load_state_dict(state, strict=False)
            for place, images in enumerate(public):
                optimizer = torch.optim.Adam(self.model.parameters(), lr=method.public_learning_rate)
                optimizer.zero_grad()
                features, logits = self.model(images)
                mean = torch.stack(means[place]).mean(0)
                ours, theirs = ((columns - columns.mean(0)) / columns.std(0) for columns in (logits, mean))
                correlation = ours.T @ theirs / len(images)
                eye = torch.eye(CLASSES, dtype=self.dtype)
                value = (eye * (correlation - 1) ** 2 + (1 - eye) * 0.0051 * (correlation + 1) ** 2).sum()
                target = F.softmax(torch.stack(similar[place]).mean(0), dim=1)
                apart = target * (target.log() - F.log_softmax(self.alike(features), dim=1))
                (method.correlation * value + method.similarity * apart.sum(1).mean()).backward()
                optimizer.step()
            after[domain] = floating(self.model.state_dict())
        return super().merge(after)
