"""FedDyn against Algorithm 1 in loops: h on the server, lambda on the client, the gradient between them."""

from __future__ import annotations

import pytest
import torch
from support.exchanges import local_exchange
from support.halves import PARAMETERS, SIZES, Half, elements, model_state, run_server, updates
from support.own_states import own_state
from support.runs import TouchedEngine, run
from support.toy import Toy, toy_settings

from strategies.core.aggregation import Mean
from strategies.feddyn import FedDyn

ALPHA = 0.05
ROUNDS = [updates(1), updates(2, who=(0, 2)), updates(3)]  # in the second one client is missing: C stays 3


def oracle(rounds, alpha):
    """Algorithm 1's server, element by element."""
    w = {name: elements(model_state("initial")[name]) for name in PARAMETERS}
    h = {name: [0.0] * len(values) for name, values in w.items()}
    for sent in rounds:
        for name in PARAMETERS:
            for i in range(len(w[name])):
                client_values = [elements(update.weights[name])[i] for update in sent]
                h[name][i] -= alpha / len(SIZES) * sum(value - w[name][i] for value in client_values)
                w[name][i] = sum(client_values) / len(client_values) - h[name][i] / alpha
    return w, h


def test_the_server_follows_algorithm_1():
    """In each round: a later one, in which all take part, hides what was wrong with h."""
    for number, state in enumerate(run_server(FedDyn(alpha=ALPHA), ROUNDS)):
        w, h = oracle(ROUNDS[:number], ALPHA)
        for name in PARAMETERS:
            assert elements(state.weights[name]) == pytest.approx(w[name], rel=1e-5, abs=1e-5)
            assert elements(state.extra["h/" + name]) == pytest.approx(h[name], rel=1e-5, abs=1e-6)


def test_the_scored_weights_are_the_mean_of_the_last_uploads():
    """Also after a round in which a client is missing; the initial model is its own mean."""
    method = FedDyn(alpha=ALPHA)
    states = run_server(method, ROUNDS)
    for state, sent in zip(states, [None, *ROUNDS], strict=True):
        scored = method.scored_weights(state)
        mean = Mean().average(sent, uniform=True) if sent else state.weights
        assert list(scored) == list(state.weights)
        for name, tensor in mean.items():
            torch.testing.assert_close(scored[name], tensor, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(states[-1].weights["layer.weight"], method.scored_weights(states[-1])["layer.weight"])


@pytest.mark.parametrize("hyper", [{"scored": "cloud"}, {"alpha": 0.0}], ids=str)
def test_otherwise_the_cloud_model_is_scored(hyper):
    method = FedDyn(**{"alpha": ALPHA, **hyper})
    state = run_server(method, ROUNDS)[-1]
    assert method.scored_weights(state) is state.weights
    assert not method.adapts
    assert not method.download(state, Half()).extra


def test_the_mean_travels_only_where_it_is_scored():
    method = FedDyn(alpha=ALPHA)
    state = run_server(method, ROUNDS)[-1]
    assert set(method.download(state, Half()).extra) == {"scored/" + name for name in PARAMETERS}
    assert not method.download(state, Half(scoring=False)).extra


@pytest.mark.parametrize("method", ["feddyn", "fedgca"])
def test_devices_score_the_mean_and_train_from_the_cloud_model(method, tmp_path):
    """That an export takes the scored model is for the conformance tests."""
    mean, cloud = (
        run(toy_settings(method, tmp_path / rule, hyper={"alpha": 0.5, "scored": rule}, data=Toy(image_size=32)))
        for rule in ("mean", "cloud")
    )
    assert mean.sha256 == cloud.sha256, "training is the same"
    losses = [[row["loss"] for row in done.history()] for done in (mean, cloud)]
    assert losses[0][:3] == losses[1][:3], "before the first round they are one model"
    assert losses[0][-3:] != losses[1][-3:]


@pytest.mark.parametrize("with_lambda", [True, False], ids=["later", "first participation"])
def test_the_gradient_is_that_of_the_regularised_loss(with_lambda, tmp_path):
    settings = toy_settings("feddyn", tmp_path, hyper={"alpha": ALPHA})
    before = dict(local_exchange(settings).model.named_parameters())
    draws = torch.Generator().manual_seed(0)
    multipliers = {name: torch.rand(p.shape, generator=draws) if with_lambda else 0 * p for name, p in before.items()}
    local = local_exchange(settings, kept={f"lambda/{k}": t for k, t in multipliers.items()} if with_lambda else {})
    local.reference()  # taken before the model moves
    with torch.no_grad():
        for p in local.model.parameters():
            p += 0.3 * torch.rand(p.shape, generator=draws)
    parameters = dict(local.model.named_parameters())
    loss = sum(p.square().sum() for p in parameters.values())
    penalty = sum(
        ALPHA / 2 * (p - before[name].detach()).square().sum() - (multipliers[name].detach() * p).sum()
        for name, p in parameters.items()
    )
    wanted = torch.autograd.grad(loss + penalty, list(parameters.values()), retain_graph=True)
    loss.backward()
    local.method.edit_gradients(local)
    for p, gradient in zip(parameters.values(), wanted, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-5, atol=1e-6)


def test_what_is_clipped_is_the_gradient_with_both_terms(tmp_path):
    local = local_exchange(toy_settings("feddyn", tmp_path, hyper={"alpha": ALPHA, "clip": 0.01}))
    local.reference()  # taken before the model moves
    for p in local.model.parameters():
        p.data += 1.0
        p.grad = torch.zeros_like(p)
    local.method.edit_gradients(local)
    gradient = torch.cat([p.grad.flatten() for p in local.model.parameters()])
    assert float(gradient.norm()) == pytest.approx(0.01, rel=1e-3)


def test_what_a_client_keeps_in_a_run(tmp_path):
    settings = toy_settings("feddyn", tmp_path, hyper={"alpha": ALPHA}, train={"rounds": 2})
    done = run(settings, TouchedEngine(settings))
    folder = next((tmp_path / "clients").glob("*"))
    for client in done.summary["clients"]:
        mine = [item for item in done.messages if item.request.client == client and item.request.train]
        kept = own_state(folder / client)
        for name in (key.removeprefix("local/lambda/") for key in kept):
            moved = sum(item.reply.payload.weights[name] - item.message.weights[name] for item in mine)
            torch.testing.assert_close(kept["local/lambda/" + name], -ALPHA * moved, rtol=1e-4, atol=1e-7)
