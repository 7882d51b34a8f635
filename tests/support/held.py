"""Methods for tests of lost replies: a client waits after its training, before its state is kept, while told to.

They are not part of the application: nodes find them on PYTHONPATH, settings by ``method._target_=held.HeldFedRep``.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from common.config import checked
from strategies.core.method import ClientContext, Trained, Upload
from strategies.fedrep import FedRep
from strategies.scaffold import SCAFFOLD

PATIENCE = 900.0
"""Longest wait in seconds."""


def hold(local: ClientContext) -> None:
    """Wait while the folder ``HELD_ORDERS`` has ``CLIENT.hold.ROUND``; ``CLIENT.held.ROUND`` says that it waits."""
    folder = os.environ.get("HELD_ORDERS")
    if folder is None:
        return
    order = Path(folder, f"{local.client.id}.hold.{local.round}")
    if not order.exists():
        return
    Path(folder, f"{local.client.id}.held.{local.round}").touch()
    end = time.monotonic() + PATIENCE
    while order.exists() and time.monotonic() < end:
        time.sleep(0.05)


@checked
class HeldFedRep(FedRep):
    """FedRep."""

    def upload(self, local: ClientContext, trained: Trained) -> Upload:
        hold(local)
        return super().upload(local, trained)


@checked
class HeldSCAFFOLD(SCAFFOLD):
    """SCAFFOLD."""

    def upload(self, local: ClientContext, trained: Trained) -> Upload:
        hold(local)
        return super().upload(local, trained)
