"""Which runs a device forgets: those whose clients have long not written a state (``state-keep``)."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

from common.client_state import CLIENT_STATE
from common.storage import RUN_ID

STATE_FILE = re.compile(rf"\.?{CLIENT_STATE}-\d+-\d{{6,}}\.safetensors(\.[0-9a-f]+)?")
"""The name of a client's file, or of one that a killed process did not finish (:func:`common.storage.write_bytes`)."""


def forget_runs(folder: Path, days: float) -> list[str]:
    """Remove the state of runs in which nothing was written for some days. Return their ids.

    A run that is resumed after that starts its clients without a state of their own, and its record says so. A folder
    that holds anything else than clients' states is not a run's, and stays: the device's ledger, or whatever else a
    user keeps in the folder that ``state-dir`` names.

    Args:
        folder: the folder of all runs, see :func:`common.client_state.client_stores`.
        days: how long a run's state is kept, > 0.
    """
    oldest = time.time() - days * 86_400
    forgotten: list[str] = []
    if not folder.is_dir():
        return forgotten
    for run in sorted(folder.iterdir()):
        if run.is_symlink() or not run.is_dir() or not RUN_ID.fullmatch(run.name):
            continue
        states = _states_of(run)
        if not states:
            continue
        written = [path.stat().st_mtime for path in states]
        if max(run.stat().st_mtime, *written) >= oldest:
            continue
        for path in states:
            path.unlink(missing_ok=True)
        clients = {path.parent for path in states}
        for emptied in (*clients, run):
            with contextlib.suppress(OSError):  # another process has written to it, or removed it
                emptied.rmdir()
        forgotten.append(run.name)
    return forgotten


def _states_of(run: Path) -> list[Path]:
    """Return the files of a run's clients; none if the folder holds anything else."""
    states: list[Path] = []
    for client in run.iterdir():
        if client.is_symlink() or not client.is_dir():
            return []
        for path in client.iterdir():
            if path.is_symlink() or not path.is_file() or not STATE_FILE.fullmatch(path.name):
                return []
            states.append(path)
    return states
