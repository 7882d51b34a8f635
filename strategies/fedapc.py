"""FedAPC: Robust Federated Learning on Edge Devices with Domain Heterogeneity.

Huy Q. Le, Latif U. Khan, Choong Seon Hong. 2025. arXiv:2505.10128. The method's name is Federated Augmented Prototype
Contrastive Learning.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from torch import Tensor, nn

from common.config import Natural, NonNegative, Positive, Search, checked
from common.losses import prototype_contrast
from common.models.base import Model
from common.prototypes import PrototypeSet, class_means
from common.settings import RunSettings
from common.storage import GlobalState
from common.text import warn_once
from strategies.core.method import (
    Averaging,
    Batch,
    ClientContext,
    Losses,
    PrototypeMode,
    ServerContext,
    Trained,
    Update,
    Upload,
    Weighting,
)
from strategies.core.readings import Point
from strategies.parts.sent_prototypes import class_means_of

NO_VIEWS = (
    "nothing of data.augmentation is drawn at random, so that all views of an image are the image itself; the paper's "
    "are data.augmentation.crop_padding=4 data.augmentation.flip=true data.augmentation.erasing=0.5"
)
"""What a run without augmentation does."""


@checked
class FedAPC(Averaging):
    """FedAvg plus contrast with global prototypes made of augmented views; ``contrast=0`` is FedAvg.

    A device sends class means over augmented views of its samples; the server averages them over the clients that hold
    the class. (Eq. 4 prints a sum over clients, the text says average: cosine ignores the difference.) Which views,
    their number and tau are not in the paper: views come from the data set's own augmentation (the paper's: crop with 4
    pixels, flip, random erasing with probability 0.5: ``data.augmentation.erasing=0.5``), twice.

    Payload: the model's state, and one vector and count per class, both ways. Client state: none.

    Args:
        temperature: tau > 0.
        contrast: weight of the prototype contrast, >= 0.
        reading: of "multi-view". ``prototypes``: training as the data say, prototypes from ``prototype_views`` views in
            a pass in evaluation mode after it. ``raw_training``: the same, but training on the images as they are.
            ``views``: every training step uses 1 + J views (``views=augmented``) and classifies and contrasts their
            mean feature; prototypes are running means of these mean features over the last epoch.
        prototype_views: augmented views per sample in a prototype; 0 takes the images as they are (ablation, Table II).
            ``views`` does without.
        prototype_weighting: global prototype = plain mean over holders, or weighted by their samples.
    """

    readings: ClassVar[tuple[Point, ...]] = (
        Point(
            "clients' class means",
            "summed (Eq. 4) or averaged (text)",
            ours="paper",  # the only use is a cosine, which ignores the length
        ),
        Point(
            "where the views come in",
            setting="reading",
            meanings={
                "prototypes": "prototypes from augmented views, training as the data say",
                "raw_training": "the same, training on the images as they are",
                "views": "with views=augmented, every step classifies and contrasts the mean feature of several views",
            },
        ),
        Point("number of views", setting="prototype_views"),
        Point("tau", setting="temperature"),
    )

    capturable: ClassVar[bool] = True

    fedavg_at: ClassVar[Mapping[str, Any] | None] = {"contrast": 0.0}

    temperature: Annotated[Positive, Search(0.05, 1.0)] = 0.07
    contrast: Annotated[NonNegative, Search(0.01, 10.0)] = 1.0
    reading: Literal["prototypes", "raw_training", "views"] = "prototypes"
    prototype_views: Natural = 2
    prototype_weighting: Weighting = "uniform"

    def check(self, settings: RunSettings) -> None:
        """Warn where every augmented view of an image is the image itself, which the run computes nevertheless."""
        super().check(settings)
        if settings.data.augmentation.random:
            return
        if self.multi_view and settings.views.before_augmentation:
            warn_once("method=fedapc method.reading=views: " + NO_VIEWS)
        elif self.prototype_views and not self.multi_view:
            warn_once(f"method=fedapc: {NO_VIEWS}; method.prototype_views=0 gives the same prototypes in less time")

    @property
    def prototypes_from(self) -> PrototypeMode:
        """Return the pass that makes prototypes: the method's own over augmented views, or training itself."""
        if self.multi_view:
            return "last_epoch_running"
        return "own"

    @property
    def multi_view(self) -> bool:
        """Return whether training classifies the mean feature of several views (``reading=views``)."""
        return self.reading == "views"

    @property
    def augments(self) -> bool:
        """Return whether training batches are augmented: not with ``reading=raw_training``."""
        return self.reading != "raw_training"

    def compute(
        self, model: nn.Module, images: Tensor, local: ClientContext
    ) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        """Run a forward pass; in training with ``reading=views`` each row is the sample's mean feature."""
        if not (self.multi_view and model.training):
            return super().compute(model, images, local)
        assert isinstance(model, Model)
        means = model.features(images).unflatten(0, (local.views, -1)).mean(0)
        return means.repeat(local.views, 1), model.classify(means).repeat(local.views, 1), {}

    def loss(self, batch: Batch, local: ClientContext) -> Losses:
        """Return cross-entropy + contrast; only cross-entropy before there are prototypes."""
        terms = {"cross_entropy": batch.cross_entropy()}
        if self.contrast and len(local.prototypes):
            contrast = prototype_contrast(batch.features, batch.labels, local.prototypes, temperature=self.temperature)
            terms["contrast"] = self.contrast * contrast
        return Losses(terms)

    def upload(self, local: ClientContext, trained: Trained) -> Upload:
        """Return the model and the class means over augmented views."""
        if self.multi_view:
            return Upload(prototypes=trained.prototypes)
        features, labels = local.features(augmented=self.prototype_views)
        return Upload(prototypes=class_means(features, labels, local.class_count))

    def aggregate_prototypes(
        self,
        state: GlobalState,  # noqa: ARG002
        updates: Sequence[Update],
        server: ServerContext,
    ) -> PrototypeSet:
        """Return the mean of the clients' class means, class by class."""
        return class_means_of(updates, server, sample_weighted=self.prototype_weighting == "samples")
