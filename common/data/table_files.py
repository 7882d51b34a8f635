"""Tables of images: which files they are, and how CSV, Parquet, saved sets and sets of the Hub are decoded.

Files are not trusted. What decodes them runs in a process of its own, see :mod:`common.data.table_process`. Rows and
bytes are limited before decoding, and errors of the libraries become a :class:`~common.errors.DataError`. This module
imports no torch, so that the process starts quickly.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import math
import re
import shlex
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from common.data.names import NO, SUFFIXES, YES, name_key, split_of
from common.errors import DataError, GoldfinchError, nearest, some_of
from common.extras import hugging_face_datasets, libraries_of
from common.overrides import written_override
from common.regular_files import check_regular, check_within, read_small
from common.text import counted, printable, shell_line, warn_once

if TYPE_CHECKING:
    import pyarrow

SEPARATED = (".csv", ".tsv", ".txt")
"""Suffixes of files with a line for each image, whose columns are separated by commas, semicolons or tabs."""

PARQUET = (".parquet", ".pq")

SET, SETS, STATE = "dataset_info.json", "dataset_dict.json", "state.json"
"""Files by which a folder of ``Dataset.save_to_disk`` and of ``DatasetDict.save_to_disk`` is recognised."""

METADATA = ("metadata.csv", "metadata.parquet")
"""Tables of the images of an ImageFolder, beside them."""

MAX_ROWS = 2**20
"""Rows of a table: a million images of 32 x 32 pixels are 3.2 GB when they are decoded."""

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

MAX_CELLS = 2**28
"""Characters of all paths, labels, domains and splits that are read of a table: 256 of each row of the longest."""

PIECE = 2**20
"""Bytes of a Parquet file that are fetched at a time."""

BATCH, IMAGES = 1024, 64
"""Rows of text, and of images, that are read at a time."""

SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars", " ": "spaces"}
"""What may separate the columns of a text file; of several that fit, the first."""

NONE = "none"
"""The value for no column of domains, or of splits."""

MAX_SAMPLED = 2**16
"""Characters of a text file, and cells of a column, by which they are recognised."""

MAX_VALUES, MAX_NUMBERS = 10_000, 10
"""Different values of a column that are counted; whole numbers that may be of folds."""

MIN_FILLED = 0.75
"""Share of the cells of a column with a value, from which on it may be of labels, domains or folds."""

MAX_SHOWN = 5
"""Names in one message."""

MAX_ABOVE = 5
"""Folders above a table that its paths may be relative to."""

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/(?!.*\.(csv|tsv|txt|parquet|pq)$)[A-Za-z0-9][\w.-]*")
"""A name of the Hub; a missing file of a known suffix is none."""


@dataclass(frozen=True)
class Columns:
    """Names of columns; empty: not chosen, or none."""

    image: str = ""
    label: str = ""
    domain: str = ""
    split: str = ""
    group: str = ""
    scored: str = ""
    """The cell of the split's column in the rows of test images, where the column has no words of splits."""

    def chosen(self) -> list[str]:
        """Return the names that are not empty."""
        return [name for name in (self.image, self.label, self.domain, self.split, self.group) if name]


