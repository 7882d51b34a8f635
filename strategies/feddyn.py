"""FedDyn: Federated Learning Based on Dynamic Regularization.

Durmus Alp Emre Acar, Yue Zhao, Ramon Matas Navarro, Matthew Mattina, Paul N. Whatmough, Venkatesh Saligrama. ICLR 2021.
arXiv:2111.04263.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from common.config import NonNegative, Positive, Search, checked
from common.prototypes import PrototypeSet
from common.storage.state import GlobalState, under_prefix, with_prefix
from strategies.core.method import Averaging, ClientContext, Download, ServerContext, Trained, Update, Upload, Weighting
from strategies.parts import dynamics


@checked
class FedDyn(Averaging):
    """Cross-entropy ``- <lambda_k, w> + (alpha / 2) ||w - w^t||^2``, so that local and global optima agree.

    After training ``lambda_k <- lambda_k - alpha (w_k - w^t)``; the server keeps ``h <- h - (alpha / C) sum_S (w_k -
    w^t)`` and sets ``w^{t+1} = mean_S w_k - h / alpha`` (Algorithm 1). Both terms are applied as gradients. ``alpha=0``
    with ``weighting=samples`` is FedAvg.

    The FedDyn rows of FPL's tables come from code whose regulariser is built from the global net's parameters, with no
    effect on the local ones, and without h: those rows are FedAvg (``alpha=0 weighting=samples``), not this method.

    Devices score the mean of the last participants' models, never ``w^{t+1}``, which h pushes beyond it: so do the
    authors, whose published numbers are of the mean (their code calls the other the cloud model and only trains from
    it). The mean is ``w^{t+1} + h / alpha``.

    Payload: the model's state both ways; where the mean is scored, its parameters too, down, in rounds that score.
    Client state: lambda, the size of the parameters. Server state: h.

    Args:
        alpha: >= 0 (the authors: 0.01 to 0.1). Keep ``alpha * learning_rate < 2 (1 + momentum)``.
        adaptive_alpha: a client's alpha is ``alpha * mean N / N_k``, as in the authors' code; h keeps alpha.
        clip: largest norm of the gradient with FedDyn's terms (the authors' code: 10, before its quadratic term, which
            is weight decay there); ``None`` does not clip.
        weighting: how the server averages: ``uniform`` (Algorithm 1), or by ``samples``.
        scored: the ``mean`` of the client models (the authors' rule), or the ``cloud`` model that training starts from.
    """

    fedavg_at: ClassVar[Mapping[str, Any] | None] = {"alpha": 0.0, "weighting": "samples"}

    alpha: Annotated[NonNegative, Search(0.001, 1.0)] = 0.01
    adaptive_alpha: bool = False
    clip: Positive | None = None
    weighting: Weighting = "uniform"
    scored: Literal["mean", "cloud"] = "mean"

    @property
    def adapts(self) -> bool:
        """Whether what is scored is another than what training starts from; with ``alpha=0`` they are one."""
        return self.scored == "mean" and self.alpha > 0

    @property
    def scores_own_training(self) -> bool:
        """The mean was received, so its score says nothing of the client's own training data."""
        return False

    def adapt(self, local: ClientContext) -> None:
        """Put the mean's parameters in; buffers are the mean's anyway."""
        local.model.load_state_dict(under_prefix(dynamics.SCORED_PREFIX, local.extra), strict=False)

    def scored_weights(self, state: GlobalState) -> Mapping[str, Tensor]:
        """The mean of the client models, or the cloud model."""
        return dynamics.clients_mean(state, self.alpha) if self.adapts else state.weights

    def _alpha(self, local: ClientContext) -> float:
        if not self.adaptive_alpha:
            return self.alpha
        return self.alpha * float(local.extra["mean_samples"]) / local.client.samples

    def edit_gradients(self, local: ClientContext) -> None:
        """``g <- g - lambda_k + alpha (w - w^t)``, clipped if asked for."""
        dynamics.edit_gradients(local, local.cached("alpha", lambda: self._alpha(local)))
        if self.clip is not None:
            nn.utils.clip_grad_norm_(local.model.parameters(), self.clip)

    def upload(self, local: ClientContext, trained: Trained) -> Upload:  # noqa: ARG002
        """The model; the client keeps its new lambda."""
        return Upload(local=dynamics.next_multipliers(local, self._alpha(local)))

    def initial_state(self, weights: Mapping[str, Tensor], server: ServerContext) -> GlobalState:
        """``h = 0``."""
        return GlobalState(0, weights, PrototypeSet.empty(server.feature_size), dynamics.initial_h(server))

    def download(self, state: GlobalState, server: ServerContext) -> Download:
        """The model; what is scored if it is another; and the clients' mean size where alpha depends on it."""
        extra = {}
        if self.adapts and server.scoring:
            scored = self.scored_weights(state)
            extra = with_prefix(dynamics.SCORED_PREFIX, {name: scored[name] for name in sorted(server.parameters)})
        if self.adaptive_alpha:
            mean = sum(client.samples for client in server.clients) / len(server.clients)
            extra["mean_samples"] = torch.tensor(mean, dtype=torch.float64)
        return Download(state.weights, extra=extra)

    def aggregate(self, state: GlobalState, updates: Sequence[Update], server: ServerContext) -> GlobalState:
        """See :func:`strategies.parts.dynamics.server_step`."""
        return dynamics.server_step(state, self.average(updates, server), updates, server, self.alpha)
