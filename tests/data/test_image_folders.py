from __future__ import annotations

import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_makers import levels, write_classes, write_image
from PIL import Image

from common.data.domainnet import DomainNet
from common.data.image_files import decode_image
from common.data.image_folders import ImageFolders, index_rule, per_class_fraction
from common.data.office_caltech import OfficeCaltech
from common.data.office_home import OfficeHome
from common.data.pacs import PACS
from common.data.vlcs import VLCS
from common.errors import DataError
from common.settings import load_settings

OFFICE_CLASSES = OfficeCaltech().class_names
# Images per class of the complete Office-Caltech-10, in the order of the class names, then test images by two rules.
OFFICE = {
    "caltech": ((151, 110, 100, 138, 85, 128, 133, 94, 87, 97), 224, 225),
    "amazon": ((92, 82, 94, 99, 100, 100, 99, 100, 94, 98), 190, 192),
    "webcam": ((29, 21, 31, 27, 27, 30, 43, 30, 27, 30), 58, 58),
    "dslr": ((12, 21, 12, 13, 10, 24, 22, 12, 8, 23), 30, 31),
}


def listing(counts: tuple[int, ...]) -> list[tuple[Path, int]]:
    return [(Path(f"{label}/{index}"), label) for label, count in enumerate(counts) for index in range(count)]


def office(tmp_path: Path, counts: dict[str, int] | None = None) -> OfficeCaltech:
    write_classes(tmp_path / "office_caltech_10" / "dslr", counts or dict.fromkeys(OFFICE_CLASSES, 3))
    return OfficeCaltech(image_size=8, root=str(tmp_path))


@pytest.mark.parametrize("domain", OFFICE)
def test_the_rules_give_the_papers_sizes(domain: str) -> None:
    counts, by_index, by_share = OFFICE[domain]
    images = listing(counts)
    for (train, test), wanted in (
        (index_rule(images), by_index),
        (per_class_fraction(images, 0.8, "round"), by_share),  # FedPall's
    ):
        assert len(test) == wanted
        assert sorted([*train, *test]) == sorted(images)


def test_test_images_that_are_training_images_can_be_dropped(tmp_path: Path) -> None:
    """Of 30 images the 9th, 10th, 19th ... are test images; two of them are given the bytes of a training image."""
    keep = office(tmp_path)
    files = sorted((tmp_path / "office_caltech_10" / "dslr").rglob("*.png"))
    for test, train in ((8, 6), (19, 20)):
        files[test].write_bytes(files[train].read_bytes())
    files[9].write_bytes(files[18].read_bytes() + b" ")  # the same picture in another file is no duplicate by its bytes
    files[28].write_bytes(files[0].read_bytes())  # a copy of another class, which the comparison of images tells
    before, after = keep.load("dslr"), replace(keep, duplicates="drop").load("dslr")
    assert levels(after.test) == [levels(before.test)[place] for place in (1, 2, 4, 5)]
    assert after.test.labels.tolist() == [before.test.labels.tolist()[place] for place in (1, 2, 4, 5)]
    assert torch.equal(after.train.images, before.train.images), "what clients train on stays as it is"


def test_a_run_that_drops_duplicates_has_an_identity_of_its_own() -> None:
    keep = load_settings(["data=office_caltech", "data.duplicates=warn"])
    assert keep.identity == load_settings(["data=office_caltech"]).identity
    assert keep.identity != load_settings(["data=office_caltech", "data.duplicates=drop"]).identity


def test_the_floored_share_takes_the_leading_images_of_each_class() -> None:
    train, test = per_class_fraction(listing((9, 4)), 0.8, "floor")
    assert [path.name for path, label in train if label == 0] == [str(index) for index in range(7)]
    assert [path.name for path, label in test if label == 1] == ["3"]


