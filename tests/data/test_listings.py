"""Images in a Parquet list, in a folder that Hugging Face's datasets wrote, and as phones store them."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from data_makers import write_classes, write_image
from PIL import Image

from common.data import image_files
from common.data.folder import Folder
from common.data.listings import leading_rows, read_list
from common.errors import ConfigError, DataError

CLASSES = ("cat", "dog")


def encoded(level: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (12, 8), (level, level, level)).save(stream, "PNG")
    return stream.getvalue()


def write_set(folder: Path, rows: list[tuple[int, int]], **changes: Any) -> None:
    """Write one set as ``Dataset.save_to_disk`` does: a brightness and a label for each row, two Arrow files."""
    pa = pytest.importorskip("pyarrow", reason="the extra arrow is not installed")
    folder.mkdir(parents=True)
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    names = []
    for number, part in enumerate((rows[: len(rows) // 2], rows[len(rows) // 2 :])):
        names.append(f"data-{number:05}-of-00002.arrow")
        cells = [{"bytes": changes.get("content", encoded(level)), "path": None} for level, _ in part]
        columns = {"image": pa.array(cells, image), "label": pa.array([label for _, label in part], pa.int64())}
        table = pa.table(columns)
        with pa.OSFile(str(folder / names[-1]), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    features = {"image": {"_type": "Image"}, "label": {"names": list(CLASSES), "_type": "ClassLabel"}}
    features = changes.get("features", features)
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    state = {"_data_files": [{"filename": name} for name in names], "_indices_data_files": changes.get("indices")}
    (folder / "state.json").write_text(json.dumps(state))


ROWS = [(10, 0), (20, 1), (30, 0), (40, 1), (50, 0), (60, 1)]


def levels_of(images: torch.Tensor) -> list[int]:
    return images[:, 0, 0, 0].tolist()


def test_a_saved_set_without_splits_is_divided_by_class(tmp_path: Path) -> None:
    write_set(tmp_path / "site", ROWS)
    source = Folder(root=str(tmp_path), image_size=8, train_fraction=0.7)
    domain = source.load("site")
    assert source.class_names == CLASSES
    assert levels_of(domain.train.images) == [10, 20, 30, 40]
    assert domain.train.labels.tolist() == [0, 1, 0, 1]
    assert levels_of(domain.test.images) == [50, 60]


def test_a_saved_set_with_splits_keeps_them(tmp_path: Path) -> None:
    write_set(tmp_path / "site" / "train", ROWS)
    write_set(tmp_path / "site" / "validation", [(70, 1), (10, 0)])
    (tmp_path / "site" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "validation"]}))
    domain = Folder(root=str(tmp_path), image_size=8).load("site")
    assert levels_of(domain.train.images) == [10, 20, 30, 40, 50, 60]
    assert levels_of(domain.test.images) == [70, 10]
    without = Folder(root=str(tmp_path), image_size=8, duplicates="drop").load("site")
    assert levels_of(without.test.images) == [70], "the other test image is a training image"


def test_labels_follow_the_names_of_the_run_s_classes(tmp_path: Path) -> None:
    write_set(tmp_path / "saved", ROWS)
    write_classes(tmp_path / "folders", {"bird": 2, "dog": 2})
    source = Folder(root=str(tmp_path), image_size=8)
    assert source.class_names == ("bird", "cat", "dog")
    assert source.load("saved").train.labels.unique().tolist() == [1, 2]


def test_labels_may_be_texts(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    write_set(
        tmp_path / "site", ROWS, features={"image": {"_type": "Image"}, "label": {"dtype": "string", "_type": "Value"}}
    )
    for path in sorted((tmp_path / "site").glob("*.arrow")):
        table = pa.ipc.open_stream(path.read_bytes()).read_all()
        texts = pa.array([CLASSES[label] for label in table["label"].to_pylist()])
        table = table.set_column(1, "label", texts)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    assert Folder(root=str(tmp_path), image_size=8).class_names == CLASSES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"content": None}, "only the path of one"),
        ({"content": b"no image"}, "row 1 cannot be decoded"),
        ({"indices": [{"filename": "indices.arrow"}]}, "flatten_indices"),
        ({"features": {"text": {"dtype": "string", "_type": "Value"}}}, "0 columns of images"),
        ({"features": {"image": {"_type": "Image"}, "label": {"names": ["cat"], "_type": "ClassLabel"}}}, "label 1"),
    ],
    ids=["paths without images", "no image", "an index", "no image column", "a label without a name"],
)
def test_a_saved_set_that_cannot_be_used_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_set(tmp_path / "site", ROWS, **changes)
    with pytest.raises(DataError, match=message):
        Folder(root=str(tmp_path), image_size=8).load("site")


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json", "data-00001-of-00002.arrow"])
def test_a_damaged_file_of_a_saved_set_is_named(name: str, tmp_path: Path) -> None:
    write_set(tmp_path / "site", ROWS)
    path = tmp_path / "site" / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=f"{name} cannot be read"):
        Folder(root=str(tmp_path), image_size=8).load("site")


def test_each_class_keeps_a_training_row() -> None:
    assert leading_rows([0, 0, 0, 1, 0], 0.5) == ([0, 1, 3], [2, 4])


# ---- Parquet ---------------------------------------------------------------------------------------------------------


def write_parquet(folder: Path, columns: dict[str, list[Any]]) -> None:
    pa = pytest.importorskip("pyarrow", reason="the extra arrow is not installed")
    import pyarrow.parquet as parquet

    folder.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), folder / "images.parquet")


def test_a_parquet_list_says_what_a_csv_list_says(tmp_path: Path) -> None:
    columns = {"path": ["a.png", "b.png", "c.png"], "label": ["dog", "cat", "dog"], "split": ["train", "test", None]}
    write_parquet(tmp_path, {**columns, "width": [1, 2, 3]})
    (tmp_path / "images.csv").write_text("path,label,split\na.png,dog,train\nb.png,cat,test\nc.png,dog,\n")
    found = [(item.path, item.label, item.part) for item in read_list(tmp_path, "images.parquet")]
    assert found == [(item.path, item.label, item.part) for item in read_list(tmp_path, "images.csv")]


def test_a_parquet_list_with_numbers_as_labels_trains(tmp_path: Path) -> None:
    for number in range(4):
        write_image(tmp_path / "site" / f"{number}.png", 40 * number)
    paths = [f"{number}.png" for number in range(4)]
    write_parquet(tmp_path / "site", {"path": paths, "label": [0, 1, 0, 1]})
    source = Folder(root=str(tmp_path), image_size=8, train_fraction=0.5, listing="images.parquet")
    assert source.class_names == ("0", "1")
    assert len(source.load("site").train) == 2


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"path": ["a.png"], "class": ["cat"]}, "no column label; its columns are path, class"),
        ({"path": ["a.png", None], "label": ["cat", "dog"]}, "row 2: path ''"),
        ({"path": ["a.png"], "label": ["cat"], "split": ["holdout"]}, "split 'holdout'"),
    ],
    ids=["a column is missing", "a path is missing", "another split"],
)
def test_a_parquet_list_that_cannot_be_used_is_refused(
    columns: dict[str, list[Any]], message: str, tmp_path: Path
) -> None:
    write_parquet(tmp_path, columns)
    with pytest.raises(DataError, match=message):
        read_list(tmp_path, "images.parquet")


def test_a_damaged_parquet_list_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "images.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"images\.parquet cannot be read"):
        read_list(tmp_path, "images.parquet")


def test_parquet_without_its_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "images.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[arrow\]"):
        read_list(tmp_path, "images.parquet")


# ---- HEIF ------------------------------------------------------------------------------------------------------------


def test_photos_of_phones_are_read_where_the_library_is_installed(tmp_path: Path) -> None:
    heif = pytest.importorskip("pillow_heif", reason="the extra heif is not installed")
    heif.register_heif_opener()
    for number in range(2):
        path = tmp_path / "site" / "cat" / f"{number}.HEIC"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (200, 200, 200)).save(path, format="HEIF")
    images = Folder(root=str(tmp_path), image_size=8).load("site").train.images
    assert (images.float() - 200).abs().max() <= 4


def test_photos_of_phones_are_counted_where_it_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "reads_heif", lambda: False)
    (tmp_path / "site" / "cat").mkdir(parents=True)
    (tmp_path / "site" / "cat" / "0.heic").write_bytes(b"")
    with pytest.raises(DataError, match=r"1 \.heic \(.*pip install .*\[heif\]'? reads them"):
        assert Folder(root=str(tmp_path)).class_names
