"""The public data sets themselves (whole or in part), where GOLDFINCH_DATA says they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from common.data.digits import Digits
from common.data.domain import Domain
from common.data.image_files import image_files
from common.data.office_caltech import OfficeCaltech
from common.data.pacs import PACS
from common.errors import DataError

DIGITS = Digits(domains=Digits.known_domains)
ROOT = os.environ.get("GOLDFINCH_DATA", "")
pytestmark = pytest.mark.skipif(not ROOT, reason="needs the public data sets: set GOLDFINCH_DATA to their directory")


@pytest.fixture(autouse=True)
def own_cache(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The session's cache, so that no set is decoded twice."""
    monkeypatch.setenv("GOLDFINCH_CACHE", str(cache_folder))
    return cache_folder


def load(source: Digits | OfficeCaltech | PACS, domain: str) -> Domain:
    try:
        return source.load(domain)
    except DataError as error:
        if "is not in" in str(error) or "is not there" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.parametrize(
    "name",
    ["mnist", "usps", "svhn", pytest.param("mnist_m", marks=pytest.mark.slow), "syn", "synth_digits", "computer_fonts"],
)
@pytest.mark.long
def test_digits(name: str) -> None:
    domain = load(DIGITS, name)
    for split in (domain.train, domain.test):
        assert split.images.shape[1:] == (3, 32, 32)
        assert split.class_counts(10).min() > 0.05 * len(split)
        # pictures, not noise or a wrong stride: neighbouring pixels are alike
        pixels = split.images[:500].float()
        assert (pixels[..., 1:] - pixels[..., :-1]).abs().mean() < 0.6 * pixels.std()
    grey = torch.equal(domain.train.images[:, 0], domain.train.images[:, 2])
    assert grey == (name in ("mnist", "usps", "computer_fonts"))


@pytest.mark.long
def test_a_digits_mean_image_of_one_domain_is_nearest_to_its_own_of_another() -> None:
    """Labels mean the same digit in MNIST and USPS: 10 mean images correlate best with their own."""
    means = []
    for name in ("mnist", "usps"):
        split = load(DIGITS, name).train
        pictures = torch.stack(
            [split.images[split.labels == digit].float().mean((0, 1)).flatten() for digit in range(10)]
        )
        means.append(torch.nn.functional.normalize(pictures - pictures.mean(0), dim=1))
    matches = (means[0] @ means[1].T).argmax(1) == torch.arange(10)
    assert matches.sum() >= 9  # MNIST's mean 7 looks like USPS's mean 9; with shifted labels nothing would match


@pytest.mark.parametrize("name", OfficeCaltech.known_domains)
@pytest.mark.long
def test_office_caltech(name: str) -> None:
    domain = load(OfficeCaltech(), name)
    total = len(domain.whole)
    directory = OfficeCaltech(root=ROOT).directory(name)
    assert total == sum(len(image_files(path)) for path in directory.iterdir() if path.is_dir())
    assert len(domain.train) == total - 2 * (total // 10) - max(0, total % 10 - 8)
    assert len(load(OfficeCaltech(split="lists"), name).whole) == total


@pytest.mark.long
def test_eight_of_amazon_s_test_images_are_training_images() -> None:
    """Of the 80 % of the public set that is used here: the whole set may have more."""
    whole = {name: load(OfficeCaltech(), name) for name in OfficeCaltech.known_domains}
    if len(whole["amazon"].test) != 152:
        pytest.skip("another part of Office-Caltech-10")
    dropped = {name: load(OfficeCaltech(duplicates="drop"), name) for name in OfficeCaltech.known_domains}
    lost = {name: len(whole[name].test) - len(dropped[name].test) for name in whole}
    assert lost == {"caltech": 0, "amazon": 8, "webcam": 0, "dslr": 0}


@pytest.mark.parametrize("name", PACS.known_domains)
@pytest.mark.long
def test_pacs(name: str) -> None:
    domain = load(PACS(image_size=32), name)
    floored = load(PACS(image_size=32, split="per_class_fraction"), name)
    assert len(domain.whole) == len(floored.whole)
    assert domain.train.class_counts(7).min() > 0
    assert len(domain.train) > 2 * len(domain.test)
