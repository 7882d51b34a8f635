"""Layouts near those that are read: messages say what was found, and the remedy that they name works."""

from __future__ import annotations

import gzip
import re
import shlex
import subprocess
from itertools import product
from pathlib import Path

import pytest
from data_makers import levels, write_classes
from test_digits import LABELS, digits, idx, write_mat, write_mnist

from common.data.digit_files import read_idx, read_mat
from common.data.domain import DataSource
from common.data.domainnet import DomainNet
from common.data.image_folders import ImageFolders
from common.data.office_caltech import OfficeCaltech
from common.data.office_home import OfficeHome
from common.data.pacs import PACS
from common.data.vlcs import VLCS
from common.errors import DataError
from goldfinch.cli import main

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


def test_vlcs_with_parts_and_numbered_classes_is_read_by_folder(tmp_path: Path) -> None:
    places = product(("CALTECH", "LABELME", "PASCAL", "SUN"), ("train", "crossval", "test"))
    for number, (domain, part) in enumerate(places):
        write_classes(tmp_path / "VLCS" / domain / part, dict.fromkeys("01234", 3), start=20 * number)
    write_classes(tmp_path / "VLCS" / "notes", {"scans": 1})
    message = message_of(VLCS(root=str(tmp_path)), "caltech101")
    assert "crossval/, test/, train/" in message
    assert "goldfinch run data=folder" in message
    assert "data.domains=[CALTECH,LABELME,PASCAL,SUN]" in message


def test_the_folders_of_another_data_set_are_not_offered(tmp_path: Path) -> None:
    for domain in ("art_painting", "cartoon", "photo", "sketch"):
        write_classes(tmp_path / "PACS" / domain, {"dog": 2, "person": 2})
    assert "goldfinch" not in message_of(VLCS(root=str(tmp_path)), "caltech101")
    for domain in ("amazon", "caltech", "dslr", "webcam"):
        write_classes(tmp_path / "office_caltech_10" / domain, OFFICE)
    assert "rename" not in message_of(VLCS(root=str(tmp_path)), "caltech101")
    write_classes(tmp_path / "Caltech-101-images", {"dog": 2, "person": 2})
    message = message_of(VLCS(root=str(tmp_path)), "caltech101")
    assert "if Caltech-101-images/ is meant, rename it to caltech101" in message


def test_folders_with_different_classes_are_not_offered(tmp_path: Path) -> None:
    """data=folder would make two classes of backpack and 003.backpack."""
    write_classes(tmp_path / "amazon", OFFICE)
    numbered = {f"{number:03}.{name}": 2 for number, name in enumerate(OFFICE)}
    write_classes(tmp_path / "caltech", numbered)
    message = message_of(OfficeCaltech(root=str(tmp_path)), "caltech")
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
    with pytest.raises(DataError, match=rf"one level deeper, in {inner}/") as caught:
        source.load(domain, root=str(tmp_path), own=False)
    command = re.search(r"move them up \((.*)\)$", str(caught.value))
    assert command
    subprocess.run(["/bin/sh", "-c", command[1]], check=True)
    assert len(source.load(domain, root=str(tmp_path), own=False).train)


def test_class_folders_are_not_moved_onto_others(tmp_path: Path) -> None:
    """The command that was printed ended with Directory not empty."""
    write_classes(tmp_path / "amazon", dict.fromkeys(list(OFFICE)[1:], 2))
    write_classes(tmp_path / "amazon" / "old", OFFICE)
    message = message_of(OfficeCaltech(root=str(tmp_path)), "amazon")
    assert "Put that class's images there" in message
    assert "mv" not in message


def test_a_data_set_in_a_folder_of_another_name_is_found(tmp_path: Path) -> None:
    for domain in ("amazon", "caltech10"):  # another name of caltech
        write_classes(tmp_path / "old data" / domain, OFFICE)
    source = OfficeCaltech(domains=("amazon", "caltech"), image_size=8, root=str(tmp_path))
    message = message_of(source, "amazon")
    found = re.search(r"give data\.root='(.*)'", message)
    assert found, message
    there = OfficeCaltech(domains=("amazon", "caltech"), image_size=8, root=found[1])
    for domain in there.domains:
        assert len(there.load(domain).train) == 16


def test_pacs_without_lists_is_divided_by_a_rule(tmp_path: Path) -> None:
    write_classes(tmp_path / "PACS" / "photo", dict.fromkeys(PACS().class_names, 5))
    message = message_of(PACS(image_size=8, root=str(tmp_path)), "photo")
    assert f"found in {tmp_path / 'PACS'}: photo/" in message
    for rule in re.findall(r"data\.split=(\w+)", message):
        assert len(PACS(image_size=8, root=str(tmp_path), split=rule).load("photo").train)
    assert "data.split=index_rule" in message


# ---- lists -----------------------------------------------------------------------------------------------------------


def test_hyphens_and_underscores_are_one_in_lists_too(tmp_path: Path) -> None:
    write_classes(tmp_path / "real", {"ice_cream": 3, "wine_glass": 3})
    (tmp_path / "Real-Train.txt").write_text("real/ice-cream/image_000.png 1\nReal/wine glass/image_001.png 2\n")
    (tmp_path / "Real-Test.txt").write_text("real/Ice_Cream/image_002.png 1\n")
    source = DomainNet(image_size=8, root=str(tmp_path), classes=("ice-cream", "wine-glass"))
    domain = source.load("real")
    assert levels(domain.train) == [0, 4]
    assert levels(domain.test) == [2]


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


def test_packing_is_seen_by_the_first_bytes(tmp_path: Path) -> None:
    (tmp_path / "plain.gz").write_bytes(idx(LABELS))
    (tmp_path / "packed").write_bytes(gzip.compress(idx(LABELS), mtime=0))
    for name in ("plain.gz", "packed"):
        assert read_idx(tmp_path / name).tolist() == LABELS.tolist()


STRANGE = {
    "MATLAB 7.3": (b"MATLAB 7.3 MAT-file, Platform: GLNXA64", "is a MATLAB 7.3 file.*'-v7'"),
    "web page": (b"<!doctype html><html>Quota exceeded", "is a web page, so the download failed"),
    "Git LFS": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
    "ZIP": (b"PK\x03\x04 and more", "is a ZIP archive: unpack it"),
    "empty": (b"", "is empty: fetch it again"),
    "rubbish": (b"rubbish", r"is damaged .*fetch it again"),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_a_file_of_another_kind_is_called_so(kind: str, tmp_path: Path) -> None:
    content, message = STRANGE[kind]
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(content)
    for read in (read_mat, read_idx):
        with pytest.raises(DataError, match=message):
            read(path)
