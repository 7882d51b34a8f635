"""Layouts near those that are read: messages say what was found, and the remedy that they name works."""

from __future__ import annotations

import gzip
import re
import shlex
import subprocess
from itertools import product
from pathlib import Path

import pytest
import scipy.io
from data_makers import levels, write_classes, write_image
from test_digits import LABELS, digits, idx, write_mat, write_mnist

from common.data.digit_files import decompressed, read_idx, read_mat
from common.data.domain import DataSource
from common.data.domainnet import DomainNet
from common.data.image_files import check_within
from common.data.image_folders import ImageFolders
from common.data.layouts import found_in
from common.data.office_caltech import OfficeCaltech
from common.data.office_home import OfficeHome
from common.data.pacs import PACS
from common.data.vlcs import VLCS
from common.errors import DataError
from server.cli import main

OFFICE = dict.fromkeys(OfficeCaltech().class_names, 2)
SMALL = ["train.rounds=1", "train.local_steps=1", "train.batch_size=4", "model=small", "engine=inline", "--quiet"]


def message_of(source: DataSource, domain: str) -> str:
    with pytest.raises(DataError) as caught:
        source.load(domain)
    return str(caught.value)


def run_what_it_says(message: str, output: Path) -> None:
    """Run the command ``goldfinch run data=folder ...`` in a message."""
    found = re.search(r"goldfinch (run data=folder .*?data\.image_size=\d+)", message)
    assert found, message
    assert main([*shlex.split(found[1]), *SMALL, f"output={output}"]) == 0
    assert (output / "summary.json").exists()


# ---- folders that data=folder reads as they are ----------------------------------------------------------------------


def test_office_home_with_train_and_val_is_read_by_folder(tmp_path: Path) -> None:
    root = tmp_path / "with blank, comma"
    classes = dict.fromkeys(OfficeHome().class_names[:3], 4)
    for number, place in enumerate(("art/train", "art/val", "clipart/train", "clipart/val")):
        write_classes(root / "office_home_dg" / place, classes, start=60 * number)
    message = message_of(OfficeHome(domains=("art", "clipart"), image_size=16, root=str(root)), "art")
    assert f"found in {root}: office_home_dg/" in message
    run_what_it_says(message, tmp_path / "run")
    at_set = OfficeHome(domains=("art", "clipart"), image_size=16, root=str(root / "office_home_dg"))
    message = message_of(at_set, "art")
    assert f"found in {root / 'office_home_dg' / 'art'}: train/, val/" in message
    run_what_it_says(message, tmp_path / "again")


def test_vlcs_with_parts_and_numbered_classes_is_read_by_folder(tmp_path: Path) -> None:
    places = product(("CALTECH", "LABELME", "PASCAL", "SUN"), ("train", "crossval", "test"))
    for number, (domain, part) in enumerate(places):
        write_classes(tmp_path / "VLCS" / domain / part, dict.fromkeys("01234", 3), start=20 * number)
    (tmp_path / "VLCS" / "notes").mkdir()
    message = message_of(VLCS(root=str(tmp_path)), "caltech101")
    assert "found in" in message
    assert "crossval/, test/, train/" in message
    assert "data.domains=[CALTECH,LABELME,PASCAL,SUN]" in message
    run_what_it_says(message, tmp_path / "run")


def test_the_folders_of_another_data_set_are_not_offered(tmp_path: Path) -> None:
    for domain in ("art_painting", "cartoon", "photo", "sketch"):
        write_classes(tmp_path / "PACS" / domain, {"dog": 2, "person": 2})
    message = message_of(VLCS(root=str(tmp_path)), "caltech101")
    assert "found in" in message
    assert "goldfinch" not in message


def test_folders_with_different_classes_are_not_offered(tmp_path: Path) -> None:
    """data=folder would make two classes of backpack and 003.backpack."""
    write_classes(tmp_path / "amazon", OFFICE)
    numbered = {f"{number:03}.{name}": 2 for number, name in enumerate(OFFICE)}
    write_classes(tmp_path / "caltech", numbered)
    message = message_of(OfficeCaltech(root=str(tmp_path)), "caltech")
    assert "caltech/backpack is missing (10 of 10 are)" in message
    assert "000.backpack/, 001.bike/" in message
    assert "if 000.backpack/ is meant, rename it to backpack" in message
    assert "goldfinch" not in message
    for path in sorted((tmp_path / "caltech").iterdir()):
        path.rename(path.with_name(path.name.partition(".")[2]))
    assert len(OfficeCaltech(root=str(tmp_path)).load("caltech").train) == 16


