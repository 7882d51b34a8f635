"""SCAFFOLD against Algorithm 1 (option II): c and c_k in loops, on the server alone and through whole runs."""

from __future__ import annotations

import pytest
import torch
from support.halves import BUFFERS, PARAMETERS, SIZES, elements, model_state, run_server, updates
from support.own_states import own_state
from support.runs import TouchedEngine, run
from support.toy import toy_settings

from common.errors import ConfigError
from common.settings import load_settings
from strategies.core.aggregation import Mean
from strategies.scaffold import SCAFFOLD, effective_steps


def changes(number, who):
    return {
        index: {"control/" + name: model_state("change", number, index)[name] for name in PARAMETERS} for index in who
    }


ROUNDS = [updates(n, who, extra=changes(n, who)) for n, who in ((1, (0, 1, 2)), (2, (0, 2)))]


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_the_server_follows_algorithm_1(rate):
    state = run_server(SCAFFOLD(server_learning_rate=rate), ROUNDS)[-1]
    for name in PARAMETERS:
        w = elements(model_state("initial")[name])
        c = [0.0] * len(w)
        for sent in ROUNDS:
            for i in range(len(w)):
                w[i] += rate / len(sent) * sum(elements(update.weights[name])[i] - w[i] for update in sent)
                c[i] += sum(elements(update.extra["control/" + name])[i] for update in sent) / len(SIZES)
        assert elements(state.weights[name]) == pytest.approx(w, rel=1e-5, abs=1e-6)
        assert elements(state.extra["control/" + name]) == pytest.approx(c, rel=1e-5, abs=1e-6)
    mean = Mean().average(ROUNDS[-1], uniform=True)
    assert all(torch.equal(state.weights[name], mean[name]) for name in BUFFERS)
    assert set(state.extra) == {"control/" + name for name in PARAMETERS}


@pytest.mark.parametrize(("steps", "momentum"), [(1, 0.0), (7, 0.0), (1, 0.9), (7, 0.9), (40, 0.5)])
def test_effective_steps_are_what_a_constant_gradient_moves(steps, momentum):
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=momentum)
    for _ in range(steps):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert 0.1 * effective_steps(steps, momentum) == pytest.approx(-float(parameter.detach()), rel=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_option_ii_in_a_run(momentum, tmp_path):
    """Every message against the formulas, at a rate that halves: the change of c_k that is sent, and the c_k kept."""
    train = {"rounds": 3, "momentum": momentum, "learning_rate": 0.02, "weight_decay": 0.0}
    train |= {"schedule": "step", "step_rounds": 1, "step_factor": 0.5}
    settings = toy_settings("scaffold", tmp_path, train=train)
    done = run(settings, TouchedEngine(settings))
    own = {client: {} for client in done.summary["clients"]}
    for item in (item for item in done.messages if item.request.train):
        mine, answer = own[item.request.client], item.reply
        divisor = 0.02 / 2 ** (item.request.round - 1) * effective_steps(answer.answer.steps, momentum)
        for key, c in item.message.extra.items():
            name = key.removeprefix("control/")
            before = mine.get(key, torch.zeros_like(c))
            moved = item.message.weights[name].double() - answer.payload.weights[name].double()
            after = before.double() - c.double() + moved / divisor
            torch.testing.assert_close(answer.payload.extra[key].double(), after - before, rtol=1e-3, atol=1e-4)
            mine[key] = before + answer.payload.extra[key]
    folder = next((tmp_path / "clients").glob("*"))
    for client, mine in own.items():
        kept = own_state(folder / client)
        for key, value in mine.items():
            torch.testing.assert_close(kept["local/" + key], value, rtol=1e-4, atol=1e-5)


def test_the_direction_is_c_minus_c_k(tmp_path):
    """The first steps of two runs that differ in nothing but the control factor move apart by rate (c - c_k)."""
    rate = 0.01
    train = {"rounds": 2, "momentum": 0.0, "learning_rate": rate, "weight_decay": 0.0, "local_steps": 1}
    moved = {}
    for control in (1.0, 0.5):
        settings = toy_settings("scaffold", tmp_path / str(control), hyper={"control": control}, train=train)
        done = run(settings, TouchedEngine(settings))
        moved[control] = {(i.request.round, i.request.client): i for i in done.messages if i.request.train}
    for client in ("bright-0", "dark-0", "noisy-0"):
        first, second = moved[1.0][1, client], moved[1.0][2, client]
        half = moved[0.5][2, client]
        for key, c in second.message.extra.items():
            name = key.removeprefix("control/")
            correction = c - first.reply.payload.extra[key]
            difference = second.reply.payload.weights[name] - half.reply.payload.weights[name]
            torch.testing.assert_close(difference, -rate * 0.5 * correction, rtol=1e-2, atol=1e-6)


def test_the_factor_does_not_cancel_over_the_rounds(tmp_path):
    """c_k is the mean of the client's own gradients at every factor: a correction that were measured with its factor
    would grow back to the full one. The rate is so small that both runs have nearly the same gradients."""
    train = {"rounds": 4, "momentum": 0.0, "learning_rate": 1e-3, "weight_decay": 0.0, "local_steps": 1}
    controls = []
    for factor in (1.0, 0.25):
        settings = toy_settings("scaffold", tmp_path / str(factor), hyper={"control": factor}, train=train)
        own = {}
        for item in run(settings, TouchedEngine(settings)).messages:
            if item.request.train:
                for name, change in item.reply.payload.extra.items():
                    key = (item.request.client, name)
                    own[key] = own.get(key, torch.zeros_like(change)) + change
        controls.append(own)
    full, quarter = controls
    assert full.keys() == quarter.keys()
    size = torch.cat([tensor.flatten() for tensor in full.values()]).norm()
    apart = torch.cat([(full[key] - quarter[key]).flatten() for key in full]).norm()
    assert size > 0.1
    assert apart < 0.05 * size


def test_adam_is_refused_before_a_folder_is_made():
    with pytest.raises(ConfigError, match=r"train\.optimizer=sgd"):
        load_settings(["method=scaffold", "data=glyphs", "train.optimizer=adam"])
