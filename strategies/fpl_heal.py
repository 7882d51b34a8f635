"""FPL+HEAL: Fair Federated Learning under Domain Skew with Local Consistency and Domain Diversity.

Yuhang Chen, Wenke Huang, Mang Ye. CVPR 2024. arXiv:2405.16585.

Rethinking Federated Learning with Domain Shift: A Prototype View. Wenke Huang, Mang Ye, Zekun Shi, He Li, Bo Du. CVPR
2023. doi:10.1109/CVPR52729.2023.01565.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from common.config import NonNegative, checked
from strategies.fpl import FPL
from strategies.parts.heal import Heal


@checked
class FPLHeal(Heal, FPL):
    """FPL with models averaged as FedHEAL does: consistent updates, and shares by how far clients move.

    Loss and prototypes are FPL's, with its options; mask and shares are those of :class:`~strategies.parts.heal.Heal`.
    Prototypes are neither masked nor weighted. The method equals FPL bit for bit at ``threshold=-1 momentum=0
    weighting=samples``, and to FedAvg with ``contrast=consistency=0`` besides.

    Payload: that of FPL, and up one bit per floating-point element of the model. Client state: one count per element
    (int32) and the number of its rounds. Server state: three numbers per client.
    """

    capturable: ClassVar[bool] = True

    fedavg_at: ClassVar[Mapping[str, Any] | None] = {
        "threshold": -1.0,
        "momentum": 0.0,
        "weighting": "samples",
        "contrast": 0.0,
        "consistency": 0.0,
    }

    # goldfinch compare searches three fields of a method; FPL's two weights stay at what its paper prints
    contrast: NonNegative = 1.0
    consistency: NonNegative = 1.0
