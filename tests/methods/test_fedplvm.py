"""FedPLVM: FINCH on both sides, and the mean of global clusters."""

from __future__ import annotations

import pytest
import torch
from support.exchanges import local_exchange
from support.halves import elements, run_server, updates
from support.toy import toy_settings

from common.prototypes import PrototypeSet, partition
from strategies.core.method import Trained
from strategies.fedplvm import FedPLVM


def test_a_device_sends_the_finch_means_of_its_features(tmp_path):
    local = local_exchange(toy_settings("fedplvm", tmp_path))
    sent = local.method.upload(local, Trained(None, 1, {})).prototypes
    labels = local.split.labels
    with torch.no_grad():
        features, _ = local.model.eval()(local.settings.data.augmentation.test(local.split.images))
    wanted = []
    for label in range(4):
        members = features[labels == label]
        clusters = partition(members)
        for cluster in range(int(clusters.max()) + 1):
            inside = members[clusters == cluster]
            wanted.append((label, len(inside), inside.mean(0)))
    assert [(int(label), int(size)) for label, size in zip(sent.labels, sent.weights, strict=True)] == [
        (label, size) for label, size, _ in wanted
    ]
    torch.testing.assert_close(sent.vectors, torch.stack([mean for _, _, mean in wanted]), rtol=1e-4, atol=1e-5)


def client_rows(scale):
    """Four rows of class 1 in two directions. Their weights must not change the vectors."""
    vectors = torch.tensor([[1.0, 0, 0, 0], [1.0, 0.1, 0, 0], [0, 0, 1.0, 0], [0, 0, 1.0, 0.1]])
    return PrototypeSet(vectors, torch.full((4,), 1), scale * torch.arange(1.0, 5.0))


def test_the_server_clusters_again_and_takes_plain_means():
    sent = updates(1, prototypes={0: client_rows(1.0), 1: client_rows(2.0)})
    state = run_server(FedPLVM(), [sent])[1]
    assert len(state.prototypes) == 2
    assert elements(state.prototypes.vectors[0]) == pytest.approx([1.0, 0.05, 0.0, 0.0])
    assert elements(state.prototypes.vectors[1]) == pytest.approx([0.0, 0.0, 1.0, 0.05])
    assert elements(state.prototypes.weights) == [9.0, 21.0]
