"""Lists of a domain's images: a CSV or Parquet file, or a folder that Hugging Face's ``datasets`` wrote."""

import csv
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from common.data.cache import cached, file_state, warn_once
from common.data.image_files import Reading, decode_each, kept_images
from common.data.names import NO, SPLIT_COLUMNS, SPLIT_FLAGS, YES, name_key, split_of
from common.errors import DataError, some_of
from common.extras import libraries_of
from common.regular_files import check_regular, read_small

PARQUET = (".parquet", ".pq")
"""Suffixes of Parquet files; a list with another suffix is read as CSV."""

SET = "dataset_info.json"
SETS = "dataset_dict.json"
STATE = "state.json"
"""Files by which a folder of ``Dataset.save_to_disk`` and of ``DatasetDict.save_to_disk`` is recognised."""

MAX_ARROW_FILE = 2**40
"""Largest Arrow or Parquet file that is opened, bytes."""

_VERSION = 2  # raise when decoding changes


class Listed:
    """One image of a list.

    Args:
        path: the image file.
        label: the name of its class.
        part: ``train``, ``test``, or empty if the list has no splits.
    """

    def __init__(self, path: Path, label: str, part: str) -> None:
        self.path, self.label, self.part = path, label, part


def read_list(directory: Path, name: str) -> list[Listed]:
    """Return the images of a domain's list, in its order.

    Args:
        directory: the domain's directory; paths in the list are relative to it.
        name: the list's file name. ``.parquet`` and ``.pq`` are Parquet, which needs pyarrow; all others are CSV.

    Raises:
        DataError: the list does not exist or cannot be read, lacks a column, or has a line without a path, without a
            label or with another split.
        ConfigError: the list is Parquet and pyarrow is not installed.
    """
    place = directory / name
    if not place.is_file():
        raise DataError(
            f"folder: {place} does not exist; write it, with the columns path, label and, optionally, split"
        )
    if place.suffix.lower() in PARQUET:
        columns, lines = _parquet_lines(place)
    else:
        columns, lines = _csv_lines(place)
    column = _split_column(place, columns)
    unread = sorted(set(columns) - {"path", "label", column})
    if unread:
        warn_once(f"folder: {place}: columns that are not read: {some_of(unread, 5)}")
    found: list[Listed] = []
    for where, line in lines:
        path, label = _text(line["path"]), _text(line["label"])
        word = _text(line.get(column))
        part = _part(column, word)
        if not path or not label or part is None:
            raise DataError(
                f"folder: {place}, {where}: path {path!r}, label {label!r}, {column or 'split'} {word!r}; give "
                "a path and a label, and train, test, validation or nothing as the split. If the column "
                f"{column or 'split'} is none of splits, rename it"
            )
        found.append(Listed(directory / path, label, part))
    return _with_test(place, found)


def _split_column(place: Path, columns: Sequence[str]) -> str:
    """Return the column of the splits; empty if there is none.

    Raises:
        DataError: several columns may be it.
    """
    named: list[str] = []
    for column in columns:
        if column not in ("path", "label") and (name_key(column) in SPLIT_COLUMNS or name_key(column) in SPLIT_FLAGS):
            named.append(column)
    if len(named) > 1:
        raise DataError(f"folder: {place}: the columns {' and '.join(named)} may both be the split; keep one of them")
    return "".join(named)


def _part(column: str, word: str) -> str | None:
    """Return the split of a cell: ``train``, ``test``, ``validation`` or empty; ``None`` for an unknown word."""
    if not word.strip():
        return ""
    flag = SPLIT_FLAGS.get(name_key(column))
    answer = name_key(word)
    if flag is None or split_of(word):
        return split_of(word) or None
    if answer not in YES | NO:
        return None
    if answer in YES:
        return flag
    if flag == "train":
        return "test"
    return "train"


def _with_test(place: Path, listed: Sequence[Listed]) -> list[Listed]:
    """Return the images with validation images as test images, or without them if the list has both; log which."""
    counts = Counter(item.part for item in listed)
    if not counts["validation"]:
        return list(listed)
    if counts["test"]:
        warn_once(f"folder: {place}: {counts['validation']} validation images are not read, since it has test images")
        return [item for item in listed if item.part != "validation"]
    warn_once(f"folder: {place}: there are no test images, so the {counts['validation']} validation images are scored")
    for item in listed:
        if item.part == "validation":
            item.part = "test"
    return list(listed)


