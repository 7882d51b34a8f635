"""Opening tables of images with Hugging Face's ``datasets``: CSV, Parquet, saved sets and sets on the Hub, bounded.

Files are not trusted. Rows and bytes are limited before decoding, and errors of the libraries become a
:class:`~common.errors.DataError`.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import os
import re
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from common.data.cache import file_state
from common.data.image_files import check_within
from common.data.names import SPLIT_COLUMNS, SPLIT_FLAGS, name_key, split_of
from common.errors import DataError, GoldfinchError, nearest, some_of
from common.extras import libraries_of
from common.regular_files import check_regular, read_small
from common.text import printable, warn_once

if TYPE_CHECKING:
    import pyarrow

SEPARATED = (".csv", ".tsv", ".txt")
"""Suffixes of files with a line for each image, whose columns are separated by commas, semicolons or tabs."""

PARQUET = (".parquet", ".pq")

SET, SETS, STATE = "dataset_info.json", "dataset_dict.json", "state.json"
"""Files by which a folder of ``Dataset.save_to_disk`` and of ``DatasetDict.save_to_disk`` is recognised."""

METADATA = ("metadata.csv", "metadata.parquet")
"""Tables of the images of an ImageFolder, beside them."""

MAX_ROWS = 2**22
"""Rows of a table: four million images of 32 x 32 pixels are 13 GB when they are decoded."""

MAX_COLUMNS = 1000

MAX_TEXT_FILE = 2**30
"""Bytes of a CSV file."""

MAX_FILE = 2**40
"""Bytes of a Parquet or Arrow file."""

MAX_CELL = 4096
"""Characters of a path, a label, a domain or a split."""

BLOCK = 2**26
"""Bytes of a Parquet file that are decoded at a time, by its metadata."""

MAX_GROWTH, FREE_GROWTH = 64, 2**28
"""A column may be decoded to so many times the bytes of its files, and to so many more."""

BATCH, IMAGES = 1024, 64
"""Rows of text, and of images, that are read at a time."""

IMAGE_COLUMNS = frozenset({
    "path", "file", "file_name", "filename", "file_path", "filepath", "image", "image_path", "image_file", "img",
})  # fmt: skip
LABEL_COLUMNS = frozenset({"label", "labels", "class", "class_name", "category", "target", "y"})
DOMAIN_COLUMNS = frozenset({"domain", "domains", "site", "hospital", "centre", "center"})
"""Names of columns by :func:`~.names.name_key`, where the kind of a column does not show what it holds."""

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/(?!.*\.(csv|tsv|txt|parquet|pq)$)[A-Za-z0-9][\w.-]*")
"""A name of the Hub; a missing file of a known suffix is none."""


@dataclass(frozen=True)
class Columns:
    """Names of columns; empty: not chosen, or none."""

    image: str = ""
    label: str = ""
    domain: str = ""
    split: str = ""

    def chosen(self) -> list[str]:
        """Return the names that are not empty."""
        return [name for name in (self.image, self.label, self.domain, self.split) if name]


@dataclass(frozen=True)
class TablePart:
    """The files of one split of a table, or of the whole table.

    Args:
        split: the split's name; empty if the table has none.
        files: the files, in order.
        kind: ``separated``, ``parquet``, ``saved`` or ``hub``.
        saved: the set of a saved folder or of the Hub, which is open.
    """

    split: str
    files: tuple[Path, ...]
    kind: str
    saved: Any = None


@dataclass(frozen=True)
class Row:
    """One image of a table.

    Args:
        place: its file, as the table writes it; empty if the image is in the table.
        number: its position in the table, from 0.
        base: folder that the path is relative to.
        label: the name of its class.
        domain: its domain; empty if the table has no such column.
        split: the cell of its split, or the name of its part.
        where: its name in messages.
    """

    place: str
    number: int
    base: Path
    label: str
    domain: str
    split: str
    where: str


@dataclass(frozen=True)
class OpenTable:
    """A table that was opened.

    Args:
        name: its name in messages.
        parts: its files by split.
        columns: the columns that are read.
        encoded: whether the images are in the table.
        rows: all rows.
        names: names of the classes, if the table declares them.
        key: what changes if its files do.
    """

    name: str
    parts: tuple[TablePart, ...]
    columns: Columns
    encoded: bool
    rows: tuple[Row, ...]
    names: tuple[str, ...]
    key: tuple[str | int, ...]


class Encoded(Sequence[bytes]):
    """Encoded images of rows of a table, in a temporary file: those of a domain may be larger than the memory.

    Args:
        numbers: the rows, in the order of the sequence.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed with this object
        self._places: dict[int, tuple[int, int]] = {}
        self._size = 0
        self.digests: dict[int, bytes] = {}

    def add(self, number: int, content: bytes) -> None:
        """Write the image of a row."""
        self._file.write(content)
        self._file.flush()
        self._places[number] = self._size, len(content)
        self._size += len(content)
        self.digests[number] = hashlib.sha256(content).digest()

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        start, length = self._places[self.numbers[index]]
        return os.pread(self._file.fileno(), length, start)


