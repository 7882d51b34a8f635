"""Folders, names and splits as people have them: what would be read as something else is refused or said."""

from __future__ import annotations

import logging
import shlex
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from data_makers import levels, write_classes, write_image

from common.composition import compose_config
from common.config import build
from common.data.domain import DataSource
from common.data.folder import Folder
from common.data.image_folders import ImageFolders
from common.data.names import name_key
from common.data.office_caltech import OfficeCaltech
from common.data.public import PublicImages
from common.errors import DataError

# ---- one folder is one domain ----------------------------------------------------------------------------------------


def published(tmp_path: Path, kind: type[ImageFolders], name: str) -> Path:
    """Return the folder of one domain with every class of a published set."""
    write_classes(tmp_path / name, dict.fromkeys(kind().class_names, 3))
    return tmp_path / name


SETS: dict[str, Callable[..., DataSource]] = {
    "published": partial(OfficeCaltech, image_size=8),
    "one's own": partial(Folder, domains=("amazon", "caltech"), classes=OfficeCaltech().class_names, image_size=8),
}


@pytest.mark.parametrize("kind", SETS)
def test_a_simulation_takes_no_folder_of_class_folders_for_its_domains(kind: str, tmp_path: Path) -> None:
    root = published(tmp_path, OfficeCaltech, "amazon")
    source = SETS[kind](root=str(root))
    for domain in source.domains:
        with pytest.raises(DataError, match=rf"is the folder of one domain: give the folder above it, {tmp_path}"):
            source.load(domain)
    assert len(SETS[kind](root=str(tmp_path)).load("amazon").train) > 0, "what the message advises works"


@pytest.mark.parametrize("kind", SETS)
def test_a_device_is_not_given_another_domains_folder(kind: str, tmp_path: Path) -> None:
    root = published(tmp_path, OfficeCaltech, "amazon")
    source = SETS[kind]()
    with pytest.raises(DataError, match="is the folder of amazon, and 'caltech' is wanted"):
        source.load("caltech", root=str(root))
    assert len(source.load("amazon", root=str(root)).train) > 0
    unnamed = root.rename(tmp_path / "images")
    assert len(source.load("caltech", root=str(unnamed)).train) > 0, "a folder of any other name may be its own"


def test_two_spellings_of_a_class_are_refused(tmp_path: Path) -> None:
    write_classes(tmp_path / "site_a", {"alarm clock": 5, "dog": 5})
    write_classes(tmp_path / "site_b", {"Alarm_clock": 5, "dog": 5}, start=50)
    with pytest.raises(DataError, match=r"site_a/alarm clock.*site_b/Alarm_clock.*two spellings of one class"):
        _ = Folder(root=str(tmp_path), image_size=8).class_names
    with pytest.raises(ValueError, match="'cat' and 'Cat' are two spellings"):
        Folder(domains=("site",), classes=("cat", "Cat"))


@pytest.mark.parametrize("extra", ["dslr/coffee_mug", "dslr/Mug", "DSLR/mug"])
def test_two_folders_of_one_published_name_are_refused(extra: str, tmp_path: Path) -> None:
    published(tmp_path, OfficeCaltech, "dslr")
    write_image(tmp_path / extra / "image.png", 200)
    with pytest.raises(DataError, match="are two folders of one name; join them"):
        OfficeCaltech(image_size=8, root=str(tmp_path)).load("dslr")


def test_a_device_reads_a_public_set_from_no_domain_of_its_own(tmp_path: Path) -> None:
    write_classes(tmp_path / "ward", {"cat": 5})
    public = PublicImages(Folder(domains=("public",), classes=("cat",), image_size=8), "public", 2)
    with pytest.raises(DataError, match="'public' is not in"):
        public.load(str(tmp_path / "ward"))


# ---- names -----------------------------------------------------------------------------------------------------------

SPELLINGS = [
    ("cat", "Cat"),
    ("caf\u00e9", "cafe\u0301"),
    ("cat", "cat "),
    ("cat", " cat"),
    ("alarm clock", "alarm_clock"),
    ("alarm-clock", "alarm  clock"),
    ("1", "01"),
    ("0", "0.0"),
]


