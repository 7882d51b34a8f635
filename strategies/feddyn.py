"""FedDyn: Federated Learning Based on Dynamic Regularization.

Durmus Alp Emre Acar, Yue Zhao, Ramon Matas Navarro, Matthew Mattina, Paul N. Whatmough, Venkatesh Saligrama. ICLR 2021.
arXiv:2111.04263.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from common.config import NonNegative, Positive, Search, checked
from common.prototypes import PrototypeSet
from common.storage import GlobalState, under_prefix
from strategies.core.method import Averaging, ClientContext, Download, ServerContext, Trained, Update, Upload, Weighting
from strategies.core.readings import Point
from strategies.parts.edits import add_linear, pull_towards

CLIENT_PREFIX = "lambda/"
"""Prefix of ``lambda_k``, the gradient of a client's own loss at its last solution, among the tensors that it keeps."""

SERVER_PREFIX = "h/"
"""Prefix of ``h``, the mean of all clients' moves so far times ``-alpha``, among the server's tensors."""

SCORED_PREFIX = "scored/"
"""Prefix of the mean model's parameters in a download."""

# ---- the method ------------------------------------------------------------------------------------------------------


@checked
class FedDyn(Averaging):
    """Cross-entropy ``- <lambda_k, w> + (alpha / 2) ||w - w^t||^2``, so that local and global optima agree.

    After training ``lambda_k <- lambda_k - alpha (w_k - w^t)``; the server keeps ``h <- h - (alpha / C) sum_S (w_k -
    w^t)`` and sets ``w^{t+1} = mean_S w_k - h / alpha`` (Algorithm 1). The two terms are applied as gradients. All
    clients have the same alpha, as printed; the authors' code multiplies it by ``mean N / N_k``. ``alpha=0`` with
    ``weighting=samples`` is FedAvg.

    The FedDyn rows of FPL's tables come from code that builds the regulariser from the global net's parameters, with no
    effect on the local ones, and has no h: those rows are FedAvg (``alpha=0 weighting=samples``), not this method.

    Devices score the mean of the last participants' models, never ``w^{t+1}``, which h pushes beyond it. The authors
    also publish the scores of the mean; their code calls ``w^{t+1}`` the cloud model and only trains from it. The mean
    is ``w^{t+1} + h / alpha``.

    Payload: the model's state both ways; where the mean is scored, its parameters too, down, in rounds that score.
    Client state: lambda, the size of the parameters. Server state: h.

    Args:
        alpha: >= 0 (the authors: 0.01 to 0.1). Keep ``alpha * learning_rate < 2 (1 + momentum)``.
        clip: largest norm of the gradient with FedDyn's terms (the authors' code: 10, before its quadratic term, which
            is weight decay there); ``None`` does not clip.
        weighting: how the server averages: ``uniform`` (Algorithm 1), or by ``samples``.
        scored: the ``mean`` of the client models (the authors' rule), or the ``cloud`` model that training starts from.
    """

    readings: ClassVar[tuple[Point, ...]] = (
        Point("alpha", "one for all clients", "times mean N / N_k on client k", "paper"),
        Point("clipped gradients", None, 10.0, setting="clip"),
        Point("average of models", "uniform", "uniform", setting="weighting", tables={"fpl": "samples"}),
        Point("scored model", released="mean", setting="scored"),
    )

    capturable: ClassVar[bool] = True

    fedavg_at: ClassVar[Mapping[str, Any] | None] = {"alpha": 0.0, "weighting": "samples"}

    alpha: Annotated[NonNegative, Search(0.001, 1.0)] = 0.01
    clip: Positive | None = None
    weighting: Weighting = "uniform"
    scored: Literal["mean", "cloud"] = "mean"

    @property
    def scores_mean(self) -> bool:
        """Whether the scored model differs from the one that training starts from; with ``alpha=0`` they are equal."""
        return self.scored == "mean" and self.alpha > 0

    @property
    def adapts(self) -> bool:
        """Whether the mean is installed for a score."""
        return self.scores_mean

    @property
    def adapts_to_data(self) -> bool:
        """Return False: the mean is made by the server."""
        return False

    @property
    def scores_own_training(self) -> bool:
        """Return False: the mean was received, so its score reveals nothing about the client's own training data."""
        return False

    @property
    def keeps_step(self) -> bool:
        """Return True: ``h`` is the mean of the lambda_k only if the server counts what each client sent."""
        return self.alpha > 0

    def adapt(self, local: ClientContext) -> None:
        """Load the mean's parameters; the buffers are those of the mean already."""
        local.model.load_state_dict(under_prefix(SCORED_PREFIX, local.extra), strict=False)

    def scored_weights(self, state: GlobalState) -> Mapping[str, Tensor]:
        """Return the mean of the client models, or the cloud model."""
        if not self.scores_mean:
            return state.weights
        return clients_mean(state, self.alpha)

    def edit_gradients(self, local: ClientContext) -> None:
        """``g <- g - lambda_k + alpha (w - w^t)``, clipped if asked for."""
        add_dynamic_terms(local, self.alpha)
        if self.clip is not None:
            nn.utils.clip_grad_norm_(local.model.parameters(), self.clip)

    def upload(self, local: ClientContext, trained: Trained) -> Upload:  # noqa: ARG002
        """Return the model; the client keeps its new lambda."""
        return Upload(local=next_multipliers(local, self.alpha))

    def initial_state(self, weights: Mapping[str, Tensor], server: ServerContext) -> GlobalState:
        """Return the initial state with ``h = 0``."""
        return GlobalState(weights, PrototypeSet.empty(server.feature_size), initial_h(server), round=0)

    def download(self, state: GlobalState, server: ServerContext) -> Download:
        """Return the model, and the scored model if it differs."""
        extra: dict[str, Tensor] = {}
        if self.scores_mean and server.scoring:
            scored = self.scored_weights(state)
            for name in sorted(server.parameters):
                extra[SCORED_PREFIX + name] = scored[name]
        return Download(state.weights, extra=extra)

    def aggregate(self, state: GlobalState, updates: Sequence[Update], server: ServerContext) -> GlobalState:
        """Average, then Algorithm 1's step of the server; see :func:`server_step`."""
        return server_step(state, self.average(updates, server), updates, server, self.alpha)


