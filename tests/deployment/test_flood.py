"""Uploads of strangers, who are known to be none only when their body is complete: the shipped proxy holds few of them,
and not for long."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import pytest
from support.federation import NGINX
from support.proxies import started_proxy

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed (apt install nginx)"),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has more than one loopback address"),
]

PIECE = 5 * 2**20 + 1000
"""A part of an honest upload, as Flower cuts it."""

HELD = 64
"""Uploads of one address at a time."""


def test_uploads_that_are_held_leave_room_for_honest_ones_and_silence_ends_them(tmp_path: Path) -> None:
    with started_proxy(tmp_path) as proxy, contextlib.ExitStack() as held:
        strangers = []
        for _ in range(HELD - 1):
            strangers.append(held.enter_context(proxy.begin(PIECE)))
            strangers[-1].sendall(bytes(30_000))  # more than stays in memory
        assert proxy.post(PIECE) == 200, "the same address has room for one more"
        last = held.enter_context(proxy.begin(PIECE))
        last.sendall(bytes(30_000))
        assert [proxy.post(100_000) for _ in range(3)] == [503] * 3, "which a SuperNode takes for: try again"
        assert proxy.post(500, path="pull-messages") == 200, "small calls are not counted"
        assert proxy.post(PIECE, "127.0.0.2") == 200, "another address does not notice"
        assert proxy.post(7 * 2**20) == 413
        for secure in [*strangers, last]:
            assert secure.recv(100) == b""
        assert proxy.post(PIECE) == 200


def test_a_slow_upload_is_cut_at_any_pace(tmp_path: Path) -> None:
    with started_proxy(tmp_path, GOLDFINCH_PATIENCE="1") as proxy, proxy.begin(PIECE) as drip:
        drip.settimeout(0.05)
        end = time.monotonic() + 12
        ended = False
        while not ended and time.monotonic() < end:
            try:
                drip.sendall(b"\0")
                ended = drip.recv(100) == b""
            except TimeoutError:
                assert proxy.post(1000) == 200
            except OSError:
                ended = True
        assert ended
        assert proxy.post(PIECE) == 200
