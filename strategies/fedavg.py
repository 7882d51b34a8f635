"""FedAvg (McMahan et al., AISTATS 2017)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from common.config import checked
from strategies.core.method import Averaging


@checked
class FedAvg(Averaging):
    """Cross-entropy on every device; the server averages the models.

    Payload: the model's state both ways. Client state: none.
    """

    fedavg_at: ClassVar[Mapping[str, Any] | None] = {}
