"""How much each client counts when the server averages models: one field of the methods that let it be chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from common.config import checked
from strategies.core.method import Method, Server, Update

Weighting = Literal["samples", "uniform"]


@checked
class Averaging(Method):
    """A method whose server averages the clients' models.

    Args:
        weighting: by ``samples`` N_k (McMahan; printed by FPL and FedPall), or ``uniform``: every client counts the
            same (a switch of FPL's released code; FedBN's and FedPLVM's code).
    """

    weighting: Weighting = "samples"

    def average(self, updates: Sequence[Update], server: Server) -> dict[str, Tensor]:
        """``sum_k N_k w_k / sum_k N_k``, or the plain mean."""
        return server.aggregation.average(updates, uniform=self.weighting == "uniform")