@pytest.mark.parametrize("place", ["", "office_caltech_10", "office_caltech_10/dslr"])
def test_the_root_may_be_above_at_or_below_the_data_set(tmp_path: Path, place: str) -> None:
    office(tmp_path)
    domain = OfficeCaltech(image_size=8).load("dslr", root=str(tmp_path / place))
    assert levels(domain.train) == [level for level in range(30) if level % 10 <= 7]
    assert levels(domain.test) == [8, 9, 18, 19, 28, 29]
    assert domain.train.labels.tolist() == [level // 3 for level in range(30) if level % 10 <= 7]


def test_folder_names_may_differ_in_case_separators_and_known_aliases(tmp_path: Path) -> None:
    counts = dict.fromkeys(OFFICE_CLASSES, 2)
    counts["laptop_computer"] = counts.pop("laptop")
    counts["Back Pack"] = counts.pop("backpack")
    write_classes(tmp_path / "DSLR", counts)
    domain = OfficeCaltech(image_size=8, root=str(tmp_path)).load("dslr")
    assert (domain.train.class_counts(10) + domain.test.class_counts(10)).tolist() == [2] * 10


def test_a_domain_is_read_without_the_others(tmp_path: Path) -> None:
    source = office(tmp_path)
    broken = tmp_path / "office_caltech_10" / "webcam" / "mug" / "image.png"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"no image")
    assert len(source.load("dslr").train) == 24


def test_lists_of_the_data_set_decide(tmp_path: Path) -> None:
    source = replace(office(tmp_path), split="lists")
    base = tmp_path / "office_caltech_10"
    lines = (
        "dslr/mug/image_001.png\ndslr/bike/image_002.png 1\n\nwebcam/bike/image_000.png\ndslr/bike/image_001.png\t1\n"
    )
    (base / "train_list.txt").write_text(lines)
    (base / "test_list.txt").write_text("dslr/bike/image_000.png\n")
    domain = source.load("dslr")
    assert levels(domain.train) == [4, 5, 25]
    assert domain.train.labels.tolist() == [1, 1, 8]
    assert levels(domain.test) == [3]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("dslr/mug/absent.png", "absent.png cannot be read"),
        ("image_000.png", "line 1: expected domain/class/file"),
        ("dslr/mug/../image_000.png", "line 1: expected"),
        ("dslr\\mug\\image_000.png 8", "write paths with / instead of"),
        ("dslr/mug/image_000.png;8", "put a space between file and label, not ';'"),
        ("images/mug/image_000.png 8", "lists no image of domain 'dslr' .*: its lines begin with images/"),
    ],
    ids=["absent", "no folders", "a path upwards", "Windows", "semicolon", "relative to another folder"],
)
def test_a_wrong_list_is_named(tmp_path: Path, line: str, message: str) -> None:
    source = replace(office(tmp_path), split="lists")
    base = tmp_path / "office_caltech_10"
    (base / "train_list.txt").write_text(line + "\n")
    (base / "test_list.txt").write_text("dslr/bike/image_000.png\n")
    with pytest.raises(DataError, match=message):
        source.load("dslr")


DAMAGES = {"empty": slice(0), "no image": slice(20, None), "truncated": slice(50)}


def test_the_error_without_a_directory_names_the_expected_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOLDFINCH_DATA", raising=False)
    for source in (OfficeCaltech(), PACS(), DomainNet(), OfficeHome(), VLCS()):
        with pytest.raises(DataError, match=r"data\.root=DIR.*GOLDFINCH_DATA.*Put .* there"):
            source.load(source.domains[0])
    with pytest.raises(DataError, match=r"domain 'webcam' is not there; looked for .*webcam.*Put Office-Caltech-10"):
        office(tmp_path).load("webcam")


def test_a_missing_or_empty_class_folder_is_named(tmp_path: Path) -> None:
    counts = dict.fromkeys(OFFICE_CLASSES, 2)
    del counts["mouse"]
    source = office(tmp_path, counts)
    with pytest.raises(DataError, match=r"class folder .*dslr/mouse is missing"):
        source.load("dslr")
    (tmp_path / "office_caltech_10" / "dslr" / "mouse").mkdir()
    with pytest.raises(DataError, match=r"class folder .*mouse has no images"):
        source.load("dslr")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_image_is_named(tmp_path: Path, damage: str, own_cache: Path) -> None:
    source = office(tmp_path)
    path = tmp_path / "office_caltech_10" / "dslr" / "mug" / "image_001.png"
    path.write_bytes(path.read_bytes()[DAMAGES[damage]])
    with pytest.raises(DataError, match=r"mug/image_001\.png cannot be decoded"):
        source.load("dslr")
    assert not list(own_cache.iterdir())
    write_image(path, 25)
    assert len(source.load("dslr").train) == 24
    assert len(list(own_cache.iterdir())) == 1


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _postscript(path: Path) -> None:
    Image.new("RGB", (8, 8)).save(path, format="EPS")


