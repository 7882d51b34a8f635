"""FedDAP: Domain-Aware Prototype Learning for Federated Learning under Domain Shift.

Huy Q. Le, Loc X. Nguyen, Yu Qiao, Seong Tae Kim, Eui-Nam Huh, Choong Seon Hong. CVPR 2026. arXiv:2604.06795.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from common.config import NonNegative, Positive, Search, checked
from common.losses import PrototypeTerms, prototype_contrast, prototype_losses
from common.numerics import derive
from common.prototypes import PrototypeSet, normalise_rows
from common.storage import GlobalState
from strategies.core.method import (
    Averaging,
    Batch,
    ClientContext,
    Download,
    Losses,
    PrototypeMode,
    ServerContext,
    Update,
)

ROW_DOMAINS = "row_domains"
"""Name of the tensor ``[M]`` int64 that gives the domain of each global prototype, as :func:`domain_number`."""


FUSION_TEMPERATURE = 0.001
"""Temperature of the softmax that fuses the means of a domain's clients, as the released code calls it (default: 0.1).

The most central client decides as soon as sums of cosines differ by 0.005.
"""


@checked
class FedDAP(Averaging):
    """FedAvg plus one global prototype per class *and domain*: alignment within a domain, contrast across domains.

    The server fuses the class means of the clients of one domain into one row, so that a class has a row per domain. A
    device pulls each feature towards the row of its class in its own domain (DPA), and contrasts it with the rows of
    all other domains, where every row of its class is a positive (CPCL). ``alignment=contrast=0`` is FedAvg bit for
    bit.

    The paper itself could not be read. Losses and fusion follow the released code, which cannot run as it was released;
    the weight of DPA follows notes on the paper by other people. docs/methods.md lists the differences.

    Payload: the model's state both ways; up one vector and count per class, down one per class and domain, and the
    domain of each row. Client state: none. A domain with a single client has this client's class means as its rows, and
    every participant receives them.

    Args:
        temperature: tau of CPCL, > 0.
        alignment: weight of DPA, >= 0 (second-hand, from notes on the paper: 10; the released code: 1).
        contrast: weight of CPCL, >= 0.
        prototype_mode: running means over the last local epoch (released code), or a pass of the trained model over
            all local samples (second-hand, the paper's description).
        keep_missing: keep the last row of a class and domain that no participant reported; the code makes all rows
            again in every round.
    """

    capturable: ClassVar[bool] = True

    fedavg_at: ClassVar[Mapping[str, Any] | None] = {"alignment": 0.0, "contrast": 0.0}
    averages: ClassVar[bool] = False

    temperature: Annotated[Positive, Search(0.02, 1.0)] = 0.02
    alignment: Annotated[NonNegative, Search(0.1, 100.0)] = 10.0
    contrast: Annotated[NonNegative, Search(0.01, 10.0)] = 1.0
    prototype_mode: Literal["last_epoch_running", "post_eval"] = "last_epoch_running"
    keep_missing: bool = False

    @property
    def prototypes_from(self) -> PrototypeMode:
        """Return the pass in which prototypes are made, as ``prototype_mode`` names it."""
        return self.prototype_mode

    # ---- on the device ---------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, local: ClientContext) -> Losses:
        """Return cross-entropy + DPA + CPCL; only cross-entropy in round 1, before there are rows."""
        terms = {"cross_entropy": batch.cross_entropy()}
        if not len(local.prototypes):
            return Losses(terms)
        own, contrasted = local.cached("rows", lambda: self._rows(local))
        if self.alignment:
            terms["alignment"] = self.alignment * domain_alignment(batch.features, batch.labels, own)
        if self.contrast:
            contrast = prototype_contrast(batch.features, batch.labels, contrasted, temperature=self.temperature)
            terms["contrast"] = self.contrast * contrast
        return Losses(terms)

    def _rows(self, local: ClientContext) -> tuple[PrototypeSet, PrototypeSet]:
        """Return the rows of the own domain, and those of the others, with which CPCL contrasts as in the code."""
        is_own = local.extra[ROW_DOMAINS] == domain_number(local.client.domain)
        return chosen_rows(local.prototypes, is_own), chosen_rows(local.prototypes, ~is_own)

    # ---- on the server ---------------------------------------------------------------------------------------------

    def initial_state(self, weights: Mapping[str, Tensor], server: ServerContext) -> GlobalState:
        """Return the initial state, without rows."""
        no_domains = torch.zeros(0, dtype=torch.int64)
        return GlobalState(weights, PrototypeSet.empty(server.feature_size), {ROW_DOMAINS: no_domains}, round=0)

    def download(self, state: GlobalState, server: ServerContext) -> Download:  # noqa: ARG002
        """Return the model, the rows and the domain of each row."""
        return Download(state.weights, state.prototypes, state.extra)

    def aggregate(self, state: GlobalState, updates: Sequence[Update], server: ServerContext) -> GlobalState:
        """Average the models, and fuse the class means of each domain."""
        rows: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        if self.keep_missing:
            rows = named_rows(state.prototypes, state.extra[ROW_DOMAINS])
        by_domain: dict[str, list[PrototypeSet]] = {}
        for update in updates:
            by_domain.setdefault(update.client.domain, []).append(update.prototypes)
        for domain, sets in by_domain.items():
            fused = self.fuse(PrototypeSet.concatenate(sets))
            numbers = torch.full((len(fused),), domain_number(domain))
            rows |= named_rows(fused, numbers)
        prototypes, row_domains = ordered_rows(rows, server.feature_size)
        return GlobalState(self.average(updates, server), prototypes, {ROW_DOMAINS: row_domains}, round=state.round)

    def fuse(self, means: PrototypeSet) -> PrototypeSet:
        """Return one row per class of the class means of one domain's clients; its weight is the sum of theirs."""
        vectors: list[Tensor] = []
        weights: list[Tensor] = []
        for label in means.classes:
            members = means.of_class(label).double()
            shares = fusion_shares(members, FUSION_TEMPERATURE)
            vectors.append((shares[:, None] * members).sum(0))
            weights.append(means.weights[means.labels == label].sum())
        if not vectors:
            return PrototypeSet.empty(means.feature_size)
        return PrototypeSet(torch.stack(vectors), torch.tensor(means.classes), torch.stack(weights))


def domain_number(domain: str) -> int:
    """Return the number of a domain in ``row_domains``, in 0 .. 2^63 - 1.

    The number is a hash of the name. Server and devices compute it without a message, and the number stays the same
    when further domains join.
    """
    return derive(0, "domain", domain)


def domain_alignment(features: Tensor, labels: Tensor, rows: PrototypeSet) -> Tensor:
    """Return DPA: ``1 - cos(z_i, P^(y_i, d))`` for the own domain d, mean over the batch.

    A sample whose class has no row adds 0 and still counts. Gradients reach the features only.

    Args:
        features: ``[B, D]``, any floating type.
        labels: ``[B]`` int64.
        rows: at most one row per class, those of the own domain.
    """
    cosines = prototype_losses(features, labels, rows, PrototypeTerms(alignment=1.0)).total
    return torch.isin(labels, rows.labels).to(cosines.dtype).mean() + cosines


def fusion_shares(members: Tensor, temperature: float) -> Tensor:
    """Return the share of each client in the fused row: ``softmax_j(sum_{k != j} cos(p_j, p_k) / temperature)``.

    The released code also adds ``cos(p_j, p_j) = 1``, which the softmax ignores. Without it, the shares of two clients
    are exactly equal.

    Args:
        members: ``[n, D]`` float64, the clients' means of one class, n >= 1.
        temperature: > 0.

    Returns:
        ``[n]`` float64, >= 0, of sum 1.
    """
    units = normalise_rows(members)
    cosines = units @ units.T
    cosines = (cosines + cosines.T) / 2  # a matrix product may round the two halves differently
    sums = cosines.fill_diagonal_(0.0).sum(1)
    return torch.softmax(sums / temperature, 0)


def chosen_rows(prototypes: PrototypeSet, chosen: Tensor) -> PrototypeSet:
    """Return the rows of ``prototypes`` that ``chosen [M]`` bool names."""
    return PrototypeSet(prototypes.vectors[chosen], prototypes.labels[chosen], prototypes.weights[chosen])


def named_rows(prototypes: PrototypeSet, row_domains: Tensor) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    """Return vector and weight of each row by (class, number of the domain)."""
    rows: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for row, (label, domain) in enumerate(zip(prototypes.labels.tolist(), row_domains.tolist(), strict=True)):
        rows[label, domain] = (prototypes.vectors[row], prototypes.weights[row])
    return rows


def ordered_rows(
    rows: Mapping[tuple[int, int], tuple[Tensor, Tensor]], feature_size: int
) -> tuple[PrototypeSet, Tensor]:
    """Return the rows as a set, by class and then by the number of the domain, and the ``[M]`` int64 domains."""
    labels: list[int] = []
    domains: list[int] = []
    vectors = torch.zeros(len(rows), feature_size)
    weights = torch.zeros(len(rows))
    for row, (label, domain) in enumerate(sorted(rows)):
        labels.append(label)
        domains.append(domain)
        vectors[row], weights[row] = rows[label, domain]
    prototypes = PrototypeSet(vectors, torch.tensor(labels, dtype=torch.int64), weights)
    return prototypes, torch.tensor(domains, dtype=torch.int64)
