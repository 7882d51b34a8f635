"""Commands that wait say for what."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from goldfinch.cli import main
from goldfinch.commands import sweep
from goldfinch.trackers.wait_lines import wait_lines


def test_a_wait_is_said_until_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with wait_lines("waiting for nothing", every=0.05):
        time.sleep(0.3)
    said = capsys.readouterr().err
    assert "waiting for nothing, 0 s ..." in said
    with wait_lines("waiting for nothing", every=0.05) as heard:
        heard.set()
        time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_a_sweep_says_when_its_first_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep, "run_subprocess", lambda job, **more: (job, "no run is needed here"))
    assert main(["sweep", "method=fedavg", "seed=0,1", "--output", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr().out
    start = printed.index("starting seed=0; its log is ")
    assert printed.index("2 runs, 0 finished already") < start < printed.index("[1/2")
