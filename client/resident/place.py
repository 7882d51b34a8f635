"""The socket of a node's resident trainer, the check of its peer, and the SuperNode it works for. Linux only."""

import contextlib
import os
import socket
import stat
import struct
import tempfile
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

LONGEST_PATH = 107
"""The longest path of a Unix socket that Linux accepts, in bytes."""

CREDENTIALS = struct.Struct("3i")
"""What ``SO_PEERCRED`` returns: process id, user id and group id."""


@dataclass(frozen=True)
class Process:
    """A process, told apart from a later process with the same id.

    Args:
        pid: its process id.
        started: when it started, in hundredths of a second since boot, which a change of the clock does not move.
    """

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        """Whether the process still runs. A zombie does not."""
        return running_process(self.pid) == self


def running_process(pid: int) -> Process | None:
    """Return the running process ``pid``, or ``None`` if there is none."""
    try:
        running = psutil.Process(pid)
        with running.oneshot():
            ended = running.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            return None if ended else Process(pid, round(100 * (running.create_time() - psutil.boot_time())))
    except psutil.Error:
        return None


def of_node() -> Process | None:
    """Return the SuperNode that this process works for, or ``None`` if there is none.

    A SuperNode starts a SuperExec, which starts this process. A SuperExec that was started by hand (``--isolation
    process``) stands for its SuperNode, which may be in another container. Without a SuperExec (in a simulation, in
    another program) nothing tells when to end a resident trainer, so there is none. There is none on systems other
    than Linux either, because the check of the socket's peer needs the Linux kernel.
    """
    parent = os.getppid()
    try:
        words = psutil.Process(parent).cmdline() if psutil.LINUX else []
    except psutil.Error:
        return None
    if not any(Path(word).name == "flower-superexec" for word in words[:3]):
        return None
    with contextlib.suppress(ValueError, IndexError):
        return running_process(int(words[words.index("--parent-pid") + 1]))
    return running_process(parent)


def socket_of(node: Process) -> Path:
    """Return the path of the socket of ``node``'s trainer, in a folder that only this user can enter.

    The lock next to it (``.lock``) lets one process at a time start a trainer.

    The folder is ``goldfinch-<user>`` in ``XDG_RUNTIME_DIR``, else in the folder for temporary files. A path in the
    node's state folder could be longer than Linux allows for a socket.

    Raises:
        OSError: no such folder could be made; the message gives the reason for each place that was tried.
    """
    refusals = []
    for path in _places(node):
        if len(os.fsencode(path)) > LONGEST_PATH:
            refusals.append(f"{path} is longer than a socket's path may be")
            continue
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            _check_private(path.parent)
        except OSError as error:
            refusals.append(str(error))
            continue
        return path
    raise OSError("; ".join(refusals))


def _places(node: Process) -> list[Path]:
    """Return the paths at which the socket of ``node``'s trainer can be, the best first."""
    bases = dict.fromkeys([os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"])  # noqa: S108
    return [Path(base, f"goldfinch-{os.getuid()}", f"{node.pid}-{node.started}.sock") for base in bases if base]


def _check_private(folder: Path) -> None:
    status = folder.lstat()  # not stat: any user can put a link into the folder for temporary files
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise OSError(f"{folder} is not a folder that only this user can enter (mode 0700); remove it")


def remove_files(node: Process) -> None:
    """Remove socket and lock of a node that has ended, or has ended all that it started and ends itself.

    No process waits for the lock then: a lock that is removed while another process waits for it would let two
    processes in.
    """
    for path in _places(node):
        with contextlib.suppress(OSError):
            _check_private(path.parent)
            path.unlink(missing_ok=True)
            path.with_suffix(".lock").unlink(missing_ok=True)


def remove_left_overs(folder: Path) -> None:
    """Remove the sockets and locks of nodes that ended without removing them."""
    for path in folder.iterdir():
        pid, _, started = path.stem.partition("-")
        numbers = pid.isdigit() and started.isdigit() and path.suffix in (".sock", ".lock")
        if numbers and not Process(int(pid), int(started)).alive:
            path.unlink(missing_ok=True)


def peer(connection: Connection) -> tuple[int, int]:
    """Return process id and user id of the process at the other end, which the kernel recorded as it connected."""
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as duplicate:
        credentials = duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    process_id, user_id, _ = CREDENTIALS.unpack(credentials)
    return process_id, user_id
