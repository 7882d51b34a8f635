"""FedGCA: Global Consistent Augmentation Based Single-Source Federated Domain Generalization.

Yuan Liu, Shu Wang, Zhe Qu, Xingyu Li, Shichao Kan, Jianxin Wang. ICME 2024. arXiv:2409.14671.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from common.config import NonNegative, Search, checked
from common.models.base import Model, ModelError, pool
from common.numerics import working_dtype
from strategies.core.method import Batch, ClientContext, Losses
from strategies.core.readings import Point
from strategies.feddyn import FedDyn

PROBABILITY_FLOOR = 1e-7
"""Probabilities are kept this far from 0 and 1 inside logarithms: ours, since no code was released."""


@checked
class FedGCA(FedDyn):
    """FedDyn on random-convolution views; their predictions and class activation maps agree with the global model's.

    Every image x has J views (``views=randconv``, which choosing this method switches on). With p_j the softmax
    of view j, p^G_j that of the received model (frozen, in evaluation mode) and ``m`` the mean of all 2 (J + 1) of
    them, CP is the sum over views of the divergence of p_j from m (Eq. 2). CAM is the same for the softmax over
    positions of the true class's activation map. Local loss: cross-entropy over all views ``+ alpha OC + beta (CP +
    CAM)``, where alpha OC are FedDyn's terms; the server is FedDyn's. ``alpha=beta=0, weighting=samples`` is FedAvg on
    the same views.

    The network must end in global average pooling and one linear layer. Maps of one or a few positions have little
    information: ``small`` has 2x2 at 32x32, ``digit_cnn_gap`` 5x5, which is the choice for digits.

    Payload, state and what is scored are FedDyn's.

    Args:
        alpha: weight of FedDyn's terms, >= 0, and FedDyn's alpha (digits 0.1, PACS 10, as the text can be read; the
            other reading is 0.1 for both).
        beta: weight of CP and CAM, >= 0 (digits 0.1, PACS 8; the other reading is 10 for digits).
        form: Eq. 2 as printed has only its first term under the minus sign, the text says Kullback-Leibler. ``bce``,
            the print with the sign over both terms, also rewards confident views, right or wrong: a large beta from
            random weights makes every client predict its commonest class. ``kl``, the text, rewards equal views only.
            Before raising beta (PACS: 8), start from a pretrained network, or use ``kl``.
        predictions: use CP.
        maps: use CAM.
    """

    readings: ClassVar[tuple[Point, ...]] = (
        Point(
            "divergence of Eq. 2",
            "bce",
            setting="form",
            meanings={
                "bce": "the print, its sign over both terms, which also rewards confidence",
                "kl": "the text's Kullback-Leibler divergence",
            },
        ),
        Point(
            "alpha/beta",  # one sentence that reads both ways
            "0.1/0.1 on Digits, 10/8 on PACS (or 0.1/10, 0.1/8)",
            ours="0.1/0.1; the paper's if printed=true",
        ),
        Point(
            "repetitions with the same parameters",
            ours="one view besides the image, drawn once (views=randconv_two, the experiments': two); views.repeats=10 "
            "views.random_repeats=true is the other",
        ),
        Point("initial weights on PACS", ours="random; model.pretrained_file=FILE for ImageNet's, as is probable"),
    )

    capturable: ClassVar[bool] = True

    fedavg_at: ClassVar[Mapping[str, Any] | None] = {"alpha": 0.0, "beta": 0.0, "weighting": "samples"}
    multi_view: ClassVar[bool] = True

    alpha: Annotated[NonNegative, Search(0.001, 1.0)] = 0.1
    beta: Annotated[NonNegative, Search(0.01, 1.0)] = 0.1
    form: Literal["bce", "kl"] = "bce"
    predictions: bool = True
    maps: bool = True

    @property
    def _uses_maps(self) -> bool:
        return self.maps and self.beta > 0

    def extend(self, model: nn.Module, client_count: int, seed: int) -> nn.Module:  # noqa: ARG002
        """Return the model unchanged, after checking that it has class activation maps if the loss uses them.

        Raises:
            ModelError: the network does not end in global average pooling and one linear layer.
        """
        assert isinstance(model, Model)
        if self._uses_maps and not model.supports_cam:
            raise ModelError(
                f"fedgca compares class activation maps, which {type(model.backbone).__name__} + "
                f"{type(model.head).__name__} does not have: it must end in global average pooling and one linear "
                "layer; choose model=digit_cnn_gap, small, resnet10 or resnet18, or switch the maps off: "
                "method.maps=false"
            )
        return model

    def compute(
        self, model: nn.Module, images: Tensor, local: ClientContext
    ) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        """Return features, logits and, for the loss, the maps the features are pooled from: one forward pass in all."""
        if not self._uses_maps:
            return super().compute(model, images, local)
        assert isinstance(model, Model)
        maps = model.feature_maps(images)
        features = pool(maps)
        return features, model.classify(features), {"maps": maps}

    def loss(self, batch: Batch, local: ClientContext) -> Losses:
        """Return cross-entropy over all views, CP and CAM; FedDyn's terms are gradients (:meth:`edit_gradients`)."""
        terms = {"cross_entropy": batch.cross_entropy()}
        if not self.beta or not (self.predictions or self.maps):
            return Losses(terms)
        received = local.frozen("received")
        with torch.no_grad():
            _, logits, extra = self.compute(received, batch.images, local)
        if self.predictions:
            distributions = batch.logits.softmax(1), logits.softmax(1)
            terms["predictions"] = self.beta * self._consistency(*distributions, batch.views, self.form)
        if self.maps:
            own = attention(local.model, batch.extra["maps"], batch.labels)
            terms["maps"] = self.beta * self._consistency(
                own, attention(received, extra["maps"], batch.labels), batch.views, "kl"
            )
        return Losses(terms)

    def _consistency(self, own: Tensor, others: Tensor, views: int, form: Literal["bce", "kl"]) -> Tensor:
        """:func:`multi_view_consistency` of distributions ``[V*B, N]``, view-major."""
        own, others = own.unflatten(0, (views, -1)), others.unflatten(0, (views, -1))
        return multi_view_consistency(own, others, form)


