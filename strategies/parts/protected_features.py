"""Features that leave the device mixed with the prototypes of their classes and masked (FedPall, Eq. 8-9)."""

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from common.config import Share, ZeroToOne, checked
from common.errors import PayloadError
from common.prototypes import PrototypeSet, class_means
from strategies.core.method import ClientContext, Method, ServerContext, Shape, Trained, Update, Upload, UploadSpec
from strategies.parts.edits import running_statistics_kept


def feature_pass(local: ClientContext, mode: Literal["train", "eval"]) -> tuple[Tensor, Tensor]:
    """Features and labels of the training split: augmented with batch statistics, or plain in evaluation mode."""
    return local.features(augmented=1, training_mode=True) if mode == "train" else local.features()


@checked
class ProtectedFeatures(Method):
    """Two exchanges: after ``train`` a client sends class means; in ``mix`` its protected features and their labels.

    Args:
        fidelity: ``released`` draws one share of two decimals and one mask with exactly ``mask_share`` ones per client
            and round; ``paper`` a share and an independent Bernoulli mask per sample.
        feature_mode: augmented batches with their own statistics (``train``, released), or plain in evaluation mode.
        protection: what happens to features before they leave: nothing, Gaussian noise N(0, 1), mixture, mask, both.
        mix_low: smallest share of the own feature in a mixture, in [0, 1]; the largest is 1.
        mask_share: beta, share of feature dimensions that are sent, in (0, 1].
    """

    fidelity: Literal["released", "paper"] = "released"
    feature_mode: Literal["train", "eval"] = "train"
    protection: Literal["none", "gaussian", "mix", "mask", "both"] = "both"
    mix_low: ZeroToOne = 0.8
    mask_share: Share = 0.9

    def upload(self, local: ClientContext, trained: Trained) -> Upload:  # noqa: ARG002
        """The client's class means (Eq. 3)."""
        return Upload(prototypes=class_means(*feature_pass(local, self.feature_mode), local.class_count))

    def respond(self, local: ClientContext) -> Upload:
        """Features of the same pass, protected, and their labels."""
        with running_statistics_kept(local.model):  # they moved in the first pass already
            features, labels = feature_pass(local, self.feature_mode)
        protected = self.protect(features, labels, local.prototypes, local.generator("protection"))
        return Upload(weights={}, extra={"features": protected, "labels": labels})

    def protect(self, features: Tensor, labels: Tensor, prototypes: PrototypeSet, draws: torch.Generator) -> Tensor:
        """``mask * (share * z + (1 - share) * G^y)`` (Eq. 8-9), ``[N, D]``; share in [mix_low, 1], mask of 0 and 1."""
        count, size = features.shape
        per_sample = self.fidelity == "paper"
        if self.protection == "gaussian":
            return features + torch.randn(count, size, generator=draws).to(features)
        if self.protection in ("mix", "both"):
            table, _ = prototypes.rows_per_class(1 + max([*prototypes.classes, int(labels.max())]))
            share = self.mix_low + (1 - self.mix_low) * torch.rand(count if per_sample else 1, 1, generator=draws)
            share = (share if per_sample else (100 * share).round() / 100).to(features)
            features = share * features + (1 - share) * table[labels]
        if self.protection in ("mask", "both"):
            if per_sample:
                mask = torch.rand(count, size, generator=draws) < self.mask_share
            else:
                ones = math.floor(self.mask_share * size + 1e-9)  # 0.29 * 100 is 28.999999999999996
                mask = torch.zeros(1, size, dtype=torch.bool)
                mask[0, torch.randperm(size, generator=draws)[:ones]] = True
            features = features * mask.to(features)
        return features

    def expects(self, server: ServerContext) -> UploadSpec:
        """``train``: class means. ``mix``: one feature and label per training sample."""
        if server.exchange == "train":
            return UploadSpec(weights=False, prototypes=True)
        rows: Mapping[str, tuple[torch.dtype, Shape]] = {
            "features": (torch.float32, ("samples", server.feature_size)),
            "labels": (torch.int64, ("samples",)),
        }
        return UploadSpec(weights=False, extra=rows)

    def inspect(self, update: Update, server: ServerContext) -> None:
        """The labels are as many of each class as the client registered."""
        labels = update.extra.get("labels")
        if labels is not None:
            known = labels[(labels >= 0) & (labels < server.class_count)]
            if tuple(torch.bincount(known, minlength=server.class_count).tolist()) != update.client.class_counts:
                raise PayloadError("the features' labels are not those of the classes that the client registered")
