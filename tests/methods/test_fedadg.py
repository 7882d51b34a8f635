"""FedADG: a batch's three steps by hand, which net moves when, and a discriminator that stays at home."""

from __future__ import annotations

import copy

import pytest
import torch
from support.exchanges import local_exchange
from support.own_states import own_state
from support.runs import Run, TouchedEngine, run
from support.toy import toy_settings
from torch.nn import functional as F

from common.models.specs import Small
from server.run.checkpoint import Checkpoints
from strategies.fedadg import DISCRIMINATOR, GENERATOR, FedADG, TaskHead

NETS = {"adversarial_epochs": 1}
FIDELITIES = ["paper", "released", "released_pacs"]


def go(folder, *, epochs=1, rounds=2, **hyper) -> Run:
    settings = toy_settings(
        "fedadg",
        folder,
        hyper={**NETS, **hyper},
        train={"epochs": epochs, "rounds": rounds},
    )
    return run(settings, TouchedEngine(settings))


def part(model, name):
    return model.get_submodule(name)


def network(model):
    return [p for key, p in model.named_parameters() if not key.startswith((f"{GENERATOR}.", f"{DISCRIMINATOR}."))]


def descend(parameters, loss, rate, decay):
    """One step of fresh SGD (momentum has no history yet)."""
    parameters = list(parameters)
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for p, g in zip(parameters, gradients, strict=True):
            p -= rate * (g + decay * p)


def mean_square(values):
    return sum(value * value for value in values) / len(values)


@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_the_three_steps_of_a_batch_by_hand(fidelity, tmp_path):
    settings = toy_settings("fedadg", tmp_path, hyper={**NETS, "fidelity": fidelity, "smoothing": 0.1, "weight": 0.3})
    local, method = local_exchange(settings), settings.method
    local.phase, phase = 1, method.phases(1)[1]
    local._prepare(phase)
    images, labels = next(local.batches("test"))
    model = copy.deepcopy(local.model).requires_grad_(True)
    generator, discriminator = part(model, GENERATOR), part(model, DISCRIMINATOR)
    losses = method.step(local, images, labels)

    rate, decay = 0.7 * local.train.learning_rate, local.train.weight_decay
    noise = torch.rand(len(labels), generator.noise_size, generator=local.generator("generator noise"))
    classes = torch.zeros(len(labels), 4)
    classes[torch.arange(len(labels)), labels] = 0.6
    features, logits = model(images)

    real, drawn = discriminator(generator(noise, classes).detach(), classes), features.detach()
    fake = discriminator(drawn, classes)
    if fidelity == "released_pacs":
        separation = mean_square(1 - real) + mean_square(fake)
    else:
        separation = -(mean_square(real) + mean_square(1 - fake))
    descend(discriminator.parameters(), separation, rate, decay)
    targets = 0.9 * F.one_hot(labels, 4) + 0.1 / 4
    smoothed = -(targets * logits.log_softmax(1)).sum(1).mean()
    alignment = mean_square(1 - discriminator(features, classes))
    descend(network(model), 0.7 * smoothed + 0.3 * alignment, local.train.learning_rate, decay)
    wanted = {"cross_entropy": 0.7 * smoothed, "alignment": 0.3 * alignment, "separation": separation}
    if fidelity != "released":
        scores = discriminator(generator(noise, classes), classes)
        wanted["pursuit"] = mean_square(scores if fidelity == "released_pacs" else 1 - scores)
        descend(generator.parameters(), wanted["pursuit"], rate, decay)

    assert {name: value.item() for name, value in losses.terms.items()} == {
        name: pytest.approx(value.item(), rel=1e-5) for name, value in wanted.items()
    }
    for (name, ours), oracle in zip(local.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), oracle.detach(), rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_the_generator_trains_unless_it_is_cut_off(fidelity, tmp_path):
    settings = toy_settings("fedadg", tmp_path, hyper={**NETS, "fidelity": fidelity})
    local = local_exchange(settings)
    before = copy.deepcopy(local.model)
    trained = local.run()
    moved = {
        name: not all(
            torch.equal(a, b)
            for a, b in zip(part(local.model, name).parameters(), part(before, name).parameters(), strict=True)
        )
        for name in (GENERATOR, DISCRIMINATOR, "backbone", "head")
    }
    assert moved == {GENERATOR: fidelity != "released", DISCRIMINATOR: True, "backbone": True, "head": True}
    assert ("pursuit" in trained.losses) is (fidelity != "released")
    assert trained.steps == 2 * 3  # 25 images in batches of 8, the last one of 9, twice


