"""Replies through Flower's Grid, each read when its last part has arrived.

Flower's own ``pull_messages`` starts with a reply as soon as its sender has announced it. The call then waits up to two
hours for the reply's parts, and all other replies wait as well. Here a reply that is not complete is polled again
later.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

from flwr.app import Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp.grid import Grid
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.superlink.grid.http_grid import HttpGrid

from common.wire.payload import MAX_BYTES

MAX_REPLY_BYTES = MAX_BYTES + 2**20
"""Largest size of a reply: its tensors, and Flower's records around them."""

MAX_PARTS = 1_000
"""Most parts of a reply, each a call: Flower cuts tensors into parts of 5 MiB."""


@dataclass
class Announced:
    """A reply with parts that have not arrived.

    Args:
        identity: id of the reply's message.
        missing: ids of the parts that have not arrived.
        parts: the parts that have arrived, by id; without content if the reply is discarded.
        size: bytes of the parts that have arrived.
    """

    identity: str
    missing: list[str]
    parts: dict[str, bytes] = field(default_factory=dict)
    size: int = 0


class Inbox:
    """The replies that have arrived.

    Args:
        grid: Flower's own.

    Attributes:
        poll_seconds: seconds that the last poll took, without the transfer of parts.
        late: the node by message id; replies to these messages are discarded when they arrive.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.poll_seconds = 0.0
        self.late: dict[str, int] = {}
        self._announced: dict[str, Announced] = {}  # by the id of the message that is answered

    def pull(self, identities: set[str]) -> Iterator[tuple[str, Message | None]]:
        """Yield the complete replies to messages, each once.

        Replies to other messages are forgotten. Late replies are received too, so that the SuperLink does not keep
        them, and discarded.

        Args:
            identities: ids of the messages.

        Yields:
            The id of the message and the reply; ``None`` if its parts were lost, are too large, or make no message.
        """
        identities = identities | self.late.keys()
        if isinstance(self.grid, HttpGrid):
            replies = self._pull_http(self.grid, identities)
        else:
            replies = self._pull_in_memory(identities)
        for identity, message in replies:
            is_late = self.late.pop(identity, None) is not None
            if not is_late:
                yield identity, message

    def _pull_in_memory(self, identities: set[str]) -> Iterator[tuple[str, Message]]:
        """Yield the replies of a simulation's grid, in which every reply is complete."""
        if not identities:
            return
        began = time.monotonic()
        messages = list(self.grid.pull_messages(identities))
        self.poll_seconds = time.monotonic() - began
        while messages:
            message = messages.pop()  # so that the list does not hold a reply that was read
            yield message.metadata.reply_to_message_id, message

    def _pull_http(self, grid: HttpGrid, identities: set[str]) -> Iterator[tuple[str, Message | None]]:
        """Poll for new replies, fetch parts, and yield the replies that are complete or lost."""
        for identity in self._announced.keys() - identities:
            del self._announced[identity]
        began = time.monotonic()
        unannounced = identities - self._announced.keys()
        if unannounced:
            self._poll(grid, unannounced)
        self.poll_seconds = time.monotonic() - began
        for identity, reply in list(self._announced.items()):
            lost = self._fetch(grid, reply, keep=identity not in self.late)
            if reply.missing and not lost:
                continue
            del self._announced[identity]
            message = None
            if not lost:
                message = self._assemble(grid, reply)
            yield identity, message

    def _poll(self, grid: HttpGrid, identities: set[str]) -> None:
        """Ask the SuperLink which replies are announced."""
        pulled = grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=identities))
        for head, tree in zip(pulled.messages_list, pulled.message_object_trees, strict=True):
            parts = dict.fromkeys(part.object_id for part in iterate_object_tree(tree))  # unique, in order
            self._announced[head.metadata.reply_to_message_id] = Announced(head.metadata.message_id, list(parts))

    def _fetch(self, grid: HttpGrid, reply: Announced, *, keep: bool) -> bool:
        """Fetch the parts that have arrived. Return whether the reply is lost: a part is gone, or it is too large."""
        if len(reply.missing) > MAX_PARTS:
            return True
        while reply.missing:
            identity = reply.missing[-1]
            part = grid._runtime_client.PullObject(
                PullObjectRequest(node=grid.node, run_id=grid.run.run_id, object_id=identity)
            )
            if not part.object_available:
                return not part.object_found
            reply.missing.pop()
            reply.parts[identity] = b""
            if keep:
                reply.parts[identity] = part.object_content
            reply.size += len(part.object_content)
            if reply.size > MAX_REPLY_BYTES:
                return True
        return False

    def _assemble(self, grid: HttpGrid, reply: Announced) -> Message | None:
        """Return the message that the parts make, or ``None``; allow the SuperLink to delete them."""
        grid._runtime_client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=grid.node, run_id=grid.run.run_id, message_object_id=reply.identity)
        )
        try:
            return cast(Message, inflate_object_from_contents(reply.identity, reply.parts))
        except Exception:  # Flower can raise any type on parts that another program made
            return None
