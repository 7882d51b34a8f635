"""A PostgreSQL of a test's own, without a port: it listens on a socket in its folder."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SECONDS = 30


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """Start PostgreSQL, and return its URL; the test is skipped where there is no server or no driver."""
    programs = [shutil.which("postgres"), *map(str, Path("/usr/lib/postgresql").glob("*/bin/postgres"))]
    found = [Path(program).resolve() for program in programs if program]
    if not found or importlib.util.find_spec("psycopg") is None:
        pytest.skip("needs PostgreSQL's server, and psycopg")
    folder = Path(tempfile.mkdtemp(prefix="postgres-"))
    prefix: list[str] = []
    if os.geteuid() == 0:  # as which PostgreSQL refuses to start
        user = next(each for each in pwd.getpwall() if each.pw_name in ("postgres", "nobody"))
        os.chown(folder, user.pw_uid, user.pw_gid)
        prefix = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    initdb = [*prefix, str(found[0].with_name("initdb")), "-D", str(folder / "data"), "-A", "trust", "-U", "goldfinch"]
    subprocess.run([*initdb, "--no-sync"], check=True, capture_output=True, cwd=folder)
    words = ["-D", str(folder / "data"), "-k", str(folder), "-c", "listen_addresses=", "-c", "fsync=off"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*prefix, str(found[0]), *words], stdout=log, stderr=log, cwd=folder)
    try:
        until = time.monotonic() + SECONDS
        while "ready to accept connections" not in (folder / "log").read_text():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < until, (folder / "log").read_text()
            time.sleep(0.1)
        yield f"postgresql+psycopg://goldfinch@/postgres?host={folder}"
    finally:
        process.send_signal(signal.SIGQUIT)
        process.wait(SECONDS)
        shutil.rmtree(folder)
