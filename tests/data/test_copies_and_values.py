"""Images in two places or with two labels, images that come out black, broken images, and a cache that is not stale."""

from __future__ import annotations

import bz2
import errno
import logging
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_makers import write_classes, write_deep_colours
from PIL import Image

from client.device import Device
from common.client_state import ClientStore
from common.config import checked
from common.data.batches import Split
from common.data.digit_files import read_usps
from common.data.domain import Domain, Duplicates
from common.data.folder import Folder
from common.data.image_files import decode_image, without_duplicates
from common.data.inspection import check_test_images, compare_images, inspect, inspect_all
from common.data.protocols import ClientSpec, LeaveOut, OneClientPerDomain
from common.data.value_ranges import sliver_of
from common.errors import DataError
from common.privacy import GaussianPrivacy
from common.settings import RunSettings, load_settings
from common.text import warn_once
from strategies.core.participants import Registry


@pytest.fixture(autouse=True)
def _fresh_warnings() -> None:
    warn_once.cache_clear()


def noise(path: Path, seed: int) -> Path:
    """Write an image like no other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    return path


def sites(root: Path, **fields: object) -> Folder:
    """Two sites with train and test folders of two classes, all images different."""
    seed = 0
    for site in ("site_a", "site_b"):
        for part in ("train", "test"):
            for name in ("cat", "dog"):
                for number in range(3):
                    noise(root / site / part / name / f"{number}.png", seed)
                    seed += 1
    return Folder(root=str(root), image_size=8, **fields)  # type: ignore[arg-type]


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read_bytes())


# ---- copies ----------------------------------------------------------------------------------------------------------


COPIES = {
    "within a site": ("site_a/test/cat/0.png", "1 test images are also training images of their domain (site_a 1)"),
    "across sites": ("site_b/test/cat/0.png", "1 test images of one domain are training images of another"),
}


@pytest.mark.parametrize("case", COPIES)
def test_test_images_that_are_training_images_are_counted(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, told = COPIES[case]
    data = sites(tmp_path)
    with caplog.at_level(logging.WARNING):
        inspect(data, data.domains)
        assert not caplog.text, "different images are not remarked on"
        copy(tmp_path / "site_a/train/cat/0.png", tmp_path / target)
        inspect(replace(data, image_size=9), data.domains)
    assert told in caplog.text
    assert str(tmp_path / target) in caplog.text
    with pytest.raises(DataError, match=re.escape(told)):
        inspect(replace(data, duplicates="refuse"), data.domains)


def test_files_of_equal_length_are_read_once_to_find_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files without compression all have one length, and a domain has thousands of them."""
    files = [noise(tmp_path / f"{number}.bmp", number) for number in range(20)]
    copy(files[3], files[15])
    assert len({path.stat().st_size for path in files}) == 1
    opened: list[Path] = []
    before = Path.open

    def counting(path: Path, *args: Any, **more: Any) -> Any:
        opened.append(path)
        return before(path, *args, **more)

    monkeypatch.setattr(Path, "open", counting)
    train, test = [(path, 0) for path in files[:10]], [(path, 0) for path in files[10:]]
    assert without_duplicates(test, train, tmp_path) == [item for item in test if item[0] != files[15]]
    assert sorted(opened) == sorted(files)
    with pytest.raises(DataError, match=r"all 2 test images of .* a training image.*set data\.duplicates=warn"):
        without_duplicates([(files[15], 0)] * 2, train, tmp_path)


def test_one_image_with_two_labels_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = sites(tmp_path)
    copy(tmp_path / "site_a/train/cat/0.png", tmp_path / "site_b/train/dog/0.png")
    with pytest.raises(DataError, match=r"two labels: .*cat/0.png is 'cat' and .*dog/0.png is 'dog'"):
        inspect(data, data.domains)
    with caplog.at_level(logging.WARNING):
        inspect(data, data.domains, private=True)
    assert "two labels" in caplog.text, "of a private run nothing follows from it, but its owner is told"


def test_a_test_image_with_another_label_than_its_copy_is_not_dropped(tmp_path: Path) -> None:
    """Dropping it would hide that one image has two labels."""
    data = sites(tmp_path, duplicates="drop")
    copy(tmp_path / "site_a/train/cat/0.png", tmp_path / "site_a/test/dog/9.png")
    copy(tmp_path / "site_a/train/cat/1.png", tmp_path / "site_a/test/cat/9.png")
    assert len(data.load("site_a").test) == 7, "the copy of the same class is dropped"
    with pytest.raises(DataError, match=r"two labels: .*cat/0.png is 'cat' and .*dog/9.png is 'dog'"):
        inspect(data, data.domains)


