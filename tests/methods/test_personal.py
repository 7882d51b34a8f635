"""SingleSet, FedBN and FedRep: which part of the model travels, which stays, and what each does with it."""

from __future__ import annotations

import pytest
import torch
from support.exchanges import local_exchange
from support.nets import kept
from support.runs import run
from support.toy import toy_settings

from common.data.batches import Augmentation
from common.errors import ConfigError
from common.models.specs import TorchvisionResNet
from common.settings import load_settings
from strategies.core.federation import Federation
from strategies.fedbn import FedBN
from strategies.fedrep import FedRep


def losses(done, client):
    return [row["losses"] for row in done.replies() if row["client"] == client]


# ---- SingleSet -------------------------------------------------------------------------------------------------------


def test_all_begin_with_the_same_weights_and_go_on_where_they_were(tmp_path):
    """Two rounds of one epoch see the batches that a plain loop sees."""
    settings = toy_settings("single_set", tmp_path, train={"momentum": 0.0, "rounds": 2})
    run(settings)
    local = local_exchange(settings, position=1)
    model = local.model
    for number in (1, 2):
        following = local_exchange(settings, position=1, round_number=number)
        following.state, following.model = local.state, model
        following.run()
    states = kept(tmp_path)
    assert all(torch.equal(states["dark-0"][f"model/{name}"], t) for name, t in model.state_dict().items())
    assert not torch.equal(states["dark-0"]["model/head.weight"], states["bright-0"]["model/head.weight"])