# ---- what a table is -------------------------------------------------------------------------------------------------


def is_table(place: Path) -> bool:
    """Return whether a path is a table: a file of a known suffix, a saved set, or a folder with tables."""
    try:
        if place.is_file():
            return place.suffix.lower() in (*SEPARATED, *PARQUET)
        return place.is_dir() and (is_saved(place) or bool(_files_in(place)))
    except OSError:  # a name that is too long for the disk, or a folder that cannot be read
        return False


def is_saved(folder: Path) -> bool:
    """Return whether a folder was written by ``save_to_disk`` of ``datasets``."""
    return (folder / SETS).is_file() or ((folder / SET).is_file() and (folder / STATE).is_file())


def _files_in(folder: Path) -> list[tuple[str, Path]]:
    """Return the tables in a folder, each with the name of its split: metadata of an ImageFolder, or Parquet files.

    The split is the name of the folder with the metadata, or what a Parquet file's name begins with.
    """
    for name in METADATA:
        if (folder / name).is_file():
            return [("", folder / name)]
        found = [(path.parent.name, path) for path in sorted(folder.glob(f"*/{name}")) if split_of(path.parent.name)]
        if found:
            return found
    for places in (folder, folder / "data"):
        files = sorted(path for path in places.glob("*") if path.suffix.lower() in PARQUET and path.is_file())
        if files:
            return [(_split_in_name(path), path) for path in files]
    return []


def _split_in_name(path: Path) -> str:
    word = re.split(r"[-_.]", path.stem)[0]
    if split_of(word):
        return word
    return ""


def open_table(place: Path | str, requested: Columns, site: Path | None, *, shared: bool) -> OpenTable:
    """Return the table at ``place``, with its rows but without its images.

    Args:
        place: a file or a folder; a text is the name of a set on the Hub.
        requested: the columns that the user named.
        site: folder that the table's files must lie in; ``None`` for a set on the Hub.
        shared: whether the table may hold several domains, so that a column of domains is looked for.

    Raises:
        DataError: it does not exist, cannot be read, is too large, or its columns are missing or ambiguous.
        ConfigError: ``datasets`` is not installed.
    """
    if isinstance(place, str):
        return _opened(place, requested, (), shared)
    files = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
    tables = [path for path in files if path.suffix.lower() in (*SEPARATED, *PARQUET, ".arrow", ".json")]
    check_within(tables, site or place.parent)
    key: list[str | int] = []
    with _as_data_errors(place):
        for path in tables:
            key += [str(path), *file_state(path)]
    return _opened(place, requested, tuple(key), shared)


@contextlib.contextmanager
def _as_data_errors(place: Path | str) -> Iterator[None]:
    """Turn the errors that a library raises about a file into a :class:`DataError`, within the context."""
    try:
        yield
    except GoldfinchError:
        raise
    except Exception as error:
        text = printable(" ".join(str(error).split()))[:200]
        raise DataError(f"table: {place} cannot be read ({type(error).__name__}: {text}); save it again") from error


