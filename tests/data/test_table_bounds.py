"""Tables of strangers: nothing is decoded beyond its bounds, and whatever is in a file ends in words."""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import subprocess
import sys
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
from common.data import table_files, table_process
from common.data.table import Table
from common.errors import DataError, GoldfinchError
from common.text import warn_once

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
    refused(tmp_path / "a.parquet", r"has 1,048,577 rows; at most 1,048,576 are read. Divide it by domain")


def repeated(image: bytes, rows: int) -> pa.DictionaryArray:
    """A column in which each row is the same image, which is stored once."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([image], pa.binary()))


def write_zipped(place: Path, columns: dict[str, Any]) -> None:
    parquet.write_table(pa.table(columns), place, compression="zstd", dictionary_pagesize_limit=2**26)
    assert place.stat().st_size < 200_000


def test_a_parquet_file_that_repeats_an_image_is_not_decoded(tmp_path: Path) -> None:
    """A file of 802 bytes took 4.9 GB."""
    image = encoded(9) + bytes(2**22)
    write_zipped(tmp_path / "a.parquet", {"image": repeated(image, 200), "label": ["cat", "dog"] * 100})
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


def test_reading_a_list_decodes_no_image(tmp_path: Path) -> None:
    lines = "".join(f"none/{number}.png,cat,site_{number % 3}\n" for number in range(10_000))
    place = write_list(tmp_path / "a.csv", "path,label,domain\n" + lines, images=0)
    assert Table(path=str(place)).domains == ("site_0", "site_1", "site_2")
    assert Table(path=str(place)).class_names == ("cat",)


@pytest.mark.long
def test_a_table_takes_no_more_memory_whatever_is_in_it(tmp_path: Path) -> None:
    """Nothing foresees this file: each of 300 fields of its images is small, and all of 64 rows are 19 GB."""
    same = pa.array([bytes(2**20)] * 64)
    names = ["bytes", *(f"field {number}" for number in range(299))]
    cells = pa.StructArray.from_arrays([same] * len(names), names)
    write_zipped(tmp_path / "a.parquet", {"image": cells, "label": ["cat", "dog"] * 32})
    refused(tmp_path / "a.parquet", r"takes more than 1.1.GB of memory, the most that is used; save it again with few")


def test_a_process_that_ends_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Arrow had stopped it."""
    (tmp_path / "pyarrow.py").write_text("import os\nos.write(2, b'bad alloc\\n')\nos.abort()\n")
    write_set(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path)
    refused(tmp_path / "site", r"site cannot be decoded: the process .* ended with status -6 \(bad alloc\)")


def test_a_system_without_the_limit_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "resource.py").write_text("raise ImportError")
    place = write_list(tmp_path / "site" / "a.csv", LISTED)
    monkeypatch.syspath_prepend(tmp_path)
    warn_once.cache_clear()
    for _ in range(2):
        load(place)
        domain_module._load.cache_clear()
    assert caplog.text.count("this system does not limit the memory") == 1


def test_a_table_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    answers = table_process._answers

    def counted(place: Any, request: Any) -> Any:
        asked.append(request["task"])
        return answers(place, request)

    monkeypatch.setattr(table_process, "_answers", counted)
    place = write_set(tmp_path / "site")
    for _ in range(2):
        load(place)
        domain_module._load.cache_clear()
    assert asked == ["rows", "images"]


def test_the_process_starts_without_torch() -> None:
    code = "import sys, common.data.table_process; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# ---- hostile records of a saved set ----------------------------------------------------------------------------------


RECORDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "features as a list": ("dataset_info.json", {"features": [1]}, "describes no columns"),
    "an unknown kind": ("dataset_info.json", {"features": {"a": {"_type": "Made up"}}}, "cannot be read"),
    "no features": ("dataset_info.json", {"features": None}, "describes no columns"),
    "files as texts": ("state.json", {"_data_files": ["x"]}, "names no Arrow files"),
    "a path upwards": ("state.json", {"_data_files": [{"filename": "../../other"}]}, "no file beside it"),
    "an absolute path": ("state.json", {"_data_files": [{"filename": "/etc/passwd"}]}, "no file beside it"),
    "a NUL": ("state.json", {"_data_files": [{"filename": "a\0b"}]}, "no file beside it"),
    "a long name": ("state.json", {"_data_files": [{"filename": "a" * 5000}]}, "no file beside it"),
    "a missing file": ("state.json", {"_data_files": [{"filename": "missing.arrow"}]}, "cannot be read"),
    "an index": ("state.json", {"_indices_data_files": [{"filename": "indices.arrow"}]}, "flatten_indices"),
}


