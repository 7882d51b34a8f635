"""FedPLCC: An Enhanced Federated Prototype Learning Method under Domain Shift.

Liang Kuang, Kuangpu Guo, Jian Liang, Jianguo Zhang. 2024. arXiv:2409.18578. The method's name is Federated Prototype
Learning with Convergent Clusters.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from common.config import NonNegative, Positive, Search, Share, checked
from common.losses import PrototypeTerms, prototype_losses
from common.prototypes import PrototypeSet, cluster_prototypes
from common.storage import GlobalState
from strategies.core.method import Batch, ClientContext, Losses, ServerContext, Update
from strategies.core.readings import Point
from strategies.parts.sent_prototypes import SentClusters, normalise_weights


@checked
class FedPLCC(SentClusters):
    """Two levels of clustering with counted members: rows count by their share; ``contrast=correction=0`` is FedAvg.

    A device clusters its features of each class with FINCH and sends means and cluster sizes; the server clusters those
    with FINCH*, which adds the members up, and normalises the weights of each class to 1. The loss adds the contrast of
    ``cos^alpha`` with all rows, weighted, and the correction: minus the sum of the weighted ``cos^alpha`` to the
    share ``fraction`` of the class's rows in which it is largest.

    Payload: the model's state and a few rows per class (vector, label, weight) both ways. Client state: none.

    Args:
        temperature: tau > 0 (the experiments: 0.07; the ablation's text names 0.55 and means 0.055).
        alpha: exponent of the cosine, in (0, 1] (the paper's own 0.5; FedPLVM's 0.25).
        contrast: lambda_1 >= 0 (Digit-5: 100, Office-10: 20, DomainNet: 1).
        correction: lambda_2 >= 0 (ten times lambda_1).
        fraction: phi, share of the class's rows in the correction, in (0, 1].
        weighted: rows count by their share; ``False`` is Table V's "w=1".
    """

    readings: ClassVar[tuple[Point, ...]] = (
        Point("power of a cosine at and below zero", ours="it is clamped at 1e-4 before"),
        Point("tau", 0.07, setting="temperature"),  # the ablation's text names 0.55 and means 0.055
        Point("alpha", 0.5, setting="alpha"),
        Point("prototypes of the server's clusters", ours="the plain mean of the members; weights add up"),
        Point(
            "E = 10",
            "ten local epochs (Table I) or iterations (text)",
            ours="train.epochs=1; 10 in the experiments",
        ),
        Point(
            "lambda_1/lambda_2",
            "100/1000 on Digit-5, 20/200 on Office-10, 1/10 on DomainNet",
            ours="100/1000; the paper's if printed=true",
        ),
    )

    capturable: ClassVar[bool] = True

    fedavg_at: ClassVar[Mapping[str, Any] | None] = {"contrast": 0.0, "correction": 0.0}

    temperature: Positive = 0.07
    alpha: Annotated[Share, Search(0.1, 1.0, log=False)] = 0.5
    contrast: Annotated[NonNegative, Search(0.01, 100.0)] = 100.0
    correction: Annotated[NonNegative, Search(0.1, 1000.0)] = 1000.0
    fraction: Share = 0.5
    weighted: bool = True

    def loss(self, batch: Batch, local: ClientContext) -> Losses:
        """Return cross-entropy + weighted contrast + correction; only cross-entropy before there are prototypes.

        Eq. 5 prints the cross-entropy as a sum over the data. With lambda_1 of 1 to 100 next to it only the mean makes
        sense, which is taken.
        """
        value = batch.cross_entropy()
        if not len(local.prototypes) or not (self.contrast or self.correction):
            return Losses({"cross_entropy": value})
        wanted = PrototypeTerms(
            contrast=self.contrast,
            alignment=self.correction,
            temperature=self.temperature,
            alpha=self.alpha,
            fraction=self.fraction,
            weighted=self.weighted,
        )
        losses = prototype_losses(batch.features, batch.labels, local.prototypes, wanted)
        terms = {"cross_entropy": value, "contrast": losses.contrast, "correction": losses.alignment}
        return Losses(terms, value + losses.total)

    def aggregate_prototypes(
        self,
        state: GlobalState,  # noqa: ARG002
        updates: Sequence[Update],
        server: ServerContext,
    ) -> PrototypeSet:
        """Cluster the uploaded rows of each class with FINCH*; weights then sum to 1 per class."""
        rows = server.aggregation.rows([update.prototypes for update in updates])
        return normalise_weights(cluster_prototypes(rows, clustering=self.clustering))
