"""FPL in one file: federated prototype learning from images to the table of scores, to be read from top to bottom.

    python docs/fpl_in_one_file.py            # about a minute on one CPU core, after `make setup`

Four clients hold digits in four styles (handwritten, printed, signs, sketch). They never share images. In every round

1. the server sends one model and a set of *prototypes*, which are mean feature vectors of classes, to all clients;
2. every client trains the model on its own images, and pulls its features towards the prototypes of the right class;
3. every client sends back its model and its own class means;
4. the server averages the models, and clusters the class means into the prototypes of the next round.

The method is FPL: Huang, Ye, Shi, Li and Du, "Rethinking Federated Learning With Domain Shift: A Prototype View", CVPR
2023. Equation numbers below are the paper's.

This file trains the same model as Goldfinch does with the same settings::

    goldfinch run method=fpl data=glyphs train.rounds=5 train.device=cpu

The scores and every tensor are the same (tests/methods/test_one_file.py). Goldfinch adds what is around it: clients as
separate processes, messages, checks of what arrives, resuming, records, other methods. From Goldfinch this file
takes the images and the random numbers, so that both see the same ones.
"""

from __future__ import annotations

import copy
import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.data.batches import Augmentation, Split
from common.data.glyphs import Glyphs
from common.numerics import derive, generator

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # an optional part of finch-clust is not installed
    from finch.finch import FINCH

# ---- settings --------------------------------------------------------------------------------------------------------

DOMAINS = ("handwritten", "printed", "signs", "sketch")
CLASSES, FEATURES = 10, 128  # a feature vector has 128 numbers
ROUNDS = 5
EPOCHS = 1  # of local training, in every round
BATCH_SIZE = 32
LEARNING_RATE = 0.01
MOMENTUM = 0.9
WEIGHT_DECAY = 1e-5
TEMPERATURE = 0.02  # tau of Eq. 7
SEED = 0

# Training images are shifted by up to two pixels. All images are scaled to [-1, 1].
AUGMENTATION = Augmentation(crop_padding=2, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))

Weights = dict[str, Tensor]


# ---- the model -------------------------------------------------------------------------------------------------------


class Backbone(nn.Module):
    """Five convolutions with batch normalisation, then the mean over positions: images to features."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 5, stride=2, padding=2, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(32)
        self.conv3 = nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(64)
        self.conv4 = nn.Conv2d(64, 64, 3, padding=1, bias=False)
        self.bn4 = nn.BatchNorm2d(64)
        self.conv5 = nn.Conv2d(64, FEATURES, 3, stride=2, padding=1, bias=False)
        self.bn5 = nn.BatchNorm2d(FEATURES)

    def forward(self, images: Tensor) -> Tensor:
        """Return features ``[B, 128]``, all >= 0, of ``images [B, 3, 32, 32]``."""
        maps = torch.relu(self.bn1(self.conv1(images)))
        maps = torch.relu(self.bn2(self.conv2(maps)))
        maps = torch.relu(self.bn3(self.conv3(maps)))
        maps = torch.relu(self.bn4(self.conv4(maps)))
        maps = torch.relu(self.bn5(self.conv5(maps)))
        return maps.mean(dim=(2, 3))


class Model(nn.Module):
    """The backbone, and one linear layer that classifies its features."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return features ``[B, 128]`` and logits ``[B, 10]`` of ``images [B, 3, 32, 32]``."""
        features = self.backbone(images)
        return features, self.head(features)


# ---- prototypes ------------------------------------------------------------------------------------------------------


class Prototypes(NamedTuple):
    """Mean feature vectors, each of one class. A class may have several, or none."""

    vectors: Tensor  # float32 [M, 128]
    labels: Tensor  # int64 [M], the class of each vector, ascending


def class_means(features: Tensor, labels: Tensor) -> Prototypes:
    """Return the mean of ``features [N, 128]`` for every class in ``labels [N]``. Sums are made in float64."""
    sums = torch.zeros(CLASSES, FEATURES, dtype=torch.float64).index_add_(0, labels, features.double())
    counts = torch.bincount(labels, minlength=CLASSES)
    present = counts.nonzero().flatten()
    return Prototypes((sums[present] / counts[present, None]).float(), present)


