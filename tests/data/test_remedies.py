"""Every remedy that an error about data names is run: it starts the run, or another finding is told; none loops."""

from __future__ import annotations

import io
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from data_makers import write_deep_colours
from PIL import Image as Pillow
from PIL import ImageOps, ImageSequence
from remedies import Case, Image, attempt, by_hand, check, digest, follow, obey, remedies

from common.data.value_ranges import ON_WHITE, on_files
from common.models.residual import ResidualBackbone

datasets.disable_progress_bars()

Build = Callable[[Path], Case]
CLASSES, SITES = ("cat", "dog"), ("a", "b")
EACH = 3
"""Images of each class of each site."""


def picture(seed: int, size: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)


def numbers(low: float, high: float, kind: type, size: int = 32) -> Callable[[int], np.ndarray]:
    """Return images of numbers from ``low`` to ``high``."""

    def make(seed: int) -> np.ndarray:
        return np.random.default_rng(seed).uniform(low, high, (size, size)).astype(kind)

    return make


def spoilt(make: Callable[[int], np.ndarray], value: float, pixels: int) -> Callable[[int], np.ndarray]:
    """Return images of which the first pixels have another value."""

    def change(seed: int) -> np.ndarray:
        values = make(seed)
        values.reshape(-1)[:pixels] = value
        return values

    return change


def write(path: Path, values: np.ndarray) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    Pillow.fromarray(values).save(path, None if path.suffix in (".png", ".tif") else "PNG")
    return path.read_bytes()


def folder(
    root: Path,
    pattern: str = "{site}/{label}",
    *,
    extra: Callable[[Path], object] = lambda root: None,
    make: Callable[[int], np.ndarray] = picture,
    suffix: str = ".png",
    parts: Iterable[str] = ("",),
    sites: Iterable[str] = SITES,
    classes: Iterable[str] = CLASSES,
    names: Mapping[str, str] | None = None,
) -> Case:
    """Images in folders by a pattern of sites, classes and parts, and what else there is."""
    truth: set[Image] = set()
    seed = 0
    for site in sites:
        for label in classes:
            for part in parts:
                for number in range(EACH):
                    place = (
                        root / pattern.format(site=site, label=label, part=part, number=number) / f"{number}{suffix}"
                    )
                    content = digest(write(place, make(seed)))
                    kept = dict(names or {})
                    truth.add(Image(content, kept.get(site, site), kept.get(label, label), ""))
                    seed += 1
    extra(root)
    return Case(root, ["data=folder", f"data.root={root}"], frozenset(truth))


def table(
    root: Path,
    header: str = "path,label",
    row: str = "images/{n}.png,{label}",
    *,
    name: str = "t.csv",
    above: str = "",
    encoding: str = "utf-8",
    labels: tuple[str, str] = CLASSES,
    images: str = "images/{n}.png",
    domains: tuple[str, ...] = (),
    count: int = 12,
    extra: Callable[[Path], object] = lambda root: None,
) -> Case:
    """A list of images: a row for each, in which {n}, {label}, {site} and {part} stand for its cells."""
    truth: set[Image] = set()
    lines = [header] if header else []
    for n in range(count):
        content = digest(write(root / images.format(n=n), picture(n)))
        site, part = "AB"[n // (count // 2)], ("train", "train", "test")[n % 3]
        label = labels[n % 2]
        lines.append(row.format(n=n, label=label, site=site, part=part, flag=int(part == "test")))
        truth.add(Image(content, domains[n // (count // 2)] if domains else Path(name).stem, label, ""))
    place = root / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes((above + "\n".join(lines) + "\n").encode(encoding))
    extra(root)
    return Case(root, ["data=table", f"data.path={place}"], frozenset(truth))


def parquet(root: Path, *names: str) -> Case:
    """A folder of Parquet files with encoded images."""
    root.mkdir(parents=True)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))})
    for number, name in enumerate(names):
        cells: dict[str, list[Any]] = {"image": [], "label": []}
        for index in range(6):
            stream = io.BytesIO()
            Pillow.fromarray(picture(10 * number + index)).save(stream, "PNG")
            cells["image"].append({"bytes": stream.getvalue(), "path": None})
            cells["label"].append(index % 2)
        datasets.Dataset.from_dict(cells, features=features).to_parquet(root / name)
    return Case(root, ["data=table", f"data.path={root}"])


