"""FedPLCC: FINCH* carries counts through both levels, and shares sum to one per class."""

from __future__ import annotations

import pytest
import torch
from support.halves import FEATURES, elements, run_server, updates

from common.prototypes import PrototypeSet
from strategies.fedplcc import FedPLCC

DRAWS = torch.Generator().manual_seed(3)


def client_rows(*weights):
    """Two directions of class 1, two rows each."""
    vectors = torch.tensor([[1.0, 0, 0, 0], [1.0, 0.1, 0, 0], [0, 0, 1.0, 0], [0, 0, 1.0, 0.1]])
    return PrototypeSet(vectors, torch.full((4,), 1), torch.tensor(weights))


def test_finch_star_adds_members_up_and_normalises_per_class():
    one = PrototypeSet(torch.rand(1, FEATURES, generator=DRAWS), torch.tensor([2]), torch.tensor([7.0]))
    sent = updates(1, prototypes={0: client_rows(1.0, 2.0, 3.0, 4.0), 1: client_rows(5.0, 6.0, 7.0, 2.0), 2: one})
    plain = run_server(FedPLCC(), [sent])[1].prototypes
    assert plain.labels.tolist() == [1, 1, 2]
    assert elements(plain.weights) == pytest.approx([14 / 30, 16 / 30, 1.0])
    assert elements(plain.vectors[0]) == pytest.approx([1.0, 0.05, 0.0, 0.0])
