"""I2PFL against its formulas in loops over float64: MixUp, alignment, reweighting and smoothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.halves import FEATURES, Half, LossSide, elements, run_server, updates
from support.nets import shared_weights
from support.runs import run
from support.toy import toy_settings

from common.numerics import numpy_generator
from common.prototypes import PrototypeSet
from strategies.core.method import Batch, Client
from strategies.i2pfl import I2PFL, mix, reweighted_means

DRAWS = torch.Generator().manual_seed(0)
FEATURE_ROWS = torch.rand(7, FEATURES, generator=DRAWS, dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 1, 0, 1, 1])
LOGITS = torch.randn(7, 4, generator=DRAWS, dtype=torch.float64)
CLIENT = Client("ward-0", "ward", 7, (2, 4, 1, 0))


class Side(LossSide):
    """A device's side. Batches and draws go on from call to call, as in a local epoch."""

    seed, class_count, feature_size, client, device, batch = 3, 4, FEATURES, CLIENT, torch.device("cpu"), 0

    def cached(self, name, make):
        return self.__dict__.setdefault(name, make())


def batch_of(features, labels):
    return Batch(torch.zeros(len(labels), 3, 1, 1), labels, features, LOGITS[: len(labels)])


def mixed_rows(features, labels, alpha, draws):
    """``gamma z_i + (1 - gamma) z_j`` row by row, with the method's own draws."""
    gammas, places = draws.beta(alpha, alpha, len(labels)), draws.random(len(labels))
    found = []
    for i, label in enumerate(labels.tolist()):
        others = [j for j, other in enumerate(labels.tolist()) if other != label]
        partner = features[others[int(places[i] * len(others))]]
        found.append(gammas[i] * features[i] + (1 - gammas[i]) * partner)
    return torch.stack(found)


def test_the_alignment_is_the_formula_in_value_and_gradient():
    """Class 3 has no sample; a second batch goes on with the draws."""
    method, side = I2PFL(contrast=0.0, alignment=3.0), Side(PrototypeSet.empty(FEATURES))
    draws = numpy_generator(side.seed, "mixup", side.round, side.client.id)
    for size in (7, 5):
        labels, rows = LABELS[:size], FEATURE_ROWS[:size]
        features, twin = (rows.clone().requires_grad_() for _ in range(2))
        losses = method.loss(batch_of(features, labels), side)
        mixed = mixed_rows(rows, labels, 0.4, draws)
        targets = torch.stack([mixed[labels == label].mean(0) for label in labels])
        alignment = 3.0 * sum((z - target).square().mean() for z, target in zip(twin, targets, strict=True)) / size
        torch.testing.assert_close(losses.terms["alignment"], alignment, rtol=1e-9, atol=1e-9)
        found = torch.autograd.grad(losses.total, features)[0]
        torch.testing.assert_close(found, torch.autograd.grad(alignment, twin)[0], rtol=1e-9, atol=1e-9)


def test_of_one_class_it_is_the_variance_within():
    labels = torch.zeros(7, dtype=torch.int64)
    side = Side(PrototypeSet.empty(FEATURES))
    found = I2PFL(contrast=0.0, alignment=1.0).loss(batch_of(FEATURE_ROWS, labels), side).terms["alignment"]
    torch.testing.assert_close(found, FEATURE_ROWS.var(0, unbiased=False).mean(), rtol=1e-12, atol=0)
    assert torch.equal(mix(FEATURE_ROWS, labels, 0.4, np.random.default_rng(0)), FEATURE_ROWS)


# ---- the server ------------------------------------------------------------------------------------------------------


def rows_of(count, seed, label=1, far=1.0):
    vectors = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed))
    vectors[-1] *= far
    return PrototypeSet(vectors, torch.full((count,), label), torch.arange(1.0, count + 1))


def reweighted(rows):
    """``sum_j d_j p_j / sum_j d_j``; a mean where all are equal."""
    shares = [(row - rows.mean(0)).square().sum() for row in rows]
    if not sum(shares):
        return rows.mean(0)
    return sum(share * row for share, row in zip(shares, rows, strict=True)) / sum(shares)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_far_means_count_most(count):
    rows = rows_of(count, count, far=10.0)
    found = reweighted_means(rows, 1.0)
    assert elements(found.vectors[0]) == pytest.approx(elements(reweighted(rows.vectors.double())), rel=1e-6)
    assert float(found.weights) == sum(range(1, count + 1))
    if count == 2:
        torch.testing.assert_close(found.vectors[0], rows.vectors.mean(0))
    same = PrototypeSet(rows.vectors[:1].expand(3, -1), torch.zeros(3, dtype=torch.int64), torch.ones(3))
    torch.testing.assert_close(reweighted_means(same, 1.0).vectors[0], rows.vectors[0])


def test_no_mean_counts_for_more_than_the_largest_share():
    rows = rows_of(5, 0, far=1e4)
    shares = {}
    for largest in (1.0, 0.5, 0.1):
        shares[largest] = float(reweighted_means(rows, largest).vectors[0].norm() / rows.vectors[-1].norm())
    assert shares == pytest.approx({1.0: 0.8, 0.5: 0.5, 0.1: 0.2}, abs=0.01)


def test_prototypes_are_smoothed_and_a_missing_class_keeps_its_own():
    first = updates(1, prototypes={0: rows_of(1, 0), 1: rows_of(1, 1), 2: rows_of(1, 2, label=2)})
    second = updates(2, prototypes={0: rows_of(1, 3), 1: rows_of(1, 4, label=0)})
    half = Half(largest_share=1.0)
    for smoothing, reweight in ((0.99, True), (0.01, False), (0.0, True)):
        states = run_server(I2PFL(smoothing=smoothing, reweight=reweight), [first, second], half)
        start = torch.stack([rows_of(1, 0).vectors[0], rows_of(1, 1).vectors[0]]).mean(0)
        torch.testing.assert_close(states[1].prototypes.of_class(1)[0], start)
        wanted = (1 - smoothing) * rows_of(1, 3).vectors[0] + smoothing * start
        torch.testing.assert_close(states[2].prototypes.of_class(1)[0], wanted)
        assert torch.equal(states[2].prototypes.of_class(2), rows_of(1, 2).vectors)
        assert torch.equal(states[2].prototypes.of_class(0), rows_of(1, 4).vectors)


def test_without_its_own_parts_it_is_fpl_with_global_means(tmp_path):
    """The same loss and the same means, so that three rounds end in the same weights but for rounding."""
    same = {
        "i2pfl": {"alignment": 0.0, "reweight": False, "smoothing": 0.0},
        "fpl": {"clusters": "global", "consistency": 0.0, "prototype_mode": "post_eval"},
    }
    for method, hyper in same.items():
        run(toy_settings(method, tmp_path / method, hyper={"temperature": 0.1, **hyper}, train={"rounds": 3}))
    ours, theirs = (shared_weights(tmp_path / method) for method in same)
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5)
