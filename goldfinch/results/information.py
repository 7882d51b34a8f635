"""A lower bound on the mutual information between features and what a device sends of them.

FedPall (ICCV 2025) reports DEMINE (Lin et al., "Data-Efficient Mutual Information Neural Estimator", 2019) without its
settings. As in DEMINE, a critic is trained on one part of the pairs, and the bound of Donsker and Varadhan is evaluated
on another part, so that a critic which memorises its pairs gains nothing. The rest is ours: a critic of the distance
between two small embeddings, bounded to [-10, 10]; five folds, three to train on, one to choose when to stop, one for
the estimate; inputs with zero mean and unit variance. The estimate saturates near 10 where X and Y determine each
other. Numbers are comparable with each other, not with the paper's.
"""

import copy
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from common.errors import ConfigError
from common.models.base import initialised
from common.numerics import generator
from goldfinch.record import RunRecord
from goldfinch.run_model import RunModel
from strategies.fedpall import FedPall

BOUND = 10.0
FOLDS = 5
MIN_PAIRS = 50
"""Fewest pairs of an estimate; with fewer, the folds are too small."""


@dataclass(frozen=True)
class Information:
    """An estimate.

    Args:
        nats: mean over folds of the bound on held-out pairs; may be slightly below 0 where nothing is shared.
        deviation: sample standard deviation over folds.
        pairs: pairs in all.
    """

    nats: float
    deviation: float
    pairs: int


class Critic(nn.Module):
    """``T(x, y) = 10 tanh((offset - scale |u(x) - v(y)|^2) / 10)`` for all pairs of a batch.

    X and Y of the same size begin with ``u = v``, because what a device sends is a changed copy of what it has.
    """

    def __init__(self, first: int, second: int, hidden: int = 64) -> None:
        super().__init__()
        self.left = Embedding(first, hidden)
        self.right = copy.deepcopy(self.left) if first == second else Embedding(second, hidden)
        self.scale = nn.Parameter(torch.tensor(-2.0))
        self.offset = nn.Parameter(torch.tensor(0.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """``[N, N]``: entry (i, j) for x_i ``[N, D1]`` and y_j ``[N, D2]``."""
        u, v = self.left(x), self.right(y)
        distances = u.square().sum(1)[:, None] + v.square().sum(1)[None] - 2 * u @ v.T
        return BOUND * torch.tanh((self.offset - self.scale.exp() * distances) / BOUND)


class Embedding(nn.Module):
    """``[N, D]`` to ``[N, H]``: a linear map and a small correction that begins at zero."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, hidden, bias=False)
        last = nn.Linear(hidden, hidden)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.bent = nn.Sequential(nn.Linear(size, hidden), nn.ReLU(), last)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the embedding ``[N, H]`` of rows ``[N, D]``."""
        return self.linear(rows) + self.bent(rows)


def donsker_varadhan(scores: Tensor) -> Tensor:
    """``E_joint[T] - log E_marginals[exp T]`` of ``[N, N]`` scores: pairs are the diagonal, marginals the rest."""
    count = len(scores)
    others = scores.masked_fill(torch.eye(count, dtype=torch.bool, device=scores.device), -torch.inf)
    return scores.diagonal().mean() - (others.flatten().logsumexp(0) - math.log(count * (count - 1)))


def mutual_information(x: Tensor, y: Tensor, *, seed: int = 0, steps: int = 150, batch: int = 256) -> Information:
    """A lower bound on I(X; Y) in nats, from pairs.

    Args:
        x: ``[N, D1]`` float.
        y: ``[N, D2]`` float; row i belongs to row i of ``x``.
        seed: of folds, batches and the critic's first weights.
        steps: of Adam at 3e-3 per fold.
        batch: pairs per step.

    Raises:
        ConfigError: fewer than 50 pairs.
    """
    if len(x) != len(y) or len(x) < MIN_PAIRS:
        raise ConfigError(f"mutual information needs {MIN_PAIRS} pairs or more; got {len(x)} and {len(y)}")
    x, y = _standardised(x), _standardised(y)
    draws = generator(seed, "mutual information")
    order = torch.randperm(len(x), generator=draws)
    values = []
    for fold in range(FOLDS):
        places = torch.arange(len(order)) % FOLDS
        held, choosing = order[places == fold], order[places == (fold + 1) % FOLDS]
        used = order[(places != fold) & (places != (fold + 1) % FOLDS)]
        with initialised(seed, "critic", fold):
            critic = Critic(x.shape[1], y.shape[1])
        best, held_bound = 0.0, 0.0  # the bound without a critic
        optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3, weight_decay=1e-4)
        for step in range(steps):
            if step % 10 == 0 and (bound := _bound(critic, x[choosing], y[choosing])) > best:
                best, held_bound = bound, _bound(critic, x[held], y[held])
            rows = used[torch.randperm(len(used), generator=draws)[:batch]]
            optimizer.zero_grad(set_to_none=True)
            (-donsker_varadhan(critic(x[rows], y[rows]))).backward()
            optimizer.step()
        values.append(held_bound)
    folds = torch.tensor(values, dtype=torch.float64)
    return Information(float(folds.mean()), float(folds.std()), len(x))


@torch.no_grad()
def _bound(critic: Critic, x: Tensor, y: Tensor) -> float:
    return float(donsker_varadhan(critic(x, y)))


def _standardised(rows: Tensor) -> Tensor:
    deviation = rows.std(0)
    return (rows - rows.mean(0)) / torch.where(deviation > 1e-6, deviation, torch.ones_like(deviation))


def information_of_run(folder: Path, *, steps: int = 150) -> Information:
    """Mutual information between the features of a FedPall run's training images and what its clients send of them.

    Features come from each client's final model in evaluation mode; the run's own protection is applied to them with
    the run's last prototypes.

    Raises:
        ConfigError: the run is not FedPall's.
        CheckpointError: its models are not in its folder.
    """
    run = RunModel(RunRecord.open(folder))
    method = run.method
    if not isinstance(method, FedPall):
        raise ConfigError(f"{folder} is a run of {method.name}; the measure is of FedPall's protections")
    prototypes = run.checkpoint.state.prototypes
    before, after = [], []
    for spec in run.clients:
        split = run.train_split(spec)
        features, _ = run.features(run.model(spec.id), split)
        draws = generator(run.settings.seed, "protection", run.settings.train.rounds, spec.id)
        before.append(features)
        after.append(method.protect(features, split.labels, prototypes, draws))
    return mutual_information(torch.cat(before), torch.cat(after), seed=run.settings.seed, steps=steps)
