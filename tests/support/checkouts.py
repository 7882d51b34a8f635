"""Copies of the checkout, in which a file is changed as a person or an update changes it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.scripts import ROOT

PACKAGES = ("common", "strategies", "client", "server", "goldfinch", "conf")


def copied(place: Path) -> Path:
    """A copy of all packages, without what Python compiled."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, place / package, ignore=shutil.ignore_patterns("__pycache__"))
    return place


def replaced(checkout: Path, name: str, old: str, new: str) -> None:
    """Change one place of a file."""
    path = checkout / name
    text = path.read_text()
    assert old in text, f"{name} has changed; choose another place of it"
    path.write_text(text.replace(old, new, 1))


def python(checkout: Path, *words: str, folder: Path, code: int = 0) -> str:
    """What a Python process with the checkout's code prints, in ``folder``; it must end with the exit code."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "COLUMNS": "300", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def goldfinch(checkout: Path, *words: str, folder: Path, code: int = 0) -> str:
    """What ``goldfinch`` of the checkout prints."""
    return python(checkout, "-m", "goldfinch", *words, folder=folder, code=code)
