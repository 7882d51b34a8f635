"""docs/first-deployment.md, block by block as it stands: three devices, from images to an evaluation."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.scripts import ROOT

from server.flower.processes import MARK, marked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PORTS = range(9093, 9097)


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """The mark of all processes that the page starts; they are killed after the test, by id."""
    name = f"first-deployment-{os.getpid()}"
    yield name
    left = marked(name)
    while left:
        for process in left:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.2)
        left = marked(name)


def taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_page_s_commands_run_as_they_stand(tmp_path: Path, mark: str) -> None:
    busy = [port for port in PORTS if taken(port)]
    if busy:
        pytest.skip(f"ports {busy} of the page are taken")
    page = (ROOT / "docs" / "first-deployment.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 5
    script = tmp_path / "page.sh"
    script.write_text("set -eu\n" + "".join(f"echo '== block {n}'\n{block}" for n, block in enumerate(blocks)))
    programs = str(Path(sys.executable).parent)
    environment = {**os.environ, MARK: mark, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    place = tmp_path / "a folder"
    place.mkdir()
    done = subprocess.run(
        ["bash", str(script)],
        cwd=place,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=(tmp_path / "printed").open("w"),
        stderr=subprocess.STDOUT,
        timeout=1500,
        check=False,
    )
    printed = (tmp_path / "printed").read_text()
    assert done.returncode == 0, printed
    assert re.search(r"waiting for ward-b-0 for \d+ s", printed), "the lost device is named"
    events = [json.loads(line) for line in (place / "runs/first/events.jsonl").read_text().splitlines()]
    rounds = {entry["round"]: entry for entry in events if entry["event"] == "round"}
    done = [entry["round"] for entry in events if entry["event"] == "round done"]
    assert done == [1, 2, 3, 4, 5, 6]
    lost = [entry for entry in events if entry["event"] == "client lost"]
    assert {entry["client"] for entry in lost} == {"ward-b-0"}
    assert rounds[1]["clients"] == ["ward-a-0", "ward-b-0", "ward-c-0"]
    assert rounds[6]["clients"] == ["ward-a-0", "ward-b-0", "ward-c-0"]
    summary = json.loads((place / "runs/evaluated/summary.json").read_text())
    assert set(summary["scores"]["final"]["accuracy"]) == {"ward-a", "ward-b", "ward-c"}
    time.sleep(5.0)
    assert not any(map(taken, PORTS)), "the last line stops what the page started"
