"""Numbered safetensors files of one kind in a folder: how they are named, which are kept, and which are damaged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from common.storage.files import read_tensors, write_tensors
from common.storage.state import tensors_sha256

Item = TypeVar("Item")


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
