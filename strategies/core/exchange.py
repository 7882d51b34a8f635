"""What a method receives and returns: batches, losses, downloads, uploads, updates. All are plain data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from common.losses import cross_entropy
from common.prototypes import PrototypeSet
from common.storage import Bundle, check_contents

PrototypeMode = Literal["none", "last_epoch_running", "post_eval", "own"]
"""How local prototypes are made: not at all; as class means over the last local epoch (training mode, before each
step); as class means of a separate pass in evaluation mode after training; or by the method's own ``upload``."""


Shape = tuple[int | Literal["samples"] | None, ...]
"""Expected lengths of a tensor's dimensions; see :class:`UploadSpec`."""


@dataclass(frozen=True)
class Client:
    """A client as it registered with the server.

    Args:
        id: ``domain-index``, unique in the federation.
        domain: the domain of its data.
        samples: training samples N_k.
        class_counts: training samples per class, ``K`` numbers.
        index: position among the federation's clients, by id; 0 .. C-1.
        client_count: number of clients C in the federation.
    """

    id: str
    domain: str
    samples: int
    class_counts: tuple[int, ...]
    index: int = 0
    client_count: int = 1


@dataclass
class Batch:
    """One batch after the forward pass.

    With V views per sample, rows are view-major: row ``v * B + i`` is view ``v`` of sample ``i``; labels are repeated.

    Args:
        images: ``[V*B, 3, H, W]`` float, augmented and normalised.
        labels: ``[V*B]`` int64.
        features: ``[V*B, D]``, the classifier's input.
        logits: ``[V*B, K]``.
        views: V >= 1.
        extra: further results of :meth:`Method.compute` by name, one row per image.
        label_smoothing: ``train.label_smoothing``.
        class_weights: ``[K]``, from ``train.class_weights``; ``None`` weights all samples the same.
    """

    images: Tensor
    labels: Tensor
    features: Tensor
    logits: Tensor
    views: int = 1
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    label_smoothing: float = 0.0
    class_weights: Tensor | None = None

    def cross_entropy(self, smoothing: float | None = None) -> Tensor:
        """Return the cross-entropy of all rows, with label smoothing and class weights as the settings have them.

        Args:
            smoothing: label smoothing of the method's own, in [0, 1); ``None`` takes the settings'.
        """
        if smoothing is None:
            smoothing = self.label_smoothing
        return cross_entropy(self.logits, self.labels, smoothing, self.class_weights)


class Measured(NamedTuple):
    """How the model does on a client's own samples.

    Args:
        samples: their number, >= 1.
        correct: of them, those that the model assigns to their class.
        loss: mean cross-entropy; not finite if the model has diverged.
    """

    samples: int
    correct: int
    loss: float


@dataclass
class Losses:
    """A batch's loss terms by name, each already multiplied by its weight; training differentiates ``total``.

    If one operator computed several terms at once, the terms are detached and ``fused`` is their sum.
    """

    terms: dict[str, Tensor]
    fused: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """The sum of the terms, in their order."""
        if self.fused is not None:
            return self.fused
        values = list(self.terms.values())
        total = values[0]
        for value in values[1:]:
            total = total + value
        return total


@dataclass(frozen=True)
class Phase:
    """A part of local training in which only some parameters train. Batch norm updates its statistics in every part.

    Args:
        epochs: local epochs, >= 1.
        trainable: returns whether the parameter with a name trains; ``None`` trains all.
    """

    epochs: int
    trainable: Callable[[str], bool] | None = None


@dataclass(frozen=True, eq=False)
class Download(Bundle):
    """The tensors that the server sends to every participant of an exchange."""


@dataclass(frozen=True, eq=False)
class Upload:
    """What a client sends, and what it keeps.

    Args:
        weights: model state to send; ``None`` sends the shared part of the trained model.
        prototypes: prototype set to send.
        extra: further tensors to send.
        local: named tensors to keep on the device, in addition to the unshared part of the model. Kept tensors that
            are not named here stay as they were.
    """

    weights: Mapping[str, Tensor] | None = None
    prototypes: PrototypeSet | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    local: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_contents("Upload", {**(self.weights or {}), **self.extra, **self.local}, self.prototypes)


@dataclass(frozen=True, eq=False)
class Update(Bundle):
    """A client's upload after the gate, as the server's half of a method receives it.

    Args:
        client: the sender.
    """

    prototypes: PrototypeSet = field(default_factory=PrototypeSet.empty)
    client: Client = field(kw_only=True)

    @property
    def samples(self) -> int:
        """Training samples of the client, as registered."""
        return self.client.samples


@dataclass(frozen=True)
class UploadSpec:
    """What an exchange's uploads must contain; the gate refuses anything else. See also :meth:`Method.inspect`.

    Args:
        weights: the whole shared model state, or nothing.
        prototypes: a prototype set.
        max_rows: largest number of prototype rows per class; ``None`` allows one per training sample, up to the
            gate's own bound.
        extra: dtype and shape of each further tensor by name; ``None`` in a shape allows any length, ``samples`` is
            the number of training samples that the client registered.
    """

    weights: bool = True
    prototypes: bool = False
    max_rows: int | None = 1
    extra: Mapping[str, tuple[torch.dtype, Shape]] = field(default_factory=dict)


def tensor_specs(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, Shape]]:
    """Return dtype and shape of each tensor, as :class:`UploadSpec` has them."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


@dataclass(frozen=True, eq=False)
class Trained:
    """The results of local training.

    Args:
        prototypes: local class means, see ``Method.prototypes_from``; empty for ``none`` and ``own``.
        steps: optimiser steps taken.
        losses: mean of each loss term over the last epoch.
    """

    prototypes: PrototypeSet
    steps: int
    losses: Mapping[str, float]


def feature_size_of(model: nn.Module) -> int:
    """Return the feature size D of a model that returns (features, logits)."""
    size: Any = model.feature_size
    return int(size)
