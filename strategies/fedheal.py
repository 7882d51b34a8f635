"""FedHEAL: Fair Federated Learning under Domain Skew with Local Consistency and Domain Diversity.

Yuhang Chen, Wenke Huang, Mang Ye. CVPR 2024. arXiv:2405.16585.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from common.config import checked
from strategies.parts.heal import Heal


@checked
class FedHEAL(Heal):
    """FedAvg in which clients send consistent updates alone, and count by how far they move.

    The device leaves out the elements of its update that change sign from round to round. Such elements would otherwise
    outweigh the updates of the clients to which they matter. The clients that move farthest belong to the domains that
    the model fits least. These clients get a larger share, so that no domain dominates.
    :class:`~strategies.parts.heal.Heal` has the formulas and the options. The method equals FedAvg bit for bit at
    ``threshold=-1 momentum=0 weighting=samples``.

    Formulas and defaults are those of the released code, which stops in round 1 because its history is ``None``; here
    the history is a count. The code counts global rounds, here each client counts its own; with all clients in every
    round these are equal. The code masks batch norm's integer counters too; here they are the median of the clients'.

    Payload: the model's state both ways, and up one bit per floating-point element. Client state: one count per
    element (int32) and the number of its rounds. Server state: three numbers per client.
    """

    capturable: ClassVar[bool] = True

    fedavg_at: ClassVar[Mapping[str, Any] | None] = {"threshold": -1.0, "momentum": 0.0, "weighting": "samples"}
