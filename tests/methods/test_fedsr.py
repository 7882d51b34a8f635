"""FedSR: the two regularisers in loops through the method, draws and averages."""

from __future__ import annotations

import pytest
import torch
from support.exchanges import local_exchange
from support.toy import toy_settings

from common.models.base import Model
from common.models.specs import Small
from strategies.core.method import Batch
from strategies.fedsr import GAUSSIANS, FedSR


def exchange(tmp_path, **hyper):
    """A device with Gaussians that differ from the initial ones."""
    local = local_exchange(toy_settings("fedsr", tmp_path, hyper=hyper))
    torch.manual_seed(0)
    with torch.no_grad():
        for p in local.model.get_submodule(GAUSSIANS).parameters():
            p += torch.randn_like(p)
    return local


def in_loops(mean, deviation, means, raw_deviations, raw_scale, labels):
    """CMI: for every sample and feature the divergence of N(C m, (C s)^2) from N(r_m, r_s^2), as it is printed."""
    scale = torch.log(1 + torch.exp(raw_scale))
    total = 0.0
    for i, label in enumerate(labels.tolist()):
        for d in range(mean.shape[1]):
            s, r = scale * deviation[i, d], torch.log(1 + torch.exp(raw_deviations[label, d]))
            gap = scale * mean[i, d] - means[label, d]
            total = total + torch.log(r) - torch.log(s) + (s * s + gap * gap) / (2 * r * r) - 0.5
    return total / len(labels)


@pytest.mark.parametrize("fidelity", ["paper", "released"])
def test_the_terms_are_the_printed_ones_in_value_and_gradient(fidelity, tmp_path):
    """Classes 1 and 3 are not in the batch: their Gaussians have no gradient."""
    local = exchange(tmp_path, norm=0.3, divergence=0.2, fidelity=fidelity)
    module, size, labels = local.model.get_submodule(GAUSSIANS), local.model.feature_size, torch.tensor([0, 2, 2])
    features, mean = torch.randn(2, 3, size).requires_grad_().unbind()
    deviation = torch.rand(3, size).add_(0.2).requires_grad_()
    leaves = (mean, deviation, module.means, module.raw_deviations, module.raw_scale)
    batch = Batch(torch.empty(0), labels, features, torch.zeros(3, 4), 1, {"mean": mean, "deviation": deviation})
    terms = local.method.loss(batch, local).terms
    assert set(terms) == {"cross_entropy", "norm", "divergence"}

    twins = [leaf.detach().double().requires_grad_() for leaf in (features, *leaves)]
    squares = [sum(x * x for x in row) for row in twins[0]]
    norm = sum(square if fidelity == "paper" else square.sqrt() for square in squares) / 3
    divergence = in_loops(*twins[1:], labels)
    for name, wanted, found, oracle in (
        ("norm", 0.3 * norm, [features], twins[:1]),
        ("divergence", 0.2 * divergence, leaves, twins[1:]),
    ):
        torch.testing.assert_close(terms[name].double(), wanted, rtol=1e-4, atol=0)
        for ours, theirs in zip(
            torch.autograd.grad(terms[name], found), torch.autograd.grad(wanted, oracle), strict=True
        ):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-6)


def test_training_draws_a_fresh_feature_and_classifies_it(tmp_path):
    local = exchange(tmp_path)
    images, labels = next(local.batches("test"))
    draws = local.generator("latent noise")
    for _ in range(2):
        batch = local.forward(images, labels)
        noise = torch.randn(batch.features.shape, generator=draws)
        wanted = batch.extra["mean"] + noise * batch.extra["deviation"]
        torch.testing.assert_close(batch.features, wanted)
        torch.testing.assert_close(batch.logits, local.model.classify(wanted))
    assert bool((batch.extra["deviation"] > 0).all())


def test_scores_average_the_probabilities_of_the_draws(tmp_path):
    local = exchange(tmp_path)
    images, _ = next(local.batches("test"))
    model = local.model.eval()
    features, logits, gaussian = local.method.compute(model, images, local)
    mean, deviation = model.distribution(images)
    assert torch.equal(features, mean)
    assert torch.equal(gaussian["deviation"], deviation)
    draws = local.generator("latent noise of tests")
    wanted = torch.zeros_like(logits)
    for _ in range(20):  # as released
        drawn = mean + deviation * torch.randn(mean.shape, generator=draws)
        wanted += model.classify(drawn).softmax(1) / 20
    torch.testing.assert_close(logits.exp(), wanted)
    again = local.method.compute(model, images, local)[1]
    assert torch.equal(logits, again)  # batches of a test set may come in any order


def test_the_network_depends_on_the_seed_alone():
    first, second, third = (FedSR().extend(Small().build(4, 16, 0), 3, seed) for seed in (0, 0, 1))
    assert isinstance(first, Model)
    assert first.feature_size == Small().build(4, 16, 0).feature_size
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.head.weight, third.head.weight)
