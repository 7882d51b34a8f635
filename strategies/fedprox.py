"""FedProx: Federated Optimization in Heterogeneous Networks.

Tian Li, Anit Kumar Sahu, Manzil Zaheer, Maziar Sanjabi, Ameet Talwalkar, Virginia Smith. MLSys 2020. arXiv:1812.06127.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from common.config import NonNegative, Search, checked
from strategies.core.method import Averaging, ClientContext
from strategies.core.readings import Point
from strategies.parts.edits import pull_towards


@checked
class FedProx(Averaging):
    """FedAvg with ``(mu / 2) ||w - w^t||^2`` over the trainable parameters in the local loss; ``mu=0`` is FedAvg.

    The term is applied as its gradient ``mu (w - w^t)``, so it costs one pass over the parameters and no graph.
    Batch-norm buffers are left out, its affine parameters are not.

    Payload: the model's state both ways. Client state: none.

    Args:
        mu: proximal coefficient, >= 0 (FPL's table: 0.01).
        scale: a further factor on mu, >= 0. The code released with FPL multiplies by 0.01 once more; the paper does
            not, so 1 is the default and 0.01 reproduces the code.
    """

    readings: ClassVar[tuple[Point, ...]] = (
        Point("a further factor on mu", 1.0, setting="scale", tables={"fpl": 0.01}),
        Point(
            "steps with the term",
            ours="all; FedPall's code leaves it out in the first round, and on the first batch of an epoch",
        ),
    )

    capturable: ClassVar[bool] = True

    fedavg_at: ClassVar[Mapping[str, Any] | None] = {"mu": 0.0}

    mu: Annotated[NonNegative, Search(1e-4, 1.0)] = 0.01
    scale: NonNegative = 1.0

    def edit_gradients(self, local: ClientContext) -> None:
        """``g <- g + mu (w - w^t)``."""
        pull_towards(local.model, local.reference(), self.mu * self.scale)