@lru_cache(maxsize=8)
def _opened(place: Path | str, requested: Columns, key: tuple[str | int, ...], shared: bool) -> OpenTable:
    with libraries_of("table", "data=table"):
        import datasets  # noqa: F401
    parts = _parts(place)
    with _as_data_errors(place):
        features = _features(parts[0])
        columns = _choose_columns(str(place), features, requested, shared=shared, split=len(parts) == 1)
        names = _class_names(features[columns.label])
        encoded = _holds_images(features[columns.image])
        rows = tuple(_rows(place, parts, columns, encoded))
    return OpenTable(str(place), parts, columns, encoded, rows, names, key)


def _parts(place: Path | str) -> tuple[TablePart, ...]:
    """Return the parts of a table, whose files are within their bounds."""
    if isinstance(place, str):
        return _of_sets(_from_hub(place), "hub", ())
    if place.is_dir() and is_saved(place):
        import datasets

        with _as_data_errors(place):
            files = _check_saved(place)
            return _of_sets(datasets.load_from_disk(str(place), keep_in_memory=False), "saved", files)
    found = [("", place)] if place.is_file() else _files_in(place)
    by_split: dict[str, list[Path]] = {}
    for word, path in found:
        by_split.setdefault(word, []).append(path)
    if len(by_split) > 1 and "" in by_split:
        raise DataError(
            f"table: {place}: {by_split[''][0].name} names no split, and others do; begin its name with train or test"
        )
    parts: list[TablePart] = []
    for word, files_of in by_split.items():
        kind = "separated"
        if files_of[0].suffix.lower() in PARQUET:
            kind = "parquet"
        parts.append(TablePart(word, tuple(files_of), kind))
    return tuple(parts)


def _of_sets(found: Any, kind: str, files: tuple[Path, ...]) -> tuple[TablePart, ...]:
    if not isinstance(found, Mapping):
        return (TablePart("", files, kind, found),)
    return tuple(TablePart(str(word), files, kind, each) for word, each in found.items())


def _from_hub(name: str) -> Any:
    """Return a set of the Hub. ``datasets`` runs no code of it since version 4."""
    import datasets

    try:
        return datasets.load_dataset(name)
    except Exception as error:
        text = printable(" ".join(str(error).split()))[:200]
        raise DataError(
            f"table: {name} is no file or folder here, and as a set of the Hugging Face Hub it cannot be fetched "
            f"({type(error).__name__}: {text}). If this machine has no network, fetch it on one that has, "
            f"python -c \"import datasets; datasets.load_dataset('{name}').save_to_disk('saved')\", and set "
            "data.path to a copy of the folder"
        ) from error


# ---- bounds ----------------------------------------------------------------------------------------------------------


def _check_saved(folder: Path) -> tuple[Path, ...]:
    """Check the files of a saved set, and return its Arrow files.

    Raises:
        DataError: a file is missing or damaged, has a name that leads elsewhere, or is not as ``save_to_disk`` writes.
    """
    folders = [folder]
    if (folder / SETS).is_file():
        splits = _json(folder / SETS).get("splits")
        if not isinstance(splits, list):
            raise DataError(f"table: {folder / SETS} names no splits; save the set again")
        folders = [folder / _file_beside(folder / SETS, name) for name in splits]
    found: list[Path] = []
    rows = 0
    for each in folders:
        state = _json(each / STATE)
        if not isinstance(_json(each / SET).get("features"), dict):
            raise DataError(f"table: {each / SET} describes no columns; save the set again")
        if state.get("_indices_data_files"):
            raise DataError(f"table: {each} keeps its rows by an index; call flatten_indices() and save it again")
        entries = state.get("_data_files")
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise DataError(f"table: {each / STATE} names no Arrow files; save the set again")
        for entry in entries:
            path = each / _file_beside(each / STATE, entry.get("filename"))
            check_within([path], folder)
            with _as_data_errors(path):
                rows += _check_arrow(path)
            found.append(path)
    _check_rows(folder, rows)
    return tuple(found)


