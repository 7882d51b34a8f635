"""Answers through Flower's Grid, each taken when its last part has come.

Flower's own ``pull_messages`` hands over an answer as soon as its sender has announced it, and then waits for its
parts, up to two hours, while all others wait behind it. Here an answer that is not complete is looked at again later.
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
"""Of an answer: its tensors, and Flower's words around them."""


@dataclass
class Announced:
    """An answer of which parts are missing, by their ids."""

    identity: str
    missing: list[str]
    parts: dict[str, bytes] = field(default_factory=dict)
    size: int = 0


class Inbox:
    """What has come.

    Args:
        grid: Flower's own.

    Attributes:
        took: seconds that the last look took, without the parts that were there.
        late: messages whose answers are thrown away when they come, and the nodes that they went to.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.took = 0.0
        self.late: dict[str, int] = {}
        self._announced: dict[str, Announced] = {}

    def pull(self, identities: set[str]) -> Iterator[tuple[str, Message | None]]:
        """The complete answers to messages of these ids, each once; ``None`` where its parts were lost or make none.

        Answers to all other messages are forgotten. Late ones are taken too, so that the SuperLink need not keep them.
        """
        identities = identities | self.late.keys()
        self._announced = {key: answer for key, answer in self._announced.items() if key in identities}
        new = identities - self._announced.keys()
        began = time.monotonic()
        if not isinstance(self.grid, HttpGrid):  # in this process: an answer is there or it is not
            found = list(self.grid.pull_messages(new)) if new else []
            self.took = time.monotonic() - began
            while found:  # none is held longer than it must
                message = found.pop()
                if self.late.pop(message.metadata.reply_to_message_id, None) is not None:
                    continue
                yield message.metadata.reply_to_message_id, message
            return
        if new:
            pulled = self.grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=new))
            for head, tree in zip(pulled.messages_list, pulled.message_object_trees, strict=True):
                parts = dict.fromkeys(part.object_id for part in iterate_object_tree(tree))
                self._announced[head.metadata.reply_to_message_id] = Announced(head.metadata.message_id, list(parts))
        self.took = time.monotonic() - began
        for key, answer in list(self._announced.items()):
            lost = self._fetch(self.grid, answer, keep=key not in self.late)
            if lost or not answer.missing:
                del self._announced[key]
                whole = None if lost else self._assemble(self.grid, answer)
                if self.late.pop(key, None) is None:
                    yield key, whole

    def _fetch(self, grid: HttpGrid, answer: Announced, *, keep: bool) -> bool:
        """Take the parts that have come; whether one will never come, or they are more than anybody has to send."""
        while answer.missing:
            request = PullObjectRequest(node=grid.node, run_id=grid.run.run_id, object_id=answer.missing[-1])
            part = grid._runtime_client.PullObject(request)
            if not part.object_available:
                return not part.object_found
            answer.parts[answer.missing.pop()] = part.object_content if keep else b""
            answer.size += len(part.object_content)
            if answer.size > MAX_REPLY_BYTES:
                return True
        return False

    def _assemble(self, grid: HttpGrid, answer: Announced) -> Message | None:
        """The message that the parts make, if they make one; the SuperLink may forget them."""
        node, run = grid.node, grid.run.run_id
        received = ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=answer.identity)
        grid._runtime_client.ConfirmMessageReceived(received)
        try:
            return cast(Message, inflate_object_from_contents(answer.identity, answer.parts))
        except Exception:  # whatever Flower raises over parts that somebody else made
            return None