def _text(value: Any) -> str:
    """Return a cell as text; an empty cell is an empty text."""
    if value is None:
        return ""
    return str(value)


def _check_columns(place: Path, columns: Sequence[str]) -> None:
    missing = [column for column in ("path", "label") if column not in columns]
    if missing:
        raise DataError(f"folder: {place}: no column {', '.join(missing)}; its columns are {', '.join(columns)}")


Lines = Iterator[tuple[str, Mapping[str, Any]]]
"""The place of each line, for messages, and its cells by column."""


def _csv_lines(place: Path) -> tuple[list[str], Lines]:
    """Return the columns of a CSV file and its lines."""
    try:
        with place.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream)
            columns = list(reader.fieldnames or [])
            _check_columns(place, columns)
            lines: list[tuple[str, Mapping[str, Any]]] = []
            for line in reader:
                lines.append((f"line {reader.line_num}", line))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"folder: {place} cannot be read ({error}); save it as CSV in UTF-8") from error
    return columns, iter(lines)


def _parquet_lines(place: Path) -> tuple[list[str], Lines]:
    """Return the columns of a Parquet file and its lines."""
    with libraries_of("arrow", f"data.listing={place.name}"):
        import pyarrow
        import pyarrow.parquet as parquet

    def rows() -> Lines:
        try:
            with parquet.ParquetFile(place) as file:
                number = 0
                for batch in file.iter_batches(columns=wanted):
                    for row in batch.to_pylist():
                        number += 1
                        yield f"row {number}", row
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise unreadable(error) from error

    def unreadable(error: Exception) -> DataError:
        return DataError(f"folder: {place} cannot be read ({error}); save it as Parquet or as CSV again")

    try:
        check_regular(place, MAX_ARROW_FILE)
        with parquet.ParquetFile(place) as file:
            columns = list(file.schema_arrow.names)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise unreadable(error) from error
    _check_columns(place, columns)
    split = _split_column(place, columns)
    wanted = [column for column in ("path", "label", split) if column in columns]
    return columns, rows()


# ---- folders of Hugging Face's datasets ------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedSet:
    """A folder that ``Dataset.save_to_disk`` wrote.

    Args:
        folder: the folder.
        files: its Arrow files, in order.
        image: the column of the images.
        label: the column of the labels.
        names: names of the classes by label; empty if labels are texts, which are the names themselves.
    """

    folder: Path
    files: tuple[Path, ...]
    image: str
    label: str
    names: tuple[str, ...]

    def rows(self) -> Iterator[tuple[bytes, str]]:
        """Yield the encoded image and the class name of each row.

        Raises:
            DataError: a file is damaged, or a row has no image or no label.
        """
        for columns in self._batches([self.image, self.label]):
            for image, label in zip(columns[self.image], columns[self.label], strict=True):
                content = image.get("bytes") if isinstance(image, Mapping) else None
                if not content:
                    raise DataError(
                        f"folder: {self.folder}: a row of {self.image!r} holds no image, only the path of one; "
                        "save the set again with the images' bytes in it"
                    )
                yield content, self._name(label)

    def labels(self) -> list[str]:
        """Return the class name of each row."""
        found: list[str] = []
        for columns in self._batches([self.label]):
            for label in columns[self.label]:
                found.append(self._name(label))
        return found

    def digests(self) -> list[str]:
        """Return the SHA-256 of each row's encoded image."""
        return [hashlib.sha256(content).hexdigest() for content, _ in self.rows()]

    def _name(self, label: Any) -> str:
        if isinstance(label, str) and not self.names and label:
            return label
        if isinstance(label, int) and 0 <= label < len(self.names):
            return self.names[label]
        raise DataError(f"folder: {self.folder}: a row has the label {label!r}, which is none of its classes")

    def _batches(self, columns: Sequence[str]) -> Iterator[Mapping[str, list[Any]]]:
        with libraries_of("arrow", f"{self.folder}, a folder of Hugging Face's datasets,"):
            import pyarrow
        for path in self.files:
            try:
                check_regular(path, MAX_ARROW_FILE)
                with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as reader:
                    for batch in reader:
                        yield {column: batch.column(column).to_pylist() for column in columns}
            except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
                raise DataError(f"folder: {path} cannot be read ({error}); save the set again") from error


