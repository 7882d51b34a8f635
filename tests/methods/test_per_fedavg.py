"""Per-FedAvg: pairs of batches by autograd, what is skipped, and scores of adapted models."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from support.exchanges import local_exchange
from support.toy import toy_settings

RATE = 0.05
"""Of round 2, half that of round 1."""
HALVING = {"schedule": "step", "step_rounds": 1, "step_factor": 0.5}
PLAIN = {"momentum": 0.0, "weight_decay": 0.0, "learning_rate": 2 * RATE, "rounds": 2, **HALVING}


def exchange(tmp_path, train=None, overrides=(), **hyper):
    train = {**PLAIN, **(train or {})}
    return local_exchange(
        toy_settings("per_fedavg", tmp_path, hyper=hyper, train=train, overrides=overrides), round_number=2
    )


def gradient(model, images, labels):
    """Of the mean cross-entropy, by parameter."""
    loss = torch.nn.functional.cross_entropy(model(images)[1], labels)
    return torch.autograd.grad(loss, list(model.parameters()))


def pairs_by_autograd(model, pairs, inner, outer):
    """``w' = w - a grad L(w; b1)``, ``w <- w - b grad L(w'; b2)``; batch norm's statistics see both batches."""
    for first, second in pairs:
        ahead = deepcopy(model)
        slopes = gradient(ahead, *first)
        with torch.no_grad():
            for parameter, slope in zip(ahead.parameters(), slopes, strict=True):
                parameter -= inner * slope
        slopes = gradient(ahead, *second)
        with torch.no_grad():
            for parameter, slope in zip(model.parameters(), slopes, strict=True):
                parameter -= outer * slope
            for buffer, moved in zip(model.buffers(), ahead.buffers(), strict=True):
                buffer.copy_(moved)
    return model


def assert_same(model, wanted):
    for (name, tensor), value in zip(model.state_dict().items(), wanted.state_dict().values(), strict=True):
        torch.testing.assert_close(tensor, value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("hyper", [{}, {"inner_rate": 0.2}, {"inner_rate": 0.0}], ids=str)
def test_an_epoch_is_pairs_of_batches(hyper, tmp_path):
    local = exchange(tmp_path, train={"epochs": 2}, **hyper)
    epochs = [list(local.batches("epoch", number)) for number in (1, 2)]
    assert [len(batches) for batches in epochs] == [3, 3]  # so the last one of each is skipped
    pairs = [batches[:2] for batches in epochs]
    wanted = pairs_by_autograd(deepcopy(local.model), pairs, hyper.get("inner_rate", RATE), RATE)
    assert local.run().steps == 2
    assert_same(local.model, wanted)


def test_a_single_batch_is_a_pair_of_halves(tmp_path):
    local = exchange(tmp_path, train={"batch_size": 32})
    ((images, labels),) = local.batches("epoch", 1)
    assert len(labels) == 25
    halves = (images[:12], labels[:12]), (images[12:], labels[12:])
    wanted = pairs_by_autograd(deepcopy(local.model), [halves], RATE, RATE)
    assert local.run().steps == 1
    assert_same(local.model, wanted)


def test_an_only_batch_of_fewer_than_four_samples_is_both_of_its_pair(tmp_path):
    local = exchange(tmp_path, overrides=("protocol.samples=3",))
    (batch,) = local.batches("epoch", 1)
    assert len(batch[1]) == 3
    wanted = pairs_by_autograd(deepcopy(local.model), [(batch, batch)], RATE, RATE)
    assert local.run().steps == 1
    assert_same(local.model, wanted)


def test_halves_of_a_batch_hold_all_views_of_their_samples(tmp_path):
    settings = toy_settings(
        "per_fedavg", tmp_path, overrides=("views=randconv",), train={**PLAIN, "batch_size": 32, "rounds": 1}
    )
    local = local_exchange(settings)
    seen = []
    forward = local.forward
    local.forward = lambda images, labels: (seen.append(labels.tolist()), forward(images, labels))[1]
    ((_, labels),) = local.batches("epoch", 1)
    local.run()
    plain = labels[: len(labels) // local.views].tolist()
    assert local.views > 1
    assert seen == [plain[:12] * local.views, plain[12:] * local.views]


def test_the_parameters_are_put_back_to_the_bit(tmp_path):
    """With momentum and decay the outer step starts from w, not from w'."""
    local = exchange(tmp_path, train={"weight_decay": 0.1, "learning_rate": 1e-60}, inner_rate=RATE)
    before = deepcopy(local.model)
    local.run()
    assert all(torch.equal(a, b) for a, b in zip(local.model.parameters(), before.parameters(), strict=True))


def test_adaptation_is_sgd_on_the_clients_own_batches(tmp_path):
    local = exchange(tmp_path, adapt_steps=2, inner_rate=0.1)
    wanted = deepcopy(local.model)
    for images, labels in list(local.batches("adapt"))[:2]:
        slopes = gradient(wanted, images, labels)
        with torch.no_grad():
            for parameter, slope in zip(wanted.parameters(), slopes, strict=True):
                parameter -= 0.1 * slope
    local.method.adapt(local)
    assert_same(local.model, wanted)


def test_adaptation_is_clipped_as_training_is(tmp_path):
    local = exchange(tmp_path, train={"clip_norm": 1e-6}, adapt_steps=1, inner_rate=0.1)
    before = deepcopy(local.model)
    local.method.adapt(local)
    with torch.no_grad():
        steps = [new - old for new, old in zip(local.model.parameters(), before.parameters(), strict=True)]
    assert 0 < float(torch.cat([step.flatten() for step in steps]).norm()) < 2e-7


@pytest.mark.parametrize(("train", "steps"), [({"batch_size": 32}, 5), ({"local_steps": 2}, 5), ({}, 7)], ids=str)
def test_adaptation_takes_all_its_steps_over_as_many_epochs_as_it_needs(train, steps, tmp_path):
    local = exchange(tmp_path, train=train, adapt_steps=steps, inner_rate=0.1)
    seen = []
    forward = local.forward
    local.forward = lambda images, labels: (seen.append(labels.tolist()), forward(images, labels))[1]
    local.method.adapt(local)
    assert len(seen) == steps
    epoch = [labels.tolist() for _, labels in local.batches("adapt")]
    assert seen[: len(epoch)] == epoch
    assert seen[len(epoch) : 2 * len(epoch)] != epoch  # another order
