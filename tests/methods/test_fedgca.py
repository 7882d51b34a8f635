"""FedGCA: the loss in loops, what a class activation map is, and what the method needs before anything starts."""

from __future__ import annotations

import pytest
import torch
from support.exchanges import local_exchange
from support.own import forget
from support.runs import run
from support.toy import Toy, toy_settings

from common.choices import search
from common.errors import ConfigError
from common.models.base import ModelError
from common.models.specs import DigitCNN
from common.settings import load_settings
from strategies.core.method import Batch
from strategies.fedgca import FedGCA

CLASSES, POSITIONS = 4, 4  # 32x32 images leave the small network maps of 2x2


def exchange(tmp_path, views=1, **hyper):
    """A device with a model that differs from the received one, in float64."""
    settings = toy_settings(
        "fedgca", tmp_path, hyper=hyper, data=Toy(image_size=32), overrides=(f"views.count={views}",)
    )
    local = local_exchange(settings)
    local.frozen("received")
    torch.manual_seed(0)
    with torch.no_grad():
        for p in local.model.parameters():
            p += 0.1 * torch.randn_like(p)
    return local


def drawn_batch(local, samples=3):
    """A batch of few images with logits and maps that are leaves, in float64."""
    images, labels = next(local.batches("test"))
    size, views = len(labels) // local.views, local.views
    keep = torch.cat([torch.arange(samples) + size * v for v in range(views)])
    torch.manual_seed(1)
    logits = torch.randn(samples * views, CLASSES, dtype=torch.float64, requires_grad=True)
    maps = torch.rand(samples * views, local.feature_size, 2, 2, dtype=torch.float64, requires_grad=True)
    labels = labels[keep].clone()
    assert torch.equal(labels, labels[:samples].repeat(views))
    return Batch(images[keep], labels, maps.mean((2, 3)), logits, views, {"maps": maps})


def divergence(own, others, form):
    """Eq. 2 for one image: own and others are distributions, one per view."""
    mean = torch.cat([own, others]).mean(0).detach()
    if form == "bce":
        return -(own * mean.log() + (1 - own) * (1 - mean).log()).sum()
    return (own * (own.log() - mean.log())).sum()


def activations(weights, maps, label):
    """The softmax of A(u, v) = sum_d W[y, d] F_d(u, v) over the positions, for each row of ``maps``."""
    return torch.stack([sum(weights[label, d] * of[d] for d in range(len(of))).flatten().softmax(0) for of in maps])


def in_loops(local, batch, form):
    """CP and CAM, means over the images, from the batch's leaves and the received model's own forward pass."""
    received = local.frozen("received")
    with torch.no_grad():
        frozen_maps = received.feature_maps(batch.images).double()
        frozen_logits = received(batch.images)[1].double()
    samples = len(batch.labels) // batch.views
    weights, frozen_weights = local.model.head.weight.detach().double(), received.head.weight.double()
    predictions = maps = 0.0
    for i in range(samples):
        rows, label = [v * samples + i for v in range(batch.views)], int(batch.labels[i])
        own, others = batch.logits[rows].softmax(1), frozen_logits[rows].softmax(1)
        predictions = predictions + divergence(own, others, form) / samples
        own = activations(weights, batch.extra["maps"][rows], label)
        maps = maps + divergence(own, activations(frozen_weights, frozen_maps[rows], label), "kl") / samples
    return predictions, maps


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("form", ["bce", "kl"])
def test_the_terms_are_the_printed_ones_in_value_and_gradient(form, views, tmp_path):
    local = exchange(tmp_path, views, form=form, beta=0.7)
    batch = drawn_batch(local)
    local.model.double()
    terms = local.method.loss(batch, local).terms
    predictions, maps = in_loops(local, batch, form)
    assert terms["predictions"].item() == pytest.approx(0.7 * predictions.item(), rel=1e-5)
    assert terms["maps"].item() == pytest.approx(0.7 * maps.item(), rel=1e-4, abs=1e-7)
    for name, oracle, leaf in (("predictions", predictions, batch.logits), ("maps", maps, batch.extra["maps"])):
        ours = torch.autograd.grad(terms[name], leaf, retain_graph=True)[0]
        wanted = torch.autograd.grad(0.7 * oracle, leaf)[0]
        assert bool(ours.abs().sum() > 0)
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-7)


def test_a_step_needs_one_pass_of_each_model(tmp_path):
    local = exchange(tmp_path)
    local._prepare(local.method.phases(1)[0])
    batch = next(local.batches("test"))
    calls = {"own": 0, "received": 0}
    for name, model in (("own", local.model), ("received", local.frozen("received"))):
        model.backbone.conv1.register_forward_hook(lambda *_, name=name: calls.update({name: calls[name] + 1}))
    local.method.step(local, *batch)
    assert calls == {"own": 1, "received": 1}


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_two_rounds_with_beta_0_are_feddyn_on_the_same_views(tmp_path):
    ours = toy_settings("fedgca", tmp_path / "gca", hyper={"beta": 0.0, "alpha": 0.05})
    theirs = toy_settings("feddyn", tmp_path / "dyn", hyper={"alpha": 0.05}, overrides=("views=randconv",))
    assert run(ours).sha256 == run(theirs).sha256


# ---- what it needs ---------------------------------------------------------------------------------------------------


def test_a_network_without_activation_maps_is_refused_before_anything_starts(tmp_path):
    settings = toy_settings("fedgca", tmp_path, overrides=("model=digit_cnn",))
    with pytest.raises(ConfigError, match=r"model=digit_cnn_gap.*method\.maps=false"):
        run(settings)
    assert not (tmp_path / "clients").exists()


def test_without_maps_any_network_will_do():
    model = DigitCNN().build(CLASSES, 32, 0)
    assert FedGCA(maps=False).extend(model, 3, 0) is model
    assert FedGCA(beta=0.0).extend(model, 3, 0) is model
    with pytest.raises(ModelError):
        FedGCA().extend(model, 3, 0)


@pytest.mark.parametrize(
    ("words", "views", "count"),
    [
        (["method=fedgca"], "randconv", 1),
        (["method=fedgca", "views.count=3"], "randconv", 3),
        (["method=fedgca", "views=augmented", "views.count=2"], "augmented", 2),
        (["views=augmented", "method=fedgca", "views.count=2"], "augmented", 2),
        (["method=fedavg"], "none", 0),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else None,
)
def test_choosing_the_method_switches_views_on(words, views, count):
    chosen = load_settings(words)
    assert (chosen.choices["views"], chosen.views.count) == (views, count)


@pytest.mark.parametrize("override", ["views=none", "views.count=0"])
def test_without_views_it_is_refused(override):
    with pytest.raises(ConfigError, match=r"method=fedgca .*views=randconv.*views\.count"):
        load_settings(["method=fedgca", override])


def test_an_experiment_may_choose_it(tmp_path):
    """Experiments override the method, which overrides the views; the experiment's choice of views wins."""
    (tmp_path / "experiment").mkdir()
    head = "# @package _global_\ndefaults:\n  - override /method: fedgca\n"
    (tmp_path / "experiment" / "plain_gca.yaml").write_text(head)
    (tmp_path / "experiment" / "mixed_gca.yaml").write_text(head + "  - override /views: augmented\n")
    search(tmp_path)
    try:
        found = [load_settings([f"experiment={name}"]).choices["views"] for name in ("plain_gca", "mixed_gca")]
    finally:
        forget("none")
    assert found == ["randconv", "augmented"]
