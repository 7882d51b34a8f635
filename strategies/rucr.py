"""RUCR: Federated Learning with Long-Tailed Data via Representation Unification and Classifier Rectification.

Wenke Huang, Yuxia Liu, Mang Ye, Jun Chen, Bo Du. TIFS 2024. IEEE Xplore:10534053. As run in FedPall's table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from common.config import Natural, NonNegative, Positive, Search, checked
from common.losses import prototype_contrast
from common.prototypes import PrototypeSet, class_means, normalise_rows
from common.storage import GlobalState, under_prefix, with_prefix
from strategies.core.method import (
    Batch,
    ClientContext,
    Download,
    Losses,
    Method,
    ServerContext,
    Trained,
    Update,
    Upload,
    UploadSpec,
    tensor_specs,
)
from strategies.core.readings import Point
from strategies.parts.sent_prototypes import class_means_of
from strategies.parts.server_nets import NetTraining, train_net

HEAD = "head."
SYNTHETIC = "synthetic/"
PER_CLASS = 50
"""Synthetic features of a class, as in FedPall's run; the official code has 100."""
MIX_LOW, MIX_HIGH = 0.2, 0.8
"""The share of G in a synthetic feature is drawn from (``MIX_LOW``, ``MIX_HIGH``], as in FedPall's run."""