@pytest.mark.parametrize(("one", "other"), SPELLINGS)
def test_spellings_of_one_name_are_one(one: str, other: str) -> None:
    assert name_key(one) == name_key(other)


def test_other_names_stay_apart() -> None:
    names = ["cat", "cats", "c", "c++", "1", "-1", "10", "1.5", "12345678901234567890123456789012", "a b", "ab", ""]
    names.append("12345678901234567890123456789013")
    assert len({name_key(name) for name in names}) == len(names)


# ---- the user's own split --------------------------------------------------------------------------------------------


def test_folders_of_splits_count_in_any_case_and_others_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_classes(tmp_path / "site" / "Training", {"cat": 2})
    write_classes(tmp_path / "site" / "TEST", {"cat": 2}, start=50)
    write_classes(tmp_path / "site" / "val", {"cat": 3}, start=90)
    with caplog.at_level(logging.WARNING):
        domain = Folder(root=str(tmp_path), image_size=8).load("site")
    assert (levels(domain.train), levels(domain.test)) == ([0, 1], [50, 51])
    assert "not read: val/ (3 images)" in caplog.text
    write_classes(tmp_path / "site" / "train", {"cat": 2})
    with pytest.raises(DataError, match="are both of the train images; join them"):
        Folder(root=str(tmp_path), image_size=9).load("site")


def test_a_root_of_splits_is_one_domain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_classes(tmp_path / "clinic" / "train", {"cat": 4, "dog": 4})
    write_classes(tmp_path / "clinic" / "val", {"cat": 2, "owl": 2}, start=50)
    source = Folder(root=str(tmp_path / "clinic"), image_size=8)
    assert source.domains == ("clinic",)
    assert source.class_names == ("cat", "dog", "owl")
    with caplog.at_level(logging.WARNING):
        domain = source.load("clinic")
    assert (len(domain.train), levels(domain.test)) == (8, [50, 51, 52, 53])
    assert domain.test.labels.tolist() == [0, 0, 2, 2]
    assert "there are no test images, so the 4 validation images are scored" in caplog.text


# ---- what a folder of one domain is advised --------------------------------------------------------------------------


@pytest.mark.parametrize("domains", [("ward-a",), ("ward-a", "ward-b")], ids=["one", "two"])
@pytest.mark.parametrize("parts", [("",), ("train", "test")], ids=["no splits", "splits"])
def test_a_folder_of_another_name_is_read_as_one_domain_by_what_is_advised(
    domains: tuple[str, ...], parts: tuple[str, ...], tmp_path: Path
) -> None:
    for number, part in enumerate(parts):
        write_classes(tmp_path / "images" / part, {"benign": 5, "malignant": 5}, start=20 * number)
    words = ["data=folder", f"data.root={tmp_path / 'images'}", f"data.domains=[{','.join(domains)}]"]
    words.append("data.classes=[benign,malignant]")
    with pytest.raises(DataError, match="is the folder of one domain") as caught:
        folder_of(words).load("ward-a")
    advised = shlex.split(str(caught.value).partition("one domain: ")[2].partition(" reads it")[0])
    assert len(advised) == len(domains)
    found = folder_of([*words, *advised])
    assert found.domains == ("ward-a",)
    assert len(found.load("ward-a").whole) == 10 * len(parts)


def folder_of(words: list[str]) -> Folder:
    return build(compose_config(words)["data"], "data")


def test_a_published_domain_in_a_folder_of_another_name_is_read_by_what_is_advised(tmp_path: Path) -> None:
    root = published(tmp_path, OfficeCaltech, "images")
    with pytest.raises(DataError, match="is the folder of one domain: if it is 'dslr'") as caught:
        OfficeCaltech(domains=("dslr",), image_size=8, root=str(root)).load("dslr")
    command = str(caught.value).partition("if it is 'dslr', ")[2].partition(" and give")[0]
    subprocess.run(shlex.split(command), check=True)
    found = OfficeCaltech(domains=("dslr",), image_size=8, root=str(tmp_path)).load("dslr")
    assert len(found.whole) == 30
