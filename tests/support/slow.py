"""A method for tests of deadlines: FedAvg that takes its time, one client twenty times as much.

It is not part of the application: nodes find it on PYTHONPATH, settings by ``method._target_=slow.Slow``.
"""

from __future__ import annotations

import os
import time

from common.config import checked
from strategies.core.method import ClientContext
from strategies.fedavg import FedAvg


@checked
class Slow(FedAvg):
    """``SLOW_SECONDS`` before each training; twenty times that for the client ``SLOW_STRAGGLER``."""

    def begin(self, local: ClientContext) -> None:
        straggles = local.client.id == os.environ["SLOW_STRAGGLER"]
        time.sleep(float(os.environ["SLOW_SECONDS"]) * (20 if straggles else 1))
        super().begin(local)