def network() -> dict[str, Any]:
    torch.manual_seed(3)
    return dict(ResidualBackbone((1, 1, 1, 1), width=2).state_dict())


def weights(root: Path, change: Callable[[dict[str, Any]], Any]) -> Case:
    root.mkdir(parents=True)
    torch.save(change(network()), root / "file.pth")
    return Case(root, [f"model.weights={root / 'file.pth'}"])


def prefixed(prefix: str, state: Mapping[str, Any], shift: float = 0) -> dict[str, Any]:
    return {f"{prefix}{name}": tensor + shift for name, tensor in state.items()}


# ---- what is beside or among the images ------------------------------------------------------------------------------


def avif(root: Path) -> None:
    (root / "a/cat/x.jpg").write_bytes(b"\0\0\0\x1cftypavif\0\0\0\0avifmif1" + bytes(200))


def five_bands(root: Path) -> None:
    """A TIFF of 16 x 16 pixels with five bands of 8 bits."""
    tags = [(256, 4, 1, 16), (257, 4, 1, 16), (259, 3, 1, 1), (262, 3, 1, 1), (277, 3, 1, 5), (278, 4, 1, 16)]
    tags += [(273, 4, 1, 8), (279, 4, 1, 1280), (258, 3, 5, 1288)]
    entries = b"".join(struct.pack("<HHII", *tag) for tag in sorted(tags))
    data = bytes(range(256)) * 5 + struct.pack("<5H", 8, 8, 8, 8, 8)
    (root / "a/cat/y.tif").write_bytes(
        b"II*\0" + struct.pack("<I", 8 + len(data)) + data + struct.pack("<H", len(tags)) + entries + bytes(4)
    )


def systems(root: Path) -> None:
    for name in ("lost+found", "$RECYCLE.BIN", "System Volume Information", "docs"):
        (root / name).mkdir()
    for number, name in enumerate(("@eaDir", "__MACOSX/a", ".thumbnails")):
        write(root / "a" / name / "0.png", picture(1000 + number))


def zipped(root: Path, inner: str = "") -> Case:
    case = folder(root)
    for site in SITES:
        with zipfile.ZipFile(root / f"{site}.zip", "w") as archive:
            for path in sorted((root / site).rglob("*.png")):
                archive.write(path, inner.format(site=site) + str(path.relative_to(root / site)))
                path.unlink()
        for path in sorted((root / site).rglob("*"), reverse=True):
            path.rmdir()
        (root / site).rmdir()
    return case


def of_windows(root: Path) -> Case:
    case = folder(root)
    for path in sorted(root.rglob("*.png")):
        path.rename(root / "\\".join(path.relative_to(root).parts))
    for path in sorted(root.rglob("*"), reverse=True):
        if path.is_dir():
            path.rmdir()
    return case


def pages(root: Path) -> Case:
    case = folder(root, suffix=".tif")
    for number, path in enumerate(sorted(root.rglob("*.tif"))):
        blank = Pillow.new("L", (8, 8), 255)
        blank.save(path, save_all=True, append_images=[Pillow.fromarray(picture(number)[..., 0])])
    return Case(root, case.settings)


def strokes(root: Path) -> Case:
    def make(seed: int) -> np.ndarray:
        values = np.zeros((8, 8, 4), dtype=np.uint8)
        values[..., 3] = picture(seed)[..., 0]
        return values

    return Case(root, folder(root, make=make).settings)


