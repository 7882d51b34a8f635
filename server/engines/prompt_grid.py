"""Flower's Grid with answers picked up soon: its own ``send_and_receive`` looks for them every three seconds."""

from __future__ import annotations

import time
from collections.abc import Iterable

from flwr.app import Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.server.client_proxy import ClientProxy
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.serverapp.grid import Grid
from flwr.supercore.run import Run
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.grid.inmemory_grid import InMemoryGrid

LONGEST_SECONDS = 3.0
"""Flower's own interval."""

PATIENCE = 0.05
"""An answer that took t seconds is picked up at most 0.05 t seconds late."""

CALLS_PER_SECOND = 10.0
"""Of all threads of a server together: a look costs the SuperLink a few milliseconds."""

LOOKS_PER_SECOND = 200.0
"""The same in a simulation, where a look is a call in the same process."""


class PromptGrid(Grid):
    """A grid that looks for answers often at first, and ever more rarely.

    Args:
        grid: Flower's own.
        waiting: messages that other threads wait for at the same time, this one included.
    """

    def __init__(self, grid: Grid, waiting: int) -> None:
        self.grid = grid
        self.shortest = min(LONGEST_SECONDS, waiting / CALLS_PER_SECOND)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """See :class:`flwr.serverapp.Grid`. Answers arrive, or an error does in their place when their time is over."""
        waited_for = {identity for identity in self.grid.push_messages(messages) if identity}
        answers: list[Message] = []
        started = time.monotonic()
        while waited_for:
            found = list(self.grid.pull_messages(waited_for))
            answers += found
            waited_for -= {answer.metadata.reply_to_message_id for answer in found}
            elapsed = time.monotonic() - started
            if not waited_for or (timeout is not None and elapsed > timeout):
                break
            time.sleep(min(LONGEST_SECONDS, max(self.shortest, PATIENCE * elapsed)))
        return answers

    # ---- all else is the grid's own ----------------------------------------------------------------------------------

    def set_run(self, run: Run) -> None:
        """See :class:`flwr.serverapp.Grid`."""
        self.grid.set_run(run)

    @property
    def run(self) -> Run:
        """See :class:`flwr.serverapp.Grid`."""
        return self.grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """See :class:`flwr.serverapp.Grid`."""
        return self.grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """See :class:`flwr.serverapp.Grid`."""
        return self.grid.get_node_ids()

    def get_nodes(self) -> Iterable[NodeInfo]:
        """See :class:`flwr.serverapp.Grid`."""
        return self.grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """See :class:`flwr.serverapp.Grid`."""
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """See :class:`flwr.serverapp.Grid`."""
        return self.grid.pull_messages(message_ids)


def promptly(proxy: ClientProxy, waiting: int) -> ClientProxy:
    """``proxy`` with its answers picked up soon.

    Args:
        proxy: a node.
        waiting: nodes that are asked at the same time.
    """
    if not isinstance(proxy, GridClientProxy):
        return proxy
    if isinstance(proxy.grid, InMemoryGrid):  # a simulation's, which looks every tenth of a second
        proxy.grid.pull_interval = min(0.1, waiting / LOOKS_PER_SECOND)
        return proxy
    if not isinstance(proxy.grid, HttpGrid):
        return proxy
    return GridClientProxy(proxy.node_id, PromptGrid(proxy.grid, waiting), proxy.run_id)
