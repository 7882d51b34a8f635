"""Nets trained on features: SGD against loops in float64, momentum that goes on, last rows, and nets that only look."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from support.exchanges import local_exchange
from support.halves import CLASSES, FEATURES
from support.nets import LinearNet, NetHalf, epochs, numbers
from support.toy import toy_settings
from torch import nn

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


def oracle(net, momentum=0.9):
    return LinearNet(numbers(net.weight), net.bias.tolist(), TRAINING.learning_rate, momentum, TRAINING.weight_decay)


def assert_same(net, wanted, velocity=None):
    torch.testing.assert_close(
        net.weight.double(), torch.tensor(wanted.weight, dtype=torch.float64), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(net.bias.double(), torch.tensor(wanted.bias, dtype=torch.float64), rtol=1e-5, atol=1e-6)
    if velocity is not None:
        table = torch.tensor(wanted.velocity)
        torch.testing.assert_close(velocity["weight"], table[:, :-1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(velocity["bias"], table[:, -1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [8, 9, 11], ids=["full batches", "a last batch of one row", "a short batch"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_training_is_sgd_as_it_is_written(count, momentum):
    net = NetHalf().new_model().head
    features, labels = rows(count)
    wanted = oracle(net, momentum)
    for batches in epochs(2, count, 4, generator(0, "here")):
        wanted.epoch(numbers(features), labels.tolist(), batches)
    training = NetTraining(2, TRAINING.learning_rate, momentum, TRAINING.weight_decay)
    velocity = train_net(net, features, labels, training, generator(0, "here"), batch_size=4)
    assert_same(net, wanted, velocity if momentum else None)
    assert momentum or not any(bool(buffer.any()) for buffer in velocity.values())


def test_the_momentum_goes_on_from_round_to_round():
    server = NetHalf()
    net = server.new_model().head
    extra = initial_net("classifier", net)
    wanted = oracle(net)
    forgetful = deepcopy(net)
    for number in (1, 2, 3):
        server.round = number
        features, labels = rows(20, number)
        for batches in epochs(2, 20, 8, server.generator("train", "classifier")):
            wanted.epoch(numbers(features), labels.tolist(), batches)
        extra = retrain("classifier", server.new_model().head, extra, features, labels, TRAINING, server)
        train_net(forgetful, features, labels, TRAINING, server.generator("train", "classifier"), batch_size=8)
    net.load_state_dict(under_prefix("classifier/", extra))
    assert_same(net, wanted, under_prefix("momentum/classifier/", extra))
    assert not torch.allclose(net.weight, forgetful.weight, atol=1e-3)


def test_what_is_sent_is_the_net_without_its_momentum():
    extra = initial_net("classifier", nn.Linear(2, 2)) | initial_net("classifier two", nn.Linear(2, 2))
    assert set(sent_net("classifier", extra)) == {"classifier/weight", "classifier/bias"}
    assert set(extra) - set(sent_net("classifier", extra)) > {"momentum/classifier/weight"}


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