def test_two_domains_with_the_same_images_are_refused(tmp_path: Path) -> None:
    source = sites(tmp_path)
    for path in sorted((tmp_path / "site_a").rglob("*.png")):
        copy(path, tmp_path / "site_b" / path.relative_to(tmp_path / "site_a"))
    with pytest.raises(DataError, match="site_a and site_b hold the same 12 images"):
        inspect(source, source.domains)


def test_a_device_compares_its_own_domain(tmp_path: Path) -> None:
    sites(tmp_path)
    source = Folder(domains=("site_a", "site_b"), classes=("cat", "dog"), image_size=8, duplicates="refuse")
    copy(tmp_path / "site_a/train/cat/0.png", tmp_path / "site_a/test/cat/0.png")
    found: Domain = source.load("site_a", root=str(tmp_path / "site_a"))
    with pytest.raises(DataError, match="also training images"):
        compare_images(source, [found])


UNSEEN = LeaveOut(leave_out=("site_b",), unseen="whole")
"""Nobody trains on the second site, and all of its images are scored."""


def test_all_images_of_an_unseen_domain_are_compared_where_all_are_scored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = sites(tmp_path)
    copy(tmp_path / "site_a/train/cat/0.png", tmp_path / "site_b/train/cat/0.png")
    told = "1 test images of one domain are training images of another (site_b 1)"
    for protocol in (replace(UNSEEN, unseen="test"), UNSEEN):
        assert told not in caplog.text, "of an unseen domain's train split nothing is trained on or scored"
        inspect_all(data, protocol, 0)
    assert told in caplog.text
    with pytest.raises(DataError, match=re.escape(told)):
        inspect_all(replace(data, duplicates="refuse"), UNSEEN, 0)
    (tmp_path / "site_b/train/cat/0.png").unlink()  # as the message says, at one site
    data.forget()
    inspect_all(replace(data, duplicates="refuse"), UNSEEN, 0)


@pytest.mark.parametrize("unseen", ["test", "whole"])
def test_copies_within_an_unseen_domain_are_not_said_to_be_trained_on(unseen: Any, tmp_path: Path) -> None:
    data = sites(tmp_path, duplicates="refuse")
    copy(tmp_path / "site_b/train/cat/0.png", tmp_path / "site_b/test/cat/0.png")
    inspect_all(data, replace(UNSEEN, unseen=unseen), 0)
    with pytest.raises(DataError, match="are also training images of their domain"):
        inspect_all(data, OneClientPerDomain(), 0)


@checked
class ScoresTraining(OneClientPerDomain):
    """A protocol of the user's own that scores what it trains on."""

    def test_split(self, domain: Domain) -> Split:
        return domain.whole


def test_a_protocol_of_one_s_own_that_scores_training_images_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inspect_all(sites(tmp_path), ScoresTraining(), 0)
    assert "12 test images are also training images of their domain (site_a 6, site_b 6)" in caplog.text


