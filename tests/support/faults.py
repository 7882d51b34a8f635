"""Tools of the tests that break things: numbers of trials, real processes to kill, small disks to fill."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from goldfinch.commands.deployment import LocalDeployment
from server.flower.processes import marked

PATIENCE = 600.0
"""Seconds after which something that must happen is held not to: far beyond what a crowded machine needs."""


def trials(usual: int) -> int:
    """How often to try: ``usual``, or the value of GOLDFINCH_TRIALS."""
    return int(os.environ.get("GOLDFINCH_TRIALS", usual))


def wait_until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """What ``condition`` gives, as soon as it is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen within {seconds:g} s")


def events(folder: Path, *names: str) -> list[dict[str, Any]]:
    """Events of the run in ``folder``, complete lines only; those of ``names`` if any are given."""
    path = folder / "events.jsonl"
    text = path.read_text() if path.exists() else ""
    found = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [entry for entry in found if not names or entry["event"] in names]


# ---- processes -------------------------------------------------------------------------------------------------------


def forked(work: Callable[..., None], *arguments: Any) -> Any:
    """``work`` started in a process of its own: one fork of a process that has imported everything already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.killable"])
    tests = Path(__file__).resolve().parents[1]
    with pytest.MonkeyPatch.context() as patch:  # the forking process gets no sys.path, so it would import nothing
        patch.setenv("PYTHONPATH", f"{tests}{os.pathsep}{tests.parent}")
        process = context.Process(target=work, args=arguments)
        process.start()
    return process


def started_by(deployment: LocalDeployment, name: str) -> dict[int, str]:
    """Processes that live and belong to a node or, as ``superlink``, to the SuperLink: ids and command lines.

    They are known by their Flower home, since Flower starts sessions of its own.
    """
    home = deployment.home if name == "superlink" else deployment.folder / "nodes" / name
    found = {}
    for process in marked(deployment.processes.mark):
        with contextlib.suppress(OSError):
            entry = Path("/proc") / str(process)
            if f"FLWR_HOME={home}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[process] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return found


def kill_node(deployment: LocalDeployment, name: str) -> int:
    """SIGKILL for the SuperNode alone, not for what it started; its process id."""
    process = deployment.children[name].process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return process.pid


def node_log(deployment: LocalDeployment, name: str) -> str:
    """Return what a node has logged, over all its starts."""
    return deployment.children[name].log.read_text(errors="replace")


def restart_until_admitted(deployment: LocalDeployment, name: str, pause: float = 3.0) -> int:
    """What a restart policy does: start the node again until the SuperLink lets it in; how many starts it took."""
    before = node_log(deployment, name).count("SuperNode ID:")
    end = time.monotonic() + PATIENCE
    starts = 0
    while time.monotonic() < end:
        process = deployment.start_node(name).process
        starts += 1
        while process.poll() is None and time.monotonic() < end:
            if node_log(deployment, name).count("SuperNode ID:") > before:
                return starts
            time.sleep(0.1)
        time.sleep(pause)
    raise AssertionError(f"{name} was not admitted again:\n{deployment.children[name].tail()}")


# ---- disks -----------------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Callable[[str], None]]:
    """A disk of its own at ``place``; gives a function that changes its mount options (``size=``, ``ro``, ``rw``)."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root, to mount a small disk")
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "goldfinch-test", str(place)], check=False)
    if made.returncode:
        pytest.skip("this container may not mount")

    def change(options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(place)], check=True)

    try:
        yield change
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=False)