def deep(root: Path, channels: int, highest: int, alpha: int = 65535, darkest: int = 0) -> Case:
    """PNG files of 16 bits with transparency, of which the upper half of the image has ``alpha``."""
    case = folder(root)
    for number, path in enumerate(sorted(root.rglob("*.png"))):
        draws = np.random.default_rng(number)
        values = draws.integers(darkest, highest + 1, (32, 32, channels)).astype(np.uint16)
        values[..., -1] = 65535
        values[:16, :, -1] = alpha + draws.integers(0, 1000, (16, 32)) * (alpha < 65535)
        write_deep_colours(path, values)
    return Case(root, case.settings)


def dark(root: Path, mode: str, suffix: str) -> Case:
    """Files of 8 bits in a mode of Pillow, with ten dark grey levels."""
    case = folder(root, suffix=suffix)
    for number, path in enumerate(sorted(root.rglob(f"*{suffix}"))):
        grey = Pillow.fromarray(np.random.default_rng(number).integers(0, 10, (32, 32), dtype=np.uint8))
        if mode == "P":
            grey = grey.convert("RGB").quantize(10)
        grey.convert(mode).save(path)
    return Case(root, case.settings)


def numbered(root: Path, make: Callable[[int], np.ndarray], suffix: str) -> Case:
    """Images of numbers, whose files a remedy may write again."""
    return Case(root, folder(root, make=make, suffix=suffix).settings)


def shared_domain_names(root: Path) -> Case:
    return folder(root, sites=("average", "b"), names={"average": "average_"})


