"""FedHEAL against its released additive form in NumPy: masks, histories, shares and the next model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.exchanges import local_exchange
from support.halves import PARAMETERS, Half, clients, model_state, run_server, updates
from support.nets import kept, shared_weights
from support.runs import run
from support.toy import toy_settings

from common.storage import tensors_sha256
from strategies.core.aggregation import cap_shares
from strategies.core.method import Trained, Update
from strategies.fedheal import FedHEAL
from strategies.parts.heal import FALLS, MASK, ROUNDS, packed, unpacked

FLOATS = ["layer.weight", "layer.bias", "norm.running_mean", "norm.running_var"]


def double(state):
    return {name: tensor.double().numpy() if tensor.is_floating_point() else tensor for name, tensor in state.items()}


class Released:
    """The released code's arithmetic for one run: signs of ``w^t - w_k``, masked updates, weights that are added up."""

    def __init__(self, threshold, momentum, count):
        self.threshold, self.momentum = threshold, momentum
        self.history, self.rounds = [None] * count, [0] * count
        self.distance, self.step, self.weight = {}, {}, {}

    def mask(self, k, name, update):
        positive = (update >= 0).astype(float)
        t, history = self.rounds[k], (self.history[k] or {}).get(name)
        if t == 0:
            found, after = np.ones_like(positive), positive
        else:
            agreement = np.where(positive == 1, history, 1 - history)
            found, after = (agreement > self.threshold).astype(float), (history * t + positive) / (t + 1)
        self.history[k] = {**(self.history[k] or {}), name: after}
        return found

    def round(self, state, models):
        masks, masked = {}, {}
        for k, model in models.items():
            masks[k] = {name: self.mask(k, name, state[name] - model[name]) for name in FLOATS}
            masked[k] = {name: (state[name] - model[name]) * masks[k][name] for name in FLOATS}
            self.rounds[k] += 1
            self.distance[k] = sum(np.sqrt((masked[k][name] ** 2).sum()) for name in PARAMETERS)
        for k in models:
            share = self.distance[k] / sum(self.distance.values())
            self.step[k] = (1 - self.momentum) * self.step.get(k, 0) + self.momentum * share
            self.weight[k] = self.weight.get(k, 1 / len(models)) + self.step[k]
        shares = {k: self.weight[k] / sum(self.weight[j] for j in models) for k in models}
        after = dict(state)
        for name in FLOATS:
            mass = sum(shares[k] * masks[k][name] for k in models)
            moved = sum(shares[k] * masked[k][name] for k in models)
            after[name] = state[name] - np.where(mass > 0, moved / np.where(mass > 0, mass, 1), 0)
        return after, masks, shares


def float64(state):
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in state.items()}


def sent(method, folder, state, model, kept, client):
    """What the device's half makes of a trained model; its context has float64 tensors."""
    local = local_exchange(toy_settings("fedheal", folder), kept=kept)
    local.weights = state
    local.model = torch.nn.Module()
    local.model.state_dict = lambda: model
    upload = method.upload(local, Trained(None, 1, {}))
    return Update(upload.weights, extra=upload.extra, client=client), upload.local


