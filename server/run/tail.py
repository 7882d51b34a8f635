"""Reads a file of events while another process appends to it."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class Tail:
    """The lines of ``events.jsonl`` that were not read yet.

    Args:
        path: the file, which need not exist yet.
        known: lines that are not wanted, such as those of before.
    """

    def __init__(self, path: Path, known: Iterable[bytes] = ()) -> None:
        self.path = path
        self._known = set(known)
        self._inode = 0
        self._position = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the entries that were appended since the last call; a line without its end is left for the next."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as stream:
            inode = os.fstat(stream.fileno()).st_ino
            if inode != self._inode:  # a run replaces the file when it starts, and when all clients are checked
                self._inode = inode
                self._position = 0
            stream.seek(self._position)
            content = stream.read()
        complete = content[: content.rfind(b"\n") + 1]
        self._position += len(complete)
        entries: list[dict[str, Any]] = []
        for line in complete.splitlines():
            if line not in self._known:
                self._known.add(line)
                entries.append(json.loads(line))
        return entries