def cluster(vectors: Tensor) -> list[Tensor]:
    """Group ``vectors [N, 128]`` with FINCH and return the mean of each group (Eq. 4).

    FINCH joins every vector with its nearest neighbour by cosine similarity, then does the same with the groups. Of
    the partitions that this gives, FPL takes the coarsest. Three vectors or fewer are always one group.
    """
    if len(vectors) <= 3:
        return [vectors.double().mean(0).float()]
    partitions, _, _ = FINCH(vectors.numpy(), ensure_early_exit=False, verbose=False)
    coarsest = torch.from_numpy(partitions[:, -1].astype("int64"))
    means = []
    for group in dict.fromkeys(coarsest.tolist()):  # in the order of their first members
        members = vectors[coarsest == group]
        means.append(members.double().mean(0).float())
    return means


def cluster_prototypes(uploads: list[Prototypes]) -> Prototypes:
    """Cluster the clients' class means, each class by itself."""
    vectors = []
    labels = []
    for label in range(CLASSES):
        of_class = torch.cat([upload.vectors[upload.labels == label] for upload in uploads])
        if len(of_class) == 0:
            continue
        for mean in cluster(of_class):
            vectors.append(mean)
            labels.append(label)
    return Prototypes(torch.stack(vectors), torch.tensor(labels))


def unbiased_prototypes(prototypes: Prototypes) -> Tensor:
    """Return ``[10, 128]``: the mean of each class's prototypes (Eq. 8). Every cluster counts the same."""
    table = torch.zeros(CLASSES, FEATURES)
    for label in prototypes.labels.unique().tolist():
        table[label] = prototypes.vectors[prototypes.labels == label].double().mean(0).float()
    return table


# ---- the loss --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def prototype_gradient(features: Tensor, labels: Tensor, prototypes: Prototypes, unbiased: Tensor) -> Tensor:
    """Return the gradient ``[B, 128]`` of FPL's two prototype losses in ``features [B, 128]`` of ``labels [B]``.

    *Contrast with cluster prototypes* (CPCL, Eq. 7). With ``s`` the cosine similarity of a feature and a prototype::

        loss = -log(sum over own class of exp(s / tau)  /  sum over all classes of exp(s / tau))
             = softplus(gap),   gap = logsumexp over other classes of (s / tau) - logsumexp over own class of (s / tau)

    so its derivative in ``s / tau`` is ``sigmoid(gap)`` times a softmax: over the other classes it pushes the feature
    away, over the own class it pulls.

    *Consistency with unbiased prototypes* (UPCR, Eq. 10): the squared distance to the class's unbiased prototype. The
    authors' code takes its mean over the 128 numbers, where the paper has the sum.

    Both losses are means over the batch. Autograd gives the same gradient, up to rounding.
    """
    batch_size = len(features)
    inverse_length = features.norm(dim=1, keepdim=True).reciprocal()
    units = prototypes.vectors / prototypes.vectors.norm(dim=1, keepdim=True)
    cosines = (features @ units.T) * inverse_length  # [B, M]
    logits = cosines / TEMPERATURE
    own_class = labels[:, None] == prototypes.labels
    own = logits.masked_fill(~own_class, -torch.inf).logsumexp(dim=1, keepdim=True)
    others = logits.masked_fill(own_class, -torch.inf).logsumexp(dim=1, keepdim=True)
    size = (others - own).sigmoid() * (1 / (TEMPERATURE * batch_size))
    shares = (logits - torch.where(own_class, own, others)).exp()
    in_cosines = shares * torch.where(own_class, -size, size)  # the derivative in each cosine
    # d cosine / d feature = (unit prototype - cosine * unit feature) / length of the feature
    in_cosines = in_cosines * inverse_length
    along_feature = torch.linalg.vecdot(in_cosines, cosines)[:, None] * inverse_length
    contrast = (in_cosines @ units).addcmul(features, along_feature, value=-1.0)
    return contrast.add(features - unbiased[labels], alpha=2.0 / FEATURES / batch_size)


# ---- a client --------------------------------------------------------------------------------------------------------


