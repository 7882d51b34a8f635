"""Named tensors in memory and on disk: the global state and its hash, atomic files, and the replies of an exchange.

Saving, sending and hashing use the same form, tensors by name. A file is written to a temporary name, flushed to the
disk and renamed, so it is either complete or absent. :class:`AnswerStore` keeps the
replies of an exchange; a client's own state is kept by :mod:`common.client_state`.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from typing_extensions import Buffer  # collections.abc has it from Python 3.12 on

from common.errors import ConfigError
from common.prototypes import PrototypeSet
from common.regular_files import MAX_TENSOR_FILE, check_regular

# ---- named tensors and the global state ------------------------------------------------------------------------------


MODEL_PREFIX = "model/"
"""Prefix, in a client's own state, of the model's tensors that are not shared, such as FedBN's batch norm layers."""

LOCAL_PREFIX = "local/"
"""Prefix, in a client's own state, of the names of a method's own tensors."""


@dataclass(frozen=True, eq=False)
class Bundle:
    """Model weights, a prototype set and further tensors: the contents of a message and of the global state.

    Args:
        weights: model state (parameters and buffers) by name.
        prototypes: a prototype set, or ``None`` if there is none, which differs from an empty set.
        extra: further tensors by name.
    """

    weights: Mapping[str, Tensor] = field(default_factory=dict)
    prototypes: PrototypeSet | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_contents(type(self).__name__, {**self.weights, **self.extra}, self.prototypes)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors under the names that they have in messages and files, sorted by name.

        The names have the prefixes ``weights/``, ``prototypes/`` and ``extra/``.
        """
        tensors = with_prefix("weights/", self.weights) | with_prefix("extra/", self.extra)
        if self.prototypes is not None:
            tensors["prototypes/vectors"] = self.prototypes.vectors
            tensors["prototypes/labels"] = self.prototypes.labels
            tensors["prototypes/weights"] = self.prototypes.weights
        return dict(sorted(tensors.items()))

    def part_bytes(self) -> dict[str, int]:
        """Return the bytes of the tensors by part: weights, prototypes, extra."""
        prototypes = 0
        if self.prototypes is not None:
            for tensor in (self.prototypes.vectors, self.prototypes.labels, self.prototypes.weights):
                prototypes += tensor.nbytes
        return {
            "weights": sum(tensor.nbytes for tensor in self.weights.values()),
            "prototypes": prototypes,
            "extra": sum(tensor.nbytes for tensor in self.extra.values()),
        }


def split_tensors(tensors: Mapping[str, Tensor]) -> Bundle:
    """Return the bundle of these tensors, the inverse of :meth:`Bundle.tensors`.

    Raises:
        ValueError: the tensors of the prototype set do not agree.
    """
    prototypes = None
    parts = under_prefix("prototypes/", tensors)
    if "vectors" in parts:
        prototypes = PrototypeSet(parts["vectors"], parts["labels"], parts["weights"])
    return Bundle(under_prefix("weights/", tensors), prototypes, under_prefix("extra/", tensors))


@dataclass(frozen=True, eq=False)
class GlobalState(Bundle):
    """The server's state after ``round`` rounds, on the CPU.

    The weights are the shared model's. The prototypes are the global ones, empty before the first round and for methods
    without prototypes. The extra tensors are a method's own: FedDyn's ``h``, FedPall's amplifier, server momentum.

    Args:
        round: rounds completed; 0 before the first.
    """

    prototypes: PrototypeSet = field(default_factory=PrototypeSet.empty)
    round: int = field(kw_only=True)

    @classmethod
    def from_tensors(cls, round_number: int, tensors: Mapping[str, Tensor]) -> GlobalState:
        """Return the state of a round from its tensors, the inverse of :meth:`tensors`."""
        bundle = split_tensors(tensors)
        prototypes = bundle.prototypes
        if prototypes is None:
            prototypes = PrototypeSet.empty()
        return cls(bundle.weights, prototypes, bundle.extra, round=round_number)

    def not_finite(self) -> str | None:
        """Return the name of the first tensor with NaN or infinite values; ``None`` if there is none."""
        for name, tensor in self.tensors().items():
            if not finite(tensor):
                return name
        return None

    def sha256(self) -> str:
        """Return the SHA-256 over round, names, dtypes, shapes and bytes: equal on every engine for equal states."""
        return tensors_sha256(self.tensors(), f"round={self.round}")


def tensors_sha256(tensors: Mapping[str, Tensor], prefix: str = "") -> str:
    """Return the SHA-256 over ``prefix`` and, in name order, every tensor's name, dtype, shape and bytes."""
    digest = hashlib.sha256(prefix.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"|{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the tensor's bytes, without a copy if it is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def finite(tensor: Tensor) -> bool:
    """Return whether all values are finite.

    A value that is not finite makes the norm infinite or NaN. The norm needs no second tensor, as ``isfinite`` does.
    """
    if not tensor.is_floating_point() or math.isfinite(float(torch.linalg.vector_norm(tensor))):
        return True
    return bool(torch.isfinite(tensor).all())  # the norm of large finite values may overflow


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the same tensors under ``prefix`` + name."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def under_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with names that begin with ``prefix``, by the rest of their names."""
    tensors_by_name: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            tensors_by_name[name.removeprefix(prefix)] = tensor
    return tensors_by_name


# ---- atomic files ----------------------------------------------------------------------------------------------------


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
"""The safetensors name of each dtype. A file has its tensors in the order of this table, those of one dtype by name."""


def check_contents(
    where: str,
    tensors: Mapping[str, Tensor],
    prototypes: PrototypeSet | None = None,
    dtypes: Container[torch.dtype] = frozenset(DTYPES),
) -> None:
    """Check that a class of the user's own made something of dense tensors of some dtypes, and of a prototype set.

    Raises:
        TypeError: something else is among them.
    """
    if not isinstance(prototypes, PrototypeSet | None):
        raise TypeError(f"{where}: prototypes is a {type(prototypes).__name__}, and must be a PrototypeSet")
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.dtype in dtypes and tensor.layout == torch.strided:
            continue
        kind = type(tensor).__name__
        if isinstance(tensor, Tensor):
            kind = f"{kind} of {tensor.dtype}, {tensor.layout}"
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES if dtype in dtypes)
        raise TypeError(f"{where}: {name} is a {kind}; make it a dense tensor of {known}")