@dataclass
class Cells:
    """What the cells of a column hold: how often each value, while there are few, and how many seem to be paths.

    An empty cell has no value. Where few cells are empty, they are missing; a column with many, such as one of remarks,
    is taken for one of labels, domains or splits only by its name or words of splits.
    """

    rows: int = 0
    filled: int = 0
    read: int = 0
    paths: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, cells: Sequence[str], base: Path) -> None:
        """Count cells of a table whose paths are relative to ``base``."""
        self.rows += len(cells)
        filled = [cell for cell in cells if cell.strip()]
        self.filled += len(filled)
        if len(self.counts) <= MAX_VALUES:
            self.counts.update(filled)
        if self.read < BATCH:
            self.read += len(cells)
            self.paths += sum(is_path(cell, base) for cell in cells)

    @property
    def holds_paths(self) -> bool:
        """Whether most cells seem to be paths of images."""
        return 2 * self.paths > self.read > 0

    @property
    def is_filled(self) -> bool:
        """Whether so many cells have a value that one without is missing."""
        return self.filled >= MIN_FILLED * self.rows

    @property
    def repeats(self) -> bool:
        """Whether there are several values, each of two rows or more on average."""
        return self.is_filled and 2 <= len(self.counts) <= max(2, self.filled // 2)

    @property
    def is_few(self) -> bool:
        """Whether there are few values for so many rows, as of domains."""
        return self.repeats and len(self.counts) <= max(2, math.isqrt(self.filled))

    @property
    def is_number(self) -> bool:
        """Whether all values are numbers, or yes and no, which may be counts, measurements or labels."""
        return all(re.fullmatch(r"[-+]?\d*\.?\d+", name_key(value)) or self.is_yes_or_no for value in self.counts)

    @property
    def is_yes_or_no(self) -> bool:
        """Whether the values are one word for yes and one for no."""
        return (
            len(self.counts) == 2
            and {name_key(each) in YES for each in self.counts} == {True, False}
            and all(name_key(each) in YES | NO for each in self.counts)
        )

    @property
    def is_split(self) -> bool:
        """Whether two values are words of different splits."""
        return len(self.counts) <= MAX_SHOWN and len({split_of(value) for value in self.counts} - {""}) > 1


def is_path(cell: str, base: Path) -> bool:
    """Return whether a cell seems to be the path of an image: by its suffix, or because the file is there.

    A path of several parts is also tried from the folders above.
    """
    place = PurePosixPath(cell.replace("\\", "/"))
    if place.suffix.lower() in SUFFIXES:
        return True
    if not 0 < len(cell) < 256:
        return False
    above = list(base.parents)[:MAX_ABOVE] if len(place.parts) > 1 else []
    try:
        return any((folder / place).is_file() for folder in (base, *above))
    except (OSError, ValueError):  # a name that is too long for the disk, or a NUL
        return False


@dataclass(frozen=True)
class TablePart:
    """The files of one split of a table, or of the whole table.

    Args:
        split: the split's name; empty if the table has none.
        files: the files, in order.
        kind: ``separated``, ``parquet`` or ``arrow``.
        described: the columns as a saved set's own record has them; ``None`` if there is none.
        form: how the text file is written; ``None`` of other kinds.
    """

    split: str
    files: tuple[Path, ...]
    kind: str
    described: Mapping[str, Any] | None = None
    form: Form | None = None


@dataclass(frozen=True)
class ColumnKind:
    """What the cells of a column are.

    Args:
        holds: ``images``, ``labels``, ``text`` (also numbers), or ``other``.
        names: of labels, the names of the classes.
    """

    holds: str
    names: tuple[str, ...] = ()


TEXT = ColumnKind("text")
"""The kind of every column of a text file."""


@dataclass(frozen=True, slots=True)
class Row:
    """One image of a table.

    Args:
        place: its file, as the table writes it; empty if the image is in the table.
        number: its position in the table, from 0.
        base: folder that the path is relative to.
        label: the name of its class.
        domain: its domain; empty if the table has no such column.
        group: its group, likewise.
        split: the cell of its split, or the name of its part.
        where: its name in messages.
    """

    place: str
    number: int
    base: Path
    label: str
    domain: str
    group: str
    split: str
    where: str


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


def _files_in(folder: Path, domain: str = "") -> list[tuple[str, Path]]:
    """Return the tables in a folder, each with the name of its split: metadata of an ImageFolder, or Parquet files."""
    for name in METADATA:
        if (folder / name).is_file():
            return [("", folder / name)]
        split_files = [
            (path.parent.name, path) for path in sorted(folder.glob(f"*/{name}")) if split_of(path.parent.name)
        ]
        if split_files:
            return split_files
    named = [(*_named(path), path) for path in _parquet_in(folder)]
    return [(split, path) for site, split, path in named if domain in ("", site)]


def _parquet_in(folder: Path) -> list[Path]:
    for places in (folder, folder / "data"):
        files = sorted(path for path in places.glob("*") if path.suffix.lower() in PARQUET and path.is_file())
        if files:
            return files
    return []


def _named(path: Path) -> tuple[str, str]:
    """Return the domain and the split in a Parquet file's name, without the number of a shard."""
    bare = re.sub(r"^part[-_]\d{4,}.*|[-_.]?\d+-of-\d+.*|[-_.]?(?<!\d)\d{4,}$", "", path.stem)
    words = re.split(r"[-_.]", bare)
    split = next((word for word in words if split_of(word)), "")
    domain = re.sub(rf"^{split}[-_.]?|[-_.]?\b{split}$|[-_.]{split}(?=[-_.]|$)", "", bare, count=1)
    return domain, split


def sites_in(folder: Path) -> tuple[str, ...]:
    """Return the domains by the names of the Parquet files in a folder; none if they are one table.

    Raises:
        DataError: the names differ in numbers alone, which may be of domains or of shards.
    """
    if not folder.is_dir() or is_saved(folder):
        return ()
    paths = {_named(path)[0]: path for _, path in _files_in(folder) if path.suffix.lower() in PARQUET}
    if len(paths) < 2:
        return ()
    place = next(iter(paths.values())).parent
    if len({re.sub(r"\d+", "", name) for name in paths}) == 1:
        enter, files = f"cd {shlex.quote(str(place))}", f"*{next(iter(paths.values())).suffix}"
        raise DataError(
            f"table: {place}: {some_of(sorted(paths), MAX_SHOWN)} may be domains or parts of one table; as domains: "
            f'({enter} && for f in {files}; do mkdir -p "${{f%.*}}" && mv "$f" "${{f%.*}}"; done) and '
            f"{written_override('data.root', place)} data.path=.; as one table: ({enter} && n=0 && for f in {files}; "
            'do n=$((n+1)); mv "$f" "$(printf part-%05d $n)-$f"; done)'
        )
    warn_once(f"table: {place}: each file is a domain: {some_of(sorted(paths), MAX_SHOWN)}")
    return tuple(sorted(paths))


@dataclass(frozen=True)
class DescribedTable:
    """What a table is, before its rows.

    Args:
        parts: its files by split.
        kinds: its columns.
        columns: those that are read.
    """

    parts: tuple[TablePart, ...]
    kinds: Mapping[str, ColumnKind]
    columns: Columns

    @property
    def encoded(self) -> bool:
        """Whether the images are in the table."""
        return self.kinds[self.columns.image].holds == "images"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the classes, if the table declares them."""
        return self.kinds[self.columns.label].names


def find_columns(
    place: Path | str, parts: tuple[TablePart, ...], requested: Columns, domains: tuple[str, ...] | None
) -> DescribedTable:
    """Return what the table at ``place`` is.

    Args:
        place: its file or folder, or the name of a set on the Hub.
        parts: its files, see :func:`parts_of`.
        requested: the columns that the user named.
        domains: names of the domains that are known; ``None``: no column of domains is wanted.

    Raises:
        DataError: it cannot be read, is too large, or its columns are missing or ambiguous.
        ConfigError: a library is not installed.
    """
    with as_data_errors(place):
        kinds = _kinds(parts[0])
        return DescribedTable(parts, kinds, _choose_columns(str(place), parts, kinds, requested, domains))


def rows_of(place: Path | str, table: DescribedTable) -> Iterator[Row]:
    """Yield all rows of a table. Images that are in it are not read.

    Raises:
        DataError: a row cannot be read, or there is more text than is read.
    """
    length = 0
    with as_data_errors(place):
        for row in _rows(place, table.parts, table.columns, encoded=table.encoded):
            length += len(row.place) + len(row.label) + len(row.domain) + len(row.group) + len(row.split)
            if length > MAX_CELLS:
                raise DataError(
                    f"table: {place}: the paths, labels, domains and splits of its rows have more than {MAX_CELLS:,} "
                    "characters. Divide it by domain, or write shorter paths"
                )
            yield row


@contextlib.contextmanager
def as_data_errors(place: Path | str) -> Iterator[None]:
    """Turn the errors that a library raises about a file into a :class:`DataError`, within the context."""
    try:
        yield
    except (GoldfinchError, MemoryError):
        raise
    except Exception as error:
        text = printable(" ".join(str(error).split()))[:200]
        raise DataError(f"table: {place} cannot be read ({type(error).__name__}: {text}); save it again") from error


def parts_of(place: Path | str, domain: str) -> tuple[TablePart, ...]:
    """Return the parts of a table.

    Args:
        place: a file or a folder; a text is the name of a set on the Hub, which is fetched.
        domain: of a folder with a file for each domain, only the files of this one are read; empty: all.

    Raises:
        DataError: a saved set's record cannot be read, its files are too large, or a set cannot be fetched.
    """
    if isinstance(place, str):
        return _from_hub(place)
    if place.is_dir() and is_saved(place):
        with as_data_errors(place):
            return _saved_parts(place)
    files = [("", place)] if place.is_file() else _files_in(place, domain)
    by_split: dict[str, list[Path]] = {}
    for word, path in files:
        by_split.setdefault(word, []).append(path)
    if len(by_split) > 1 and "" in by_split:
        raise DataError(
            f"table: {place}: {by_split[''][0].name} names no split, and others do; begin its name with train or test"
        )
    parts: list[TablePart] = []
    for word, files_of in by_split.items():
        kind, form = "separated", None
        if files_of[0].suffix.lower() in PARQUET:
            kind = "parquet"
        else:
            form = _form(files_of[0])
        parts.append(TablePart(word, tuple(files_of), kind, form=form))
    return tuple(parts)


def _from_hub(name: str) -> tuple[TablePart, ...]:
    """Return the parts of a set of the Hub, which ``datasets`` has fetched and written as Arrow files.

    ``datasets`` runs no code of a set since version 4.
    """
    datasets = hugging_face_datasets()
    try:
        loaded = datasets.load_dataset(name)
    except MemoryError:
        raise
    except Exception as error:
        text = printable(" ".join(str(error).split()))[:200]
        raise DataError(
            f"table: {name} is no file or folder here, and as a set of the Hugging Face Hub it cannot be fetched "
            f"({type(error).__name__}: {text}). If this machine has no network, fetch it on one that has, "
            f"python -c \"import datasets; datasets.load_dataset('{name}').save_to_disk('saved')\", and set "
            "data.path to a copy of the folder"
        ) from error
    if not isinstance(loaded, Mapping):
        loaded = {"": loaded}
    parts: list[TablePart] = []
    for word, each in loaded.items():
        files = tuple(Path(entry["filename"]) for entry in each.cache_files)
        parts.append(TablePart(str(word), files, "arrow"))
    return tuple(parts)


# ---- bounds ----------------------------------------------------------------------------------------------------------


def _saved_parts(folder: Path) -> tuple[TablePart, ...]:
    """Check the files of a saved set, and return its parts: its splits, or all of it."""
    folders = {"": folder}
    if (folder / SETS).is_file():
        splits = _json(folder / SETS).get("splits")
        if not isinstance(splits, list):
            raise DataError(f"table: {folder / SETS} names no splits; save the set again")
        folders = {str(name): folder / _file_beside(folder / SETS, name) for name in splits}
    parts: list[TablePart] = []
    rows = 0
    for word, each in folders.items():
        state, described = _json(each / STATE), _json(each / SET).get("features")
        if not isinstance(described, dict):
            raise DataError(f"table: {each / SET} describes no columns; save the set again")
        if state.get("_indices_data_files"):
            raise DataError(f"table: {each} keeps its rows by an index; call flatten_indices() and save it again")
        entries = state.get("_data_files")
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise DataError(f"table: {each / STATE} names no Arrow files; save the set again")
        files: list[Path] = []
        for entry in entries:
            path = each / _file_beside(each / STATE, entry.get("filename"))
            check_within([path], folder)
            with as_data_errors(path):
                rows += _check_arrow(path)
            files.append(path)
        parts.append(TablePart(word, tuple(files), "arrow", described))
    _check_rows(folder, rows)
    return tuple(parts)


def _json(path: Path) -> Mapping[str, Any]:
    with as_data_errors(path):
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
    """Return the rows of an Arrow file. Nothing of it is decompressed, so no batch is larger than the file."""
    pyarrow = _pyarrow()
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
    """Return a record batch's rows, and whether it is compressed, of its flatbuffer (Message.fbs of Arrow)."""

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
    """Return how many rows of a Parquet file are decoded at a time, so that they take about :data:`BLOCK` bytes."""
    check_regular(path, MAX_FILE)
    size = path.stat().st_size
    with _parquet_file(path) as file:
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


# ---- text files ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """How a text file is written: its separator, its columns, and the lines above its rows."""

    separator: str
    columns: tuple[str, ...]
    above: int


def _form(path: Path) -> Form:
    """Return how a text file is written, by what it holds, and log what is not a header and commas."""
    check_regular(path, MAX_TEXT_FILE)
    with path.open("rb") as stream:
        start = stream.read(MAX_SAMPLED)
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"table: {path} is in UTF-16; {_recoded(path, 'UTF-16')}")
    if any(byte < 9 for byte in start) or start.startswith((b"PAR1", b"PK\3\4")):
        raise DataError(f"table: {path} is no text; save it as CSV in UTF-8, or give Parquet the suffix .parquet")
    try:
        text = start.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if error.end < len(start) or len(start) < MAX_SAMPLED:
            raise DataError(f"table: {path} is not in UTF-8 ({error}); {_recoded(path, 'ISO-8859-1')}") from error
        text = start[: error.start].decode("utf-8-sig")
    lines = list(io.StringIO(text, newline=""))  # as a file is read: other signs do not end a line
    if len(start) == MAX_SAMPLED and len(lines) > 1:
        lines.pop()
    above = 0
    separators = list(SEPARATORS)
    if re.fullmatch(r"sep=.\s*", lines[0] if lines else "", re.IGNORECASE):
        above, separators = 1, [lines[0][4]]
    separator = max(separators, key=lambda each: _fit(lines[above:], each, path))
    while above < len(lines) - 1 and (not lines[above].strip() or _is_comment(lines[above:], separator, path)):
        above += 1
    reader = _cells(lines[above:], separator)
    columns: list[str] = next(filter(None, reader), [])
    if not columns or len(columns) > MAX_COLUMNS:
        raise DataError(f"table: {path} has {len(columns)} columns; it needs the columns of the images and of labels")
    if any(is_path(cell, path.parent) for cell in columns):
        columns = [str(number + 1) for number in range(len(columns))]
        warn_once(
            f"table: {path}: its first line has a path and is no header; its columns are called {', '.join(columns)}"
        )
    else:
        if above:
            warn_once(f"table: {path}: not read above its header: {counted(above, 'line')}")
        above += reader.line_num  # blank lines above the header, and each line of a cell that has several
    if separator != ",":
        warn_once(f"table: {path}: its columns are separated by {SEPARATORS.get(separator, repr(separator))}")
    return Form(separator, tuple(columns), above)


