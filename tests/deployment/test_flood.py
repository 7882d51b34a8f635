"""Uploads of strangers, who are known to be none only when their body is complete: the shipped proxy holds few of them,
and not for long."""

from __future__ import annotations

import contextlib
import ssl
import sys
import time
from pathlib import Path

import pytest
from support.federation import NGINX
from support.proxies import started_proxy, status

pytestmark = [
    pytest.mark.processes,
    pytest.mark.long,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed (apt install nginx)"),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has more than one loopback address"),
]

PIECE = 5 * 2**20 + 1000
"""A part of an honest upload, as Flower cuts it."""

HELD = 50
"""Uploads of one address at a time: 2 of the reserve and 48 of the shared part."""

POLL = b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\npoll"


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


@pytest.mark.parametrize("addresses", [2, 16])
def test_a_few_addresses_cannot_hold_all_uploads(tmp_path: Path, addresses: int) -> None:
    with started_proxy(tmp_path, silence=60) as proxy, contextlib.ExitStack() as held:
        strangers = []
        for number in range(addresses):
            for _ in range(120 // addresses + 10):
                strangers.append(held.enter_context(proxy.begin(PIECE, f"127.0.1.{number}")))
                strangers[-1].sendall(bytes(30_000))
        assert sum(answered(secure) for secure in strangers) > 10, "they have all they can get"
        first = held.enter_context(proxy.begin(PIECE, "127.0.0.2"))
        first.sendall(bytes(30_000))
        assert proxy.post(PIECE, "127.0.0.2") == 200, "a SuperNode sends two at a time"
        first.sendall(bytes(PIECE - 30_000))
        assert status(first) == 200


@pytest.mark.parametrize("addresses", [2, 16])
def test_a_few_addresses_cannot_use_all_polls(tmp_path: Path, addresses: int) -> None:
    """36 polls a second: 27 are shared, and 540 may wait for them."""
    with started_proxy(tmp_path, GOLDFINCH_POLLS="36") as proxy, contextlib.ExitStack() as held:
        strangers = []
        for number in range(640):
            strangers.append(held.enter_context(proxy.connect(f"127.0.1.{number % addresses}")))
        for secure in strangers:
            secure.sendall(POLL)
        assert [proxy.post(100, "127.0.0.2", "pull-messages") for _ in range(3)] == [200] * 3
        assert sum(answered(secure) for secure in strangers) < 400, "theirs are waiting"


def answered(secure: ssl.SSLSocket) -> bool:
    """Whether an answer has arrived."""
    secure.settimeout(0.0)
    try:
        return secure.recv(100) != b""
    except ssl.SSLWantReadError:
        return False


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
