"""One function decodes: a photo that a phone turned and a 16-bit image are the same array through every reader."""

from __future__ import annotations

import ast
import io
import logging
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_makers import write_deep_colours, write_tiff
from PIL import Image, ImageOps

from common.data.digit_files import read_class_folders, read_listed
from common.data.folder import Folder
from common.data.image_files import Reading, decode_each, decode_files, decode_image
from common.data.office_caltech import OfficeCaltech
from common.exports.description import Description
from common.exports.model import TrainedModel
from goldfinch.commands.evaluate import warn_of_reading
from goldfinch.exports.card import RESIZED, model_card

SIZE = 8
PAGE = Path(__file__).resolve().parents[2] / "docs" / "use-the-model.md"
READINGS = [Reading(), Reading("crop"), Reading("pad"), Reading(value_range=(0, 4095)), Reading(page=2)]


def write_turned(path: Path) -> Path:
    """A JPEG that is 24 pixels wide, black on the left, and to be turned by 90 degrees clockwise."""
    image = Image.new("RGB", (24, 16))
    image.paste((255, 40, 0), (12, 0, 24, 16))
    exif = Image.Exif()
    exif[0x0112] = 6
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, format="JPEG", exif=exif, quality=95)
    return path


def write_deep(path: Path) -> Path:
    """A PNG of 16 bits, darker on the left. Converted without scaling it would be white."""
    values = np.tile(np.linspace(300, 60_000, 20), (12, 1)).astype(np.uint16)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path, format="PNG")
    return path


def write_colours(path: Path) -> Path:
    """A PNG with colours of 16 bits, darker on the left."""
    values = np.tile(np.linspace(300, 60_000, 60).reshape(1, 20, 3), (12, 1, 1))
    return write_deep_colours(path, values.astype(np.uint16))


WRITERS = {"turned.jpg": write_turned, "deep.png": write_deep, "colours.png": write_colours}


def files(root: Path) -> dict[str, Path]:
    return {name: write(root / name) for name, write in WRITERS.items()}


def page_reader(description: Description) -> Any:
    """The function ``read`` of the web service on the page, with what it takes from its module."""
    source = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)[-1]
    wanted: list[ast.stmt] = []
    for node in ast.parse(source).body:
        names = [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]
        if names in (["size"], ["square"]) or (isinstance(node, ast.FunctionDef) and node.name == "read"):
            wanted.append(node)
    space: dict[str, Any] = {"io": io, "np": np, "Image": Image, "ImageOps": ImageOps}
    space["description"] = {
        "image_size": description.image_size,
        "resize": description.resize,
        "value_range": list(description.value_range),
        "page": description.page,
    }
    exec(compile(ast.Module(wanted, []), str(PAGE), "exec"), space)
    return space["read"]


def described(reading: Reading = Reading()) -> Description:  # noqa: B008  # frozen
    return Description(
        architecture={},
        classes=("0", "1"),
        image_size=SIZE,
        mean=(0.5,),
        std=(0.5,),
        method="fedavg",
        data={"name": "folder", "domains": ["a"], "protocol": "one_per_domain"},
        run="run",
        round=1,
        chosen="last round",
        resize=reading.resize,
        value_range=reading.value_range,
        page=reading.page,
    )


def model_reads(description: Description, path: Path) -> np.ndarray:
    model = TrainedModel.__new__(TrainedModel)
    torch.nn.Module.__init__(model)
    model.description, model.image_size = description, description.image_size
    return model.read(path).permute(1, 2, 0).numpy()


