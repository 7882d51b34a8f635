"""Combined is FPL, FedDyn or FedBN where its other parts are switched off, and its parts do not disturb each other."""

from __future__ import annotations

import pytest
import torch
from support.exchanges import local_exchange
from support.nets import kept, shared_weights
from support.runs import run
from support.toy import toy_settings

from common.models.specs import Small, TorchvisionResNet
from common.storage import GlobalState, tensors_sha256
from goldfinch.commands.export import export
from server.run.checkpoint import Checkpoints
from strategies.combined import Combined
from strategies.core.federation import Federation
from strategies.fedbn import FedBN, norm_state_names

NO_PROTOTYPES = {"contrast": 0.0, "consistency": 0.0}
NO_CORRECTION = {"alpha": 0.0}
LOCAL = {"local_normalisation": True}


def weights_of(method, folder, hyper):
    done = run(toy_settings(method, folder, hyper=hyper))
    return tensors_sha256(shared_weights(folder)), [row["loss"] for row in done.history()]


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
    for name, off in {"a": NO_CORRECTION, "b": NO_PROTOTYPES}.items():
        assert weights_of("combined", tmp_path / name, {**LOCAL, **off})[0] != whole


def test_what_stays_on_a_device_is_told_as_by_fedbn():
    """``layers=name`` was taken and did nothing."""
    model = TorchvisionResNet(18).build(10, 32, 0)
    shared = {}
    for layers in ("type", "name"):
        shared[layers] = Combined(local_normalisation=True, layers=layers).shared_names(model)
        assert shared[layers] == FedBN(layers=layers).shared_names(model)
    assert shared["type"] < shared["name"]


def test_the_correction_is_kept_for_exchanged_parameters_only(tmp_path):
    weights_of("combined", tmp_path, LOCAL)
    names = norm_state_names(Small().build(4, 16, 0))
    for tensors in kept(tmp_path).values():
        corrected = {name.removeprefix("local/lambda/") for name in tensors if name.startswith("local/lambda/")}
        assert corrected
        assert not corrected & names
        assert {f"model/{name}" for name in names} <= set(tensors)


def test_the_pull_acts_on_kept_parameters_too(tmp_path):
    """FedDyn's quadratic term holds local batch norm to its values before the training of the round."""
    local = local_exchange(toy_settings("combined", tmp_path, hyper={**LOCAL, "alpha": 0.5}))
    local.reference()
    with torch.no_grad():
        for parameter in local.model.parameters():
            parameter += 0.25
            parameter.grad = torch.zeros_like(parameter)
    local.method.edit_gradients(local)
    parameters = dict(local.model.named_parameters())
    names = norm_state_names(local.model) & set(parameters)
    assert names
    for name in names:
        torch.testing.assert_close(parameters[name].grad, torch.full_like(parameters[name], 0.125), msg=name)


def test_without_the_correction_the_scored_model_is_the_average():
    state = GlobalState({"head.weight": torch.ones(2)}, round=1)
    assert Combined(**NO_CORRECTION).scored_weights(state) is state.weights


def test_the_cloud_model_is_scored_with_local_normalisation_too(tmp_path):
    """The mean was scored in its place, and sent with it, since local normalisation adapts a model as well."""
    settings = toy_settings("combined", tmp_path, hyper={**LOCAL, "scored": "cloud"})
    run(settings)
    checkpoint = Checkpoints(tmp_path / "checkpoint").load()
    assert settings.method.scored_weights(checkpoint.state) is checkpoint.state.weights
    assert not settings.method.download(checkpoint.state, Federation(settings).server).extra


def test_an_export_says_that_statistics_were_estimated_again_for_the_score(tmp_path):
    for refresh in (True, False):
        folder = tmp_path / str(refresh)
        run(toy_settings("combined", folder, hyper={**LOCAL, "refresh_statistics": refresh}, train={"rounds": 1}))
        notes = " ".join(export(folder, tmp_path / f"model {refresh}", client="dark-0").notes)
        assert ("adapted to each client's training images" in notes) == refresh