def test_the_first_phase_is_cross_entropy_alone(tmp_path):
    settings = toy_settings("fedadg", tmp_path, hyper={**NETS, "adversarial_epochs": 0})
    local = local_exchange(settings)
    before = copy.deepcopy(local.model)
    trained = local.run()
    assert set(trained.losses) == {"cross_entropy"}
    for name in (GENERATOR, DISCRIMINATOR):
        ours, theirs = part(local.model, name).parameters(), part(before, name).parameters()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_network_trains_at_the_run_s_rate_throughout(tmp_path):
    settings = toy_settings("fedadg", tmp_path, hyper={**NETS, "rate": 0.5})
    local = local_exchange(settings)
    for phase in settings.method.phases(3):
        local._prepare(phase)
        assert local.optimizer.param_groups[0]["lr"] == local.train.learning_rate
        assert len(local.optimizer.param_groups[0]["params"]) == len(network(local.model))


def test_there_are_as_many_adversarial_epochs_as_released():
    assert [phase.epochs for phase in FedADG().phases(5)] == [5, 7]


def test_the_discriminator_stays_on_the_device(tmp_path):
    done = go(tmp_path)
    everything = local_exchange(toy_settings("fedadg", tmp_path, hyper=NETS)).model.state_dict()
    own = {name for name in everything if name.startswith(f"{DISCRIMINATOR}.")}
    state = sum(t.numel() * t.element_size() for name, t in everything.items() if name not in own)
    assert own
    assert any(name.startswith(f"{GENERATOR}.") for name in everything)
    for item in (item for item in done.messages if item.request.train):
        assert item.reply.payload.part_bytes() == {"weights": state, "prototypes": 0, "extra": 0}
        assert item.message.part_bytes() == {"weights": state, "prototypes": 0, "extra": 0}
    kept = [own_state(folder) for folder in sorted((tmp_path / "clients").glob("*/*"))]
    assert [set(tensors) for tensors in kept] == [{f"model/{name}" for name in own}] * 3
    name = f"model/{DISCRIMINATOR}.projection.weight"
    assert not torch.equal(kept[0][name], kept[1][name])


def test_the_mean_is_of_equal_clients_or_of_their_samples(tmp_path):
    for weighting in ("uniform", "samples"):
        done = go(tmp_path / weighting, rounds=1, weighting=weighting)
        sent = [item for item in done.messages if item.request.train]
        sizes = [done.summary["clients"][item.request.client] if weighting == "samples" else 1 for item in sent]
        checkpoint = Checkpoints(done.folder / "checkpoint").load()
        for name in (f"{GENERATOR}.fc1.weight", "backbone.conv1.weight"):
            tensors = [item.reply.payload.weights[name].double() for item in sent]
            mean = sum(size * tensor for size, tensor in zip(sizes, tensors, strict=True)) / sum(sizes)
            torch.testing.assert_close(checkpoint.state.weights[name].double(), mean, rtol=1e-5, atol=1e-7)


def test_the_head_is_the_papers_or_the_models():
    assert isinstance(FedADG(**NETS).extend(Small().build(4, 16, 0), 3, 0).head, TaskHead)
    own = Small().build(4, 16, 0)
    kept = FedADG(**NETS, head="model").extend(Small().build(4, 16, 0), 3, 0)
    assert torch.equal(kept.head.weight, own.head.weight)


def test_nets_scale_with_the_features():
    size = Small().build(4, 16, 0).feature_size
    model = FedADG().extend(Small().build(4, 16, 0), 3, 0)
    assert part(model, GENERATOR).noise_size == 4 * size
    assert part(model, GENERATOR).fc1.out_features == 8 * size
    assert part(model, DISCRIMINATOR).fc1.out_features == 2 * size
