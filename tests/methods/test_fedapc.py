"""FedAPC: prototypes are class means over augmented views in evaluation mode; the server averages over holders."""

from __future__ import annotations

import pytest
import torch
from support.halves import FEATURES, LossSide, elements, run_server, updates
from support.runs import TouchedEngine, run
from support.toy import Toy, toy_settings

from common.data.batches import Augmentation
from common.losses import prototype_contrast
from common.prototypes import PrototypeSet, class_means
from strategies.core.method import Batch
from strategies.fedapc import FedAPC

PLAIN = Toy(augmentation=Augmentation(mean=(0.5,), std=(0.25,)))


def first_prototypes(folder, data=None, **hyper):
    settings = toy_settings("fedapc", folder, hyper=hyper, data=data, train={"rounds": 1})
    done = run(settings, TouchedEngine(settings))
    return {item.request.client: item.reply.payload for item in done.messages if item.request.train}, settings


def test_prototypes_are_the_sent_model_s_class_means_in_evaluation_mode(tmp_path):
    payloads, settings = first_prototypes(tmp_path, data=PLAIN, prototype_views=0)
    model = settings.model.build(4, 16, 0)
    for client, payload in payloads.items():
        model.load_state_dict(payload.weights)
        split = PLAIN.load(client.rpartition("-")[0]).train
        with torch.no_grad():
            features, _ = model.eval()(PLAIN.augmentation.test(split.images))
        wanted = class_means(features, split.labels, 4)
        torch.testing.assert_close(payload.prototypes.vectors, wanted.vectors, rtol=1e-4, atol=1e-5)
        assert torch.equal(payload.prototypes.weights, wanted.weights)
        assert payload.prototypes.classes == wanted.classes


def test_views_average_over_augmentations(tmp_path):
    """Without augmentation, views are the image itself; with it, they differ from the image and among themselves."""
    base, _ = first_prototypes(tmp_path / "0", data=PLAIN, prototype_views=0)
    same, _ = first_prototypes(tmp_path / "1", data=PLAIN, prototype_views=3)
    for client, payload in base.items():
        other = same[client].prototypes.vectors
        torch.testing.assert_close(payload.prototypes.vectors, other, rtol=1e-5, atol=1e-6)
    sets = {v: first_prototypes(tmp_path / f"a{v}", prototype_views=v)[0]["dark-0"].prototypes for v in (0, 1, 2)}
    assert not torch.allclose(sets[0].vectors, sets[1].vectors)
    assert not torch.allclose(sets[1].vectors, sets[2].vectors)


def test_the_contrast_ignores_the_length_of_a_prototype():
    """Eq. 4 prints a sum over clients where the text averages: for the loss it is the same."""
    draws = torch.Generator().manual_seed(0)
    features = torch.rand(5, FEATURES, generator=draws)
    labels = torch.tensor([0, 1, 2, 1, 0])
    batch = Batch(torch.zeros(5, 3, 1, 1), labels, features, torch.randn(5, 3, generator=draws))
    means = PrototypeSet(torch.rand(3, FEATURES, generator=draws), torch.arange(3), torch.ones(3))
    sums = PrototypeSet(means.vectors * torch.tensor([[2.0], [8.0], [3.0]]), means.labels, means.weights)
    terms = [FedAPC(contrast=2.0).loss(batch, LossSide(rows)).terms["contrast"] for rows in (means, sums)]
    torch.testing.assert_close(terms[0], terms[1])
    torch.testing.assert_close(terms[0], 2.0 * prototype_contrast(features, labels, means, temperature=0.07))
    assert set(FedAPC().loss(batch, LossSide(PrototypeSet.empty(FEATURES))).terms) == {"cross_entropy"}


def test_the_global_prototype_is_the_mean_over_holders():
    def row(weight, value):
        return PrototypeSet(torch.full((1, FEATURES), value), torch.tensor([1]), torch.tensor([weight]))

    sent = updates(1, prototypes={0: row(10.0, 1.0), 1: row(30.0, 4.0)})
    uniform, samples = (run_server(FedAPC(prototype_weighting=w), [sent])[1].prototypes for w in ("uniform", "samples"))
    assert elements(uniform.vectors) == pytest.approx([2.5] * FEATURES)
    assert elements(samples.vectors) == pytest.approx([130 / 40] * FEATURES)
