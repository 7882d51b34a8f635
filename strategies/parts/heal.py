"""FedHEAL's two halves, which stand on any method that averages models (Chen et al., CVPR 2024, arXiv:2405.16585).

On the device, an element of the model is sent only if its update has kept its sign over the rounds. On the server, a
client's share of the average grows with the distance that its updates move the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from common.config import Search, ZeroToOne, checked
from common.storage import GlobalState
from strategies.core.aggregation import Mean, cap_shares
from strategies.core.method import (
    Averaging,
    ClientContext,
    ServerContext,
    Trained,
    Update,
    Upload,
    UploadSpec,
    Weighting,
)
from strategies.core.readings import Point

MASK = "/mask"
"""Suffix of a mask's name in an upload, after its tensor's name."""

FALLS = "falls/"
"""Prefix of the names of a client's counts: the rounds in which an element fell or stayed."""

ROUNDS = "rounds"
"""The client's count of its own rounds."""

MOVEMENT, GAIN, LEAD = "movement", "gain", "lead"
"""The server's three numbers per client: how far it moved last, its smoothed share of all movement, and their sum."""


@checked
class Heal(Averaging):
    """A method that averages models, with FedHEAL's mask on the device and its shares on the server.

    Client k in its round t (from 0), element by element: ``s = 1[w^t - w_k >= 0]``; with H the share of earlier rounds
    in which s was 1, the update is sent where ``H`` (if s = 1) or ``1 - H`` (if s = 0) exceeds ``threshold``; in round
    0 everywhere. The server computes ``r_k``, the sum over the parameter tensors of the L2 norm of what client k sent,
    ``g_k <- (1 - momentum) g_k + momentum r_k / sum_j r_j`` over all clients seen so far, and ``p_k <- p_k + g_k``.
    Client k counts for ``p_k / sum_S p``, in each element among those who sent it; an element that no client sent
    stays. Integers are not masked.

    ``p_k`` starts at ``1 / |S|``, or with ``weighting=samples`` at ``N_k / sum_S N``. With ``threshold=-1 momentum=0``
    the average is that of :class:`Averaging` bit for bit. A share is at most ``rounds.largest_share``.

    Args:
        threshold: share of earlier rounds, in [-1, 1), that an update's sign must exceed (the code's 0.3). -1 sends
            all; 0 drops an element whose sign has not been seen before.
        momentum: beta of the shares, in [0, 1] (the code's 0.4); 0 keeps the shares of the start.
        mask: whether updates are masked; without, nothing is kept on the device.
        weighting: the shares at the start: ``uniform`` (the code), or by ``samples``.
    """

    readings: ClassVar[tuple[Point, ...]] = (
        Point("threshold", released=0.3, setting="threshold"),
        Point("momentum", released=0.4, setting="momentum"),
        Point("shares at the start", released="uniform", setting="weighting"),
        Point("rounds that are counted", released="the run's", ours="the client's own; equal if all take part"),
        Point("an update of exactly 0", released="counts as a fall", ours="released"),
        Point("integer counters", released="masked", ours="the lower median of the clients'"),
    )

    averages: ClassVar[bool] = False

    threshold: Annotated[float, Field(ge=-1, lt=1), Search(0.05, 0.5, log=False)] = 0.3
    momentum: Annotated[ZeroToOne, Search(0.1, 1.0, log=False)] = 0.4
    mask: bool = True
    weighting: Weighting = "uniform"

    @property
    def keeps_step(self) -> bool:
        """Return the base method's answer: the mask's counts may differ from what the server counted."""
        return bool(super().keeps_step)

    @torch.no_grad()
    def upload(self, local: ClientContext, trained: Trained) -> Upload:
        """Return the model where the mask is set, the received model elsewhere, and the mask; keep the counts."""
        upload = super().upload(local, trained)
        if not self.mask:
            return upload
        rounds = int(local.kept.get(ROUNDS, torch.tensor(0)))
        state = local.model.state_dict()
        weights: dict[str, Tensor] = {}
        masks: dict[str, Tensor] = {}
        kept = {ROUNDS: torch.tensor(rounds + 1)}
        for name, received in local.weights.items():
            weights[name] = state[name].contiguous()
            if not received.is_floating_point():
                continue
            falls = weights[name] <= received
            before = local.kept.get(FALLS + name, torch.zeros_like(falls, dtype=torch.int32))
            sent = consistent(falls, before, rounds, self.threshold)
            weights[name] = torch.where(sent, weights[name], received).contiguous()
            masks[name + MASK] = packed(sent)
            kept[FALLS + name] = (before + falls).contiguous()
        return replace(upload, weights=weights, extra={**upload.extra, **masks}, local={**upload.local, **kept})

    def expects(self, server: ServerContext) -> UploadSpec:
        """Return what the base method expects, and a mask for each floating-point tensor of the model."""
        spec = super().expects(server)
        if not self.mask:
            return spec
        extra = dict(spec.extra)
        for name, tensor in server.shared.items():
            if tensor.is_floating_point():
                extra[name + MASK] = (torch.uint8, (math.ceil(tensor.numel() / 8),))
        return replace(spec, extra=extra)

    def initial_state(self, weights: Mapping[str, Tensor], server: ServerContext) -> GlobalState:
        """Return the state of the base method, and zeros for each client's three numbers."""
        state = super().initial_state(weights, server)
        zeros = {name: torch.zeros(server.client_count, dtype=torch.float64) for name in (MOVEMENT, GAIN, LEAD)}
        return replace(state, extra={**state.extra, **zeros})

    def aggregate(self, state: GlobalState, updates: Sequence[Update], server: ServerContext) -> GlobalState:
        """Return the average by earned shares, element by element among the clients that sent it."""
        shares, memory = self.earned_shares(state, updates, server)
        return GlobalState(
            masked_average(updates, shares, state.weights, server.aggregation),
            self.aggregate_prototypes(state, updates, server),
            {**state.extra, **memory},
            round=state.round,
        )

    def earned_shares(
        self, state: GlobalState, updates: Sequence[Update], server: ServerContext
    ) -> tuple[list[float], dict[str, Tensor]]:
        """Return what each update counts for, > 0 and not normalised, and the three numbers per client, ``[C]`` each.

        The numbers of clients without an update stay as they are.
        """
        movement, gain, lead = (state.extra[name].clone() for name in (MOVEMENT, GAIN, LEAD))
        for update in updates:
            movement[update.client.index] = masked_distance(update, state.weights, server.parameters)
        total = float(movement.sum())
        starts: list[float] = []
        for update in updates:
            index = update.client.index
            gain[index] *= 1 - self.momentum
            if total > 0:
                gain[index] += self.momentum * movement[index] / total
            lead[index] += gain[index]
            starts.append(update.samples if self.weighting == "samples" else 1)
        # p_k times the sum of the starts: without a lead it is the start itself, to the bit
        shares: list[float] = []
        for update, start in zip(updates, starts, strict=True):
            shares.append(start + sum(starts) * float(lead[update.client.index]))
        return cap_shares(shares, server.largest_share), {MOVEMENT: movement, GAIN: gain, LEAD: lead}