WITHOUT_TERMS = {
    "adcol": {"divergence": 0.0, "feature_mode": "eval"},
    "fedpall": {"contrast": 0.0, "divergence": 0.0, "swap_classifier": False, "feature_mode": "eval"},
    "fedproto": {"aggregate_models": False, "prototype_mode": "post_eval", "consistency": 0.0},
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What clients that are alone keep."""
    folder = tmp_path_factory.mktemp("alone")
    run(toy_settings("single_set", folder))
    return kept(folder)


@pytest.mark.parametrize("method", WITHOUT_TERMS)
def test_without_its_terms_a_method_that_averages_no_models_is_single_set(method, alone, tmp_path):
    run(toy_settings(method, tmp_path, hyper=WITHOUT_TERMS[method]))
    ours, theirs = kept(tmp_path), alone
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[client][name], t) for client in theirs for name, t in theirs[client].items())


@pytest.mark.parametrize(("method", "scored"), [("fedpall", 2), ("single_set", 3)])
def test_the_last_personal_models_are_scored_by_all_clients_but_in_fedpall(method, scored, tmp_path):
    """FedPall scores in its second exchange, which only the participants of the round have."""
    done = run(toy_settings(method, tmp_path, rounds={"participation": 0.5}, train={"rounds": 2}))
    assert len(done.summary["accuracy"]) == scored
    assert bool(done.summary["partial"]) == (scored < 3)
    assert done.summary["scores"]["last_n"]["missing"]


# ---- FedBN -----------------------------------------------------------------------------------------------------------


def test_fedbn_by_name_misses_the_shortcuts_of_a_resnet():
    model = TorchvisionResNet(50).build(10, 32, 0)
    by_type, by_name = (FedBN(layers=layers).shared_names(model) for layers in ("type", "name"))
    missed = by_name - by_type
    assert by_type < by_name
    assert len(missed) == 20
    assert all("downsample.1." in name for name in missed)


@pytest.mark.parametrize(
    ("method", "off", "on"),
    [
        ("fedbn", {"refresh_statistics": False}, {"refresh_statistics": True}),
        ("per_fedavg", {"adapt_steps": 0}, {"adapt_steps": 1}),
        ("per_fedavg", {"adapt_steps": 1}, {"adapt_steps": 2}),
    ],
    ids=str,
)
def test_what_is_adapted_for_a_score_leaves_no_trace(method, off, on, tmp_path):
    plain, adapted = (run(toy_settings(method, tmp_path / str(hyper), hyper=hyper)) for hyper in (off, on))
    assert plain.sha256 == adapted.sha256
    assert losses(plain, "dark-0") == losses(adapted, "dark-0")
    scores = [[(r["round"], r["client"], r["loss"]) for r in done.history()] for done in (plain, adapted)]
    assert scores[0] != scores[1]
    assert adapted.summary["scored"] == "own model"


def test_refreshed_statistics_are_the_mean_over_the_batches(tmp_path):
    settings = toy_settings("fedbn", tmp_path, train={"batch_size": 25})
    local = local_exchange(settings)
    first = local.model.backbone.conv1
    inputs = []
    handle = first.register_forward_hook(lambda module, args, output: inputs.append(output.detach()))
    local.method.adapt(local)
    handle.remove()
    assert len(inputs) == 1
    layer = local.model.backbone.bn1
    torch.testing.assert_close(layer.running_mean, inputs[0].mean((0, 2, 3)))
    torch.testing.assert_close(layer.running_var, inputs[0].var((0, 2, 3)))
    assert layer.momentum == 0.1


def test_a_short_last_batch_weighs_as_many_images_as_it_has(tmp_path):
    local = local_exchange(toy_settings("fedbn", tmp_path, train={"batch_size": 20}))
    first = local.model.backbone.conv1
    inputs = []
    handle = first.register_forward_hook(lambda module, args, output: inputs.append(output.detach()))
    local.method.adapt(local)
    handle.remove()
    assert len({len(batch) for batch in inputs}) == 2
    images = sum(len(batch) for batch in inputs)
    layer = local.model.backbone.bn1
    torch.testing.assert_close(layer.running_mean, torch.cat(inputs).mean((0, 2, 3)))
    variances = [batch.var((0, 2, 3)) * len(batch) / images for batch in inputs]
    torch.testing.assert_close(layer.running_var, torch.stack(variances).sum(0))


def test_statistics_are_refreshed_on_augmented_images(tmp_path, monkeypatch):
    local = local_exchange(toy_settings("fedbn", tmp_path))
    monkeypatch.setattr(Augmentation, "train", lambda self, images, draws: 0 * self.test(images))
    local.method.adapt(local)
    layer = local.model.backbone.bn1
    assert bool((layer.running_mean == 0).all())
    assert bool((layer.running_var == 0).all())


@pytest.mark.parametrize(
    ("method", "hyper"),
    [("fedbn", {"refresh_statistics": True}), ("combined", {"local_normalisation": True, "alpha": 0.0})],
)
def test_a_frozen_backbone_keeps_its_statistics_when_they_are_refreshed(method, hyper, tmp_path):
    """Nothing would fill them again: the backbone stays in evaluation mode."""
    local = local_exchange(toy_settings(method, tmp_path, hyper=hyper, overrides=("model.freeze=backbone",)))
    layer = local.model.backbone.bn1
    layer.running_mean.fill_(0.3)
    layer.running_var.fill_(0.7)
    local.model.eval()
    local.method.adapt(local)
    assert bool((layer.running_mean == 0.3).all())
    assert bool((layer.running_var == 0.7).all())
    assert layer.momentum == 0.1


def test_the_momentum_comes_back_after_a_pass_that_fails(tmp_path, monkeypatch):
    local = local_exchange(toy_settings("fedbn", tmp_path))

    def fails(**options):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(local, "features", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        local.method.adapt(local)
    assert local.model.backbone.bn1.momentum == 0.1


# ---- FedRep ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_epochs", [None, 3])
def test_fedrep_trains_the_head_and_then_the_body(head_epochs, tmp_path):
    """That a phase moves what it trains and nothing else is for the trainer's tests."""
    method = FedRep(head_epochs=head_epochs)
    model = local_exchange(toy_settings("fedrep", tmp_path)).model
    head, body = method.phases(2)
    assert (head.epochs, body.epochs) == (head_epochs or 2, 1)
    parameters = {name for name, _ in model.named_parameters()}
    shared = method.shared_names(model) & parameters
    assert {name for name in parameters if body.trainable(name)} == shared
    assert {name for name in parameters if head.trainable(name)} == parameters - shared == {"head.weight", "head.bias"}


@pytest.mark.parametrize("norm", ["group", "none"])
@pytest.mark.parametrize(
    "overrides", [["method=fedbn"], ["method=combined", "method.local_normalisation=true"]], ids=["fedbn", "combined"]
)
def test_a_method_that_would_keep_nothing_on_this_network_is_refused(overrides, norm):
    Federation(load_settings(overrides))
    with pytest.raises(ConfigError, match=r"set model\.norm=batch"):
        Federation(load_settings([*overrides, f"model.norm={norm}"]))


def test_a_method_that_adapts_the_shared_model_keeps_nothing_and_runs():
    settings = load_settings(["method=per_fedavg", "method.adapt_steps=1", "model.norm=none"])
    assert settings.method.personal
    Federation(settings)