TWELVE = numbers(900, 4095, np.uint16)
CASES: dict[str, Build] = {
    # rows
    "a label with a comma": partial(table, labels=("cat, tabby", "cat, siamese")),
    "a label with a semicolon": partial(
        table, header="path;label", row="images/{n}.png;{label}", labels=("cat; tabby", "cat; siamese")
    ),
    "a row without its last cell": partial(table, header="path,label,note", row="images/{n}.png,{label}"),
    # names of folders
    "class folders of strange names": partial(folder, classes=("__background__", "cache", "_x")),
    "a class with @": partial(folder, classes=("@home", "dog"), names={"@home": "home"}),
    "a class with =": partial(folder, classes=("=1+1", "dog"), names={"=1+1": "1+1"}),
    "sites of strange names": partial(folder, sites=("cache", "__b", "c d")),
    "a site called average": shared_domain_names,
    "a site with -": partial(folder, sites=("-a", "b"), names={"-a": "a"}),
    "signs as classes": partial(folder, classes=("-1", "+2")),
    "only signs as classes": partial(folder, classes=("+", "-"), names={"+": "class", "-": "class_2"}),
    "a class with @ beside its bare name": partial(folder, classes=("@x", "x", "-x"), names={"@x": "x_3", "-x": "x_2"}),
    "a hidden site": partial(folder, extra=lambda root: write(root / ".c/cat/9.png", picture(999))),
    "folders of systems": partial(folder, extra=systems),
    "an empty class": partial(folder, extra=lambda root: (root / "a/owl").mkdir()),
    "hidden images": partial(folder, extra=lambda root: write(root / "a/cat/.9.png", picture(999))),
    "no suffix": partial(folder, suffix=""),
    "another suffix": partial(folder, suffix=".img"),
    # values
    "floats without data": partial(numbered, make=spoilt(numbers(0, 200, np.float32), -9999, 40), suffix=".tif"),
    "altitudes without data": partial(numbered, make=spoilt(numbers(300, 900, np.float32), -9999, 40), suffix=".tif"),
    "NaN": partial(numbered, make=spoilt(numbers(0, 255, np.float32), np.nan, 9), suffix=".tif"),
    "infinity": partial(numbered, make=spoilt(numbers(0, 1, np.float32), np.inf, 9), suffix=".tif"),
    "shares": partial(numbered, make=numbers(0, 1, np.float32), suffix=".tif"),
    "tomography": partial(numbered, make=numbers(-1024, 3071, np.int32), suffix=".tif"),
    "12 bits": partial(numbered, make=TWELVE, suffix=".png"),
    "12 bits and a hot pixel": partial(numbered, make=spoilt(TWELVE, 65535, 1), suffix=".png"),
    "14 bits": partial(numbered, make=numbers(0, 16383, np.uint16), suffix=".png"),
    "warm bodies": partial(numbered, make=numbers(51241, 52181, np.uint16), suffix=".png"),
    "cold bodies": partial(numbered, make=numbers(7000, 8800, np.uint16), suffix=".png"),
    "bodies with zeros around": partial(numbered, make=spoilt(numbers(51241, 52181, np.uint16), 0, 300), suffix=".png"),
    "numbers of classes": partial(numbered, make=numbers(0, 9, np.uint8), suffix=".png"),
    "12 bits of grey and an opaque alpha": partial(deep, channels=2, highest=4095),
    "12 bits of colour and an opaque alpha": partial(deep, channels=4, highest=4095),
    "14 bits of colour and an opaque alpha": partial(deep, channels=4, highest=16383),
    "12 bits of colour with transparent pixels": partial(deep, channels=4, highest=4095, alpha=0),
    "strokes of 16 bits": partial(deep, channels=4, highest=0, alpha=0),
    "dark grey": partial(dark, mode="L", suffix=".png"),
    "dark and opaque": partial(dark, mode="RGBA", suffix=".png"),
    "a dark palette": partial(dark, mode="P", suffix=".png"),
    "dark inks": partial(dark, mode="CMYK", suffix=".tif"),
    "the second page": pages,
    "strokes": strokes,
    # columns
    "a split of another name": partial(table, header="path,label,data_split", row="images/{n}.png,{label},{part}"),
    "held out or not": partial(table, header="path,label,heldout", row="images/{n}.png,{label},{flag}"),
    "for testing": partial(table, header="path,label,for_testing", row="images/{n}.png,{label},{flag}"),
    "folds": partial(table, header="path,label,fold", row="images/{n}.png,{label},{flag}"),
    "institution": partial(
        table, header="path,label,institution", row="images/{n}.png,{label},{site}", domains=("A", "B")
    ),
    "scanner and split": partial(
        table, header="path,label,scanner,phase", row="images/{n}.png,{label},{site},{part}", domains=("A", "B")
    ),
    "numbers of sites": partial(table, header="path,label,hospital", row="images/{n}.png,{label},{flag}7"),
    "two that may be sites": partial(
        table, header="path,label,scanner,view", row="images/{n}.png,{label},{site},v{flag}", domains=("A", "B")
    ),
    "two that may be labels": partial(table, header="path,species,breed", row="images/{n}.png,{label},b{label}"),
    "images and masks": partial(table, header="photo,mask,label", row="images/{n}.png,images/{n}.png,{label}"),
    "no name is known": partial(table, header="f,c", row="images/{n}.png,{label}"),
    "two columns of one name": partial(table, header="path,label,x,x", row="images/{n}.png,{label},1,2"),
    # text files
    "no header": partial(table, header=""),
    "spaces": partial(table, header="path label", row="images/{n}.png {label}"),
    "bars": partial(table, header="path|label", row="images/{n}.png|{label}"),
    "tabs without a header": partial(table, header="", row="images/{n}.png\t{label}"),
    "sep=": partial(table, header="path;label", row="images/{n}.png;{label}", above="sep=;\n"),
    "a comment": partial(table, above="# made by hand\n"),
    "Latin": partial(table, labels=("k\u00e4fer", "dog"), encoding="latin-1"),
    "UTF-16": partial(table, encoding="utf-16"),
    # places
    "a deep list": partial(table, row="../../images/{n}.png,{label}", name="lists/v1/t.csv"),
    "relative to a folder above": partial(table, name="lists/t.csv"),
    "relative to a folder inside": partial(table, row="{n}.png,{label}"),
    "names of sites in Parquet": lambda root: parquet(root, "site_a.parquet", "site_b.parquet"),
    "numbers of sites in Parquet": lambda root: parquet(root, "site_1.parquet", "site_2.parquet"),
    "shards": lambda root: parquet(root, "train-00000-of-00002.parquet", "train-00001-of-00002.parquet"),
    # layouts
    "another word for the split": partial(folder, pattern="{site}/{part}_set/{label}", parts=("training", "test")),
    "train alone": partial(folder, pattern="{site}/train/{label}"),
    "the split first": partial(folder, pattern="{part}/{site}/{label}", parts=("train", "test")),
    "the split last": partial(folder, pattern="{site}/{label}/{part}", parts=("train", "test")),
    "folds in folders": partial(folder, pattern="{site}/fold{number}/{label}"),
    "a folder above all": partial(folder, pattern="v1/{site}/{label}"),
    "a folder in each": partial(folder, pattern="{site}/images/{label}"),
    "patients": partial(folder, pattern="{site}/{label}/p{number}"),
    "classes first": lambda root: Case(root, folder(root, pattern="{label}/{site}/p{number}").settings),
    "deep splits": partial(folder, pattern="{site}/data/{part}/{label}", parts=("train", "val")),
    "one site": partial(folder, pattern="{label}", sites=("here",), names={"here": "data"}),
    "one site with splits and patients": partial(
        folder, pattern="{part}/{label}/p{number}", parts=("train", "test"), sites=("here",), names={"here": "data"}
    ),
    "an image too deep": partial(folder, extra=lambda root: write(root / "a/cat/2021/x/9.png", picture(999))),
    "an image too deep in a class called as a split": partial(
        folder, classes=("val", "cat"), extra=lambda root: write(root / "a/val/more/9.png", picture(999))
    ),
    "a site beside train and test": partial(folder, sites=("train", "test", "c")),
    "one site has one folder more": partial(
        folder,
        extra=lambda root: (
            (root / "b").rename(root / "c"),
            (root / "b").mkdir(),
            (root / "c").rename(root / "b/images"),
        ),
    ),
    "class folders again one level deeper": partial(
        folder, extra=lambda root: write(root / "a/old/cat/9.png", picture(999))
    ),
    "class folders of a split beside others": partial(
        folder, extra=lambda root: write(root / "a/train/cat/9.png", picture(999))
    ),
    "classes called as splits": partial(folder, classes=("train", "test")),
    "one site without class folders": partial(
        folder,
        pattern="{site}/{part}/{label}",
        parts=("train", "test"),
        extra=lambda root: [write(root / f"c/{part}/9.png", picture(999)) for part in ("train", "test")],
    ),
    "one site of splits without class folders": partial(
        folder, extra=lambda root: [write(root / f"c/{part}/9.png", picture(999)) for part in ("train", "test")]
    ),
    "an image in no class": partial(folder, extra=lambda root: write(root / "a/9.png", picture(999))),
    "an image beside the sites": partial(folder, extra=lambda root: write(root / "9.png", picture(999))),
    # other kinds of files
    "archives": zipped,
    "archives with a folder": partial(zipped, inner="{site}/"),
    "paths of Windows": of_windows,
    "AVIF": partial(folder, extra=avif),
    "five bands": partial(folder, extra=five_bands),
    "half a file": partial(folder, extra=lambda root: (root / "a/cat/h.png").write_bytes(b"\x89PNG\r\n\x1a\nno")),
    "a list beside nothing": lambda root: Case(
        root, ["data=folder", f"data.root={root}"], table(root, name="t.csv").truth
    ),
    # weights
    "student and teacher": partial(weights, change=lambda state: {"student": state, "teacher": prefixed("", state, 1)}),
    "query and key": partial(weights, change=lambda state: prefixed("q.", state) | prefixed("k.", state, 1)),
    "compiled": partial(weights, change=partial(prefixed, "_orig_mod.")),
}


