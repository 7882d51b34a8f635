"""Tables of one's own images: CSV, Parquet, saved sets and the Hub; guesses are said, and labels follow names."""

from __future__ import annotations

import datetime
import decimal
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from data_makers import levels
from table_makers import (
    CLASSES,
    ROWS,
    encoded,
    make_set,
    write_images,
    write_list,
    write_parquet,
    write_set,
    write_splits,
)

from common.data import domain as domain_module
from common.data.table import Table, leading_groups
from common.errors import ConfigError, DataError
from common.settings import load_settings
from common.text import warn_once

LISTED = "path,label,split\npictures/3.png,dog,train\npictures/1.png,cat,train\npictures/2.png,dog,test\n"


@pytest.fixture(autouse=True)
def _fresh_warnings() -> None:
    warn_once.cache_clear()


def table(place: Path, **fields: Any) -> Table:
    return Table(path=str(place), image_size=8, **fields)


# ---- each kind -------------------------------------------------------------------------------------------------------


def test_a_list_names_images_labels_and_splits(tmp_path: Path) -> None:
    source = table(write_list(tmp_path / "clinic.csv", LISTED))
    assert (source.domains, source.class_names) == (("clinic",), CLASSES)
    domain = source.load("clinic")
    assert (levels(domain.train), domain.train.labels.tolist()) == ([3, 1], [1, 0])
    assert (levels(domain.test), domain.test.labels.tolist()) == ([2], [1])
    assert domain.test_files == (tmp_path / "pictures" / "2.png",)


def test_a_saved_set_without_splits_is_divided_by_class(tmp_path: Path) -> None:
    source = table(write_set(tmp_path / "site"), train_fraction=0.7)
    domain = source.load("site")
    assert source.class_names == CLASSES
    assert (levels(domain.train), domain.train.labels.tolist()) == ([10, 30, 20, 40], [0, 0, 1, 1])
    assert levels(domain.test) == [50, 60]


def test_a_partitioner_of_flwr_datasets_writes_the_sites(tmp_path: Path) -> None:
    """As docs/own-domain.md writes it; the package needs datasets 4, so it is often not there."""
    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    partitioner = partitioners.DirichletPartitioner(
        num_partitions=2, partition_by="label", alpha=0.5, min_partition_size=2
    )
    partitioner.dataset = datasets.load_from_disk(str(write_set(tmp_path / "scans")))
    for number in range(2):
        partitioner.load_partition(number).save_to_disk(str(tmp_path / f"site_{number}" / "images"))
    sites = ("site_0", "site_1")
    source = Table(root=str(tmp_path), path="images", image_size=8, domains=sites, classes=CLASSES)
    assert sorted(level for site in sites for level in levels(source.load(site).whole)) == [10, 20, 30, 40, 50, 60]


@pytest.mark.parametrize("path", ["images.csv", ""], ids=["a list", "a saved set"])
def test_a_device_reads_its_table_as_a_simulation_does(path: str, tmp_path: Path) -> None:
    if path:
        write_list(tmp_path / "photo" / path, LISTED)
    else:
        write_set(tmp_path / "photo")
    source = Table(domains=("photo", "sketch"), classes=CLASSES, path=path, image_size=8)
    found = source.load("photo", root=str(tmp_path / "photo"))
    simulated = Table(root=str(tmp_path), path=path, image_size=8).load("photo")
    assert (levels(found.train), levels(found.test)) == (levels(simulated.train), levels(simulated.test))
    with pytest.raises(DataError, match="is the folder of photo, and 'sketch' is wanted"):
        source.load("sketch", root=str(tmp_path / "photo"))


def test_a_saved_set_with_splits_keeps_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = write_splits(tmp_path / "site", Train=ROWS, validation=[(70, 1), (10, 0)])
    with caplog.at_level(logging.WARNING):
        domain = table(place).load("site")
    assert levels(domain.train) == [10, 20, 30, 40, 50, 60]
    assert levels(domain.test) == [70, 10]
    assert "the 2 validation images are scored" in caplog.text
    assert levels(table(place, duplicates="drop").load("site").test) == [70], "the other test image is a training image"


def test_splits_that_are_not_read_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = write_splits(tmp_path / "site", train=ROWS, test=[(70, 1)], validation=[(80, 0)], extra=[(90, 0)])
    with caplog.at_level(logging.WARNING):
        assert levels(table(place).load("site").test) == [70]
    assert "the images of 'extra' are not read" in caplog.text
    assert "1 validation images are not read, since it has test images" in caplog.text


