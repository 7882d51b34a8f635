"""The copy of a run's code on this device, which Flower trusts once its folder is there.

Flower copies the code file by file into ``$FLWR_HOME/apps``, and a later ClientApp uses any folder that it finds there.
So a disk that fills, or a power cut, would keep the device out of every run of that code. The server sends the code for
each run anyway: the copy is no more than a cache, and one that is not as it was sent is removed.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

MANIFEST = ".info/"
"""Folder of a bundle's own list of files, which Flower does not install."""

CACHE = "__pycache__"
"""Folder that Python writes next to the code that it runs."""

QUIET_SECONDS = 10.0
"""A copy in which something was written within this time may still be made, by another SuperNode of this machine."""


@dataclass
class InstalledCode:
    """The code that runs have brought to this device.

    Args:
        quiet_seconds: see :data:`QUIET_SECONDS`.
    """

    quiet_seconds: float = QUIET_SECONDS
    _bundles: dict[Path, bytes] = field(default_factory=dict)

    def note(self, folder: Path, bundle: bytes) -> None:
        """Note the code of a run, and check the copy of it that may be here.

        Args:
            folder: where Flower copies it.
            bundle: the code as the server sent it, a zip archive.
        """
        self._bundles[folder] = bundle
        self.check()

    def check(self) -> None:
        """Remove each copy that is not as it was sent, so that Flower makes it again; say so."""
        for folder, bundle in self._bundles.items():
            try:
                self._check_one(folder, bundle)
            except OSError as error:
                print(f"goldfinch-supernode: remove {folder}, an incomplete copy of a run's code: {error}", flush=True)

    def _check_one(self, folder: Path, bundle: bytes) -> None:
        while folder.exists() and not _is_whole(folder, bundle):
            if abs(time.time() - _last_change(folder)) < self.quiet_seconds:
                time.sleep(self.quiet_seconds / 10)
                continue
            print(f"goldfinch-supernode: removing {folder}, an incomplete copy of a run's code", flush=True)
            shutil.rmtree(folder)


def _is_whole(folder: Path, bundle: bytes) -> bool:
    """Return whether each file of a bundle is in a folder as it was sent."""
    with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
        for name in archive.namelist():
            if name.startswith(MANIFEST) or name.endswith("/"):
                continue
            try:
                if (folder / name).read_bytes() != archive.read(name):
                    return False
            except OSError:
                return False
    return True


def _last_change(folder: Path) -> float:
    """Return when a copy was last written to, by what makes it and not by what runs it; 0 if it has gone."""
    last = 0.0
    for path in (folder, *folder.rglob("*")):
        if CACHE in path.parts:
            continue
        with contextlib.suppress(OSError):  # removed meanwhile
            last = max(last, path.lstat().st_ctime)
    return last