MAX_NAME_BYTES = 200
"""Longest name of a client or domain; file systems allow 255 bytes, and indices and suffixes are added."""

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
"""Form of a run's id, which names a folder on devices and in a simulation's output."""


def check_run_id(run: object) -> str:
    """Return a run's id after checking it, because it comes from a file or another machine.

    Raises:
        ValueError: it is not an id, for example a path.
    """
    if not isinstance(run, str) or not RUN_ID.fullmatch(run):
        raise ValueError(
            f"the run's id {str(run)[:50]!r} is not valid: it has up to 100 letters, digits, - and _, and begins "
            "with a letter or digit"
        )
    return run


def folder_name(name: str) -> str:
    """Return the name of a client or domain after checking that it can name a folder.

    Raises:
        ConfigError: the name is a path to another folder, or file systems do not allow it.
    """
    size = len(name.encode(errors="surrogateescape"))
    if name in ("", ".", "..") or size > MAX_NAME_BYTES or re.search(r"[/\\\0]", name):
        raise ConfigError(
            f"{name[:50]!r} cannot name a folder: the name of a client or domain is up to {MAX_NAME_BYTES} bytes "
            "without / or \\, and not . or .."
        )
    return name


def write_bytes(path: Path, *content: Buffer, private: bool = False) -> None:
    """Replace a file atomically: after a crash either the old file or the new one is there, complete.

    Args:
        path: the file; its folder is created.
        content: the whole content, in consecutive pieces.
        private: create the file so that only this user may read and write it; otherwise the umask decides.

    Raises:
        OSError: the disk is full or the folder cannot be written; it names ``path``, and the temporary file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        with os.fdopen(handle, "wb") as stream:
            for piece in content:
                stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno:  # a failed write names no file, and others the temporary one
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, so that a rename in it is durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, content: str, *, private: bool = False) -> None:
    """Write UTF-8 text atomically, see :func:`write_bytes`."""
    write_bytes(path, content.encode(), private=private)


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON atomically, with sorted keys, so that equal content gives equal files."""
    write_text(path, json.dumps(content, indent=2, sort_keys=True) + "\n")


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, *, private: bool = False
) -> None:
    """Write a safetensors file atomically, see :func:`write_bytes`."""
    write_bytes(path, *safetensors_pieces(tensors, metadata), private=private)


