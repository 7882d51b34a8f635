"""Put on PYTHONPATH as ``sitecustomize.py``: Python's wall clock is then SKEWED_BY seconds off.

Monotonic clocks, sleeping and OpenSSL keep the true time.
"""

from __future__ import annotations

import datetime
import os
import time

_OFFSET = float(os.environ.get("SKEWED_BY", "0"))
_true_time, _True = time.time, datetime.datetime


class Skewed(_True):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Skewed:
        return super().now(tz) + datetime.timedelta(seconds=_OFFSET)


if _OFFSET:
    time.time = lambda: _true_time() + _OFFSET
    datetime.datetime = Skewed  # type: ignore[misc]  # what this file is for