def _recoded(path: Path, encoding: str) -> str:
    target = path.with_name(f"{path.stem}-utf8{path.suffix}")
    command = f"iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))} > {shlex.quote(str(target))}"
    return f"write it in UTF-8: {command} && {shell_line(['mv', target, path])}"


def _cells(lines: Iterable[str], separator: str, *, strict: bool = False) -> Any:
    return csv.reader(lines, delimiter=separator, skipinitialspace=separator == " ", strict=strict)


def _fit(lines: Sequence[str], separator: str, path: Path) -> tuple[bool, float]:
    """Return how well a separator fits: whether most rows have a path, and the share of rows of the usual length."""
    rows = [row for row in _cells(lines, separator) if row]
    ((usual, count),) = Counter(map(len, rows)).most_common(1) or [(0, 0)]
    if usual < 2:
        return False, 0
    with_path = sum(any(is_path(cell, path.parent) for cell in row) for row in rows)
    return 2 * with_path >= len(rows) - 1, count / len(rows)


def _is_comment(lines: Sequence[str], separator: str, path: Path) -> bool:
    """Return whether the first line begins with # and is no header: the next one is, or it has other cells."""
    if not lines[0].startswith("#"):
        return False
    first, following, last = (next(_cells([line], separator)) for line in (lines[0], lines[1], lines[-1]))
    return len(first) != len(last) or not any(is_path(cell, path.parent) for cell in following)


