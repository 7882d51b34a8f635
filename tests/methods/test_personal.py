"""SingleSet, FedBN and FedRep: which part of the model travels, which stays, and what each does with it."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.exchanges import local_exchange
from support.nets import kept
from support.runs import TouchedEngine, run
from support.toy import Toy, toy_settings

from common.errors import ConfigError
from common.models.specs import TorchvisionResNet
from common.settings import load_settings
from server.run.checkpoint import Checkpoints
from strategies.core.aggregation import average
from strategies.core.federation import Federation
from strategies.fedbn import FedBN, norm_state_names
from strategies.fedrep import FedRep


def trained(done):
    return [item for item in done.messages if item.request.train]


def weights_of(done):
    return Checkpoints(done.folder / "checkpoint").load().state.weights


def losses(done, client):
    return [row["losses"] for row in done.replies() if row["client"] == client]


# ---- SingleSet -------------------------------------------------------------------------------------------------------


def test_a_client_alone_does_not_notice_the_others(tmp_path):
    three, one = (
        run(toy_settings("single_set", tmp_path / str(len(names)), data=Toy(domains=names)))
        for names in (("bright", "dark", "noisy"), ("dark",))
    )
    assert losses(three, "dark-0") == losses(one, "dark-0")
    first, second = kept(tmp_path / "3")["dark-0"], kept(tmp_path / "1")["dark-0"]
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_all_begin_with_the_same_weights_and_go_on_where_they_were(tmp_path):
    """Two rounds of one epoch see the batches that a plain loop sees."""
    settings = toy_settings("single_set", tmp_path, train={"momentum": 0.0, "rounds": 2})
    run(settings)
    local = local_exchange(settings, position=1)
    model = local.model
    for number in (1, 2):
        following = local_exchange(settings, position=1, round_number=number)
        following.model = model
        following.run()
    states = kept(tmp_path)
    assert all(torch.equal(states["dark-0"][f"model/{name}"], t) for name, t in model.state_dict().items())
    assert not torch.equal(states["dark-0"]["model/head.weight"], states["bright-0"]["model/head.weight"])


# ---- FedBN -----------------------------------------------------------------------------------------------------------


def test_fedbn_keeps_batch_norm_at_home_and_averages_the_rest(tmp_path):
    settings = toy_settings("fedbn", tmp_path)
    done = run(settings, TouchedEngine(settings))
    model = local_exchange(settings).model
    own = norm_state_names(model)
    assert len(own) == 25  # five layers of weight, bias, mean, variance, counter
    sizes = done.summary["clients"]
    last = [item for item in trained(done) if item.request.round == 2]
    for item in last:
        assert set(item.reply.payload.weights) == set(item.message.weights) == set(model.state_dict()) - own
    wanted = average([i.reply.payload.weights for i in last], [sizes[i.request.client] for i in last])
    assert all(torch.equal(weights_of(done)[name], tensor) for name, tensor in wanted.items())
    states = kept(tmp_path)
    assert all(set(tensors) == {f"model/{name}" for name in own} for tensors in states.values())
    assert not torch.equal(states["dark-0"]["model/backbone.bn1.bias"], states["noisy-0"]["model/backbone.bn1.bias"])


def test_fedbn_by_name_misses_the_shortcuts_of_a_resnet():
    model = TorchvisionResNet(50).build(10, 32, 0)
    by_type, by_name = (FedBN(layers=layers).shared_names(model) for layers in ("type", "name"))
    missed = by_name - by_type
    assert by_type < by_name
    assert len(missed) == 20
    assert all("downsample.1." in name for name in missed)


def test_fedbn_scores_with_statistics_of_the_averaged_weights_if_asked(tmp_path):
    plain, fresh = (
        run(toy_settings("fedbn", tmp_path / str(refresh), hyper={"refresh_statistics": refresh}))
        for refresh in (False, True)
    )
    assert plain.sha256 == fresh.sha256  # a score leaves no trace
    assert losses(plain, "dark-0") == losses(fresh, "dark-0")
    scores = [[(r["round"], r["client"], r["loss"]) for r in done.history()] for done in (plain, fresh)]
    assert scores[0] != scores[1]


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


# ---- FedRep ----------------------------------------------------------------------------------------------------------


class Spy(FedRep):
    """Takes a copy of the model before every step."""

    def step(self, local, images, labels):
        seen = local.cached("seen", list)
        seen.append((local.phase, deepcopy(local.model.state_dict())))
        return super().step(local, images, labels)


@pytest.mark.parametrize("head_epochs", [None, 3])
def test_fedrep_trains_the_head_and_then_the_body(head_epochs, tmp_path):
    hyper = {"head_epochs": head_epochs}
    local = local_exchange(toy_settings("fedrep", tmp_path, hyper=hyper, train={"epochs": 2}))
    local.method = Spy(**hyper)
    local.run()
    seen = [*local.cached("seen", list), (1, deepcopy(local.model.state_dict()))]
    per_epoch = 3  # 25 samples in batches of eight, the last one of nine
    assert [phase for phase, _ in seen[:-1]] == [0] * per_epoch * (head_epochs or 2) + [1] * per_epoch
    parameters = {name for name, _ in local.model.named_parameters()}
    statistics = {name for name in FedRep().shared_names(local.model) - parameters if "running" in name}
    for (phase, before), (_, after) in pairwise(seen):
        moved = {name for name in parameters if not torch.equal(before[name], after[name])}
        body = FedRep().shared_names(local.model)
        assert moved == (parameters & body if phase else parameters - body)
        moved = {name for name in statistics if not torch.equal(before[name], after[name])}
        assert moved == statistics


@pytest.mark.parametrize("norm", ["group", "none"])
@pytest.mark.parametrize(
    "overrides",
    [
        ["method=fedbn"],
        ["method=fedbn", "method.refresh_statistics=true"],
        ["method=combined", "method.local_normalisation=true"],
    ],
    ids=["fedbn", "fedbn, refreshed", "combined"],
)
def test_a_method_that_would_keep_nothing_on_this_network_is_refused(
    overrides: list[str], norm: str, tmp_path: Path
) -> None:
    settings = load_settings([*overrides, f"output={tmp_path}"])
    Federation(settings)
    settings = load_settings([*overrides, f"model.norm={norm}", f"output={tmp_path}"])
    with pytest.raises(ConfigError, match=r"this network has no such part, .* set model.norm=batch"):
        Federation(settings)


def test_a_method_that_adapts_the_shared_model_keeps_nothing_and_runs(tmp_path: Path) -> None:
    chosen = ["method=per_fedavg", "method.adapt_steps=1", "model.norm=none", f"output={tmp_path}"]
    assert load_settings(chosen).method.personal
    Federation(load_settings(chosen))
