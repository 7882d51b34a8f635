"""SIGTERM ends a run as orderly as Ctrl-C does."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM, as a service manager or a container sends it."""


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


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Within the block, the first SIGTERM or Ctrl-C waits until the block ends.

    Use it where this thread takes a lock that other threads need. An exception out of a signal's handler can be raised
    between taking the lock and the block that gives it back; then the other threads wait for ever.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda number, _: arrived.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if arrived:
        signal.raise_signal(arrived[0])


def _terminate(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    # a handler and not SIG_IGN, which the programs started from here on would inherit
    signal.signal(signal.SIGTERM, lambda *_: None)  # stopping what was started must not be stopped half-way
    raise Terminated
