"""FedOpt's server optimisers against Algorithm 2 of Reddi et al. in loops, over three rounds."""

from __future__ import annotations

import math

import pytest
from support.halves import PARAMETERS, elements, model_state, run_server, updates

from strategies.fedopt import FedOpt

ROUNDS = [updates(1), updates(2, who=(0, 2)), updates(3)]
RATE, B1, B2, TAU, MOMENTUM = 0.3, 0.9, 0.99, 0.02, 0.7


def oracle(optimizer, start):
    w = {name: elements(model_state("initial")[name]) for name in PARAMETERS}
    for name, values in w.items():
        m, v = [0.0] * len(values), [TAU**2] * len(values)
        for sent in ROUNDS:
            for i in range(len(values)):
                mean = sum(elements(update.weights[name])[i] for update in sent) / len(sent)
                delta = mean - values[i]
                values[i] = mean if start == "mean" else values[i]
                if optimizer == "sgd":
                    m[i] = MOMENTUM * m[i] + delta
                    values[i] += RATE * m[i]
                    continue
                m[i] = B1 * m[i] + (1 - B1) * delta
                if optimizer == "adagrad":
                    v[i] = v[i] + delta**2
                elif optimizer == "yogi":
                    v[i] = v[i] - (1 - B2) * delta**2 * math.copysign(1.0, v[i] - delta**2)
                else:
                    v[i] = B2 * v[i] + (1 - B2) * delta**2
                values[i] += RATE * m[i] / (math.sqrt(v[i]) + TAU)
    return w


@pytest.mark.parametrize(
    ("optimizer", "start"),
    [
        ("sgd", "received"),
        ("adam", "received"),
        ("yogi", "received"),
        ("adagrad", "received"),
        ("sgd", "mean"),  # FPL's code: mean + rate * v, where Algorithm 2 has w + rate * v
        ("adam", "mean"),
    ],
)
def test_three_rounds_follow_algorithm_2(optimizer, start):
    method = FedOpt(optimizer=optimizer, start=start, server_learning_rate=RATE, momentum=MOMENTUM, epsilon=TAU)
    state = run_server(method, ROUNDS)[-1]
    for name, values in oracle(optimizer, start).items():
        assert elements(state.weights[name]) == pytest.approx(values, rel=1e-5, abs=1e-6)
