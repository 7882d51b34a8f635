"""Public images: generated textures are equal everywhere, and every device picks the same images."""

from __future__ import annotations

import hashlib

import pytest
import torch

from common.data.public import PublicImages, fingerprint
from common.data.textures import Textures
from common.errors import DataError


def test_textures_have_known_pixels():
    """A changed pixel would part clients of different versions without a word."""
    for _ in range(2):  # the second time from the cache
        drawn = Textures()._read("textures")
        assert drawn.train.images.shape == (1024, 3, 32, 32)
        assert drawn.test.images.shape == (64, 3, 32, 32)
        assert not bool(drawn.train.labels.any())
        digest = hashlib.sha256(drawn.train.images.numpy().tobytes()).hexdigest()
        assert digest[:16] == "f1bc57ca4112013c"


@pytest.mark.parametrize("size", [16, 64])
def test_textures_come_in_any_size(size):
    drawn = Textures(image_size=size).draw("test")
    assert drawn.shape == (64, 3, size, size)
    small = Textures().draw("test").float().mean((2, 3))
    assert float((drawn.float().mean((2, 3)) - small).abs().max()) < 6  # of 255: the same images


def test_every_device_picks_the_same_images():
    public = PublicImages(Textures(), "textures", 100)
    first, second = public.load(), public.load()
    assert first.shape == (100, 3, 32, 32)
    assert torch.equal(first, second)
    whole = Textures().load("textures").train.images
    rows = {tuple(image.flatten().tolist()) for image in first}
    assert len(rows) == 100
    assert rows <= {tuple(image.flatten().tolist()) for image in whole}
    assert not torch.equal(first, whole[:100])  # a data set may be sorted by class


def test_fingerprints_of_different_sets_differ():
    images = PublicImages(Textures(), "textures", 4).load()
    changed = images.clone()
    changed[3, 2, 31, 31] ^= 1
    assert int(fingerprint(images)) == int(fingerprint(images.clone()))
    for other in (changed, images.flip(0), images.reshape(4, 3, 64, 16)):
        assert int(fingerprint(images)) != int(fingerprint(other))
    assert fingerprint(images).dtype == torch.int64


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="domain"):
        PublicImages(Textures(), "blended")
    with pytest.raises(ValueError, match="greater than or equal to 2"):
        PublicImages(Textures(), "textures", 1)
    with pytest.raises(DataError, match=r"1024 images, 5000 are asked"):
        PublicImages(Textures(), "textures", 5000).load()
