"""ADCOL: the discriminator's training and the divergence written out, what leaves a device, and what it reduces to."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.exchanges import local_exchange
from support.halves import FEATURES
from support.nets import NetHalf, epoch, epochs, net_update, numbers
from support.runs import TouchedEngine, run
from support.toy import toy_settings

from common.numerics import generator
from common.storage import under_prefix
from strategies.adcol import ADCOL
from strategies.core.method import Batch
from strategies.parts.server_nets import NetTraining, initial_net, new_discriminator, sent_net


def test_the_server_trains_the_discriminator_to_name_the_client():
    how = NetTraining(epochs=3, learning_rate=0.05, momentum=0.9, weight_decay=0.01)
    method, server = ADCOL(server_training=how), NetHalf()
    state = method.initial_state({}, server)
    net = new_discriminator("discriminator", server)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    for number in (1, 2):
        server.round = number
        draws = generator(0, "uploads", number)
        parts = {0: torch.rand(5, FEATURES, generator=draws), 2: torch.rand(12, FEATURES, generator=draws)}
        state = method.aggregate(state, [net_update(i, features=part) for i, part in parts.items()], server)
        features, owners = torch.cat([*parts.values()]), torch.tensor([0] * 5 + [2] * 12)
        # 17: the last row joins the batch before it, because the discriminator has batch norm
        for batches in epochs(3, 17, 8, server.generator("train", "discriminator"), single=False):
            epoch(net, optimizer, features, owners, batches)
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(under_prefix("discriminator/", state.extra)[name], tensor)
    download = method.download(state, server)
    assert set(download.extra) == {f"discriminator/{name}" for name in net.state_dict()}
    assert not download.weights


def exchange(tmp_path, **hyper):
    settings = toy_settings("adcol", tmp_path, hyper=hyper)
    size = int(local_exchange(settings).model.feature_size)
    net = new_discriminator("discriminator", NetHalf(feature_size=size))
    return local_exchange(settings, extra=sent_net("discriminator", initial_net("discriminator", net))), net


def test_the_divergence_is_the_printed_one(tmp_path):
    local, net = exchange(tmp_path, divergence=0.3)
    features = torch.rand(6, local.feature_size, generator=generator(0, "features"), requires_grad=True)
    batch = Batch(torch.empty(0), torch.arange(6) % 4, features, torch.zeros(6, 4))
    terms = local.method.loss(batch, local).terms
    wanted = 0.0
    for row in numbers(net.train()(features)):
        total = sum(math.exp(value) for value in row)
        wanted -= sum(math.log(3 * math.exp(value) / total) for value in row) / 3
    assert terms["divergence"].item() == pytest.approx(0.3 * wanted / 6, rel=1e-3)
    terms["divergence"].backward()
    assert bool(features.grad.any())


def test_a_claim_of_more_features_than_samples_is_refused(tmp_path):
    settings = toy_settings("adcol", tmp_path)

    def edit(request, payload):
        if request.client != "dark-0" or not request.train:
            return payload
        return replace(payload, extra={"features": payload.extra["features"].repeat(2, 1)})

    done = run(settings, TouchedEngine(settings, edit=edit))
    refused = [row for row in done.replies() if row["status"] == "refused"]
    assert {row["client"] for row in refused} == {"dark-0"}
    assert all("features is" in row["reason"] for row in refused)
