"""The Flower engine: clients behind SuperNodes, simulated or deployed, reached by one loop through its Grid."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, TypeVar, cast

from flwr.app import Message, MessageType, RecordDict
from flwr.common import Code, GetPropertiesIns
from flwr.common.constant import ErrorCode, MessageTypeLegacy
from flwr.compat.common.recorddict_compat import (
    fitins_to_recorddict,
    getpropertiesins_to_recorddict,
    recorddict_to_fitres,
    recorddict_to_getpropertiesres,
)
from flwr.serverapp.grid import Grid

from common.errors import EngineError, PayloadError
from common.wire.messages import Registration, Request
from common.wire.payload import Payload, encode
from server.engines.messages import Inbox
from server.run.engine import ENOUGH, Admit, Failure, Keep, as_it_is
from strategies.core.federation import Closing, Reply
from strategies.core.flower import fit_res_to_answer, properties_to_registrations, request_to_fit_ins

GRACE_SECONDS = 5.0
"""How long the parts of an answer that came in time may take."""

PATIENCE_SECONDS, LONGEST_PATIENCE_SECONDS = 20.0, 3600.0
"""What a node has to register; twice as much each time it is asked again, which a tenth of that later it is."""

SHORTEST_PAUSE, LONGEST_PAUSE = 0.02, 3.0
LATE, LOOKING = 0.05, 0.1
"""An answer that took t seconds lies at most 0.05 t, and looking takes at most a tenth of the time."""

Outcome = TypeVar("Outcome")


@dataclass
class NodeState:
    """What the engine knows about one node.

    Args:
        name: the name under which the node was enrolled; ``None`` while it is offline.
        due: when to ask the node for its clients, on the monotonic clock; infinite once it was asked.
        invited: whether the node was ever asked for its clients.
        lost: the number of its answers that got lost.
        outcome: its registrations, or why there are none, until :meth:`FlowerEngine.register` reads them.
    """

    name: str | None = None
    due: float = 0.0
    invited: bool = False
    lost: int = 0
    outcome: list[Registration] | Failure | None = None

    @property
    def online(self) -> bool:
        """Whether the node was online when the engine last asked Flower."""
        return self.name is not None

    @property
    def patience(self) -> float:
        """The seconds that the node has to answer: twice as many after each lost answer."""
        return min(LONGEST_PATIENCE_SECONDS, PATIENCE_SECONDS * 2.0**self.lost)


class FlowerEngine:
    """Reaches the clients that Flower's nodes host.

    Args:
        grid: Flower's way to the nodes.
        simulated: the nodes are Flower's simulation on Ray.
        enrolled: a node may be the one client that its key was enrolled for, and nobody else. The SuperLink holds each
            call of a node to its key, and the operator alone says which client that is for.
    """

    def __init__(self, grid: Grid, *, simulated: bool = False, enrolled: bool = False) -> None:
        self.grid, self.simulated, self.enrolled = grid, simulated, enrolled
        self._inbox = Inbox(grid)
        self._states: dict[int, NodeState] = {}  # by node
        self._nodes: dict[str, int] = {}  # node by client
        self._asked: dict[str, int] = {}  # node by the message that asks it for its clients

    # ---- registration ----------------------------------------------------------------------------------------------

    def register(self, expected: Sequence[str], admit: Admit, seconds: float) -> list[Failure]:
        """See :class:`server.run.engine.Engine`. Nodes answer once; a node that restarts is a new one.

        What came during the rounds is here at once. Only while a client lacks a node is waited: ``seconds``, and for
        nodes that were never asked before. A node whose answer got lost is asked again, ever more rarely. Waiting ends
        early when so many nodes refused that no client is left to wait for; of enrolled nodes each refuses for its own.
        """
        found: set[str] = set()
        failures: dict[int, Failure] = {}
        began = time.monotonic()
        end = new_end = began + seconds
        while True:
            if self._invite(end - time.monotonic()):
                new_end = max(end, time.monotonic() + PATIENCE_SECONDS + GRACE_SECONDS)
            for identity, message in self._inbox.pull(set(self._asked)):
                self._note(identity, message)
            for node, state in sorted(self._states.items()):
                outcome = state.outcome
                if outcome is None:
                    continue
                state.outcome = None
                failures.pop(node, None)
                if isinstance(outcome, Failure):
                    failures[node] = outcome
                    continue
                for registration in outcome:
                    client = registration.client
                    reason = self._taken(client, node) or admit(registration)
                    if reason:
                        failures[node] = Failure(state.name or client, "refused", reason)
                    else:
                        self._nodes[client] = node
                        found.add(client)
            absent = {client for client, node in self._nodes.items() if not self._is_online(node)}
            absent = (absent | set(expected)) - found
            refusing = [node for node, failure in failures.items() if failure.status == "refused"]
            refused = sum(not self.enrolled or self._states[node].name in absent for node in refusing)
            until = new_end if not all(self._states[node].lost for node in self._asked.values()) else end
            if refused >= len(absent) or time.monotonic() >= until:
                break
            self._pause(time.monotonic() - began, until)
        if absent and seconds:
            for node in self._asked.values():
                failures.setdefault(node, Failure(f"node {node}", "lost", "it has not answered yet"))
        return list(failures.values())

    def _taken(self, client: str, node: int) -> str:
        """Why ``node`` cannot be ``client``; empty if it can."""
        name = self._states[node].name
        if name is None:
            return f"node {node} left again"
        if self.enrolled and name != client:
            return f"node {node} claims to be {client}, but its key is enrolled for {name or 'no client'}"
        other = self._nodes.get(client, node)
        if other != node and self._is_online(other):
            return f"nodes {other} and {node} both claim to be it"
        return ""

    def _is_online(self, node: int) -> bool:
        """Whether Flower listed the node when it was last asked."""
        return node in self._states and self._states[node].online

    def _look(self) -> None:
        """Ask Flower which nodes are online."""
        for state in self._states.values():
            state.name = None
        for found in self.grid.get_nodes():
            self._states.setdefault(found.node_id, NodeState()).name = found.name
        late = self._inbox.late  # a node that went offline has forgotten what it was asked
        self._inbox.late = {identity: node for identity, node in late.items() if self._is_online(node)}

    def _invite(self, seconds: float) -> bool:
        """Ask the nodes that are due for their clients. Return whether one of them is asked for the first time."""
        self._look()
        now = time.monotonic()
        asked = set(self._asked.values())
        due = []
        for node, state in sorted(self._states.items()):
            if not state.online and node not in asked:
                state.due = now  # it is asked again when it returns
            if state.online and state.due <= now:
                due.append(node)
        new = any(not self._states[node].invited for node in due)
        content = getpropertiesins_to_recorddict(GetPropertiesIns({}))
        messages = []
        for node in due:
            ttl = max(seconds, self._states[node].patience)
            messages.append(Message(content, node, MessageTypeLegacy.GET_PROPERTIES, ttl=ttl))
        for node, identity in zip(due, self._push(messages), strict=True):
            state = self._states[node]
            state.invited = True
            if identity:
                state.due = inf
                self._asked[identity] = node
            else:
                state.due = now + state.patience / 10
        return new

    def _note(self, identity: str, message: Message | None) -> None:
        """What a node says when it is asked for its clients."""
        node = self._asked.pop(identity)
        read = recorddict_to_getpropertiesres
        outcome = self._outcome(f"node {node}", message, lambda said: properties_to_registrations(read(said)))
        state = self._states[node]
        state.outcome = outcome
        if isinstance(outcome, Failure) and outcome.status == "lost":
            state.due = time.monotonic() + state.patience / 10
            state.lost += 1

    # ---- exchanges -------------------------------------------------------------------------------------------------

    def exchange(
        self,
        message: Payload,
        requests: Mapping[str, Request],
        seconds: float,
        *,
        keep: Keep = as_it_is,
        closing: Closing | None = None,
    ) -> tuple[list[Reply], list[Failure]]:
        """See :class:`server.run.engine.Engine`.

        A late client's answer is thrown away when it comes. Until then its node is asked for nothing but scores, since
        it would answer one stale request after the other.

        Raises:
            EngineError: a Ray actor died; Flower does not replace it, so every later round would lose clients.
        """
        blob = encode(message)
        self._look()
        there = [
            client for client in sorted(requests) if client in self._nodes and self._is_online(self._nodes[client])
        ]
        awaited = closing.awaited if closing else set(there)
        busy = set(self._inbox.late.values())
        clients = [client for client in there if client in awaited or self._nodes[client] not in busy]
        messages = self._messages(blob, [requests[client] for client in clients], seconds)
        waiting = dict(zip(self._push(messages), clients, strict=True))
        del messages
        waiting.pop("", None)
        behind = set(there) - set(clients)
        offline = sorted(requests.keys() - set(waiting.values()) - behind)
        failures = [Failure(client, "lost", "its node is offline", sent=False) for client in offline]
        failures += [Failure(client, "late", "still at an earlier round", sent=False) for client in sorted(behind)]
        replies: list[Reply] = []
        for identity, answer in self._answers(set(waiting), seconds):
            request = requests[waiting.pop(identity)]
            outcome = self._outcome(request.client, answer, partial(_reply, request))
            if isinstance(outcome, Failure):
                failures.append(outcome)
            else:
                replies.append(replace(outcome, payload=keep(outcome.payload)))
            trained = sum(reply.answer.trained for reply in replies)
            if waiting and closing and closing.reached(trained, waiting.values()):
                self._inbox.late |= {identity: self._nodes[client] for identity, client in waiting.items()}
                return replies, failures + [Failure(client, "late", ENOUGH) for client in waiting.values()]
        reason = f"no complete answer within {seconds:.0f} s"
        return replies, failures + [Failure(client, "lost", reason) for client in waiting.values()]

    def _messages(self, blob: bytes, requests: Sequence[Request], seconds: float) -> list[Message]:
        """The requests as Flower's messages, which share one record of tensors: it is held, hashed and sent once."""
        contents = [fitins_to_recorddict(request_to_fit_ins(blob, request), keep_input=True) for request in requests]
        for array in contents[0].array_records["fitins.parameters"].values() if self.simulated and contents else ():
            array.data = cast(bytes, InRay(blob))  # Flower hands it on
        messages: list[Message] = []
        for request, content in zip(requests, contents, strict=True):
            content.update(contents[0].array_records)
            node, group = self._nodes[request.client], str(request.round)
            messages.append(Message(content, node, MessageType.TRAIN, ttl=seconds, group_id=group))
        return messages

    def _push(self, messages: Sequence[Message]) -> list[str]:
        """Send; the ids under which the messages were taken, empty where one was not."""
        taken = set(self.grid.push_messages(messages)) if messages else set()
        identities = [message.metadata.message_id for message in messages]
        return [identity if identity in taken else "" for identity in identities]

    def _answers(self, waiting: set[str], seconds: float) -> Iterator[tuple[str, Message | None]]:
        """Answers to these messages as they come, until all are there or the time is over."""
        began = time.monotonic()
        end = began + seconds + GRACE_SECONDS
        while waiting:
            came = False
            for identity, message in self._inbox.pull(waiting | self._asked.keys()):
                if identity in self._asked:
                    self._note(identity, message)
                    continue
                waiting.discard(identity)
                came = True
                yield identity, message
            if time.monotonic() >= end:
                return
            if waiting:
                self._pause(0.0 if came else time.monotonic() - began, end)

    def _outcome(
        self, name: str, message: Message | None, read: Callable[[RecordDict], Outcome | Failure]
    ) -> Outcome | Failure:
        """What ``read`` makes of an answer, or what became of it.

        Raises:
            EngineError: Ray lost it. Flower's simulation has codes for all that a client raises, whatever that says.
        """
        if message is None:
            return Failure(name, "lost", "its answer got lost on the way, or is too large")
        if message.has_error():
            if self.simulated and message.error.code == ErrorCode.UNKNOWN:
                raise EngineError(
                    f"the Ray actor that trained {name} died, most likely for want of memory; "
                    "go on with resume=true and fewer actors (engine.actors=1)"
                )
            return Failure(name, "lost", message.error.reason or f"Flower's error {message.error.code}")
        try:
            return read(message.content)
        except PayloadError as error:
            return Failure(name, "refused", str(error))
        except Exception as error:  # whatever Flower raises over records that are not what they should be
            return Failure(name, "refused", f"not the answer of a Goldfinch client: {error!r}")

    def _pause(self, waited: float, end: float) -> None:
        """Wait until the next look; see :data:`LATE`."""
        pause = min(LONGEST_PAUSE, max(SHORTEST_PAUSE, LATE * waited, self._inbox.took / LOOKING))
        time.sleep(max(0.0, min(pause, end - time.monotonic())))

    def close(self) -> None:
        """Nothing to release: the nodes are Flower's."""


class InRay:
    """A message's tensors in Ray's store, once for all clients: pickled is where they lie.

    As bytes, which clients copy: an array, which they would read in place, stays in the store for the rest of the run.
    """

    def __init__(self, blob: bytes) -> None:
        self.blob = blob

    def __reduce__(self) -> tuple[Any, ...]:
        import ray  # only where Flower's simulation is

        self.place = getattr(self, "place", None) or ray.put(self.blob)
        return ray.get, (self.place,)


def _reply(request: Request, content: RecordDict) -> Reply | Failure:
    """Return what a client answers to ``request``."""
    client, result = request.client, recorddict_to_fitres(content, keep_input=False)
    if result.status.code != Code.OK:
        return Failure(client, "failed", result.status.message, str(result.metrics.get("traceback", "")))
    try:
        answer, payload, size_up = fit_res_to_answer(result)
    except PayloadError as error:
        return Failure(client, "refused", str(error), bytes_up=sum(map(len, result.parameters.tensors)))
    return Reply(client, answer, payload, size_up)