# ---- its steps, as functions -----------------------------------------------------------------------------------------


def add_dynamic_terms(local: ClientContext, alpha: float) -> None:
    """``g <- g - lambda_k + alpha (w - w^t)``, between backward and step."""
    pull_towards(local.model, local.reference(), alpha)
    multipliers = local.cached("multipliers", lambda: under_prefix(CLIENT_PREFIX, local.kept))
    add_linear(local.model, multipliers, -1.0)


@torch.no_grad()
def next_multipliers(local: ClientContext, alpha: float) -> dict[str, Tensor]:
    """Return the new ``lambda_k = lambda_k - alpha (w_k - w^t)``, under the names to keep (Upload.local)."""
    reference, before = local.reference(), under_prefix(CLIENT_PREFIX, local.kept)
    after = {}
    for name, parameter in local.model.named_parameters():
        moved = parameter.detach() - reference[name]
        previous = before.get(name, torch.zeros_like(moved))
        after[CLIENT_PREFIX + name] = previous - alpha * moved
    return after


def initial_h(server: ServerContext) -> dict[str, Tensor]:
    """Return ``h = 0`` for every shared parameter, float64, under the names it has in ``GlobalState.extra``."""
    h: dict[str, Tensor] = {}
    for name, tensor in server.shared.items():
        if name in server.parameters:
            h[SERVER_PREFIX + name] = torch.zeros_like(tensor, dtype=torch.float64)
    return h


def server_step(
    state: GlobalState, mean: dict[str, Tensor], updates: Sequence[Update], server: ServerContext, alpha: float
) -> GlobalState:
    """Return the next global state.

    ``h <- h - (alpha / C) sum_{k in S} (w_k - w^t)`` and ``w^{t+1} = mean_{k in S} w_k - h / alpha`` for parameters,
    with C all clients of the federation; buffers are the mean. With ``alpha = 0`` the server averages and ``h`` stays.

    Args:
        state: its weights are ``w^t``; of its extra tensors those named ``h/...`` are replaced, the others kept.
        mean: of the participants' models; it becomes the next weights.
        updates: of the participants S.
        server: gives C and which names are parameters.
        alpha: >= 0.
    """
    if alpha == 0:
        return replace(state, weights=mean)
    following, weights = dict(state.extra), state.weights
    for key, h in under_prefix(SERVER_PREFIX, state.extra).items():
        moved = torch.zeros_like(h, dtype=torch.float64)
        for update in updates:
            moved += update.weights[key].double() - weights[key].double()
        h = h.double() - alpha / server.client_count * moved
        following[SERVER_PREFIX + key] = h
        mean[key] = (mean[key].double() - h / alpha).to(mean[key].dtype)
    return replace(state, weights=mean, extra=following)


def clients_mean(state: GlobalState, alpha: float) -> dict[str, Tensor]:
    """Return ``w^t + h / alpha``: the mean of the last participants' models, before :func:`server_step`.

    The mean is exact but for one rounding to the weights' own type, and needs no second copy of the model on the
    server.

    Args:
        state: after any round, or the initial one, where h is 0.
        alpha: > 0.
    """
    offsets = under_prefix(SERVER_PREFIX, state.extra)
    mean = dict(state.weights)
    for name, offset in offsets.items():
        mean[name] = (mean[name].double() + offset / alpha).to(mean[name].dtype)
    return mean
