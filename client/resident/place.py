"""Where a node's resident trainer listens, who may reach it, and whose life it shares. Linux only: :func:`of_node`."""

import contextlib
import os
import socket
import stat
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

LONGEST_PATH = 107
"""Bytes of a Unix socket's path that Linux takes."""


@dataclass(frozen=True)
class Process:
    """A process that cannot be taken for a later one with its number.

    Args:
        started: when it started, in hundredths of a second since boot: the time of day may be set in between.
    """

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        """Whether it still runs; one that has ended and was not waited for yet does not."""
        return process(self.pid) == self


def process(pid: int) -> Process | None:
    """The running process ``pid``; ``None`` if there is none."""
    try:
        found = psutil.Process(pid)
        with found.oneshot():
            ended = found.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            return None if ended else Process(pid, round(100 * (found.create_time() - psutil.boot_time())))
    except psutil.Error:
        return None


def of_node() -> Process | None:
    """The SuperNode that this process works for: a SuperExec started this process, and a SuperNode started that one.

    A SuperExec that somebody started by hand (``--isolation process``) stands for its SuperNode, which may be in
    another container. ``None`` if no SuperExec started this process (a simulation, a program of somebody's own): then
    nobody would know when to end a resident trainer, and there is none. Likewise where this is no Linux, whose kernel
    says who is at the other end of a socket.
    """
    parent = os.getppid()
    try:
        words = psutil.Process(parent).cmdline() if psutil.LINUX else []
    except psutil.Error:
        return None
    if not any(Path(word).name == "flower-superexec" for word in words[:3]):
        return None
    with contextlib.suppress(ValueError, IndexError):
        return process(int(words[words.index("--parent-pid") + 1]))
    return process(parent)


def socket_of(node: Process) -> Path:
    """The socket of ``node``'s trainer, in a folder that only this user can enter.

    The folder is ``goldfinch-<user>`` in ``XDG_RUNTIME_DIR``, else in the folder for temporary files: a path in the
    node's state folder could be longer than a socket's may be.

    Raises:
        OSError: no such folder can be had; the message says why for each place that was tried.
    """
    refusals = []
    for base in dict.fromkeys([os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"]):  # noqa: S108
        folder = Path(base) / f"goldfinch-{os.getuid()}"
        path = folder / f"{node.pid}-{node.started}.sock"
        if not base:
            continue
        if len(os.fsencode(path)) > LONGEST_PATH:
            refusals.append(f"{path} is longer than a socket's path may be")
            continue
        try:
            _make_private(folder)
        except OSError as error:
            refusals.append(str(error))
            continue
        return path
    raise OSError("; ".join(refusals))


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()  # not stat: the folder for temporary files is everybody's, and so are links in it
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise OSError(f"{folder} is not a folder that only this user can enter (mode 0700); remove it")


def remove_left_overs(folder: Path) -> None:
    """Remove sockets and locks of nodes that are gone without having had the time to."""
    for path in folder.iterdir():
        pid, _, started = path.stem.partition("-")
        numbers = pid.isdigit() and started.isdigit() and path.suffix in (".sock", ".lock")
        if numbers and not Process(int(pid), int(started)).alive:
            path.unlink(missing_ok=True)


def peer(connection: socket.socket) -> tuple[int, int]:
    """Process and user number of who is at the other end, as the kernel says."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", found)
    return pid, user
