"""FedAPC's three readings of "multi-view": what trains on what, and the third one's step in loops."""

from __future__ import annotations

import copy

import pytest
import torch
from support.exchanges import local_exchange
from support.runs import run
from support.toy import toy_settings

from common.errors import ConfigError
from common.prototypes import PrototypeSet, class_means
from common.settings import load_settings
from strategies.fedapc import FedAPC

VIEWS = ("views=augmented", "views.count=2")
CLASSES, FEATURES = 4, 128
ROWS = PrototypeSet(
    torch.rand(3, FEATURES, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 3]), torch.ones(3)
)


def exchange(folder, method="fedapc", views=VIEWS, **hyper):
    return local_exchange(
        toy_settings(method, folder, overrides=views, hyper=hyper), prototypes=ROWS if hyper else None, round_number=2
    )


def step_in_loops(model, images, labels, views, temperature):
    """Cross-entropy and contrast of the mean feature of each sample's views, row by row."""
    features = model.backbone(images)
    size = len(images) // views
    units = ROWS.vectors / ROWS.vectors.norm(dim=1, keepdim=True)
    entropies, contrasts = [], []
    for sample in range(size):
        mean = sum(features[view * size + sample] for view in range(views)) / views
        logits = model.head(mean[None])[0]
        entropies.append(torch.logsumexp(logits, 0) - logits[labels[sample]])
        cosines = (units @ (mean / mean.norm())) / temperature
        own = cosines[ROWS.labels == labels[sample]]
        contrasts.append(torch.logsumexp(cosines, 0) - torch.logsumexp(own, 0) if len(own) else 0.0 * mean.sum())
    return sum(entropies) / size, sum(contrasts) / size


def test_a_step_classifies_and_contrasts_the_mean_feature_of_the_views(tmp_path):
    local = exchange(tmp_path, reading="views", contrast=0.7)
    images, labels = next(local.batches("a"))
    model = copy.deepcopy(local.model)
    terms = local.method.loss(local.forward(images, labels), local).terms
    entropy, contrast = step_in_loops(model, images, labels, 3, 0.07)
    assert terms["cross_entropy"].item() == pytest.approx(entropy.item(), rel=1e-4)
    assert terms["contrast"].item() == pytest.approx(0.7 * contrast.item(), rel=1e-4)
    wanted = torch.autograd.grad(entropy + 0.7 * contrast, list(model.parameters()))
    sum(terms.values()).backward()
    for parameter, gradient in zip(local.model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5)


class Watching(FedAPC):
    """Remembers the rows that its last epoch contrasted."""

    def loss(self, batch, local):
        size = len(batch.labels) // batch.views
        local.cached("seen", list).append((batch.features[:size].detach(), batch.labels[:size]))
        return super().loss(batch, local)


def test_its_prototypes_are_running_means_of_those_features(tmp_path):
    local = exchange(tmp_path)
    local.method = Watching(reading="views")
    trained = local.run()
    features, labels = (torch.cat(rows) for rows in zip(*local.cached("seen", list), strict=True))
    wanted = class_means(features, labels, CLASSES)
    assert len(labels) == local.client.samples
    sent = local.method.upload(local, trained).prototypes
    assert torch.equal(sent.weights, wanted.weights)  # counts of samples, not of views
    torch.testing.assert_close(sent.vectors, wanted.vectors)


def test_raw_training_sees_the_images_as_they_are_and_still_sends_prototypes_of_views(tmp_path):
    local = exchange(tmp_path, views=(), reading="raw_training")
    raw = local.settings.data.augmentation.test(local.split.images)
    seen = torch.cat([images for images, _ in local.batches("epoch", 1)])
    assert sorted(seen.flatten(1).sum(1).tolist()) == pytest.approx(sorted(raw.flatten(1).sum(1).tolist()), rel=1e-5)
    augmented = exchange(tmp_path, views=(), reading="prototypes")
    assert not torch.equal(seen, torch.cat([images for images, _ in augmented.batches("epoch", 1)]))
    sent = local.method.upload(local, local.run()).prototypes
    plain = class_means(*local.features(), CLASSES)
    assert torch.equal(sent.weights, plain.weights)
    assert not torch.allclose(sent.vectors, plain.vectors)


def test_the_views_reading_needs_views():
    with pytest.raises(ConfigError, match="views=none"):
        load_settings(["method=fedapc", "method.reading=views", "train.device=cpu"])


@pytest.mark.parametrize(("reading", "views"), [("raw_training", ()), ("views", VIEWS)])
def test_every_reading_learns(reading, views, tmp_path):
    """The default is among the methods of the conformance tests."""
    settings = toy_settings("fedapc", tmp_path, overrides=views, hyper={"reading": reading}, train={"rounds": 6})
    averages = run(settings).averages()
    assert max(averages[1:]) >= 100 / CLASSES + 20, averages
