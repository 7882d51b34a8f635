"""FedAvg (McMahan et al., AISTATS 2017)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from common.config import checked
from common.storage.state import GlobalState
from strategies.core.method import Method, Server, Update


@checked
class FedAvg(Method):
    """Cross-entropy on every device; the server averages the models.

    Payload: the model's state both ways. Client state: none.

    Args:
        weighting: by ``samples`` N_k (McMahan; FPL, FedPall), or ``uniform`` (FedBN's and FedPLVM's code).
    """

    fedavg_at: ClassVar[Mapping[str, Any] | None] = {}

    weighting: Literal["samples", "uniform"] = "samples"

    def aggregate(self, state: GlobalState, updates: Sequence[Update], server: Server) -> GlobalState:
        """``w <- sum_k N_k w_k / sum_k N_k``, or the plain mean."""
        weights = server.aggregation.average(updates, uniform=self.weighting == "uniform")
        return GlobalState(state.round, weights, state.prototypes, state.extra)
