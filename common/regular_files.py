"""Reading files from unknown sources: regular files only, of bounded size."""

import hashlib
import stat
from pathlib import Path

MAX_TEXT = 64 * 2**20
"""Largest text file that is read at once, in bytes, such as ``model.json``."""

MAX_TENSOR_FILE = 64 * 2**30
"""Largest file of tensors that is read, in bytes."""


def check_regular(path: Path, limit: int) -> None:
    """Check that a file from an unknown source can be read without blocking and without filling the memory.

    Args:
        path: the file; links are followed.
        limit: largest size, bytes.

    Raises:
        OSError: the path does not exist, is a folder, a pipe or a device, or the file is larger.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path} is not a regular file")
    if status.st_size > limit:
        raise OSError(f"{path} has {status.st_size} bytes; at most {limit} are read")


def read_small(path: Path) -> str:
    """Return the text of a regular file of at most :data:`MAX_TEXT` bytes, UTF-8.

    Raises:
        OSError: see :func:`check_regular`.
        ValueError: it is not UTF-8.
    """
    check_regular(path, MAX_TEXT)
    return path.read_text(encoding="utf-8")


def read_small_bytes(path: Path) -> bytes:
    """Return the content of a regular file of at most :data:`MAX_TEXT` bytes.

    Raises:
        OSError: see :func:`check_regular`.
    """
    check_regular(path, MAX_TEXT)
    return path.read_bytes()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a regular file of at most :data:`MAX_TENSOR_FILE` bytes, read block by block.

    Raises:
        OSError: see :func:`check_regular`.
    """
    check_regular(path, MAX_TENSOR_FILE)
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
