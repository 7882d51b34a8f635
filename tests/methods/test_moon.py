"""MOON: the previous model is the client's own, a round without one has no gradient, and each option does something."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support.own_states import own_state
from support.runs import Run, TouchedEngine, run
from support.toy import toy_settings

from server.run.checkpoint import Checkpoints


def weights_of(done: Run) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoints(done.folder / "checkpoint").load()
    assert checkpoint is not None
    return dict(checkpoint.state.weights)


def go(folder: Path, *, rounds: int = 2, **hyper: object) -> Run:
    settings = toy_settings("moon", folder, hyper=hyper, train={"rounds": rounds})
    return run(settings, TouchedEngine(settings))


def test_without_a_previous_model_the_term_is_log_2_and_moves_nothing(tmp_path):
    strong, off = go(tmp_path / "a", rounds=1, mu=5.0), go(tmp_path / "b", rounds=1, mu=0.0)
    term = 5.0 * math.log(2.0)
    reported = [item.reply.answer.losses for item in strong.messages if item.request.train]
    assert all(losses["contrast"] == pytest.approx(term, abs=1e-6) for losses in reported)
    for name, tensor in weights_of(off).items():
        torch.testing.assert_close(weights_of(strong)[name], tensor, rtol=0, atol=1e-6)


def test_the_second_round_contrasts_with_what_the_client_sent_in_the_first(tmp_path):
    done = go(tmp_path)
    sent = {i.request.client: i.reply.payload.weights for i in done.messages if i.request.round == 1}
    folder = next((tmp_path / "clients").glob("*"))
    for client, weights in sent.items():
        kept = own_state(folder / client, before=2)
        assert set(kept) == {f"local/previous/{name}" for name in weights}
        for name, tensor in weights.items():
            assert torch.equal(kept[f"local/previous/{name}"], tensor)
    second = [i.reply.answer.losses["contrast"] for i in done.messages if i.request.train and i.request.round == 2]
    assert all(abs(loss - 5.0 * math.log(2.0)) > 1e-3 for loss in second)