def batches_of(split: Split, draws: torch.Generator) -> list[Tensor]:
    """Return the indices of one epoch's batches, in random order. The last one may have fewer samples."""
    return list(torch.randperm(len(split), generator=draws).split(BATCH_SIZE))


def train(model: Model, client: str, split: Split, prototypes: Prototypes | None, round_number: int) -> Prototypes:
    """Train ``model`` in place on one client's images and return its class means. Round 1 has no prototypes yet."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM, weight_decay=WEIGHT_DECAY)
    if prototypes is not None:
        unbiased = unbiased_prototypes(prototypes)
    for epoch in range(1, EPOCHS + 1):
        epoch_features, epoch_labels = [], []  # those of the last epoch make the class means
        draws = generator(SEED, "epoch", epoch, round_number, client)
        for indices in batches_of(split, draws):
            images = AUGMENTATION.train(split.images[indices], draws)
            labels = split.labels[indices]
            features, logits = model(images.contiguous(memory_format=torch.channels_last))
            loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad()
            if prototypes is None:
                loss.backward()
            else:  # what the prototypes add arrives at the features, and flows on into the backbone
                gradient = prototype_gradient(features, labels, prototypes, unbiased)
                torch.autograd.backward((loss, features), (None, gradient))
            optimizer.step()
            epoch_features.append(features.detach())
            epoch_labels.append(labels)
    return class_means(torch.cat(epoch_features), torch.cat(epoch_labels))


@torch.no_grad()
def accuracy(model: Model, split: Split) -> float:
    """Return the share of images that ``model`` classifies correctly, in per cent."""
    model.eval()
    correct = 0
    for images, labels in zip(split.images.split(256), split.labels.split(256), strict=True):
        _, logits = model(AUGMENTATION.test(images).contiguous(memory_format=torch.channels_last))
        correct += int((logits.argmax(dim=1) == labels).sum())
    return 100.0 * correct / len(split)


# ---- the server ------------------------------------------------------------------------------------------------------


def average(states: list[Weights], samples: list[int]) -> Weights:
    """Average the clients' models by their numbers of samples (FedAvg). Of integers, the result is the lower median."""
    result = {}
    for name, first in states[0].items():
        tensors = [state[name] for state in states]
        if first.is_floating_point():
            total = torch.zeros(first.shape, dtype=torch.float64)
            for tensor, count in zip(tensors, samples, strict=True):
                total.add_(tensor.double(), alpha=count / sum(samples))
            result[name] = total.to(first.dtype)
        else:
            result[name] = torch.stack(tensors).median(dim=0).values
    return result


def run() -> tuple[dict[str, float], Weights, Prototypes]:
    """Train for all rounds. Return the last model's accuracy by domain, its weights, and the last prototypes."""
    torch.set_num_threads(1)
    data = Glyphs()
    domains = {name: data.load(name) for name in DOMAINS}
    torch.manual_seed(derive(SEED, "initialisation"))
    model = Model().to(memory_format=torch.channels_last)
    weights: Weights = copy.deepcopy(model.state_dict())
    prototypes = None
    for round_number in range(1, ROUNDS + 1):
        states = []
        uploads = []
        for name, domain in domains.items():  # one client per domain
            model.load_state_dict(weights)
            uploads.append(train(model, f"{name}-0", domain.train, prototypes, round_number))
            states.append(copy.deepcopy(model.state_dict()))
        weights = average(states, [len(domain.train) for domain in domains.values()])
        prototypes = cluster_prototypes(uploads)
        model.load_state_dict(weights)
        scores = {name: accuracy(model, domain.test) for name, domain in domains.items()}
        print(f"round {round_number}: average {sum(scores.values()) / len(scores):.2f}", flush=True)
    return scores, weights, prototypes


def main() -> None:
    """Train, then print the table that ``goldfinch run`` prints."""
    scores, _, _ = run()
    average_score = sum(scores.values()) / len(scores)
    columns = {**scores, "average": average_score, "worst": min(scores.values())}
    print("\n" + "  ".join(f"{name:>11}" for name in columns))
    print("  ".join(f"{value:11.2f}" for value in columns.values()))


if __name__ == "__main__":
    main()
