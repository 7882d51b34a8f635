"""What kernels read of a prototype set beside its rows: prepared once per set, hence once per round and device."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.kernels.terms import alignment_count
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
        class_sizes: K row counts, on the host.
    """

    vectors: Tensor
    units: Tensor
    labels: Tensor
    offsets: Tensor
    weights: Tensor
    lengths: Tensor
    class_sizes: tuple[int, ...]
    wanted: dict[float, Tensor] = field(default_factory=dict)

    @property
    def largest_class(self) -> int:
        """Rows of the class that has most of them."""
        return max(self.class_sizes, default=0)

    def wanted_counts(self, fraction: float) -> Tensor:
        """``[K]`` int32: how many rows of each class ``fraction`` aligns to. Made once per fraction."""
        if fraction not in self.wanted:
            counts = [alignment_count(size, fraction) for size in self.class_sizes]
            self.wanted[fraction] = torch.tensor(counts, dtype=torch.int32, device=self.labels.device)
        return self.wanted[fraction]


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
            class_sizes=tuple(sizes),
        )
    return cache["inputs"]