@pytest.mark.long
def test_a_parquet_file_holds_images_or_paths(tmp_path: Path) -> None:
    make_set(ROWS).to_parquet(tmp_path / "images.parquet")
    assert levels(table(tmp_path / "images.parquet", train_fraction=0.7).load("images").test) == [50, 60]
    write_list(tmp_path / "list.csv", "")
    paths = [f"pictures/{number}.png" for number in range(4)]
    columns = {"path": paths, "label": [0, 1, 0, 1], "is_train": [True, True, False, True]}
    source = table(write_parquet(tmp_path / "list.parquet", columns))
    assert source.class_names == ("0", "1")
    assert (levels(source.load("list").train), levels(source.load("list").test)) == ([0, 1, 3], [2])


def test_a_folder_of_parquet_files_has_splits_by_their_names(tmp_path: Path) -> None:
    for name, rows in (("train-00000-of-00002", ROWS[:3]), ("train-00001-of-00002", ROWS[3:]), ("test", [(70, 0)])):
        (tmp_path / "site" / "data").mkdir(parents=True, exist_ok=True)
        make_set(rows).to_parquet(tmp_path / "site" / "data" / f"{name}.parquet")
    domain = table(tmp_path / "site").load("site")
    assert (sorted(levels(domain.train)), levels(domain.test)) == ([10, 20, 30, 40, 50, 60], [70])
    make_set(ROWS, classes=("dog", "cat")).to_parquet(tmp_path / "site" / "data" / "train-00001-of-00002.parquet")
    with pytest.raises(DataError, match="has other columns or classes than"):
        table(tmp_path / "site")


def test_an_image_folder_with_metadata(tmp_path: Path) -> None:
    for part in ("train", "test"):
        write_list(
            tmp_path / "site" / part / "metadata.csv", "file_name,label\npictures/0.png,cat\npictures/1.png,dog\n"
        )
    domain = table(tmp_path / "site").load("site")
    assert (levels(domain.train), levels(domain.test)) == ([0, 1], [0, 1])


def test_two_spellings_of_a_domain_or_a_class_are_refused(tmp_path: Path) -> None:
    place = write_set(tmp_path / "all", ROWS, domain=["Real World", "real_world"] * 3)
    with pytest.raises(DataError, match="two spellings of one name"):
        table(place).load("Real World")
    for site, label in (("a", "0"), ("b", "0.0")):
        write_list(tmp_path / "lists" / site / "images.csv", f"path,label\npictures/1.png,{label}\n")
    with pytest.raises(DataError, match=r"a/images.csv\) and .*b/images.csv\) are two spellings of one class"):
        _ = Table(root=str(tmp_path / "lists"), path="images.csv", image_size=8).class_names


# ---- domains ---------------------------------------------------------------------------------------------------------


def test_a_column_of_domains_makes_domains(tmp_path: Path) -> None:
    place = write_set(tmp_path / "all", ROWS, domain=["photo", "sketch"] * 3, image_id=list("abcdef"))
    source = table(place)
    assert source.domains == ("photo", "sketch")
    assert sorted(levels(source.load("photo").train) + levels(source.load("photo").test)) == [10, 30, 50]
    with pytest.raises(DataError, match="did you mean 'sketch'"):
        table(place, domains=("skech",)).load("skech")


def test_each_domain_may_have_a_table_of_its_own(tmp_path: Path) -> None:
    write_set(tmp_path / "a", [(10, 0), (20, 1), (30, 0), (40, 1)])
    write_set(tmp_path / "b", [(50, 0), (60, 1), (70, 0), (80, 1)], classes=("dog", "cat"))
    source = Table(root=str(tmp_path), image_size=8)
    assert (source.domains, source.class_names) == (("a", "b"), CLASSES)
    assert source.load("b").train.labels.tolist() == [0, 1], "labels follow the names, not the order of the site"
    assert levels(source.load("b").train) == [60, 50]
    write_list(tmp_path / "lists" / "a" / "images.csv", LISTED)
    write_list(tmp_path / "lists" / "b" / "images.csv", LISTED.replace("dog", "bird"))
    source = Table(root=str(tmp_path / "lists"), path="images.csv", image_size=8)
    assert source.class_names == ("bird", "cat", "dog")
    assert source.load("b").train.labels.tolist() == [0, 1]


