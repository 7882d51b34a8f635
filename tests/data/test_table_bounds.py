"""Tables of strangers: nothing is decoded beyond its bounds, and whatever is in a file ends in words."""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from table_makers import CLASSES, ROWS, encoded, make_set, write_list, write_set, write_splits

from common.data import domain as domain_module
from common.data import table_files
from common.data.table import Table
from common.errors import DataError, GoldfinchError

LISTED = "path,label,split\npictures/3.png,dog,train\npictures/1.png,cat,train\npictures/2.png,dog,test\n"


def load(place: Path) -> None:
    source = Table(path=str(place), image_size=8, domains=("site",), classes=CLASSES)
    source.load("site")


def refused(place: Path, message: str) -> str:
    with pytest.raises(DataError, match=message) as told:
        load(place)
    return str(told.value)


# ---- what is small and decodes to much -------------------------------------------------------------------------------


def test_a_small_parquet_file_of_many_rows_is_not_decoded(tmp_path: Path) -> None:
    """A file of 755 bytes took all memory."""
    rows = table_files.MAX_ROWS + 1
    cells = {"path": pa.nulls(rows, pa.string()), "label": pa.nulls(rows, pa.string())}
    parquet.write_table(pa.table(cells), tmp_path / "a.parquet", row_group_size=rows)
    assert (tmp_path / "a.parquet").stat().st_size < 20_000
    refused(tmp_path / "a.parquet", r"has 4,194,305 rows; at most 4,194,304 are read. Divide it by domain")


def test_a_parquet_file_that_repeats_an_image_is_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "FREE_GROWTH", 2**20)
    image = encoded(9) + bytes(2**16)
    found = make_set([(1, 0)] * 500)
    cells = pa.StructArray.from_arrays([pa.array([image] * 500), pa.nulls(500, pa.string())], ["bytes", "path"])
    rows = pa.table({"image": cells, "label": found.data["label"]}, schema=found.features.arrow_schema)
    parquet.write_table(rows, tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 20_000
    refused(tmp_path / "a.parquet", r"bytes decode to [0-9,]+ or more; at most 64 times as many")


def test_a_compressed_arrow_file_is_not_decompressed(tmp_path: Path) -> None:
    """A file of 19 kB took 1.7 GB."""
    write_set(tmp_path / "site")
    path = next((tmp_path / "site").glob("*.arrow"))
    rows = pa.ipc.open_stream(path.read_bytes()).read_all()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, rows.schema, options=options) as writer:
        writer.write_table(rows)
    refused(tmp_path / "site", "is compressed; save the set again by save_to_disk")


def test_a_batch_of_many_rows_without_bytes_is_not_read(tmp_path: Path) -> None:
    write_set(tmp_path / "site")
    path = next((tmp_path / "site").glob("*.arrow"))
    batch = pa.record_batch({"image": pa.nulls(2**24), "label": pa.nulls(2**24)})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    assert path.stat().st_size < 2000
    refused(tmp_path / "site", "has 16,777,216 rows")


def test_a_list_of_many_columns_is_not_read(tmp_path: Path) -> None:
    """Each short line would get a cell for every column."""
    refused(write_list(tmp_path / "a.csv", "path,label" + ",x" * 2000 + "\n"), "has 2002 columns")


def test_a_list_that_is_compressed_or_no_text_is_named(tmp_path: Path) -> None:
    for name, content in (("gzip", gzip.compress(b"path,label\n")), ("parquet", b"PAR1 and no more"), ("nul", b"a\0b")):
        (tmp_path / f"{name}.csv").write_bytes(content)
        refused(tmp_path / f"{name}.csv", "is no text|cannot be read")


def test_reading_a_list_decodes_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(f"none/{number}.png,cat,site_{number % 3}\n" for number in range(10_000))
    place = write_list(tmp_path / "a.csv", "path,label,domain\n" + lines, images=0)
    assert Table(path=str(place)).domains == ("site_0", "site_1", "site_2")
    assert Table(path=str(place)).class_names == ("cat",)


# ---- hostile records of a saved set ----------------------------------------------------------------------------------


