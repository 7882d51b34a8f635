"""Runs that other processes start, so that they can be killed without mercy. Imports everything that a run needs."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import torch
from support.runs import run
from support.toy import composed, toy_settings

from common.errors import GoldfinchError

torch.set_num_threads(1)
for _method in ("fpl", "moon", "scaffold"):
    composed(f"method={_method}", "engine=inline", "train.device=cpu")


def go_on(folder: str, method: str, rounds: int, **more: Any) -> None:
    """A run in ``folder`` from where it is to its end."""
    os.environ["OMP_NUM_THREADS"] = "1"
    run(toy_settings(method, Path(folder), train={"rounds": rounds}, resume=True, **more))


def with_small_files(folder: str, method: str, rounds: int, limit: int, place: str) -> None:
    """The same, where no file may be larger than ``limit`` bytes; how it failed goes to the file ``place``."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        go_on(folder, method, rounds)
    except GoldfinchError as error:
        Path(place).write_text(str(error))
