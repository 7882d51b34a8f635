"""A method for tests of crashes: MOON that marks how far a client is, and waits there while a file tells it to.

It is not part of the application: nodes find it on PYTHONPATH, settings by ``method._target_=paced.Paced``.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from common.config import checked
from strategies.core.method import Batch, ClientContext, Losses
from strategies.moon import MOON

PATIENCE = 900.0
"""Longest wait in seconds."""


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names and bytes; the same for a client's state in memory and in its file."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(
            name.encode() + tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return found.hexdigest()


@checked
class Paced(MOON):
    """In the folder that ``PACED_ORDERS`` names, ``CLIENT.pause`` holds the ``PHASE@ROUND`` to wait in.

    ``CLIENT.PHASE.ROUND`` there says that the client is waiting.
    ``CLIENT.kept.ROUND`` holds the digest of the state that the client found of its own.
    """

    @property
    def personal(self) -> bool:
        """Every client scores, so that every client can be met while it evaluates."""
        return True

    @property
    def adapts(self) -> bool:
        return True

    def adapt(self, local: ClientContext) -> None:
        self._reach("evaluating", local)

    def begin(self, local: ClientContext) -> None:
        self._write(f"{local.client.id}.kept.{local.round}", digest(local.kept))
        super().begin(local)

    def loss(self, batch: Batch, local: ClientContext) -> Losses:
        self._reach("training", local)
        return super().loss(batch, local)

    def _reach(self, phase: str, local: ClientContext) -> None:
        order = Path(os.environ["PACED_ORDERS"], f"{local.client.id}.pause")
        place = f"{phase}@{local.round}"
        if not _says(order, place):
            return
        self._write(f"{local.client.id}.{phase}.{local.round}", str(os.getpid()))
        end = time.monotonic() + PATIENCE
        while _says(order, place) and time.monotonic() < end:
            time.sleep(0.05)

    def _write(self, name: str, text: str) -> None:
        path = Path(os.environ["PACED_ORDERS"], name)
        path.with_suffix(".tmp").write_text(text)
        path.with_suffix(".tmp").rename(path)


def _says(order: Path, place: str) -> bool:
    try:
        return order.read_text() == place
    except FileNotFoundError:
        return False
