"""Prototypes made of the class means that clients sent (FedPall, Eq. 4; RUCR)."""

from __future__ import annotations

from collections.abc import Sequence

from common.prototypes import PrototypeSet, normalise_rows
from strategies.core.method import Server, Update


def class_means_of(updates: Sequence[Update], server: Server, *, unit: bool = True) -> PrototypeSet:
    """``G^c = sum_k n_k^c m_k^c / sum_k n_k^c``, of local means at unit length or (``unit=False``) as they are."""
    sets = [update.prototypes for update in updates]
    if unit:
        sets = [PrototypeSet(normalise_rows(each.vectors), each.labels, each.weights) for each in sets]
    return server.aggregation.class_means(sets, sample_weighted=True)
