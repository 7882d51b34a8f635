"""What one hostile device may claim: each claim is bounded by what an honest one could have done."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch
from support.halves import FEATURES, Half

from common.errors import PayloadError
from common.prototypes import PrototypeSet, cluster_prototypes
from strategies.core.gate import MOST_CLASS_ROWS, MOST_ROWS, Gate
from strategies.core.method import Client, Expected

# ---- prototypes ------------------------------------------------------------------------------------------------------


def rows(counts: Sequence[int], features: int = FEATURES) -> PrototypeSet:
    """So many random prototypes of each class, each of one sample."""
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    draws = torch.Generator().manual_seed(0)
    return PrototypeSet(torch.randn(len(labels), features, generator=draws), labels, torch.ones(len(labels)))


def admit_rows(sent: PrototypeSet, classes: int, most_rows: int | None = None) -> PrototypeSet:
    gate = Gate(Expected(prototypes=True, most_rows=most_rows), Half(class_count=classes))
    return gate._check_prototypes(sent, Client("ward-0", "ward", 10**6 * classes, (10**6,) * classes))


def test_a_client_sends_no_more_rows_than_the_server_can_cluster() -> None:
    """However many samples it registered."""
    assert len(admit_rows(rows([MOST_CLASS_ROWS, 1, 1]), 3)) == MOST_CLASS_ROWS + 2
    with pytest.raises(PayloadError, match=f"{MOST_CLASS_ROWS + 1} prototypes of class 1; at most {MOST_CLASS_ROWS}"):
        admit_rows(rows([1, MOST_CLASS_ROWS + 1, 1]), 3)
    many = MOST_ROWS // 1000 + 1
    with pytest.raises(PayloadError, match=f"{many * 1000} prototypes came; at most {MOST_ROWS}"):
        admit_rows(rows([1000] * many), many)
    with pytest.raises(PayloadError, match="2 prototypes of class 1; at most 1 can be"):
        admit_rows(rows([1, 2, 1]), 3, most_rows=1)


def test_as_many_rows_of_a_class_as_are_let_in_are_clustered_in_time() -> None:
    sent = rows([MOST_CLASS_ROWS], 128)
    cluster_prototypes(rows([10], 128))  # the first one compiles
    started = time.process_time()
    cluster_prototypes(sent)
    assert time.process_time() - started < 5
