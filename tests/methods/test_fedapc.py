"""FedAPC: prototypes are class means over augmented views in evaluation mode."""

from __future__ import annotations

import pytest
import torch
from support.exchanges import local_exchange
from support.toy import Toy, toy_settings

from common.data.batches import Augmentation
from common.prototypes import class_means
from common.settings import load_settings
from common.text import warn_once
from strategies.core.method import Trained

PLAIN = Toy(augmentation=Augmentation(mean=(0.5,), std=(0.25,)))


def sent(folder, views, data=None):
    """The prototypes that a device sends with so many views, and the device."""
    local = local_exchange(toy_settings("fedapc", folder, hyper={"prototype_views": views}, data=data))
    return local.method.upload(local, Trained(None, 1, {})).prototypes, local


@pytest.mark.parametrize("views", [0, 3], ids=["no views", "views without augmentation are the image itself"])
def test_prototypes_are_class_means_in_evaluation_mode(views, tmp_path):
    found, local = sent(tmp_path, views, PLAIN)
    with torch.no_grad():
        features, _ = local.model.eval()(PLAIN.augmentation.test(local.split.images))
    wanted = class_means(features, local.split.labels, 4)
    torch.testing.assert_close(found.vectors, wanted.vectors, rtol=1e-4, atol=1e-5)
    assert torch.equal(found.weights, wanted.weights)
    assert found.classes == wanted.classes


def test_augmented_views_differ_from_the_image_and_among_themselves(tmp_path):
    first, second, third = (sent(tmp_path, views)[0].vectors for views in (0, 1, 2))
    assert not torch.allclose(first, second)
    assert not torch.allclose(second, third)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ([], "method.prototype_views=0 gives the same"),
        (["method.reading=raw_training"], "method.prototype_views=0 gives the same"),
        (["method.reading=views", "views=augmented"], "method.reading=views: nothing of data.augmentation is drawn"),
        (["method.prototype_views=0"], ""),
        (["method.reading=views", "views=randconv"], ""),
        (["data.augmentation.flip=true"], ""),
    ],
)
def test_views_that_are_all_the_same_are_said(chosen, said, caplog):
    """Otherwise a run of the ablation would be called by the method's name, and take twice the passes."""
    warn_once.cache_clear()
    still = ["data.augmentation.crop_padding=0", "data.augmentation.flip=false", "data.augmentation.rotation=0"]
    load_settings(["method=fedapc", "data=glyphs", *still, *chosen])
    found = [record.message for record in caplog.records if "data.augmentation" in record.message]
    assert len(found) == bool(said)
    assert said in "".join(found)
