"""Clients that send clusters of their features, which the server clusters once more (FedPLVM, FedPLCC)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.config import Natural, checked
from common.prototypes import Clustering, PrototypeSet, cluster_prototypes
from common.storage.state import GlobalState
from strategies.core.method import Averaging, Expected, Local, PrototypeMode, Server, Trained, Update, Upload


@checked
class SentClusters(Averaging):
    """Two levels of FINCH, class by class.

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

    def upload(self, local: Local, trained: Trained) -> Upload:  # noqa: ARG002
        """The model, and clusters of each class's features with their sizes (evaluation mode, after training)."""
        features, labels = local.features()
        rows = PrototypeSet(features, labels, torch.ones_like(labels, dtype=torch.float32))
        return Upload(prototypes=cluster_prototypes(rows, level=self.level, clustering=self.clustering))

    def expects(self, server: Server) -> Expected:  # noqa: ARG002
        """Any number of rows up to one per sample."""
        return Expected(prototypes=True, most_rows=None)

    def aggregate_prototypes(self, state: GlobalState, updates: Sequence[Update], server: Server) -> PrototypeSet:  # noqa: ARG002
        """FINCH over the uploaded rows of each class, each cluster the plain mean of its rows."""
        rows = server.aggregation.rows([update.prototypes for update in updates])
        return cluster_prototypes(rows, level=self.level, clustering=self.clustering)
