"""Tables are decoded in a process of their own, whose memory is limited: however a file is made, it takes no more.

The process imports no torch, so that it starts quickly. It answers with lines of JSON and with the bytes of images. It
is started once for the rows of a table and once for its images; both are cached.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast, overload

from common.data.table_files import (
    BATCH,
    PARQUET,
    SEPARATED,
    Columns,
    Row,
    TablePart,
    as_data_errors,
    find_columns,
    images_of,
    parts_of,
    rows_of,
)
from common.errors import ConfigError, DataError, GoldfinchError
from common.regular_files import check_within, file_state
from common.text import printable, size, warn_once

MEMORY = 2**30
"""Bytes of memory of the process that decodes a table."""

KINDS: Mapping[str, type[GoldfinchError]] = {"ConfigError": ConfigError, "DataError": DataError}
"""Errors of the process by their names."""

REMEDY = (
    "save it again with few rows in a row group, as pyarrow.parquet.write_table(table, path, row_group_size=100) does, "
    "or save its images as files and list them in a CSV file"
)
"""What helps if a table needs more memory."""

UNLIMITED = (
    "this system does not limit the memory of the process that decodes tables (RLIMIT_DATA, as Linux has it), so a "
    "hostile table could take all of it; read only tables that you trust"
)
"""Said once where the limit is not enforced."""


@dataclass(frozen=True)
class TablePlace:
    """Where a table is.

    Args:
        path: a file or a folder; a text is the name of a set on the Hub.
        domain: of a folder with a file for each domain, only the files of this one are read; empty: all.
    """

    path: Path | str
    domain: str = ""

    def request(self, task: str, **more: object) -> Mapping[str, object]:
        """Return the request for a task that reads this table."""
        known = None
        if isinstance(self.path, str) and task != "fetch":
            known = fetched(self.path)
        hub = isinstance(self.path, str)
        return {"task": task, "path": str(self.path), "hub": hub, "domain": self.domain, "fetched": known, **more}


@dataclass(frozen=True)
class OpenTable:
    """A table that was opened.

    Args:
        name: its name in messages.
        place: where it is.
        columns: the columns that are read.
        encoded: whether the images are in the table.
        rows: all rows.
        names: names of the classes, if the table declares them.
        key: what changes if its files do.
    """

    name: str
    place: TablePlace
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


# ---- what is asked ---------------------------------------------------------------------------------------------------


def open_table(
    place: Path | str, requested: Columns, site: Path | None, domains: tuple[str, ...], *, shared: bool
) -> OpenTable:
    """Return the table at ``place``, with its rows but without its images.

    Args:
        place: a file or a folder; a text is the name of a set on the Hub.
        requested: the columns that the user named.
        site: folder that the table's files must lie in; ``None`` for a set on the Hub.
        domains: names of the domains that are known. Those of a column of domains are among its cells.
        shared: whether the table may hold several domains, so that a column of domains is looked for; otherwise, of a
            folder with a file for each domain, only the files of the one in ``domains`` are read.

    Raises:
        DataError: it does not exist, cannot be read, is too large, or its columns are missing or ambiguous.
        ConfigError: a library is not installed.
    """
    key: list[str | int] = []
    if isinstance(place, Path):
        files = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
        tables = [path for path in files if path.suffix.lower() in (*SEPARATED, *PARQUET, ".arrow", ".json")]
        check_within(tables, site or place.parent)
        with as_data_errors(place):
            for path in tables:
                key += [str(path), *file_state(path)]
    domain = ""
    if not shared and len(domains) == 1:
        domain = domains[0]
    return _opened(TablePlace(place, domain), requested, tuple(key), domains if shared else None)


@lru_cache(maxsize=32)
def _opened(
    place: TablePlace, requested: Columns, key: tuple[str | int, ...], domains: tuple[str, ...] | None
) -> OpenTable:
    request = place.request("rows", requested=astuple(requested), domains=domains)
    rows: list[Row] = []
    known: dict[str, str] = {}
    bases: dict[str, Path] = {}
    opened: Mapping[str, Any] = {}
    for answer, _ in _answers(place.path, request):
        if "columns" in answer:
            opened = answer
        for path, number, base, *words, where in answer.get("rows", ()):
            label, domain, group, split = (known.setdefault(word, word) for word in words)  # many rows share them
            rows.append(Row(path, number, bases.setdefault(base, Path(base)), label, domain, group, split, where))
    return OpenTable(
        str(place.path), place, Columns(*opened["columns"]), opened["encoded"], tuple(rows), tuple(opened["names"]),
        (*key, *opened["files"]),
    )  # fmt: skip


def encoded_images(table: OpenTable, numbers: Sequence[int]) -> Encoded:
    """Return the encoded images of rows of a table that holds them.

    Args:
        table: the table.
        numbers: positions of the rows.

    Raises:
        DataError: a row holds no image, or there are more bytes than are read.
    """
    request = table.place.request("images", column=table.columns.image, numbers=list(numbers))
    images = Encoded(numbers)
    for answer, content in _answers(table.place.path, request):
        images.add(answer["number"], content)
    return images


@lru_cache(maxsize=8)
def fetched(name: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the splits of a set of the Hub, each with its Arrow files, which are fetched if they are not here.

    Raises:
        DataError: it cannot be fetched.
        ConfigError: ``datasets`` is not installed.
    """
    splits: list[tuple[str, tuple[str, ...]]] = []
    for answer, _ in _answers(name, TablePlace(name).request("fetch")):
        for split, files in answer["parts"]:
            splits.append((split, tuple(files)))
    return tuple(splits)


