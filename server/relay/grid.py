"""A Flower Grid over several SuperLinks, for :class:`server.engines.flower.FlowerEngine`.

A message goes to the SuperLink where its node is online. Nothing here waits for a SuperLink for longer than
:data:`LIST_SECONDS`: pushed messages are on their way, and those of a SuperLink that is lost get an error as their
reply, as Flower's own do if their node is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, cast

from flwr.app import Message, Metadata
from flwr.app.error import Error
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.common.serde import message_to_proto
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import PushAppMessagesRequest
from flwr.serverapp.grid import Grid
from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from server.relay.coordinator import Batch, Received, Shard
from server.relay.frames import MAX_BATCH

LIST_SECONDS = 5.0
"""Seconds that a relay has to list its nodes; after that its last list counts."""

OWN_TASK = 1
"""The id of this process's task and run until a message's SuperLink is known."""


class RelayedGrid(Grid):
    """The nodes of all SuperLinks.

    Args:
        shards: the SuperLinks.
        notify: called with the problems that the grid finds, in the thread that uses it.
    """

    def __init__(self, shards: Sequence[Shard], notify: Callable[[str], None] = lambda _: None) -> None:
        self.shards = shards
        self._notify = notify
        self._owners: dict[int, Shard] = {}  # by node
        self._seen_twice: set[int] = set()
        TaskIdentity.task_id = OWN_TASK  # Flower's messages read it when they are made
        TaskIdentity.run_id = OWN_TASK
        TaskIdentity.node_id = SUPERLINK_NODE_ID

    def describe(self, node: int) -> str:
        """Return a node's name for messages: its number and its SuperLink."""
        shard = self._owners.get(node)
        if shard is None:
            return f"node {node}"
        return f"node {node} at SuperLink {shard.name}"

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return the nodes that are online at any SuperLink, each once."""
        numbers = [shard.ask_for_nodes() for shard in self.shards]
        deadline = time.monotonic() + LIST_SECONDS
        found: dict[int, NodeInfo] = {}
        for shard, number in zip(self.shards, numbers, strict=True):
            if not number:
                continue
            for node in shard.nodes(number, deadline):
                if node.node_id in found:
                    self._report_twice(node, shard)
                else:
                    found[node.node_id] = node
                    self._owners[node.node_id] = shard
        return list(found.values())

    def _report_twice(self, node: NodeInfo, shard: Shard) -> None:
        """Notify once that a node is at two SuperLinks; the first in ``engine.connections`` is used."""
        if node.node_id in self._seen_twice:
            return
        self._seen_twice.add(node.node_id)
        self._notify(
            f"{self.describe(node.node_id)} is online at SuperLink {shard.name}, too, which has the same registry: "
            "enrol each device at one SuperLink"
        )

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes that are online at any SuperLink."""
        return [node.node_id for node in self.get_nodes()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages to the SuperLinks of their nodes. Return the ids of those to connected SuperLinks."""
        by_shard: dict[Shard, list[Message]] = {}
        for message in messages:
            shard = self._owners.get(message.metadata.dst_node_id)
            if shard is not None:
                by_shard.setdefault(shard, []).append(message)
        accepted: list[str] = []
        with no_object_id_recompute():  # what messages share is hashed once
            for shard, own in by_shard.items():
                for first in range(0, len(own), MAX_BATCH):
                    batch = _batch(shard, own[first : first + MAX_BATCH])
                    if shard.push(batch):
                        accepted.extend(batch.identities)
        return accepted

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        """Yield the replies to messages as they are read; replies to other messages are forgotten."""
        wanted = set(message_ids)
        has_more = True
        while has_more:
            has_more = False
            for shard in self.shards:
                found = shard.take(wanted)
                if found is not None:
                    has_more = True
                    yield _message(*found)

    def close(self) -> None:
        """Close nothing: the coordinator closes the connections."""

    def set_run(self, run: Any) -> NoReturn:
        """Refuse: there is a run at each SuperLink."""
        raise NotImplementedError("each SuperLink has a run of its own")

    @property
    def run(self) -> NoReturn:
        """Refuse: there is a run at each SuperLink."""
        raise NotImplementedError("each SuperLink has a run of its own")

    def create_message(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: Flower deprecates it."""
        raise NotImplementedError("make a Message")

    def send_and_receive(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: it would hold all replies at the same time."""
        raise NotImplementedError("push_messages, then pull_messages")


def _batch(shard: Shard, messages: Sequence[Message]) -> Batch:
    """Return messages as one batch for a SuperLink; sets their run, task and id."""
    request = PushAppMessagesRequest()
    objects: dict[str, InflatableObject] = {}
    identities = []
    run = shard.run
    for message in messages:
        fields = message.metadata.__dict__
        fields["_run_id"] = run
        fields["_src_task_id"] = shard.task
        fields["_message_id"] = message.object_id
        identities.append(message.metadata.message_id)
        request.messages_list.append(message_to_proto(remove_content_from_message(message)))
        request.message_object_trees.append(get_object_tree(message))
        objects.update(get_all_nested_objects(message))
    return Batch(run, identities, request.SerializeToString(), objects)


def _message(identity: str, received: Received) -> Message:
    """Return the reply to a message, or an error in its place."""
    if received.problem:
        return _error(identity, received.problem)
    try:
        message = cast(Message, inflate_object_from_contents(received.reply, dict(received.parts)))
        message.metadata.__dict__["_reply_to_message_id"] = identity  # the sender cannot reply to another's message
    except Exception:  # Flower can raise any type on parts that another program made
        return _error(identity, "its answer got lost on the way, or is too large")
    return message


def _error(identity: str, reason: str) -> Message:
    metadata = Metadata(
        run_id=OWN_TASK,
        message_id="",
        src_node_id=SUPERLINK_NODE_ID,
        dst_node_id=SUPERLINK_NODE_ID,
        reply_to_message_id=identity,
        group_id="",
        created_at=time.time(),
        ttl=0,
        message_type=SYSTEM_MESSAGE_TYPE,
    )
    return make_message(metadata, error=Error(code=ErrorCode.MESSAGE_UNAVAILABLE, reason=reason))
