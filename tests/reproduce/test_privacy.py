"""The estimate is a lower bound that grows with what is shared, and is of what a run's clients really send."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.errors import ConfigError
from common.numerics import generator
from goldfinch.results.information import (
    BOUND,
    Critic,
    Information,
    donsker_varadhan,
    information_of_run,
    mutual_information,
)
from tests.support.runs import run
from tests.support.toy import toy_settings


def gaussians(correlation: float, pairs: int = 300, size: int = 3) -> tuple[Tensor, Tensor, float]:
    """Pairs with a known mutual information."""
    draws = generator(0, "gaussians", int(100 * correlation))
    x, noise = torch.randn(2, pairs, size, generator=draws)
    truth = -0.5 * size * math.log(1 - correlation**2)
    return x, correlation * x + math.sqrt(1 - correlation**2) * noise, truth


def estimate(correlation: float) -> tuple[Information, float]:
    x, y, truth = gaussians(correlation)
    return mutual_information(x, y, steps=80), truth


@pytest.mark.long
def test_it_grows_with_what_is_shared_and_stays_below_the_truth() -> None:
    (nothing, _), (some, truth_some), (much, truth_much) = (estimate(value) for value in (0.0, 0.7, 0.95))
    assert abs(nothing.nats) < 0.1
    assert 0.5 * truth_some < some.nats < truth_some + 3 * some.deviation
    assert 0.6 * truth_much < much.nats < truth_much + 3 * much.deviation


def test_the_same_pairs_and_seed_give_the_same_estimate() -> None:
    x, y, _ = gaussians(0.7, pairs=100)
    assert mutual_information(x, y, steps=20) == mutual_information(x, y, steps=20)
    assert mutual_information(x, y, steps=20) != mutual_information(x, y, steps=20, seed=1)


def test_a_feature_that_never_changes_does_no_harm() -> None:
    x, y, _ = gaussians(0.9, pairs=100)
    constant = torch.full((100, 1), 7.0)
    found = mutual_information(torch.cat([x, constant], 1), torch.cat([y, constant], 1), steps=30)
    assert math.isfinite(found.nats)
    assert found.nats > 0.3


def test_the_bound_is_donsker_and_varadhans() -> None:
    scores = torch.tensor([[2.0, 0.5, -1.0], [0.0, 1.0, 0.3], [-0.2, 0.1, 3.0]], dtype=torch.float64)
    joint = (2.0 + 1.0 + 3.0) / 3
    marginal = sum(math.exp(value) for value in (0.5, -1.0, 0.0, 0.3, -0.2, 0.1)) / 6
    assert float(donsker_varadhan(scores)) == pytest.approx(joint - math.log(marginal), rel=1e-12)
    x = torch.randn(20, 3, generator=generator(0, "x"))
    assert float(Critic(3, 3)(100 * x, -100 * x).detach().abs().max()) <= BOUND


def test_too_few_pairs_are_refused() -> None:
    x, y, _ = gaussians(0.5, pairs=49)
    with pytest.raises(ConfigError, match="50 pairs or more; got 49"):
        mutual_information(x, y)


@pytest.mark.long
def test_a_run_is_measured_with_its_own_protection(tmp_path: Path) -> None:
    found = {}
    for protection in ("none", "gaussian"):
        folder = tmp_path / protection
        run(toy_settings("fedpall", folder, hyper={"protection": protection}, train={"rounds": 1}))
        found[protection] = information_of_run(folder, steps=40)
        assert found[protection].pairs == 67
    assert found["none"].nats > found["gaussian"].nats


def test_only_fedpall_has_protections(tmp_path: Path) -> None:
    run(toy_settings("fedavg", tmp_path, train={"rounds": 1}))
    with pytest.raises(ConfigError, match="a run of fedavg"):
        information_of_run(tmp_path)
