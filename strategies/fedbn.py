"""FedBN (Li et al., ICLR 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import nn

from common.models.partition import norm_state_names
from strategies.fedavg import FedAvg


@dataclass(frozen=True)
class FedBN(FedAvg):
    """FedAvg but for batch normalisation, which stays on each device: parameters, running statistics and counters.

    On a network without batch norm it is FedAvg. The original code weights clients equally; FedPall's table, like all
    of its rows, weights by samples, which is the default.

    Payload: the model's state without batch norm, both ways. Client state: batch norm. Scored on each client's own
    model, that is with its own batch norm.

    Args:
        weighting: by ``samples`` N_k, or ``uniform``.
        layers: what counts as batch norm. ``type``: layers of that type. ``name``: whatever has "bn" in its name, as
            FedPall's code has it, which misses the batch norm of a torchvision ResNet's shortcuts
            (``downsample.1``), so that these are averaged.
    """

    fedavg_at: ClassVar[Mapping[str, Any] | None] = None
    personal: ClassVar[bool] = True

    layers: Literal["type", "name"] = "type"

    def shared_names(self, model: nn.Module) -> set[str]:
        """Everything but batch norm."""
        if self.layers == "name":
            return {name for name in model.state_dict() if "bn" not in name}
        return set(model.state_dict()) - norm_state_names(model, "batch")