# ---- one level more, other names, other places -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "domain", "inner"),
    [(OfficeCaltech(image_size=8), "amazon", "images"), (DomainNet(image_size=8), "clipart", "clipart")],
    ids=["a level images", "unpacked into its own folder"],
)
def test_class_folders_one_level_deeper_are_moved_up(
    source: ImageFolders, domain: str, inner: str, tmp_path: Path
) -> None:
    classes = source.class_names
    write_classes(tmp_path / domain / inner, dict.fromkeys(classes, 3))
    for part, number in (("train", 0), ("test", 1)):
        lines = [f"{domain}/{name}/image_{number:03}.png {label}\n" for label, name in enumerate(classes)]
        (tmp_path / f"{domain}_{part}.txt").write_text("".join(lines))
    with pytest.raises(
        DataError, match=rf"found in .*{domain}: {inner}/\. .* are one level deeper, in {inner}/"
    ) as caught:
        source.load(domain, root=str(tmp_path), own=False)
    command = re.search(r"move them up \((.*)\)$", str(caught.value))
    assert command
    subprocess.run(["/bin/sh", "-c", command[1]], check=True)
    assert len(source.load(domain, root=str(tmp_path), own=False).train)


def test_caltech10_is_caltech(tmp_path: Path) -> None:
    write_classes(tmp_path / "office_caltech_10" / "caltech10", OFFICE)
    assert len(OfficeCaltech(image_size=8, root=str(tmp_path)).load("caltech").train) == 16


def test_a_data_set_in_a_folder_of_another_name_is_found(tmp_path: Path) -> None:
    for domain in ("amazon", "dslr"):
        write_classes(tmp_path / "old data" / domain, OFFICE)
    source = OfficeCaltech(domains=("amazon", "dslr"), image_size=8, root=str(tmp_path))
    message = message_of(source, "amazon")
    assert "found in" in message
    found = re.search(r"give data\.root='(.*)'", message)
    assert found, message
    there = OfficeCaltech(domains=("amazon", "dslr"), image_size=8, root=found[1])
    assert len(there.load("amazon").train) == 16


def test_pacs_without_lists_is_divided_by_a_rule(tmp_path: Path) -> None:
    write_classes(tmp_path / "PACS" / "photo", dict.fromkeys(PACS().class_names, 5))
    message = message_of(PACS(image_size=8, root=str(tmp_path)), "photo")
    assert f"found in {tmp_path / 'PACS'}: photo/" in message
    for rule in re.findall(r"data\.split=(\w+)", message):
        assert len(PACS(image_size=8, root=str(tmp_path), split=rule).load("photo").train)
    assert "data.split=index_rule" in message


def test_what_a_folder_holds(tmp_path: Path) -> None:
    assert found_in(tmp_path / "none") == f"{tmp_path / 'none'} does not exist"
    assert found_in(tmp_path) == f"{tmp_path} is empty"
    for name in range(12):
        (tmp_path / f"{name:02}").mkdir()
    assert found_in(tmp_path).endswith("05/, 06/, 07/ and 4 more")


# ---- lists -----------------------------------------------------------------------------------------------------------