def attention(model: nn.Module, maps: Tensor, labels: Tensor) -> Tensor:
    """Return ``[B, U*V]``: softmax over positions of each image's class activation map for its label."""
    assert isinstance(model, Model)
    return model.class_activation_maps(maps, labels).flatten(1).softmax(1)


# ---- its loss --------------------------------------------------------------------------------------------------------


def multi_view_consistency(local: Tensor, global_: Tensor, form: Literal["bce", "kl"] = "bce") -> Tensor:
    """Return FedGCA Eq. 2: every view's distribution held to the mean over the views of both models.

    The result is the sum over views, averaged over the batch. The mean is a constant target; the paper does not define
    this. The loss uses the function twice: over classes (CP) and, with ``form="kl"``, over the pixels of class
    activation maps (CAM).

    Args:
        local: ``[V, B, K]`` probabilities of the model in training, one slice per view.
        global_: ``[V', B, K]`` probabilities of the frozen global model; a constant.
        form: ``bce`` as printed, ``-sum_c p log m + (1 - p) log(1 - m)``, which alone drives views to one-hot; ``kl``
            as the text says, ``KL(p || m)``.
    """
    if form not in ("bce", "kl"):
        raise ValueError(f"form must be bce or kl; got {form!r}")
    if local.ndim != 3 or local.shape[1:] != global_.shape[1:]:
        raise ValueError(f"views must be [V, B, K]; got {tuple(local.shape)} and {tuple(global_.shape)}")
    local = local.to(working_dtype(local))
    mean = (local.sum(0) + global_.detach().to(local.dtype).sum(0)) / (len(local) + len(global_))
    mean = mean.clamp(PROBABILITY_FLOOR, 1.0 - PROBABILITY_FLOOR).detach()
    if form == "bce":
        values = -(local * mean.log() + (1.0 - local) * (-mean).log1p())
    else:
        values = local * (local.clamp_min(PROBABILITY_FLOOR).log() - mean.log())
    return values.sum((0, 2)).mean()