def _lines(path: Path, form: Form) -> Iterator[list[str]]:
    """Yield the rows of a text file."""
    count = len(form.columns)
    with path.open(encoding="utf-8-sig", newline="") as stream:
        for _ in range(form.above):
            stream.readline()
        number = 0
        for row in _with_paired_quotes(_cells(stream, form.separator, strict=True), path, form.above):
            if not row:
                continue
            number += 1
            if len(row) == count:
                yield row
                continue
            advice = f"give it a cell for each of {', '.join(map(printable, form.columns))}"
            if len(row) > count:
                fixed = io.StringIO()
                writer = csv.writer(fixed, delimiter=form.separator, quoting=csv.QUOTE_MINIMAL, lineterminator="")
                writer.writerow([*row[: count - 1], form.separator.join(row[count - 1 :])])
                advice = f"write a cell that holds the separator in quotes: {printable(fixed.getvalue())[:200]}"
            raise DataError(
                f"table: {path}, row {number} has {len(row)} cells, and there are {count} columns; {advice}"
            )


def _with_paired_quotes(reader: Any, path: Path, above: int) -> Iterator[list[str]]:
    """Yield the rows of a reader. A quote that is never closed would take all further rows into its cell."""
    row: list[str] | None = []
    while row is not None:
        begins = above + reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise DataError(
                f"table: {path}: in the row that begins in line {begins}, the quotes around a cell do not pair "
                f"({error}); write the cell in quotes, and each quote in it twice"
            ) from error
        if row is not None:
            yield row