@pytest.mark.parametrize("case", RECORDS)
def test_a_hostile_record_of_a_saved_set_is_refused(case: str, tmp_path: Path) -> None:
    name, values, message = RECORDS[case]
    path = write_set(tmp_path / "site") / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    refused(tmp_path / "site", message)


SPLITS: dict[str, Any] = {"a number": [1], "a path upwards": ["../x"], "a text": "train", "none": None}


@pytest.mark.parametrize("case", SPLITS)
def test_hostile_names_of_splits_are_refused(case: str, tmp_path: Path) -> None:
    write_splits(tmp_path / "site", train=ROWS, test=ROWS)
    (tmp_path / "site" / "dataset_dict.json").write_text(json.dumps({"splits": SPLITS[case]}))
    refused(tmp_path / "site", "names")


@pytest.mark.parametrize(
    ("column", "row", "value", "message"),
    [("image", 2, None, "row 3 of 'image' holds no image"), ("label", 1, -1, "-1 in 'label', which is none of its 2")],
)
def test_a_cell_that_is_empty_or_no_class_is_named(
    column: str, row: int, value: Any, message: str, tmp_path: Path
) -> None:
    found = make_set(ROWS).to_dict()
    found[column][row] = value
    datasets.Dataset.from_dict(found, features=make_set(ROWS).features).save_to_disk(tmp_path / "site")
    refused(tmp_path / "site", message)


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json", "data-00000-of-00001.arrow"])
def test_a_damaged_file_of_a_saved_set_is_named(name: str, tmp_path: Path) -> None:
    path = write_set(tmp_path / "site") / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    refused(tmp_path / "site", rf"{name} cannot be read")


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
    refused(place, f"outside .*, or set data.root to the folder .* data.root={tmp_path} data.path=site/a.csv")
    assert len(Table(root=str(tmp_path), path="site/a.csv", image_size=8).load("a").train) == 2


CELLS = {
    "5000 characters": ("a" * 5000, "more than 4096 characters"),
    "300 characters": ("a" * 300, "is no path"),
    "a NUL": ("b\0c", "NUL|no text"),
    "an absolute path": ("/etc/passwd", "outside"),
}


@pytest.mark.parametrize("case", CELLS)
def test_a_cell_that_is_no_path_is_refused(case: str, tmp_path: Path) -> None:
    cell, message = CELLS[case]
    refused(write_list(tmp_path / "a.csv", LISTED + f"{cell},cat,train\n"), message)


PATHS = {"5000 letters": "a" * 5000, "300 letters": "a" * 300, "a NUL": "b\0c", "3000 folders": "x/" * 3000}


@pytest.mark.parametrize("case", PATHS)
def test_a_path_that_is_none_is_refused(case: str) -> None:
    with pytest.raises((GoldfinchError, ValueError)):
        Table(path=PATHS[case])


# ---- any damage ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each kind."""
    root = tmp_path_factory.mktemp("tables")
    write_splits(root / "saved", train=ROWS, test=ROWS[:2])
    write_list(root / "list" / "a.csv", LISTED)
    (root / "parquet").mkdir()
    make_set(ROWS, split=["train", "test"] * 3).to_parquet(root / "parquet" / "a.parquet")
    return root


TABLES = {"saved": "", "parquet": "a.parquet", "list": "a.csv"}


def answers_here(_place: Any, request: Any) -> Any:
    """What the process would answer, without the process: for many examples."""
    sent: list[tuple[Any, bytes]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_process, "_send", lambda answer, content=b"": sent.append((answer, content)))
        table_process._serve(json.loads(json.dumps(request)))
    return iter(sent)


@pytest.mark.parametrize("kind", TABLES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_in_a_table_ends_in_words(kind: str, data: st.DataObject, tables: Path, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(tables / kind, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".png")
    path = data.draw(st.sampled_from(files), "file")
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4), "changes")):
        place = data.draw(st.integers(0, len(content) - 1), "place")
        content[place] = data.draw(st.integers(0, 255), "byte")
    path.write_bytes(content[: data.draw(st.integers(len(content) // 2, len(content)), "length")])
    domain_module._load.cache_clear()
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(GoldfinchError):
        patch.setattr(table_process, "_answers", answers_here)
        load(folder / TABLES[kind])
