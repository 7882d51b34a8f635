"""What continuous integration prints about the commands that need a Docker Engine."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest
from support.federation import ROOT
from support.scripts import load_script


@pytest.fixture(scope="module")
def last_run() -> ModuleType:
    return load_script("docker/last_run.py")


def test_a_command_is_described_by_when_it_ran_and_what_has_changed(last_run: ModuleType) -> None:
    entry = {"date": "2026-01-02", "engine": "28.0", "covered": "a"}
    assert last_run.describe("make x", None, "a") == "make x has never been recorded"
    assert "nothing that it covers has changed" in last_run.describe("make x", entry, "a")
    assert "files have changed" in last_run.describe("make x", entry, "b")
    assert "2026-01-02, Docker 28.0" in last_run.describe("make x", entry, "a")


def test_every_command_is_recorded_and_shown(last_run: ModuleType) -> None:
    assert set(last_run.recorded()) <= set(last_run.NAMES)
    shown = subprocess.run([sys.executable, last_run.__file__, "show"], capture_output=True, text=True, check=True)
    assert [line.split(" has ")[0].split(" last ")[0] for line in shown.stdout.splitlines()] == list(last_run.NAMES)
    makefile = (ROOT / "Makefile").read_text()
    for name in last_run.NAMES:
        assert f"docker/last_run.py record '{name}' \"$$covered\"" in makefile


def test_a_command_whose_files_were_changed_meanwhile_is_not_recorded(last_run: ModuleType) -> None:
    """A run of the demo recorded the code of after its start, which it had not run."""
    before = last_run.RECORD.read_text()
    arguments = [sys.executable, last_run.__file__, "record", last_run.NAMES[0], "0" * 64]
    ended = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "files that it covers were changed meanwhile; run it again" in ended.stderr
    assert last_run.RECORD.read_text() == before
