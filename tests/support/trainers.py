"""A node with questions for its resident trainer. The SuperNode is a stand-in: a process that only sleeps."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import psutil

from client.resident.caller import Caller
from client.resident.messages import Question
from client.resident.place import Process, peer, running_process
from common.settings import load_settings
from common.wire.messages import Request, request_text
from common.wire.payload import encode
from strategies.core.federation import Federation

OVERRIDES = ["data.domains=[sketch,printed]", "protocol.samples=24", "train.batch_size=8", "train.device=cpu"]


class Asked:
    """One node.

    Args:
        supernode: whom the trainer works for.
        folder: the node's state.
        more: further overrides.
    """

    def __init__(self, supernode: subprocess.Popen[bytes], folder: Path, *more: str) -> None:
        self.supernode, self.folder = supernode, folder
        self.chosen = [*OVERRIDES, f"output={folder / 'output'}", *more]
        self.run_config = {"overrides": " ".join(self.chosen)}
        self.configuration = {"domain": "sketch", "state-dir": str(folder / "state")}
        node = running_process(supernode.pid)
        assert node is not None
        self.caller = Caller(node, self.configuration)

    def start(self) -> int:
        """Its trainer's process, started if need be; it has not imported torch yet."""
        with self.caller._connection() as connection:
            return peer(connection)[0]

    def registration(self) -> Question:
        return Question("register", 7, self.run_config, self.configuration)

    def training(self) -> Question:
        settings = load_settings(self.chosen)
        federation = Federation(settings)
        blob = encode(federation.message(federation.initial_state()))
        method = settings.method.name
        request = Request(
            "run", settings.identity, method, 1, "train", "sketch-0", 2, 1, train=True, score=["sketch"],
            code=settings.code,
        )  # fmt: skip
        text = request_text(request)
        return replace(self.registration(), kind="answer", request=text, tensor_type="safetensors", tensors=[blob])

    def trainer(self) -> int | None:
        """Return the process that listens, from the kernel; ``None`` if there is none."""
        try:
            probe = Client(os.fspath(self.caller.path), "AF_UNIX")
        except (FileNotFoundError, ConnectionError):
            return None
        with probe:
            return peer(probe)[0]

    def kill(self, pid: int | None) -> None:
        """End a trainer without giving it time for anything, and wait until it is gone."""
        assert pid, "there is a trainer"  # 0 would be this process's own group
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: gone(pid))


def gone(pid: int) -> bool:
    return running_process(pid) is None


def cpu_seconds(pid: int) -> float:
    """Of a process so far: what tells work from waiting, on a crowded machine too."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def wait_until_busy(pid: int, seconds: float) -> None:
    """Wait until the process has worked for so long from now on."""
    before = cpu_seconds(pid)
    wait_for(lambda: cpu_seconds(pid) >= before + seconds)


def identity_of(pid: int) -> Process:
    found = running_process(pid)
    assert found is not None
    return found


def wait_for(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """``work`` in a thread, and the list that its result or its exception is put into."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome
