"""The containers for real: make test-compose. Minutes, and an image build the first time."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest
from support.federation import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(not os.environ.get("GOLDFINCH_COMPOSE"), reason="set GOLDFINCH_COMPOSE=1 (make test-compose)"),
    pytest.mark.skipif(shutil.which("docker") is None, reason="Docker is not installed"),
]


def test_the_demonstration_works_and_leaves_nothing() -> None:
    result = subprocess.run(
        [str(ROOT / "docker" / "demo.sh")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    print(result.stdout)
    assert result.returncode == 0, result.stdout[-4000:]
    output = result.stdout
    assert len(re.findall(r"enrolled as \d+", output)) == 4
    assert output.count(": 403 ") == 2  # from inside a device: submit a run, enrol a node
    assert len(re.findall(r"round \d+: [34] of 4 nodes trained", output)) == 6
    lost = re.search(r"round [23]: 3 of 4 nodes trained .*sketch-0 lost", output)
    back_in_time = "sketch-0 was back before its round was closed and was missed in none" in output
    assert lost or back_in_time, "the node that was killed is told"
    assert "round 6: 4 of 4 nodes trained" in output
    assert "done: everything worked, nothing is left running" in output