def test_one_table_does_not_serve_as_every_domain(tmp_path: Path) -> None:
    source = table(write_set(tmp_path / "all"), domains=("photo", "sketch"), classes=CLASSES)
    for domain in source.domains:
        with pytest.raises(DataError, match="has no column of domains, so all of photo, sketch would be the same"):
            source.load(domain)


NAME_THEM = r"so that all agree on the labels: data.classes=\[a,b\]"


@pytest.mark.parametrize("kind", ["a list", "a saved set"])
def test_devices_with_a_table_each_do_not_number_the_classes_by_their_own(kind: str, tmp_path: Path) -> None:
    """The class 1 of a device would be another than that of its neighbour, who lacks another class."""
    for site, classes in (("photo", ("cat", "dog")), ("sketch", ("cat", "fox"))):
        if kind == "a list":
            rows = [f"pictures/{number}.png,{classes[number % 2]}" for number in range(6)]
            write_list(tmp_path / site / "images", "", images=6).unlink()
            write_list(tmp_path / site / "images.csv", "path,label\n" + "\n".join(rows) + "\n")
        else:
            make_set(ROWS, classes).save_to_disk(tmp_path / site / "images.csv")
        here = {"root": str(tmp_path / site), "path": "images.csv", "image_size": 8, "domains": ("photo", "sketch")}
        with pytest.raises(DataError, match=NAME_THEM):
            _ = Table(**here).class_count
        with pytest.raises(DataError, match=NAME_THEM):
            Table(**here).load(site, root=str(tmp_path / site))
        named = Table(**here, classes=("cat", "dog", "fox")).load(site, root=str(tmp_path / site))
        assert named.whole.labels.unique().tolist() == [0, 1 if site == "photo" else 2]


def test_a_device_reads_its_rows_of_one_table_for_all(tmp_path: Path) -> None:
    lines = "path,label,domain\npictures/1.png,cat,photo\npictures/2.png,cat,photo\npictures/9.png,cat,sketch\n"
    place = write_list(tmp_path / "photo" / "images.csv", lines)
    source = Table(domains=("photo", "sketch"), classes=CLASSES, path=place.name, image_size=8)
    assert levels(source.load("photo", root=str(place.parent)).whole) == [1, 2]


@pytest.mark.parametrize("path", ["/etc/passwd", "../photo/images.csv"])
def test_a_server_names_no_table_outside_a_devices_folder(path: str, tmp_path: Path) -> None:
    write_list(tmp_path / "photo" / "images.csv", LISTED)
    with pytest.raises((ConfigError, ValueError, DataError), match=r"must lie below data.root|no table"):
        Table(domains=("ward",), path=path).load("ward", root=str(tmp_path))


def test_a_path_is_relative_to_the_folder_where_a_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_list(tmp_path / "site.csv", LISTED)
    monkeypatch.chdir(tmp_path)
    settings = load_settings(["data=table", "data.path=site.csv"])
    monkeypatch.chdir("/")
    assert settings.raw["data"]["root"] == str(tmp_path)
    assert len(settings.data.load("site").train) == 2


# ---- columns ---------------------------------------------------------------------------------------------------------


def test_what_is_guessed_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = write_set(tmp_path / "all", ROWS, domain=["photo", "sketch"] * 3, patient=list("abcdef"))
    with caplog.at_level(logging.WARNING):
        table(place).load("photo")
        table(place).load("sketch")
    assert caplog.text.count("columns are taken as data.image=image data.label=label data.domain=domain") == 1
    assert "columns that are not read: patient" in caplog.text


def test_several_columns_of_labels_are_a_choice(tmp_path: Path) -> None:
    found = make_set(ROWS).add_column("fine", [0, 1, 2, 3, 0, 1])
    found = found.rename_column("label", "coarse").cast_column("fine", datasets.ClassLabel(names=list("wxyz")))
    found.save_to_disk(tmp_path / "site")
    with pytest.raises(DataError, match=r"coarse and fine may both be the label; choose one: data\.label=coarse"):
        table(tmp_path / "site")
    assert table(tmp_path / "site", label="fine").class_names == tuple("wxyz")


