"""Prototype sets, and how they are made."""

from common.prototypes.finch import Clustering
from common.prototypes.set import (
    ClassSums,
    PrototypeSet,
    carry_over,
    class_means,
    cluster_prototypes,
    normalise_rows,
    normalise_weights,
    unbiased_prototypes,
)
