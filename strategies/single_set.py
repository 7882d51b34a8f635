"""SingleSet: every client on its own, the baseline without a federation (FedPall, ICCV 2025)."""

from typing import ClassVar

from torch import nn

from common.config import checked
from strategies.core.method import Method


@checked
class SingleSet(Method):
    """Each client trains its own model on its own data for all rounds; all begin with the same weights.

    Payload: nothing but the header, both ways. Client state: the model. Scored on each client's own model. Nothing
    that was learned leaves a device.
    """

    personal: ClassVar[bool] = True
    averages: ClassVar[bool] = False

    def shared_names(self, model: nn.Module) -> set[str]:  # noqa: ARG002
        """Nothing travels."""
        return set()
