"""Prototypes that clients send, class means or clusters of features, and how the server combines them."""

from collections.abc import Sequence

import torch

from common.config import checked
from common.numerics import NORM_FLOOR
from common.prototypes import Clustering, PrototypeSet, cluster_prototypes, normalise_rows
from common.storage import GlobalState
from strategies.core.method import (
    Averaging,
    ClientContext,
    PrototypeMode,
    ServerContext,
    Trained,
    Update,
    Upload,
    UploadSpec,
)


def class_means_of(
    updates: Sequence[Update], server: ServerContext, *, unit: bool = False, sample_weighted: bool = True
) -> PrototypeSet:
    """Return ``G^c = sum_k n_k^c m_k^c / sum_k n_k^c`` of the clients' means (FedPall, Eq. 4), or their plain mean.

    Args:
        updates: the updates, by client id.
        server: gives the aggregation rule.
        unit: whether local means are normalised to unit length first.
        sample_weighted: whether means are weighted by samples n_k^c; otherwise all count the same.
    """
    sets: list[PrototypeSet] = []
    for update in updates:
        prototypes = update.prototypes
        if unit:
            vectors = normalise_rows(prototypes.vectors)
            prototypes = PrototypeSet(vectors, prototypes.labels, prototypes.weights)
        sets.append(prototypes)
    return server.aggregation.class_means(sets, sample_weighted=sample_weighted)


@checked
class SentClusters(Averaging):
    """Two levels of FINCH, class by class (FedPLVM, FedPLCC): the clients' clusters are clustered once more.

    Args:
        clustering: FINCH by its authors' package, or by ``torch``: for rows on a GPU, or above 10,000 of one class.
    """

    clustering: Clustering = "finch-clust"

    @property
    def prototypes_from(self) -> PrototypeMode:
        """Return ``own``: the method clusters features itself."""
        return "own"

    def upload(self, local: ClientContext, trained: Trained) -> Upload:  # noqa: ARG002
        """Return the model, and clusters of each class's features with their sizes (evaluation mode)."""
        features, labels = local.features()
        rows = PrototypeSet(features, labels, torch.ones_like(labels, dtype=torch.float32))
        return Upload(prototypes=cluster_prototypes(rows, clustering=self.clustering))

    def expects(self, server: ServerContext) -> UploadSpec:  # noqa: ARG002
        """Expect any number of rows up to one per sample."""
        return UploadSpec(prototypes=True, max_rows=None)

    def aggregate_prototypes(
        self,
        state: GlobalState,  # noqa: ARG002
        updates: Sequence[Update],
        server: ServerContext,
    ) -> PrototypeSet:
        """Cluster the uploaded rows of each class with FINCH; return the plain mean of each cluster's rows."""
        rows = server.aggregation.rows([update.prototypes for update in updates])
        return cluster_prototypes(rows, clustering=self.clustering)


def normalise_weights(prototypes: PrototypeSet) -> PrototypeSet:
    """Weights divided by their class's total, so that each class has total mass 1 (FedPLCC). Zero totals stay zero."""
    if not len(prototypes):
        return prototypes
    class_count = int(prototypes.labels[-1]) + 1
    totals = torch.zeros(class_count, dtype=torch.float64, device=prototypes.weights.device)
    totals.index_add_(0, prototypes.labels, prototypes.weights.double())
    shares = prototypes.weights.double() / totals[prototypes.labels].clamp_min(NORM_FLOOR)
    return PrototypeSet(prototypes.vectors, prototypes.labels, shares.float())


def carry_over(current: PrototypeSet, previous: PrototypeSet) -> PrototypeSet:
    """Return ``current`` plus the rows of ``previous`` for classes that it lacks (official FedProc)."""
    missing = sorted(set(previous.classes) - set(current.classes))
    if not missing:
        return current
    keep = torch.isin(previous.labels, torch.tensor(missing, device=previous.labels.device))
    kept = PrototypeSet(previous.vectors[keep], previous.labels[keep], previous.weights[keep])
    return PrototypeSet.concatenate([current, kept])
