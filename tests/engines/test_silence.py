"""A SuperLink that does not answer ends the server process, which Flower would let wait without limit."""

import subprocess
import sys
import time
from pathlib import Path

from server.flower.silence import SilenceLimit
from server.run.schema import read_lines

SCRIPT = """
import sys, time
from functools import partial
from pathlib import Path
from server.flower.silence import SilenceLimit
from server.run.resume import record_interruption
with SilenceLimit(0.5, partial(record_interruption, Path(sys.argv[1]))):
    time.sleep(60)
"""


def waits_too_long(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a process whose SuperLink does not answer, with its run in a folder."""
    words = [sys.executable, "-c", SCRIPT, str(folder)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_a_call_beyond_the_limit_ends_the_process_with_a_message(tmp_path: Path) -> None:
    done = waits_too_long(tmp_path)
    (event,) = read_lines(tmp_path / "events.jsonl")
    assert event["event"] == "interrupted"
    assert event["reason"].startswith("the SuperLink has not answered")
    assert done.returncode == 1
    assert "the SuperLink has not answered" in done.stderr
    assert "resume=true" in done.stderr


def test_a_finished_run_that_was_to_be_replaced_gets_no_other_end(tmp_path: Path) -> None:
    """Before its clients have registered, a new run with ``overwrite=true`` has touched nothing of the old one."""
    (tmp_path / "summary.json").write_text("{}")
    assert waits_too_long(tmp_path).returncode == 1
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_call_within_the_limit_leaves_no_timer() -> None:
    limit = SilenceLimit(0.2)
    with limit:
        pass
    time.sleep(0.4)  # the process would have ended
    assert not limit._calls
