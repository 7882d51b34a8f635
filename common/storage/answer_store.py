"""Keeps the replies of an exchange until the last one arrives: in memory up to a limit, then in mapped files."""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Lock
from typing import TypeVar

from common.storage.files import read_tensors, safetensors_pieces
from common.storage.state import Bundle, split_tensors

PREFIX = ".answer-"
"""Prefix of the files' names."""

MMAP_THRESHOLD, LARGE = -3, 2**20
"""Option and value for glibc's ``mallopt``: blocks of a MiB or more are returned to the system when they are freed.
Otherwise the memory of each reply would never be returned."""


Kept = TypeVar("Kept", bound=Bundle)


class AnswerStore:
    """Keeps replies in memory up to a limit, and beyond it in files that are mapped into memory.

    A mapped tensor is read from its file when its values are used, and the kernel can reclaim its memory at any time.
    Sums over many replies read them block by block (:mod:`strategies.core.aggregation`), so no whole reply is copied.

    A file is unlinked as soon as it is mapped. Its disk space is free when its last tensor is deleted or the process
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
        """Forget the replies of the last exchange, and delete files that a killed process left while writing them."""
        self._held = 0
        for path in self.folder.glob(f"{PREFIX}*"):
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
        with NamedTemporaryFile(dir=self.folder, prefix=PREFIX) as file:
            file.writelines(safetensors_pieces(answer.tensors()))
            file.flush()
            mapped, _ = read_tensors(Path(file.name))
        found = split_tensors(mapped)
        weights = {name: found.weights[name] for name in answer.weights}  # in the reply's own order
        extra = {name: found.extra[name] for name in answer.extra}
        return replace(answer, weights=weights, prototypes=found.prototypes, extra=extra)
