"""Files that are either complete or absent: written to a temporary name, flushed to the disk, then renamed."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor


def write_bytes(path: Path, content: bytes, *, private: bool = False) -> None:
    """Replace ``path`` by ``content`` atomically; after a crash the old file or the new one is there, never half of it.

    Args:
        path: the file; its folder is made.
        content: all of it.
        private: only this user may read and write it, from its first moment on; else the umask says who may.

    Raises:
        OSError: the disk is full or the folder cannot be written; the temporary file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
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
    """:func:`write_bytes` of named tensors in the safetensors format."""
    write_bytes(path, safetensors.torch.save(unshared(tensors), dict(metadata or {})), private=private)


def unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous, each in memory of its own: safetensors refuses two names for one memory."""
    seen: set[int] = set()
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        place = own.untyped_storage().data_ptr()
        plain[name] = own.clone() if place in seen else own
        seen.add(place)
    return plain


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Named tensors, sorted by name, and metadata of a safetensors file.

    Raises:
        ValueError: the file is not a complete safetensors file.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as stream:
            names = sorted(stream.keys())  # safetensors gives them in any order
            return {name: stream.get_tensor(name) for name in names}, stream.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error
