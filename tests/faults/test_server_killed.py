"""A server process killed at any moment: the resumed run ends in the state of an undisturbed one."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support.faults import PATIENCE, forked, trials
from support.killable import go_on
from support.runs import run
from support.toy import toy_settings

ROUNDS = 4
METHODS = ("fpl", "moon", "scaffold")
"""State of the server alone; state of the clients; both."""

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By method: the run's SHA-256, its scores, and how long it takes."""
    found: dict[str, tuple[str, Any, float]] = {}

    def of(method: str) -> tuple[str, Any, float]:
        if method not in found:
            started = time.monotonic()
            done = run(toy_settings(method, tmp_path_factory.mktemp(method), train={"rounds": ROUNDS}))
            found[method] = done.sha256, done.summary["scores"], time.monotonic() - started
        return found[method]

    return of


@pytest.mark.parametrize("trial", range(trials(3)))
@pytest.mark.long
def test_a_killed_server_resumes_to_the_undisturbed_state(trial: int, undisturbed: Any, tmp_path: Path) -> None:
    """Killed once or twice, at random instants from its start to its end."""
    draw = random.Random(trial)
    method = METHODS[trial % len(METHODS)]
    sha256, scores, seconds = undisturbed(method)
    kills, wanted = 0, draw.choice((1, 2))
    while kills < wanted:
        process = forked(go_on, str(tmp_path), method, ROUNDS)
        time.sleep(draw.uniform(0.0, seconds))
        process.kill()
        process.join(PATIENCE)
        if process.exitcode == 0:  # it was faster than the kill: begin again
            shutil.rmtree(tmp_path)
            kills, seconds = 0, seconds / 2
            continue
        assert process.exitcode == -signal.SIGKILL
        kills += 1
    process = forked(go_on, str(tmp_path), method, ROUNDS)
    process.join(PATIENCE)
    assert process.exitcode == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["state_sha256"] == sha256
    assert summary["scores"] == scores