@by_hand(r"table: (\S+), row \d+ has \d+ cells, and there are (\d+) columns; write a cell")
def _quote(case: Case, found: re.Match[str]) -> None:
    """Write all that is more than the header has into the last cell, in quotes, as the example shows."""
    path, count = Path(found[1]), int(found[2])
    separator = ";" if ";" in path.read_text().splitlines()[0] else ","
    lines: list[str] = []
    for line in path.read_text().splitlines():
        cells = line.split(separator)
        if len(cells) > count:
            cells = [*cells[: count - 1], f'"{separator.join(cells[count - 1 :])}"']
        lines.append(separator.join(cells))
    path.write_text("\n".join(lines))


@by_hand(r"table: (\S+), row \d+ has \d+ cells, and there are \d+ columns; give it")
def _fill(case: Case, found: re.Match[str]) -> None:
    path = Path(found[1])
    header, *lines = path.read_text().splitlines()
    path.write_text("\n".join([header, *(line + "," * (header.count(",") - line.count(",")) for line in lines)]))


@by_hand(r"table: (\S+) has 2 columns 'x'; rename")
def _rename(case: Case, found: re.Match[str]) -> None:
    path = Path(found[1])
    path.write_text(path.read_text().replace("x,x", "x,z", 1))


def two_pages(root: Path, spoilt_page: int, orientation: int = 1) -> Case:
    """TIFFs of two pages, of which one has values that are not finite, and of a single one that has; and a good one."""
    case = folder(root, make=numbers(0, 255, np.float32), suffix=".tif")
    exif = Pillow.Exif()
    exif[0x0112] = orientation
    for number, path in enumerate(sorted(root.rglob("*.tif"))[:-1]):
        made = [numbers(0, 255, np.float32)(number + page)[:20] for page in (100, 200)]
        made[spoilt_page].reshape(-1)[:9] = [np.nan, np.inf, -np.inf] * 3
        chosen = [Pillow.fromarray(values) for values in made]
        if not number:
            chosen = [chosen[spoilt_page]]
        chosen[0].save(path, save_all=True, append_images=chosen[1:], exif=exif)
    return Case(root, case.settings)