def changed(folder: Path, name: str, **values: Any) -> Path:
    write_set(folder)
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(content | values))
    return folder


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("dataset_info.json", {"features": [1]}, "describes no columns"),
        ("dataset_info.json", {"features": {"a": {"_type": "Made up"}}}, "cannot be read"),
        ("dataset_info.json", {"features": None}, "describes no columns"),
        ("state.json", {"_data_files": ["x"]}, "names no Arrow files"),
        ("state.json", {"_data_files": [{"filename": "../../other"}]}, "which is no file beside it"),
        ("state.json", {"_data_files": [{"filename": "/etc/passwd"}]}, "which is no file beside it"),
        ("state.json", {"_data_files": [{"filename": "a\0b"}]}, "which is no file beside it"),
        ("state.json", {"_data_files": [{"filename": "a" * 5000}]}, "which is no file beside it"),
        ("state.json", {"_data_files": [{"filename": "missing.arrow"}]}, "cannot be read"),
        ("state.json", {"_indices_data_files": [{"filename": "indices.arrow"}]}, "flatten_indices"),
    ],
    ids=[
        *(
            "features as a list",
            "an unknown kind",
            "no features",
            "files as texts",
            "a path upwards",
            "an absolute path",
        ),
        *("a NUL", "a long name", "a missing file", "an index"),
    ],
)
def test_a_hostile_record_of_a_saved_set_is_refused(
    name: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    refused(changed(tmp_path / "site", name, **values), message)


@pytest.mark.parametrize(
    "splits",
    [[1], ["../x"], "train", None, ["a" * 5000]],
    ids=["a number", "a path upwards", "a text", "none", "a long name"],
)
def test_hostile_names_of_splits_are_refused(splits: Any, tmp_path: Path) -> None:
    write_splits(tmp_path / "site", train=ROWS, test=ROWS)
    (tmp_path / "site" / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
    refused(tmp_path / "site", "names")


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json", "data-00000-of-00001.arrow"])
def test_a_damaged_file_of_a_saved_set_is_named(name: str, tmp_path: Path) -> None:
    path = write_set(tmp_path / "site") / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    refused(tmp_path / "site", rf"{name} cannot be read")


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "images.parquet").write_bytes(b"PAR1 and no more")
    refused(tmp_path / "images.parquet", r"images\.parquet cannot be read")


def test_a_row_without_an_image_is_named(tmp_path: Path) -> None:
    found = make_set(ROWS).to_dict()
    found["image"][2] = None
    datasets.Dataset.from_dict(found, features=make_set(ROWS).features).save_to_disk(tmp_path / "site")
    refused(tmp_path / "site", "row 3 of 'image' holds no image, only the path of one")


def test_a_label_without_a_name_is_named(tmp_path: Path) -> None:
    found = make_set(ROWS).to_dict()
    found["label"][1] = -1
    datasets.Dataset.from_dict(found, features=make_set(ROWS).features).save_to_disk(tmp_path / "site")
    refused(tmp_path / "site", "a row has -1 in 'label', which is none of its 2 classes")


# ---- links, and cells of a list --------------------------------------------------------------------------------------

SECRET = "root:x:0:0:root:/root:/bin/bash"


@pytest.mark.parametrize("name", ["list.csv", "list.parquet", "list.txt"])
def test_the_content_of_a_file_that_a_list_leads_to_is_not_told(name: str, tmp_path: Path) -> None:
    (tmp_path / "passwd").write_text(f"{SECRET}\n")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / name).symlink_to(tmp_path / "passwd")
    assert SECRET not in refused(tmp_path / "site" / name, "leads to .*passwd, outside")
    assert "root" not in refused(tmp_path / "passwd", "is no table").replace(str(tmp_path), "")


def test_a_link_among_the_images_is_refused(tmp_path: Path) -> None:
    place = write_list(tmp_path / "site" / "a.csv", LISTED)
    target = (tmp_path / "site" / "pictures" / "1.png").rename(tmp_path / "1.png")
    (tmp_path / "site" / "pictures" / "1.png").symlink_to(target)
    refused(place, f"outside .*, or set data.root to a folder .* data.root={tmp_path} data.path=site/a.csv")
    assert len(Table(root=str(tmp_path), path="site/a.csv", image_size=8).load("a").train) == 2


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("a" * 5000, "more than 4096 characters"),
        ("a" * 300, "is no path"),
        ("b\0c", "NUL|no text"),
        ("/etc/passwd", "outside"),
    ],
    ids=["5000 characters", "300 characters", "a NUL", "an absolute path"],
)
def test_a_cell_that_is_no_path_is_refused(cell: str, message: str, tmp_path: Path) -> None:
    refused(write_list(tmp_path / "a.csv", LISTED + f"{cell},cat,train\n"), message)


@pytest.mark.parametrize(
    "path", ["a" * 5000, "a" * 300, "b\0c", "x/" * 3000], ids=["5000 letters", "300 letters", "a NUL", "3000 folders"]
)
def test_a_path_that_is_none_is_refused(path: str) -> None:
    with pytest.raises((GoldfinchError, ValueError)):
        Table(path=path)


# ---- any damage ------------------------------------------------------------------------------------------------------


def files_of(folder: Path, kind: str) -> list[Path]:
    """A table of a kind, and its files."""
    if kind == "saved":
        return sorted(path for path in write_splits(folder, train=ROWS, test=ROWS[:2]).rglob("*") if path.is_file())
    if kind == "list":
        return [write_list(folder / "a.csv", LISTED)]
    folder.mkdir()
    make_set(ROWS, split=["train", "test"] * 3).to_parquet(folder / "a.parquet")
    return [folder / "a.parquet"]


@pytest.mark.parametrize("kind", ["saved", "parquet", "list"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_in_a_table_ends_in_words(kind: str, data: st.DataObject, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    shutil.rmtree(folder, ignore_errors=True)
    files = files_of(folder, kind)
    path = data.draw(st.sampled_from(files), "file")
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4), "changes")):
        place = data.draw(st.integers(0, len(content) - 1), "place")
        content[place] = data.draw(st.integers(0, 255), "byte")
    path.write_bytes(content[: data.draw(st.integers(len(content) // 2, len(content)), "length")])
    domain_module._load.cache_clear()
    with contextlib.suppress(GoldfinchError):
        load(files[0] if kind != "saved" else folder)
