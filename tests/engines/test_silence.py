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


def test_a_call_beyond_the_limit_ends_the_process_with_a_message(tmp_path: Path) -> None:
    words = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    (event,) = read_lines(tmp_path / "events.jsonl")
    assert event["event"] == "interrupted"
    assert event["reason"].startswith("the SuperLink has not answered")
    assert done.returncode == 1
    assert "the SuperLink has not answered" in done.stderr
    assert "resume=true" in done.stderr


def test_a_call_within_the_limit_leaves_no_timer() -> None:
    limit = SilenceLimit(0.2)
    with limit:
        pass
    time.sleep(0.4)  # the process would have ended
    assert not limit._calls