def test_hyphens_and_underscores_are_one_in_lists_too(tmp_path: Path) -> None:
    write_classes(tmp_path / "real", {"ice_cream": 3, "wine_glass": 3})
    (tmp_path / "Real-Train.txt").write_text("real/ice-cream/image_000.png 1\nReal/wine glass/image_001.png 2\n")
    (tmp_path / "Real-Test.txt").write_text("real/Ice_Cream/image_002.png 1\n")
    source = DomainNet(image_size=8, root=str(tmp_path), classes=("ice-cream", "wine-glass"))
    domain = source.load("real")
    assert levels(domain.train) == [0, 4]
    assert levels(domain.test) == [2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (r"dslr\mug\image_000.png 8", "write paths with / instead of"),
        ("dslr/mug/image_000.png;8", "put a space between file and label, not ';'"),
        ("dslr/mug/image_000.png,8", "put a space between file and label, not ','"),
        ("images/mug/image_000.png 8", "lists no image of domain 'dslr' and its classes: its lines begin with images/"),
    ],
    ids=["Windows", "semicolon", "comma", "relative to another folder"],
)
def test_what_is_wrong_in_a_list_is_named(line: str, message: str, tmp_path: Path) -> None:
    write_classes(tmp_path / "dslr", OFFICE)
    (tmp_path / "train_list.txt").write_text(f"{line}\n")
    (tmp_path / "test_list.txt").write_text("dslr/bike/image_000.png\n")
    assert message in message_of(OfficeCaltech(image_size=8, root=str(tmp_path), split="lists"), "dslr")
    (tmp_path / "train_list.txt").write_text("dslr/mug/image_000.png\t8\n")
    assert len(OfficeCaltech(image_size=8, root=str(tmp_path), split="lists")._read("dslr").train) == 1


def test_a_link_that_leaves_the_site_has_a_remedy(tmp_path: Path) -> None:
    outside = write_image(tmp_path / "outside" / "a.png", 3)
    (tmp_path / "site").mkdir()
    link = tmp_path / "site" / "a.png"
    link.symlink_to(outside)
    with pytest.raises(DataError, match=rf"{link} leads to {outside}, outside .*cp -rL"):
        check_within([link], tmp_path / "site")
    subprocess.run(["cp", "-rL", str(tmp_path / "site"), str(tmp_path / "copied")], check=True)
    check_within([tmp_path / "copied" / "a.png"], tmp_path / "copied")


# ---- digits ----------------------------------------------------------------------------------------------------------


def test_torchvisions_folder_may_be_named_as_the_root(tmp_path: Path) -> None:
    write_mnist(tmp_path / "MNIST" / "MNIST" / "raw")
    assert len(digits(tmp_path, "mnist").load("mnist").train) == 20


def test_ganins_files_in_the_small_sets_folder_are_ganins_set(tmp_path: Path) -> None:
    for part in ("train", "test"):
        write_mat(tmp_path / "SYN" / f"synth_{part}_32x32.mat", zero=0)
    source = digits(tmp_path, "syn", "synth_digits")
    assert len(source.load("synth_digits").train) == 20
    message = message_of(source, "syn")
    assert "synth_train_32x32.mat there is of another domain: synth_digits in data.domains" in message


def test_the_small_set_is_not_taken_for_ganins(tmp_path: Path) -> None:
    for part in ("imgs_train", "imgs_valid"):
        for digit in range(10):
            write_image(tmp_path / "SYN" / part / str(digit) / "a.png", digit * 20)
    source = digits(tmp_path, "syn", "synth_digits")
    assert len(source.load("syn").train) == 10
    assert f"synth_digits is not in {tmp_path}" in message_of(source, "synth_digits")


def test_packing_is_seen_by_the_first_bytes(tmp_path: Path) -> None:
    (tmp_path / "plain.gz").write_bytes(idx(LABELS))
    (tmp_path / "packed").write_bytes(gzip.compress(idx(LABELS), mtime=0))
    for name in ("plain.gz", "packed"):
        assert read_idx(tmp_path / name).tolist() == LABELS.tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"MATLAB 7.3 MAT-file, Platform: GLNXA64", "is a MATLAB 7.3 file.*'-v7'"),
        (b"<!doctype html><html>Quota exceeded", "is a web page, so the download failed"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a reference to a file of Git LFS"),
        (b"PK\x03\x04 and more", "is a ZIP archive: unpack it"),
        (b"", "is empty: fetch it again"),
        (b"rubbish", r"is damaged .*fetch it again"),
    ],
    ids=["MATLAB 7.3", "web page", "Git LFS", "ZIP", "empty", "rubbish"],
)
def test_a_file_of_another_kind_is_called_so(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(content)
    for read in (read_mat, read_idx):
        with pytest.raises(DataError, match=message):
            read(path)


def test_a_file_that_matlab_saved_for_us_is_read(tmp_path: Path) -> None:
    write_mat(tmp_path / "a.mat")
    assert scipy.io.loadmat(tmp_path / "a.mat")["X"].ndim == 4
    assert decompressed(tmp_path / "a.mat") == (tmp_path / "a.mat").read_bytes()
