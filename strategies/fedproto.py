"""FedProto (Tan et al., AAAI 2022), with or without parameter averaging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from common.config import check
from common.losses import cross_entropy, prototype_mse
from common.prototypes import PrototypeSet, unbiased_prototypes
from common.state import GlobalState
from strategies.method import Batch, Local, Losses, Method, PrototypeMode, Server, Update


@dataclass(frozen=True)
class FedProto(Method):
    """FedAvg plus ``consistency * MSE(z, G^y)`` to the global class means; ``consistency=0`` is FedAvg.

    This is the reading of FPL's, FedAPC's and FedPLCC's tables, "FedProto with parameter averaging": prototypes are
    running means over the last local epoch, and the global one is the mean over the clients that hold the class.

    Payload: the model's state and one vector and count per class, both ways. Client state: none.

    Args:
        consistency: weight of the prototype term, >= 0 (1 reproduces FPL's Table 3, row G).
        prototype_mode: running means over the last epoch (the released code), or a pass after training.
        weighting: global prototype = plain mean over holders, or weighted by their samples.
    """

    fedavg_at: ClassVar[Mapping[str, Any] | None] = {"consistency": 0.0}

    consistency: float = 1.0
    prototype_mode: Literal["last_epoch_running", "post_eval"] = "last_epoch_running"
    weighting: Literal["uniform", "samples"] = "uniform"

    def __post_init__(self) -> None:
        check(self.consistency >= 0, f"consistency must be >= 0; got {self.consistency}")

    @property
    def prototypes_from(self) -> PrototypeMode:
        """See ``prototype_mode``."""
        return self.prototype_mode

    def loss(self, batch: Batch, local: Local) -> Losses:
        """Cross-entropy plus the squared distance to the class's global prototype, mean over features and batch."""
        terms = {"cross_entropy": cross_entropy(batch.logits, batch.labels)}
        if self.consistency and len(local.prototypes):
            terms["consistency"] = self.consistency * prototype_mse(batch.features, batch.labels, local.prototypes)
        return Losses(terms)

    def aggregate_prototypes(self, state: GlobalState, updates: Sequence[Update], server: Server) -> PrototypeSet:  # noqa: ARG002
        """The mean of the clients' class means, class by class."""
        everything = PrototypeSet.concatenate([update.prototypes for update in updates])
        return unbiased_prototypes(everything, sample_weighted=self.weighting == "samples")
