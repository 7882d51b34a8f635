"""FedProc: the schedule of its two terms, the global means, and which class keeps its old mean."""

from __future__ import annotations

import pytest
import torch
from support.halves import FEATURES, LossSide, elements, run_server, updates

from common.losses import cross_entropy, prototype_contrast
from common.prototypes import PrototypeSet
from strategies.core.method import Batch
from strategies.fedproc import FedProc


def rows(*entries):
    """A set of (class, weight, value in every feature) rows."""
    return PrototypeSet(
        torch.stack([torch.full((FEATURES,), float(value)) for _, _, value in entries]),
        torch.tensor([label for label, _, _ in entries]),
        torch.tensor([float(weight) for _, weight, _ in entries]),
    )


@pytest.mark.parametrize(
    ("schedule", "round_number", "rounds", "share"),
    [
        ("official", 1, 10, 1.0),  # the first round: no prototypes, cross-entropy alone
        ("official", 2, 10, 0.1),
        ("official", 10, 10, 0.9),
        ("rethinkfl", 1, 10, 0.0),  # its first round trains nothing
        ("rethinkfl", 2, 10, 1 / 9),
        ("rethinkfl", 10, 10, 1.0),
        ("rethinkfl", 1, 1, 0.0),  # T - 1 is 0
    ],
)
def test_the_schedule(schedule, round_number, rounds, share):
    found = FedProc(schedule=schedule).cross_entropy_weight(round_number, rounds, round_number > 1)
    assert found == pytest.approx(share)


def test_the_loss_is_the_weighted_sum_of_both():
    draws = torch.Generator().manual_seed(0)
    features = torch.rand(6, FEATURES, generator=draws, requires_grad=True)
    logits = torch.randn(6, 3, generator=draws, requires_grad=True)
    labels = torch.tensor([0, 1, 2, 2, 1, 0])
    prototypes = PrototypeSet(torch.rand(3, FEATURES, generator=draws), torch.arange(3), torch.ones(3))
    batch = Batch(torch.zeros(6, 3, 1, 1), labels, features, logits)
    losses = FedProc(temperature=0.5).loss(batch, LossSide(prototypes, 4, 10))
    contrast = prototype_contrast(features, labels, prototypes, temperature=0.5)
    wanted = 0.3 * cross_entropy(logits, labels) + 0.7 * contrast
    torch.testing.assert_close(losses.total, wanted)
    assert set(losses.terms) == {"cross_entropy", "contrast"}


def test_the_global_mean_is_over_samples_and_a_missing_class_keeps_its_own():
    first = updates(1, prototypes={0: rows((0, 10, 1.0), (1, 5, 4.0)), 1: rows((0, 30, 3.0)), 2: rows((2, 20, 7.0))})
    second = updates(2, prototypes={0: rows((0, 10, 5.0)), 1: rows((0, 30, 5.0)), 2: rows((2, 20, 8.0))})
    states = run_server(FedProc(), [first, second])
    means = states[1].prototypes
    assert elements(means.of_class(0)) == pytest.approx([(10 * 1.0 + 30 * 3.0) / 40] * FEATURES)
    assert elements(means.of_class(1)) == [4.0] * FEATURES
    assert elements(states[2].prototypes.of_class(1)) == [4.0] * FEATURES
    assert elements(states[2].prototypes.of_class(0)) == [5.0] * FEATURES
    assert run_server(FedProc(keep_missing=False), [first, second])[2].prototypes.classes == [0, 2]
