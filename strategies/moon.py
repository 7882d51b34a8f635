"""MOON: Model-Contrastive Federated Learning.

Qinbin Li, Bingsheng He, Dawn Song. CVPR 2021. arXiv:2103.16257.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from common.config import NonNegative, Positive, Search, checked
from common.numerics import unit_vectors, working_dtype
from common.storage import under_prefix, with_prefix
from strategies.core.method import Averaging, Batch, ClientContext, Losses, Trained, Upload

PREVIOUS = "previous/"


@checked
class MOON(Averaging):
    """FedAvg plus ``mu`` times the model contrast; ``mu=0`` is FedAvg.

    Features are pulled towards those of the received global model and pushed from those of the client's own previous
    one: ``softplus((cos(z, z_previous) - cos(z, z_global)) / temperature)``, the paper's two-way cross-entropy (Eq. 3).
    ``z`` is the backbone's feature, as in FPL's tables; the paper has a projection head of 256 units behind it.
    A client that has no previous model yet takes the received one: the term is then log 2 and has no gradient. (The
    code released with FPL copies the previous models before the clients are synchronised, so that its first round
    contrasts with unrelated random nets; this is not reproduced. Neither is FedPall's baseline, where all clients
    share one "previous model", since models stay on their devices.)

    Payload: the model's state both ways. Client state: its model after its last training.

    Args:
        mu: weight of the contrast, >= 0 (FPL's tables: 5; FedPall's: 1).
        temperature: tau > 0 (FPL: 0.5; FedPall: 1).
        frozen_mode: ``eval``: the two frozen models use their running statistics; ``train``: those of the batch, as in
            FPL's code.
    """

    capturable: ClassVar[bool] = True

    fedavg_at: ClassVar[Mapping[str, Any] | None] = {"mu": 0.0}

    mu: Annotated[NonNegative, Search(0.01, 10.0)] = 5.0
    temperature: Annotated[Positive, Search(0.1, 2.0)] = 0.5
    frozen_mode: Literal["eval", "train"] = "eval"

    @property
    def keeps_step(self) -> bool:
        """Return False: a client keeps its own trained model, which the server's aggregate does not change."""
        return False

    def loss(self, batch: Batch, local: ClientContext) -> Losses:
        """Return cross-entropy + model contrast, on all views."""
        terms = {"cross_entropy": batch.cross_entropy()}
        if self.mu:
            previous = self._features(batch.images, local, "previous", under_prefix(PREVIOUS, local.kept))
            towards = self._features(batch.images, local, "global", local.weights)
            contrast = model_contrast(batch.features, towards, previous, temperature=self.temperature)
            terms["contrast"] = self.mu * contrast
        return Losses(terms)

    @torch.no_grad()
    def _features(self, images: Tensor, local: ClientContext, name: str, weights: Mapping[str, Tensor]) -> Tensor:
        frozen = local.frozen(name, weights).train(self.frozen_mode == "train")
        return frozen(images)[0]

    def upload(self, local: ClientContext, trained: Trained) -> Upload:  # noqa: ARG002
        """Return the model; the client keeps it too, as its previous model of the next round."""
        return Upload(local=with_prefix(PREVIOUS, local.model.state_dict()))


# ---- its loss and its net --------------------------------------------------------------------------------------------


def model_contrast(features: Tensor, positive: Tensor, negative: Tensor, *, temperature: float) -> Tensor:
    """Return MOON's model-contrastive loss (Li et al., CVPR 2021), mean over the batch.

    ``softplus((cos(z, negative) - cos(z, positive)) / temperature)``, identical to its two-way cross-entropy.

    Args:
        features: ``[B, D]`` of the model in training.
        positive: ``[B, D]`` of the global model; a constant.
        negative: ``[B, D]`` of the client's previous model; a constant. If it equals ``positive``, the loss is log 2
            with gradient exactly 0.
        temperature: > 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0; got {temperature}")
    dtype = working_dtype(features)
    gap = unit_vectors(negative.detach().to(dtype)) - unit_vectors(positive.detach().to(dtype))
    return -F.logsigmoid(-(unit_vectors(features.to(dtype)) * gap).sum(1) / temperature).mean()
