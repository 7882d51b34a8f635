"""Who submits runs and the SuperLink's user share a results folder, or a run is refused before it begins."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.toy import toy_settings

from common.errors import ConfigError
from server.run.conduct import prepare_output

SUPERLINK_USER, GROUP = 65_534, 65_533


@pytest.fixture
def results() -> Iterator[Path]:
    """A folder that another user can reach, unlike those of tests."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to be two users")
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def superlink() -> Iterator[None]:
    """Be the user of the SuperLink."""
    groups = os.getgroups()
    os.setgroups([GROUP])
    os.seteuid(SUPERLINK_USER)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setgroups(groups)


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_only_the_submitter_can_write_is_refused(results: Path, resume: bool) -> None:
    prepare_output(toy_settings("fedavg", results / "run"))  # as the submitter does
    before = sorted(path.name for path in (results / "run").iterdir())
    with superlink(), pytest.raises(ConfigError, match=r"cannot write to .*run: .*need one group and a results folder"):
        prepare_output(toy_settings("fedavg", results / "run", overrides=("resume=true",) if resume else ()))
    assert sorted(path.name for path in (results / "run").iterdir()) == before


def test_in_a_results_folder_of_the_group_both_can_write(results: Path) -> None:
    os.chown(results, 0, GROUP)
    results.chmod(0o2775)
    prepare_output(toy_settings("fedavg", results / "run"))
    with superlink():
        prepare_output(toy_settings("fedavg", results / "run"))
        (results / "run" / "events.jsonl").touch()
    assert (results / "run").stat().st_gid == GROUP
