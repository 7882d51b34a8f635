"""RUCR: Representation Unified Classifier Re-balancing (Huang et al., 2024), as run in FedPall's table."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from common.config import NonNegative, Positive, Search, checked
from common.losses import cross_entropy, prototype_contrast
from common.prototypes import PrototypeSet, class_means
from common.storage.state import GlobalState, with_prefix
from strategies.core.method import Batch, Download, Expected, Local, Losses, Server, Update, Upload
from strategies.parts.rebalancing import REBALANCED, Rebalancing
from strategies.parts.sent_prototypes import class_means_of

HEAD = "head."


@checked
class RUCR(Rebalancing):
    """FedAvg with features pulled to shared class means, and a classifier re-balanced on mixed features.

    Two exchanges a round. ``train``: cross-entropy + ``contrast * CE(cos(z, G) / temperature + log r_y on the true
    class)``, with r the classes' shares of all samples; the models are averaged. ``rebalance``: the averaged model is
    scored; each client retrains its classifier on synthetic features; the averaged classifier is the next round's. In
    the same exchange it sends class means under the averaged model: they make the next G. The first round has no G and
    is FedAvg's. ``contrast=rebalance_epochs=0`` is FedAvg. The official code's values: docs/methods.md.

    Payload: up, the model, then one vector and count per class and the classifier; down, the model, with G, then the
    averaged model. Client state: the synthetic features between the exchanges. **Privacy: class means of features and
    class counts leave the device; synthetic features do not.**

    Args:
        temperature: tau > 0.
        contrast: weight of the contrast with G, >= 0.
    """

    fedavg_at: ClassVar[Mapping[str, float] | None] = {"contrast": 0.0, "rebalance_epochs": 0}
    exchanges: ClassVar[tuple[str, ...]] = ("train", "rebalance")

    temperature: Annotated[Positive, Search(0.1, 5.0)] = 1.0
    contrast: Annotated[NonNegative, Search(0.01, 1.0)] = 0.1

    # ---- on the device ---------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, local: Local) -> Losses:
        """Cross-entropy, and the contrast with G once there is one."""
        terms = {"cross_entropy": cross_entropy(batch.logits, batch.labels)}
        if self.contrast and len(local.prototypes):
            table, ratios = local.cached("table", lambda: _table(local.prototypes, local.class_count))
            held = ratios[batch.labels] > 0
            labels = batch.labels[held]
            total = prototype_contrast(
                batch.features[held],
                labels,
                table,
                temperature=self.temperature,
                positive_bias=ratios[labels].log(),
                reduction="sum",
            )
            terms["contrast"] = self.contrast * total / len(batch.labels)
        return Losses(terms)

    def respond(self, local: Local) -> Upload:
        """Class means under the averaged model, and its classifier, re-balanced."""
        means = class_means(*local.features(), local.class_count)
        if not self.due(local.round, local.rounds):
            return Upload(weights={}, prototypes=means)
        head = local.model.get_submodule("head")
        self.rebalance(head, local)
        return Upload(weights={}, prototypes=means, extra=with_prefix(HEAD, head.state_dict()))

    # ---- on the server ---------------------------------------------------------------------------------------------

    def download(self, state: GlobalState, server: Server) -> Download:
        """The model; for training also G, and the classifier that is scored if it is another."""
        if server.exchange == "rebalance":
            return Download(state.weights)
        return Download(state.weights, state.prototypes, state.extra)

    def expects(self, server: Server) -> Expected:
        """``train``: the model. ``rebalance``: class means and, when it is due, a classifier."""
        if server.exchange == "train":
            return Expected()
        heads = {name: tensor for name, tensor in server.shared.items() if name.startswith(HEAD)}
        specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in heads.items()}
        return Expected(False, True, extra=specs if self.due(server.round, server.rounds) else {})

    def aggregate(self, state: GlobalState, updates: Sequence[Update], server: Server) -> GlobalState:
        """Average the models; then the classifiers, and the class means to G."""
        if server.exchange == "train":
            return replace(state, weights=server.aggregation.average(updates))
        state = replace(state, prototypes=class_means_of(updates, server, unit=True), extra={})
        shares = [update.samples for update in updates]
        heads = server.aggregation.combine([update.extra for update in updates], shares)
        if self.feed_back:
            return replace(state, weights={**state.weights, **heads})
        return replace(state, extra=with_prefix(REBALANCED, heads))


def _table(prototypes: PrototypeSet, class_count: int) -> tuple[PrototypeSet, Tensor]:
    """One row per class, zeros for classes nobody has (logit 0), and ``[K]`` the classes' shares of samples."""
    rows, _ = prototypes.rows_per_class(class_count)
    counts = rows.new_zeros(class_count).index_copy(0, prototypes.labels, prototypes.weights)
    labels = torch.arange(class_count, device=rows.device)
    return PrototypeSet(rows, labels, counts), counts / counts.sum()
