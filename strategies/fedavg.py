"""FedAvg: Communication-Efficient Learning of Deep Networks from Decentralized Data.

H. Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise Agüera y Arcas. AISTATS 2017. arXiv:1602.05629.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from common.config import checked
from strategies.core.method import Averaging


@checked
class FedAvg(Averaging):
    """Cross-entropy on every device; the server averages the models.

    Payload: the model's state both ways. Client state: none.
    """

    capturable: ClassVar[bool] = True

    fedavg_at: ClassVar[Mapping[str, Any] | None] = {}