@checked
class RUCR(Method):
    """FedAvg with features pulled to shared class means, and a classifier re-balanced on mixed features.

    Two exchanges a round. ``train``: cross-entropy + ``contrast * CE(cos(z, G) / temperature + log r_y on the true
    class)``, with r the classes' shares of all samples; the models are averaged. ``rebalance``: the averaged model is
    scored; each client retrains its classifier on synthetic features; the averaged classifier is the next round's. In
    the same exchange it sends class means under the averaged model: they make the next G. The first round has no G
    and is FedAvg's; the released codes take the means under the initial model there. ``contrast=rebalance_epochs=0`` is
    FedAvg. The official code's values: docs/methods.md.

    Payload: up, the model, then one vector and count per class and the classifier; down, the model, with G, then the
    averaged model. Client state: the synthetic features between the exchanges. **Privacy: class means of features and
    class counts leave the device; synthetic features do not.**

    Args:
        temperature: tau > 0.
        contrast: weight of the contrast with G, >= 0.
        rebalance_epochs: epochs over the synthetic features, >= 0; ``None`` takes the run's local epochs.
        rebalance_rate: learning rate of plain SGD, > 0; the classifier's batch norm keeps its statistics.
    """

    readings: ClassVar[tuple[Point, ...]] = (
        Point(
            "rounds with re-balancing",
            released="the last 20, only to score",
            ours="all but the first, fed back; FedPall's table: all",
        ),
        Point("G in round 1", released="that of the initial model", ours="none"),
        Point(
            "images of class means",
            ours="as for tests; FedPall's code flips and rotates them on Office and PACS",
        ),
        Point(
            "share of a mixture",
            released="in (0.35, 0.95), two decimals",
            ours="in (0.2, 0.8]; FedPall's table: two decimals",
        ),
        Point(
            "synthetic features",
            released="100 of a class, without replacement, in batches of 256",
            ours=f"{PER_CLASS} of a class, with replacement, in train.batch_size",
        ),
        Point("epochs of re-balancing", released=50, setting="rebalance_epochs"),
        Point("rate of re-balancing", released=0.01, setting="rebalance_rate"),
        Point("weight of the contrast", released=0.15, setting="contrast"),
        Point("tau", released=0.9, setting="temperature"),
    )

    capturable: ClassVar[bool] = True  # where every class has data; else a mask chooses rows

    fedavg_at: ClassVar[Mapping[str, float] | None] = {"contrast": 0.0, "rebalance_epochs": 0}
    exchanges: ClassVar[tuple[str, ...]] = ("train", "rebalance")

    temperature: Annotated[Positive, Search(0.1, 5.0)] = 1.0
    contrast: Annotated[NonNegative, Search(0.01, 1.0)] = 0.1
    rebalance_epochs: Natural | None = None
    rebalance_rate: Positive = 0.01

    @property
    def keeps_step(self) -> bool:
        """Return False: a client keeps synthetic features until the next exchange."""
        return False

    @property
    def scored_at(self) -> str:
        """Score the averaged model before re-balancing, as FedPall does."""
        return "rebalance"

    # ---- on the device ---------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, local: ClientContext) -> Losses:
        """Return cross-entropy, and the contrast with G once there is one."""
        terms = {"cross_entropy": batch.cross_entropy()}
        if self.contrast and len(local.prototypes):
            table, ratios, complete = local.cached("table", lambda: _table(local.prototypes, local.class_count))
            features, labels = batch.features, batch.labels
            if not complete:
                held = ratios[labels] > 0
                features, labels = features[held], labels[held]
            total = prototype_contrast(
                features,
                labels,
                table,
                temperature=self.temperature,
                positive_bias=ratios[labels].log(),
                reduction="sum",
            )
            terms["contrast"] = self.contrast * total / len(batch.labels)
        return Losses(terms)

    def local_epochs(self, epochs: int) -> int:
        """Return the epochs of training and of re-balancing."""
        return super().local_epochs(epochs) + self._rebalance_epochs(epochs)

    def _rebalance_epochs(self, epochs: int) -> int:
        """Return the epochs of re-balancing, where training has ``epochs``."""
        if self.rebalance_epochs is None:
            return epochs
        return self.rebalance_epochs

    def begin(self, local: ClientContext) -> None:
        """Draw the synthetic features, while the model is the shared one."""
        if local.round > 1 and len(local.prototypes):
            local.cached("synthetic", lambda: self.synthesise(local.features()[0], local))

    def synthesise(self, features: Tensor, local: ClientContext) -> dict[str, Tensor]:
        """Return ``share * G^c + (1 - share) * z / ||z||`` per class of G, ``[K' * PER_CLASS, D]``, and labels."""
        prototypes, draws = local.prototypes, local.generator("synthesise")
        wanted = prototypes.labels.repeat_interleave(PER_CLASS)
        chosen = torch.randint(len(features), (len(wanted),), generator=draws).to(features.device)
        own = normalise_rows(features)[chosen]
        share = MIX_HIGH - (MIX_HIGH - MIX_LOW) * torch.rand(len(wanted), 1, generator=draws)
        share = share.to(features)
        rows = prototypes.vectors.repeat_interleave(PER_CLASS, dim=0)
        return with_prefix(SYNTHETIC, {"features": share * rows + (1 - share) * own, "labels": wanted})

    def upload(self, local: ClientContext, trained: Trained) -> Upload:  # noqa: ARG002
        """Return the model; the synthetic features stay."""
        return Upload(local=local.cached("synthetic", dict))

    def rebalance(self, head: nn.Module, local: ClientContext) -> None:
        """Train ``head`` on the synthetic features, in place."""
        epochs = self._rebalance_epochs(local.train.epochs)
        synthetic = under_prefix(SYNTHETIC, local.kept)
        if epochs and synthetic:
            training = NetTraining(epochs, self.rebalance_rate, momentum=0.0, weight_decay=0.0)
            rows = synthetic["features"], synthetic["labels"]
            size = local.train.batch_size
            train_net(head.eval(), *rows, training, local.generator("rebalance"), batch_size=size)

    def respond(self, local: ClientContext) -> Upload:
        """Return class means under the averaged model, and its classifier, re-balanced."""
        means = class_means(*local.features(), local.class_count)
        if local.round == 1:
            return Upload(weights={}, prototypes=means)
        head = local.model.get_submodule("head")
        self.rebalance(head, local)
        return Upload(weights={}, prototypes=means, extra=with_prefix(HEAD, head.state_dict()))

    # ---- on the server ---------------------------------------------------------------------------------------------

    def download(self, state: GlobalState, server: ServerContext) -> Download:
        """Return the model; for training also G."""
        if server.exchange == "rebalance":
            return Download(state.weights)
        return Download(state.weights, state.prototypes)

    def expects(self, server: ServerContext) -> UploadSpec:
        """``train``: the model. ``rebalance``: class means and, from the second round on, a classifier."""
        if server.exchange == "train":
            return UploadSpec()
        if server.round == 1:
            return UploadSpec(weights=False, prototypes=True)
        head = with_prefix(HEAD, under_prefix(HEAD, server.shared))
        return UploadSpec(weights=False, prototypes=True, extra=tensor_specs(head))

    def aggregate(self, state: GlobalState, updates: Sequence[Update], server: ServerContext) -> GlobalState:
        """Average the models; then the classifiers, and the class means to G."""
        if server.exchange == "train":
            return replace(state, weights=server.aggregation.average(updates))
        state = replace(state, prototypes=class_means_of(updates, server, unit=True), extra={})
        shares = [update.samples for update in updates]
        heads = server.aggregation.combine([update.extra for update in updates], shares)
        return replace(state, weights={**state.weights, **heads})


def _table(prototypes: PrototypeSet, class_count: int) -> tuple[PrototypeSet, Tensor, bool]:
    """Return G by class.

    Returns:
        One row per class, zeros for classes without data (logit 0); ``[K]`` their shares of samples; and whether every
        class has data.
    """
    rows, _ = prototypes.rows_per_class(class_count)
    counts = rows.new_zeros(class_count).index_copy(0, prototypes.labels, prototypes.weights)
    labels = torch.arange(class_count, device=rows.device)
    return PrototypeSet(rows, labels, counts), counts / counts.sum(), bool((counts > 0).all())