def frames(path: Path) -> list[np.ndarray]:
    with Pillow.open(path) as image:
        return [np.asarray(ImageOps.exif_transpose(page)) for page in ImageSequence.Iterator(image)]


@pytest.mark.long
@pytest.mark.parametrize("orientation", [1, 6], ids=["upright", "turned"])
@pytest.mark.parametrize("spoilt_page", [0, 1])
def test_finite_values_are_written_on_every_page(spoilt_page: int, orientation: int, tmp_path: Path) -> None:
    case = two_pages(tmp_path / "data", spoilt_page, orientation)
    case.settings.append(f"data.page={spoilt_page + 1}")
    files = sorted(case.root.rglob("*.tif"))
    if spoilt_page:
        for path in (files.pop(0), files.pop()):  # of one page
            path.unlink()
    before, untouched = {path: frames(path) for path in files}, files[-1].read_bytes()
    for _ in SITES:
        error = attempt(case.settings).error
        assert "not finite" in error
        obey(case, next(steps for steps in remedies(error) if steps[0].startswith("find")))
    for path in files:
        for old, new in zip(before[path], frames(path), strict=True):
            assert np.array_equal(new, np.nan_to_num(old, posinf=0, neginf=0))
    assert (files[-1].read_bytes() == untouched) is (spoilt_page == 0), "a file without a fault stays as it is"
    assert not attempt(case.settings).error


def test_transparent_pages_are_laid_on_white_each(tmp_path: Path) -> None:
    drawn = [np.zeros((8, 8, 4), np.uint8) for _ in range(2)]
    drawn[0][:4, :, 3] = drawn[1][4:, :, 3] = 255
    pages_of = [Pillow.fromarray(values) for values in drawn]
    pages_of[0].save(tmp_path / "a.tif", save_all=True, append_images=pages_of[1:])
    pages_of[1].save(tmp_path / "b.img", "PNG")
    for name in ("a.tif", "b.img"):
        obey(Case(tmp_path, []), [on_files(ON_WHITE, [str(tmp_path / name)])])
    found = [*frames(tmp_path / "a.tif"), *frames(tmp_path / "b.img")]
    for values, new in zip([*drawn, drawn[1]], found, strict=True):
        assert np.array_equal(new, np.repeat(255 - values[..., 3:], 3, 2))


