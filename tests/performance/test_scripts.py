"""Every script of bench/, and the one that draws the picture, runs with ``--dry-run`` and writes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.scripts import ROOT, run_script

SCRIPTS = [path for path in sorted((ROOT / "bench").glob("*.py")) if "__main__" in path.read_text()]
SCRIPTS.append(ROOT / "docs" / "make_picture.py")
PROCESSES = {"light_nodes", "round_overhead", "round_time", "wire"}
"""Scripts that start a SuperLink or Ray."""

QUICK = {"data_path", "ratios"}
"""Scripts whose dry run is among the fast tests. mypy reads all of them."""


def marked(path: Path) -> object:
    marks = [pytest.mark.slow]
    if path.stem in PROCESSES:
        marks.append(pytest.mark.processes)
    elif path.stem in QUICK:
        marks = []
    return pytest.param(path, id=path.stem, marks=marks)


def written() -> dict[Path, int]:
    found = {}
    for folder in ("bench/results", "docs"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file():
                found[path] = path.stat().st_mtime_ns
    return found


@pytest.mark.parametrize("script", [marked(path) for path in SCRIPTS])
@pytest.mark.long
def test_a_script_runs_dry_and_writes_nothing(script: Path, tmp_path: Path) -> None:
    before = written()
    code, printed = run_script(script, ["--dry-run"], tmp_path / "empty")
    assert code == 0, printed[-3000:]
    assert printed.strip()
    assert list((tmp_path / "empty").iterdir()) == []
    assert written() == before


# A shell that starts the tests in the background without job control makes its children ignore SIGINT.
STARTS = """
import signal, subprocess, sys, time
from bench.measuring import start
signal.signal(signal.SIGINT, signal.default_int_handler)
def main():
    inner = (
        "import subprocess; quiet = subprocess.DEVNULL; "
        "print(subprocess.Popen(['sleep', '300'], start_new_session=True, stdout=quiet, stderr=quiet).pid)"
    )
    out = subprocess.run([sys.executable, "-c", inner], capture_output=True, text=True).stdout
    print(out.strip(), flush=True)
    ENDING
start(main)
"""


@pytest.mark.parametrize("ending", ["exception", "SIGINT", "SIGTERM"])
@pytest.mark.long
def test_what_a_script_started_ends_with_it(ending: str) -> None:
    """The started process is an orphan in a session of its own, as Flower's are."""
    last = "raise RuntimeError('over')" if ending == "exception" else "time.sleep(300)"
    command = [sys.executable, "-c", STARTS.replace("ENDING", last)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)
    assert script.stdout is not None
    orphan = int(script.stdout.readline())
    if ending != "exception":
        assert psutil.pid_exists(orphan)
        script.send_signal(signal.Signals[ending])
    script.communicate(timeout=120)
    assert script.returncode == {"exception": 1, "SIGINT": -signal.SIGINT, "SIGTERM": 128 + signal.SIGTERM}[ending]
    assert not psutil.pid_exists(orphan) or psutil.Process(orphan).status() == psutil.STATUS_ZOMBIE