def safetensors_table(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> tuple[bytes, int]:
    """Return the table that precedes the tensors in the safetensors format, and the number of the tensors' bytes."""
    table: dict[str, Any] = {"__metadata__": dict(metadata or {})}
    position = 0
    for name in _file_order(tensors):
        tensor, start = tensors[name], position
        position += tensor.nbytes
        table[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, position]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, position


def safetensors_pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> list[Buffer]:
    """Return the pieces of a safetensors file: the table, then each tensor's memory, without copying it.

    The safetensors library would copy all tensors twice.
    """
    table, _ = safetensors_table(tensors, metadata)
    pieces: list[Buffer] = [table]
    for name in _file_order(tensors):
        pieces.append(bytes_of(tensors[name]))
    return pieces


def _file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names in the order in which a safetensors file has the tensors."""
    order = list(DTYPES)
    return sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the named tensors of a safetensors file, sorted by name, and its metadata.

    Raises:
        OSError: the path is not a regular file, or the file is larger than :data:`MAX_TENSOR_FILE`.
        ValueError: the file is not a complete safetensors file.
    """
    check_regular(path, MAX_TENSOR_FILE)
    try:
        with safe_open(path, framework="pt", device="cpu") as stream:
            names = sorted(stream.keys())  # safetensors returns them in any order
            return {name: stream.get_tensor(name) for name in names}, stream.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error


# ---- numbered files of one kind --------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """One file of a series: its number, its tensors by name, and further facts about them."""

    number: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]


