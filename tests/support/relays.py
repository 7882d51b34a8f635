"""Relays in this process: real workers over a real gRPC connection, with SuperLinks that are only state."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from flwr.supercore.task_identity import TaskIdentity
from support.grids import TASK, Answer, Deployment

from common.versions import code_sha256
from server.relay.app import Link
from server.relay.coordinator import Coordinator, Shard
from server.relay.grid import RelayedGrid
from server.relay.worker import RelayWorker

ONE_AT_A_TIME = threading.Lock()


class SharedDeployment(Deployment):
    """A grid. Its nodes work while no other grid's do, because they share this process's devices.

    They wait for the objects of messages, as SuperNodes do; the relay pushes those one by one.
    """

    def __init__(self, *answers: Answer, held: int = 0) -> None:
        self.missing: set[str] = set()
        super().__init__(*answers, held=held)

    def __getattr__(self, name: str) -> Any:
        call = super().__getattr__(name)

        def noted(request: Any) -> Any:
            with ONE_AT_A_TIME:
                response = call(request)
                if name == "PushMessages":
                    self.missing.update(response.objects_to_push)
                if name == "PushObject":
                    self.missing.discard(request.object_id)
                return response

        return noted

    def work(self) -> None:
        if not self.missing:
            super().work()


class LocalRelay:
    """A relay with its threads."""

    def __init__(self, coordinator: Coordinator, shard: Shard, grid: Deployment, code: str | None = None) -> None:
        self.token = f"token of {shard.name} {id(self)}"
        self.worker = RelayWorker(grid, code or code_sha256(), TASK)
        self.ended = threading.Event()
        self.link = Link(self.worker, coordinator.address, coordinator.certificate, self.token)
        self.errors: list[str] = []
        coordinator.accept(hashlib.sha256(self.token.encode()).hexdigest(), shard)
        self.threads = [
            threading.Thread(target=self.worker.fetch_replies, args=(self.ended,), daemon=True),
            threading.Thread(target=self._keep, daemon=True),
        ]
        for thread in self.threads:
            thread.start()

    def _keep(self) -> None:
        try:
            self.link.keep()
        except Exception as error:
            self.errors.append(str(error))

    def kill(self) -> None:
        """It ends without a word."""
        self.ended.set()
        self.worker.ended = "killed"
        if self.link._call is not None:
            self.link._call.cancel()
        for thread in self.threads:
            thread.join(10)


class Relayed:
    """Several SuperLinks under one coordinator."""

    def __init__(self, *grids: Deployment) -> None:
        self.grids = grids
        self.notices: list[str] = []
        self.shards = [Shard(chr(ord("a") + place)) for place in range(len(grids))]
        self.coordinator = Coordinator(self.shards, "127.0.0.1:0")
        self.relays = [
            LocalRelay(self.coordinator, shard, grid) for shard, grid in zip(self.shards, grids, strict=True)
        ]
        self.grid = RelayedGrid(self.shards, self.notices.append)
        self.wait(lambda: all(shard.ready for shard in self.shards))

    @staticmethod
    def wait(condition: Callable[[], Any], seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.01)

    def wait_for_nodes(self) -> None:
        """Until the nodes of all SuperLinks are listed."""
        count = sum(len(grid.world.nodes) for grid in self.grids)
        self.wait(lambda: len(list(self.grid.get_nodes())) == count, 60)

    def close(self) -> None:
        self.coordinator.close()
        for relay in self.relays:
            relay.kill()


@contextlib.contextmanager
def relayed(*grids: Deployment) -> Iterator[Relayed]:
    """SuperLinks with relays; ended after the block."""
    before = (TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id)
    there = Relayed(*grids)
    try:
        yield there
    finally:
        there.close()
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = before
