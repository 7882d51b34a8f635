"""Nets trained on features: last rows, threads, seeds, and nets that only look; FedPall's tests have SGD in loops."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from support.exchanges import local_exchange
from support.halves import CLASSES, FEATURES
from support.nets import NetHalf
from support.toy import toy_settings

from common.numerics import generator
from common.storage import under_prefix
from strategies.parts.server_nets import (
    Discriminator,
    NetTraining,
    initial_net,
    new_discriminator,
    received_discriminator,
    retrain,
    sent_net,
    train_net,
)

TRAINING = NetTraining(epochs=2, learning_rate=0.1, momentum=0.9, weight_decay=0.01)


def rows(count, key=0):
    draws = generator(0, "rows", key)
    return torch.randn(count, FEATURES, generator=draws), torch.randint(CLASSES, (count,), generator=draws)


@pytest.mark.parametrize(("count", "trains"), [(1, False), (2, True), (9, True)])
def test_batch_norm_never_meets_a_single_row(count, trains):
    server = NetHalf()
    net = new_discriminator("amplifier", server)
    before = deepcopy(net.state_dict())
    features, _ = rows(count)
    train_net(net.train(), features, torch.arange(count) % 3, TRAINING, generator(0), batch_size=4)
    assert (not torch.equal(net.fc1.weight, before["fc1.weight"])) == trains


def test_training_does_not_depend_on_the_number_of_threads_it_finds():
    server = NetHalf()
    features, labels = rows(64)
    before, results = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        net = new_discriminator("amplifier", server)
        extra = retrain("amplifier", net, initial_net("amplifier", net), features, labels, TRAINING, server)
        assert torch.get_num_threads() == count
        results.append(extra)
    torch.set_num_threads(before)
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_a_discriminator_depends_on_seed_and_name():
    first, again, named, seeded = (
        new_discriminator(name, NetHalf(seed=seed)).fc1.weight
        for name, seed in (("a", 0), ("a", 0), ("b", 0), ("a", 1))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, named)
    assert not torch.equal(first, seeded)


def test_a_received_net_passes_gradients_on_and_stays_as_it_is(tmp_path):
    settings = toy_settings("adcol", tmp_path)
    size = int(local_exchange(settings).model.feature_size)
    sent = sent_net("net", initial_net("net", new_discriminator("net", NetHalf(feature_size=size))))
    local = local_exchange(settings, extra=sent)
    before = {name: tensor.clone() for name, tensor in sent.items()}
    net = received_discriminator("net", local)
    features = torch.randn(6, size, requires_grad=True)
    net(features).square().sum().backward()
    assert bool(features.grad.any())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert all(torch.equal(before[name], sent[name]) for name in sent)
    assert received_discriminator("net", local) is net
    reference = Discriminator(size, 3)
    reference.load_state_dict(under_prefix("net/", before))
    torch.testing.assert_close(net(features), reference.train()(features))


@pytest.mark.parametrize("wrong", [{"epochs": 0}, {"learning_rate": 0.0}, {"momentum": 1.0}, {"weight_decay": -1.0}])
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        NetTraining(**wrong)
