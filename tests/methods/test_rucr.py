"""RUCR: contrast, prototypes, mixtures and re-balancing in loops; when it re-balances; what is fed back and scored."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from support.exchanges import local_exchange
from support.nets import (
    NetHalf,
    class_means_of,
    epoch,
    epochs,
    net_update,
    numbers,
    trained,
    unit,
    weighted_means,
)
from support.runs import TouchedEngine, run
from support.toy import CLASSES, toy_settings

from common.numerics import generator
from common.prototypes import PrototypeSet
from common.storage import GlobalState
from strategies.core.aggregation import average
from strategies.core.method import Batch
from strategies.rucr import PER_CLASS, RUCR

HELD = (((0, 3.0, 1), (2, 7.0, 2)), ((0, 5.0, 3),), ((0, 1.0, 4), (2, 2.0, 5)))


def exchange(tmp_path, labels=(0, 2, 3), counts=(30.0, 10.0, 10.0), rounds=2, **hyper):
    """A device in round 2, sent prototypes of some of the four classes."""
    settings = toy_settings("rucr", tmp_path, hyper=hyper, train={"rounds": rounds})
    size = int(local_exchange(settings).model.feature_size)
    vectors = torch.rand(len(labels), size, generator=generator(0, "table")) / 10
    table = PrototypeSet(vectors, torch.tensor(labels), torch.tensor(counts))
    return local_exchange(settings, prototypes=table, round_number=2)


def test_the_readings_have_what_the_official_command_sets():
    official = {
        "rounds with re-balancing": "the last 20, only to score",
        "G in round 1": "that of the initial model",
        "share of a mixture": "in (0.35, 0.95), two decimals",
        "synthetic features": "100 of a class, without replacement, in batches of 256",
        "epochs of re-balancing": 50,
        "rate of re-balancing": 0.01,
        "weight of the contrast": 0.15,
        "tau": 0.9,
    }
    readings = {reading.about: reading for reading in RUCR.readings}
    assert official.items() <= {about: reading.released for about, reading in readings.items()}.items()
    assert readings["synthetic features"].ours.startswith(f"{PER_CLASS} ")


@pytest.mark.parametrize("temperature", [1.0, 0.15])
def test_the_contrast_is_the_printed_one(temperature, tmp_path):
    local = exchange(tmp_path, contrast=0.9, temperature=temperature)
    features = torch.rand(8, local.feature_size, generator=generator(0, "features"), requires_grad=True)
    labels = torch.arange(8) % 4  # no client has class 1
    batch = Batch(torch.empty(0), labels, features, torch.zeros(8, 4))
    term = local.method.loss(batch, local).terms["contrast"]
    rows = dict(zip([0, 2, 3], numbers(local.prototypes.vectors), strict=True))
    ratios = {0: 0.6, 2: 0.2, 3: 0.2}
    wanted = 0.0
    for z, label in zip(numbers(features), labels.tolist(), strict=True):
        if label not in rows:
            continue
        logits = [0.0] * CLASSES  # a class that no client has keeps the logit 0
        for c, g in rows.items():
            logits[c] = sum(a * b for a, b in zip(unit(z), unit(g), strict=True)) / temperature
        logits[label] += math.log(ratios[label])
        wanted += math.log(sum(math.exp(v) for v in logits)) - logits[label]
    assert term.item() == pytest.approx(0.9 * wanted / 8, rel=1e-4)
    term.backward()
    assert bool((features.grad[labels == 1] == 0).all())
    assert bool(features.grad[labels == 0].any())


def test_prototypes_are_weighted_means_of_means_at_unit_length():
    server = NetHalf(exchange="rebalance", round=1)
    means = [class_means_of(*rows) for rows in HELD]
    state = GlobalState({"head.weight": torch.zeros(1)}, round=0)
    state = RUCR().aggregate(state, [net_update(i, part) for i, part in enumerate(means)], server)
    assert state.prototypes.labels.tolist() == [0, 2]
    for label, vector in weighted_means(means, unit).items():
        assert state.prototypes.of_class(label)[0].tolist() == pytest.approx(vector, rel=1e-5)
    assert state.prototypes.weights.tolist() == [9.0, 9.0]


def test_synthetic_features_are_mixtures(tmp_path):
    local = exchange(tmp_path)
    features = 5 * torch.eye(local.feature_size)[:3]  # at unit length each has a place of its own
    made = local.method.synthesise(features, local)
    mixed, labels = made["synthetic/features"], made["synthetic/labels"]
    assert labels.tolist() == [0] * 50 + [2] * 50 + [3] * 50
    rows = {label: local.prototypes.of_class(label)[0] for label in (0, 2, 3)}
    shares, chosen = [], []
    for row, label in zip(mixed, labels.tolist(), strict=True):
        g = rows[label]
        share = float(row[3:].sum() / g[3:].sum())  # there the own feature is 0
        shares.append(share)
        own = (row - share * g) / (1 - share)
        chosen.append(int(own.argmax()))
        torch.testing.assert_close(own, torch.eye(local.feature_size)[chosen[-1]], rtol=1e-3, atol=1e-3)
    assert 0.2 - 1e-4 <= min(shares) < 0.3
    assert 0.7 < max(shares) <= 0.8 + 1e-4
    assert set(chosen) == {0, 1, 2}


@pytest.mark.parametrize("rebalance_epochs", [None, 3])
def test_the_classifier_is_rebalanced_by_sgd_as_it_is_written(rebalance_epochs, tmp_path, monkeypatch):
    monkeypatch.setattr("strategies.rucr.PER_CLASS", 11)
    local = exchange(tmp_path, rebalance_epochs=rebalance_epochs, rebalance_rate=0.05)
    made = local.method.synthesise(local.features()[0], local)
    wanted = deepcopy(local.model.head)
    optimizer = torch.optim.SGD(wanted.parameters(), lr=0.05)
    for batches in epochs(rebalance_epochs or 1, 33, 8, local.generator("rebalance")):  # 33: the last batch has one row
        epoch(wanted, optimizer, made["synthetic/features"], made["synthetic/labels"], batches)
    body = {name: t.clone() for name, t in local.model.state_dict().items() if name.startswith("backbone.")}
    local.kept = made
    sent = local.method.respond(local)
    for name, tensor in wanted.state_dict().items():
        torch.testing.assert_close(sent.extra[f"head.{name}"], tensor, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(local.model.state_dict()[name], t) for name, t in body.items())


def test_the_next_round_trains_on_the_rebalanced_classifier_and_the_averaged_body(tmp_path):
    settings = toy_settings("rucr", tmp_path, train={"rounds": 3})
    done = run(settings, TouchedEngine(settings))
    sizes = done.summary["clients"]
    for number in (1, 2):
        bodies = trained(done, "train")
        sent = [i.reply.payload.weights for i in bodies if i.request.round == number]
        weights = [sizes[i.request.client] for i in bodies if i.request.round == number]
        following = next(i.message.weights for i in bodies if i.request.round == number + 1)
        answers = [i for i in trained(done, "rebalance") if i.request.round == number]
        assert all(set(i.message.weights) == set(following) for i in answers)
        heads = [i.reply.payload.extra for i in answers]
        assert all(set(head) == (set() if number == 1 else {"head.weight", "head.bias"}) for head in heads)
        for name, tensor in average(sent, weights).items():
            assert torch.equal(answers[0].message.weights[name], tensor)
            if name not in heads[0]:
                assert torch.equal(following[name], tensor)
        for name, tensor in average(heads, weights).items():
            assert torch.equal(following[name], tensor)
            assert not torch.equal(following[name], answers[0].message.weights[name])


def test_the_classifiers_batch_norm_keeps_its_statistics(tmp_path):
    local = exchange(tmp_path)
    local.method = replace(local.method, rebalance_rate=0.1)
    norm = torch.nn.BatchNorm1d(local.feature_size)
    local.model.head = torch.nn.Sequential(norm, torch.nn.Linear(local.feature_size, CLASSES)).train()
    local.kept = local.method.synthesise(local.features()[0], local)
    before = {name: tensor.clone() for name, tensor in local.model.head.state_dict().items()}
    sent = local.method.respond(local).extra
    for name in ("0.running_mean", "0.running_var", "0.num_batches_tracked"):
        assert torch.equal(sent[f"head.{name}"], before[name])
    assert not torch.equal(sent["head.0.weight"], before["0.weight"])
