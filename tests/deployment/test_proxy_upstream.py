"""How the shipped reverse proxy reaches its SuperLink: over few connections, and at another address once it has one."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.federation import NGINX
from support.proxies import started_proxy, started_upstream

from server.admission.certificates import Certificates

pytestmark = [
    pytest.mark.processes,
    pytest.mark.long,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed (apt install nginx)"),
]

GETENT = """#!/bin/sh
[ "$1" = ahostsv4 ] && [ "$2" = superlink ] && [ -s "$ADDRESS_FILE" ] || exit 2
echo "$(cat "$ADDRESS_FILE") STREAM superlink"
"""
"""A getent that finds the name superlink at the address that a file has."""


def test_requests_of_many_devices_share_few_connections(tmp_path: Path) -> None:
    """Each connection costs the SuperLink a TLS handshake."""
    with started_proxy(tmp_path) as proxy:
        before = proxy.upstream.requests
        connected = proxy.upstream.connections
        for _ in range(30):
            assert proxy.post(100, path="pull-messages") == 200
        assert proxy.upstream.requests == before + 30
        assert proxy.upstream.connections < connected + 15


def test_a_connection_is_closed_before_the_superlink_closes_it(tmp_path: Path) -> None:
    with started_proxy(tmp_path) as proxy:
        assert proxy.post(100) == 200
        connected = proxy.upstream.connections
        time.sleep(3)
        assert proxy.post(100) == 200
        assert proxy.upstream.connections == connected + 1


def test_polls_beyond_the_limit_wait_and_other_calls_do_not(tmp_path: Path) -> None:
    with started_proxy(tmp_path, GOLDFINCH_POLLS="8") as proxy, ThreadPoolExecutor(20) as pool:
        began = time.monotonic()
        polls = [pool.submit(proxy.post, 100, path="pull-messages") for _ in range(13)]
        assert proxy.post(100, path="send-node-heartbeat") == 200
        assert not all(poll.done() for poll in polls), "a heartbeat waited for the polls"
        assert [poll.result() for poll in polls] == [200] * 13
        assert time.monotonic() - began > 1.5  # four are the address's own; the others wait: it has four a second


def test_polls_that_would_wait_too_long_are_refused(tmp_path: Path) -> None:
    """A SuperNode gives a call 30 seconds; after status 503 it tries again. Another address has polls of its own."""
    with started_proxy(tmp_path, GOLDFINCH_POLLS="2") as proxy, ThreadPoolExecutor(30) as pool:
        polls = [pool.submit(proxy.post, 100, path="pull-messages") for _ in range(30)]
        time.sleep(1)
        other = pool.submit(proxy.post, 100, "127.0.0.2", "pull-messages")
        assert other.result() == 200
        assert not all(poll.done() for poll in polls)
        refused = sum(poll.result() == 503 for poll in polls)
        assert 1 <= refused <= 9  # 4 pass at once, 21 wait, and one more for each second that the thirty take to arrive


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has more than one loopback address")
def test_a_superlink_at_another_address_is_found(tmp_path: Path) -> None:
    """Its container was made again. While its name is not known, the last address counts."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "getent").write_text(GETENT)
    (programs / "getent").chmod(0o755)
    address = tmp_path / "address"
    address.write_text("127.0.0.1")
    assert NGINX is not None
    path = f"{programs}:{Path(NGINX).parent}:{os.environ['PATH']}"
    with started_proxy(tmp_path, "superlink", PATH=path, ADDRESS_FILE=str(address)) as proxy:
        assert proxy.post(100) == 200
        first = proxy.upstream
        with started_upstream(Certificates(tmp_path / "certificates"), "127.0.0.2", first.server_port) as second:
            address.write_text("")
            time.sleep(4)
            assert proxy.post(100) == 200
            assert second.requests == 0
            address.write_text("127.0.0.2")
            end = time.monotonic() + 20
            while second.requests == 0 and time.monotonic() < end:
                assert proxy.post(100) == 200
                time.sleep(0.2)
            before = first.requests
            for _ in range(10):
                assert proxy.post(100) == 200
            assert second.requests >= 10
            assert first.requests == before
