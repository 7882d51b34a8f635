"""Combined is FPL, FedDyn or FedBN where its other parts are switched off, and its parts do not disturb each other."""

from __future__ import annotations

import pytest
import torch
from support.nets import kept
from support.runs import run
from support.toy import toy_settings

from common.models.specs import Small
from common.storage import tensors_sha256
from server.run.checkpoint import Checkpoints
from strategies.combined import Combined
from strategies.fedbn import norm_state_names

NO_PROTOTYPES = {"contrast": 0.0, "consistency": 0.0}
NO_CORRECTION = {"alpha": 0.0}
LOCAL = {"local_normalisation": True}


def weights_of(method, folder, hyper):
    done = run(toy_settings(method, folder, hyper=hyper, train={"rounds": 3}))
    scores = [row["accuracy"] for row in done.history()]
    return tensors_sha256(Checkpoints(folder / "checkpoint").load().state.weights), scores


@pytest.mark.parametrize(
    ("off", "base", "values"),
    [
        (NO_CORRECTION, "fpl", {"temperature": 0.1, "weighting": "uniform"}),
        (NO_PROTOTYPES, "feddyn", {"alpha": 0.01}),
        ({**NO_PROTOTYPES, **NO_CORRECTION, **LOCAL}, "fedbn", {"refresh_statistics": True, "weighting": "uniform"}),
    ],
    ids=["FPL", "FedDyn", "FedBN"],
)
def test_it_equals_the_method_of_the_part_that_is_left(off, base, values, tmp_path):
    assert weights_of("combined", tmp_path / "combined", off) == weights_of(base, tmp_path / "base", values)


def test_each_part_changes_the_result(tmp_path):
    whole = weights_of("combined", tmp_path / "whole", LOCAL)[0]
    for name, off in {"a": NO_CORRECTION, "b": NO_PROTOTYPES, "c": {"local_normalisation": False}}.items():
        assert weights_of("combined", tmp_path / name, {**LOCAL, **off})[0] != whole


def test_the_correction_is_kept_for_exchanged_parameters_only(tmp_path):
    weights_of("combined", tmp_path, LOCAL)
    names = norm_state_names(Small().build(4, 16, 0))
    for tensors in kept(tmp_path).values():
        corrected = {name.removeprefix("local/lambda/") for name in tensors if name.startswith("local/lambda/")}
        assert corrected
        assert not corrected & names
        assert {f"model/{name}" for name in names} <= set(tensors)


@pytest.mark.parametrize("local", [False, True], ids=["one model", "own models"])
def test_without_the_correction_the_scored_model_is_the_average(local, tmp_path):
    hyper = {**NO_CORRECTION, "local_normalisation": local}
    weights_of("combined", tmp_path, hyper)
    state = Checkpoints(tmp_path / "checkpoint").load().state
    scored = Combined(**hyper).scored_weights(state)
    assert all(torch.isfinite(tensor.float()).all() for tensor in scored.values())
    assert tensors_sha256(scored) == tensors_sha256(state.weights)
