"""FedDyn against Algorithm 1 in loops: h on the server, lambda on the client, the gradient between them."""

from __future__ import annotations

import pytest
import torch
from support.halves import BUFFERS, PARAMETERS, SIZES, Half, elements, model_state, run_server, updates
from support.own_states import own_state
from support.runs import TouchedEngine, run
from support.toy import Toy, toy_settings
from torch import nn

from server.results.run import RunFolder as Opened
from strategies import feddyn
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
    state = run_server(FedDyn(alpha=ALPHA), ROUNDS)[-1]
    w, h = oracle(ROUNDS, ALPHA)
    for name in PARAMETERS:
        assert elements(state.weights[name]) == pytest.approx(w[name], rel=1e-5, abs=1e-5)
        assert elements(state.extra["h/" + name]) == pytest.approx(h[name], rel=1e-5, abs=1e-6)


def test_buffers_are_the_mean_and_have_no_h():
    state = run_server(FedDyn(alpha=ALPHA), ROUNDS)[-1]
    mean = Mean().average(ROUNDS[-1], uniform=True)
    assert all(torch.equal(state.weights[name], mean[name]) for name in BUFFERS)
    assert set(state.extra) == {"h/" + name for name in PARAMETERS}


def test_weighting_chooses_the_mean():
    uniform = run_server(FedDyn(alpha=ALPHA), ROUNDS[:1])[-1]
    samples = run_server(FedDyn(alpha=ALPHA, weighting="samples"), ROUNDS[:1])[-1]
    mean = Mean().average(ROUNDS[0])
    assert torch.equal(samples.weights["norm.running_mean"], mean["norm.running_mean"])
    assert not torch.allclose(samples.weights["layer.weight"], uniform.weights["layer.weight"])
    assert torch.equal(samples.extra["h/layer.weight"], uniform.extra["h/layer.weight"])


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
    """Its score is FedAvg's mean's: what a device is given is what an export of the run takes."""
    scored = {}
    for rule in ("mean", "cloud"):
        settings = toy_settings(method, tmp_path / rule, hyper={"alpha": 0.5, "scored": rule}, data=Toy(image_size=32))
        engine = TouchedEngine(settings)
        done = run(settings, engine)
        kept = Opened(tmp_path / rule)
        scored[rule] = done.averages(), done.sha256, kept.model()
        total = 0.0
        for domain in kept.test_domains:
            split = kept.test_split(domain)
            correct = int((kept.features(scored[rule][2], split)[1].argmax(1) == split.labels).sum())
            total += 100 * correct / len(split)
        assert done.averages()[-1] == pytest.approx(total / len(kept.test_domains))
    assert scored["mean"][1] == scored["cloud"][1], "training is the same"
    assert scored["mean"][0][0] == scored["cloud"][0][0]
    assert scored["mean"][0][-1] != scored["cloud"][0][-1]


class Stand:
    """A device's side with one linear layer."""

    def __init__(self, kept):
        self.model = nn.Linear(2, 3).double()
        self.before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.kept = kept
        with torch.no_grad():
            for p in self.model.parameters():
                p += 0.3 * torch.arange(p.numel(), dtype=p.dtype).view_as(p) + 0.1

    def reference(self):
        return self.before

    def cached(self, name, make):
        return make()


def stand(with_lambda):
    kept = {"lambda/weight": torch.full((3, 2), 0.7).double(), "lambda/bias": torch.tensor([1.0, -2.0, 0.5]).double()}
    torch.manual_seed(0)
    return Stand(kept if with_lambda else {})


@pytest.mark.parametrize("with_lambda", [True, False], ids=["later", "first participation"])
def test_the_gradient_is_that_of_the_regularised_loss(with_lambda):
    local = stand(with_lambda)
    x = torch.randn(5, 2, dtype=torch.float64)
    loss = local.model(x).square().mean()
    penalty = sum(
        -(local.kept.get("lambda/" + name, torch.zeros_like(p)) * p).sum()
        + ALPHA / 2 * (p - local.before[name]).square().sum()
        for name, p in local.model.named_parameters()
    )
    wanted = torch.autograd.grad(loss + penalty, list(local.model.parameters()), retain_graph=True)
    loss.backward()
    feddyn.add_dynamic_terms(local, ALPHA)
    for p, gradient in zip(local.model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("with_lambda", [True, False], ids=["later", "first participation"])
def test_lambda_takes_off_what_the_client_moved(with_lambda):
    local = stand(with_lambda)
    after = feddyn.next_multipliers(local, ALPHA)
    for name, p in local.model.named_parameters():
        previous = elements(local.kept["lambda/" + name]) if with_lambda else [0.0] * p.numel()
        moved = zip(elements(p), elements(local.before[name]), strict=True)
        wanted = [old - ALPHA * (w - w0) for old, (w, w0) in zip(previous, moved, strict=True)]
        assert elements(after["lambda/" + name]) == pytest.approx(wanted, rel=1e-12)


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
        received = {name for name in mine[0].message.extra if not name.startswith("scored/")}
        assert received == set()
