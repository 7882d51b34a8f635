"""FPL on the server: clusters of the clients' means, and the two targets of its consistency that are made of them."""

from __future__ import annotations

import pytest
import torch
from support.halves import FEATURES, Half, LossSide, clients

from common.prototypes import PrototypeSet
from common.storage import GlobalState
from strategies.core.method import Batch, Update
from strategies.fpl import FPL

MEANS = torch.tensor([[1.0, 0, 0, 0], [1, 0.1, 0, 0], [1, 0.3, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0.1]])
"""What five clients send of class 1: three of one direction, two of another."""


def clustered() -> PrototypeSet:
    sent: list[Update] = []
    for client, row in zip(clients((1, 20, 300, 4000, 5)), MEANS, strict=True):
        own = PrototypeSet(row[None], torch.tensor([1]), torch.tensor([float(client.samples)]))
        sent.append(Update({}, own, client=client))
    state = GlobalState({}, PrototypeSet.empty(FEATURES), round=1)
    return FPL().aggregate_prototypes(state, sent, Half())


def test_a_cluster_is_the_plain_mean_of_its_clients_and_weighs_as_many() -> None:
    found = clustered()
    assert found.weights.tolist() == [3, 2]
    torch.testing.assert_close(found.vectors, torch.stack([MEANS[:3].mean(0), MEANS[3:].mean(0)]))


@pytest.mark.parametrize("target", ["global", "unbiased"])
def test_the_target_is_the_mean_of_the_clients_or_of_the_clusters(target: str) -> None:
    """Table 3's G and U; no client counts by its samples."""
    wanted = MEANS.mean(0)
    if target == "unbiased":
        wanted = (MEANS[:3].mean(0) + MEANS[3:].mean(0)) / 2
    features = torch.rand(2, FEATURES, generator=torch.Generator().manual_seed(0))
    batch = Batch(torch.zeros(2, 3, 1, 1), torch.tensor([1, 1]), features, torch.zeros(2, 3))
    found = FPL(contrast=0, target=target).loss(batch, LossSide(clustered())).terms["consistency"]
    torch.testing.assert_close(found, (features - wanted).square().mean())