def test_a_column_of_several_labels_is_none(tmp_path: Path) -> None:
    found = make_set(ROWS).add_column("labels", [[0, 1]] * 6)
    found.save_to_disk(tmp_path / "site")
    assert table(tmp_path / "site").class_names == CLASSES
    with pytest.raises(DataError, match="'labels' holds no single text or number"):
        table(tmp_path / "site", label="labels")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"label": "labl"}, "no column 'labl'; did you mean 'label'"),
        ({"image": "label"}, "no column is known to be the label"),
        ({"domain": "image"}, "no column is known to be the image"),
    ],
    ids=["mistyped", "labels as images", "images as domains"],
)
def test_a_column_that_cannot_be_meant_is_refused(fields: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        table(write_set(tmp_path / "site"), **fields).load("site")


@pytest.mark.long
@pytest.mark.parametrize(
    ("column", "words"),
    [
        ("split", ("train", "test")),
        ("Subset", ("TRAINING", "Validation")),
        ("fold", ("train", "test")),
        ("is_train", ("True", "False")),
        ("is_train", ("1", "0")),
        ("is_valid", ("no", "yes")),
    ],
)
def test_a_lists_split_is_taken_by_whatever_name(
    column: str, words: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [f"pictures/{number}.png,cat,{words[number % 2]}" for number in range(4)]
    place = write_list(tmp_path / "site.csv", f"path,label,{column}\n" + "\n".join(rows))
    with caplog.at_level(logging.WARNING):
        domain = table(place).load("site")
    assert (levels(domain.train), levels(domain.test)) == ([0, 2], [1, 3])
    assert ("the 2 validation images are scored" in caplog.text) == (column in ("Subset", "is_valid"))


WRONG = {
    "no label column": ("file\npictures/1.png\n", "label; choose one: data.label=file"),
    "no label": ("path,label\npictures/1.png,\n", "row 1: no label"),
    "no path": ("path,label\n,cat\n", "row 1: '' is no path"),
    "another split": (
        "path,label,split\npictures/1.png,cat,later\n",
        "'later' in 'split' is no split; write train, test or v",
    ),
    "a fold": (
        "path,label,fold\n" + "".join(f"pictures/{n}.png,cat,{n % 2}\n" for n in range(6)),
        "data.domain=fold makes a domain of each of 0, 1; data.split=fold:0 scores .*data.split=none",
    ),
    "a flag": ("path,label,is_train\npictures/1.png,cat,perhaps\n", "'perhaps' in 'is_train'"),
    "two splits": ("path,label,split,is_train\npictures/1.png,cat,train,1\n", "may both be the split"),
    "some splits": ("path,label,split\npictures/1.png,cat,test\npictures/2.png,cat,\n", "1 rows have no split"),
    "missing": (
        "path,label\npictures/9.png,cat\npictures/8.png,cat\n",
        "none of its 2 images exists.*or move the table",
    ),
    "one is missing": ("path,label\npictures/1.png,cat\npictures/8.png,cat\n", "cannot be read"),
    "a drive": ("path,label\nC:\\pictures\\1.png,cat\n", "is a path of Windows or an address"),
    "an address": ("path,label\nhttps://example.org/1.png,cat\n", "is a path of Windows or an address"),
    "a column twice": ("path,label,label\npictures/1.png,cat,dog\n", "has 2 columns 'label'"),
    "no class": ("path,label\npictures/1.png,dogs\n", "'dogs' is no class; did you mean 'dog'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_list_that_is_wrong_is_named(case: str, tmp_path: Path) -> None:
    lines, message = WRONG[case]
    with pytest.raises(DataError, match=message):
        table(write_list(tmp_path / "site.csv", lines), classes=("cat", "dog")).load("site")


def test_what_the_message_about_another_folder_advises_works(tmp_path: Path) -> None:
    write_list(tmp_path / "images.csv", "")
    lines = "path,label\n../pictures/1.png,cat\n../pictures/2.png,cat\n"
    place = write_list(tmp_path / "lists" / "site.csv", lines, images=0)
    with pytest.raises(DataError, match=rf"outside .*data.root={tmp_path} data.path=lists/site.csv"):
        table(place).load("site")
    for text in (lines, lines.replace("../", "")):  # relative to the table's folder, or to the root
        place.write_text(text)
        found = Table(root=str(tmp_path), path="lists/site.csv", image_size=8).load("site")
        assert (levels(found.train), levels(found.test)) == ([1], [2])


def test_windows_separators_and_other_separators_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for separator, name in ((";", "semicolons"), ("\t", "tabs")):
        lines = "path,label\npictures\\1.png,cat\npictures\\2.png,cat\n".replace(",", separator)
        with caplog.at_level(logging.WARNING):
            assert levels(table(write_list(tmp_path / f"{name}.csv", lines)).load(name).train) == [1]
        assert f"separated by {name}" in caplog.text
    assert "its paths are of Windows" in caplog.text


def test_labels_of_a_list_are_texts_as_they_are_written(tmp_path: Path) -> None:
    lines = "path,label\npictures/1.png,NA\npictures/2.png,NA\npictures/3.png,007\npictures/4.png,007\n"
    assert table(write_list(tmp_path / "site.csv", lines)).class_names == ("007", "NA")


# ---- rows that were lost, and samples that nobody meant --------------------------------------------------------------


@pytest.mark.parametrize("notes", [('"5 mm', "", ""), ('"5 mm', '"7 mm', ""), ('"5" mm', "", "")])
def test_a_quote_without_its_partner_takes_no_further_rows(notes: Sequence[str], tmp_path: Path) -> None:
    rows = [f"pictures/{number}.png,cat,{note}" for number, note in enumerate((*notes, "plain", "plain"))]
    place = write_list(tmp_path / "site.csv", "path,label,note\n" + "\n".join(rows) + "\n")
    with pytest.raises(DataError, match="row that begins in line 2, the quotes around a cell do not pair"):
        table(place).load("site")
    written = place.read_text()
    for note in notes:  # as the message advises: the cell in quotes, and each quote in it twice
        if note:
            doubled = note.replace('"', '""')
            written = written.replace(f",{note}\n", f',"{doubled}"\n')
    place.write_text(written)
    domain = table(place).load("site")
    assert levels(domain.train) + levels(domain.test) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("column", "message"),
    [("label", "row 6: no label"), ("patient", "a row has no 'patient'"), ("ward", "row 6: no domain in 'ward'")],
)
def test_a_missing_number_is_no_class_no_group_and_no_domain(column: str, message: str, tmp_path: Path) -> None:
    write_list(tmp_path / "unused.csv", "")
    cells: dict[str, Any] = {
        "path": [f"pictures/{number}.png" for number in range(6)],
        "label": ["cat", "dog"] * 3,
        "patient": [1.0, 1.0, 2.0, 2.0, 3.0, 3.0],
        "ward": [7.0] * 6,
    }
    if column == "label":
        cells["label"] = [0.0, 1.0] * 3
    cells[column][-1] = float("nan")
    pyarrow.parquet.write_table(pyarrow.table(cells), tmp_path / "site.parquet")
    with pytest.raises(DataError, match=message):
        table(tmp_path / "site.parquet", label="label", domain="ward", group="patient", domains=("7.0",)).load("7.0")


def test_a_row_without_a_domain_is_in_none_and_is_named(tmp_path: Path) -> None:
    rows = [f"pictures/{number}.png,cat,{'ab'[number % 2] if number < 5 else ''}" for number in range(6)]
    place = write_list(tmp_path / "all.csv", "path,label,ward\n" + "\n".join(rows) + "\n")
    for domains in ((), ("a", "b")):
        with pytest.raises(DataError, match="row 6: no domain in 'ward'; give it one, or take the row out"):
            table(place, domain="ward", domains=domains).load("a")


MISSING: dict[str, tuple[tuple[str, str], dict[str, str], str]] = {
    "no label, no name": (("diagnosis", "hospital"), {}, "diagnosis and hospital may both be the label"),
    "no domain": (("hospital", "label"), {}, "row 1: no domain in 'hospital'.*none of domains: data.domain=none"),
    "no fold": (("fold", "label"), {}, "fold may be domains or splits.*data.split=fold:0 scores"),
    "no fold of those asked for": (("fold", "label"), {"split": "fold:0"}, "1 rows have no split"),
    "no flag": (("reviewed", "label"), {}, "reviewed may be domains or splits"),
}
WORDS = {"diagnosis": "xy", "hospital": "pq", "fold": "01", "label": "xy"}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("case", MISSING)
def test_one_empty_cell_makes_no_column_another(case: str, kind: str, tmp_path: Path) -> None:
    """The hospitals became the classes, all hospitals one client, and a row without a fold was trained on."""
    names, fields, message = MISSING[case]
    write_list(tmp_path / "unused.csv", "", images=16)
    cells: dict[str, list[Any]] = {"path": [f"pictures/{number}.png" for number in range(16)]}
    for each, name in enumerate(names):
        words = WORDS.get(name, ("yes", "no"))
        cells[name] = [words[number // (each + 1) % 2] for number in range(16)]
    cells[names[0]][0] = None
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table(cells), tmp_path / "site.parquet")
    else:
        lines = [",".join(cells)]
        for row in zip(*cells.values(), strict=True):
            lines.append(",".join(cell or " " for cell in row))
        (tmp_path / "site.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=message):
        table(tmp_path / f"site.{kind}", **fields).load("site")
    if case == "no domain":
        assert len(table(tmp_path / f"site.{kind}", domain="none").load("site").whole) == 16


def test_a_column_with_few_cells_is_not_asked_about(tmp_path: Path) -> None:
    """Remarks, and a mark in the rows of test images alone."""
    rows: list[str] = []
    for number in range(12):
        row = f"pictures/{number}.png,{'xy'[number % 2]}"
        rows.append(f"{row},{('blurred', 'dark')[number % 2] * (number < 7)},{'x' * (number < 3)}")
    place = write_list(tmp_path / "site.csv", "path,label,remark,held\n" + "\n".join(rows) + "\n", images=12)
    assert len(table(place).load("site").whole) == 12
    assert levels(table(place, split="held:x").load("site").test) == [0, 1, 2]


def test_two_spellings_of_a_group_are_no_two_groups(tmp_path: Path) -> None:
    """A patient was in train and, as another one, in test."""
    patients = ["p1", "p2", "p3", "p3 "]
    rows = [f"pictures/{number}.png,{'ab'[number % 2]},{patients[number]}" for number in range(4)]
    place = write_list(tmp_path / "site.csv", "path,label,patient\n" + "\n".join(rows) + "\n")
    with pytest.raises(DataError, match="row 4: 'p3' and 'p3 ' in 'patient' are two spellings of one group"):
        table(place, group="patient").load("site")
    place.write_text(place.read_text().replace("p3 ", "P3"))
    assert len(table(place, group="patient").load("site").whole) == 4, "names may differ in case"


def test_columns_of_dates_are_not_read(tmp_path: Path) -> None:
    write_list(tmp_path / "unused.csv", "")
    cells: dict[str, Any] = {"path": [f"pictures/{number}.png" for number in range(4)], "label": ["x", "y"] * 2}
    cells["when"] = [datetime.datetime(2024, 1, 1)] * 4
    cells["day"] = [datetime.date(2024, 1, 1)] * 4
    cells["price"] = [decimal.Decimal("1.50")] * 4
    pyarrow.parquet.write_table(pyarrow.table(cells), tmp_path / "site.parquet")
    assert len(table(tmp_path / "site.parquet").load("site").whole) == 4
    with pytest.raises(DataError, match=r"'when' holds no single text or number in each row, as data\.group needs"):
        table(tmp_path / "site.parquet", group="when")


HEADERS = {
    "a break": 'path,"la\nbel"',
    "a break of Windows": '"pa\r\nth",label',
    "a sign that breaks no line": "# by\u2028hand\npath,label",
    "a comment above a break": '# by hand\npath,"la\nbel"',
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_may_take_several_lines(case: str, tmp_path: Path) -> None:
    """As Excel writes a cell with a line break."""
    rows = "".join(f"pictures/{number}.png,{'xy'[number % 2]}\n" for number in range(4))
    source = table(write_list(tmp_path / "site.csv", f"{HEADERS[case]}\n{rows}"))
    assert source.class_names == ("x", "y")
    assert sorted(levels(source.load("site").whole)) == [0, 1, 2, 3]


def test_a_folder_without_the_table_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for place in ("site_a/images.csv", "site_b/images.csv", "site_c/Images.csv"):
        write_list(tmp_path / place, LISTED)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "readme.txt").touch()
    with caplog.at_level(logging.WARNING):
        assert Table(root=str(tmp_path), path="images.csv", image_size=8).domains == ("site_a", "site_b")
    assert "folders that hold no images.csv are no domains: site_c; if one is meant to be" in caplog.text


@pytest.mark.parametrize(("cell", "which"), [("7", "none"), ("1", "all")])
def test_a_cell_that_divides_no_rows_is_refused(cell: str, which: str, tmp_path: Path) -> None:
    rows = [f"pictures/{number}.png,cat,{'ab'[number % 2]},{1 - number % 2}" for number in range(6)]
    place = write_list(tmp_path / "all.csv", "path,label,domain,fold\n" + "\n".join(rows) + "\n")
    with pytest.raises(DataError, match=rf"{which} of the rows of a have '{cell}' in 'fold'.*cells are 0, 1: choose"):
        table(place, split=f"fold:{cell}").load("a")
    place.write_text(
        place.read_text().replace("5.png,cat,b,0", "5.png,cat,b,1").replace("4.png,cat,a,1", "4.png,cat,a,0")
    )
    assert levels(table(place, split="fold:0").load("a").test) == [4]


def test_an_image_that_several_rows_list_is_in_one_split(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [f"pictures/{number}.png,cat,{reader}" for reader in "xy" for number in range(5)]
    place = write_list(tmp_path / "site.csv", "path,label,reader\n" + "\n".join(rows) + "\n")
    with caplog.at_level(logging.WARNING):
        domain = table(place, domain="none", label="label", train_fraction=0.5).load("site")
    assert (levels(domain.train), levels(domain.test)) == ([0, 0, 1, 1], [2, 2, 3, 3, 4, 4])
    assert f"5 images of site listed in several rows, such as {tmp_path}/pictures/0.png" in caplog.text


# ---- copies, broken images, the cache --------------------------------------------------------------------------------


def test_broken_images_are_named_at_once_or_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = write_images(tmp_path / "site", [b"no", b"no", *(encoded(number) for number in range(10))])
    with pytest.raises(DataError, match=r"2 files are not images.*site, row 1 .*site, row 2 "):
        table(place).load("site")
    with caplog.at_level(logging.WARNING):
        domain = table(place, broken="skip").load("site")
    assert len(domain.train) + len(domain.test) == 10
    assert "2 files skipped as no image (data.broken=skip)" in caplog.text


def test_a_single_broken_image_is_one_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = write_images(tmp_path / "site", [b"no", *(encoded(number) for number in range(10))])
    with caplog.at_level(logging.WARNING):
        table(place, broken="skip").load("site")
    assert "1 file skipped as no image (data.broken=skip)" in caplog.text


def test_a_domain_that_cannot_be_a_name_is_found_in_its_row(tmp_path: Path) -> None:
    rows = [f"{number}.png,cat,{ward}" for number, ward in enumerate(["a", " b "])]
    place = write_list(tmp_path / "list.csv", "image,label,ward\n" + "\n".join(rows) + "\n")
    with pytest.raises(DataError, match=r"list\.csv, row 2: ' b ' in 'ward' cannot be a domain; use letters"):
        Table(path=str(place), domain="ward", label="label")


@pytest.mark.parametrize("kind", ["saved", "parquet"])
def test_the_cache_follows_the_table(kind: str, tmp_path: Path) -> None:
    def write(rows: list[tuple[int, int]]) -> Table:
        if kind == "saved":
            return table(write_set(tmp_path / "site", rows), train_fraction=0.7)
        make_set(rows).to_parquet(tmp_path / "site.parquet")
        return table(tmp_path / "site.parquet", train_fraction=0.7)

    assert levels(write(ROWS).load("site").test) == [50, 60]
    domain_module._load.cache_clear()  # as in another process
    again = write([(level + 100, 1 - label) for level, label in ROWS]).load("site")
    assert (levels(again.test), again.test.labels.tolist()) == ([160, 150], [0, 1])


# ---- the Hub, and without the library --------------------------------------------------------------------------------


HUB = """
import pathlib
class Features: pass
class Split:
    cache_files = [{"filename": str(next(pathlib.Path({place!r}).glob("*.arrow")))}]
def load_dataset(*names, **options):
    with open({asked!r}, "a") as stream:
        print(names, options, file=stream)
    return {"train": Split}
"""
"""What is asked of ``datasets``."""


def test_a_set_of_the_hub_is_read_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns, kinds and the single split of ``flwrlabs/pacs``."""
    saved = write_set(tmp_path / "fetched", ROWS * 2, domain=["photo"] * 6 + ["sketch"] * 6)
    code = HUB.replace("{place!r}", repr(str(saved))).replace("{asked!r}", repr(str(tmp_path / "asked")))
    (tmp_path / "datasets.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    source = Table(path="made-up/pacs", image_size=8, train_fraction=0.7)
    assert (source.domains, source.class_names) == (("photo", "sketch"), CLASSES)
    assert levels(source.load("sketch").test) == [50, 60]
    assert (tmp_path / "asked").read_text() == "('made-up/pacs',) {}\n", "asked once, and for no code"


@pytest.mark.long
def test_the_hub_without_a_network_says_what_to_do(tmp_path: Path) -> None:
    code = "from common.data.table import Table; Table(path='flwrlabs/pacs')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "DataError: table: flwrlabs/pacs is no file or folder here" in done.stderr
    assert "save_to_disk('saved')" in done.stderr


def test_a_table_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``load_dataset`` of ``datasets`` asks a server in the network even for a local CSV file."""
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "datasets.py").write_text("raise ValueError('datasets is imported')")
    make_set(ROWS).to_parquet(tmp_path / "a.parquet")
    monkeypatch.syspath_prepend(tmp_path / "shadow")
    for place in (tmp_path / "a.parquet", write_set(tmp_path / "b"), write_list(tmp_path / "c.csv", LISTED)):
        source = table(place)
        source.load(source.domains[0])


def test_without_its_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = write_set(tmp_path / "site")
    (tmp_path / "pyarrow.py").write_text("raise ImportError(name='pyarrow')")
    monkeypatch.syspath_prepend(tmp_path)
    assert table(write_list(tmp_path / "site.csv", LISTED)).domains == ("site",), "a list needs no library"
    with pytest.raises(ConfigError, match=r"data=table needs pyarrow: .*pip install .*\[table\]"):
        table(place)


def test_no_table_says_what_one_is(tmp_path: Path) -> None:
    for fields in ({}, {"path": "none/list.csv"}, {"root": str(tmp_path)}):
        with pytest.raises(Exception, match=r"(is not set|is no table); set it to a CSV or Parquet file.*data=folder"):
            Table(**fields)  # type: ignore[arg-type]


def test_a_users_file_of_the_librarys_name_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "datasets.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rf"mv {tmp_path}/datasets.py {tmp_path}/my_datasets.py"):
        Table(path="made-up/other")


# ---- whole groups ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "train", "test"),
    [
        ([2, 90, 8], 92, 8),
        ([10, 10, 300, 10, 10], 320, 20),
        ([10, 10, 10, 300], 320, 10),
        ([300, 10, 10], 300, 20),
        ([3, 3, 3, 3], 9, 3),
        ([5, 5], 5, 5),
        ([7], 7, 0),
    ],
)
def test_whole_groups_are_train_as_near_to_the_fraction_as_they_can_be(sizes: list[int], train: int, test: int) -> None:
    groups = {Path(f"{number}-{index}"): f"{number}" for number, size in enumerate(sizes) for index in range(size)}
    parts = leading_groups([(path, 0) for path in groups], groups, 0.8)
    assert [len(part) for part in parts] == [train, test]


def listed_patients(place: Path, labels: Sequence[str]) -> Path:
    """A list with a row for each letter of each patient's images: c a cat, d a dog."""
    lines = ["path,label,patient,part"]
    for patient, images in enumerate(labels):
        for letter in images:
            part = ("train", "test")[patient % 2]
            lines.append(
                f"pictures/{len(lines) - 1}.png,{dict(zip('cd', CLASSES, strict=True))[letter]},p{patient},{part}"
            )
    return write_list(place, "\n".join(lines) + "\n", images=len(lines) - 1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (["cd", "cdcdcdcdcdcdcdcdcd", "cd"], ["91% of the images are train, and data.train_fraction=0.8"]),
        (["cdcdcdcd", "cc"], ["no test image is of dog"]),
        (["cccccccc", "dd"], ["no train image is of dog", "no test image is of cat"]),
        (["cdcdcdcd", "cd"], []),
        (["ccccccccd", "cc"], []),
    ],
    ids=["share", "no test", "neither", "both", "a class of one image"],
)
def test_what_whole_groups_make_of_a_split_is_said(
    labels: list[str], said: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = table(listed_patients(tmp_path / "clinic.csv", labels), group="patient", domain="none", split="none")
    with caplog.at_level(logging.WARNING):
        source.load("clinic")
    warned = [line for line in caplog.messages if "stay whole" in line]
    assert len(warned) == bool(said)
    assert all(text in warned[0] for text in said)
    if said:
        assert "choose it by data.split=COLUMN" in warned[0]
        caplog.clear()
        divided = table(tmp_path / "clinic.csv", group="patient", domain="none", split="part").load("clinic")
        assert set(divided.train_groups) == {f"p{number}" for number in range(0, len(labels), 2)}
        assert "stay whole" not in caplog.text
