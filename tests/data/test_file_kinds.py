"""Files of every depth, orientation and sense of black and white become the image that they show."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from data_makers import write_tiff
from PIL import Image

from common.data.folder import Folder
from common.data.image_files import Reading, decode_each, decode_image
from common.data.value_ranges import lay_on_white, make_finite
from common.errors import DataError

SIZE = 16


def picture(mode: str) -> Image.Image:
    """Return an image whose height and width differ."""
    draws = np.random.default_rng(0)
    grey = draws.integers(0, 256, (20, 40), dtype=np.uint8)
    if mode == "I;16":
        return Image.fromarray(grey.astype(np.uint16) * 257)
    if mode == "P":
        return Image.fromarray(grey).convert("RGB").quantize(8)
    if mode == "L":
        return Image.fromarray(grey)
    return Image.frombytes(mode, (40, 20), draws.integers(0, 256, (20, 40, 4), dtype=np.uint8).tobytes())


@pytest.mark.parametrize("compression", ["raw", "tiff_lzw"])
@pytest.mark.parametrize("mode", ["L", "P", "CMYK", "RGBA", "I;16"])
def test_a_tiff_is_turned_as_a_png_is(mode: str, compression: str, tmp_path: Path) -> None:
    image = picture(mode)
    plain = image
    if mode != "I;16":
        plain = image.convert("RGB")
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x112] = orientation
        image.save(tmp_path / "a.tif", exif=exif, compression=compression)
        plain.save(tmp_path / "a.png", exif=exif)
        expected = decode_image(tmp_path / "a.png", SIZE, "a")
        with (tmp_path / "a.tif").open("rb") as stream:
            assert np.array_equal(decode_image(stream, SIZE, "a"), expected), orientation
        assert np.array_equal(decode_image(tmp_path / "a.tif", SIZE, "a"), expected), orientation


DEPTHS = {
    "8 bits": ("|u1", 255, Reading()),
    "16 bits": ("<u2", 65535, Reading()),
    "12 bits in 16": ("<u2", 4095, Reading(value_range=(0, 4095))),
    "16 bits, the larger byte first": (">u2", 65535, Reading()),
    "shares": ("<f4", 1, Reading(value_range=(0, 1))),
}


@pytest.mark.parametrize("photometric", [0, 1])
@pytest.mark.parametrize("depth", DEPTHS)
def test_black_is_black_whichever_end_is_white(depth: str, photometric: int, tmp_path: Path) -> None:
    kind, white, reading = DEPTHS[depth]
    shown = np.zeros((SIZE, SIZE))
    shown[:4] = white
    stored = shown
    if photometric == 0:
        stored = white - shown
    place = write_tiff(tmp_path / "a.tif", stored.astype(kind), photometric)
    if photometric == 0 and kind == ">u2":
        with pytest.raises(DataError, match=r"16 bits where 0 is white: save it so that 0 is black \(MinIsBlack\)"):
            decode_image(place, SIZE, "a", reading)
        write_tiff(place, shown.astype(kind), 1)
    image = decode_image(place, SIZE, "a", reading)
    assert (image[:4] == 255).all()
    assert (image[4:] == 0).all()


@pytest.mark.parametrize(("kind", "length"), [("PNG", 10), ("JPEG", 4), ("GIF", 6), ("WEBP", 14)])
def test_the_beginning_of_an_image_is_said_to_be_cut_off(kind: str, length: int, tmp_path: Path) -> None:
    place = tmp_path / "image"
    picture("L").save(place, format=kind)
    place.write_bytes(place.read_bytes()[:length])
    with pytest.raises(DataError, match=rf"cannot be decoded \(it is a {kind} image that is damaged or cut off\)"):
        decode_image(place, SIZE, "a")


@pytest.mark.parametrize("mend", [make_finite, lay_on_white])
def test_a_broken_file_keeps_no_other_from_being_mended(mend: Callable[[list[str]], None], tmp_path: Path) -> None:
    values = np.full((SIZE, SIZE), np.nan, dtype="<f4")
    if mend is lay_on_white:
        values = np.zeros((SIZE, SIZE, 4), dtype=np.uint8)
    Image.fromarray(values).save(tmp_path / "1.tif")
    good = (tmp_path / "1.tif").read_bytes()
    (tmp_path / "0.tif").write_bytes(good[: len(good) // 2])
    mend([str(tmp_path / "0.tif"), str(tmp_path / "1.tif")])
    assert (tmp_path / ".1.tif.original").read_bytes() == good
    assert not (tmp_path / ".0.tif.original").exists()


def test_a_negative_whose_values_are_made_finite_stays_one(tmp_path: Path) -> None:
    values = np.zeros((SIZE, SIZE), dtype="<f4")
    values[:4], values[5, 5] = 255, np.nan
    place = write_tiff(tmp_path / "a.tif", values, 0)
    place.chmod(0o600)
    make_finite([str(place)])
    assert place.stat().st_mode & 0o777 == 0o600, "whoever could not read it still cannot"
    image = decode_image(place, SIZE, "a")
    assert (image[:4] == 0).all()
    assert (image[4:] == 255).all()


def mixed(root: Path, highest: int) -> list[Path]:
    """Write the same pictures with 8 bits and, of numbers up to ``highest``, with 16."""
    found: list[Path] = []
    for number in range(4):
        grey = np.random.default_rng(number).integers(0, 256, (SIZE, SIZE))
        values = grey.astype(np.uint8)
        if number % 2:
            values = (grey * (highest / 255)).astype(np.uint16)
        found.append(root / f"{number}.png")
        Image.fromarray(values).save(found[-1])
    return found


@pytest.mark.parametrize("highest", [4095, 16383])
def test_a_range_of_more_than_8_bits_leaves_files_of_8_bits(highest: int, tmp_path: Path) -> None:
    files = mixed(tmp_path, highest)
    names = [str(path) for path in files]
    without = decode_each(files, names, SIZE, Reading())
    told = bytes(without["warning"].tolist()).decode()
    assert "2 of 4 images" in told
    assert f"data.range=[0,{highest}]" in told
    ranged = decode_each(files, names, SIZE, Reading(value_range=(0, highest)))
    assert "warning" not in ranged
    means = ranged["images"].float().mean((1, 2, 3))
    assert means.min() > 115
    assert means.max() < 140


def test_files_of_8_bits_that_a_range_cuts_off_are_said(tmp_path: Path) -> None:
    files = mixed(tmp_path, 4095)
    for path in files[1::2]:
        Image.fromarray(np.random.default_rng(1).uniform(0, 1, (SIZE, SIZE)).astype(np.float32)).save(path, "TIFF")
    found = decode_each(files, [str(path) for path in files], SIZE, Reading(value_range=(0, 1)))
    told = bytes(found["warning"].tolist()).decode()
    assert re.search(r"2 of 4 images are black, flat or nearly so, or cut off.*0\.png", told)


def test_a_table_s_missing_image_gets_advice_that_helps(tmp_path: Path) -> None:
    place = tmp_path / "site" / "cat"
    place.mkdir(parents=True)
    picture("L").save(place / "0.png")
    picture("L").save(place / "1.png")
    (place / "2.png").symlink_to(place / "gone.png")
    for broken in ("refuse", "skip"):
        with pytest.raises(DataError, match=r"2\.png cannot be read .*: restore it or unlist it$"):
            Folder(root=str(tmp_path), image_size=SIZE, broken=broken)._read("site")  # type: ignore[arg-type]
    (place / "2.png").unlink()
    assert len(Folder(root=str(tmp_path), image_size=SIZE)._read("site").whole) == 2


@pytest.mark.parametrize("path", ["", "domain/class"])
def test_class_folders_with_the_names_of_one_split_need_a_path(path: str, tmp_path: Path) -> None:
    for name in ("train 1", "train 2"):
        (tmp_path / "site" / name).mkdir(parents=True)
        for number in range(2):
            picture("L").save(tmp_path / "site" / name / f"{number}.png")
    if not path:
        with pytest.raises(DataError, match=r"both of the train images; join them, or set data\.path=domain/class if"):
            Folder(root=str(tmp_path), image_size=SIZE).load("site")
        return
    source = Folder(root=str(tmp_path), image_size=SIZE, path=path)
    source.find_files("site")
    assert source.class_names == ("train 1", "train 2")
    assert len(source._read("site").whole) == 4


def test_a_site_without_test_images_is_told_why(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "site" / name).mkdir(parents=True)
        picture("L").save(tmp_path / "site" / name / "0.png")
    with pytest.raises(DataError, match=r"no test images, since each of its classes has one image.*add images of a"):
        Folder(root=str(tmp_path), image_size=SIZE).load("site")
    picture("RGBA").save(tmp_path / "site" / "cat" / "1.png")
    assert len(Folder(root=str(tmp_path), image_size=SIZE)._read("site").test) == 1
