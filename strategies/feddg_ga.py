"""FedDG-GA: Federated Domain Generalization with Generalization Adjustment.

Ruipeng Zhang, Qinwei Xu, Jiangchao Yao, Ya Zhang, Qi Tian, Yanfeng Wang. CVPR 2023. OpenReview:9Bnhplqp-E.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from common.config import Search, checked
from common.errors import PayloadError
from common.storage import GlobalState
from strategies.core.aggregation import cap_shares
from strategies.core.method import (
    Averaging,
    ClientContext,
    Measured,
    ServerContext,
    Trained,
    Update,
    Upload,
    UploadSpec,
    Weighting,
)
from strategies.core.readings import Point

MEASURED = "measured"
"""Name of the three numbers that a client sends: of the received model, of the trained model, and the samples."""

SHARES, TRAINED, MEASURED_IN = "shares", "trained_metric", "measured_in"
"""The server's three numbers per client: a_k; the metric of the model that it last trained; and the round of that, 0
if there was none."""

AVERAGED_IN = "averaged_in"
"""Name of the round of the last average, 0 before the first."""

LOSS_UNIT = 1e-6
"""A loss is sent as an integer multiple of this, since integers are exempt from the bound on the length of updates."""

MAX_LOSS = 1e6
"""Largest loss that is sent; a model that has diverged has this one."""

SMALLEST_GAP = 1e-9
"""If the largest gap is below this, all gaps are rounding errors, and no share moves."""


@checked
class FedDGGA(Averaging):
    """FedAvg with shares that are adjusted until averaging costs every client the same.

    In round t client k measures its trained model: ``b_k``. At the beginning of round t+1 it measures the average that
    it has received: ``e_k``. The generalisation gap is ``g_k = e_k - b_k``. The server moves the shares before it
    averages, ``a_k <- clip(a_k + sign (step_size / C) (1 - (t-2) / R) g_k / max_j |g_j|, 0, 1)``, and scales them so
    that their sum stays. The sign is -1 for accuracy and +1 for loss: a client that loses by averaging gains weight.
    With ``centred`` the mean gap is subtracted first, the step is not divided by C and falls by ``1 - (t-1) / R``, and
    shares are clipped at 0 only.

    Measurements are on the client's validation samples. Set ``protocol.validation=0.1``, as in ``experiment=
    feddg_ga_pacs``; without it they are on its training samples, where the gap is larger. A client that was not in
    the last round keeps its share. ``step_size=0`` is FedAvg with the ``weighting``, bit for bit.

    Formula and defaults are those of the released code; ``centred`` is the paper's rule as another implementation
    states it. docs/methods.md lists what differs.

    Payload: the model's state both ways, and up three integers. Client state: none. Server state: three numbers per
    client.

    Args:
        step_size: d, in [0, 1).
        metric: ``accuracy`` (the code), or ``loss``, which moves in finer steps where there are few samples.
        centred: whether the mean gap is subtracted.
        weighting: the shares at the start: ``uniform`` (the code), or by ``samples``.
    """

    readings: ClassVar[tuple[Point, ...]] = (
        Point(
            "step of a share",
            True,  # as another implementation's comments have it
            False,
            setting="centred",
            meanings={
                "False": "step_size / C times the gap, falling by 1 - (t - 2) / R, clipped to 0 and 1",
                "True": "the mean gap is subtracted, the step is not divided and falls by 1 - (t - 1) / R",
            },
        ),
        Point("step size", released=0.2, setting="step_size"),
        Point("shares at the start", released="uniform", setting="weighting"),
        Point("client that sat out the round before", ours="keeps its share"),
        Point("rounds", released="R + 1", ours="R"),
        Point("momentum of the clients' optimiser", released="kept from round to round", ours="new in each round"),
        Point("short last batch", released="dropped", ours="kept; train.last_batch=drop"),
    )

    capturable: ClassVar[bool] = True

    fedavg_at: ClassVar[Mapping[str, Any] | None] = {"step_size": 0.0, "weighting": "samples"}
    averages: ClassVar[bool] = False
    validates: ClassVar[bool] = True

    step_size: Annotated[float, Field(ge=0, lt=1), Search(0.02, 0.8)] = 0.2
    metric: Literal["accuracy", "loss"] = "accuracy"
    centred: bool = False
    weighting: Weighting = "uniform"

    @property
    def scheduled(self) -> bool:
        """Whether the step depends on the number of rounds."""
        return self.step_size > 0

    # ---- on the device ---------------------------------------------------------------------------------------------

    def begin(self, local: ClientContext) -> None:
        """Measure the received model."""
        local.cached(MEASURED, local.validate)

    def upload(self, local: ClientContext, trained: Trained) -> Upload:
        """Return the model and three integers: received and trained model, and samples."""
        received: Measured = local.cached(MEASURED, local.validate)
        after = local.validate()
        numbers = torch.tensor([self._sent(received), self._sent(after), after.samples])
        return replace(super().upload(local, trained), extra={MEASURED: numbers})

    def _sent(self, measured: Measured) -> int:
        """Return the metric as the integer that is sent: correct samples, or the loss in units of LOSS_UNIT."""
        if self.metric == "accuracy":
            return measured.correct
        if not math.isfinite(measured.loss):
            return round(MAX_LOSS / LOSS_UNIT)
        return round(min(measured.loss, MAX_LOSS) / LOSS_UNIT)

    # ---- on the server ---------------------------------------------------------------------------------------------

    def expects(self, server: ServerContext) -> UploadSpec:
        """Return the model and the three integers."""
        return replace(super().expects(server), extra={MEASURED: (torch.int64, (3,))})

    def inspect(self, update: Update, server: ServerContext) -> None:  # noqa: ARG002
        """Check that the metrics can be."""
        received, trained, count = update.extra[MEASURED].tolist()
        most = count
        if self.metric == "loss":
            most = round(MAX_LOSS / LOSS_UNIT)
        if count < 1 or not 0 <= received <= most or not 0 <= trained <= most:
            raise PayloadError(f"measured {received} and {trained} on {count} samples, which is no {self.metric}")

    def initial_state(self, weights: Mapping[str, Tensor], server: ServerContext) -> GlobalState:
        """Return the initial state, in which no client has been measured."""
        state = super().initial_state(weights, server)
        zeros = torch.zeros(server.client_count, dtype=torch.float64)
        never = torch.zeros(server.client_count, dtype=torch.int64)
        extra = {SHARES: zeros, TRAINED: zeros.clone(), MEASURED_IN: never, AVERAGED_IN: torch.tensor(0)}
        return replace(state, extra={**state.extra, **extra})

    def aggregate(self, state: GlobalState, updates: Sequence[Update], server: ServerContext) -> GlobalState:
        """Move the shares by the gaps of the last round, then average with them."""
        memory = self.adjusted(state, updates, server)
        if self.step_size:
            shares: list[float] = []
            for update in updates:
                shares.append(float(memory[SHARES][update.client.index]))
            states = [update.weights for update in updates]
            weights = server.aggregation.combine(states, capped_shares(shares, server.largest_share))
        else:
            weights = self.average(updates, server)
        return replace(state, weights=weights, extra={**state.extra, **memory})

    def adjusted(self, state: GlobalState, updates: Sequence[Update], server: ServerContext) -> dict[str, Tensor]:
        """Return the shares after the last round's gaps, and what the next round needs."""
        shares, trained, measured_in = (state.extra[name].clone() for name in (SHARES, TRAINED, MEASURED_IN))
        last = int(state.extra[AVERAGED_IN])
        gaps: dict[int, float] = {}
        for update in updates:
            index = update.client.index
            received, after = self._metrics(update)
            if not measured_in[index]:
                shares[index] = self._start(update, server)
            elif measured_in[index] == last:
                gaps[index] = received - float(trained[index])
            trained[index] = after
            measured_in[index] = server.round
        done = last - 2  # the released code counts its first round as 0 where its formula has t - 1
        if self.centred:
            done = last - 1
        left = 1 - done / server.rounds
        for index, share in self.moved({index: float(shares[index]) for index in gaps}, gaps, left, server).items():
            shares[index] = share
        return {SHARES: shares, TRAINED: trained, MEASURED_IN: measured_in, AVERAGED_IN: torch.tensor(server.round)}

    def _metrics(self, update: Update) -> tuple[float, float]:
        """Return the metric of the received model and that of the trained model."""
        received, trained, count = update.extra[MEASURED].tolist()
        if self.metric == "loss":
            return received * LOSS_UNIT, trained * LOSS_UNIT
        return received / count, trained / count

    def _start(self, update: Update, server: ServerContext) -> float:
        """Return a client's first share."""
        if self.weighting == "uniform":
            return 1 / server.client_count
        return update.samples / sum(client.samples for client in server.clients)

    def moved(
        self, shares: Mapping[int, float], gaps: Mapping[int, float], left: float, server: ServerContext
    ) -> dict[int, float]:
        """Return the shares after one step; their sum stays.

        Args:
            shares: a_k by the client's index.
            gaps: g_k of the same clients.
            left: what is left of the step, in (0, 1 + 1 / R].
            server: gives the number of clients.
        """
        size = self.step_size * left
        if not self.centred:
            size /= server.client_count
        if self.metric == "accuracy":
            size = -size
        centre = 0.0
        if self.centred and gaps:
            centre = sum(gaps.values()) / len(gaps)
        largest = max((abs(gap - centre) for gap in gaps.values()), default=0.0)
        if largest < SMALLEST_GAP:
            return dict(shares)
        after: dict[int, float] = {}
        for index, share in shares.items():
            after[index] = max(share + size * (gaps[index] - centre) / largest, 0.0)
            if not self.centred:
                after[index] = min(after[index], 1.0)
        total = sum(after.values())
        if not total:
            return dict(shares)
        factor = sum(shares.values()) / total
        return {index: share * factor for index, share in after.items()}


def capped_shares(shares: Sequence[float], largest_share: float) -> list[float]:
    """Return the shares, each at most ``largest_share`` of their sum; equal shares if all would be 0.

    Args:
        shares: >= 0, not normalised.
        largest_share: see :func:`~strategies.core.aggregation.cap_shares`.
    """
    limited = cap_shares(shares, largest_share)
    if not sum(limited):
        return [1.0] * len(limited)
    return limited