class Series:
    """The files ``<kind>-<number>.safetensors`` in one folder; other files there are ignored.

    A file's metadata contains its facts as JSON with the SHA-256 of its number and tensors, so that a damaged or
    changed file is recognised.

    Args:
        folder: created with the first file.
        kind: what the numbers count, such as ``round``.
        private: whether only this user may read the files.
    """

    def __init__(self, folder: Path, kind: str = "round", *, private: bool = False) -> None:
        self.folder, self.kind, self.private = folder, kind, private

    def path(self, number: int) -> Path:
        """Return the path of the file with a number."""
        return self.folder / f"{self.kind}-{number:06d}.safetensors"

    def numbers(self) -> list[int]:
        """Return the numbers of the files, ascending."""
        if not self.folder.is_dir():
            return []
        numbers: list[int] = []
        for path in self.folder.iterdir():
            match = re.fullmatch(rf"{self.kind}-(\d{{6,}})\.safetensors", path.name)
            if match:
                numbers.append(int(match[1]))
        return sorted(numbers)

    def write(self, number: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None = None) -> None:
        """Write a file, or replace it, atomically.

        Raises:
            OSError: the disk is full or cannot be written; the old file stays.
        """
        kind = self.kind.partition("-")[0]
        for unfinished in self.folder.glob(f".{kind}-*"):  # of a process that was killed, see write_bytes
            unfinished.unlink(missing_ok=True)
        known = {**(facts or {}), "sha256": tensors_sha256(tensors, f"{self.kind}={number}")}
        metadata = {"goldfinch": json.dumps(known, sort_keys=True)}
        write_tensors(self.path(number), tensors, metadata, private=self.private)

    def read(self, number: int) -> Entry:
        """Return a file's content.

        Raises:
            ValueError: the file is incomplete or was changed, or is no file.
        """
        path = self.path(number)
        if os.path.lexists(path) and not path.is_file():
            raise ValueError("it is a folder, a pipe or a link to nothing")
        tensors, metadata = read_tensors(path)
        facts = json.loads(metadata.get("goldfinch", "null"))
        if not isinstance(facts, dict):
            raise ValueError("its facts are not a JSON object")
        if facts.pop("sha256", "") != tensors_sha256(tensors, f"{self.kind}={number}"):
            raise ValueError("its content does not match its hash")
        return Entry(number, tensors, facts)

    def newest(self, understand: Callable[[Entry], Item], before: float = float("inf")) -> Item | None:
        """Return ``understand(entry)`` of the newest valid file below ``before``; ``None`` if there are no files.

        Raises:
            ValueError: there are files, but none is valid: reading or ``understand`` raised ValueError or TypeError.
        """
        problems: list[str] = []
        for number in reversed(self.numbers()):
            if number >= before:
                continue
            try:
                return understand(self.read(number))
            except (ValueError, TypeError) as error:
                problems.append(f"{self.path(number).name}: {error}")
        if problems:
            raise ValueError("; ".join(problems))
        return None

    def prune_except(self, numbers: Container[int]) -> None:
        """Delete all files except those of ``numbers``."""
        for number in self.numbers():
            if number not in numbers:
                self.path(number).unlink(missing_ok=True)


# ---- the replies of an exchange --------------------------------------------------------------------------------------


ANSWER_PREFIX = ".answer-"
"""Prefix of the files' names."""

MMAP_THRESHOLD, LARGE = -3, 2**20
"""Option and value for glibc's ``mallopt``: blocks of a MiB or more are returned to the system when they are freed.
Otherwise the memory of each reply would never be returned."""


Kept = TypeVar("Kept", bound=Bundle)


class AnswerStore:
    """Keeps replies in memory up to a limit, and beyond it in files that are mapped into memory.

    A mapped tensor is read from its file when its values are used, and the kernel can reclaim its memory at any time.
    Sums over many replies read them block by block (:mod:`strategies.core.aggregation`), so no whole reply is copied.

    A file is unlinked as soon as it is mapped. The disk space is free when the last tensor is deleted or the process
    ends.

    Args:
        folder: folder of the files; it should be on a disk, because files of a memory file system are in memory.
        max_bytes: bytes that stay in memory, >= 0.
    """

    def __init__(self, folder: Path, max_bytes: float) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self._held = 0
        self._lock = Lock()  # engines keep replies from several threads

    def clear(self) -> None:
        """Count bytes from 0 for a new exchange, and delete files that a killed process left while writing them."""
        self._held = 0
        for path in self.folder.glob(f"{ANSWER_PREFIX}*"):
            path.unlink(missing_ok=True)

    def keep(self, answer: Kept) -> Kept:
        """Return the same reply with the same values, in memory or in a file.

        Raises:
            OSError: the disk is full, or the folder cannot be written.
        """
        size = sum(answer.part_bytes().values())
        with self._lock:
            if not size or self._held + size <= self.max_bytes:
                self._held += size
                return answer
        with contextlib.suppress(OSError, AttributeError):  # other C libraries have no mallopt and need none
            ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, LARGE)
        self.folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=self.folder, prefix=ANSWER_PREFIX) as file:
            file.writelines(safetensors_pieces(answer.tensors()))
            file.flush()
            mapped, _ = read_tensors(Path(file.name))
        parts = split_tensors(mapped)
        weights = {name: parts.weights[name] for name in answer.weights}  # in the reply's own order
        extra = {name: parts.extra[name] for name in answer.extra}
        return replace(answer, weights=weights, prototypes=parts.prototypes, extra=extra)