@pytest.mark.parametrize(("threshold", "momentum"), [(0.3, 0.4), (0.0, 1.0), (0.6, 0.0), (-1.0, 0.4)])
def test_four_rounds_are_the_released_ones(threshold, momentum, tmp_path):
    """Masks, histories, shares and the model, in float64; the third client's updates are the largest by far."""
    method, half, everyone = FedHEAL(threshold=threshold, momentum=momentum), Half(largest_share=1.0), clients()
    twin = Released(threshold, momentum, len(everyone))
    state = method.initial_state(float64(half.shared), half)
    expected = double(float64(half.shared))
    own = [{} for _ in everyone]
    for number in range(1, 5):
        trained = [float64(model_state("client", number, index)) for index in range(3)]
        trained[2]["layer.weight"] *= 5
        if number == 1:
            trained[0]["layer.bias"] = state.weights["layer.bias"]  # updates of exactly 0
        replies = []
        for index, client in enumerate(everyone):
            reply, own[index] = sent(method, tmp_path, state.weights, trained[index], own[index], client)
            replies.append(reply)
        expected, masks, shares = twin.round(expected, {k: double(model) for k, model in enumerate(trained)})
        earned, _ = method.earned_shares(state, replies, half)
        state = method.aggregate(state, replies, half)
        assert np.array(earned) / sum(earned) == pytest.approx([shares[k] for k in range(3)], abs=1e-12)
        for name in FLOATS:
            np.testing.assert_allclose(state.weights[name].numpy(), expected[name], rtol=0, atol=1e-12)
            for k, reply in enumerate(replies):
                found = unpacked(reply.extra[name + MASK], state.weights[name].shape)
                assert np.array_equal(found.numpy(), masks[k][name].astype(bool))
                history = own[k][FALLS + name].double().numpy() / int(own[k][ROUNDS])
                np.testing.assert_allclose(history, twin.history[k][name], rtol=0, atol=1e-12)
    if threshold >= 0:
        assert not all(masks[k][name].all() for k in range(3) for name in FLOATS), "nothing was masked"
    if momentum:
        assert shares[2] > 0.4
    else:
        assert list(shares.values()) == pytest.approx([1 / 3] * 3)


def test_who_sits_out_keeps_its_numbers_and_counts_in_the_sum():
    method, half = FedHEAL(mask=False), Half()
    first, second, third = run_server(method, [updates(1), updates(2, who=(0, 2)), updates(3)], half)[1:]
    for name in ("movement", "gain", "lead"):
        assert first.extra[name][1] == second.extra[name][1] != third.extra[name][1]
    share = second.extra["movement"][0] / second.extra["movement"].sum()
    assert second.extra["gain"][0] == pytest.approx(float(0.6 * first.extra["gain"][0] + 0.4 * share))


def test_no_client_earns_more_than_the_largest_share():
    """A client that moves a thousand times as far as the others."""
    replies = updates(1)
    far = {name: 1e3 * value if name in PARAMETERS else value for name, value in replies[2].weights.items()}
    replies[2] = replace(replies[2], weights=far)
    method = FedHEAL(momentum=1.0, mask=False)
    for largest in (1.0, 0.5, 0.1):
        half = Half(largest_share=largest)
        shares, _ = method.earned_shares(run_server(method, [], half)[0], replies, half)
        wanted = {1.0: 2 / 3, 0.5: 0.5, 0.1: 1 / 3}[largest]
        assert shares[2] / sum(shares) == pytest.approx(wanted, abs=0.01 if largest == 1.0 else 1e-9)
    assert cap_shares([1.0, 9.0], 0.5) == [1.0, 9.0], "of two there is no majority"


def test_updates_of_zero_leave_the_model():
    method, half = FedHEAL(mask=False), Half()
    replies = [replace(update, weights=half.shared) for update in updates(1)]
    state = run_server(method, [replies], half)[1]
    assert tensors_sha256(state.weights) == tensors_sha256(half.shared)
    assert float(state.extra["lead"].abs().sum()) == 0


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64])
def test_bits_come_back(count):
    mask = torch.rand(count, generator=torch.Generator().manual_seed(count)) < 0.5
    assert packed(mask).shape == ((count + 7) // 8,)
    assert torch.equal(unpacked(packed(mask), mask.shape), mask)


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("off", [{"threshold": -1.0}, {"mask": False}], ids=str)
def test_without_its_parts_it_is_its_base_bit_for_bit(off, tmp_path):
    """Of FedHEAL itself the conformance tests know it; one client's last batch is short, one lacks a class."""
    run(toy_settings("fpl", tmp_path / "base", hyper={"weighting": "uniform"}))
    run(toy_settings("fpl_heal", tmp_path / "ours", hyper={"weighting": "uniform", "momentum": 0.0, **off}))
    assert tensors_sha256(shared_weights(tmp_path / "ours")) == tensors_sha256(shared_weights(tmp_path / "base"))


def test_without_a_mask_nothing_is_kept(tmp_path):
    run(toy_settings("fedheal", tmp_path, hyper={"mask": False}))
    assert kept(tmp_path) == {}
