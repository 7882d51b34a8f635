"""Prototype sets, and how they are made."""

from common.prototypes.finch import Clustering
from common.prototypes.operations import (
    ClassSums,
    carry_over,
    class_means,
    cluster_prototypes,
    normalise_weights,
    total_rows,
    unbiased_prototypes,
)
from common.prototypes.set import PrototypeSet, normalise_rows

__all__ = [
    "ClassSums",
    "Clustering",
    "PrototypeSet",
    "carry_over",
    "class_means",
    "cluster_prototypes",
    "normalise_rows",
    "normalise_weights",
    "total_rows",
    "unbiased_prototypes",
]
