"""A client's own state between rounds: named tensors, one version per exchange, safe against crashes on either side.

A version is written as the last step of an exchange and keeps its position in the run. When the server resumes from an
earlier round, the client goes back to the version from before that round, so that a resumed run is bit-equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from common.errors import DataError
from common.storage.files import Series, folder_name

KEPT_VERSIONS = 3
"""Rounds whose versions are kept. The server may go back to its last checkpoint: one round, and the current one."""

STATE = "state"
"""Kind of the series of versions."""


def stores(folder: Path, client: str, per_round: int) -> Callable[[str], Store]:
    """Return a function from a run's id to the client's state, in ``folder/<run>/<client>``."""
    name = folder_name(client)
    return lambda run: Store(folder / folder_name(run) / name, per_round)


class Store:
    """Versions as files in one folder that only this user may read; a damaged newest version is skipped.

    Args:
        folder: the client's own folder, created on the first save.
        per_round: exchanges per round; versions of the last ``KEPT_VERSIONS`` rounds are kept.
    """

    def __init__(self, folder: Path, per_round: int = 1) -> None:
        self.series = Series(folder, STATE, private=True)
        self._keep = KEPT_VERSIONS * per_round

    def load(self, position: int) -> dict[str, Tensor]:
        """Return the newest version before ``position``; empty if there is none."""
        try:
            return self.series.newest(lambda entry: entry.tensors, before=position) or {}
        except ValueError:  # all are damaged
            return {}

    def save(self, position: int, tensors: Mapping[str, Tensor], best_before: int = 0) -> None:
        """Write the version of ``position``, and delete later versions: the server went back to an earlier round.

        Besides the last versions, the newest one before ``best_before`` is kept: it is that of the best round.

        Raises:
            DataError: the disk is full or cannot be written; the version before stays.
        """
        self.series.prune_except(range(position + 1))
        try:
            self.series.write(position, tensors)
        except OSError as error:
            raise DataError(
                f"the client's own state cannot be written to {self.series.path(position)}: {error.strerror}; "
                "free space on that disk, or give the node another state-dir"
            ) from error
        numbers = self.series.numbers()
        kept = numbers[-self._keep :]
        best = [number for number in numbers if number < best_before]
        self.series.prune_except([*best[-1:], *kept])