def _json(path: Path) -> Mapping[str, Any]:
    with _as_data_errors(path):
        content = json.loads(read_small(path))
    if not isinstance(content, dict):
        raise DataError(f"table: {path} cannot be read (it is no JSON object); save the set again")
    return content


def _file_beside(place: Path, name: object) -> str:
    """Return the name of a file or folder beside ``place``."""
    if not isinstance(name, str) or not name or len(name) > 255 or Path(name).name != name or not name.isprintable():
        raise DataError(f"table: {place} names {printable(repr(name))[:100]}, which is no file beside it")
    return name


def _check_rows(place: object, rows: int) -> None:
    if rows > MAX_ROWS:
        raise DataError(f"table: {place} has {rows:,} rows; at most {MAX_ROWS:,} are read. Divide it by domain")


def _check_arrow(path: Path) -> int:
    """Return the rows of an Arrow file. Nothing of it is decompressed, so no batch is larger than the file.

    Raises:
        DataError: a batch is compressed, which ``save_to_disk`` never does, or its offsets lead out of it.
    """
    import pyarrow

    check_regular(path, MAX_FILE)
    rows = 0
    with pyarrow.memory_map(str(path)) as source:
        for message in pyarrow.ipc.MessageReader.open_stream(source):
            if message.type == "record batch":
                length, compressed = _batch_header(message.metadata.to_pybytes())
                if compressed:
                    raise DataError(f"table: {path} is compressed; save the set again by save_to_disk")
                rows += max(length, 0)
                _check_rows(path, rows)
        source.seek(0)
        with pyarrow.ipc.open_stream(source) as reader:
            for batch in reader:
                batch.validate(full=True)
    return rows


def _batch_header(metadata: bytes) -> tuple[int, bool]:
    """Return a record batch's rows, and whether it is compressed, of its flatbuffer (Message.fbs of Arrow).

    pyarrow reads a batch whole and decompresses it before its length is known.
    """

    def field(table: int, number: int) -> int:
        vtable = table - struct.unpack_from("<i", metadata, table)[0]
        if 4 + 2 * number >= struct.unpack_from("<H", metadata, vtable)[0]:
            return 0
        offset: int = struct.unpack_from("<H", metadata, vtable + 4 + 2 * number)[0]
        return table + offset if offset else 0

    message = struct.unpack_from("<I", metadata)[0]
    header = field(message, 2)
    batch = header + struct.unpack_from("<I", metadata, header)[0]
    length = field(batch, 0)
    rows = struct.unpack_from("<q", metadata, length)[0] if length else 0
    return rows, bool(field(batch, 3))


