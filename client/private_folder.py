"""A folder of a device that no server reads: files for this user alone, a lock, and a secret."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from common.errors import DISK_ADVICE, DataError
from common.regular_files import MAX_TENSOR_FILE, check_regular, read_small
from common.storage import write_text

SECRET = "secret"  # noqa: S105  # the name of a file

LOCK = "lock"
"""File with the folder's lock. It stays, as the ledger next to it does: if it were removed while another process waits
for it, two processes would have it. The folder itself would not do, since network file systems lock files alone."""

SECRET_BYTES = 32

MOVE = (
    "or stop the node, move its whole state folder (with .privacy, what was spent), and name its new place in state-dir"
)
ALLOW = "let the node's user read and write there"
"""What to do with a folder or file of which the disk says nothing else (:data:`common.errors.DISK_ADVICE`)."""


def _remedy(error: OSError) -> str:
    return f"{DISK_ADVICE.get(error.errno or 0, ALLOW)}, {MOVE}"


class PrivateFolder:
    """A folder with files that only this user may read.

    Args:
        folder: created with the first file.
    """

    needs_secret: ClassVar[str] = ""
    """Name of the file whose content cannot be understood without the secret; empty if there is none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keyed_hash(self, *texts: str) -> str:
        """Return HMAC-SHA-256 (hex) of ``texts`` with the folder's secret, which is created on first use.

        Without the secret it reveals nothing about the texts; with the same secret, equal texts have equal hashes.

        Raises:
            DataError: the secret cannot be read or written, or is missing beside a file that needs it.
        """
        return self.keyed_hashes([texts])[0]

    def keyed_hashes(self, several: Sequence[Sequence[str]]) -> list[str]:
        """Return :meth:`keyed_hash` of each of several sequences of texts. The secret is read once."""
        secret = self._secret()
        hashes: list[str] = []
        for texts in several:
            hashes.append(hmac.new(secret, json.dumps(list(texts)).encode(), hashlib.sha256).hexdigest())
        return hashes

    def _secret(self) -> bytes:
        path = self.folder / SECRET
        with self._locked():
            remedy = "delete it"
            kept = self.folder / self.needs_secret
            if self.needs_secret and os.path.lexists(kept):
                remedy = f"restore it, because {kept} says nothing without it; deleting both forgets what it holds"
                if not os.path.lexists(path):
                    raise DataError(f"{path}, this device's secret, is missing: {remedy}")
            if not os.path.lexists(path):
                self._write(SECRET, secrets.token_hex(SECRET_BYTES) + "\n")
            try:
                key = bytes.fromhex(read_small(path))
            except (OSError, ValueError) as error:
                raise DataError(f"{path}, this device's secret, cannot be read: {error}; {remedy}") from error
        if len(key) != SECRET_BYTES:
            raise DataError(f"{path}, this device's secret, has {len(key)} bytes, not {SECRET_BYTES}; {remedy}")
        return key

    def _content(self, name: str, what: str) -> bytes | None:
        """Return the content of a file; ``None`` if it was never written. A link to nothing was: its disk is absent.

        Raises:
            DataError: it cannot be read, or is a folder or a pipe.
        """
        path = self.folder / name
        if not os.path.lexists(path):
            return None
        try:
            check_regular(path, MAX_TENSOR_FILE)
            return path.read_bytes()
        except OSError as error:
            reason = error.strerror or "it is not a regular file"
            raise DataError(f"{path}, {what}, cannot be read: {reason}; {_remedy(error)}") from error

    def _write(self, name: str, text: str) -> None:
        path = self.folder / name
        try:
            write_text(path, text, private=True)
        except OSError as error:
            raise DataError(
                f"{path} cannot be written, so nothing is sent: {error.strerror}; {_remedy(error)}"
            ) from error

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        import fcntl  # not on all systems; only private runs need it

        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            stream = (self.folder / LOCK).open("ab")
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError as error:
            raise DataError(
                f"{self.folder}, where this device keeps what it released and serves, cannot be written or locked, so "
                f"nothing is sent: {error.strerror}; {_remedy(error)}"
            ) from error
        with stream:
            yield
