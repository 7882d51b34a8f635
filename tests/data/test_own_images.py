"""Images as people have them: rotated by the camera, not square, of other formats, or in a list."""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from data_makers import write_classes, write_image
from PIL import Image

from common.composition import compose_config
from common.config import build
from common.data import image_files
from common.data.folder import Folder
from common.data.image_files import Reading, Resize, decode_image
from common.data.table import Table
from common.errors import DataError

HEIF = b"\0\0\0\x18ftypheic\0\0\0\0"
"""What a photo of a phone begins with."""


def write_halves(path: Path) -> Path:
    """16 pixels wide and 8 high: black on the left, white on the right."""
    image = Image.new("RGB", (16, 8))
    image.paste((255, 255, 255), (8, 0, 16, 8))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
    return path


def test_nothing_is_augmented_unless_it_is_asked_for(tmp_path: Path) -> None:
    write_classes(tmp_path / "site", {"cat": 2})
    source = build(compose_config(["data=folder", f"data.root={tmp_path}"])["data"], "data")
    found = source.augmentation
    assert (found.crop_padding, found.flip, found.rotation, found.erasing) == (0, False, 0, 0)


@pytest.mark.parametrize("resize", ["squash", "crop", "pad"])
def test_an_image_that_is_not_square_becomes_one(tmp_path: Path, resize: Resize) -> None:
    image = decode_image(write_halves(tmp_path / "a.png"), 4, "a", Reading(resize))
    assert image.shape == (4, 4, 3)
    assert image[2, :, 0].tolist() == pytest.approx([0, 0, 255, 255], abs=64)
    assert (image[0].max() == 0) == (resize == "pad"), "padding is black at the top"


def test_cropping_drops_the_ends_of_the_longer_side(tmp_path: Path) -> None:
    image = Image.new("RGB", (16, 8), (255, 0, 0))
    image.paste((0, 255, 0), (4, 0, 12, 8))
    image.save(tmp_path / "a.png")
    assert decode_image(tmp_path / "a.png", 8, "a", Reading("crop"))[..., 0].max() == 0
    assert decode_image(tmp_path / "a.png", 8, "a")[..., 0].max() == 255


def test_the_cache_has_one_entry_per_way_of_resizing(tmp_path: Path) -> None:
    for number in range(2):
        write_halves(tmp_path / "site" / "cat" / f"{number}.png")
    squashed = Folder(root=str(tmp_path), image_size=8).load("site").train.images
    padded = Folder(root=str(tmp_path), image_size=8, resize="pad").load("site").train.images
    assert not squashed.equal(padded)


def test_files_that_are_not_read_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_files, "reads_heif", lambda: False)  # as without pillow-heif
    write_classes(tmp_path / "site", {"cat": 2, "dog": 2})
    for name in ("cat/a.heic", "dog/b.HEIC", "dog/notes.txt", "dog/.hidden"):
        (tmp_path / "site" / name).write_bytes(HEIF if name.lower().endswith("heic") else b"words")
    with caplog.at_level(logging.WARNING):
        Folder(root=str(tmp_path), image_size=8).load("site")
    assert re.search(r"2 \.heic \(.*\[heif\]'? reads it, or convert it to JPEG\), 1 \.txt", caplog.text)


# ---- HEIF ------------------------------------------------------------------------------------------------------------


def test_photos_of_phones_are_read_where_the_library_is_installed(tmp_path: Path) -> None:
    heif = pytest.importorskip("pillow_heif", reason="the extra heif is not installed")
    heif.register_heif_opener()
    for number in range(2):
        path = tmp_path / "site" / "cat" / f"{number}.HEIC"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (200, 200, 200)).save(path, format="HEIF")
    images = Folder(root=str(tmp_path), image_size=8).load("site").train.images
    assert (images.float() - 200).abs().max() <= 4


def test_photos_of_phones_are_counted_where_it_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "reads_heif", lambda: False)
    (tmp_path / "site" / "cat").mkdir(parents=True)
    (tmp_path / "site" / "cat" / "0.heic").write_bytes(HEIF)
    with pytest.raises(DataError, match=r"0\.heic is a HEIF image: .*pip install .*\[heif\]'? reads it"):
        assert Folder(root=str(tmp_path)).class_names


# ---- a site whose images are all to be scored ------------------------------------------------------------------------


def external_folders(root: Path, word: str) -> Callable[[], Folder]:
    """A site with both splits, and one whose images are all of a split."""
    write_classes(root / "ward" / "train", {"cat": 4, "dog": 4})
    write_classes(root / "ward" / "test", {"cat": 2, "dog": 2}, start=50)
    write_classes(root / "external" / word, {"cat": 10, "dog": 10}, start=100)
    return lambda: Folder(root=str(root), image_size=8)


def external_table(root: Path, word: str) -> Callable[[], Table]:
    """The same in a table."""
    lines = ["path,label,domain,split"]
    for number in range(32):
        write_image(root / f"{number}.png", number)
        site, split = ("ward", ("train", "test")[number % 4 // 3]) if number < 12 else ("external", word)
        lines.append(f"{number}.png,{('cat', 'dog')[number % 2]},{site},{split}")
    (root / "list.csv").write_text("\n".join(lines) + "\n")
    return lambda: Table(root=str(root), path="list.csv", image_size=8)


@pytest.mark.parametrize("word", ["test", "validation"])
@pytest.mark.parametrize("make", [external_folders, external_table])
def test_a_site_of_scored_images_alone_is_not_trained_on_unasked(
    make: Callable[[Path, str], Callable[[], Folder | Table]], word: str, tmp_path: Path
) -> None:
    """The usual external test site: four of five of its test images were trained on."""
    read = make(tmp_path, word)
    with pytest.raises(DataError, match=rf"'external' in .* has 20 {word} images, and no train images") as told:
        read().load("external")
    with pytest.raises(DataError, match="no train images"):
        read().find_files("external")
    assert "call the split of all of them train" in str(told.value)
    if make is external_folders:
        (tmp_path / "external" / word).rename(tmp_path / "external" / "train")
    else:
        text = (tmp_path / "list.csv").read_text()
        (tmp_path / "list.csv").write_text(re.sub(rf"external,{word}", "external,train", text))
    source = read()
    source.forget()
    found = source.load("external")
    assert (len(found.train), len(found.test)) == (16, 4)
    assert f"goldfinch evaluate MODEL --split all data={source.name} and the run's other" in str(told.value)
    step = re.search(r"run with (.*), or goldfinch evaluate MODEL --split all", str(told.value))
    assert step
    composed = compose_config(["data=folder", "data.domains=[ward]", *shlex.split(step[1])])
    protocol = build(composed["protocol"], "protocol")
    assert [client.domain for client in protocol.clients(source)] == ["ward"]
    assert len(protocol.test_split(found)) == 20


def test_a_site_to_be_scored_with_one_image_of_each_class_gets_a_remedy_that_works(tmp_path: Path) -> None:
    read = external_folders(tmp_path, "test")
    for path in sorted((tmp_path / "external").rglob("*.png"))[1:10]:
        path.unlink()
    for path in sorted((tmp_path / "external").rglob("*.png"))[2:]:
        path.unlink()
    with pytest.raises(DataError, match="score them, call the split of one of them train, too") as told:
        read().load("external")
    assert "held out" not in str(told.value)
    (tmp_path / "external" / "train").mkdir()
    (tmp_path / "external" / "test" / "cat").rename(tmp_path / "external" / "train" / "cat")
    assert len(read().load("external").whole) == 2