def is_saved(directory: Path) -> bool:
    """Return whether a domain's directory was written by ``save_to_disk`` of Hugging Face's ``datasets``."""
    return (directory / SETS).is_file() or ((directory / SET).is_file() and (directory / STATE).is_file())


def saved_sets(directory: Path) -> tuple[SavedSet, SavedSet | None]:
    """Return the sets of train and of test images; the second is ``None`` if the folder holds one set without splits.

    Raises:
        DataError: a file is missing or damaged, there is no train or no test split, or no image or label column.
    """
    if not (directory / SETS).is_file():
        return _saved_set(directory), None
    names = [str(name) for name in _json(directory / SETS).get("splits", [])]
    parts: dict[str, str] = {}
    for name in names:
        part = split_of(name)
        if part in parts:
            raise DataError(f"folder: {directory} has the splits {parts[part]} and {name}, both of {part} images")
        if part:
            parts[part] = name
    train, test = parts.get("train"), parts.get("test", parts.get("validation"))
    if train is None or test is None:
        raise DataError(
            f"folder: {directory} has the splits {', '.join(names)}; it needs train, and test or validation"
        )
    if split_of(test) == "validation":
        warn_once(f"folder: {directory}: there are no test images, so those of the split {test} are scored")
    unread = [name for name in names if name not in (train, test)]
    if unread:
        warn_once(f"folder: {directory}: splits that are not read: {some_of(unread, 5)}")
    return _saved_set(directory / train), _saved_set(directory / test)


def _saved_set(folder: Path) -> SavedSet:
    features = _json(folder / SET).get("features", {})
    state = _json(folder / STATE)
    if state.get("_indices_data_files"):
        raise DataError(f"folder: {folder} keeps its rows by an index; call flatten_indices() and save it again")
    files = [folder / Path(str(entry["filename"])).name for entry in state.get("_data_files", [])]
    images: list[str] = []
    labels: dict[str, tuple[str, ...]] = {}
    for column, feature in features.items():
        kind = feature.get("_type") if isinstance(feature, Mapping) else None
        if kind == "Image":
            images.append(column)
        elif kind == "ClassLabel":
            labels[column] = tuple(map(str, feature.get("names", [])))
        elif kind == "Value" and feature.get("dtype") == "string" and column == "label":
            labels[column] = ()
    if len(images) != 1 or len(labels) != 1 or not files:
        raise DataError(
            f"folder: {folder} has {len(images)} columns of images, {len(labels)} of labels (ClassLabel, or text named "
            f"label) and {len(files)} Arrow files; it needs one of each of the columns, and a file"
        )
    ((label, names),) = labels.items()
    return SavedSet(folder, tuple(files), images[0], label, names)


def leading_rows(labels: Sequence[int], fraction: float) -> tuple[list[int], list[int]]:
    """Return the rows of train and of test: of each class the leading ``fraction`` is train, but at least one row.

    Args:
        labels: the label of each row.
        fraction: in (0, 1); the number of rows of a class is rounded down.
    """
    counts = Counter(labels)
    seen: Counter[int] = Counter()
    train: list[int] = []
    test: list[int] = []
    for row, label in enumerate(labels):
        seen[label] += 1
        if seen[label] <= max(1, int(fraction * counts[label] + 1e-9)):
            train.append(row)
        else:
            test.append(row)
    return train, test


def _json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(read_small(path))
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"folder: {path} cannot be read ({error}); save the set again") from error
    return content


def decode_saved(saved: SavedSet, image_size: int, reading: Reading) -> tuple[Tensor, list[int]]:
    """Return the images of a saved set and their rows, as :func:`~.image_files.decode` does of files; cached on disk.

    Args:
        saved: the set.
        image_size: height and width of the returned images, pixels.
        reading: how they become arrays.

    Raises:
        DataError: rows are no images; the message names them.
    """
    key: list[str | int] = [_VERSION, "saved", image_size, repr(reading), str(saved.folder)]
    for path in saved.files:
        try:
            key += [path.name, *file_state(path)]
        except OSError as error:
            raise DataError(f"folder: {path} cannot be read ({error.strerror}); save the set again") from error
    names = [f"{saved.folder}, row {number}" for number in range(1, len(saved.labels()) + 1)]

    def build() -> dict[str, Tensor]:
        return decode_each([content for content, _ in saved.rows()], names, image_size, reading)

    return kept_images(cached("saved-images", key, build), names)
