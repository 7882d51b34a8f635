"""Prototype sets: 0..n weighted feature vectors per class.

A *prototype* is a feature vector that stands for a class. A client or a server holds 0..n of them per class, so a set
is ragged; it is kept as a struct of arrays sorted by class, which travels, stores and feeds kernels without conversion.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from common.precision import NORM_FLOOR


@dataclass(frozen=True, eq=False)
class PrototypeSet:
    """0..n weighted feature vectors per class, sorted by class (stable: equal classes keep their order).

    Args:
        vectors: ``[M, D]`` float32. ``M = 0`` is legal (an empty set keeps its ``D``).
        labels: ``[M]`` int64, class of each row, >= 0.
        weights: ``[M]`` float32, >= 0: sample counts, or shares where a method normalises them.

    Raises:
        ValueError: shapes do not agree, or a label or weight is negative.
    """

    vectors: Tensor
    labels: Tensor
    weights: Tensor

    def __post_init__(self) -> None:
        vectors = self.vectors.to(torch.float32)
        labels = self.labels.to(torch.int64)
        weights = self.weights.to(torch.float32)
        if vectors.ndim != 2 or labels.ndim != 1 or weights.ndim != 1:
            raise ValueError(
                f"a PrototypeSet takes vectors [M, D], labels [M] and weights [M]; got {tuple(vectors.shape)}, "
                f"{tuple(labels.shape)} and {tuple(weights.shape)}"
            )
        if not len(vectors) == len(labels) == len(weights):
            raise ValueError(f"{len(vectors)} vectors, {len(labels)} labels and {len(weights)} weights do not match")
        if len(labels):
            if bool((labels < 0).any()):
                raise ValueError(f"prototype labels must be >= 0; got {int(labels.min())}")
            if bool((weights < 0).any()):
                raise ValueError(f"prototype weights must be >= 0; got {float(weights.min())}")
            if bool((labels[1:] < labels[:-1]).any()):
                order = torch.sort(labels, stable=True).indices
                vectors, labels, weights = vectors[order], labels[order], weights[order]
        object.__setattr__(self, "vectors", vectors.contiguous())
        object.__setattr__(self, "labels", labels.contiguous())
        object.__setattr__(self, "weights", weights.contiguous())

    @classmethod
    def empty(cls, feature_size: int = 0, device: torch.device | str = "cpu") -> PrototypeSet:
        """The set with no rows, of a known feature size."""
        return cls(
            torch.zeros(0, feature_size, device=device),
            torch.zeros(0, dtype=torch.int64, device=device),
            torch.zeros(0, device=device),
        )

    @classmethod
    def concatenate(cls, sets: Iterable[PrototypeSet]) -> PrototypeSet:
        """All rows of ``sets`` in one set; within a class, rows keep the order of ``sets``."""
        parts = list(sets)
        filled = [part for part in parts if len(part)]
        if not filled:
            return cls.empty(max((part.feature_size for part in parts), default=0))
        sizes = {part.feature_size for part in filled}
        if len(sizes) > 1:
            raise ValueError(f"prototype sets of different feature sizes cannot be joined: {sorted(sizes)}")
        return cls(
            torch.cat([part.vectors for part in filled]),
            torch.cat([part.labels for part in filled]),
            torch.cat([part.weights for part in filled]),
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PrototypeSet):
            return NotImplemented
        return (
            torch.equal(self.vectors, other.vectors)
            and torch.equal(self.labels, other.labels)
            and torch.equal(self.weights, other.weights)
        )

    __hash__ = None  # type: ignore[assignment]  # compared by value, so not hashable

    @property
    def feature_size(self) -> int:
        """``D``."""
        return self.vectors.shape[1]

    @cached_property
    def classes(self) -> list[int]:
        """The classes that have at least one row, ascending."""
        return torch.unique_consecutive(self.labels).tolist()

    @cached_property
    def normalised(self) -> Tensor:
        """``[M, D]``: rows at unit length (zero rows stay zero), computed once per set."""
        return normalise_rows(self.vectors)

    def offsets(self, class_count: int) -> Tensor:
        """``[K + 1]`` int64: rows of class ``c`` are ``offsets[c]:offsets[c + 1]``. Computed once per ``class_count``.

        Raises:
            ValueError: a label is ``>= class_count``.
        """
        cache: dict[int, Tensor] = self.__dict__.setdefault("_offsets", {})
        if class_count not in cache:
            if len(self) and int(self.labels[-1]) >= class_count:
                raise ValueError(f"prototype of class {int(self.labels[-1])} where only {class_count} classes exist")
            edges = torch.arange(class_count + 1, device=self.labels.device)
            cache[class_count] = torch.searchsorted(self.labels, edges)
        return cache[class_count]

    def of_class(self, label: int) -> Tensor:
        """``[n, D]``: the rows of one class, in order (n may be 0)."""
        return self.vectors[self.labels == label]

    def to(self, device: torch.device | str) -> PrototypeSet:
        """The same set on ``device`` (itself when it is there already)."""
        if self.vectors.device == torch.device(device):
            return self
        return PrototypeSet(self.vectors.to(device), self.labels.to(device), self.weights.to(device))

    def rows_per_class(self, class_count: int) -> tuple[Tensor, Tensor]:
        """One row per class as a dense table: ``([K, D] vectors, [K] bool present)``; absent classes are zero rows.

        Raises:
            ValueError: a class has more than one row (take :func:`unbiased_prototypes` first).
        """
        if len(self.classes) != len(self):
            raise ValueError("this set has several prototypes per class; reduce it with unbiased_prototypes first")
        table = self.vectors.new_zeros(class_count, self.feature_size)
        table[self.labels] = self.vectors
        present = torch.zeros(class_count, dtype=torch.bool, device=self.labels.device)
        present[self.labels] = True
        return table, present


def normalise_rows(rows: Tensor) -> Tensor:
    """``[M, D]``: each row divided by its length, or by 1e-12 where it is shorter (so zero rows stay zero)."""
    return rows / rows.norm(dim=1, keepdim=True).clamp_min(NORM_FLOOR)
