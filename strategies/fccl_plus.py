"""FCCL+: Generalizable Heterogeneous Federated Cross-Correlation and Instance Similarity Learning.

Wenke Huang, Mang Ye, Zekun Shi, Bo Du. TPAMI 2023. arXiv:2309.16286.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from common.config import NonNegative, Positive, Search, checked
from common.errors import DataError, PayloadError
from common.losses import cross_correlation, cross_entropy, nontarget_distillation, similarity_distillation
from common.storage.state import GlobalState, under_prefix, with_prefix
from strategies.core.method import Batch, Download, Expected, Local, Losses, Server, Trained, Update, Upload
from strategies.parts.public_agreement import PublicAgreement

OWN = "own/"


@checked
class FCCLPlus(PublicAgreement):
    """FedAvg with two additions: agreement on public, unlabelled images, and distillation from the own previous model.

    A round has two exchanges. ``train``: local training on cross-entropy and, over the non-target classes, distillation
    from the client's model of its last round; the answer is what the trained model says of the public images, not the
    model. ``collaborate``: the server sends the means over clients; devices step once per public batch towards high
    correlation of equal logits and low of different ones with the mean, and towards the mean's similarities between
    images; the models are then averaged. ``correlation=similarity=distillation=0`` is FedAvg. What differs from the
    released code: docs/methods.md.

    Payload: the model's state both ways; up logits and similarities of the public images, down their means. Client
    state: its model after its last local training. Privacy: what a client's model says of public images leaves it.

    Args:
        correlation: weight of the cross-correlation, >= 0.
        off_diagonal: weight of its off-diagonal entries, >= 0.
        similarity: weight of the similarity distillation, >= 0 (the code's ``dis_power``).
        distillation: weight of the non-target distillation, >= 0.
        distillation_temperature: T > 0. The released code's best settings have 3 on digits and 1 on Office-Caltech.
        teacher_mode: batch norm of the own previous model: ``eval`` uses its running statistics, ``train`` those of the
            batch, as the released code, which never sets it to evaluation.
    """

    exchanges: ClassVar[tuple[str, ...]] = ("train", "collaborate")
    fedavg_at: ClassVar[Mapping[str, Any] | None] = {"correlation": 0.0, "similarity": 0.0, "distillation": 0.0}

    correlation: NonNegative = 1.0
    off_diagonal: NonNegative = 0.0051
    similarity: Annotated[NonNegative, Search(0.1, 10.0)] = 3.0
    distillation: Annotated[NonNegative, Search(0.01, 1.0)] = 1.0
    distillation_temperature: Positive = 3.0
    teacher_mode: Literal["eval", "train"] = "eval"

    def loss(self, batch: Batch, local: Local) -> Losses:
        """Cross-entropy and, from the second participation on, non-target distillation."""
        terms = {"cross_entropy": cross_entropy(batch.logits, batch.labels)}
        own = local.cached("own", lambda: under_prefix(OWN, local.kept))
        if self.distillation and own:
            with torch.no_grad():
                teacher = local.frozen("own", own).train(self.teacher_mode == "train")(batch.images)[1]
            terms["distillation"] = self.distillation * nontarget_distillation(
                batch.logits, teacher, batch.labels, temperature=self.distillation_temperature
            )
        return Losses(terms)

    def upload(self, local: Local, trained: Trained) -> Upload:  # noqa: ARG002
        """Logits and similarities of the public images; the model stays until the next exchange."""
        local.model.train(self.public_mode == "train")
        after = {name: tensor.clone() for name, tensor in local.model.state_dict().items()}
        return Upload(weights={}, extra=self.public_answers(local), local=with_prefix(OWN, after))

    def respond(self, local: Local) -> Upload:
        """One step per public batch from the model that was trained in this round, which is then sent."""
        self.check_images(local)
        own = under_prefix(OWN, local.kept)
        if not own:
            raise DataError("the model that was trained in this round is gone: keep the node's state-dir over restarts")
        local.model.load_state_dict(own)
        if self.correlation or self.similarity:
            self.public_steps(local)
        return Upload()

    def public_loss(self, features: Tensor, logits: Tensor, mean_logits: Tensor, mean_similarities: Tensor) -> Tensor:
        """``correlation L_col + similarity L_sim`` of one public batch."""
        together = cross_correlation(logits, mean_logits, off_diagonal=self.off_diagonal)
        alike = similarity_distillation(
            features, mean_similarities, temperature=self.similarity_temperature, scale=self.similarity
        )
        return self.correlation * together + alike

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
        return GlobalState(state.round, state.weights, state.prototypes, self.agreed(updates, server))
