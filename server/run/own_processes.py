"""Goldfinch's own commands as child processes: the runs of a sweep and the studies of a comparison."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO

from common.choices import folder_options
from common.errors import EngineError


class OwnProcesses:
    """A group of goldfinch's commands, started from threads. If the block around it fails, all are ended.

    Each command keeps its last complete round. No command starts after the first was ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: list[subprocess.Popen[bytes]] = []
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether the group was ended, so that no command starts any more."""
        with self._lock:
            return self._ended

    def __enter__(self) -> OwnProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.end()

    def start(
        self, words: Sequence[str], threads: int, log: IO[str] | None = None, more: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start ``goldfinch`` with the folders of ``--config-dir`` that this process was given.

        Args:
            words: the command and its arguments.
            threads: CPU threads.
            log: where its output goes; ``None`` is this process's output.
            more: environment variables.

        Raises:
            EngineError: the group was ended.
        """
        command = [sys.executable, "-P", "-m", "goldfinch.cli", *words]
        command += folder_options()
        errors = None
        if log is not None:
            errors = subprocess.STDOUT
        with self._lock:
            if self._ended:
                raise EngineError("stopped: no further process is started")
            process = subprocess.Popen(  # noqa: S603  # our own program, no shell
                command,
                env={**os.environ, "OMP_NUM_THREADS": str(threads), **(more or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=errors,
            )
            self._started.append(process)
        return process

    def end(self) -> None:
        """End all commands that run, and let none start any more."""
        with self._lock:
            self._ended = True
            for process in self._started:
                process.terminate()