# ---- columns ---------------------------------------------------------------------------------------------------------


def _pyarrow() -> Any:
    """Return Arrow's library, which reads on one thread: each of several would take memory of its own."""
    with libraries_of("table", "data=table"):
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)
    return pyarrow


def _parquet_file(path: Path) -> Any:
    return _pyarrow().parquet.ParquetFile(path, buffer_size=PIECE)


def _kinds(part: TablePart) -> Mapping[str, ColumnKind]:
    """Return the columns of a part."""
    if part.form is not None:
        columns = part.form.columns
        for name, count in Counter(columns).items():
            if count > 1:
                raise DataError(f"table: {part.files[0]} has {count} columns {name!r}; rename all but one")
        return dict.fromkeys(columns, TEXT)
    if not part.files:
        raise DataError(f"table: the split {part.split!r} has no files; save the set again")
    several = [_kinds_of_file(path, part) for path in part.files]
    for path, other in zip(part.files, several, strict=True):
        if other != several[0]:
            raise DataError(f"table: {path} has other columns or classes than {part.files[0]}; write them alike")
    return several[0]


def _kinds_of_file(path: Path, part: TablePart) -> Mapping[str, ColumnKind]:
    """Return the columns of a Parquet or Arrow file by its schema, and the names of classes that ``datasets`` wrote."""
    pyarrow = _pyarrow()
    if part.kind == "parquet":
        _check_parquet(path)
        with _parquet_file(path) as file:
            schema = file.schema_arrow
    else:
        with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as reader:
            schema = reader.schema
    described = part.described
    if described is None:
        record = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        described = record.get("info", {}).get("features") or {}
    elif set(described) != set(schema.names):
        raise DataError(f"table: {path} cannot be read (it has other columns than {SET} describes); save the set again")
    if len(set(schema.names)) < len(schema.names):
        raise DataError(f"table: {path} has two columns of one name; rename one")
    return {field.name: _kind(field.type, described.get(field.name)) for field in schema}


