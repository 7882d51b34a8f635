"""FedPLCC: FINCH* carries counts through both levels, shares sum to one per class, and the loss is the weighted one."""

from __future__ import annotations

import math

import pytest
import torch
from support.halves import FEATURES, LossSide, elements, run_server, updates
from support.runs import TouchedEngine, run
from support.toy import toy_settings

from common.prototypes import PrototypeSet
from strategies.core.method import Batch
from strategies.fedplcc import FedPLCC

DRAWS = torch.Generator().manual_seed(3)
FEATURE_ROWS = torch.rand(6, FEATURES, generator=DRAWS)
LABELS = torch.tensor([0, 1, 2, 1, 0, 2])
SHARES = torch.tensor([0.2, 0.5, 0.3, 0.9, 0.1])
ROWS = PrototypeSet(torch.rand(5, FEATURES, generator=DRAWS), torch.tensor([0, 0, 0, 1, 1]), SHARES)


def loops(features, method):
    """Both prototype terms of methods.md's 5.12, sample by sample and row by row."""
    contrast, correction = [], []
    for feature, label in zip(features, LABELS.tolist(), strict=True):
        s, w, same = [], [], []
        for row, share, row_label in zip(ROWS.vectors.double(), SHARES.tolist(), ROWS.labels.tolist(), strict=True):
            cosine = (feature * row).sum() / feature.norm() / row.norm()
            s.append(cosine**method.alpha)
            w.append(share if method.weighted else 1.0)
            same.append(row_label == label)
        if not any(same):
            contrast.append(0.0)
            correction.append(0.0)
            continue
        shares = [wj * torch.exp(sj / method.temperature) for sj, wj in zip(s, w, strict=True)]
        positive = sum(value for value, inside in zip(shares, same, strict=True) if inside)
        contrast.append(-torch.log(positive / sum(shares)))
        held = sorted((float((sj * wj).detach()), sj * wj) for sj, wj, inside in zip(s, w, same, strict=True) if inside)
        count = max(1, math.ceil(method.fraction * len(held) - 1e-9))
        correction.append(-sum(value for _, value in held[-count:]))
    return method.contrast * sum(contrast) / len(LABELS), method.correction * sum(correction) / len(LABELS)


@pytest.mark.parametrize("fraction", [0.5, 1.0, 1 / 3])
@pytest.mark.parametrize("weighted", [True, False])
def test_the_loss_in_loops(fraction, weighted):
    method = FedPLCC(contrast=2.0, correction=5.0, fraction=fraction, weighted=weighted)
    features = FEATURE_ROWS.double().requires_grad_()
    batch = Batch(torch.zeros(6, 3, 1, 1), LABELS, features, torch.zeros(6, 3))
    losses = method.loss(batch, LossSide(ROWS))
    terms = losses.terms
    twin = FEATURE_ROWS.double().requires_grad_()
    contrast, correction = loops(twin, method)
    torch.testing.assert_close(terms["contrast"], contrast, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(terms["correction"], correction, rtol=1e-6, atol=1e-8)
    found = torch.autograd.grad(losses.total, features)[0]
    torch.testing.assert_close(found, torch.autograd.grad(contrast + correction, twin)[0], rtol=1e-5, atol=1e-7)


def test_before_there_are_prototypes_the_loss_is_the_cross_entropy():
    batch = Batch(torch.zeros(6, 3, 1, 1), LABELS, FEATURE_ROWS, torch.rand(6, 3, generator=DRAWS))
    assert set(FedPLCC().loss(batch, LossSide(PrototypeSet.empty(FEATURES))).terms) == {"cross_entropy"}


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


def test_counts_survive_both_levels_of_a_run(tmp_path):
    settings = toy_settings("fedplcc", tmp_path, train={"rounds": 2})
    done = run(settings, TouchedEngine(settings))
    for item in (item for item in done.messages if item.request.train):
        sent, counts = item.reply.payload.prototypes, item.reply.answer.class_counts
        for label, count in enumerate(counts):
            assert float(sent.weights[sent.labels == label].sum()) == count
        received = item.message.prototypes
        for label in received.classes:
            assert float(received.weights[received.labels == label].sum()) == pytest.approx(1.0)
    assert done.messages[-1].message.prototypes.classes == [0, 1, 2, 3]
