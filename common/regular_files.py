"""Reading files from unknown sources: regular files only, of bounded size."""

import hashlib
import stat
from collections.abc import Sequence
from pathlib import Path

from common.errors import DataError, some_of

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


def file_state(path: Path) -> list[str | int]:
    """Return what changes when a file is written, replaced or takes another's name, for the key of a cache.

    Two files that are renamed into each other may have equal sizes and times of writing. Their numbers on the disk and
    the times of the last change of their entries differ.

    Raises:
        OSError: the file cannot be found.
    """
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def check_within(files: Sequence[Path], base: Path) -> None:
    """Refuse files that lie outside ``base`` after links are resolved; ``base`` may be a link itself.

    Raises:
        DataError: files, or their folders, lie outside ``base``; the message names them.
    """
    root = base.resolve()
    outside: list[str] = []
    for place in dict.fromkeys([path if path.is_symlink() else path.parent for path in files]):
        end = place.resolve()
        if not end.is_relative_to(root):
            absent = "" if end.exists() else " (nothing is there)"
            outside.append(f"{place} leads to {end}{absent}")
    if outside:
        raise DataError(
            f"{some_of(outside)}, outside {root}. The domain's folder itself may be a link, but none in it may leave "
            "it: put the images themselves there (cp -rL copies what links lead to), and take out links to nothing"
        )


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
