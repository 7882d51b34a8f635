"""FedPall: Prototype-based Adversarial and Collaborative Learning for Federated Learning with Feature Drift.

Yong Zhang, Feng Liang, Guanghu Yuan, Min Yang, Chengming Li, Xiping Hu. ICCV 2025. arXiv:2507.04781.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from common.config import NonNegative, Positive, Search, Share, ZeroToOne, checked
from common.errors import PayloadError
from common.losses import prototype_contrast, uniform_divergence
from common.prototypes import PrototypeSet, class_means
from common.storage import GlobalState, under_prefix
from strategies.adcol import feature_pass, owners_of
from strategies.core.method import (
    Batch,
    Bound,
    ClientContext,
    Download,
    Losses,
    ServerContext,
    Shape,
    Trained,
    Update,
    Upload,
    UploadSpec,
)
from strategies.core.readings import Point
from strategies.fedbn import norm_state_names
from strategies.parts.edits import running_statistics_kept
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
class FedPall(SingleSet):
    """Clients keep their bodies, deceive a server's amplifier, agree on prototypes and take over a global classifier.

    Two exchanges a round. ``train``: each client takes over the global classifier but for its batch norm, trains on
    cross-entropy + ``contrast`` * InfoNCE with the global prototypes (Eq. 7) + ``divergence`` * KL between uniform and
    the amplifier's prediction of the feature's client (Eq. 6), and sends class means; the server makes the prototypes
    of the round (Eq. 4). ``mix``: each client's own model is scored, and it sends protected features; on these the
    server trains the classifier (labels) and the amplifier (clients). ``contrast=divergence=0`` without
    ``swap_classifier`` is SingleSet. Paper, code, payload and privacy: docs/methods.md.

    Args:
        fidelity: ``released``, the code that made the published numbers, or ``paper``: the adversarial term, the local
            means, InfoNCE's denominator, share and mask. The paper's weights on Digits are options of their own.
        feature_mode: augmented batches with their own statistics (``train``, released), or plain in evaluation mode.
        protection: change of features before they are sent: none, Gaussian noise N(0, 1), mixture, mask, or both.
        mix_low: smallest share of the own feature in a mixture, in [0, 1]; the largest is 1.
        mask_share: beta, share of feature dimensions that are sent, in (0, 1].
        temperature: tau > 0 (released: 3).
        contrast: delta, weight of InfoNCE, >= 0. Office-10, PACS: 0.1; Digits: 0.7 (the paper says 0.3).
        divergence: mu, weight of the KL term, >= 0. Office-10, PACS: 0.1; Digits: 0.3 (the paper says 0.7).
        swap_classifier: whether clients take over the global classifier.
        server_training: how the server trains classifier and amplifier (3 epochs; on Digits 1).
    """

    readings: ClassVar[tuple[Point, ...]] = (
        Point(
            "adversarial term",
            "paper",
            "released",
            setting="fidelity",
            meanings={
                "paper": "KL(amplifier || uniform), whose gradient saturates",
                "released": "KL(uniform || amplifier)",
            },
        ),
        Point(
            "local means",
            "paper",
            "released",
            setting="fidelity",
            meanings={"paper": "as they are", "released": "at unit length"},
        ),
        Point(
            "InfoNCE's denominator",
            "paper",
            "released",
            setting="fidelity",
            meanings={
                "paper": "without the own class (Eq. 7)",
                "released": "every class, and prototypes keep their lengths there",
            },
        ),
        Point(
            "share and mask",
            "paper",
            "released",
            setting="fidelity",
            meanings={
                "paper": "one share and an independent Bernoulli mask per sample",
                "released": "one share of two decimals, one mask of exactly mask_share ones, per client and round",
            },
        ),
        Point(
            "weights of InfoNCE and KL on Digits",
            "0.3 and 0.7",
            "0.7 and 0.3",
            "0.1 and 0.1; released if printed=true",
        ),
        Point("features that are sent", released="train", setting="feature_mode"),
        Point("smallest share", released=0.8, setting="mix_low"),
        Point("share of the mask", released=0.9, setting="mask_share"),
        Point("tau", released=3.0, setting="temperature"),
    )

    capturable: ClassVar[bool] = True

    bound: ClassVar[Bound | None] = None
    exchanges: ClassVar[tuple[str, ...]] = ("train", "mix")

    fidelity: Literal["released", "paper"] = "released"
    feature_mode: Literal["train", "eval"] = "train"
    protection: Literal["none", "gaussian", "mix", "mask", "both"] = "both"
    mix_low: ZeroToOne = 0.8
    mask_share: Share = 0.9
    temperature: Annotated[Positive, Search(0.3, 10.0)] = 3.0
    contrast: Annotated[NonNegative, Search(0.01, 1.0)] = 0.1
    divergence: Annotated[NonNegative, Search(0.01, 1.0)] = 0.1
    swap_classifier: bool = True
    server_training: NetTraining = field(default_factory=NetTraining)

    @property
    def takes_single(self) -> bool:
        """Return whether there is no amplifier, whose batch normalisation needs two features or more."""
        return not self.divergence

    @property
    def scored_at(self) -> str:
        """Return ``mix``: clients score after training, before they take over the next classifier."""
        return "mix"

    def begin(self, local: ClientContext) -> None:
        """Take over the global classifier; its batch norm stays the client's own."""
        if self.swap_classifier:
            head = local.model.get_submodule("head")
            head.load_state_dict(under_prefix(f"{CLASSIFIER}/", local.extra), strict=False)

    def loss(self, batch: Batch, local: ClientContext) -> Losses:
        """Return cross-entropy + InfoNCE (Eq. 7; once there are prototypes) + KL (Eq. 6)."""
        terms = {"cross_entropy": batch.cross_entropy()}
        if self.contrast and len(local.prototypes):
            terms["contrast"] = self.contrast * self._contrast(batch, local.prototypes)
        if self.divergence:
            net = received_discriminator(AMPLIFIER, local)
            order: Literal["prediction_first", "uniform_first"] = "uniform_first"
            if self.fidelity == "paper":
                order = "prediction_first"
            terms["divergence"] = self.divergence * uniform_divergence(net(batch.features), order)
        return Losses(terms)

    def _contrast(self, batch: Batch, prototypes: PrototypeSet) -> Tensor:
        """Return InfoNCE with the global prototypes."""
        classes: Literal["all", "negatives"] = "all"
        rows: Literal["normalised", "raw"] = "raw"
        if self.fidelity == "paper":
            classes, rows = "negatives", "normalised"
        return prototype_contrast(
            batch.features,
            batch.labels,
            prototypes,
            temperature=self.temperature,
            denominator=classes,
            denominator_rows=rows,
        )

    def upload(self, local: ClientContext, trained: Trained) -> Upload:  # noqa: ARG002
        """Return the client's class means (Eq. 3)."""
        return Upload(prototypes=class_means(*feature_pass(local, self.feature_mode), local.class_count))

    def respond(self, local: ClientContext) -> Upload:
        """Return features of the same pass, protected, and their labels."""
        with running_statistics_kept(local.model):  # they moved in the first pass already
            features, labels = feature_pass(local, self.feature_mode)
        protected = self.protect(features, labels, local.prototypes, local.generator("protection"))
        return Upload(weights={}, extra={"features": protected, "labels": labels})

    def protect(self, features: Tensor, labels: Tensor, prototypes: PrototypeSet, draws: torch.Generator) -> Tensor:
        """Return ``mask * (share * z + (1 - share) * G^y)`` (Eq. 8-9), ``[N, D]``; share in [mix_low, 1]."""
        count, size = features.shape
        per_sample = self.fidelity == "paper"
        if self.protection == "gaussian":
            return features + torch.randn(count, size, generator=draws).to(features)
        if self.protection in ("mix", "both"):
            table, _ = prototypes.rows_per_class(1 + max([*prototypes.classes, int(labels.max())]))
            if per_sample:
                share = self.mix_low + (1 - self.mix_low) * torch.rand(count, 1, generator=draws)
            else:
                share = self.mix_low + (1 - self.mix_low) * torch.rand(1, 1, generator=draws)
                share = (100 * share).round() / 100
            share = share.to(features)
            features = share * features + (1 - share) * table[labels]
        if self.protection in ("mask", "both"):
            if per_sample:
                mask = torch.rand(count, size, generator=draws) < self.mask_share
            else:
                ones = math.floor(self.mask_share * size + 1e-9)  # 0.29 * 100 is 28.999999999999996
                mask = torch.zeros(1, size, dtype=torch.bool)
                mask[0, torch.randperm(size, generator=draws)[:ones]] = True
            features = features * mask.to(features)
        return features

    def initial_state(self, weights: Mapping[str, Tensor], server: ServerContext) -> GlobalState:
        """Return the initial state with the model's classifier and an amplifier. The amplifier depends on the seed."""
        nets = initial_net(AMPLIFIER, new_discriminator(AMPLIFIER, server))
        nets |= initial_net(CLASSIFIER, server.new_model().get_submodule("head"))
        return GlobalState(weights, PrototypeSet.empty(server.feature_size), nets, round=0)

    def download(self, state: GlobalState, server: ServerContext) -> Download:
        """``train``: amplifier, classifier, last prototypes. ``mix``: this round's prototypes."""
        if server.exchange == "mix":
            return Download(prototypes=state.prototypes)
        extra = sent_net(AMPLIFIER, state.extra)
        if self.swap_classifier:
            extra |= sent_net(CLASSIFIER, state.extra)
            for name in norm_state_names(server.new_model().get_submodule("head")):
                extra.pop(f"{CLASSIFIER}/{name}", None)  # a client keeps its own batch norm
        return Download(prototypes=state.prototypes, extra=extra)

    def expects(self, server: ServerContext) -> UploadSpec:
        """``train``: class means. ``mix``: one feature and label per training sample."""
        if server.exchange == "train":
            return UploadSpec(weights=False, prototypes=True)
        rows: Mapping[str, tuple[torch.dtype, Shape]] = {
            "features": (torch.float32, ("samples", server.feature_size)),
            "labels": (torch.int64, ("samples",)),
        }
        return UploadSpec(weights=False, extra=rows)

    def inspect(self, update: Update, server: ServerContext) -> None:
        """Check that the upload has as many labels of each class as the client registered."""
        labels = update.extra.get("labels")
        if labels is not None:
            known = labels[(labels >= 0) & (labels < server.class_count)]
            if tuple(torch.bincount(known, minlength=server.class_count).tolist()) != update.client.class_counts:
                raise PayloadError("the features' labels are not those of the classes that the client registered")

    def aggregate(self, state: GlobalState, updates: Sequence[Update], server: ServerContext) -> GlobalState:
        """``train``: prototypes (Eq. 4). ``mix``: classifier by label, then amplifier by client."""
        if server.exchange == "train":
            return replace(state, prototypes=class_means_of(updates, server, unit=self.fidelity == "released"))
        features, labels = sent_rows(updates, "features"), sent_rows(updates, "labels")
        head, amplifier = server.new_model().get_submodule("head"), new_discriminator(AMPLIFIER, server)
        how, extra = self.server_training, state.extra
        nets = retrain(CLASSIFIER, head, extra, features, labels, how, server)
        nets |= retrain(AMPLIFIER, amplifier, extra, features, owners_of(updates), how, server)
        return replace(state, extra=nets)
