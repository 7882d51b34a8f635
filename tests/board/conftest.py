"""One tiny strict comparison that the tests of this folder share; each works on a copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.boards import strict_command

from server.cli import main


@pytest.fixture(scope="session")
def strict_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedAvg and FedProto in-domain, as the command writes them."""
    folder = tmp_path_factory.mktemp("strict") / "runs"
    assert main(strict_command(folder, "fedproto", "--scores", "in_domain")) == 0
    return folder


@pytest.fixture
def runs(strict_runs: Path, tmp_path: Path) -> Path:
    """A copy of :func:`strict_runs`."""
    return Path(shutil.copytree(strict_runs, tmp_path / "runs"))
