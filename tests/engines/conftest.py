"""A stand-in for a SuperNode, and a node that has questions for its resident trainer."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.trainers import Asked


@pytest.fixture
def supernode() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "3600"])
    yield child
    child.kill()  # its trainer goes with it
    child.wait()


@pytest.fixture
def asked(
    supernode: subprocess.Popen[bytes],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Asked:
    """Its socket is in a folder of the test's own, so that other runs on this machine are left alone."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("r")))
    return Asked(supernode, tmp_path)
