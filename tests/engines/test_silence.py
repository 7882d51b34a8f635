"""A SuperLink that does not answer ends the server process, which Flower would let wait without limit."""

import subprocess
import sys
import time

from server.engines.flower import SilenceLimit

SCRIPT = """
import time
from server.engines.flower import SilenceLimit
with SilenceLimit(0.5):
    time.sleep(60)
"""


def test_a_call_beyond_the_limit_ends_the_process_with_a_message() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "the SuperLink has not answered" in done.stderr
    assert "resume=true" in done.stderr


def test_a_call_within_the_limit_leaves_no_timer() -> None:
    limit = SilenceLimit(0.2)
    with limit:
        pass
    time.sleep(0.4)  # the process would have ended
    assert not limit._calls
