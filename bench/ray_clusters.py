"""Ray clusters on this machine: a raylet stands for a machine."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from server.flower.processes import QUIET, Processes, marked, program

TRIES = 5
"""How often a machine is started: Ray gives up after 30 s, which a crowded machine exceeds."""

PRIORITY = {"RAY_worker_niceness": "0"}
"""Ray would lower the priority of actors, which slows them down where other programs run."""


class RayCluster:
    """A cluster that grows by :meth:`add`.

    Args:
        processes: end with the cluster.
        folder: Ray's, with a short path.
    """

    def __init__(self, processes: Processes, folder: Path) -> None:
        self.processes, self.folder, self.address = processes, folder, ""

    def add(self, *options: str, **environment: str) -> int:
        """Start a machine; the first is the head. Return the process id of its raylet."""
        place = [f"--address={self.address}"]
        if not self.address:
            place = ["--head", "--port=0", f"--temp-dir={self.folder}", "--include-dashboard=false"]
        command = [program("ray"), "start", *place, *options, "--disable-usage-stats"]
        command += ["--object-store-memory=200000000"]
        before = set(self.raylets())
        for _ in range(TRIES):
            child = self.processes.start("ray", command, {**os.environ, **QUIET, **PRIORITY, **environment})
            if child.process.wait() == 0:
                break
            for process in set(self.raylets()) - before:
                os.kill(process, signal.SIGKILL)
        else:
            raise RuntimeError(f"Ray did not start:\n{child.tail()}")
        self.address = (self.folder / "ray_current_cluster").read_text()
        (raylet,) = set(self.raylets()) - before
        return raylet

    def raylets(self) -> list[int]:
        """Process ids of the machines that are up."""
        return [process for process in marked(self.processes.mark) if _name(process) == "raylet"]

    def actors(self) -> list[int]:
        """Process ids of the actors."""
        return [process for process in marked(self.processes.mark) if "Actor" in _name(process)]


def _name(process: int) -> str:
    """The command's first word, which Ray sets in its workers; empty if the process has ended."""
    try:
        words = psutil.Process(process).cmdline()
    except psutil.Error:
        return ""
    return Path(words[0]).name if words else ""


@contextmanager
def ray_cluster(logs: Path) -> Iterator[RayCluster]:
    """A cluster without machines; all that were added are stopped with the block."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    try:
        with Processes(folder / "cwd", logs) as processes:
            yield RayCluster(processes, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
