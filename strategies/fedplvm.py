"""FedPLVM: Taming Cross-Domain Representation Variance in Federated Prototype Learning with Heterogeneous Data Domains.

Lei Wang, Jieming Bian, Letian Zhang, Chen Chen, Jie Xu. NeurIPS 2024. arXiv:2403.09048.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from common.config import NonNegative, Positive, Search, Share, checked
from common.losses import PrototypeTerms, prototype_losses
from common.prototypes import unbiased_prototypes
from strategies.core.method import Batch, ClientContext, Losses, Weighting
from strategies.core.readings import Point
from strategies.parts.sent_prototypes import SentClusters


@checked
class FedPLVM(SentClusters):
    """Two levels of prototype clustering and a contrast of sparse cosines; ``contrast=correction=0`` is FedAvg.

    A device clusters its features of each class with FINCH and sends the cluster means; the server clusters those of
    all devices once more. The loss adds the contrast of ``cos^alpha`` with all cluster rows and the correction ``2 (cos
    - 1)^2`` to the mean of the class's rows. ``contrast=correction=0 weighting=samples`` is FedAvg bit for bit.

    Correction and initialisation follow the released code, since the paper's own formula for the correction could not
    be had; but all clients start from the same model (the code starts each from a different one).

    Payload: the model's state and a few rows per class (vector, label, members) both ways; up to half as many rows as
    samples where a class has no structure. Client state: none.

    Args:
        temperature: tau > 0.
        alpha: exponent of the cosine in the contrast, in (0, 1].
        contrast: the released code's lambda before the contrast, >= 0 (its default: 100).
        correction: its lambda before the correction, >= 0 (the same 100 there).
        weighting: models are averaged ``uniform``-ly (the released code, where clients hold the same classes), or by
            ``samples`` (the code, where they do not).
    """

    readings: ClassVar[tuple[Point, ...]] = (
        Point("correction", released="2 (cos - 1)^2 to the mean of the class's rows, without alpha", ours="released"),
        Point("initial models", released="a different one on each client", ours="one for all clients"),
        Point("short last batch", released="dropped, in training and before clustering", ours="kept"),
        Point(
            "average of models",
            released="uniform where clients hold the same classes, else by samples",
            ours="uniform; weighting=samples",
        ),
        Point("alpha", released=0.25, setting="alpha"),
        Point("tau", released=0.07, setting="temperature"),
    )

    capturable: ClassVar[bool] = True

    fedavg_at: ClassVar[Mapping[str, Any] | None] = {"contrast": 0.0, "correction": 0.0, "weighting": "samples"}

    temperature: Positive = 0.07
    alpha: Annotated[Share, Search(0.1, 1.0, log=False)] = 0.25
    contrast: Annotated[NonNegative, Search(0.01, 100.0)] = 100.0
    correction: Annotated[NonNegative, Search(0.01, 100.0)] = 100.0
    weighting: Weighting = "uniform"

    def loss(self, batch: Batch, local: ClientContext) -> Losses:
        """Return cross-entropy + contrast + correction; only cross-entropy before there are prototypes."""
        value = batch.cross_entropy()
        if not len(local.prototypes) or not (self.contrast or self.correction):
            return Losses({"cross_entropy": value})
        wanted = PrototypeTerms(
            contrast=self.contrast,
            cosine_square=self.correction,
            temperature=self.temperature,
            alpha=self.alpha,
        )
        means = local.cached("means", lambda: unbiased_prototypes(local.prototypes))
        losses = prototype_losses(batch.features, batch.labels, local.prototypes, wanted, class_rows=means)
        terms = {"cross_entropy": value, "contrast": losses.contrast, "correction": losses.cosine_square}
        return Losses(terms, value + losses.total)
