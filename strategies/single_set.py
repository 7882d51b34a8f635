"""SingleSet: every client on its own, the baseline without a federation in FedPall's tables.

FedPall: Prototype-based Adversarial and Collaborative Learning for Federated Learning with Feature Drift. Yong Zhang,
Feng Liang, Guanghu Yuan, Min Yang, Chengming Li, Xiping Hu. ICCV 2025. arXiv:2507.04781.
"""

from typing import ClassVar

from torch import nn

from common.config import checked
from strategies.core.method import Bound, Method


@checked
class SingleSet(Method):
    """Each client trains its own model on its own data for all rounds; all begin with the same weights.

    Payload: only the header, both ways. Client state: the model. Scored on each client's own model. No trained weights
    leave a device. The lower line of a table, simulated only.
    """

    capturable: ClassVar[bool] = True

    bound: ClassVar[Bound | None] = "lower"
    personal: ClassVar[bool] = True
    averages: ClassVar[bool] = False

    def shared_names(self, model: nn.Module) -> set[str]:  # noqa: ARG002
        """Return no names: the whole model stays on the device."""
        return set()
