"""Where an exchange's answers wait for the last one: in memory up to a limit, beyond it in files that are mapped.

A mapped tensor is read from its file when it is looked at, and the kernel takes its memory back whenever it needs it.
Sums over many answers read them block by block, so that no whole answer is copied (:mod:`strategies.core.aggregation`).
"""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Lock
from typing import TypeVar

import safetensors.torch

from common.storage.files import read_tensors, unshared
from common.storage.state import named_tensors, split_tensors
from common.wire.payload import Payload
from strategies.core.exchange import Update

PREFIX = ".answer-"
MMAP_THRESHOLD, LARGE = -3, 2**20
"""Of glibc's ``mallopt``: blocks of so many bytes are given back when they are freed, instead of kept and cut up. What
comes with each answer and goes again would otherwise leave its size behind each time."""
Kept = TypeVar("Kept", Payload, Update)


class Shelf:
    """The tensors of one exchange's answers.

    A file loses its name as soon as it is mapped: its place on the disk is free when the last tensor is gone, and when
    the process is, however it ends.

    Args:
        folder: where files are made; on a disk, since what lies in a file system in memory is memory.
        most: bytes that stay in memory, >= 0.
    """

    def __init__(self, folder: Path, most: float) -> None:
        self.folder, self.most = folder, most
        self._held = 0
        self._lock = Lock()  # engines keep from several threads

    def clear(self) -> None:
        """Begin anew: what was kept is nobody's any more. A killed process may have left what it was writing."""
        self._held = 0
        for left in self.folder.glob(f"{PREFIX}*"):
            left.unlink(missing_ok=True)

    def keep(self, answer: Kept) -> Kept:
        """The same answer with the same values, in memory or in a file.

        Raises:
            OSError: the disk is full, or the folder cannot be written.
        """
        tensors = named_tensors(answer.weights, answer.prototypes, answer.extra)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        with self._lock:
            if not size or self._held + size <= self.most:
                self._held += size
                return answer
        with contextlib.suppress(OSError, AttributeError):  # another libc has no such trouble
            ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, LARGE)
        self.folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=self.folder, prefix=PREFIX) as file:
            file.write(safetensors.torch.save(unshared(tensors)))
            file.flush()
            mapped, _ = read_tensors(Path(file.name))
        weights, prototypes, extra = split_tensors(mapped)
        weights = {name: weights[name] for name in answer.weights}  # in the answer's own order
        extra = {name: extra[name] for name in answer.extra}
        if answer.prototypes is None:
            return replace(answer, weights=weights, extra=extra)
        return replace(answer, weights=weights, prototypes=prototypes, extra=extra)
