"""What kernels read of a prototype set beside its rows: prepared once per set, hence once per round and device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.prototypes import PrototypeSet


@dataclass(frozen=True)
class KernelInputs:
    """A prototype set on its device in the form kernels read.

    Args:
        vectors: ``[M, D]`` float32 raw rows.
        units: ``[M, D]`` float32 rows at unit length.
        labels: ``[M]`` int64, ascending.
        offsets: ``[K + 1]`` int64, ``K`` = highest class + 1: class ``c`` owns rows ``offsets[c]:offsets[c + 1]``.
        weights: ``[M]`` float32.
        lengths: ``[M]`` float32 lengths of the raw rows.
        largest_class: rows of the class that has most of them (on the host).
        one_row_per_class: whether no class has more than one row.
    """

    vectors: Tensor
    units: Tensor
    labels: Tensor
    offsets: Tensor
    weights: Tensor
    lengths: Tensor
    largest_class: int
    one_row_per_class: bool

    @property
    def class_count(self) -> int:
        """``K``."""
        return len(self.offsets) - 1


def kernel_inputs(prototypes: PrototypeSet) -> KernelInputs:
    """The prepared form of ``prototypes``, kept with the set. Reads the device once, when it is first asked for."""
    cache: dict[str, KernelInputs] = prototypes.__dict__.setdefault("_kernel_inputs", {})
    if "inputs" not in cache:
        offsets = prototypes.offsets(max(prototypes.classes, default=-1) + 1)
        sizes = (offsets[1:] - offsets[:-1]).tolist()
        cache["inputs"] = KernelInputs(
            vectors=prototypes.vectors,
            units=prototypes.normalised.contiguous(),
            labels=prototypes.labels,
            offsets=offsets.contiguous(),
            weights=prototypes.weights,
            lengths=torch.linalg.vector_norm(prototypes.vectors, dim=1),
            largest_class=max(sizes, default=0),
            one_row_per_class=max(sizes, default=0) <= 1,
        )
    return cache["inputs"]
