from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import features

from common.config import checked
from common.data import glyphs
from common.data.batches import Augmentation
from common.data.domain import Domain
from common.data.glyphs import Glyphs
from common.errors import DataError

EVERY = Glyphs(domains=Glyphs.known_domains)
# Train and test images, and the SHA-256 of both with their labels. The first and the last domain use no font.
CONTENT = {
    "handwritten": (1437, 360, "b62ffdc62c97b17ed028432382bdb2245e70889233adaed12a75dbbc0cc4da80"),
    "printed": (1200, 600, "b2dea21318a08718fcd97963e999a5d3092960d74a3c4efe0926a6128211070e"),
    "signs": (2400, 800, "a269c82d0d5881a7e3f9c92551461fa9c76173b07daaedade8f002adfc806d98"),
    "sketch": (240, 400, "1481a5810e4577eb27899c37e79a348c5cf4be4d8e8973e321fdfc10327fbb19"),
    "blended": (1437, 360, "39ab0f0b648acb2e21ab140e621c2aa7a48667bc64649c90cd5dd8b36cfe451f"),
}
FREETYPE = "2.14.3"


def test_loading_twice_gives_the_same_object_for_any_augmentation() -> None:
    first = Glyphs().load("sketch")
    assert Glyphs(augmentation=Augmentation(flip=True)).load("sketch", root="/nowhere") is first


def test_an_unknown_domain_is_named_with_the_nearest() -> None:
    with pytest.raises(DataError, match="did you mean 'sketch'"):
        Glyphs().load("Sketch")
    with pytest.raises(DataError, match=r"not one of this run's data\.domains"):
        Glyphs(domains=("printed",)).load("sketch")
    with pytest.raises(ValueError, match="did you mean 'printed'"):
        Glyphs(domains=("print",))


@pytest.mark.parametrize("name", CONTENT)
def test_content_is_always_the_same(name: str) -> None:
    train_count, test_count, digest = CONTENT[name]
    train, test = EVERY.load(name).train, EVERY.load(name).test
    assert (len(train), len(test)) == (train_count, test_count)
    for split in (train, test):
        assert split.images.shape[1:] == (3, 32, 32)
        assert split.class_counts(10).min() >= 0.08 * len(split)
    assert not {image.numpy().tobytes() for image in train.images} & {image.numpy().tobytes() for image in test.images}
    if name in glyphs._STYLES and features.version("freetype2") != FREETYPE:
        pytest.skip(f"the content was written down with FreeType {FREETYPE}; this one may draw other pixels")
    found = hashlib.sha256()
    for tensor in (test.images, test.labels, train.images, train.labels):
        found.update(tensor.numpy().tobytes())
    assert found.hexdigest() == digest


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"domains": ()}, "at least one"),
        ({"domains": ("sketch", "sketch")}, "repeated"),
        ({"image_size": 64}, "32x32"),
        ({"image_size": 4}, "greater than or equal to 8"),
    ],
)
def test_fields_out_of_range_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Glyphs(**fields)  # type: ignore[arg-type]


@checked
class Drawn(Glyphs):
    """Glyphs in an order that the global generators draw."""

    def _read(self, domain: str) -> Domain:
        found = super()._read(domain)
        order = np.random.permutation(len(found.train))  # noqa: NPY002  # as one's own code may
        return replace(found, train=found.train.subset(torch.from_numpy(order)))


def test_what_a_reader_draws_is_the_same_in_every_process() -> None:
    labels = []
    for number in (1, 2):
        np.random.seed(number)  # noqa: NPY002
        Drawn.forget()
        labels.append(Drawn().load("sketch").train.labels.tolist())
    Drawn.forget()
    assert labels[0] == labels[1] != Glyphs().load("sketch").train.labels.tolist()
