"""FPL: Rethinking Federated Learning with Domain Shift: A Prototype View.

Wenke Huang, Mang Ye, Zekun Shi, He Li, Bo Du. CVPR 2023. doi:10.1109/CVPR52729.2023.01565.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from common.config import NonNegative, Positive, Search, checked
from common.losses import PrototypeTerms, prototype_losses
from common.prototypes import Clustering, PrototypeSet, cluster_prototypes, unbiased_prototypes
from common.storage import GlobalState
from strategies.core.method import Averaging, Batch, ClientContext, Losses, PrototypeMode, ServerContext, Update


@checked
class FPL(Averaging):
    """FedAvg plus contrast with cluster prototypes (CPCL) and consistency with unbiased ones (UPCR).

    The server clusters each class's local means with FINCH (Eq. 4), so that a dominant domain cannot drown a small
    one. Devices pull features towards all cluster prototypes of their class and away from the others (Eq. 7), and
    towards the mean of the class's clusters (Eq. 8-10). ``contrast=consistency=0`` is FedAvg.

    Payload: the model's state both ways; up one vector per class, down one per cluster. Client state: none.

    Args:
        temperature: tau of Eq. 7, > 0. Any positive value is safe: the loss is computed with log-sum-exp.
        contrast: weight of CPCL, >= 0.
        consistency: weight of UPCR, >= 0. Eq. 10 sums over feature dimensions. As in the released code, which produced
            the published numbers, this is the mean over them; the sum is ``consistency`` times the feature size.
        prototype_mode: running means over the last local epoch (released code), or a pass after training (Algorithm 1).
        clusters: prototypes of CPCL: FINCH clusters, or one global mean per class (Fig. 5).
        target: prototypes of UPCR: the mean of the clusters, or the mean of the clients (Table 3).
        clustering: FINCH by its authors' package, or by ``torch``: for rows on a GPU, or above 10,000 of one class.
    """

    capturable: ClassVar[bool] = True

    fedavg_at: ClassVar[Mapping[str, Any] | None] = {"contrast": 0.0, "consistency": 0.0}

    temperature: Annotated[Positive, Search(0.02, 1.0)] = 0.02
    contrast: Annotated[NonNegative, Search(0.01, 10.0)] = 1.0
    consistency: Annotated[NonNegative, Search(0.01, 10.0)] = 1.0
    prototype_mode: Literal["last_epoch_running", "post_eval"] = "last_epoch_running"
    clusters: Literal["finch", "global"] = "finch"
    target: Literal["unbiased", "global"] = "unbiased"
    clustering: Clustering = "finch-clust"

    @property
    def prototypes_from(self) -> PrototypeMode:
        """Return the pass in which prototypes are made, as ``prototype_mode`` names it."""
        return self.prototype_mode

    def loss(self, batch: Batch, local: ClientContext) -> Losses:
        """Return cross-entropy + CPCL (Eq. 7) + UPCR (Eq. 10); only cross-entropy before there are prototypes."""
        value = batch.cross_entropy()
        if not len(local.prototypes) or not (self.contrast or self.consistency):
            return Losses({"cross_entropy": value})
        rows, targets = local.cached("rows", lambda: self._rows(local.prototypes))
        wanted = PrototypeTerms(
            contrast=self.contrast,
            mse=self.consistency,
            temperature=self.temperature,
        )
        losses = prototype_losses(batch.features, batch.labels, rows, wanted, class_rows=targets)
        terms = {"cross_entropy": value, "contrast": losses.contrast, "consistency": losses.mse}
        return Losses(terms, value + losses.total)

    def _rows(self, clusters: PrototypeSet) -> tuple[PrototypeSet, PrototypeSet]:
        """Return the prototypes that CPCL contrasts with, and those that UPCR pulls towards."""
        means = unbiased_prototypes(clusters, sample_weighted=True)  # clusters weighted by their number of members
        targets = unbiased_prototypes(clusters)
        if self.target == "global":
            targets = means
        if self.clusters == "global":
            return means, targets
        return clusters, targets

    def aggregate_prototypes(
        self,
        state: GlobalState,  # noqa: ARG002
        updates: Sequence[Update],
        server: ServerContext,
    ) -> PrototypeSet:
        """Cluster the local means of each class with FINCH (Eq. 4); a cluster's weight is its number of members."""
        means = server.aggregation.rows([update.prototypes for update in updates])
        one_each = PrototypeSet(means.vectors, means.labels, means.weights.new_ones(len(means)))
        return cluster_prototypes(one_each, clustering=self.clustering)
