"""FCCL+: generalizable federated cross-correlation and instance similarity learning (Huang et al., TPAMI 2023)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from common.config import AtLeastTwo, NonNegative, Positive, check, checked
from common.data.public import PublicImages, fingerprint
from common.data.textures import Textures
from common.errors import DataError, PayloadError
from common.losses import (
    cross_correlation,
    cross_entropy,
    nontarget_distillation,
    pairwise_similarities,
    similarity_distillation,
)
from common.seeding import generator
from common.storage.state import GlobalState, under_prefix, with_prefix
from strategies.core.method import Batch, Download, Expected, Local, Losses, Method, Server, Trained, Update, Upload

OWN = "own/"


@checked
class FCCLPlus(Method):
    """FedAvg with two additions: agreement on public, unlabelled images, and distillation from the own previous model.

    A round has two exchanges. ``train``: local training on cross-entropy and, over the non-target classes, distillation
    from the client's model of its last round; the answer is what the trained model says of the public images, not the
    model. ``collaborate``: the server sends the means over clients; devices step once per public batch towards high
    correlation of equal logits and low of different ones with the mean, and towards the mean's similarities between
    images; the models are then averaged. ``correlation=similarity=distillation=0`` is FedAvg.

    The released code begins a round with the public phase and renews the means after each public batch; here the phase
    closes the round, which is the same sequence but that the scored model has been through it, and the means are made
    once, which takes two trips a round instead of one per batch. The papers' public set is 5000 images of CIFAR-100 (or
    not named); the default is one that needs nothing: procedurally generated textures.

    Payload: the model's state both ways; up logits and similarities of the public images, down their means. Client
    state: its model after its last local training. Privacy: what a client's model says of public images leaves it.

    Args:
        public: the public images, from any data set; every device must read the same ones.
        public_batch: images per public step, >= 2; divides ``public.samples``.
        public_learning_rate: of Adam, made anew for each batch, > 0.
        public_mode: batch norm in the public phase: ``eval`` keeps the private data's statistics; ``train`` uses and
            moves to those of the public images, as the released code does, which suits only images like the own ones.
        correlation: weight of the cross-correlation, >= 0.
        off_diagonal: weight of its off-diagonal entries, >= 0.
        similarity: weight of the similarity distillation, >= 0 (the code's ``dis_power``).
        similarity_temperature: > 0.
        distillation: weight of the non-target distillation, >= 0.
        distillation_temperature: T > 0.
    """

    exchanges: ClassVar[tuple[str, ...]] = ("train", "collaborate")
    fedavg_at: ClassVar[Mapping[str, Any] | None] = {"correlation": 0.0, "similarity": 0.0, "distillation": 0.0}

    public: PublicImages = field(default_factory=lambda: PublicImages(Textures(), "textures"))
    public_batch: AtLeastTwo = 128
    public_learning_rate: Positive = 1e-3
    public_mode: Literal["eval", "train"] = "eval"
    correlation: NonNegative = 1.0
    off_diagonal: NonNegative = 0.0051
    similarity: NonNegative = 3.0
    similarity_temperature: Positive = 0.02
    distillation: NonNegative = 1.0
    distillation_temperature: Positive = 3.0

    def __post_init__(self) -> None:
        fits = self.public.samples % self.public_batch == 0
        check(fits, f"public_batch={self.public_batch} must divide public.samples={self.public.samples}")

    # ---- on the device ---------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, local: Local) -> Losses:
        """Cross-entropy and, from the second participation on, non-target distillation."""
        terms = {"cross_entropy": cross_entropy(batch.logits, batch.labels)}
        own = local.cached("own", lambda: under_prefix(OWN, local.kept))
        if self.distillation and own:
            with torch.no_grad():
                teacher = local.frozen("own", own)(batch.images)[1]
            terms["distillation"] = self.distillation * nontarget_distillation(
                batch.logits, teacher, batch.labels, temperature=self.distillation_temperature
            )
        return Losses(terms)

    def _public_batches(self, local: Local) -> list[Tensor]:
        """The public images in batches, weakly augmented by the data set's own means: equal on every device."""
        images = self.public.load(local.data_root).to(local.device)
        draws = generator(local.seed, "public images", local.round)
        return list(local.prepare(images, draws).split(self.public_batch))

    @torch.no_grad()
    def upload(self, local: Local, trained: Trained) -> Upload:  # noqa: ARG002
        """Logits and similarities of the public images; the model stays until the next exchange."""
        local.model.train(self.public_mode == "train")
        after = {name: tensor.clone() for name, tensor in local.model.state_dict().items()}
        answers = [local.model(images) for images in self._public_batches(local)]
        similar = [pairwise_similarities(features, temperature=self.similarity_temperature) for features, _ in answers]
        extra = {
            "logits": torch.cat([logits.float() for _, logits in answers]),
            "similarities": torch.cat(similar).float(),
            "images": fingerprint(self.public.load(local.data_root)),
        }
        return Upload(weights={}, extra=extra, local=with_prefix(OWN, after))

    def respond(self, local: Local) -> Upload:
        """One step per public batch from the model that was trained in this round, which is then sent."""
        if int(local.extra["images"]) != int(fingerprint(self.public.load(local.data_root))):
            raise DataError("the public images here are not those of the other clients; give every device the same")
        own = under_prefix(OWN, local.kept)
        if not own:
            raise DataError("the model that was trained in this round is gone: keep the node's state-dir over restarts")
        local.model.load_state_dict(own)
        if self.correlation or self.similarity:
            local.model.train(self.public_mode == "train")
            logits = local.extra["logits"].split(self.public_batch)
            similarities = local.extra["similarities"].split(self.public_batch)
            for images, *means in zip(self._public_batches(local), logits, similarities, strict=True):
                optimizer = torch.optim.Adam(local.model.parameters(), lr=self.public_learning_rate)
                optimizer.zero_grad(set_to_none=True)
                self.public_loss(*local.model(images), *means).backward()
                optimizer.step()
        return Upload()

    def public_loss(self, features: Tensor, logits: Tensor, mean_logits: Tensor, mean_similarities: Tensor) -> Tensor:
        """``correlation L_col + similarity L_sim`` of one public batch."""
        together = cross_correlation(logits, mean_logits, off_diagonal=self.off_diagonal)
        alike = similarity_distillation(
            features, mean_similarities, temperature=self.similarity_temperature, scale=self.similarity
        )
        return self.correlation * together + alike

    # ---- on the server ---------------------------------------------------------------------------------------------

    def download(self, state: GlobalState, server: Server) -> Download:
        """The model to train; then, without a model, the means over clients."""
        return Download(state.weights) if server.exchange == "train" else Download(extra=state.extra)

    def expects(self, server: Server) -> Expected:
        """What the models say of the public images; then the models."""
        if server.exchange != "train":
            return Expected()
        rows = self.public.samples
        return Expected(
            weights=False,
            extra={
                "logits": (torch.float32, (rows, server.class_count)),
                "similarities": (torch.float32, (rows, self.public_batch - 1)),
                "images": (torch.int64, ()),
            },
        )

    def inspect(self, update: Update, server: Server) -> None:
        """Similarities are cosines over their temperature."""
        if server.exchange == "train":
            largest = float(update.extra["similarities"].abs().max())
            if largest > 1.001 / self.similarity_temperature:
                raise PayloadError(f"a similarity of {largest:.3g} is no cosine over {self.similarity_temperature}")

    def aggregate(self, state: GlobalState, updates: Sequence[Update], server: Server) -> GlobalState:
        """The plain means over the clients that have the same public images; then the mean of the models."""
        if server.exchange != "train":
            return super().aggregate(GlobalState(state.round, state.weights), updates, server)
        common = Counter(int(update.extra["images"]) for update in updates).most_common(1)[0][0]
        chosen = [update.extra for update in updates if int(update.extra["images"]) == common]
        names = ("logits", "similarities")
        tables = [{name: extra[name] for name in names} for extra in chosen]
        if server.aggregation.robust:
            means = server.aggregation.combine(tables, [1.0] * len(tables))
        else:
            means = {name: torch.stack([table[name] for table in tables]).double().mean(0).float() for name in names}
        return GlobalState(state.round, state.weights, state.prototypes, {**means, "images": chosen[0]["images"]})
