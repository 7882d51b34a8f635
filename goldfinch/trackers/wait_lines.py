"""Lines of a command that waits: what for, and for how long already."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

EVERY_SECONDS = 5.0
"""Seconds between two lines."""


@contextlib.contextmanager
def wait_lines(what: str, every: float = EVERY_SECONDS) -> Iterator[threading.Event]:
    """Print to standard error what the block waits for, and for how long already, every ``every`` seconds.

    Args:
        what: a text such as ``waiting for the SuperLink``.
        every: seconds, > 0.

    Yields:
        An event that ends the lines before the block does.
    """
    began = time.monotonic()
    done = threading.Event()

    def say() -> None:
        while not done.wait(every):
            print(f"{what}, {time.monotonic() - began:.0f} s ...", file=sys.stderr, flush=True)

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield done
    finally:
        done.set()
        thread.join()
