"""Files that are either complete or absent: written to a temporary name, flushed to the disk, then renamed.

:class:`Series` is a folder of such files with numbers.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from typing_extensions import Buffer  # collections.abc has it from Python 3.12 on

from common.errors import ConfigError
from common.regular_files import MAX_TENSOR_FILE, check_regular
from common.storage.state import bytes_of, tensors_sha256

Item = TypeVar("Item")

DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Their names in the safetensors format, in the order in which it lays out tensors; those of one dtype by name."""


MAX_NAME_BYTES = 200
"""Longest name of a client or domain; file systems allow 255 bytes, and indices and suffixes are added."""

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
"""A run's id, which names a folder on devices and in a simulation's output."""


def check_run_id(run: object) -> str:
    """Return a run's id that came from a file or another machine.

    Raises:
        ValueError: it cannot be one, such as a path.
    """
    if not isinstance(run, str) or not RUN_ID.fullmatch(run):
        raise ValueError(f"the run's id {str(run)[:50]!r} is not one: letters, digits, - and _ are allowed")
    return run


def folder_name(name: str) -> str:
    """Return a client's or a domain's name that is to be a folder's.

    Raises:
        ConfigError: as a path it would lead out of the folder that it is joined to, or the system allows no such name.
    """
    size = len(name.encode(errors="surrogateescape"))
    if name in ("", ".", "..") or size > MAX_NAME_BYTES or any(letter in name for letter in "/\\\0"):
        raise ConfigError(
            f"{name[:50]!r} cannot name a folder: the name of a client or domain is up to {MAX_NAME_BYTES} bytes "
            "without / or \\, and not . or .."
        )
    return name


def write_bytes(path: Path, *content: Buffer, private: bool = False) -> None:
    """Replace ``path`` by ``content`` atomically; after a crash the old file or the new one is there, never half of it.

    Args:
        path: the file; its folder is made.
        content: all of it, in pieces that follow each other.
        private: only this user may read and write it, from its first moment on; else the umask says who may.

    Raises:
        OSError: the disk is full or the folder cannot be written; the temporary file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    try:
        with os.fdopen(handle, "wb") as stream:
            for piece in content:
                stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable: the folder's own entry must reach the disk too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, content: str, *, private: bool = False) -> None:
    """:func:`write_bytes` of UTF-8 text."""
    write_bytes(path, content.encode(), private=private)


def write_json(path: Path, content: Any) -> None:
    """:func:`write_bytes` of indented JSON with sorted keys, so that equal content gives equal files."""
    write_text(path, json.dumps(content, indent=2, sort_keys=True) + "\n")


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, *, private: bool = False
) -> None:
    """:func:`write_bytes` of :func:`safetensors_pieces`."""
    write_bytes(path, *safetensors_pieces(tensors, metadata), private=private)


def safetensors_table(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> tuple[bytes, int]:
    """What stands before the tensors in the safetensors format, and how many bytes they take."""
    table: dict[str, Any] = {"__metadata__": dict(metadata or {})}
    position = 0
    for name in _laid_out(tensors):
        tensor, start = tensors[name], position
        position += tensor.nbytes
        table[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, position]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, position


def safetensors_pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> list[Buffer]:
    """The tensors in the safetensors format: the table, then each where it lies; the library copies all of it twice."""
    return [safetensors_table(tensors, metadata)[0], *(bytes_of(tensors[name]) for name in _laid_out(tensors))]


def _laid_out(tensors: Mapping[str, Tensor]) -> list[str]:
    order = list(DTYPES)
    return sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Named tensors, sorted by name, and metadata of a safetensors file.

    Raises:
        OSError: it is no regular file, or larger than :data:`MAX_TENSOR_FILE`.
        ValueError: the file is not a complete safetensors file.
    """
    check_regular(path, MAX_TENSOR_FILE)
    try:
        with safe_open(path, framework="pt", device="cpu") as stream:
            names = sorted(stream.keys())  # safetensors gives them in any order
            return {name: stream.get_tensor(name) for name in names}, stream.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error


# ---- numbered files of one kind: how they are named, which are kept, and which are damaged ---------------------------


class Entry(NamedTuple):
    """One file of a series: its number, its tensors by name, and what else was said of them."""

    number: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]


class Series:
    """``<kind>-<number>.safetensors`` in one folder; other files there are left alone.

    A file's metadata holds its facts as JSON with the SHA-256 of its number and tensors, so that a file which is torn
    or changed is known as such.

    Args:
        folder: made with the first file.
        kind: what the numbers count, such as ``round``.
        private: only this user may read the files.
    """

    def __init__(self, folder: Path, kind: str = "round", *, private: bool = False) -> None:
        self.folder, self.kind, self.private = folder, kind, private

    def path(self, number: int) -> Path:
        """Where the file of a number is."""
        return self.folder / f"{self.kind}-{number:06d}.safetensors"

    def numbers(self) -> list[int]:
        """The numbers there are, ascending."""
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        matches = [re.fullmatch(rf"{self.kind}-(\d{{6,}})\.safetensors", name) for name in names]
        return sorted(int(match[1]) for match in matches if match)

    def write(self, number: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None = None) -> None:
        """Write a file, or replace it, atomically.

        Raises:
            OSError: the disk is full or cannot be written; what was there before stays.
        """
        known = {**(facts or {}), "sha256": tensors_sha256(tensors, f"{self.kind}={number}")}
        metadata = {"goldfinch": json.dumps(known, sort_keys=True)}
        write_tensors(self.path(number), tensors, metadata, private=self.private)

    def read(self, number: int) -> Entry:
        """A file's content.

        Raises:
            ValueError: it is torn, or not as it was written.
        """
        tensors, metadata = read_tensors(self.path(number))
        facts = json.loads(metadata.get("goldfinch", "null"))
        if not isinstance(facts, dict):
            raise ValueError("its facts are not a JSON object")
        if facts.pop("sha256", "") != tensors_sha256(tensors, f"{self.kind}={number}"):
            raise ValueError("its content does not match its hash")
        return Entry(number, tensors, facts)

    def newest(self, understand: Callable[[Entry], Item], before: float = float("inf")) -> Item | None:
        """What ``understand`` makes of the newest good file below ``before``; ``None`` if there are no files.

        Raises:
            ValueError: there are files, but none is good: reading or ``understand`` raised ValueError or TypeError.
        """
        problems = []
        for number in reversed([number for number in self.numbers() if number < before]):
            try:
                return understand(self.read(number))
            except (ValueError, TypeError) as error:
                problems.append(f"{self.path(number).name}: {error}")
        if problems:
            raise ValueError("; ".join(problems))
        return None

    def keep(self, numbers: Container[int]) -> None:
        """Remove all files but those of ``numbers``."""
        for number in self.numbers():
            if number not in numbers:
                self.path(number).unlink(missing_ok=True)
