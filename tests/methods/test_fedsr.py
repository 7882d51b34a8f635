"""FedSR: the two regularisers in loops through the method, draws and averages, and Gaussians that stay at home."""

from __future__ import annotations

import math

import pytest
import torch
from support.exchanges import local_exchange
from support.own_states import own_state
from support.runs import TouchedEngine, run
from support.toy import toy_settings

from common.models.base import Model
from common.models.specs import Small
from strategies.core.method import Batch
from strategies.fedsr import GAUSSIANS, TEST_SAMPLES, FedSR


def exchange(tmp_path, **hyper):
    """A device with Gaussians that differ from the initial ones."""
    local = local_exchange(toy_settings("fedsr", tmp_path, hyper=hyper))
    torch.manual_seed(0)
    with torch.no_grad():
        for p in local.model.get_submodule(GAUSSIANS).parameters():
            p += torch.randn_like(p)
    return local


def numbers(tensor):
    return tensor.detach().double().tolist()


def softplus(x):
    return math.log1p(math.exp(x))


def in_loops(mean, deviation, labels, module):
    """CMI: for every sample and feature the divergence of N(C m, (C s)^2) from N(r_m, r_s^2), as it is printed."""
    class_means, raw = numbers(module.means), numbers(module.raw_deviations)
    scale = softplus(float(module.raw_scale.detach()))
    total = 0.0
    for i, label in enumerate(labels.tolist()):
        for d in range(len(mean[i])):
            s, r = scale * deviation[i][d], softplus(raw[label][d])
            gap = scale * mean[i][d] - class_means[label][d]
            total += math.log(r) - math.log(s) + (s * s + gap * gap) / (2 * r * r) - 0.5
    return total / len(labels)


@pytest.mark.parametrize("fidelity", ["paper", "released"])
def test_the_terms_are_the_printed_ones(fidelity, tmp_path):
    local = exchange(tmp_path, norm=0.3, divergence=0.2, fidelity=fidelity)
    batch = local.forward(*next(local.batches("test")))
    terms = local.method.loss(batch, local).terms
    lengths = [math.sqrt(sum(x * x for x in row)) for row in numbers(batch.features)]
    norm = sum(length**2 if fidelity == "paper" else length for length in lengths) / len(lengths)
    gaussian = numbers(batch.extra["mean"]), numbers(batch.extra["deviation"])
    divergence = in_loops(*gaussian, batch.labels, local.model.get_submodule(GAUSSIANS))
    assert set(terms) == {"cross_entropy", "norm", "divergence"}
    assert terms["norm"].item() == pytest.approx(0.3 * norm, rel=1e-5)
    assert terms["divergence"].item() == pytest.approx(0.2 * divergence, rel=1e-4)


def test_the_gradient_reaches_network_and_gaussians(tmp_path):
    local = exchange(tmp_path, divergence=0.2, norm=0.0)
    module = local.model.get_submodule(GAUSSIANS)
    labels = torch.tensor([0, 2, 2])
    size = local.model.feature_size
    mean, deviation = torch.randn(3, size, requires_grad=True), torch.rand(3, size).add_(0.2).requires_grad_()
    gaussian = {"mean": mean, "deviation": deviation}
    batch = Batch(torch.empty(0), labels, torch.empty(3, size), torch.zeros(3, 4), 1, gaussian)
    local.method.loss(batch, local).terms["divergence"].backward()

    def value():
        return 0.2 * in_loops(numbers(mean), numbers(deviation), labels, module)

    for tensor in (mean, deviation, module.means, module.raw_deviations, module.raw_scale):
        for position in range(tensor.numel()):
            flat = tensor.data.view(-1)
            start = flat[position].item()
            flat[position] = start + 1e-2
            above = value()
            flat[position] = start - 1e-2
            below = value()
            flat[position] = start
            slope = (above - below) / 2e-2
            assert tensor.grad.view(-1)[position].item() == pytest.approx(slope, rel=2e-2, abs=2e-3)
    assert bool((module.means.grad[[1, 3]] == 0).all())  # classes that are not in the batch


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
    for _ in range(TEST_SAMPLES):
        drawn = mean + deviation * torch.randn(mean.shape, generator=draws)
        wanted += model.classify(drawn).softmax(1) / TEST_SAMPLES
    torch.testing.assert_close(logits.exp(), wanted)
    again = local.method.compute(model, images, local)[1]
    assert torch.equal(logits, again)  # batches of a test set may come in any order


def test_the_gaussians_stay_on_the_device_and_learn(tmp_path):
    settings = toy_settings("fedsr", tmp_path)
    done = run(settings, TouchedEngine(settings))
    local = local_exchange(settings)
    everything = local.model.state_dict()
    own = {name for name in everything if name.startswith(f"{GAUSSIANS}.")}
    state = sum(t.numel() * t.element_size() for name, t in everything.items() if name not in own)
    assert own == {f"{GAUSSIANS}.means", f"{GAUSSIANS}.raw_deviations", f"{GAUSSIANS}.raw_scale"}
    for item in (item for item in done.messages if item.request.train):
        assert item.reply.payload.part_bytes() == {"weights": state, "prototypes": 0, "extra": 0}
        assert item.message.part_bytes() == {"weights": state, "prototypes": 0, "extra": 0}
    folders = list((tmp_path / "clients").glob("*/*"))
    kept = [own_state(folder) for folder in sorted(folders)]
    assert len(kept) == 3
    for tensors in kept:
        assert set(tensors) == {f"model/{name}" for name in own}
        for name in own:
            assert not torch.equal(tensors[f"model/{name}"], everything[name])
    assert not torch.equal(kept[0][f"model/{GAUSSIANS}.means"], kept[1][f"model/{GAUSSIANS}.means"])


def test_without_its_terms_it_is_fedavg_of_the_probabilistic_network(tmp_path):
    settings = toy_settings("fedsr", tmp_path, hyper={"norm": 0.0, "divergence": 0.0})
    done = run(settings, TouchedEngine(settings))
    losses = [item.reply.answer.losses for item in done.messages if item.request.train]
    assert all(set(terms) == {"cross_entropy"} for terms in losses)
    for folder in (tmp_path / "clients").glob("*/*"):
        kept = own_state(folder)
        initial = local_exchange(settings).model.state_dict()
        assert all(torch.equal(tensor, initial[name.removeprefix("model/")]) for name, tensor in kept.items())


def test_the_network_depends_on_the_seed_alone():
    first, second, third = (FedSR().extend(Small().build(4, 16, 0), 3, seed) for seed in (0, 0, 1))
    assert isinstance(first, Model)
    assert first.feature_size == Small().build(4, 16, 0).feature_size
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.head.weight, third.head.weight)