VALUES = [
    *("NaN", "infinity", "shares", "tomography", "12 bits", "14 bits", "strokes"),
    *("12 bits of grey and an opaque alpha", "12 bits of colour and an opaque alpha", "strokes of 16 bits"),
    *("14 bits of colour and an opaque alpha", "12 bits of colour with transparent pixels"),
    *("dark grey", "dark and opaque", "a dark palette", "dark inks"),
]
"""The cases of files that a value, a depth or a transparency makes black."""


@pytest.mark.parametrize("name", VALUES)
def test_a_remedy_of_values_reads_the_files_and_keeps_what_they_hold(name: str, tmp_path: Path) -> None:
    case = CASES[name](tmp_path / "data")
    held = {digest(path.read_bytes()) for path in case.root.rglob("*") if path.is_file()}
    found = attempt(case.settings)
    assert found.error
    for _ in range(3):
        if found.error:
            obey(case, remedies(found.error)[0])
            found = attempt(case.settings)
    assert not found.error
    assert len(found.images) == len(SITES) * len(CLASSES) * EACH
    assert held <= {digest(path.read_bytes()) for path in case.root.rglob("*") if path.is_file()}


def test_a_file_that_is_written_twice_keeps_both_originals(tmp_path: Path) -> None:
    place = tmp_path / "a"
    contents: list[bytes] = []
    for seed in range(2):
        values = np.random.default_rng(seed).integers(0, 256, (8, 8, 4), dtype=np.uint8)
        Pillow.fromarray(values).save(place, "WEBP", lossless=True)
        contents.append(place.read_bytes())
        for _ in range(2):  # the second time, nothing is transparent
            obey(Case(tmp_path, []), [on_files(ON_WHITE, [str(place)])])
        with Pillow.open(io.BytesIO(contents[-1])) as before, Pillow.open(place) as after:
            white = Pillow.new("RGBA", before.size, "white")
            expected = Pillow.alpha_composite(white, before.convert("RGBA")).convert("RGB")
            assert np.array_equal(after, expected), "no level is lost"
    kept = sorted(path for path in tmp_path.iterdir() if path != place)
    assert [path.read_bytes() for path in kept] == contents


def test_what_is_taken_out_of_two_sites_is_kept_of_both(tmp_path: Path) -> None:
    """Of images of one name, the second replaced the first."""
    case = folder(tmp_path / "data")
    for number, site in enumerate(SITES):
        write(case.root / site / "9.png", picture(1000 + number))
    held = {digest(path.read_bytes()) for path in tmp_path.rglob("*.png")}
    for steps in remedies(attempt(case.settings).error):
        obey(case, steps)
    assert {digest(path.read_bytes()) for path in tmp_path.rglob("*.png")} == held
    assert len(attempt(case.settings).images) == len(held) - 2


def test_folders_of_splits_alone_are_not_said_to_be_read_deeper(tmp_path: Path) -> None:
    """Obeyed, domain/class/any read the splits as classes."""
    case = folder(tmp_path / "data", "{site}/{part}", parts=("train", "test"))
    assert "data.path=domain/class reads domains a, b and classes test, train" in attempt(case.settings).error
    write(case.root / "b/train/cat/9.png", picture(999))
    for settings in (case.settings, [*case.settings, "data.path=domain/class"]):
        error = attempt(settings).error
        assert "domain/class/any" not in error
        assert remedies(error)


QUICK = list(CASES)[::3]
"""The cases of ``make test``; ``make test-long`` has the others, of which most take seconds."""


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in CASES]
)
def test_every_remedy_works(name: str, tmp_path: Path) -> None:
    case = CASES[name](tmp_path / "place" / "data")
    total = len(case.truth)
    found = follow(case)
    assert found
    check(case, found, total)


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 60
