"""FedDyn's pieces (Acar et al., ICLR 2021), shared by every method with a dynamic regulariser (FedDyn, FedGCA).

A client keeps ``lambda_k``, the gradient of its own loss at its last solution, and trains on ``loss - <lambda_k, w> +
(alpha / 2) ||w - w^t||^2``. The server keeps ``h``, the mean of what all clients have moved so far times ``-alpha``.
Both are mappings of tensors named as the parameters they belong to; without client state or before the first round they
are zero.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from common.storage.state import GlobalState, under_prefix
from strategies.core.method import ClientContext, ServerContext, Update
from strategies.parts.edits import add_linear, pull_towards

CLIENT_PREFIX = "lambda/"
SERVER_PREFIX = "h/"
SCORED_PREFIX = "scored/"


def edit_gradients(local: ClientContext, alpha: float) -> None:
    """``g <- g - lambda_k + alpha (w - w^t)``, between backward and step."""
    pull_towards(local.model, local.reference(), alpha)
    multipliers = local.cached("multipliers", lambda: under_prefix(CLIENT_PREFIX, local.kept))
    add_linear(local.model, multipliers, -1.0)


@torch.no_grad()
def next_multipliers(local: ClientContext, alpha: float) -> dict[str, Tensor]:
    """``lambda_k <- lambda_k - alpha (w_k - w^t)`` after local training, under the names to keep (Upload.local)."""
    reference, before = local.reference(), under_prefix(CLIENT_PREFIX, local.kept)
    after = {}
    for name, parameter in local.model.named_parameters():
        moved = parameter.detach() - reference[name]
        previous = before[name] if name in before else torch.zeros_like(moved)
        after[CLIENT_PREFIX + name] = previous - alpha * moved
    return after


def initial_h(server: ServerContext) -> dict[str, Tensor]:
    """``h = 0`` for every shared parameter, float64, under the names it has in ``GlobalState.extra``."""
    return {
        SERVER_PREFIX + name: torch.zeros_like(tensor, dtype=torch.float64)
        for name, tensor in server.shared.items()
        if name in server.parameters
    }


def server_step(
    state: GlobalState, mean: dict[str, Tensor], updates: Sequence[Update], server: ServerContext, alpha: float
) -> GlobalState:
    """The next global state.

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
        if server.aggregation.robust:  # h must not learn from those whom the rule leaves out
            moved += len(updates) * (mean[key].double() - weights[key].double())
        else:
            for update in updates:
                moved += update.weights[key].double() - weights[key].double()
        h = h.double() - alpha / server.client_count * moved
        following[SERVER_PREFIX + key] = h
        mean[key] = (mean[key].double() - h / alpha).to(mean[key].dtype)
    return replace(state, weights=mean, extra=following)


def clients_mean(state: GlobalState, alpha: float) -> dict[str, Tensor]:
    """``w^t + h / alpha``: the mean of the last participants' models that :func:`server_step` made the state from.

    It is exact but for one rounding to the weights' own type, and needs no second copy of the model on the server.

    Args:
        state: after any round, or the initial one, whose h is 0.
        alpha: > 0.
    """
    offsets = under_prefix(SERVER_PREFIX, state.extra)
    return {
        name: (tensor.double() + offsets[name] / alpha).to(tensor.dtype) if name in offsets else tensor
        for name, tensor in state.weights.items()
    }
