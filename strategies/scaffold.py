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
from common.settings import RunSettings
from common.storage import GlobalState, under_prefix, with_prefix
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
    tensor_specs,
)
from strategies.core.readings import Point
from strategies.parts.edits import add_linear

CONTROL = "control/"


def effective_steps(steps: int, momentum: float) -> float:
    """Return ``sum_{j=1..K} (1 - m^j) / (1 - m)``: K steps of SGD move as far as this number of gradients.

    A gradient continues to act through the momentum buffer. The displacement divided by ``learning_rate * K`` would be
    up to ``1 / (1 - m)`` times the mean gradient; divided by this number it is a weighted mean of the gradients.

    Args:
        steps: K >= 1.
        momentum: m in [0, 1); with 0 the result is K.
    """
    if momentum == 0:
        return float(steps)
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


@checked
class SCAFFOLD(Averaging):
    """Local steps along ``g - c_k + c``, which removes the client's drift; ``control=0`` is FedAvg.

    With option II, ``c_k <- control (c_k - c) + (w^t - w_k) / (K learning_rate)`` over the K local steps: the mean of
    the client's own gradients, whatever the factor; the server steps ``w <- w + server_learning_rate mean_S (w_k -
    w^t)`` and ``c <- c + (1 / C) sum_S (c_k^new - c_k)`` (Algorithm 1). Buffers are averaged. The paper has plain SGD;
    with momentum K is replaced by :func:`effective_steps`, without which control variates are too large by up to ten
    (momentum 0.9) and training diverges. The method equals FedAvg bit for bit at ``control=0 weighting=samples``.

    Payload: the model's state and one tensor per parameter (c, or the change of c_k), both ways. Client state: c_k.
    Server state: c.

    Args:
        server_learning_rate: > 0 (the paper: 1).
        control: factor on ``c - c_k``, in [0, 1] (the paper: 1).
        weighting: models are averaged ``uniform``-ly (the paper), or by ``samples``.
    """

    readings: ClassVar[tuple[Point, ...]] = (
        Point("control variates", "option II (or I)", ours="paper"),
        Point("rate of the server", 1.0, setting="server_learning_rate"),
        Point("average of models", "uniform", setting="weighting"),
        Point(
            "divisor",
            "K, the local steps of plain SGD",
            ours="what K steps add up to: K without momentum",
        ),
    )

    capturable: ClassVar[bool] = True

    fedavg_at: ClassVar[Mapping[str, Any] | None] = {"control": 0.0, "weighting": "samples"}

    server_learning_rate: Annotated[Positive, Search(0.1, 1.0)] = 1.0
    control: ZeroToOne = 1.0
    weighting: Weighting = "uniform"

    @property
    def keeps_step(self) -> bool:
        """Return True: ``c`` is the mean of the c_k only if the server counts what each client sent."""
        return self.control > 0

    def check(self, settings: RunSettings) -> None:
        """Refuse another optimiser than SGD."""
        super().check(settings)
        if settings.train.optimizer != "sgd":
            raise ConfigError(
                f"train.optimizer={settings.train.optimizer}: SCAFFOLD's control variates are gradients measured from "
                "SGD's steps; set train.optimizer=sgd"
            )

    def edit_gradients(self, local: ClientContext) -> None:
        """``g <- g + control (c - c_k)``."""
        add_linear(local.model, local.cached("direction", lambda: self._direction(local)), self.control)

    def _direction(self, local: ClientContext) -> dict[str, Tensor]:
        direction: dict[str, Tensor] = {}
        for name, c in under_prefix(CONTROL, local.extra).items():
            direction[name] = c - local.kept.get(CONTROL + name, 0.0)
        return direction

    @torch.no_grad()
    def upload(self, local: ClientContext, trained: Trained) -> Upload:
        """Return the model and the change of c_k; the client keeps the new c_k."""
        travelled = local.learning_rate * effective_steps(trained.steps, local.train.momentum)
        before, after, change = local.reference(), {}, {}
        parameters = dict(local.model.named_parameters())
        for name, c in under_prefix(CONTROL, local.extra).items():
            own = local.kept.get(CONTROL + name, torch.zeros_like(c))
            after[name] = self.control * (own - c) + (before[name] - parameters[name].detach()) / travelled
            change[name] = after[name] - own
        return Upload(extra=with_prefix(CONTROL, change), local=with_prefix(CONTROL, after))

    def initial_state(self, weights: Mapping[str, Tensor], server: ServerContext) -> GlobalState:
        """Return the initial state with ``c = 0``."""
        zeros: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            if name in server.parameters:
                zeros[CONTROL + name] = torch.zeros_like(tensor)
        return GlobalState(weights, PrototypeSet.empty(server.feature_size), zeros, round=0)

    def download(self, state: GlobalState, server: ServerContext) -> Download:  # noqa: ARG002
        """Return the model and c."""
        return Download(state.weights, extra=state.extra)

    def expects(self, server: ServerContext) -> UploadSpec:
        """Expect the model and one tensor per parameter."""
        parameters = {name: server.shared[name] for name in server.parameters}
        return UploadSpec(extra=tensor_specs(with_prefix(CONTROL, parameters)))

    def aggregate(self, state: GlobalState, updates: Sequence[Update], server: ServerContext) -> GlobalState:
        """Take a step along the mean change of the models, and update c."""
        weights = self.average(updates, server)
        extra = {}
        totals = server.aggregation.totals([under_prefix(CONTROL, update.extra) for update in updates])
        for name, c in under_prefix(CONTROL, state.extra).items():
            before = state.weights[name].double()
            step = self.server_learning_rate * (weights[name].double() - before)
            weights[name] = (before + step).to(weights[name].dtype)
            extra[CONTROL + name] = (c.double() + totals[name] / server.client_count).to(c.dtype)
        return GlobalState(weights, state.prototypes, extra, round=state.round)
