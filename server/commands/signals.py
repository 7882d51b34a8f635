"""SIGTERM as Ctrl-C: what a service manager or a container sends ends a run as orderly as a person does."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM. It passes through the code as Ctrl-C does, so that programs which are stopped for one are for both."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Within the block, the first SIGTERM raises :class:`Terminated`; further ones are ignored while it unwinds.

    Outside the main thread, where Python has no signals, nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    # a handler and not SIG_IGN, which the programs started from here on would inherit
    signal.signal(signal.SIGTERM, lambda *_: None)  # stopping what was started must not be stopped half-way
    raise Terminated
