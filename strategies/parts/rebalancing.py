"""A classifier that is re-balanced on mixtures of features and prototypes (RUCR), in an exchange of its own."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from common.config import Count, Natural, Positive, ZeroToOne, check, checked
from common.prototypes import normalise_rows
from common.storage.state import GlobalState, under_prefix, with_prefix
from strategies.core.method import Local, Method, Trained, Upload
from strategies.parts.server_nets import NetTraining, train_net

SYNTHETIC, REBALANCED = "synthetic/", "rebalanced/"


@checked
class Rebalancing(Method):
    """Synthetic features are drawn before local training and train the averaged classifier after it.

    Args:
        per_class: synthetic features per class, >= 1.
        mix_low, mix_high: a share of G is drawn from (mix_low, mix_high] for each synthetic feature.
        rebalance_epochs: epochs over the synthetic features, >= 0; ``None`` takes the run's local epochs.
        rebalance_rate: learning rate of plain SGD, > 0; the classifier's batch norm keeps its statistics.
        rebalance_last: re-balance in the last so many rounds only; ``None`` in all.
        feed_back: whether the re-balanced classifier is trained on (FedPall), or only scored.
    """

    per_class: Count = 50
    mix_low: ZeroToOne = 0.2
    mix_high: ZeroToOne = 0.8
    rebalance_epochs: Natural | None = None
    rebalance_rate: Positive = 0.01
    rebalance_last: Count | None = None
    feed_back: bool = True

    def __post_init__(self) -> None:
        in_order = self.mix_low <= self.mix_high
        check(in_order, f"mix_low must be <= mix_high; got {self.mix_low} and {self.mix_high}")

    @property
    def scheduled(self) -> bool:
        """Which rounds are the last depends on how many there are."""
        return self.rebalance_last is not None

    @property
    def scored_at(self) -> str:
        """The averaged model before re-balancing (FedPall), or with the re-balanced classifier."""
        return "rebalance" if self.feed_back else "train"

    @property
    def adapts(self) -> bool:
        """A classifier that is not trained on is put in for the score."""
        return not self.feed_back

    def adapt(self, local: Local) -> None:
        """Put the re-balanced classifier in."""
        local.model.load_state_dict(under_prefix(REBALANCED, local.extra), strict=False)

    def scored_weights(self, state: GlobalState) -> Mapping[str, Tensor]:
        """The averaged model, under the re-balanced classifier if that is not trained on."""
        return {**state.weights, **under_prefix(REBALANCED, state.extra)}

    def due(self, number: int, rounds: int) -> bool:
        """Whether round ``number`` re-balances."""
        return number > 1 and (self.rebalance_last is None or number > rounds - self.rebalance_last)

    def begin(self, local: Local) -> None:
        """Draw the synthetic features, while the model is the shared one."""
        if self.due(local.round, local.rounds) and len(local.prototypes):
            local.cached("synthetic", lambda: self.synthesise(local.features()[0], local))

    def synthesise(self, features: Tensor, local: Local) -> dict[str, Tensor]:
        """``share * G^c + (1 - share) * z / ||z||`` per class of G: ``features [K' * per_class, D]``, ``labels``."""
        prototypes, draws = local.prototypes, local.generator("synthesise")
        wanted = prototypes.labels.repeat_interleave(self.per_class)
        chosen = torch.randint(len(features), (len(wanted),), generator=draws).to(features.device)
        own = normalise_rows(features)[chosen]
        share = self.mix_high - (self.mix_high - self.mix_low) * torch.rand(len(wanted), 1, generator=draws)
        share = share.to(features)
        rows = prototypes.vectors.repeat_interleave(self.per_class, dim=0)
        return with_prefix(SYNTHETIC, {"features": share * rows + (1 - share) * own, "labels": wanted})

    def upload(self, local: Local, trained: Trained) -> Upload:  # noqa: ARG002
        """The model; the synthetic features stay."""
        return Upload(local=local.cached("synthetic", dict))

    def rebalance(self, head: nn.Module, local: Local) -> None:
        """Train ``head`` on the synthetic features, in place."""
        epochs = local.train.epochs if self.rebalance_epochs is None else self.rebalance_epochs
        synthetic = under_prefix(SYNTHETIC, local.kept)
        if epochs and synthetic:
            training = NetTraining(epochs, self.rebalance_rate, momentum=0.0, weight_decay=0.0)
            rows = synthetic["features"], synthetic["labels"]
            size = local.train.batch_size
            train_net(head.eval(), *rows, training, local.generator("rebalance"), batch_size=size)