def _answers(place: Path | str, request: Mapping[str, object]) -> Iterator[tuple[Mapping[str, Any], bytes]]:
    """Start the process, and yield what it answers: lines of JSON, each with the bytes that follow it.

    Raises:
        DataError: as the process has it; or it ended because it needed more memory.
        ConfigError: as the process has it.
    """
    folders = [str(Path(folder).absolute()) for folder in sys.path]  # those in which this process finds its modules
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
    with tempfile.TemporaryFile() as problems:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "common.data.table_process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=problems, env=environment,
        )  # fmt: skip
        try:
            stdin, stdout = cast("IO[bytes]", child.stdin), cast("IO[bytes]", child.stdout)
            with contextlib.suppress(BrokenPipeError), stdin:
                stdin.write(json.dumps(request).encode())
            for line in stdout:
                answer = json.loads(line)
                if "end" in answer:
                    return
                if "warning" in answer:
                    warn_once(answer["warning"])
                elif "error" in answer:
                    raise KINDS[answer["error"]](answer["text"])
                else:
                    yield answer, stdout.read(answer.get("size", 0))
            raise DataError(_end_of(place, child.wait(), problems))
        finally:
            child.kill()
            child.wait()
            stdout.close()


def _end_of(place: Path | str, status: int, problems: IO[bytes]) -> str:
    """Return what is said of a process that ended before its answer did."""
    problems.seek(max(0, problems.seek(0, os.SEEK_END) - 2000))
    words = problems.read().decode(errors="replace").split()
    text = printable(" ".join(words))[-200:]
    return (
        f"table: {place} cannot be decoded: the process that may use {size(MEMORY)} of memory for it ended with status "
        f"{status} ({text}); if the file is not damaged, {REMEDY}"
    )


# ---- the process -----------------------------------------------------------------------------------------------------


class _Warnings(logging.Handler):
    """Sends warnings to the process that asked."""

    def emit(self, record: logging.LogRecord) -> None:
        _send({"warning": record.getMessage()})


def _send(answer: Mapping[str, object], content: bytes = b"") -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.write(content)


def limit_memory(most: int) -> bool:
    """Limit the memory of this process; return whether the system enforces it.

    Args:
        most: bytes. Files that are mapped for reading do not count.
    """
    try:
        import resource
    except ImportError:  # Windows
        return False
    with contextlib.suppress(OSError, ValueError):  # macOS may refuse it
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        mmap.mmap(-1, most, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()  # none of it is touched
    except OSError:
        return True
    return False


def _serve(request: Mapping[str, Any]) -> None:
    """Answer a request."""
    place = request["path"]
    if not request["hub"]:
        place = Path(place)
    if request["fetched"] is not None:
        parts = tuple(TablePart(split, tuple(map(Path, files)), "arrow") for split, files in request["fetched"])
    else:
        parts = parts_of(place, request["domain"])
    if request["task"] == "fetch":
        _send({"parts": [(part.split, [str(path) for path in part.files]) for part in parts]})
    elif request["task"] == "images":
        for number, content in images_of(place, parts, request["column"], request["numbers"]):
            _send({"number": number, "size": len(content)}, content)
    else:
        domains = request["domains"]
        if domains is not None:
            domains = tuple(domains)
        table = find_columns(place, parts, Columns(*request["requested"]), domains)
        files = [str(path) for part in parts for path in part.files]
        _send({"columns": astuple(table.columns), "encoded": table.encoded, "names": table.names, "files": files})
        rows = rows_of(place, table)
        while some := list(islice(rows, BATCH)):
            _send({"rows": [_plain(row) for row in some]})


def _plain(row: Row) -> Sequence[str | int]:
    return row.place, row.number, str(row.base), row.label, row.domain, row.group, row.split, row.where


def main() -> None:
    """Answer the request on the standard input, within :data:`MEMORY`."""
    if not limit_memory(MEMORY):
        _send({"warning": UNLIMITED})
    logging.getLogger("common").addHandler(_Warnings())
    request = json.loads(sys.stdin.buffer.read())
    try:
        _serve(request)
    except MemoryError:
        text = f"table: {request['path']}: decoding it takes more than {size(MEMORY)} of memory, the most that is used"
        _send({"error": "DataError", "text": f"{text}; {REMEDY}"})
    except ConfigError as error:
        _send({"error": "ConfigError", "text": str(error)})
    except GoldfinchError as error:
        _send({"error": "DataError", "text": str(error)})
    _send({"end": True})
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
