"""Every pin has hashes, and an archive with another hash is refused."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.federation import ROOT

HASHES = ROOT / "docker" / "hashes.txt"


@pytest.fixture(scope="module")
def checker() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docker" / "check_archives.py"))


@pytest.fixture
def check(checker: dict[str, Any], tmp_path: Path) -> Callable[..., int]:
    """Run the check on a report of packages, each a name, a version and a SHA-256 or ``None`` for a folder."""

    def run(packages: list[tuple[str, str, str | None]]) -> int:
        installed = []
        for name, version, digest in packages:
            origin = {"dir_info": {}} if digest is None else {"archive_info": {"hashes": {"sha256": digest}}}
            installed.append({"metadata": {"name": name, "version": version}, "download_info": origin})
        report = tmp_path / "report.json"
        report.write_text(json.dumps({"install": installed}))
        status: int = checker["main"]([str(report), str(HASHES)])
        return status

    return run


def pins() -> list[tuple[str, str]]:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    found = [re.match(r"([\w.-]+)(?:\[[\w,-]+\])?==([^\s;]+)", line) for line in lines]
    return [(pin[1], pin[2]) for pin in found if pin is not None]


def test_every_pin_has_hashes(checker: dict[str, Any]) -> None:
    known = checker["recorded"](HASHES.read_text())
    assert len(pins()) > 100
    assert {(checker["canonical"](name), version) for name, version in pins()} == set(known)
    assert all(known.values()), "a package without a hash"


def test_no_line_of_the_hashes_names_an_index() -> None:
    assert "://" not in HASHES.read_text()


def test_an_archive_as_recorded_passes(checker: dict[str, Any], check: Callable[..., int]) -> None:
    known = checker["recorded"](HASHES.read_text())
    digests = sorted(known["pyyaml", dict(pins())["pyyaml"]])
    for digest in digests:
        assert check([("PyYAML", dict(pins())["pyyaml"], digest), ("goldfinch-fl", "0.1.0", None)]) == 0


@pytest.mark.parametrize(
    ("package", "found"),
    [
        (("numpy", dict(pins())["numpy"], "0" * 64), "numpy .*: the archive's SHA-256 is 0000"),
        (("numpy", "0.0.1", "0" * 64), "numpy 0.0.1 is not in the list of hashes"),
        (("numpyy", "1.0", "0" * 64), "numpyy 1.0 is not in the list of hashes"),
    ],
)
def test_another_archive_is_refused(
    package: tuple[str, str, str], found: str, check: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert check([package]) == 1
    assert re.search(found, capsys.readouterr().err)


def test_an_environment_that_is_there_already_is_not_said_to_be_compared(tmp_path: Path) -> None:
    words = ["make", "--dry-run", "setup", "CHECK_HASHES=1", f"VENV={tmp_path}"]
    fresh = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "check_archives.py" in fresh.stdout, fresh.stderr
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    again = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.returncode != 0
    assert f"remove {tmp_path}" in again.stderr
