"""The Flower ClientApp, which passes messages to :class:`client.node.Node`.

In a deployment, a SuperNode's ``--node-config`` names its client::

    --node-config 'domain="webcam" data-dir="/data" state-dir="/var/lib/goldfinch/clients"'

with ``index`` (0) if several devices hold one domain, and ``device`` ("cuda:0") if this node does not use the run's
device; ``privacy-max-epsilon`` (with ``privacy-delta``) and ``privacy-max-releases`` are the device's own budget;
``privacy-scores="none"`` scores no images of this device.

In a simulation, a node hosts a client if the position of the client among all clients, modulo the number of nodes, is
the node's ``partition-id``. So a plain ``flwr run .`` works with any number of nodes. A SuperNode may have a
``partition-id`` too.

A SuperNode starts a process per message. That process does not import torch: it passes the message to the node's
resident trainer (:mod:`client.resident`), unless the node's configuration has ``resident=false``. Processes that live
longer than a message (Ray actors) do the work themselves.
"""

import contextlib
import ctypes
import sys
import time
from functools import lru_cache
from typing import Any, cast

import numpy as np
import psutil
from flwr.app import Context, Message
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.common import Code, FitIns, FitRes, GetPropertiesIns, GetPropertiesRes, Parameters, Scalar, Status

from client.reasons import says_private
from client.resident.caller import Caller
from client.resident.messages import Question, TrainerReply
from client.resident.place import of_node

TENSOR_TYPE = "safetensors"
"""The same as :data:`common.wire.payload.TENSOR_TYPE`. Importing that module would import torch."""

OK_METRICS: dict[str, Scalar] = {"code": Code.OK.value, "message": ""}
""":data:`strategies.core.flower.OK_METRICS`, likewise."""

MMAP_MAX, TRIM_THRESHOLD = -4, -1
"""Options of glibc's ``mallopt``."""


class FlowerClient(Client):
    """One node: registers the clients it hosts, and answers requests for them.

    Args:
        context: Flower's context: the configurations of the run and of the node.
    """

    def __init__(self, context: Context) -> None:
        self.started = time.time() - psutil.Process().create_time()
        self.run, self.configuration = context.run_id, dict(context.node_config)
        self.run_config = dict(context.run_config)

    def get_properties(self, ins: GetPropertiesIns) -> GetPropertiesRes:
        """Return the registrations of the clients that this node hosts, or why its data or settings are not valid."""
        reply = self._ask("register", ins.config.get("code"))
        if not reply.ok:
            return GetPropertiesRes(Status(Code.GET_PROPERTIES_NOT_IMPLEMENTED, reply.text), {})
        properties: dict[str, Scalar] = {"registrations": reply.text}
        if "ray" not in sys.modules:  # an actor has started long ago
            properties |= {"start_seconds": self.started, "time": time.time()}
        return GetPropertiesRes(Status(Code.OK, ""), properties)

    def fit(self, ins: FitIns) -> FitRes:
        """Return the answer to a request, or its error with the traceback, so that the server can record it.

        A private node sends a reason of :data:`client.reasons.REASONS` instead.
        """
        request, sent = ins.config.get("request"), ins.parameters
        reply = self._ask("answer", request, sent.tensor_type, sent.tensors)
        if not reply.ok:
            status = Status(Code.FIT_NOT_IMPLEMENTED, reply.text)
            return FitRes(status, Parameters([], TENSOR_TYPE), 0, {"traceback": reply.traceback})
        return FitRes(Status(Code.OK, ""), Parameters(list(reply.tensors), TENSOR_TYPE), reply.samples, {**OK_METRICS})

    def _ask(self, kind: str, *content: Any) -> TrainerReply:
        question = Question(kind, self.run, self.run_config, self.configuration, *content)
        caller = self._caller()
        if caller is None:
            if "ray" in sys.modules:
                keep_memory()
            from client.node import answer_question  # imports torch, data and methods

            return answer_question(question, simulated=in_simulation())
        try:
            return caller.ask(question)
        except Exception as error:  # the server records why a node failed
            return TrainerReply.of(error, private=says_private(self.run_config, self.configuration))

    def _caller(self) -> Caller | None:
        """Return the connection to the resident trainer; ``None`` if this process does the work."""
        if self.configuration.get("resident", True) is not True:
            return None
        node = of_node()
        if node is None:
            return None
        try:
            return Caller(node, self.configuration)
        except OSError as error:
            print(f"no resident trainer, each message imports torch again: {error}", file=sys.stderr)
            return None


def in_simulation() -> bool:
    """Return whether this process is an actor of Flower's simulation, which plays all clients on the server's machines.

    Only Ray itself is asked. A message cannot decide this: a server could make a device believe that it is simulated
    and draw repeatable noise.
    """
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized()) and ray.get_runtime_context().get_actor_id() is not None


@lru_cache(maxsize=1)
def keep_memory() -> None:
    """Keep freed memory in this process, because touching new memory takes four times as long as filling it."""
    with contextlib.suppress(OSError, AttributeError):  # another libc than glibc
        for option, value in ((MMAP_MAX, 0), (TRIM_THRESHOLD, 2**30)):
            ctypes.CDLL(None).mallopt(option, value)


def client_fn(context: Context) -> Client:
    """Return the client for one message, for Flower."""
    return FlowerClient(context)


def as_arrays(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Return the answer with its tensors as arrays of bytes: Ray copies these once, but ``bytes`` three times."""
    answer = call_next(message, context)
    if not answer.has_content():
        return answer
    for record in answer.content.array_records.values():
        for array in record.values():
            if array.data:
                array.data = cast(bytes, np.frombuffer(array.data, np.uint8))  # Flower passes it on
    return answer


app = ClientApp(client_fn=client_fn, mods=[as_arrays])
