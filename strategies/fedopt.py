"""FedOpt: Adaptive Federated Optimization.

Sashank J. Reddi, Zachary Charles, Manzil Zaheer, Zachary Garrett, Keith Rush, Jakub Konečný, Sanjiv Kumar, H. Brendan
McMahan. ICLR 2021. arXiv:2003.00295. With SGD and momentum it is FedAvgM.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from common.config import BelowOne, Positive, Search, checked
from common.prototypes import PrototypeSet
from common.storage import GlobalState, under_prefix
from strategies.core.method import Averaging, ServerContext, Update, Weighting
from strategies.core.readings import Point

FIRST, SECOND = "first_moment/", "second_moment/"


BETA_1 = 0.9
"""Decay of the first moment: of adam and yogi as in the paper's experiments, of adagrad as Algorithm 2 allows.

The experiments have no decayed moment with adagrad, which is a decay of 0 (appendix D).
"""

BETA_2 = 0.99
"""Decay of the second moment of adam and yogi, as in the paper."""


@checked
class FedOpt(Averaging):
    """FedAvg on the devices; the server steps an optimiser along ``Delta = mean_S w_k - w^t`` (Algorithm 2).

    ``sgd``: ``v <- momentum v + Delta; w <- w + server_learning_rate v``, FPL's "FedOPT". ``adam``, ``yogi`` and
    ``adagrad`` are the paper's, without bias correction and with the second moment starting at ``epsilon^2``. Buffers
    (batch-norm statistics) are the plain mean, since they have no gradient. ``start=mean`` steps from the mean instead:
    ``w <- mean_S w_k + server_learning_rate v``, which is the effect of FPL's code. ``optimizer=sgd
    server_learning_rate=1 momentum=0 weighting=samples`` is FedAvg.

    Payload: the model's state both ways. Client state: none. Server state: the moments, in float64.

    Args:
        optimizer: of the server.
        server_learning_rate: > 0 (FPL: 0.5 with sgd; 0.01 suits adam and yogi; adagrad needs more, because its steps
            shrink).
        momentum: of sgd, in [0, 1) (FPL: 0.9).
        epsilon: the paper's tau, degree of adaptivity, > 0.
        weighting: the mean is ``uniform`` over clients (FPL's code), or by ``samples``.
        start: where the step begins: at the ``received`` model w^t, as in Algorithm 2, or at the ``mean``. FPL's code
            registers layers twice, so that its server has taken over the mean before the optimiser's step.
    """

    readings: ClassVar[tuple[Point, ...]] = (
        Point("average of models", "uniform", setting="weighting"),
        Point("where the step begins", "received", setting="start", tables={"fpl": "mean"}),
        Point("degree of adaptivity", 1e-3, setting="epsilon"),
        Point("decay of adagrad's first moment", "0, in the experiments", ours=str(BETA_1)),
        Point("buffers", ours="the plain mean"),
    )

    capturable: ClassVar[bool] = True

    fedavg_at: ClassVar[Mapping[str, Any] | None] = {
        "optimizer": "sgd",
        "server_learning_rate": 1.0,
        "momentum": 0.0,
        "weighting": "samples",
    }

    optimizer: Literal["sgd", "adam", "yogi", "adagrad"] = "sgd"
    server_learning_rate: Annotated[Positive, Search(0.01, 2.0)] = 0.5
    momentum: BelowOne = 0.9
    epsilon: Positive = 1e-3
    weighting: Weighting = "uniform"
    start: Literal["received", "mean"] = "received"

    def initial_state(self, weights: Mapping[str, Tensor], server: ServerContext) -> GlobalState:
        """Return the initial state with first moments 0, and second moments ``epsilon^2`` if the optimiser has them."""
        extra: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            if name not in server.parameters:
                continue
            extra[FIRST + name] = torch.zeros_like(tensor, dtype=torch.float64)
            if self.optimizer != "sgd":
                extra[SECOND + name] = extra[FIRST + name] + self.epsilon**2
        return GlobalState(weights, PrototypeSet.empty(server.feature_size), extra, round=0)

    def aggregate(self, state: GlobalState, updates: Sequence[Update], server: ServerContext) -> GlobalState:
        """Take one step of the server's optimiser."""
        weights = self.average(updates, server)
        extra: dict[str, Tensor] = {}
        for name, first in under_prefix(FIRST, state.extra).items():
            before, mean = state.weights[name].double(), weights[name].double()
            delta = mean - before
            if self.optimizer == "sgd":
                first = self.momentum * first + delta
                step = first
            else:
                first = BETA_1 * first + (1 - BETA_1) * delta
                second = self._second_moment(state.extra[SECOND + name], delta.square())
                step = first / (second.sqrt() + self.epsilon)
                extra[SECOND + name] = second
            extra[FIRST + name] = first
            start = before
            if self.start == "mean":
                start = mean
            weights[name] = (start + self.server_learning_rate * step).to(weights[name].dtype)
        return GlobalState(weights, state.prototypes, extra, round=state.round)

    def _second_moment(self, second: Tensor, square: Tensor) -> Tensor:
        if self.optimizer == "adagrad":
            return second + square
        if self.optimizer == "yogi":
            return second - (1 - BETA_2) * square * torch.sign(second - square)
        return BETA_2 * second + (1 - BETA_2) * square
