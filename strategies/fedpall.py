"""FedPall: Prototype-based Adversarial and Collaborative Learning for Federated Learning with Feature Drift.

Yong Zhang, Feng Liang, Guanghu Yuan, Min Yang, Chengming Li, Xiping Hu. ICCV 2025. arXiv:2507.04781.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Annotated, ClassVar, Literal

from torch import Tensor

from common.config import NonNegative, Positive, Search, checked
from common.losses import cross_entropy, prototype_contrast, uniform_divergence
from common.prototypes import PrototypeSet
from common.storage.state import GlobalState, under_prefix
from strategies.adcol import owners_of
from strategies.core.method import Batch, ClientContext, Download, Losses, ServerContext, Update
from strategies.fedbn import norm_state_names
from strategies.parts.protected_features import ProtectedFeatures
from strategies.parts.sent_prototypes import class_means_of
from strategies.parts.server_nets import (
    NetTraining,
    initial_net,
    new_discriminator,
    received_discriminator,
    retrain,
    sent_net,
    sent_rows,
)
from strategies.single_set import SingleSet

AMPLIFIER, CLASSIFIER = "amplifier", "classifier"


@checked
class FedPall(ProtectedFeatures, SingleSet):
    """Clients keep their bodies, deceive a server's amplifier, agree on prototypes and take over a global classifier.

    Two exchanges a round. ``train``: each client takes over the global classifier but for its batch norm, trains on
    cross-entropy + ``contrast`` * InfoNCE with the global prototypes (Eq. 7) + ``divergence`` * KL between the
    amplifier's opinion whose feature it is and uniform (Eq. 6), and sends class means; the server makes the prototypes
    of the round (Eq. 4). ``mix``: each client's own model is scored, and it sends protected features; on these the
    server trains the classifier (labels) and the amplifier (clients). ``contrast=divergence=0`` without
    ``swap_classifier`` is SingleSet. Paper, code, payload and privacy: docs/methods.md.

    Args:
        temperature: tau > 0 (released: 3).
        contrast: delta, weight of InfoNCE, >= 0. Office-10, PACS: 0.1; Digits: 0.7 (the paper says 0.3, see #30).
        divergence: mu, weight of the KL term, >= 0. Office-10, PACS: 0.1; Digits: 0.3 (the paper says 0.7).
        denominator: InfoNCE over all classes; over the ``negatives`` only (Eq. 7); or over all with the prototypes'
            lengths kept there (``raw``, released). The default is the sound one; lengths are at most 1.
        amplifier_mode: batch norm of the amplifier on the device: batch statistics (released), or running ones.
        swap_classifier: whether clients take over the global classifier.
        server_training: how the server trains classifier and amplifier.
    """

    exchanges: ClassVar[tuple[str, ...]] = ("train", "mix")

    temperature: Annotated[Positive, Search(0.3, 10.0)] = 3.0
    contrast: Annotated[NonNegative, Search(0.01, 1.0)] = 0.1
    divergence: Annotated[NonNegative, Search(0.01, 1.0)] = 0.1
    denominator: Literal["all", "negatives", "raw"] = "all"
    amplifier_mode: Literal["train", "eval"] = "train"
    swap_classifier: bool = True
    server_training: NetTraining = field(default_factory=NetTraining)

    @property
    def scored_at(self) -> str:
        """After training, before the next classifier."""
        return "mix"

    def begin(self, local: ClientContext) -> None:
        """Take over the global classifier; its batch norm stays the client's own."""
        if self.swap_classifier:
            head = local.model.get_submodule("head")
            head.load_state_dict(under_prefix(f"{CLASSIFIER}/", local.extra), strict=False)

    def loss(self, batch: Batch, local: ClientContext) -> Losses:
        """Cross-entropy + InfoNCE (Eq. 7; once there are prototypes) + KL (Eq. 6)."""
        terms = {"cross_entropy": cross_entropy(batch.logits, batch.labels)}
        if self.contrast and len(local.prototypes):
            terms["contrast"] = self.contrast * prototype_contrast(
                batch.features,
                batch.labels,
                local.prototypes,
                temperature=self.temperature,
                denominator="negatives" if self.denominator == "negatives" else "all",
                denominator_rows="raw" if self.denominator == "raw" else "normalised",
            )
        if self.divergence:
            net = received_discriminator(AMPLIFIER, local, training_mode=self.amplifier_mode == "train")
            opinion, paper = net(batch.features), self.fidelity == "paper"
            kl = uniform_divergence(opinion, "prediction_first" if paper else "uniform_first")
            terms["divergence"] = self.divergence * kl
        return Losses(terms)

    def initial_state(self, weights: Mapping[str, Tensor], server: ServerContext) -> GlobalState:
        """An amplifier with weights of the seed; the classifier is the initial model's."""
        nets = initial_net(AMPLIFIER, new_discriminator(AMPLIFIER, server))
        nets |= initial_net(CLASSIFIER, server.new_model().get_submodule("head"))
        return GlobalState(0, weights, PrototypeSet.empty(server.feature_size), nets)

    def download(self, state: GlobalState, server: ServerContext) -> Download:
        """``train``: amplifier, classifier, last prototypes. ``mix``: this round's prototypes."""
        if server.exchange == "mix":
            return Download(prototypes=state.prototypes)
        own = norm_state_names(server.new_model().get_submodule("head"))
        classifier = sent_net(CLASSIFIER, state.extra) if self.swap_classifier else {}
        taken = {name: tensor for name, tensor in classifier.items() if name.partition("/")[2] not in own}
        return Download(prototypes=state.prototypes, extra={**sent_net(AMPLIFIER, state.extra), **taken})

    def aggregate(self, state: GlobalState, updates: Sequence[Update], server: ServerContext) -> GlobalState:
        """``train``: prototypes (Eq. 4). ``mix``: classifier by label, then amplifier by client."""
        if server.exchange == "train":
            return replace(state, prototypes=class_means_of(updates, server, unit=self.fidelity == "released"))
        features, labels = (sent_rows(updates, name) for name in ("features", "labels"))
        head, amplifier = server.new_model().get_submodule("head"), new_discriminator(AMPLIFIER, server)
        how, extra = self.server_training, state.extra
        nets = retrain(CLASSIFIER, head, extra, features, labels, how, server)
        nets |= retrain(AMPLIFIER, amplifier, extra, features, owners_of(updates), how, server)
        return replace(state, extra=nets)
