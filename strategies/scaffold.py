"""SCAFFOLD: Stochastic Controlled Averaging for Federated Learning.

Sai Praneeth Karimireddy, Satyen Kale, Mehryar Mohri, Sashank J. Reddi, Sebastian U. Stich, Ananda Theertha Suresh. ICML
2020. arXiv:1910.06378.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from common.config import Positive, Search, ZeroToOne, checked
from common.errors import ConfigError
from common.prototypes import PrototypeSet
from common.storage.state import GlobalState, under_prefix, with_prefix
from strategies.core.method import (
    Averaging,
    ClientContext,
    Download,
    ServerContext,
    Trained,
    Update,
    Upload,
    UploadSpec,
    Weighting,
)
from strategies.parts.edits import add_linear

CONTROL = "control/"


def effective_steps(steps: int, momentum: float) -> float:
    """How many gradients' worth ``steps`` of SGD move: ``sum_{j=1..K} (1 - m^j) / (1 - m)``; K without momentum.

    A gradient goes on acting through the momentum buffer, so that displacement over ``learning_rate * K`` would be up
    to ``1 / (1 - m)`` times the mean gradient; over this number it is a weighted mean of the gradients.
    """
    if momentum == 0:
        return float(steps)
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


@checked
class SCAFFOLD(Averaging):
    """Local steps along ``g - c_k + c``, which takes the client's drift out; ``control=0`` is FedAvg.

    With option II, ``c_k <- c_k - c + (w^t - w_k) / (K learning_rate)`` over the K local steps; the server steps
    ``w <- w + server_learning_rate mean_S (w_k - w^t)`` and ``c <- c + (1 / C) sum_S (c_k^new - c_k)`` (Algorithm 1).
    Buffers are averaged. The paper has plain SGD; with momentum K is replaced by :func:`effective_steps`, without
    which control variates are too large by up to ten (momentum 0.9) and training diverges. Equal to FedAvg bit for bit
    at ``control=0 weighting=samples``.

    Payload: the model's state and one tensor per parameter (c, or the change of c_k), both ways. Client state: c_k.
    Server state: c.

    Args:
        server_learning_rate: > 0 (the paper: 1).
        control: factor on ``c - c_k``, in [0, 1] (the paper: 1).
        weighting: models are averaged ``uniform``-ly (the paper), or by ``samples``.
    """

    fedavg_at: ClassVar[Mapping[str, Any] | None] = {"control": 0.0, "weighting": "samples"}

    server_learning_rate: Annotated[Positive, Search(0.1, 1.0)] = 1.0
    control: ZeroToOne = 1.0
    weighting: Weighting = "uniform"

    @property
    def turns_steps(self) -> bool:
        """Control variates subtract from a client's step what it has in common with its earlier ones."""
        return self.control > 0

    def edit_gradients(self, local: ClientContext) -> None:
        """``g <- g + control (c - c_k)``."""
        add_linear(local.model, local.cached("direction", lambda: self._direction(local)), self.control)

    def _direction(self, local: ClientContext) -> dict[str, Tensor]:
        return {name: c - local.kept.get(CONTROL + name, 0.0) for name, c in under_prefix(CONTROL, local.extra).items()}

    @torch.no_grad()
    def upload(self, local: ClientContext, trained: Trained) -> Upload:
        """The model and the change of c_k; the client keeps the new c_k."""
        travelled = local.learning_rate * effective_steps(trained.steps, local.train.momentum)
        before, after, change = local.reference(), {}, {}
        parameters = dict(local.model.named_parameters())
        for name, c in under_prefix(CONTROL, local.extra).items():
            own = local.kept.get(CONTROL + name, torch.zeros_like(c))
            after[name] = own - c + (before[name] - parameters[name].detach()) / travelled
            change[name] = after[name] - own
        return Upload(extra=with_prefix(CONTROL, change), local=with_prefix(CONTROL, after))

    def initial_state(self, weights: Mapping[str, Tensor], server: ServerContext) -> GlobalState:
        """``c = 0``."""
        if server.train.optimizer != "sgd":
            raise ConfigError(
                f"train.optimizer={server.train.optimizer}: SCAFFOLD's control variates are gradients measured from "
                "SGD's steps; set train.optimizer=sgd"
            )
        zeros = {name: torch.zeros_like(weights[name]) for name in weights if name in server.parameters}
        return GlobalState(0, weights, PrototypeSet.empty(server.feature_size), with_prefix(CONTROL, zeros))

    def download(self, state: GlobalState, server: ServerContext) -> Download:  # noqa: ARG002
        """The model and c."""
        return Download(state.weights, extra=state.extra)

    def expects(self, server: ServerContext) -> UploadSpec:
        """The model and one tensor per parameter."""
        shapes = {name: (server.shared[name].dtype, tuple(server.shared[name].shape)) for name in server.parameters}
        return UploadSpec(extra={CONTROL + name: spec for name, spec in shapes.items()})

    def aggregate(self, state: GlobalState, updates: Sequence[Update], server: ServerContext) -> GlobalState:
        """A step along the mean change of the models, and the new c."""
        weights = self.average(updates, server)
        extra = {}
        totals = server.aggregation.totals([under_prefix(CONTROL, update.extra) for update in updates])
        for name, c in under_prefix(CONTROL, state.extra).items():
            before = state.weights[name].double()
            step = self.server_learning_rate * (weights[name].double() - before)
            weights[name] = (before + step).to(weights[name].dtype)
            extra[CONTROL + name] = (c.double() + totals[name] / server.client_count).to(c.dtype)
        return GlobalState(state.round, weights, state.prototypes, extra)
