"""How much each client counts in means of models, buffers and prototypes, for every method that lets it be chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.halves import BUFFERS, COUNTER, PARAMETERS, SIZES, Half, elements, run_server, updates
from support.nets import class_means_of, weighted_means
from support.toy import method_at_defaults

from common.choices import CONF
from common.prototypes import PrototypeSet
from strategies.core.method import Averaging

ALL = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))
BY_SAMPLES = ["fedapc", "fedavg", "fedbn", "fedplcc", "fedproc", "fedproto", "fedprox", "fpl", "moon"]
EQUAL = ["fedadg", "fedplvm"]
"""The methods in which the next model is the mean itself, by what it weighs unless configured otherwise."""


def oracle(sent, weighting, names=PARAMETERS):
    shares = [SIZES[update.client.index] if weighting == "samples" else 1 for update in sent]
    columns = {name: zip(*(elements(update.weights[name]) for update in sent), strict=True) for name in names}
    return {
        name: [sum(s * value for s, value in zip(shares, values, strict=True)) / sum(shares) for values in rows]
        for name, rows in columns.items()
    }


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("name", [name for name in ALL if isinstance(method_at_defaults(name), Averaging)])
def test_the_mean_is_by_samples_or_all_equal(name, weighting):
    sent = updates(1, who=(0, 2))
    mean = replace(method_at_defaults(name), weighting=weighting).average(sent, Half())
    for parameter, wanted in oracle(sent, weighting).items():
        assert elements(mean[parameter]) == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", BY_SAMPLES + EQUAL)
def test_the_next_model_is_that_mean(name):
    method, sent = method_at_defaults(name), updates(1)
    assert method.weighting == ("uniform" if name in EQUAL else "samples")
    for weighting in ("samples", "uniform"):
        weights = run_server(replace(method, weighting=weighting), [sent])[1].weights
        for parameter, wanted in oracle(sent, weighting).items():
            assert elements(weights[parameter]) == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("name", ["feddyn", "fedopt"])
def test_where_the_server_moves_parameters_further_buffers_are_that_mean(name, weighting):
    sent = updates(1, who=(0, 2))
    method = replace(method_at_defaults(name), weighting=weighting)
    state = run_server(method, [sent])[1]
    for buffer, wanted in oracle(sent, weighting, BUFFERS - {COUNTER}).items():
        assert elements(state.weights[buffer]) == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert not any(key.endswith(tuple(BUFFERS)) for key in state.extra), "buffers have no moments"
    others = "uniform" if weighting == "samples" else "samples"
    other = run_server(replace(method, weighting=others), [sent])[1]
    assert not torch.allclose(state.weights["layer.weight"], other.weights["layer.weight"])


def test_methods_that_average_no_models_have_no_such_field():
    for name in ("adcol", "fedpall", "single_set"):
        assert not hasattr(method_at_defaults(name), "weighting")


HELD = [
    class_means_of((0, 3.0, 1), (2, 7.0, 2)),
    class_means_of((0, 5.0, 3)),
    class_means_of((0, 1.0, 4), (2, 2.0, 5)),
]


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("name", ["fedapc", "fedproc", "fedproto"])
def test_a_global_prototype_is_the_mean_over_those_who_hold_the_class(name, weighting):
    method = replace(method_at_defaults(name), prototype_weighting=weighting)
    sent = [replace(update, prototypes=part) for update, part in zip(updates(1), HELD, strict=True)]
    prototypes = run_server(method, [sent])[1].prototypes
    equal = [PrototypeSet(part.vectors, part.labels, torch.ones(len(part))) for part in HELD]
    assert prototypes.labels.tolist() == [0, 2]
    for label, vector in weighted_means(HELD if weighting == "samples" else equal, list).items():
        assert elements(prototypes.of_class(label)) == pytest.approx(vector, rel=1e-5)
