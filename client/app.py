"""The Flower ClientApp: a thin skin around :class:`client.node.Node`.

In a deployment, a SuperNode's ``--node-config`` says which client it is::

    --node-config 'domain="webcam" data-dir="/data" state-dir="/var/lib/goldfinch"'

with ``index`` (0) where several devices hold one domain, and ``device`` ("cuda:0") where the run's choice is not this
node's; ``privacy-max-epsilon`` (with ``privacy-delta``) and ``privacy-max-releases`` are the device's own budget. In a
simulation, a node hosts the clients whose position among all clients, modulo the number of nodes, is its
``partition-id``; so a plain ``flwr run .`` works with any number of nodes. A SuperNode may have one too.

A SuperNode starts a process per message. That process imports no torch: it hands the message to the node's resident
trainer (:mod:`client.resident`), unless the node's configuration says ``resident=false``. Processes that live longer
than a message (Ray actors) do the work themselves.
"""

import contextlib
import ctypes
import sys
from functools import lru_cache
from typing import Any, cast

import numpy as np
from flwr.app import Context, Message
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.common import Code, FitIns, FitRes, GetPropertiesIns, GetPropertiesRes, Parameters, Status

from client.resident.caller import Caller
from client.resident.messages import Question, Reply
from client.resident.place import of_node
from common.overrides import overrides_in

TENSOR_TYPE = "safetensors"
""":data:`common.wire.payload.TENSOR_TYPE`, which a process that imports no torch cannot ask for."""

MMAP_MAX, TRIM_THRESHOLD = -4, -1
"""Of glibc's ``mallopt``."""


class FlowerClient(Client):
    """One node: registers the clients it hosts, and answers requests for them.

    Args:
        context: Flower's context: the run's overrides and the node's configuration.
    """

    def __init__(self, context: Context) -> None:
        self.run, self.configuration = context.run_id, dict(context.node_config)
        self.overrides = overrides_in(context.run_config)

    def get_properties(self, ins: GetPropertiesIns) -> GetPropertiesRes:  # noqa: ARG002
        """The registrations of the clients that this node hosts; its own words if its data or settings are not good."""
        reply = self._ask("register")
        if not reply.ok:
            return GetPropertiesRes(Status(Code.GET_PROPERTIES_NOT_IMPLEMENTED, reply.text), {})
        return GetPropertiesRes(Status(Code.OK, ""), {"registrations": reply.text})

    def fit(self, ins: FitIns) -> FitRes:
        """The answer to a request; errors go back with their traceback, since only so they carry who failed."""
        request, sent = ins.config.get("request"), ins.parameters
        reply = self._ask("answer", request, sent.tensor_type, sent.tensors)
        if not reply.ok:
            status = Status(Code.FIT_NOT_IMPLEMENTED, reply.text)
            return FitRes(status, Parameters([], TENSOR_TYPE), 0, {"traceback": reply.traceback})
        return FitRes(Status(Code.OK, ""), Parameters(list(reply.tensors), TENSOR_TYPE), reply.samples, {})

    def _ask(self, kind: str, *content: Any) -> Reply:
        question, caller = Question(kind, self.run, self.overrides, self.configuration, *content), self._caller()
        if caller is None:
            if "ray" in sys.modules:
                keep_memory()
            from client.node import answer_question  # torch, data, methods: the resident trainer has them

            return answer_question(question, simulated=in_simulation())
        try:
            return caller.ask(question)
        except Exception as error:  # the server must learn why, whatever it was
            return Reply.of(error)

    def _caller(self) -> Caller | None:
        """The way to the resident trainer; ``None`` where this process does the work."""
        node = of_node() if self.configuration.get("resident", True) is True else None
        if node is None:
            return None
        try:
            return Caller(node, self.configuration)
        except OSError as error:
            print(f"no resident trainer, each message imports torch again: {error}", file=sys.stderr)
            return None


def in_simulation() -> bool:
    """Whether this process is an actor of Flower's simulation, which plays all clients on machines of the server's.

    Ray itself says so. Nothing that comes with a message does, since a server could make a device take its own noise
    for a simulation's.
    """
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized()) and ray.get_runtime_context().get_actor_id() is not None


@lru_cache(maxsize=1)
def keep_memory() -> None:
    """What this process frees stays its own: new memory takes a model four times as long to touch as to fill."""
    with contextlib.suppress(OSError, AttributeError):  # another libc than glibc
        for option, value in ((MMAP_MAX, 0), (TRIM_THRESHOLD, 2**30)):
            ctypes.CDLL(None).mallopt(option, value)


def client_fn(context: Context) -> Client:
    """Flower asks for a client per message."""
    return FlowerClient(context)


def as_arrays(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """The answer with its tensors as arrays of bytes: Ray copies one into its store, and of ``bytes`` makes three."""
    answer = call_next(message, context)
    for record in answer.content.array_records.values() if answer.has_content() else ():
        for array in record.values():
            array.data = cast(bytes, np.frombuffer(array.data, np.uint8)) if array.data else b""  # Flower hands it on
    return answer


app = ClientApp(client_fn=client_fn, mods=[as_arrays])