def test_every_reader_gives_the_same_array(tmp_path: Path) -> None:
    for name, path in files(tmp_path / "one").items():
        expected = decode_image(path, SIZE, name)
        with path.open("rb") as stream:
            found = {"stream": decode_image(stream, SIZE, name)}
        found["files"] = decode_files([path], SIZE, path.parent, Reading())[0][0].permute(1, 2, 0).numpy()
        encoded = decode_each([path.read_bytes()], [name], SIZE, Reading())
        found["bytes"] = encoded["images"][0].permute(1, 2, 0).numpy()
        for number in range(10):
            WRITERS[name](tmp_path / name / "digits" / str(number) / name)
        found["digits in folders"] = read_class_folders(tmp_path / name / "digits", SIZE)[0][3]
        (path.parent / "list.txt").write_text(f"{name} 0\n")
        found["digits in a list"] = read_listed(path.parent, "list.txt", SIZE, lambda each: each)[0][0]
        with tarfile.open(tmp_path / "set.tar", "w") as archive:
            archive.add(path.parent, ".")
        found["digits in an archive"] = read_listed(tmp_path / "set.tar", "list.txt", SIZE, lambda each: each)[0][0]
        for kind, source in domains(tmp_path / name / "sets", name).items():
            found[kind] = source.load("dslr").train.images[0].permute(1, 2, 0).numpy()
        found["model"] = (model_reads(described(), path) * 255).round()
        found["service"] = (page_reader(described())(path.read_bytes()).transpose(1, 2, 0) * 255).round()
        for reader, image in found.items():
            assert np.array_equal(image, expected), (name, reader)
    assert expected.min() < 40 < expected.max() < 250, "16 bits are scaled, not cut"


def domains(root: Path, name: str) -> dict[str, Folder | OfficeCaltech]:
    """A benchmark's reader and that of one's own folders, on the same folder."""
    for label in OfficeCaltech().class_names:
        for number in range(10):
            WRITERS[name](root / "dslr" / label / f"{number}{Path(name).suffix}")
    benchmark = OfficeCaltech(domains=("dslr",), image_size=SIZE, root=str(root))
    return {"benchmark": benchmark, "folder": Folder(image_size=SIZE, root=str(root))}


def test_the_turned_photo_is_upright(tmp_path: Path) -> None:
    image = decode_image(write_turned(tmp_path / "a.jpg"), SIZE, "a")
    assert image[0].max() < 20, "what is stored on the left is at the top"
    assert image[-1, :, 0].min() > 230


@pytest.mark.parametrize("reading", READINGS, ids=["squash", "crop", "pad", "range", "page"])
def test_the_service_on_the_page_reads_as_the_model_does(reading: Reading, tmp_path: Path) -> None:
    description = described(reading)
    assert description.reading == reading
    places = files(tmp_path)
    pages = [Image.fromarray(np.full((9, 14), level, np.uint8)) for level in (10, 200)]
    pages[0].save(tmp_path / "pages.tif", save_all=True, append_images=pages[1:])
    Image.fromarray(np.linspace(0, 4095, 300, dtype=np.int32).reshape(15, 20)).save(tmp_path / "words.tif")
    Image.fromarray(np.linspace(0, 255, 300, dtype=np.float32).reshape(15, 20)).save(tmp_path / "floats.tif")
    Image.new("P", (20, 10), 3).save(tmp_path / "palette.gif")
    Image.fromarray(np.arange(512, dtype=np.uint8).reshape(16, 8, 4)).save(tmp_path / "alpha.png")
    write_tiff(tmp_path / "negative.tif", np.linspace(0, 4095, 300).astype("<u2").reshape(15, 20), 0)
    write_tiff(tmp_path / "bytes.tif", np.linspace(0, 255, 300).astype("|u1").reshape(15, 20), 0)
    if reading.page == 1:
        names = ("words.tif", "floats.tif", "palette.gif", "alpha.png", "negative.tif", "bytes.tif")
        places |= {name: tmp_path / name for name in names}
    places["pages.tif"] = tmp_path / "pages.tif"
    read = page_reader(description)
    for name, path in places.items():
        expected = model_reads(description, path)
        assert np.array_equal(read(path.read_bytes()).transpose(1, 2, 0), expected), name


def test_a_model_says_how_it_reads_images() -> None:
    plain, ranged = model_card(described()), model_card(described(Reading("crop", (0, 4095), 2)))
    for words in ("RGB", "[N, 3, 8, 8]", "upright by EXIF", RESIZED["squash"]):
        assert words in plain
    for words in (RESIZED["crop"], "0 to 4095", "page 2"):
        assert words in ranged


def test_a_data_set_that_is_read_otherwise_than_the_model_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_reading(OfficeCaltech(), described())
        assert not caplog.text
        warn_of_reading(OfficeCaltech(), described(Reading("crop")))
    assert "resize='crop'" in caplog.text