def _kind(stored: Any, described: Any) -> ColumnKind:
    """Return the kind of a column, by how Arrow stores it and what ``datasets`` wrote of it."""
    types = _pyarrow().types
    if types.is_dictionary(stored):
        stored = stored.value_type
    if types.is_struct(stored):
        holds = "other"
        if any(stored.field(number).name == "bytes" for number in range(stored.num_fields)):
            holds = "images"
        return ColumnKind(holds)
    if types.is_binary(stored) or types.is_large_binary(stored):
        return ColumnKind("images")
    if types.is_integer(stored) and isinstance(described, Mapping) and described.get("_type") == "ClassLabel":
        return ColumnKind("labels", tuple(map(str, described.get("names") or ())))
    text = types.is_string(stored) or types.is_large_string(stored)
    number = types.is_integer(stored) or types.is_floating(stored) or types.is_boolean(stored)
    if text or number or types.is_null(stored):
        return TEXT
    return ColumnKind("other")


def _contents(parts: Sequence[TablePart], kinds: Mapping[str, ColumnKind]) -> dict[str, Cells]:
    """Return what the columns of single texts and numbers hold."""
    names = [name for name in kinds if kinds[name].holds == "text"]
    cells_by_name = {name: Cells() for name in names}
    for part in parts:
        base = part.files[0].parent if part.files else Path()
        for cells, _, _ in _cell_batches(part, names, {}):
            for name in names:
                cells_by_name[name].add(cells[name], base)
    return cells_by_name


def _choose_columns(
    place: str,
    parts: Sequence[TablePart],
    kinds: Mapping[str, ColumnKind],
    requested: Columns,
    domains: tuple[str, ...] | None,
) -> Columns:
    """Return the columns that are read, by what they hold, and log which were taken and which are not read."""
    known = _named_columns(place, kinds, requested)
    contents = _contents(parts, kinds)
    taken = replace(known, group="").chosen()  # a group may be the image itself
    left = [name for name in contents if name not in taken]
    image = known.image
    if not image:
        encoded = [name for name in kinds if kinds[name].holds == "images" and name not in taken]
        named = [name for name in left if name_key(name) in ("path", "image")]
        paths = [name for name in left if contents[name].holds_paths]
        both = list(dict.fromkeys([*paths, *named]))
        if len(set(paths) & set(named)) == 1:  # of several with paths, the one that is called so
            both = [name for name in paths if name in named]
        image = _only_column(place, "image", encoded or both, kinds, needed=True)
    left = [name for name in left if name not in (image, known.group)]
    split = known.split
    if len(parts) == 1 and not split and requested.split != NONE:
        named = [name for name in left if name_key(name) == "split" or split_of(name)]
        words = [name for name in left if contents[name].is_split and name_key(name) != "label"]
        split = _only_column(place, "split", list(dict.fromkeys([*named, *words])), kinds, none=True)
    left = [name for name in left if name != split]
    domain = known.domain
    if domains is not None and not domain and requested.domain != NONE:
        domain = "".join([name for name in left if name_key(name) == "domain"][:1])
    left = [name for name in left if name != domain]
    label = known.label
    if not label:
        labels = [name for name in kinds if kinds[name].holds == "labels" and name not in known.chosen()]
        named = [name for name in left if name_key(name) == "label"]
        repeated = [name for name in left if contents[name].repeats]
        label = _only_column(place, "label", labels or named or repeated or left[: 2 - len(left)], kinds, needed=True)
    columns = Columns(image, label, domain, split, known.group, known.scored)
    _check_kinds(place, columns, kinds)
    left = [name for name in left if name != label]
    settled = Columns(domain=requested.domain or domain, split=requested.split or split or "-" * (len(parts) - 1))
    columns = _with_few_values(place, parts, columns, {name: contents[name] for name in left}, settled, domains)
    _log_columns(place, columns, requested, kinds)
    return columns


def _named_columns(place: str, kinds: Mapping[str, ColumnKind], requested: Columns) -> Columns:
    """Return the columns that the user named; ``COLUMN:CELL`` names the column of the split and a cell of it."""
    split, scored = requested.split, ""
    if split and split not in kinds and ":" in split:
        split, _, scored = split.rpartition(":")
    domain = requested.domain
    if domain == NONE and NONE not in kinds:
        domain = ""
    if split == NONE and NONE not in kinds:
        split = ""
    columns = Columns(requested.image, requested.label, domain, split, requested.group, scored)
    for name in columns.chosen():
        if name not in kinds:
            raise DataError(f"table: {place}: no column {name!r}; {nearest(name, map(printable, kinds))}")
    return columns


