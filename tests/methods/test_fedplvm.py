"""FedPLVM: FINCH on both sides, the mean of global clusters, and the correction with and without its power."""

from __future__ import annotations

import math

import pytest
import torch
from support.halves import FEATURES, LossSide, elements, run_server, updates
from support.runs import TouchedEngine, run
from support.toy import toy_settings

from common.losses import PrototypeTerms, prototype_contrast, prototype_losses
from common.prototypes import PrototypeSet, partition, unbiased_prototypes
from strategies.core.aggregation import Mean
from strategies.core.method import Batch
from strategies.fedplvm import FedPLVM


def batch_of(features, labels):
    return Batch(torch.zeros(len(labels), 3, 1, 1), labels, features, torch.zeros(len(labels), 3))


DRAWS = torch.Generator().manual_seed(0)
FEATURE_ROWS = torch.rand(6, FEATURES, generator=DRAWS)
LABELS = torch.tensor([0, 1, 2, 1, 0, 2])
ROWS = PrototypeSet(torch.rand(5, FEATURES, generator=DRAWS), torch.tensor([0, 0, 0, 1, 1]), torch.ones(5))


def test_terms_are_the_shared_losses_times_their_weights():
    """Class 2 has no row: its samples add nothing and still count."""
    terms = FedPLVM(contrast=7.0, correction=3.0).loss(batch_of(FEATURE_ROWS, LABELS), LossSide(ROWS)).terms
    contrast = prototype_contrast(FEATURE_ROWS, LABELS, ROWS, temperature=0.07, alpha=0.25)
    torch.testing.assert_close(terms["contrast"], 7.0 * contrast)
    means = unbiased_prototypes(ROWS)
    torch.testing.assert_close(
        terms["correction"], prototype_losses(FEATURE_ROWS, LABELS, means, PrototypeTerms(cosine_square=3.0)).total
    )
    assert set(FedPLVM().loss(batch_of(FEATURE_ROWS, LABELS), LossSide(PrototypeSet.empty(4))).terms) == {
        "cross_entropy"
    }


def test_the_correction_in_loops():
    method = FedPLVM(contrast=0.0, correction=1.0)
    features = FEATURE_ROWS.double().requires_grad_()
    found = (
        method.loss(batch_of(features, LABELS), LossSide(ROWS)).total
        - method.loss(batch_of(FEATURE_ROWS, LABELS), LossSide(PrototypeSet.empty(FEATURES))).total
    )
    twin = FEATURE_ROWS.double().requires_grad_()
    total = twin.new_zeros(())
    for feature, label in zip(twin, LABELS.tolist(), strict=True):
        members = [row.double() for row, c in zip(ROWS.vectors, ROWS.labels.tolist(), strict=True) if c == label]
        if members:
            mean = sum(members) / len(members)
            cosine = (feature * mean).sum() / math.sqrt(float((mean * mean).sum())) / feature.norm()
            total = total + 2 * (cosine - 1) ** 2
    wanted = total / len(LABELS)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)
    gradients = [torch.autograd.grad(value, leaf)[0] for value, leaf in ((found, features), (wanted, twin))]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-8)


def test_a_device_sends_the_finch_means_of_its_features(tmp_path):
    settings = toy_settings("fedplvm", tmp_path, train={"rounds": 1})
    done = run(settings, TouchedEngine(settings))
    model = settings.model.build(4, 16, 0)
    for item in (item for item in done.messages if item.request.train):
        sent = item.reply.payload
        model.load_state_dict(sent.weights)
        split = settings.data.load(item.request.client.rpartition("-")[0]).train
        with torch.no_grad():
            features, _ = model.eval()(settings.data.augmentation.test(split.images))
        row = 0
        for label in sorted(set(split.labels.tolist())):
            members = features[split.labels == label]
            clusters = partition(members)
            for cluster in range(int(clusters.max()) + 1):
                inside = members[clusters == cluster]
                torch.testing.assert_close(sent.prototypes.vectors[row], inside.mean(0), rtol=1e-4, atol=1e-5)
                assert int(sent.prototypes.weights[row]) == len(inside)
                assert int(sent.prototypes.labels[row]) == label
                row += 1
        assert row == len(sent.prototypes)


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
    for weighting, uniform in (("uniform", True), ("samples", False)):
        weights = run_server(FedPLVM(weighting=weighting), [sent])[1].weights
        mean = Mean().average(sent, uniform=uniform)
        assert all(torch.equal(weights[name], mean[name]) for name in mean)
