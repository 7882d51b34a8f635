from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import features

from common.data import glyphs
from common.data.glyphs import Glyphs
from common.errors import DataError

EVERY = Glyphs(domains=Glyphs.known_domains)
SIZES = {
    "handwritten": (1437, 360),
    "printed": (1200, 600),
    "signs": (2400, 800),
    "sketch": (240, 400),
    "blended": (1437, 360),
}
# SHA-256 over all train and test images and labels. The first and the last domain use no font.
CONTENT = {
    "handwritten": "b62ffdc62c97b17ed028432382bdb2245e70889233adaed12a75dbbc0cc4da80",
    "printed": "b2dea21318a08718fcd97963e999a5d3092960d74a3c4efe0926a6128211070e",
    "signs": "a269c82d0d5881a7e3f9c92551461fa9c76173b07daaedade8f002adfc806d98",
    "sketch": "1481a5810e4577eb27899c37e79a348c5cf4be4d8e8973e321fdfc10327fbb19",
    "blended": "39ab0f0b648acb2e21ab140e621c2aa7a48667bc64649c90cd5dd8b36cfe451f",
}
FREETYPE = "2.14.3"


def content_hash(arrays: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(arrays[name].numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("name", SIZES)
def test_sizes_classes_and_types(name: str) -> None:
    domain = EVERY.load(name)
    assert (len(domain.train), len(domain.test)) == SIZES[name]
    for split in (domain.train, domain.test):
        assert split.images.shape[1:] == (3, 32, 32)
        assert split.images.dtype == torch.uint8
        counts = split.class_counts(10)
        assert counts.min() >= 0.08 * len(split)


@pytest.mark.parametrize("name", SIZES)
def test_pixels_are_always_the_same(name: str) -> None:
    if name in glyphs._STYLES and features.version("freetype2") != FREETYPE:
        pytest.skip(f"the content was written down with FreeType {FREETYPE}; this one may draw other pixels")
    assert content_hash(glyphs._make(name)) == CONTENT[name]


def test_train_and_test_share_no_image() -> None:
    for name in SIZES:
        domain = EVERY.load(name)
        train = {image.numpy().tobytes() for image in domain.train.images}
        assert not train & {image.numpy().tobytes() for image in domain.test.images}


def test_domains_differ() -> None:
    means = {name: EVERY.load(name).train.images.float().mean() for name in SIZES}
    assert means["handwritten"] < 100 < means["signs"] < 160 < means["printed"]
    grey = EVERY.load("handwritten").train.images
    assert torch.equal(grey[:, 0], grey[:, 2])
    coloured = EVERY.load("signs").train.images.float()
    assert (coloured[:, 0] - coloured[:, 2]).abs().mean() > 30


def test_a_second_process_reads_the_cache_and_gets_the_same(own_cache: Path) -> None:
    first = Glyphs(domains=("sketch",))._read("sketch")
    (stored,) = own_cache.glob("glyphs-sketch-*.safetensors")
    before = stored.stat().st_mtime_ns
    code = (
        "import hashlib; from common.data.glyphs import Glyphs; "
        "print(hashlib.sha256(Glyphs().load('sketch').train.images.numpy().tobytes()).hexdigest())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "GOLDFINCH_CACHE": str(own_cache)},
    )
    assert result.stdout.strip() == hashlib.sha256(first.train.images.numpy().tobytes()).hexdigest()
    assert stored.stat().st_mtime_ns == before


def test_loading_twice_gives_the_same_object_for_any_augmentation() -> None:
    from common.data.batches import Augmentation

    first = Glyphs().load("sketch")
    assert Glyphs(augmentation=Augmentation(flip=True)).load("sketch", root="/nowhere") is first


def test_an_unknown_domain_is_named_with_the_nearest() -> None:
    with pytest.raises(DataError, match="did you mean 'sketch'"):
        Glyphs().load("Sketch")
    with pytest.raises(DataError, match=r"not one of this run's data\.domains"):
        Glyphs(domains=("printed",)).load("sketch")
    with pytest.raises(ValueError, match="did you mean 'printed'"):
        Glyphs(domains=("print",))


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