def _check_parquet(path: Path) -> int:
    """Return how many rows of a Parquet file are decoded at a time, so that they take about :data:`BLOCK` bytes.

    Raises:
        DataError: it has too many rows or columns, or declares more bytes than it could hold.
    """
    import pyarrow.parquet

    check_regular(path, MAX_FILE)
    size = path.stat().st_size
    with pyarrow.parquet.ParquetFile(path) as file:
        metadata = file.metadata
        _check_rows(path, metadata.num_rows)
        if metadata.num_columns > MAX_COLUMNS:
            raise DataError(f"table: {path} has {metadata.num_columns} columns; at most {MAX_COLUMNS} are read")
        largest = 1
        rows = 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            rows += group.num_rows
            for column in range(group.num_columns):
                largest = max(largest, group.column(column).total_uncompressed_size)
    _check_rows(path, rows)
    _check_growth(path, largest, size)
    return max(1, min(BATCH, BLOCK // largest))


def _check_growth(place: object, decoded: int, size: int) -> None:
    if decoded > FREE_GROWTH + MAX_GROWTH * size:
        raise DataError(
            f"table: {place}: its {size:,} bytes decode to {decoded:,} or more; at most {MAX_GROWTH} times as many are "
            "read. Write each image once"
        )


# ---- columns ---------------------------------------------------------------------------------------------------------


def _features(part: TablePart) -> Mapping[str, Any]:
    """Return the columns of a part, each with its kind as ``datasets`` names it."""
    import datasets
    import pyarrow.parquet

    if part.saved is not None:
        found: Mapping[str, Any] = part.saved.features
        return found
    if part.kind == "separated":
        return {name: datasets.Value("string") for name in _header(part.files[0])[1]}
    for path in part.files:
        _check_parquet(path)
    several = [datasets.Features.from_arrow_schema(pyarrow.parquet.read_schema(path)) for path in part.files]
    for path, other in zip(part.files, several, strict=True):
        if other != several[0]:
            raise DataError(f"table: {path} has other columns or classes than {part.files[0]}; write them alike")
    return several[0]


def _header(path: Path) -> tuple[str, list[str]]:
    """Return the separator of a CSV file and its columns; a separator other than a comma is logged.

    Raises:
        DataError: the file is no text in UTF-8, or has no line.
    """
    check_regular(path, MAX_TEXT_FILE)
    with path.open("rb") as stream:
        start = stream.read(2**16)
    if any(byte < 9 for byte in start) or start.startswith((b"PAR1", b"PK\3\4")):
        raise DataError(f"table: {path} is no text; save it as CSV in UTF-8, or give Parquet the suffix .parquet")
    try:
        with path.open(encoding="utf-8-sig", newline="") as text:
            line = text.readline(2**16)
            separator = next((each for each in ",;\t" if each in line), ",")
            text.seek(0)
            columns = next(csv.reader(text, delimiter=separator), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"table: {path} cannot be read ({error}); save it as CSV in UTF-8") from error
    if not columns or len(columns) > MAX_COLUMNS:
        raise DataError(f"table: {path} has {len(columns)} columns; it needs the columns of the images and of labels")
    for letter, name in ((";", "semicolons"), ("\t", "tabs")):
        if separator == letter:
            warn_once(f"table: {path}: its columns are separated by {name}")
    return separator, columns


def _holds_images(feature: Any) -> bool:
    """Return whether a column holds encoded images: an Image, ``{bytes, path}`` as Parquet has it, or bytes."""
    import datasets

    if isinstance(feature, datasets.Image):
        return True
    if isinstance(feature, Mapping):
        return "bytes" in feature
    return getattr(feature, "dtype", "") in ("binary", "large_binary")


def _is_text(feature: Any) -> bool:
    """Return whether a column's cells are single texts or numbers."""
    import datasets

    return isinstance(feature, datasets.Value) and not _holds_images(feature)


def _choose_columns(
    place: str, features: Mapping[str, Any], requested: Columns, *, shared: bool, split: bool
) -> Columns:
    """Return the columns that are read, and log those that were guessed and those that are not read.

    Raises:
        DataError: a column is missing, or several may be meant.
    """
    import datasets

    for name in requested.chosen():
        if name not in features:
            raise DataError(f"table: {place}: no column {name!r}; {nearest(name, map(printable, features))}")
    left = [name for name in features if name not in requested.chosen()]
    domain = requested.domain
    if shared and not domain:
        domain = _only_column(place, "domain", [name for name in left if name_key(name) in DOMAIN_COLUMNS], features)
    words = requested.split
    if split and not words:
        named = [name for name in left if name_key(name) in SPLIT_COLUMNS or name_key(name) in SPLIT_FLAGS]
        words = _only_column(place, "split", [name for name in named if name != domain], features)
    left = [name for name in left if name not in (domain, words)]
    image = requested.image
    if not image:
        found = [name for name in left if _holds_images(features[name])]
        named = [name for name in left if name_key(name) in IMAGE_COLUMNS and _is_text(features[name])]
        image = _only_column(place, "image", found or named, features, needed=True)
    label = requested.label
    if not label:
        left = [name for name in left if name != image]
        found = [name for name in left if isinstance(features[name], datasets.ClassLabel)]
        named = [name for name in left if name_key(name) in LABEL_COLUMNS and _is_text(features[name])]
        label = _only_column(place, "label", found or named, features, needed=True)
    columns = Columns(image, label, domain, words)
    _check_kinds(place, columns, features)
    _log_columns(place, columns, requested, features)
    return columns


def _only_column(
    place: str, what: str, found: Sequence[str], features: Mapping[str, Any], *, needed: bool = False
) -> str:
    if len(found) > 1:
        names = " and ".join(map(printable, found))
        raise DataError(
            f"table: {place}: the columns {names} may both be the {what}; choose one: data.{what}={found[0]}"
        )
    if needed and not found:
        names = some_of([printable(name)[:100] for name in features])
        raise DataError(f"table: {place}: no column is known to be the {what}; choose one by data.{what}=, of {names}")
    return "".join(found)


def _check_kinds(place: str, columns: Columns, features: Mapping[str, Any]) -> None:
    import datasets

    if not (_holds_images(features[columns.image]) or _is_text(features[columns.image])):
        raise DataError(
            f"table: {place}: {columns.image!r} holds neither images nor paths; choose another by data.image="
        )
    for what in ("label", "domain", "split"):
        name = getattr(columns, what)
        if name and not (_is_text(features[name]) or isinstance(features[name], datasets.ClassLabel)):
            raise DataError(
                f"table: {place}: {name!r} holds no single text or number in each row, as data.{what} needs"
            )


def _log_columns(place: str, columns: Columns, requested: Columns, features: Mapping[str, Any]) -> None:
    guessed: list[str] = []
    for what in ("image", "label", "domain", "split"):
        name = getattr(columns, what)
        if name and not getattr(requested, what):
            guessed.append(f"data.{what}={name}")
    if guessed:
        warn_once(f"table: {place}: columns are taken as {' '.join(guessed)}")
    unread = sorted(printable(name) for name in set(features).difference(columns.chosen()))
    if unread:
        warn_once(f"table: {place}: columns that are not read: {some_of(unread, 5)}")


# ---- rows ------------------------------------------------------------------------------------------------------------


def _rows(place: Path | str, parts: Sequence[TablePart], columns: Columns, encoded: bool) -> Iterator[Row]:
    """Yield all rows of a table. Images that are in it are not read."""
    number = 0
    wanted = [name for name in (columns.label, columns.domain, columns.split) if name]
    if not encoded:
        wanted.append(columns.image)
    wanted = list(dict.fromkeys(wanted))
    for part in parts:
        base = Path(place)
        if part.files:
            base = part.files[0].parent
        features = _features(part)
        names = {name: _class_names(features[name]) for name in wanted}
        for batch, read in _batches(part, wanted):
            nothing = [""] * batch.num_rows
            cells: dict[str, list[str]] = {"": nothing}  # under the name of a column that the table lacks
            for name in wanted:
                cells[name] = _texts(batch[name], name, names[name])
            splits = cells[columns.split]
            if not columns.split and len(parts) > 1:
                splits = [part.split] * batch.num_rows
            paths = nothing
            if not encoded:
                paths = cells[columns.image]
            for index in range(batch.num_rows):
                label, domain = cells[columns.label][index], cells[columns.domain][index]
                where = f"{part.split} row {read + index + 1}".strip()
                yield Row(paths[index], number, base, label, domain, splits[index], where)
                number += 1


def _class_names(feature: Any) -> tuple[str, ...]:
    """Return the names of a column's classes; none if its cells are no labels."""
    return tuple(map(str, getattr(feature, "names", None) or ()))


def _batches(part: TablePart, columns: Sequence[str], rows: int = BATCH) -> Iterator[tuple[pyarrow.Table, int]]:
    """Yield some rows of a part at a time, and the number of rows before them.

    Raises:
        DataError: there are more rows, or more bytes, than are read.
    """
    import datasets

    read = decoded = 0
    size = sum(path.stat().st_size for path in part.files)
    streams: list[Any] = [part.saved]
    if part.kind == "separated":
        kinds = datasets.Features({name: datasets.Value("string") for name in columns})
        streams = [_separated(path, kinds) for path in part.files]
    elif part.kind == "parquet":
        rows = min([rows, *(_check_parquet(path) for path in part.files)])
        files = [str(path) for path in part.files]
        streams = [datasets.IterableDataset.from_parquet(files, columns=list(columns), batch_size=rows)]
    for stream in streams:
        for batch in stream.select_columns(list(columns)).with_format("arrow").iter(rows):
            yield batch, read
            read += batch.num_rows
            _check_rows(part.files[0] if part.files else part.split, read)
            if part.kind == "parquet":
                decoded += batch.nbytes
                _check_growth(part.files[0], decoded, size)


def _separated(path: Path, kinds: Any) -> Any:
    import datasets

    separator, columns = _header(path)
    for name in kinds:
        if columns.count(name) != 1:
            raise DataError(f"table: {path} has {columns.count(name)} columns {name!r}; it needs one")
    return datasets.IterableDataset.from_csv(
        str(path),
        features=kinds,
        usecols=list(kinds),
        sep=separator,
        index_col=False,
        keep_default_na=False,
        na_filter=False,
        encoding="utf-8-sig",
        chunksize=BATCH,
    )


def _texts(column: pyarrow.ChunkedArray, name: str, names: Sequence[str]) -> list[str]:
    """Return the cells of a column as texts; an empty cell is an empty text.

    Args:
        column: the column.
        name: its name.
        names: names of its classes, if its numbers are labels.

    Raises:
        DataError: a cell is too long or has a NUL, or the column is of a kind that is not read.
    """
    import pyarrow
    import pyarrow.compute

    kind = column.type
    text = pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)
    number = pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind) or pyarrow.types.is_boolean(kind)
    if not (text or number or pyarrow.types.is_null(kind)):
        raise DataError(f"table: the column {name!r} is of the kind {kind}; save it as text or as whole numbers")
    if text and (pyarrow.compute.max(pyarrow.compute.binary_length(column)).as_py() or 0) > MAX_CELL:
        raise DataError(f"table: a cell of {name!r} has more than {MAX_CELL} characters; shorten it")
    found: list[str] = []
    for value in column.to_pylist():
        cell = "" if value is None else str(value)
        if "\0" in cell:
            raise DataError(f"table: a cell of {name!r} has a NUL character; write it again")
        if names and cell:
            cell = _class_name(value, names, name)
        found.append(cell)
    return found


def _class_name(value: Any, names: Sequence[str], column: str) -> str:
    if not isinstance(value, int) or not 0 <= value < len(names):
        raise DataError(f"table: a row has {value!r} in {column!r}, which is none of its {len(names)} classes")
    return names[value]


def encoded_images(table: OpenTable, numbers: Sequence[int]) -> Encoded:
    """Return the encoded images of rows of a table that holds them.

    Args:
        table: the table.
        numbers: positions of the rows.

    Raises:
        DataError: a row holds no image, or there are more bytes than are read.
    """
    column = table.columns.image
    wanted = frozenset(numbers)
    found = Encoded(numbers)
    number = 0
    with _as_data_errors(table.name):
        for part in table.parts:
            for batch, _ in _batches(part, [column], IMAGES):
                for cell in batch[column].to_pylist():
                    if number in wanted:
                        found.add(number, _content(cell, f"{table.name}: {table.rows[number].where} of {column!r}"))
                    number += 1
    return found


def _content(cell: Any, where: str) -> bytes:
    if isinstance(cell, Mapping):
        cell = cell.get("bytes")
    if not isinstance(cell, bytes) or not cell:
        raise DataError(f"table: {where} holds no image, only the path of one or nothing; save the images themselves")
    return cell
