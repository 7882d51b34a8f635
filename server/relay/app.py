"""The relay's ServerApp: connects one SuperLink to the coordinator. It imports neither torch nor a method.

It authenticates itself with a token that it draws. It prints the SHA-256 of the token; the coordinator reads this from
the run's log, which only an operator of the SuperLink can read, and accepts a connection with that token. Devices see
the run's configuration, so no secret is in it: only the coordinator's address and its certificate.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
import time
from collections.abc import Mapping

import grpc
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from common.errors import EngineError
from common.versions import code_sha256
from server.relay.frames import (
    ANNOUNCEMENT,
    BEARER,
    CHANNEL_OPTIONS,
    NAME,
    STREAM,
    TOKEN,
    decode,
)
from server.relay.worker import ConnectionLost, RelayWorker, watch_superlink

START_SECONDS, PATIENCE_SECONDS = 240.0, 60.0
"""Seconds to reach the coordinator for the first time, and again after a connection broke."""

QUIET_SECONDS = 10.0
"""Seconds in which a failed connection is not reported: the coordinator has to read the log first."""

PAUSE_SECONDS = 1.0
"""Seconds between two attempts to connect."""

LAST_WORDS_SECONDS = 2.0
"""Seconds to send the reason for which the relay ends."""

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Relay messages until the coordinator ends the run.

    Raises:
        EngineError: the coordinator cannot be reached.
    """
    if not isinstance(grid, HttpGrid):
        raise EngineError("a relay needs a SuperLink of a deployment; this is Flower's simulation")
    address, certificate = coordinator_in(context.run_config)
    token = secrets.token_urlsafe(32)
    print(f"{ANNOUNCEMENT}{hashlib.sha256(token.encode()).hexdigest()}", flush=True)
    worker = RelayWorker(grid, code_sha256(), TaskIdentity.task_id)
    link = Link(worker, address, certificate, token)
    ended = threading.Event()

    def superlink_gone() -> None:
        """End this process: Flower would call its SuperLink for minutes."""
        link.leave("its SuperLink no longer answers")
        os._exit(1)

    def fetch() -> None:
        try:
            worker.fetch_replies(ended)
        except Exception as error:  # such as Flower's own when the run was stopped
            link.leave(f"its SuperLink refused a call: {error!r}")

    threads = [
        threading.Thread(target=fetch, daemon=True),
        threading.Thread(target=watch_superlink, args=(grid._addr, ended, superlink_gone), daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        link.keep()
    except Exception as error:
        link.leave(f"it failed: {error!r}")
        raise
    finally:
        ended.set()
    print("relay ended", flush=True)


def coordinator_in(run_config: Mapping[str, object]) -> tuple[str, bytes]:
    """Return the coordinator's ``host:port`` and its certificate, PEM, from a run's configuration.

    Raises:
        EngineError: they are not there.
    """
    address = str(run_config.get("relay-address", ""))
    certificate = str(run_config.get("relay-certificate", ""))
    if not address or not certificate:
        raise EngineError("this app is submitted by goldfinch run with engine.connections=[...], not on its own")
    return address, certificate.encode()


class Link:
    """The connection to the coordinator.

    Args:
        worker: handles the frames.
        address: the coordinator's ``host:port``.
        certificate: the only one that is trusted, PEM.
        token: the relay's own.
    """

    def __init__(self, worker: RelayWorker, address: str, certificate: bytes, token: str) -> None:
        self.worker = worker
        self.address = address
        self._token = token
        self._call: grpc.Call | None = None
        options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", NAME)]
        self._channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(certificate), options)

    def keep(self) -> None:
        """Connect, again after a connection broke, until one side ends it for good.

        Raises:
            EngineError: the coordinator could not be reached for too long, or it refuses this relay.
        """
        stream = self._channel.stream_stream(STREAM)
        began = time.monotonic()
        while self.worker.ended is None:
            out = self.worker.connected()
            problem = "the connection was closed"
            try:
                call = stream(out.encoded(), metadata=((TOKEN, BEARER + self._token),))
                self._call = call
                self.worker.serve(decode(content) for content in call)
            except grpc.RpcError as error:
                problem = f"{error.code().name}: {error.details()}"
            except ConnectionLost:
                pass
            finally:
                out.closed.set()
            if self.worker.ended is not None:
                break
            deadline = began + START_SECONDS
            if self.worker.heard:
                deadline = self.worker.heard + PATIENCE_SECONDS
            if time.monotonic() > deadline:
                raise EngineError(f"the coordinator at {self.address} cannot be reached: {problem}")
            if time.monotonic() > max(began, self.worker.heard) + QUIET_SECONDS:
                print(f"no connection to the coordinator at {self.address}: {problem}", flush=True)
            time.sleep(PAUSE_SECONDS)
        self._channel.close()
        if self.worker.ended:
            raise EngineError(self.worker.ended)

    def leave(self, reason: str) -> None:
        """Tell the coordinator why this relay ends, and close the connection."""
        self.worker.say_end(reason)
        time.sleep(LAST_WORDS_SECONDS)
        if self._call is not None:
            self._call.cancel()
