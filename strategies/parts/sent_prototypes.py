"""Prototypes that clients send: class means, or clusters of features, and what the server makes of them."""

from collections.abc import Sequence

import torch

from common.config import Natural, checked
from common.prototypes import Clustering, PrototypeSet, cluster_prototypes, normalise_rows
from common.storage.state import GlobalState
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
    """``G^c = sum_k n_k^c m_k^c / sum_k n_k^c`` of the clients' means (FedPall, Eq. 4), or their plain mean.

    Local means are taken as they are, or with ``unit`` at unit length.
    """
    sets = [update.prototypes for update in updates]
    if unit:
        sets = [PrototypeSet(normalise_rows(each.vectors), each.labels, each.weights) for each in sets]
    return server.aggregation.class_means(sets, sample_weighted=sample_weighted)


@checked
class SentClusters(Averaging):
    """Two levels of FINCH, class by class (FedPLVM, FedPLCC): the clients' clusters are clustered once more.

    Args:
        level: FINCH level on both sides; ``None`` is the coarsest with two clusters or more.
        clustering: FINCH by its authors' package, or by ``torch``: for rows on a GPU, or above 10,000 of one class.
    """

    level: Natural | None = None
    clustering: Clustering = "finch-clust"

    @property
    def prototypes_from(self) -> PrototypeMode:
        """The method's own clustering."""
        return "own"

    def upload(self, local: ClientContext, trained: Trained) -> Upload:  # noqa: ARG002
        """The model, and clusters of each class's features with their sizes (evaluation mode, after training)."""
        features, labels = local.features()
        rows = PrototypeSet(features, labels, torch.ones_like(labels, dtype=torch.float32))
        return Upload(prototypes=cluster_prototypes(rows, level=self.level, clustering=self.clustering))

    def expects(self, server: ServerContext) -> UploadSpec:  # noqa: ARG002
        """Any number of rows up to one per sample."""
        return UploadSpec(prototypes=True, max_rows=None)

    def aggregate_prototypes(
        self,
        state: GlobalState,  # noqa: ARG002
        updates: Sequence[Update],
        server: ServerContext,
    ) -> PrototypeSet:
        """FINCH over the uploaded rows of each class, each cluster the plain mean of its rows."""
        rows = server.aggregation.rows([update.prototypes for update in updates])
        return cluster_prototypes(rows, level=self.level, clustering=self.clustering)
