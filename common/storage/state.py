"""The federation's global state: named tensors, so that saving, sending and hashing use the same form."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.prototypes import PrototypeSet

MODEL_PREFIX = "model/"
"""Prefix of the names of a model's unshared part in a client's own state."""


@dataclass(frozen=True, eq=False)
class Bundle:
    """Model weights, a prototype set and further tensors: the contents of a message and of the global state.

    Args:
        weights: model state (parameters and buffers) by name.
        prototypes: a prototype set, or ``None`` if there is none, which differs from an empty set.
        extra: further tensors by name.
    """

    weights: Mapping[str, Tensor] = field(default_factory=dict)
    prototypes: PrototypeSet | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors under the names that they have in messages and files, sorted by name.

        The names have the prefixes ``weights/``, ``prototypes/`` and ``extra/``.
        """
        tensors = with_prefix("weights/", self.weights) | with_prefix("extra/", self.extra)
        if self.prototypes is not None:
            tensors["prototypes/vectors"] = self.prototypes.vectors
            tensors["prototypes/labels"] = self.prototypes.labels
            tensors["prototypes/weights"] = self.prototypes.weights
        return dict(sorted(tensors.items()))

    def part_bytes(self) -> dict[str, int]:
        """Return the bytes of the tensors by part: weights, prototypes, extra."""
        sizes = {"weights": 0, "prototypes": 0, "extra": 0}
        for name, tensor in self.tensors().items():
            sizes[name.partition("/")[0]] += tensor.nbytes
        return sizes


def split_tensors(tensors: Mapping[str, Tensor]) -> Bundle:
    """Return the bundle of these tensors, the inverse of :meth:`Bundle.tensors`.

    Raises:
        ValueError: the tensors of the prototype set do not agree.
    """
    prototypes = None
    parts = under_prefix("prototypes/", tensors)
    if "vectors" in parts:
        prototypes = PrototypeSet(parts["vectors"], parts["labels"], parts["weights"])
    return Bundle(under_prefix("weights/", tensors), prototypes, under_prefix("extra/", tensors))


@dataclass(frozen=True, eq=False)
class GlobalState(Bundle):
    """The server's state after ``round`` rounds, on the CPU.

    Its weights are the shared model's. Its prototypes are the global ones, empty before the first round and for methods
    without prototypes. Its extra tensors are a method's own: FedDyn's ``h``, FedPall's amplifier, server momentum.

    Args:
        round: rounds completed; 0 before the first.
    """

    prototypes: PrototypeSet = field(default_factory=PrototypeSet.empty)
    round: int = field(kw_only=True)

    @classmethod
    def from_tensors(cls, round_number: int, tensors: Mapping[str, Tensor]) -> GlobalState:
        """Return the state of a round from its tensors, the inverse of :meth:`tensors`."""
        bundle = split_tensors(tensors)
        prototypes = bundle.prototypes
        if prototypes is None:
            prototypes = PrototypeSet.empty()
        return cls(bundle.weights, prototypes, bundle.extra, round=round_number)

    def not_finite(self) -> str | None:
        """Return the name of the first tensor with NaN or infinite values; ``None`` if there is none."""
        for name, tensor in self.tensors().items():
            if not finite(tensor):
                return name
        return None

    def sha256(self) -> str:
        """Return the SHA-256 over round, names, dtypes, shapes and bytes: equal on every engine for equal states."""
        return tensors_sha256(self.tensors(), f"round={self.round}")


def tensors_sha256(tensors: Mapping[str, Tensor], prefix: str = "") -> str:
    """Return the SHA-256 over ``prefix`` and, in name order, every tensor's name, dtype, shape and bytes."""
    digest = hashlib.sha256(prefix.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"|{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the tensor's bytes, without a copy if it is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def finite(tensor: Tensor) -> bool:
    """Return whether all values are finite.

    A value that is not finite makes the norm infinite or NaN. The norm needs no second tensor, as ``isfinite`` does.
    """
    if not tensor.is_floating_point() or math.isfinite(float(torch.linalg.vector_norm(tensor))):
        return True
    return bool(torch.isfinite(tensor).all())  # the norm of large finite values may overflow


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the same tensors under ``prefix`` + name."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def under_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose name begins with ``prefix``, by the rest of their names."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            found[name.removeprefix(prefix)] = tensor
    return found
