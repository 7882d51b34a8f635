"""FedProto: Federated Prototype Learning across Heterogeneous Clients.

Yue Tan, Guodong Long, Lu Liu, Tianyi Zhou, Qinghua Lu, Jing Jiang, Chengqi Zhang. AAAI 2022. arXiv:2105.00243. With or
without parameter averaging.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from common.config import NonNegative, Search, checked
from common.losses import prototype_mse
from common.models.base import Model
from common.prototypes import PrototypeSet
from common.storage import GlobalState
from strategies.core.method import (
    Averaging,
    Batch,
    ClientContext,
    Losses,
    PrototypeMode,
    ServerContext,
    Update,
    Weighting,
)
from strategies.core.readings import Point
from strategies.parts.sent_prototypes import class_means_of


@checked
class FedProto(Averaging):
    """FedAvg plus ``consistency * MSE(z, G^y)`` to the global class means; ``consistency=0`` is FedAvg.

    The default is the reading of FPL's, FedAPC's and FedPLCC's tables, "FedProto with parameter averaging": prototypes
    are running means over the last local epoch, and the global one is the mean over the clients that hold the class.

    The original averages no models: only prototypes are sent, and each client keeps its model and is scored on it.
    FedPall's table: ``aggregate_models=false prototype_mode=post_eval prototype_weighting=samples``. The official code
    accumulates over the last epoch and predicts by the nearest prototype: ``aggregate_models=false
    predict_with=prototypes``. With ``aggregate_models=false consistency=0`` it is SingleSet.

    Payload: the model's state (none in the original) and one vector and count per class, both ways. Client state: none
    (the original: the model). **Privacy: class means of features and class counts leave the device.**

    Args:
        consistency: weight of the prototype term, >= 0 (1 reproduces FPL's Table 3, row G).
        prototype_mode: running means over the last epoch (the released code), or a pass after training.
        prototype_weighting: global prototype = plain mean over holders, or weighted by their samples.
        aggregate_models: whether the server averages the models too. The original does not; nor does FedPall's table,
            which has ``prototype_mode=post_eval prototype_weighting=samples`` besides.
        predict_with: the classifier, or the class with the global prototype nearest to the feature (the classifier
            before there are any); classes without a prototype are not predicted.
    """

    readings: ClassVar[tuple[Point, ...]] = (
        Point("are models averaged", False, False, setting="aggregate_models", tables={"fedpall": False}),
        Point(
            "local prototypes", released="last_epoch_running", setting="prototype_mode", tables={"fedpall": "post_eval"}
        ),
        Point("global prototypes", "samples", "uniform", setting="prototype_weighting", tables={"fedpall": "samples"}),
        Point("prediction", "prototypes", "prototypes", setting="predict_with"),
        Point("classes that prototypes predict", released="the client's", ours="all with a prototype"),
        Point("short last batch", released="dropped", ours="kept; train.last_batch=drop"),
        Point(
            "images of the pass after training",
            ours="as for tests; FedPall's code flips and rotates them on Office and PACS",
        ),
    )

    capturable: ClassVar[bool] = True

    fedavg_at: ClassVar[Mapping[str, Any] | None] = {"consistency": 0.0}

    consistency: Annotated[NonNegative, Search(0.01, 10.0)] = 1.0
    prototype_mode: Literal["last_epoch_running", "post_eval"] = "last_epoch_running"
    prototype_weighting: Weighting = "uniform"
    aggregate_models: bool = True
    predict_with: Literal["classifier", "prototypes"] = "classifier"

    @property
    def personal(self) -> bool:
        """Return whether each client has a model of its own: models are not averaged."""
        return not self.aggregate_models

    def shared_names(self, model: nn.Module) -> set[str]:
        """Return all names, or none if models are not averaged."""
        if not self.aggregate_models:
            return set()
        return super().shared_names(model)

    @property
    def prototypes_from(self) -> PrototypeMode:
        """Return the pass in which prototypes are made, as ``prototype_mode`` names it."""
        return self.prototype_mode

    def loss(self, batch: Batch, local: ClientContext) -> Losses:
        """Return cross-entropy plus the mean squared distance to the class's global prototype."""
        terms = {"cross_entropy": batch.cross_entropy()}
        if self.consistency and len(local.prototypes):
            terms["consistency"] = self.consistency * prototype_mse(batch.features, batch.labels, local.prototypes)
        return Losses(terms)

    def predict(self, features: Tensor, logits: Tensor, local: ClientContext) -> Tensor:
        """Return the classifier's logits, or minus the squared distance to each class's prototype."""
        if self.predict_with == "classifier" or not len(local.prototypes):
            return logits
        scores = torch.full_like(logits, -torch.inf)
        distances = torch.cdist(features, local.prototypes.vectors, compute_mode="donot_use_mm_for_euclid_dist")
        scores[:, local.prototypes.labels] = -distances.square()
        return scores

    def inference(self, model: nn.Module, prototypes: PrototypeSet, seed: int) -> nn.Module:
        """Return the model, or the nearest prototype to its features."""
        if self.predict_with == "prototypes" and len(prototypes):
            return NearestPrototype(model, prototypes)
        return super().inference(model, prototypes, seed)

    def aggregate_prototypes(
        self,
        state: GlobalState,  # noqa: ARG002
        updates: Sequence[Update],
        server: ServerContext,
    ) -> PrototypeSet:
        """Return the mean of the clients' class means, class by class."""
        return class_means_of(updates, server, sample_weighted=self.prototype_weighting == "samples")


class NearestPrototype(nn.Module):
    """A model that classifies by the nearest prototype, of which there is at most one for each class."""

    table: Tensor
    present: Tensor

    def __init__(self, model: nn.Module, prototypes: PrototypeSet) -> None:
        super().__init__()
        assert isinstance(model, Model)
        self.model = model
        for name, rows in zip(("table", "present"), prototypes.rows_per_class(model.class_count), strict=True):
            self.register_buffer(name, rows, persistent=False)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return features ``[B, D]`` and minus their squared distances ``[B, K]``, -inf for absent classes."""
        features, logits = self.model(images)
        distances = (features[:, None] - self.table).square().sum(2)
        return features, torch.where(self.present, -distances, torch.full_like(logits, -torch.inf))
