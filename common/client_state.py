"""A client's own state between rounds, on its device: one folder for each run, one file for each version."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from common.errors import DISK_ADVICE, DataError, PayloadError
from common.storage import Series, folder_name

CLIENT_STATE = "state"
"""First part of the names of a client's files: ``state-1792000000000-000007.safetensors``, by attempt and position."""


def client_stores(folder: Path, client: str, kept: int) -> Callable[[str], ClientStore]:
    """Return a function from a run's id to the client's state, in ``folder/<run>/<client>``.

    Args:
        folder: the folder of all runs.
        client: the client's id.
        kept: see :class:`ClientStore`.
    """
    name = folder_name(client)
    return lambda run: ClientStore(folder / folder_name(run) / name, kept)


class Version(NamedTuple):
    """The name of a version of a client's own state. Later versions compare as greater.

    Args:
        attempt: the part of the run that asked for it. A resumed run is a new part, with a larger number.
        position: number of the exchange in the run: the round times the exchanges per round, plus the index in it.
    """

    attempt: int
    position: int

    @classmethod
    def of(cls, named: Mapping[str, Any], exchanges: Sequence[str]) -> Version:
        """Return the version that a message names.

        Args:
            named: a :class:`common.wire.messages.OwnVersion`.
            exchanges: the method's exchanges.

        Raises:
            PayloadError: the method has no such exchange.
        """
        if named["exchange"] not in exchanges:
            raise PayloadError(f"there is no exchange {named['exchange']!r}; the method has {', '.join(exchanges)}")
        return cls(named["attempt"], named["round"] * len(exchanges) + exchanges.index(named["exchange"]))


class Past(NamedTuple):
    """What a client starts from: its tensors by name, and whether they are lost and it starts without any."""

    tensors: dict[str, Tensor]
    lost: bool = False


class ClientStore:
    """A client's own tensors (the unshared part of its model, and the method's local ones), one version per exchange.

    Each version is a file that only this user may read. The server decides from which one an exchange starts: the last
    that it counted. The device cannot know which of its replies arrived, so it must not take the newest.

    Args:
        folder: the client's own folder, created on the first save.
        kept: versions that are kept, >= 2: that of the present exchange, and those that the server may still name.
    """

    def __init__(self, folder: Path, kept: int = 3) -> None:
        self.folder, self._kept = folder, kept

    def versions(self) -> list[Version]:
        """Return the versions that are there, the earliest first."""
        if not self.folder.is_dir():
            return []
        versions: list[Version] = []
        for path in self.folder.iterdir():
            match = re.fullmatch(rf"{CLIENT_STATE}-(\d+)-(\d{{6,}})\.safetensors", path.name)
            if match:
                versions.append(Version(int(match[1]), int(match[2])))
        return sorted(versions)

    def path(self, version: Version) -> Path:
        """Return the path of a version's file."""
        return self._series(version).path(version.position)

    def load(self, version: Version | None, before: Version | None = None) -> Past:
        """Return the tensors of ``version``; none for ``None``, which is a client without a counted reply.

        A device without any version has lost its disk, or replaces another. The client of such a device starts without
        a state, and ``lost`` says so, until a reply counts that the client made from there.

        Args:
            version: the version's name.
            before: the version that is to be made from it, if any.

        Raises:
            PayloadError: a version after ``before`` was made already, as when a delayed request is answered late.
            DataError: the version is missing or damaged, and there are others.
        """
        known = self.versions()
        if before is not None and known and known[-1] > before:
            raise self._overtaken(known[-1])
        if version is None:
            return Past({})
        if not known:
            return Past({}, lost=True)
        try:
            entry = self._series(version).read(version.position)
        except (OSError, ValueError) as error:
            reason = "is not there"
            if isinstance(error, ValueError):
                reason = f"is damaged ({error})"
            raise DataError(
                f"the client's own state that the server counted last {reason}: {self.path(version)}; restore it from "
                f"a copy, or delete {self.folder}: the client then starts without a state, and the record says so"
            ) from error
        return Past(entry.tensors, bool(entry.facts.get("lost")))

    def save(
        self, version: Version, tensors: Mapping[str, Tensor], past: Version | None = None, best_before: int = 0
    ) -> bool:
        """Write ``version``, which was made from ``past``; return whether there is anything to write.

        The versions in between are deleted: the server did not count them. ``past`` stays, from which the next exchange
        starts if the server does not count this one. Of the counted versions the newest before ``best_before`` is never
        deleted: that of the round with the best validation.

        Args:
            version: the version's name.
            tensors: its tensors, by name; none for a method without client state.
            past: the version that the server counted last; ``None`` if it counted none.
            best_before: position of the first exchange after the best round.

        Raises:
            PayloadError: a later version was made already; nothing is changed.
            DataError: the disk is full or cannot be written; ``past`` stays.
        """
        if not tensors:
            return False
        known = self.versions()
        if known and known[-1] > version:
            raise self._overtaken(known[-1])
        for other in known:
            if (past is None or other > past) and other != version:
                self._delete(other)
        if past is not None and not known:
            self._write(past, {}, lost=True)  # the next exchange starts from here too if this one does not count
        self._write(version, tensors)
        known = self.versions()
        best = [other for other in known if other.position < best_before]
        for other in known[: -self._kept]:
            if other not in best[-1:]:
                self._delete(other)
        return True

    def _overtaken(self, later: Version) -> PayloadError:
        return PayloadError(
            f"this client has answered a later request ({self.path(later).name}), so the server no longer waits for "
            "this reply; the client takes part again in the next round"
        )

    def _series(self, version: Version) -> Series:
        return Series(self.folder, f"{CLIENT_STATE}-{version.attempt}", private=True)

    def _delete(self, version: Version) -> None:
        self.path(version).unlink(missing_ok=True)

    def _write(self, version: Version, tensors: Mapping[str, Tensor], *, lost: bool = False) -> None:
        try:
            self._series(version).write(version.position, tensors, {"lost": True} if lost else {})
        except OSError as error:
            raise DataError(
                f"the client's own state cannot be written to {self.path(version)}: {error.strerror}; "
                f"{DISK_ADVICE.get(error.errno or 0, 'check that disk')}, or move the whole state folder (with "
                ".privacy) and name it in state-dir"
            ) from error