def _many_pixels(path: Path) -> None:
    """A PNG with a header that claims 9,000 x 9,000 pixels of 16 bits. Decoding them would take gigabytes."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 9_000, 9_000, 16, 0, 0, 0, 0)
    body = b"IDAT" + zlib.compress(bytes(1000))
    chunks = [struct.pack(">I", len(each) - 4) + each + struct.pack(">I", zlib.crc32(each)) for each in (header, body)]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))


def _lzma(path: Path) -> None:
    Image.new("L", (8, 8)).save(path, format="TIFF", compression="lzma")


def _large_tiles(path: Path) -> None:
    """A TIFF of 8 x 8 pixels with tiles of 40,000 x 40,000."""
    tags = {256: 8, 257: 8, 258: 8, 259: 8, 262: 1, 277: 1, 322: 40_000, 323: 40_000, 324: 8, 325: 8}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    path.write_bytes(b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + struct.pack("<I", 0))


def _shared_strips(path: Path) -> None:
    """A TIFF of 8,192 x 8,192 pixels in 2.7 kB: all 128 strips are the same bytes."""
    side, rows, strips = 8192, 64, 128
    data = zlib.compress(bytes(rows * side * 3), 9)
    bits = 8 + 2 + 12 * 9 + 4
    offsets, lengths, strip = bits + 6, bits + 6 + 4 * strips, bits + 6 + 8 * strips
    tags = [
        (256, 1, side), (257, 1, side), (258, 3, bits), (259, 1, 8), (262, 1, 2),
        (273, strips, offsets), (277, 1, 3), (278, 1, rows), (279, strips, lengths),
    ]  # fmt: skip
    entries = b"".join(struct.pack("<HHII", tag, 3 if tag == 258 else 4, count, value) for tag, count, value in tags)
    arrays = struct.pack("<3H", 8, 8, 8) + struct.pack("<I", strip) * strips + struct.pack("<I", len(data)) * strips
    path.write_bytes(b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + arrays + data)


def _many_scans(path: Path) -> None:
    """A progressive JPEG that repeats its last scan: each is a pass over all pixels and takes 16 bytes."""
    Image.new("L", (256, 256)).save(path, format="JPEG", progressive=True)
    content = path.read_bytes()[:-2]
    path.write_bytes(content + 100 * content[content.rindex(b"\xff\xda") :] + b"\xff\xd9")


SPOILT: dict[str, tuple[Callable[[Path], None], str]] = {
    "PostScript by the name of PNG": (_postscript, "cannot identify"),
    "pipe": (_pipe, "not a regular file"),
    "more pixels than memory": (_many_pixels, "9000 x 9000 pixels; at most"),
    "slow TIFF": (_lzma, "TIFF compression lzma; save it as PNG"),
    "large tiles": (_large_tiles, "tiles of 40000 x 40000 pixels; at most"),
    "the same strip again and again": (_shared_strips, "decode to 201326592, more than 4096 times as many"),
    "scan after scan": (_many_scans, "a JPEG of more than 100 scans; save it again"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_what_is_no_ordinary_image_is_not_decoded(tmp_path: Path, case: str) -> None:
    spoil, reason = SPOILT[case]
    path = write_image(tmp_path / "image.png", 3)
    spoil(path)
    with pytest.raises(DataError, match=reason):
        decode_image(path, 8, "image.png")


@pytest.mark.parametrize(
    ("kind", "options"),
    [("PNG", {}), ("JPEG", {}), ("JPEG", {"progressive": True}), ("GIF", {}), ("TIFF", {"compression": "tiff_lzw"})],
    ids=["PNG", "JPEG", "progressive JPEG", "GIF", "TIFF"],
)
def test_a_large_image_of_one_colour_is_decoded(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """No file of these formats is smaller in relation to its pixels."""
    path = tmp_path / "image"
    Image.new("RGB", (2100, 2100), (200, 100, 50)).save(path, format=kind, **options)
    with path.open("rb") as stream:
        from_stream = decode_image(stream, 8, "image")
    assert np.array_equal(decode_image(path, 8, "image"), from_stream)
    assert np.abs(from_stream.astype(int) - [200, 100, 50]).max() <= 3


@pytest.mark.long
def test_a_large_16_bit_image_takes_half_a_gibibyte_at_most(tmp_path: Path) -> None:
    """A file of about a hundred kilobytes; in a process of its own, because peaks of a process only grow."""
    Image.new("I;16", (8192, 8192), 30_000).save(tmp_path / "large.png", compress_level=1)
    script = (
        "import resource, sys; from pathlib import Path; from common.data.image_files import decode_image\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "image = decode_image(Path(sys.argv[1]), 8, 'large.png')\n"
        "print(int(image[0, 0, 0]), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "large.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    value, kibibytes = map(int, done.stdout.split())
    assert value == 117
    assert kibibytes < 550 * 1024 * (1 if sys.platform == "linux" else 1024)  # macOS counts in bytes


@pytest.mark.parametrize("folder", [False, True], ids=["an image", "a class folder"])
def test_links_lead_within_the_domain(tmp_path: Path, folder: bool) -> None:
    source = office(tmp_path)
    place = tmp_path / "office_caltech_10" / "dslr" / "mug"
    place = place if folder else place / "image_001.png"
    moved = place.rename(place.parent / "moved.txt")
    place.symlink_to(moved)
    assert len(source.load("dslr").train) == 24
    place.unlink()
    place.symlink_to(moved.rename(tmp_path / "outside"))
    with pytest.raises(DataError, match=r"outside .*dslr\. .*cp -rL"):
        source._read("dslr")


def test_all_links_that_leave_the_domain_are_named_and_those_that_lead_to_nothing(tmp_path: Path) -> None:
    source = office(tmp_path)
    place = tmp_path / "office_caltech_10" / "dslr" / "mug"
    (tmp_path / "outside").mkdir()
    first, second = sorted(place.iterdir())[:2]
    first.rename(tmp_path / "outside" / first.name)
    first.symlink_to(tmp_path / "outside" / first.name)
    second.unlink()
    second.symlink_to(tmp_path / "gone.png")
    with pytest.raises(DataError, match="take out links to nothing") as caught:
        source._read("dslr")
    assert f"{first} leads to {tmp_path / 'outside' / first.name}, " in str(caught.value)
    assert f"{second} leads to {tmp_path / 'gone.png'} (nothing is there), outside" in str(caught.value)


def test_an_empty_test_split_is_an_error(tmp_path: Path) -> None:
    source = PACS(image_size=8, root=str(tmp_path), split="index_rule", domains=("photo",))
    write_classes(tmp_path / "PACS" / "photo", dict.fromkeys(source.class_names, 1))
    with pytest.raises(DataError, match=r"'photo' in .* has no test images by split=index_rule"):
        source.load("photo")


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "I;16"])
def test_every_kind_of_image_becomes_rgb(tmp_path: Path, mode: str) -> None:
    source = office(tmp_path)
    path = tmp_path / "office_caltech_10" / "dslr" / "backpack" / "image_000"
    path.with_suffix(".png").unlink()
    if mode == "I;16":
        Image.fromarray(np.full((8, 8), 255 * 257, dtype=np.uint16)).save(path.with_suffix(".png"))
    else:
        Image.new("RGB", (8, 8), (255, 255, 255)).convert(mode).save(path.with_suffix(".tif"))
    assert levels(source.load("dslr").train)[0] == 255


def test_pacs_reads_both_kinds_of_lists(tmp_path: Path) -> None:
    classes = PACS().class_names
    source = PACS(image_size=8, root=str(tmp_path))
    write_classes(tmp_path / "PACS" / "sketch", dict.fromkeys(classes, 2))
    labels = tmp_path / "PACS" / "pacs_label"
    labels.mkdir()
    train = "".join(f"sketch/{name}/image_000.png {label + 1}\n" for label, name in enumerate(classes))
    (labels / "sketch_train_kfold.txt").write_text(train)
    (labels / "sketch_crossval_kfold.txt").write_text(train.replace("image_000", "image_001"))
    domain = source._read("sketch")
    assert levels(domain.train) == [0, 2, 4, 6, 8, 10, 12]
    assert domain.train.labels.tolist() == list(range(7))  # by folder, although the lists count from 1
    (tmp_path / "PACS" / "train_list.txt").write_text("sketch/dog/image_001.png\n")
    (tmp_path / "PACS" / "test_list.txt").write_text("sketch/dog/image_000.png\n")
    assert levels(source._read("sketch").train) == [1]


def test_domainnet_takes_its_ten_classes_from_the_published_lists(tmp_path: Path) -> None:
    base = tmp_path / "DomainNet"
    write_classes(base / "real", {"bird": 3, "zebra": 3, "wine_glass": 3, "aircraft_carrier": 3})
    for part, number in (("train", 0), ("test", 2)):
        (base / f"real_{part}.txt").write_text(
            f"real/aircraft_carrier/image_00{number}.png 0\nreal/bird/image_00{number}.png 23\n"
            f"real/wine_glass/image_00{number}.png 338\nreal/zebra/image_00{number}.png 343\n"
        )
    domain = DomainNet(image_size=8, root=str(tmp_path)).load("real")
    assert domain.train.labels.tolist() == [0, 8, 9]
    assert levels(domain.train) == [3, 6, 9]
    assert levels(domain.test) == [5, 8, 11]
    other = DomainNet(image_size=8, root=str(base), classes=("zebra", "aircraft_carrier")).load("real")
    assert levels(other.train) == [9, 0]
    (base / "clipart" / "bird").mkdir(parents=True)
    with pytest.raises(DataError, match=r"needs clipart_train.txt and clipart_test.txt"):
        DomainNet(image_size=8, root=str(base)).load("clipart")


@pytest.mark.parametrize("spelling", ["Real World", "RealWorld"])
def test_office_home_reads_every_spelling_and_sorts_its_classes(spelling: str, tmp_path: Path) -> None:
    classes = OfficeHome().class_names
    assert len(set(classes)) == 65
    assert list(classes) == sorted(classes)
    base = tmp_path / "OfficeHomeDataset_10072016"
    write_classes(base / spelling, dict.fromkeys(classes, 1))
    domain = OfficeHome(image_size=8, root=str(tmp_path)).load("real_world")
    assert levels(domain.train) == domain.train.labels.tolist()
    assert sorted(levels(domain.train) + levels(domain.test)) == list(range(65))
    assert levels(domain.test) == [label for label in range(65) if label % 10 > 7]


@pytest.mark.parametrize(
    ("folder", "domain"),
    [("Caltech101", "caltech101"), ("CALTECH", "caltech101"), ("SUN", "sun09"), ("PASCAL", "voc2007")],
)
def test_vlcs_knows_the_names_of_its_domains(folder: str, domain: str, tmp_path: Path) -> None:
    write_classes(tmp_path / "VLCS" / folder, dict.fromkeys(VLCS().class_names, 2))
    read = VLCS(image_size=8, root=str(tmp_path)).load(domain)
    assert levels(read.train) + levels(read.test) == list(range(10))
    lists = tmp_path / "VLCS" / "splits"
    lists.mkdir()
    (lists / f"{domain}_train.txt").write_text(f"{folder}/bird/image_000.png 0\n{folder}/dog/image_001.png 3\n")
    (lists / f"{domain}_test.txt").write_text(f"{folder}/person/image_000.png 4\n")
    listed = VLCS(image_size=8, root=str(tmp_path), split="lists")._read(domain)
    assert (levels(listed.train), listed.train.labels.tolist()) == ([0, 7], [0, 3])
    assert levels(listed.test) == [8]


@pytest.mark.parametrize("kind", [OfficeCaltech, PACS, DomainNet, OfficeHome, VLCS])
def test_fields_out_of_range_are_refused(kind: type[ImageFolders]) -> None:
    with pytest.raises(ValueError, match="train_fraction"):
        kind(train_fraction=1.0)
    with pytest.raises(ValueError, match=r"did you mean|choices"):
        kind(domains=("sketchy",))
