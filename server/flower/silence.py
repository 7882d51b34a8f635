"""A SuperLink that no longer answers ends the server's process, which would wait for it without limit."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from math import inf


class SilenceLimit:
    """Ends the process if a call inside the ``with`` block takes too long.

    Flower repeats a call to a SuperLink without limit. A SuperLink that received SIGTERM closes its port and waits for
    the server process, which waits for the SuperLink. The last complete round is in the checkpoint by then.

    Args:
        seconds: longest time that a call may take; infinity sets no limit.
        on_silence: called with the reason before the process ends.
    """

    def __init__(self, seconds: float, on_silence: Callable[[str], None] | None = None) -> None:
        self.seconds = seconds
        self.on_silence = on_silence
        self._calls: list[threading.Timer] = []

    def __enter__(self) -> None:
        if self.seconds == inf:
            return
        timer = threading.Timer(self.seconds, self._end)
        timer.daemon = True
        timer.start()
        self._calls.append(timer)

    def __exit__(self, *_: object) -> None:
        if self._calls:
            self._calls.pop().cancel()

    def _end(self) -> None:
        print(
            f"error: the SuperLink has not answered for {self.seconds:.0f} s; complete rounds are kept: start the "
            "SuperLink again, and resume=true goes on",
            file=sys.stderr,
            flush=True,
        )
        if self.on_silence is not None:
            with contextlib.suppress(OSError):  # a full disk must not keep the process
                self.on_silence(f"the SuperLink has not answered for {self.seconds:.0f} s")
        os._exit(1)  # Flower's own end of the process would wait for the SuperLink, too