@pytest.mark.parametrize("where", ["within", "across"])
def test_copies_of_validation_images_that_are_trained_on_are_told(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, protocol = sites(tmp_path), OneClientPerDomain(validation=0.3)
    found = data.load("site_a")
    trained, validated = protocol.parts(found, ClientSpec("site_a", 0), 0)
    same = found.train.labels[trained] == found.train.labels[validated[0]]
    original = found.train_files[trained[same][0]]
    target, told = found.train_files[validated[0]], "1 validation images are also training images of their domain"
    if where == "across":
        trained, validated = protocol.parts(data.load("site_b"), ClientSpec("site_b", 0), 0)
        names = [data.load("site_b").train_files[index] for index in validated.tolist()]
        target = next(path for path in names if path.parent.name == original.parent.name)
        told = "1 validation images of one domain are training images of another"
    inspect_all(data, protocol, 0)
    assert not caplog.text
    copy(original, target)
    data.forget()
    inspect_all(replace(data, duplicates="refuse"), OneClientPerDomain(), 0)
    inspect_all(data, protocol, 0)
    assert told in caplog.text
    with pytest.raises(DataError, match=told):
        inspect_all(replace(data, duplicates="refuse"), protocol, 0)


@checked
class Listed(Folder):
    """A data set of a user, whose classes are the folders on the disk, whatever the settings name."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """The folders."""
        return tuple(sorted(each.name for each in Path(str(self.root), self.domains[0]).iterdir()))


@pytest.mark.parametrize("target", ["common.data.folder.Folder", f"{__name__}.Listed"])
def test_a_device_that_numbers_the_classes_of_its_own_folders_otherwise_is_refused(target: str, tmp_path: Path) -> None:
    """Label 0 was a cat at one and a dog at the other, without a word."""

    def settings_of(place: str, *more: str) -> RunSettings:
        words = ["method=fedavg", "data=folder", f"data._target_={target}", "data.domains=[site]", "data.image_size=8"]
        return load_settings([*words, "model=small", "train.device=cpu", f"data.root={tmp_path / place}", *more])

    def refused(place: str, *more: str) -> str | None:
        settings = settings_of(place, *more)
        device = Device(settings, ClientSpec("site", 0), lambda run: ClientStore(tmp_path / "own"))
        return Registry(settings_of("server", *more)).admit(device.register())

    write_classes(tmp_path / "server" / "site", {"cat": 4, "dog": 4})
    write_classes(tmp_path / "alike" / "site", {"cat": 5, "dog": 6})
    write_classes(tmp_path / "unlike" / "site", {"dog": 4, "fox": 4})
    write_classes(tmp_path / "fewer" / "site", {"cat": 5})
    assert refused("alike") is None
    assert "let settings name them, as data.classes=[a,b] does" in str(refused("unlike"))
    assert refused("fewer")
    if target.endswith("Folder"):
        assert refused("fewer", "data.classes=[cat,dog]") is None


@pytest.mark.parametrize("duplicates", ["drop", "refuse"])
def test_a_private_run_refuses_what_training_images_would_decide(duplicates: Duplicates, tmp_path: Path) -> None:
    privacy = GaussianPrivacy(clip=1.0, noise_multiplier=1.0)
    with pytest.raises(Exception, match=f"data.duplicates={duplicates}"):
        check_test_images(sites(tmp_path, duplicates=duplicates), privacy)
    with pytest.raises(Exception, match=r"data\.broken=skip"):
        check_test_images(Folder(root=str(tmp_path), broken="skip"), privacy)


# ---- values ----------------------------------------------------------------------------------------------------------


def ramp(dtype: type, low: float, high: float, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).uniform(low, high, (8, 8))
    return values.astype(dtype)


def write_site(root: Path, write: Callable[[Path, int], None], count: int) -> None:
    """Write one class of one site."""
    (root / "site" / "cat").mkdir(parents=True)
    for number in range(count):
        write(root / "site" / "cat" / f"{number}", number)


def as_float(path: Path, seed: int) -> None:
    Image.fromarray(ramp(np.float32, 0, 1, seed)).save(path.with_suffix(".tif"))


def as_twelve_bits(path: Path, seed: int) -> None:
    Image.fromarray(ramp(np.uint16, 0, 4095, seed)).save(path.with_suffix(".png"))


def as_fourteen_bits_of_colour(path: Path, seed: int) -> None:
    colours = np.random.default_rng(seed).integers(0, 2**14, (8, 8, 3), dtype=np.uint16)
    write_deep_colours(path.with_suffix(".png"), colours)


def as_tomography(path: Path, seed: int) -> None:
    Image.fromarray(ramp(np.int32, -1024, 3071, seed)).save(path.with_suffix(".tif"))


def as_second_page(path: Path, seed: int) -> None:
    page = Image.fromarray(ramp(np.uint8, 0, 255, seed))
    Image.new("L", (8, 8), 255).save(path.with_suffix(".tif"), save_all=True, append_images=[page])


def as_strokes(path: Path, seed: int) -> None:
    image = np.zeros((8, 8, 4), dtype=np.uint8)
    image[..., 3] = ramp(np.uint8, 0, 255, seed)
    Image.fromarray(image).save(path.with_suffix(".png"))


def as_class_numbers(path: Path, seed: int) -> None:
    Image.fromarray(ramp(np.uint8, 0, 9, seed)).save(path.with_suffix(".png"))


WRITERS = [
    (as_float, r"data\.range=\[0,1\]", {"range": (0.0, 1.0)}),
    (as_twelve_bits, r"data\.range=\[0,4095\]", {"range": (0.0, 4095.0)}),
    (as_fourteen_bits_of_colour, r"data\.range=\[0,16383\]", {"range": (0.0, 16383.0)}),
    (as_tomography, r"data\.range=\[-\d+,30\d\d\]", {"range": (-1024.0, 3071.0)}),
    (as_second_page, r"data\.page=2", {"page": 2}),
    (as_strokes, r"lay the images on a background", None),
    (as_class_numbers, r"data\.range=\[0,15\]", {"range": (0.0, 9.0)}),
]


@pytest.mark.parametrize(("write", "told", "remedy"), WRITERS, ids=[writer[0].__name__ for writer in WRITERS])
def test_images_that_come_out_black_are_refused_with_a_remedy_that_works(
    write: Callable[[Path, int], None], told: str, remedy: dict[str, object] | None, tmp_path: Path
) -> None:
    write_site(tmp_path, write, 5)
    with pytest.raises(DataError, match=rf"5 of 5 images (are black|use only).*cat/0\.(png|tif).*{told}"):
        Folder(root=str(tmp_path), image_size=8).load("site")
    if remedy is None:
        return
    images = Folder(root=str(tmp_path), image_size=8, **remedy).load("site").train.images  # type: ignore[arg-type]
    assert int(images.max()) - int(images.min()) > 200


def test_a_few_such_images_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(5):
        noise(tmp_path / "site" / "cat" / f"{number}.png", number)
    as_strokes(tmp_path / "site" / "cat" / "5", 5)
    for _ in range(2):  # the second time from the cache
        warn_once.cache_clear()
        with caplog.at_level(logging.WARNING):
            Folder(root=str(tmp_path), image_size=8)._read("site")
        assert caplog.text.count("1 of 6 images are black, flat or nearly so") == 1
        caplog.clear()


def test_a_value_that_stands_for_no_measurement_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(8):
        values = np.random.default_rng(number).uniform(0, 250, (32, 32)).astype(np.float32)
        values[0] = -9999
        place = tmp_path / "a" / ("cat", "dog")[number % 2] / f"{number}.tif"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(values).save(place)
    with caplog.at_level(logging.WARNING):
        Folder(root=str(tmp_path), image_size=8).load("a")
    assert "8 of 8 images have pixels without a measurement" in caplog.text
    assert "-9999 in 3.1% of its pixels" in caplog.text


def test_transparent_pixels_and_colours_of_16_bits_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(8):
        colours = np.random.default_rng(number).integers(0, 256, (8, 8, 4), dtype=np.uint8)
        colours[..., 3] = 255
        if number < 2:
            colours[:4, :, 3] = 0
        place = tmp_path / "a" / ("cat", "dog")[number % 2] / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(colours).save(place)
    with caplog.at_level(logging.WARNING):
        Folder(root=str(tmp_path), image_size=8).load("a")
    assert f"2 of 8 images have transparent pixels, such as {tmp_path}/a/cat/0.png" in caplog.text
    caplog.clear()
    write_site(tmp_path / "deep", as_fourteen_bits_of_colour, 5)
    with caplog.at_level(logging.WARNING):
        Folder(root=str(tmp_path / "deep"), image_size=8, range=(0.0, 16383.0)).load("site")
    assert "5 of 5 images have colours of 16 bits" in caplog.text
    assert "transparent pixels" not in caplog.text
    assert "64 levels in data.range" in caplog.text


def test_ordinary_images_are_read_as_before(tmp_path: Path) -> None:
    Image.fromarray(ramp(np.uint16, 0, 65535, 0)).save(tmp_path / "full.png")
    write_classes(tmp_path / "data" / "site", {"cat": 5})
    assert int(decode_image(tmp_path / "full.png", 8, "full").max()) > 200
    assert len(Folder(root=str(tmp_path / "data"), image_size=8).load("site").whole) == 5, "flat as they are stored"


@pytest.mark.parametrize("values", [(1.0, 0.0), (0.0,), (1.0, 1.0)])
def test_a_range_is_black_and_white(values: tuple[float, ...], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="range must be empty or"):
        Folder(root=str(tmp_path), domains=("a",), range=values)


def test_a_page_that_is_not_there_is_named(tmp_path: Path) -> None:
    write_site(tmp_path, as_second_page, 2)
    with pytest.raises(DataError, match=r"it has no page 3, which data\.page names"):
        Folder(root=str(tmp_path), image_size=8, page=3).load("site")


def test_usps_in_another_range_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    text = "".join(f"{1 + row % 10} {row + 1}:0.5 {row + 2}:1\n" for row in range(10))
    (tmp_path / "usps.bz2").write_bytes(bz2.compress(text.encode()))
    with pytest.raises(DataError, match=r"values from 0 to 1; .* -1\.\.1"):
        read_usps(tmp_path, True)


def _flat_bitmap(path: Path, level: int) -> None:
    """Write an image whose file has one size and one time, whatever its level."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (level, level, level)).save(path, "BMP")
    os.utime(path, ns=(10**18, 10**18))


def test_a_sliver_is_of_images_that_vary() -> None:
    assert sliver_of(np.zeros((3, 4, 4), dtype=np.uint8)) is None
    assert sliver_of(np.arange(16, dtype=np.uint8).reshape(1, 4, 4)) == (0, 15)
    assert sliver_of(np.arange(0, 256, 16, dtype=np.uint8).reshape(1, 4, 4)) is None


# ---- broken images ---------------------------------------------------------------------------------------------------


def test_broken_images_of_all_sites_are_named_at_once(tmp_path: Path) -> None:
    source = sites(tmp_path)
    broken = ["site_a/train/cat/0.png", "site_a/test/dog/1.png", "site_b/train/dog/2.png"]
    for name in broken:
        (tmp_path / name).write_bytes(b"no image")
    with pytest.raises(DataError) as told:
        inspect(source, source.domains)
    for name in broken:
        assert f"{tmp_path / name} cannot be decoded" in str(told.value)


def test_broken_images_can_be_skipped_and_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sites(tmp_path)
    for name in ("site_a/train/cat/0.png", "site_a/test/dog/1.png"):
        (tmp_path / name).write_bytes(b"no image")
    source = Folder(root=str(tmp_path), image_size=8, broken="skip")
    for _ in range(2):  # the second time from the cache
        warn_once.cache_clear()
        with caplog.at_level(logging.WARNING):
            domain = source._read_from(tmp_path / "site_a", "site_a")
        assert domain.train.labels.tolist() == [0, 0, 1, 1, 1]
        assert domain.test.labels.tolist() == [0, 0, 0, 1, 1]
        assert [path.name for path in domain.train_files] == ["1.png", "2.png", "0.png", "1.png", "2.png"]
        assert caplog.text.count("2 files skipped as no image (data.broken=skip)") == 1
        assert "site_a/test/dog/1.png" in caplog.text
        caplog.clear()


# ---- the cache -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["refuse", "skip"])
def test_a_file_that_the_system_does_not_give_is_no_broken_image(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skipped, it would be kept in the cache as no image, although the disk gives it a minute later."""
    data = sites(tmp_path, broken=broken)
    first = tmp_path / "site_a" / "train" / "cat" / "0.png"
    before = Path.open

    def failing(path: Path, *args: Any, **more: Any) -> Any:
        if path == first:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return before(path, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", failing)
        with pytest.raises(DataError, match=r"0.png cannot be read \(Input/output error\)"):
            data.load("site_a")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: path != first)
        with pytest.raises(DataError, match=r"0.png .*give this user the right to read it"):
            data.load("site_a")
    assert len(data.load("site_a").whole) == 12


def test_classes_that_are_renamed_into_each_other_are_read_again(tmp_path: Path) -> None:
    for level, name in ((100, "cat"), (150, "dog")):
        for number in range(5):
            _flat_bitmap(tmp_path / "site" / name / f"{number}.bmp", level)
    source = Folder(root=str(tmp_path), image_size=8)
    assert source._read("site").train.images[:, 0, 0, 0].tolist() == [100] * 4 + [150] * 4
    (tmp_path / "site" / "cat").rename(tmp_path / "site" / "other")
    (tmp_path / "site" / "dog").rename(tmp_path / "site" / "cat")
    (tmp_path / "site" / "other").rename(tmp_path / "site" / "dog")
    assert source._read("site").train.images[:, 0, 0, 0].tolist() == [150] * 4 + [100] * 4


def test_a_file_that_is_written_again_under_its_old_time_is_read_again(tmp_path: Path) -> None:
    for number in range(2):
        noise(tmp_path / "site" / "cat" / f"{number}.png", number)
    _flat_bitmap(tmp_path / "site" / "cat" / "0.bmp", 100)
    source = Folder(root=str(tmp_path), image_size=8)
    before = source._read("site").train.images
    _flat_bitmap(tmp_path / "site" / "cat" / "0.bmp", 200)
    assert not source._read("site").train.images.equal(before)
