"""MOON: the previous model is the client's own, a round without one has no gradient, and each option does something."""

from __future__ import annotations

import math

import pytest
import torch
from support.nets import shared_weights, trained
from support.own_states import own_state
from support.runs import TouchedEngine, run
from support.toy import toy_settings


def go(folder, *, rounds=2, **hyper):
    settings = toy_settings("moon", folder, hyper=hyper, train={"rounds": rounds})
    return run(settings, TouchedEngine(settings))


def test_without_a_previous_model_the_term_is_log_2_and_moves_nothing(tmp_path):
    strong = go(tmp_path / "strong", rounds=1, mu=5.0)
    go(tmp_path / "off", rounds=1, mu=0.0)
    for item in trained(strong):
        assert item.reply.answer.losses["contrast"] == pytest.approx(5.0 * math.log(2.0), abs=1e-6)
    ours = shared_weights(tmp_path / "strong")
    for name, tensor in shared_weights(tmp_path / "off").items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-6)


def test_the_second_round_contrasts_with_what_the_client_sent_in_the_first(tmp_path):
    done = go(tmp_path)
    sent = {i.request.client: i.reply.payload.weights for i in done.messages if i.request.round == 1}
    folder = next((tmp_path / "clients").glob("*"))
    assert len(sent) == 3
    for client, weights in sent.items():
        kept = own_state(folder / client, before=2)
        assert set(kept) == {f"local/previous/{name}" for name in weights}
        for name, tensor in weights.items():
            assert torch.equal(kept[f"local/previous/{name}"], tensor)
    second = [i.reply.answer.losses["contrast"] for i in trained(done) if i.request.round == 2]
    assert all(abs(loss - 5.0 * math.log(2.0)) > 1e-3 for loss in second)
