"""Flower's own grids and SuperLink state without processes and sockets: nodes answer when somebody looks for answers.

``Simulation`` is the grid of a simulation, ``Deployment`` that of a server process. Its calls go straight to the
SuperLink's handlers; there, as over HTTP, a message is a tree of parts that are pushed and pulled one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

from flwr.app import Message
from flwr.app.error import Error
from flwr.app.message import remove_content_from_message
from flwr.common import FitRes, GetPropertiesRes
from flwr.common.constant import HEARTBEAT_INTERVAL_INF, SUPERLINK_NODE_ID, Status
from flwr.common.serde import message_to_proto
from flwr.compat.common.recorddict_compat import fitres_to_recorddict, getpropertiesres_to_recorddict
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node as NodeProto
from flwr.proto.task_pb2 import Task, TaskStatus
from flwr.server.superlink.linkstate import InMemoryLinkState, LinkStateFactory
from flwr.server.superlink.linkstate.in_memory_linkstate import RunRecord
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.grid.inmemory_grid import InMemoryGrid
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers

RUN, TASK = 7, 8
Answer = Callable[[Message], Message | None]
"""What a node makes of a message; ``None`` if it stays silent."""


def scripted(answer: Any) -> Answer:
    """A node that answers everything with a result of Flower's, an error of Flower's, or not at all (``None``)."""

    def reply(message: Message) -> Message | None:
        if isinstance(answer, Error):
            return Message(answer, reply_to=message)
        if isinstance(answer, FitRes):
            return Message(fitres_to_recorddict(answer, keep_input=True), reply_to=message)
        if isinstance(answer, GetPropertiesRes):
            return Message(getpropertiesres_to_recorddict(answer), reply_to=message)
        return None

    return reply


class Nodes:
    """A SuperLink's state and the nodes that are connected to it.

    Args:
        answers: what each node does.
    """

    def __init__(self, *answers: Answer) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = TASK, RUN, SUPERLINK_NODE_ID
        self.factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory())
        state = self.factory.state()
        assert isinstance(state, InMemoryLinkState)
        self.link, self.run = state, Run.create_empty(RUN)
        self.run.primary_task_id, self.run.federation_id = TASK, NOOP_FEDERATION_ID
        self.link.run_ids[RUN] = RunRecord(run=self.run)
        self.link.task_store[TASK] = Task(task_id=TASK, run_id=RUN, status=TaskStatus(status=Status.RUNNING))
        self.nodes: dict[int, Answer] = {}
        self.seen: list[Message] = []
        for answer in answers:
            self.join(answer)

    def join(self, answer: Answer, name: str | None = None) -> int:
        """A node comes, perhaps with a key that was enrolled for a client, ``name``; its id."""
        node = self.link.create_node("", "", uuid4().bytes, HEARTBEAT_INTERVAL_INF, name=name)
        self.link.acknowledge_node_heartbeat(node, HEARTBEAT_INTERVAL_INF)
        self.nodes[node] = answer
        return node

    def leave(self, node: int) -> None:
        """A node goes."""
        assert self.link.deactivate_node(node)
        del self.nodes[node]

    def come_back(self, node: int, answer: Answer) -> None:
        """A node that went is here again: its key is the same, and so is its id."""
        assert self.link.activate_node(node, HEARTBEAT_INTERVAL_INF)
        self.nodes[node] = answer

    def answered(self, message: Message) -> Message | None:
        """Return the answer of the node that ``message`` is sent to."""
        self.seen.append(message)
        return self.nodes[message.metadata.dst_node_id](message)


class Simulation(InMemoryGrid):
    """The grid of a simulation."""

    def __init__(self, *answers: Answer) -> None:
        self.world = Nodes(*answers)
        super().__init__(self.world.factory)
        self.set_run(self.world.run)

    def pull_messages(self, message_ids: Any) -> Any:
        for node in list(self.world.nodes):
            for message in self.state.get_message_ins(node_id=node, limit=None):
                reply = self.world.answered(message)
                if reply is not None:
                    reply.metadata.__dict__["_message_id"] = str(uuid4())
                    self.state.store_message_res(reply)
        return super().pull_messages(message_ids)


class Deployment(HttpGrid):
    """The grid of a server process.

    Args:
        held: how many parts of its answer a node keeps back; they are in ``kept``.
    """

    def __init__(self, *answers: Answer, held: int = 0) -> None:
        super().__init__(token="none")
        self.world, self.held = Nodes(*answers), held
        self.kept: list[PushObjectRequest] = []
        self.calls: list[str] = []
        self.set_run(self.world.run)
        self._client = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:  # the calls of RuntimeHttpClient
        handlers = {"GetNodes": "get_nodes", "PushMessages": "push_messages", "PullMessages": "pull_messages",
                    "PushObject": "push_object", "PullObject": "pull_object",
                    "ConfirmMessageReceived": "confirm_message_received"}  # fmt: skip
        if name not in handlers:
            raise AttributeError(name)

        def call(request: Any) -> Any:
            self.calls.append(name)
            if name == "PullMessages":
                self.work()
            return getattr(runtime_handlers, handlers[name])(request, self.world.link, self.world.link.task_store[TASK])

        return call

    def work(self) -> None:
        """What SuperNodes do."""
        link, store = self.world.link, self.world.link.object_store
        for identity in list(self.world.nodes):
            node = NodeProto(node_id=identity)
            pulled = fleet_handlers.pull_messages(PullMessagesRequest(node=node), link, store)
            for head, tree in zip(pulled.messages_list, pulled.message_object_trees, strict=True):
                key = head.metadata.message_id
                requests = [
                    PullObjectRequest(node=node, run_id=RUN, object_id=part.object_id)
                    for part in iterate_object_tree(tree)
                ]
                parts = {one.object_id: fleet_handlers.pull_object(one, link).object_content for one in requests}
                received = ConfirmMessageReceivedRequest(node=node, run_id=RUN, message_object_id=key)
                fleet_handlers.confirm_message_received(received, link, store)
                message: Any = inflate_object_from_contents(key, parts)
                message.metadata.__dict__["_message_id"] = key
                reply = self.world.answered(message)
                if reply is not None:
                    self._send(node, reply)

    def _send(self, node: NodeProto, reply: Message) -> None:
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            tree, parts = get_object_tree(reply), get_all_nested_objects(reply)
        head = message_to_proto(remove_content_from_message(reply) if reply.has_content() else reply)
        request = PushMessagesRequest(node=node, messages_list=[head], message_object_trees=[tree])
        pushed = fleet_handlers.push_messages(request, self.world.link)
        uploads = [
            PushObjectRequest(
                node=node,
                run_id=RUN,
                object_id=part,
                object_content=parts[part].deflate(),
                session_id=pushed.session_id,
            )
            for part in pushed.objects_to_push
        ]
        self.kept += uploads[len(uploads) - self.held :]
        for upload in uploads[: len(uploads) - self.held]:
            assert fleet_handlers.push_object(upload, self.world.link).stored

    def release(self) -> None:
        """The parts that were kept back come."""
        while self.kept:
            assert fleet_handlers.push_object(self.kept.pop(), self.world.link).stored
