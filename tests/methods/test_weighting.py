"""How much each client counts in the models' mean, for every method that lets it be chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.halves import PARAMETERS, SIZES, Half, elements, run_server, updates
from support.toy import method_at_defaults

from common.choices import CONF
from strategies.core.method import Averaging

ALL = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))
PLAIN = ["fedapc", "fedavg", "fedplcc", "fedproc", "fedproto", "fedprox", "fpl", "moon"]
"""The methods in which the next model is the mean itself, by samples unless configured otherwise."""


def oracle(sent, weighting):
    shares = [SIZES[update.client.index] if weighting == "samples" else 1 for update in sent]
    columns = {name: zip(*(elements(update.weights[name]) for update in sent), strict=True) for name in PARAMETERS}
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


@pytest.mark.parametrize("name", PLAIN)
def test_the_next_model_is_that_mean(name):
    method, sent = method_at_defaults(name), updates(1)
    assert method.weighting == "samples"
    for weighting in ("samples", "uniform"):
        weights = run_server(replace(method, weighting=weighting), [sent])[1].weights
        for parameter, wanted in oracle(sent, weighting).items():
            assert elements(weights[parameter]) == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_methods_that_average_no_models_have_no_such_field():
    for name in ("adcol", "fedpall", "single_set"):
        assert not hasattr(method_at_defaults(name), "weighting")
