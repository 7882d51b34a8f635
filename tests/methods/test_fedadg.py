"""FedADG: a batch's three steps by hand, which net moves when, and the heads."""

from __future__ import annotations

import copy

import pytest
import torch
from support.exchanges import local_exchange
from support.toy import toy_settings
from torch.nn import functional as F

from common.errors import ConfigError
from common.models.specs import Small
from strategies.fedadg import DISCRIMINATOR, GENERATOR, FedADG, TaskHead


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


@pytest.mark.parametrize("fidelity", ["paper", "released", "released_pacs"])
def test_the_three_steps_of_a_batch_by_hand(fidelity, tmp_path):
    settings = toy_settings("fedadg", tmp_path, hyper={"fidelity": fidelity, "smoothing": 0.1, "weight": 0.3})
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
    classes[torch.arange(len(labels)), labels] = 0.7 if fidelity == "released_pacs" else 0.6
    features, logits = model(images)

    real, drawn = discriminator(generator(noise, classes).detach(), classes), features.detach()
    fake = discriminator(drawn, classes)
    if fidelity == "released_pacs":
        separation = mean_square(1 - real) + mean_square(fake)
    else:
        separation = -(mean_square(real) + mean_square(1 - fake))
    descend(discriminator.parameters(), separation, rate, decay)
    targets = torch.full((len(labels), 4), 0.1 / 3).scatter(1, labels[:, None], 0.9)
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


def test_the_first_phase_is_cross_entropy_alone(tmp_path):
    local = local_exchange(toy_settings("fedadg", tmp_path, hyper={"adversarial_epochs": 0}))
    before = copy.deepcopy(local.model)
    assert set(local.run().losses) == {"cross_entropy"}
    for name in (GENERATOR, DISCRIMINATOR):
        ours, theirs = part(local.model, name).parameters(), part(before, name).parameters()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_there_are_as_many_adversarial_epochs_as_released():
    assert [phase.epochs for phase in FedADG().phases(3)] == [3, 7]  # on PACS


def test_the_head_is_the_papers_or_the_models():
    assert isinstance(FedADG().extend(Small().build(4, 16, 0), 3, 0).head, TaskHead)
    own = Small().build(4, 16, 0)
    kept = FedADG(head="model").extend(Small().build(4, 16, 0), 3, 0)
    assert torch.equal(kept.head.weight, own.head.weight)


def test_the_code_for_pacs_has_nets_of_its_own():
    pacs = FedADG(fidelity="released_pacs").extend(Small().build(4, 16, 0), 3, 0)
    judge, size = part(pacs, DISCRIMINATOR), pacs.feature_size
    assert judge.projection.weight.shape == (2 * size, size)
    assert judge.fc1.weight.shape == (2 * size, 2 * size + 4)
    features, classes = torch.rand(3, size), 0.7 * torch.eye(4)[:3]
    behind = torch.cat([features @ judge.projection.weight.T, classes], 1)
    hidden = F.leaky_relu(behind @ judge.fc1.weight.T + judge.fc1.bias)
    wanted = (hidden @ judge.fc2.weight.T + judge.fc2.bias).sigmoid()[:, 0]
    torch.testing.assert_close(judge(features, classes), wanted)
    for layer in (judge.projection, judge.fc1, judge.fc2):
        bound = (6 / layer.in_features) ** 0.5  # Kaiming's, uniform
        assert 0.9 * bound < layer.weight.abs().max().item() <= bound
    assert pacs.head.fc1.weight.std().item() == pytest.approx((2 / size) ** 0.5, rel=0.1)  # Kaiming's, normal
    vlcs = FedADG(fidelity="released").extend(Small().build(4, 16, 0), 3, 0)
    assert part(vlcs, DISCRIMINATOR).projection.weight.shape == (2 * size, size + 4)
    assert vlcs.head.fc1.weight.abs().max().item() <= size**-0.5  # torch's own


def test_another_class_has_no_larger_target_than_the_label_s():
    FedADG(smoothing=0.75).extend(Small().build(4, 16, 0), 3, 0)
    with pytest.raises(ConfigError, match="at most 1 - 1/4 with 4 classes"):
        FedADG(smoothing=0.76).extend(Small().build(4, 16, 0), 3, 0)
