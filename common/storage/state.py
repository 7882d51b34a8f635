"""The federation's global state: plain named tensors, so that saving, sending and hashing it are one and the same."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.prototypes import PrototypeSet

MODEL_PREFIX = "model/"
"""Of the names in a client's own state that are the unshared part of its model."""


@dataclass(frozen=True, eq=False)
class GlobalState:
    """Everything the server knows after ``round`` rounds.

    Args:
        round: rounds completed; 0 before the first.
        weights: the shared model's state (parameters and buffers) by name, on the CPU.
        prototypes: the global prototype set; empty before the first round and for methods without prototypes.
        extra: whatever else a method keeps, by name (FedDyn's ``h``, FedPall's amplifier, server momentum ...).
    """

    round: int
    weights: Mapping[str, Tensor]
    prototypes: PrototypeSet = field(default_factory=PrototypeSet.empty)
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors under the names they have on the wire and on disk, sorted by name."""
        return named_tensors(self.weights, self.prototypes, self.extra)

    @classmethod
    def from_tensors(cls, round_number: int, tensors: Mapping[str, Tensor]) -> GlobalState:
        """Inverse of :meth:`tensors`."""
        weights, prototypes, extra = split_tensors(tensors)
        return cls(round_number, weights, prototypes, extra)

    def not_finite(self) -> str:
        """The name of a tensor with values that are NaN or infinite; empty if there is none."""
        return next((name for name, tensor in self.tensors().items() if not finite(tensor)), "")

    def sha256(self) -> str:
        """SHA-256 over round, names, dtypes, shapes and bytes: equal on every engine for equal states."""
        return tensors_sha256(self.tensors(), f"round={self.round}")


def named_tensors(
    weights: Mapping[str, Tensor], prototypes: PrototypeSet | None, extra: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """One mapping with the prefixes ``weights/``, ``prototypes/`` and ``extra/``, sorted by name."""
    tensors = {f"weights/{name}": tensor for name, tensor in weights.items()}
    tensors |= {f"extra/{name}": tensor for name, tensor in extra.items()}
    if prototypes is not None:
        tensors["prototypes/vectors"] = prototypes.vectors
        tensors["prototypes/labels"] = prototypes.labels
        tensors["prototypes/weights"] = prototypes.weights
    return dict(sorted(tensors.items()))


def split_tensors(
    tensors: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], PrototypeSet, dict[str, Tensor]]:
    """Weights, prototypes (empty when absent) and extra of a mapping made by :func:`named_tensors`."""
    weights = {name.partition("/")[2]: tensor for name, tensor in tensors.items() if name.startswith("weights/")}
    extra = {name.partition("/")[2]: tensor for name, tensor in tensors.items() if name.startswith("extra/")}
    if "prototypes/vectors" in tensors:
        prototypes = PrototypeSet(*(tensors[f"prototypes/{part}"] for part in ("vectors", "labels", "weights")))
    else:
        prototypes = PrototypeSet.empty()
    return weights, prototypes, extra


def tensors_sha256(tensors: Mapping[str, Tensor], prefix: str = "") -> str:
    """SHA-256 over ``prefix`` and, in name order, every tensor's name, dtype, shape and bytes."""
    digest = hashlib.sha256(prefix.encode())
    for name in sorted(tensors):
        digest.update(f"|{name}|{tensors[name].dtype}|{tuple(tensors[name].shape)}|".encode())
        digest.update(bytes_of(tensors[name]))
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's bytes, where they lie if it is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def finite(tensor: Tensor) -> bool:
    """Whether all values are finite. One that is not spoils the norm, which needs no second tensor as isfinite does."""
    if not tensor.is_floating_point() or math.isfinite(float(torch.linalg.vector_norm(tensor))):
        return True
    return bool(torch.isfinite(tensor).all())  # large values overflow a norm in float32, the more so in float16


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under ``prefix`` + name."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def under_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of ``tensors`` whose name begins with ``prefix``, without it."""
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