def _with_few_values(
    place: str,
    parts: Sequence[TablePart],
    columns: Columns,
    left: Mapping[str, Cells],
    settled: Columns,
    domains: tuple[str, ...] | None,
) -> Columns:
    """Return the columns with that of domains: the only one of few words for many rows, other than the labels."""
    sites: list[str] = []
    if domains is not None and not settled.domain:
        sites = [
            name for name, held in left.items() if held.is_few and (not domains or set(domains) & set(held.counts))
        ]
    words = [name for name in sites if not left[name].is_number]
    if words:
        pairs = {name: set[tuple[str, str]]() for name in words}
        for part in parts:
            for cells, _, _ in _cell_batches(part, [*words, columns.label], {}):
                for name in words:
                    both = zip(cells[name], cells[columns.label], strict=True)
                    pairs[name].update((word, label) for word, label in both if word.strip() and label.strip())
        words = [name for name in words if len(pairs[name]) > len(left[name].counts)]  # others are like the labels
    folds: list[str] = []
    if not settled.split:
        for name, held in left.items():
            yes_or_no = held.is_filled and held.is_yes_or_no
            if yes_or_no or (held.is_few and held.is_number and len(held.counts) <= MAX_NUMBERS):
                folds.append(name)
    if words == sites and len(words) == 1:
        columns, sites = replace(columns, domain=words[0]), []
    ways: list[str] = []
    for name in sites:
        ways.append(f"{_set('domain', name)} makes a domain of each of {some_of(list(left[name].counts), MAX_SHOWN)}")
    for name in folds:
        for value in sorted(left[name].counts)[:2]:
            ways.append(f"{_set('split', f'{name}:{value}')} scores the rows of {printable(value)} alone")
    if not ways:
        return columns
    nothing = [f"data.{what}=none" for what, several in (("domain", sites), ("split", folds)) if several]
    shown = some_of([printable(name)[:100] for name in dict.fromkeys([*sites, *folds])], MAX_SHOWN)
    raise DataError(
        f"table: {place}: few values in many rows of {shown} may be domains or splits: {'; '.join(ways)}; "
        f"{' '.join(nothing)} reads them as neither"
    )


def _set(what: str, name: str) -> str:
    return shell_line([written_override(f"data.{what}", name)])


def _only_column(
    place: str,
    what: str,
    candidates: Sequence[str],
    kinds: Mapping[str, ColumnKind],
    *,
    needed: bool = False,
    none: bool = False,
) -> str:
    if len(candidates) > 1:
        names = " and ".join(map(printable, candidates))
        ways = [_set(what, name) for name in candidates[:MAX_SHOWN]] + ["data.split=none"] * none
        raise DataError(f"table: {place}: the columns {names} may both be the {what}; choose one: {' or '.join(ways)}")
    if needed and not candidates:
        ways = [_set(what, name) for name, kind in kinds.items() if kind.holds in ("text", "labels")]
        raise DataError(f"table: {place}: no column is known to be the {what}; choose one: {' or '.join(ways)}")
    return "".join(candidates)


def _check_kinds(place: str, columns: Columns, kinds: Mapping[str, ColumnKind]) -> None:
    if kinds[columns.image].holds not in ("images", "text"):
        raise DataError(
            f"table: {place}: {columns.image!r} holds neither images nor paths; choose another by data.image="
        )
    for what in ("label", "domain", "split", "group"):
        name = getattr(columns, what)
        if name and kinds[name].holds not in ("text", "labels"):
            raise DataError(
                f"table: {place}: {name!r} holds no single text or number in each row, as data.{what} needs; save it "
                "so, or choose another column"
            )


def _log_columns(place: str, columns: Columns, requested: Columns, kinds: Mapping[str, ColumnKind]) -> None:
    guessed: list[str] = []
    for what in ("image", "label", "domain", "split"):
        name = getattr(columns, what)
        if name and not getattr(requested, what):
            guessed.append(_set(what, name))
    if guessed:
        warn_once(f"table: {place}: columns are taken as {' '.join(guessed)}")
    unread = sorted(printable(name) for name in set(kinds).difference(columns.chosen()))
    if unread:
        warn_once(f"table: {place}: columns that are not read: {some_of(unread, 5)}")


# ---- rows ------------------------------------------------------------------------------------------------------------


def _rows(place: Path | str, parts: Sequence[TablePart], columns: Columns, encoded: bool) -> Iterator[Row]:
    """Yield all rows of a table. Images that are in it are not read."""
    number = 0
    wanted = [name for name in (columns.label, columns.domain, columns.split, columns.group) if name]
    if not encoded:
        wanted.append(columns.image)
    wanted = list(dict.fromkeys(wanted))
    for part in parts:
        base = Path(place)
        if part.files:
            base = part.files[0].parent
        kinds = _kinds(part)
        names = {name: kinds[name].names for name in wanted}
        for cells, count, read in _cell_batches(part, wanted, names):
            nothing = [""] * count
            cells[""] = nothing  # under the name of a column that the table lacks
            splits = cells[columns.split]
            if not columns.split and len(parts) > 1:
                splits = [part.split] * count
            paths = nothing
            if not encoded:
                paths = cells[columns.image]
            for index in range(count):
                label, domain = cells[columns.label][index], cells[columns.domain][index]
                group = cells[columns.group][index]
                where = f"{part.split} row {read + index + 1}".strip()
                yield Row(paths[index], number, base, label, domain, group, splits[index], where)
                number += 1