def consistent(falls: Tensor, before: Tensor, rounds: int, threshold: float) -> Tensor:
    """Return where an update has the sign that it had in more than ``threshold`` of the earlier rounds.

    Args:
        falls: bool, whether each element fell or stayed in this round.
        before: int32 of the same shape, in how many earlier rounds it did.
        rounds: earlier rounds, >= 0; without any, the update counts everywhere.
        threshold: see :class:`Heal`.
    """
    if rounds == 0:
        return torch.ones_like(falls)
    same = torch.where(falls, before, rounds - before)
    return same > threshold * rounds


def packed(mask: Tensor) -> Tensor:
    """Return a bool tensor of n elements as bits: ``[ceil(n / 8)]`` uint8, on the CPU."""
    return torch.from_numpy(np.packbits(mask.flatten().cpu().numpy()))


def unpacked(bits: Tensor, shape: torch.Size) -> Tensor:
    """Return the bool tensor of ``shape`` that :func:`packed` made ``bits`` of."""
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=shape.numel())).view(shape).bool()


def masked_distance(update: Update, weights: Mapping[str, Tensor], parameters: frozenset[str]) -> float:
    """Return the sum over parameter tensors of the L2 norm of the masked difference from ``weights``."""
    total = 0.0
    for name in sorted(parameters):
        change = update.weights[name].double() - weights[name].double()
        if name + MASK in update.extra:
            change *= unpacked(update.extra[name + MASK], change.shape)
        total += float(torch.linalg.vector_norm(change))
    return total


def masked_average(
    updates: Sequence[Update], shares: Sequence[float], before: Mapping[str, Tensor], aggregation: Mean
) -> dict[str, Tensor]:
    """Return ``sum_k a_k m_k w_k / sum_k a_k m_k`` over named tensors, in float64, element by element.

    Where every mask is set the result is that of ``aggregation.combine``, bit for bit; where none is, ``before``.

    Args:
        updates: models, and masks of the tensors that are masked.
        shares: a_k > 0, one per update.
        before: the state that the clients were sent.
        aggregation: combines the tensors without a mask.
    """
    weights = aggregation.combine([update.weights for update in updates], shares)
    for name, average in weights.items():
        if name + MASK not in updates[0].extra:
            continue
        everyone = torch.ones_like(average, dtype=torch.bool)
        total = torch.zeros_like(average, dtype=torch.float64)
        mass = torch.zeros_like(total)
        for update, share in zip(updates, shares, strict=True):
            sent = unpacked(update.extra[name + MASK], average.shape)
            everyone &= sent
            part = share * sent.double()
            mass += part
            total += part * update.weights[name].double()
        among_senders = torch.where(mass > 0, total / mass, before[name].double()).to(average.dtype)
        weights[name] = torch.where(everyone, average, among_senders)
    return weights
