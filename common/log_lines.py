"""Lines of a log without colours and with their time (UTC), of a program and of all that it starts.

::

    python -m common.log_lines PROGRAM ARGUMENT ...

Flower's programs colour their lines and mostly leave out the time, and so do the processes that they start. All of
them inherit the program's output. So the output that is no terminal becomes a pipe, and one small process copies the
lines from that pipe to where the output went before. The process ends when the last writer has ended, and ignores the
signals that end the others, so that their last lines arrive.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

COPY = "--copy"
"""First argument of the process that copies lines; ``SOURCE:TARGET`` follow, two file descriptors each."""

STREAM = "GOLDFINCH_LOG_STREAM"
"""Environment variable with the pipes whose lines are copied already, so that a program in a program adds no second."""

IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end a program, and that the process that copies its lines does not take."""

MAX_LINE = 1 << 16
"""Bytes after which a line is ended."""

END_SECONDS = 2.0
"""How long :func:`wait_for_lines` waits for the last lines."""

ESCAPES = re.compile(
    rb"(?:\x1b\[|\xc2\x9b)[0-?]*[ -/]*[@-~]"  # such as colours
    rb"|(?:\x1b\]|\xc2\x9d)(?:[^\x07\x1b\xc2]|\xc2(?!\x9c))*(?:\x07|\x1b\\|\xc2\x9c)"  # such as a window's title
    rb"|\x1b[@-Z\\-_]?"
    rb"|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]"
    rb"|\xc2[\x80-\x9f]"  # the same characters of eight bits
)

HAS_TIME = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)\b")


def plain_line(line: bytes) -> bytes:
    """Return a line without escape sequences and control characters; tabs stay."""
    return ESCAPES.sub(b"", line)


def timed(line: bytes, seconds: float) -> bytes:
    """Return a plain line that begins with a time (UTC): its own, or else the given one.

    Args:
        line: the line, without its end.
        seconds: since 1970.
    """
    text = plain_line(line).rstrip()
    if HAS_TIME.match(text):
        return text
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return (f"{whole}.{int(seconds * 1000) % 1000:03d}Z ".encode() + text).rstrip()


def filtered(targets: Sequence[int]) -> tuple[subprocess.Popen[bytes], list[int]]:
    """Start a process that copies lines to each of ``targets``, plain and with their time.

    Args:
        targets: file descriptors.

    Returns:
        The process, and for each target the file descriptor that takes its lines. Close them when they are passed on.
    """
    sources: list[int] = []
    ends: list[int] = []
    for _ in targets:
        source, end = os.pipe()
        sources.append(source)
        ends.append(end)
    pairs = [f"{source}:{target}" for source, target in zip(sources, targets, strict=True)]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)  # a new process inherits what is blocked
    try:
        process = subprocess.Popen(  # noqa: S603  # this file, no shell
            [sys.executable, "-I", "-S", __file__, COPY, *pairs],
            stdin=subprocess.DEVNULL,
            pass_fds=[*sources, *targets],
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for source in sources:
            os.close(source)
    return process, ends


def streams(ends: Sequence[int]) -> str:
    """Return the value of :data:`STREAM` for programs that write to ``ends``."""
    return " ".join([_identity(end) for end in ends])


def copy_own_lines() -> subprocess.Popen[bytes] | None:
    """Let the lines of this process, and of all that it starts, be copied where its output is no terminal.

    Returns:
        The process that copies; ``None`` if all output is a terminal, or is copied already.
    """
    copied = os.environ.get(STREAM, "").split()
    outputs: list[int] = []
    for output in (1, 2):
        if not os.isatty(output) and _identity(output) not in copied:
            outputs.append(output)
    if not outputs:
        return None
    sys.stdout.flush()
    sys.stderr.flush()
    process, ends = filtered(outputs)
    os.environ[STREAM] = streams(ends)
    for output, end in zip(outputs, ends, strict=True):
        os.dup2(end, output)
        os.close(end)
    return process


def wait_for_lines(process: subprocess.Popen[bytes] | None) -> None:
    """Wait until the last lines of this process are where they belong; it can write no more after that.

    Args:
        process: of :func:`copy_own_lines`.
    """
    if process is None:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    with contextlib.suppress(subprocess.TimeoutExpired):  # another process still writes
        process.wait(END_SECONDS)


def _copy(pairs: Sequence[str]) -> None:
    """Copy lines between the pairs of file descriptors until nobody writes any more."""
    selector = selectors.DefaultSelector()
    targets: dict[int, int] = {}
    begun: dict[int, bytes] = {}
    for pair in pairs:
        source, target = map(int, pair.split(":"))
        targets[source], begun[source] = target, b""
        selector.register(source, selectors.EVENT_READ)
    while targets:
        for key, _ in selector.select():
            source = key.fd
            read = os.read(source, MAX_LINE)
            *lines, rest = (begun[source] + read).split(b"\n")
            if rest and (not read or len(rest) >= MAX_LINE):
                lines.append(rest)
                rest = b""
            begun[source] = rest
            _write(targets[source], lines)
            if not read:
                selector.unregister(source)
                del targets[source]


def _write(target: int, lines: Sequence[bytes]) -> None:
    """Write lines; where they cannot be written, they are lost, and the programs go on."""
    now = time.time()
    content = b"".join([timed(line, now) + b"\n" for line in lines])
    with contextlib.suppress(OSError):
        while content:
            content = content[os.write(target, content) :]


def _identity(descriptor: int) -> str:
    status = os.fstat(descriptor)
    return f"{status.st_dev}:{status.st_ino}"


def main() -> None:
    """Copy lines, or run the program of the command line with its lines copied."""
    if sys.argv[1:2] == [COPY]:
        _copy(sys.argv[2:])
        return
    if len(sys.argv) < 2:
        sys.exit("usage: python -m common.log_lines PROGRAM ARGUMENT ...")
    copy_own_lines()
    try:
        os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606  # the program that was asked for
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error.strerror}")


if __name__ == "__main__":
    main()