def _cell_batches(
    part: TablePart, names: Sequence[str], classes: Mapping[str, Sequence[str]]
) -> Iterator[tuple[dict[str, list[str]], int, int]]:
    """Yield the cells of columns of a part as texts, some rows at a time, with the rows and those before them."""
    if part.form is None:
        for batch, read in _batches(part, names):
            yield {name: _texts(batch[name], name, classes.get(name, ())) for name in names}, batch.num_rows, read
        return
    read = 0
    places = [(name, part.form.columns.index(name)) for name in names]
    lines = _lines(part.files[0], part.form)
    while rows := list(itertools.islice(lines, BATCH)):
        _check_rows(part.files[0], read + len(rows))
        yield {name: [_checked(row[place], name) for row in rows] for name, place in places}, len(rows), read
        read += len(rows)


def _checked(cell: str, name: str) -> str:
    if len(cell) > MAX_CELL:
        raise DataError(f"table: a cell of {name!r} has more than {MAX_CELL} characters; shorten it")
    if "\0" in cell:
        raise DataError(f"table: a cell of {name!r} has a NUL character; write it again")
    return cell


def _batches(part: TablePart, columns: Sequence[str], rows: int = BATCH) -> Iterator[tuple[pyarrow.Table, int]]:
    """Yield some rows of a part that is no text file at a time, and the number of rows before them."""
    read = decoded = 0
    size = sum(path.stat().st_size for path in part.files)
    for path in part.files:
        batches = partial(_arrow_batches, path, rows)
        if part.kind == "parquet":
            batches = partial(_parquet_batches, path, min(rows, _check_parquet(path)), columns)
        for batch in batches():
            table = _pyarrow().Table.from_batches([batch]).select(list(columns))
            yield table, read
            read += table.num_rows
            _check_rows(path, read)
            if part.kind == "parquet":
                decoded += table.nbytes
                _check_growth(path, decoded, size)


def _parquet_batches(path: Path, rows: int, columns: Sequence[str]) -> Iterator[pyarrow.RecordBatch]:
    with _parquet_file(path) as file:
        yield from file.iter_batches(rows, columns=list(columns), use_threads=False)


def _arrow_batches(path: Path, rows: int) -> Iterator[pyarrow.RecordBatch]:
    pyarrow = _pyarrow()
    with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as reader:
        for batch in reader:
            for start in range(0, batch.num_rows, rows):
                yield batch.slice(start, rows)


def _texts(column: pyarrow.ChunkedArray, name: str, names: Sequence[str]) -> list[str]:
    """Return the cells of a column as texts; an empty cell is an empty text, and so is a number that is none (NaN)."""
    pyarrow = _pyarrow()
    if pyarrow.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    text = pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)
    if text and (pyarrow.compute.max(pyarrow.compute.binary_length(column)).as_py() or 0) > MAX_CELL:
        raise DataError(f"table: a cell of {name!r} has more than {MAX_CELL} characters; shorten it")
    texts: list[str] = []
    for value in column.to_pylist():
        missing = value is None or (isinstance(value, float) and math.isnan(value))
        cell = _checked("" if missing else str(value), name)
        if names and cell:
            cell = _class_name(value, names, name)
        texts.append(cell)
    return texts


def _class_name(value: Any, names: Sequence[str], column: str) -> str:
    if not isinstance(value, int) or not 0 <= value < len(names):
        raise DataError(f"table: a row has {value!r} in {column!r}, which is none of its {len(names)} classes")
    return names[value]


def images_of(
    place: Path | str, parts: tuple[TablePart, ...], column: str, numbers: Sequence[int]
) -> Iterator[tuple[int, bytes]]:
    """Yield the encoded images of rows of a table that holds them, each with its row, in the table's order.

    Args:
        place: see :func:`find_columns`.
        parts: likewise.
        column: the column of the images.
        numbers: positions of the rows.

    Raises:
        DataError: a row holds no image, or there are more bytes than are read.
    """
    wanted = frozenset(numbers)
    number = length = 0
    with as_data_errors(place):
        stored = sum(path.stat().st_size for part in parts for path in part.files)
        for part in parts:
            for batch, read in _batches(part, [column], IMAGES):
                for index, cell in enumerate(batch[column]):
                    if number in wanted:
                        where = f"{part.split} row {read + index + 1}".strip()
                        content = _content(cell.as_py(), f"{place}: {where} of {column!r}")
                        length += len(content)
                        _check_growth(place, length, stored)
                        yield number, content
                    number += 1


def _content(cell: Any, where: str) -> bytes:
    if isinstance(cell, Mapping):
        cell = cell.get("bytes")
    if not isinstance(cell, bytes) or not cell:
        raise DataError(f"table: {where} holds no image, only the path of one or nothing; save the images themselves")
    return cell
