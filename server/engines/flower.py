"""The Flower engine: reaches clients behind SuperNodes, simulated or deployed, through Flower's Grid."""

from __future__ import annotations

import threading
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
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

from common.errors import EngineError, PayloadError
from common.wire.messages import Registration, Request
from common.wire.payload import Payload, encode
from server.engines.inbox import Inbox
from server.engines.waiting import OnWaiting, WaitReport
from server.flower.cluster import ENDS_RUN
from server.flower.silence import SilenceLimit
from server.run.engine import ENOUGH, Admit, Failure, Keep, as_it_is, without_the_late
from strategies.core.federation import Closing, Reply
from strategies.core.flower import fit_res_to_answer, properties_to_registrations, request_to_fit_ins

GRACE_SECONDS = 5.0
"""Seconds by which a message outlives the engine's deadline, so that the engine names the reason of a missing reply."""

NO_REPLY = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)
"""Flower's errors for a missing reply. An error can have several causes, and Flower's text does not tell them apart."""

ATTEMPTS = 4
"""How often the same messages are sent, if answers to their parts are lost, before the run ends."""

PATIENCE_SECONDS, MAX_PATIENCE_SECONDS = 20.0, 3600.0
"""Seconds a node is given to register. The time doubles after each lost reply, up to an hour.

The node is asked again after a tenth of that time.
"""

MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.02, 3.0
MAX_DELAY_SHARE, MAX_POLLING_SHARE = 0.05, 0.1
"""A reply that took t seconds is noticed at most 0.05 t later, and polling takes at most a tenth of the time."""

Outcome = TypeVar("Outcome")


class Deadline:
    """The time at which the engine stops waiting.

    Args:
        seconds: seconds from now, >= 0.
    """

    def __init__(self, seconds: float) -> None:
        self._began = time.monotonic()
        self._end = self._began + seconds

    @property
    def elapsed(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self._end - time.monotonic()

    @property
    def passed(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self._end

    def extend(self, seconds: float) -> None:
        """Leave at least ``seconds`` from now."""
        self._end = max(self._end, time.monotonic() + seconds)


@dataclass
class NodeState:
    """What the engine knows about one node.

    Args:
        name: the client that the node's key is enrolled for, empty without one; ``None`` while the node is offline.
        until: when it is offline unless it reports, on the monotonic clock.
        due: when to ask the node for its clients, on the monotonic clock; infinite once it was asked.
        invited: whether the node was ever asked for its clients.
        asked: when it was last asked for them, on the monotonic clock.
        lost: the number of its replies that were lost.
        outcome: its registrations, or why there are none, until :meth:`FlowerEngine.register` reads them.
    """

    name: str | None = None
    until: float = inf
    due: float = 0.0
    invited: bool = False
    asked: float = 0.0
    lost: int = 0
    outcome: list[Registration] | Failure | None = None

    @property
    def online(self) -> bool:
        """Whether the node was online when the engine last asked Flower."""
        return self.name is not None

    @property
    def patience(self) -> float:
        """The seconds that the node is given to register: twice as many after each lost reply."""
        return min(MAX_PATIENCE_SECONDS, PATIENCE_SECONDS * 2.0**self.lost)

    def ask_again_later(self) -> None:
        """Set the time of the next invitation."""
        self.due = time.monotonic() + self.patience / 10


class FlowerEngine:
    """Reaches the clients that Flower's nodes host.

    Args:
        grid: Flower's way to the nodes.
        simulated: the nodes are Flower's simulation on Ray.
        enrolled: a node may only be the client that its key is enrolled for. The SuperLink binds each call of a node
            to its key, and the operator decides which client a key is enrolled for.
        silence: seconds that the SuperLink may take for one call; then this process ends, see :class:`SilenceLimit`.
        on_silence: called with the reason before that.
        on_waiting: called with the clients that the engine has waited for some seconds; see :class:`WaitReport`.
        code: the run's hash of code. A node with another one names its files, so that the refusal says which differ.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        code: str = "",
        simulated: bool = False,
        enrolled: bool = False,
        silence: float = inf,
        on_silence: Callable[[str], None] | None = None,
        on_waiting: OnWaiting | None = None,
    ) -> None:
        self.grid = grid
        self._code = code
        self._on_waiting = on_waiting
        self.simulated = simulated
        self.enrolled = enrolled
        self._inbox = Inbox(grid)
        self._limit = SilenceLimit(silence, on_silence)
        self._states: dict[int, NodeState] = {}  # by node
        self._nodes: dict[str, int] = {}  # node by client
        self._asked: dict[str, int] = {}  # node by the message that asks it for its clients

    # ---- registration ----------------------------------------------------------------------------------------------

    def register(self, expected: Sequence[str], admit: Admit, seconds: float) -> list[Failure]:
        """Register new clients. See :class:`server.run.engine.Engine`.

        Registrations that arrived during the rounds are read at once. The engine waits only while a client has no
        node: for ``seconds``, and longer for nodes that are asked for the first time. A node registers once; after a
        restart it is a new node. After a lost reply, the node is asked again, each time after a longer pause.

        Waiting ends early if as many nodes were refused as clients are absent. With enrolled nodes, only a node that
        is enrolled for an absent client counts.
        """
        admitted: set[str] = set()
        failures: dict[int, Failure] = {}  # by node
        deadline = Deadline(seconds)
        first_reply_deadline = Deadline(seconds)
        report = WaitReport(self._on_waiting)
        while True:
            if self._invite(deadline):
                first_reply_deadline.extend(PATIENCE_SECONDS + GRACE_SECONDS)
            for identity, message in self._pull(set(self._asked)):
                self._note_registration(identity, message)
            self._admit_registered(admit, admitted, failures)
            absent = self._absent(expected) - admitted
            current_deadline = first_reply_deadline if self._awaits_first_reply() else deadline
            if self._count_refused(failures, absent) >= len(absent) or current_deadline.passed:
                break
            report(sorted(absent))
            self._pause(current_deadline)
        if absent and seconds:
            for node in self._asked.values():
                failures.setdefault(node, Failure(self._title(node), "lost", "it has not answered yet"))
        return list(failures.values())

    def _admit_registered(self, admit: Admit, admitted: set[str], failures: dict[int, Failure]) -> None:
        """Admit the clients of all registrations that have arrived; add them to ``admitted``, or to ``failures``."""
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
                reason = self._conflict(client, node) or admit(registration)
                if reason:
                    failures[node] = Failure(state.name or client, "refused", reason)
                else:
                    self._nodes[client] = node
                    admitted.add(client)

    def _conflict(self, client: str, node: int) -> str | None:
        """Return why ``node`` cannot be ``client``, or ``None`` if it can."""
        name = self._states[node].name
        if name is None:
            return f"node {node} left again"
        if self.enrolled and name != client:
            return f"node {node} claims to be {client}, but its key is enrolled for {name or 'no client'}"
        other = self._nodes.get(client, node)
        if other != node and self._is_online(other):
            return f"nodes {other} and {node} both claim to be it"
        return None

    def _absent(self, expected: Sequence[str]) -> set[str]:
        """Return the expected clients and those with a node that is offline."""
        offline = {client for client, node in self._nodes.items() if not self._is_online(node)}
        return offline | set(expected)

    def _awaits_first_reply(self) -> bool:
        """Return whether a node was asked for its clients and has not lost a reply before."""
        return any(self._states[node].lost == 0 for node in self._asked.values())

    def _count_refused(self, failures: Mapping[int, Failure], absent: set[str]) -> int:
        """Return how many of the absent clients need not be waited for, because a node was refused."""
        count = 0
        for node, failure in failures.items():
            if failure.status != "refused":
                continue
            if not self.enrolled or self._states[node].name in absent:
                count += 1
        return count

    def _is_online(self, node: int) -> bool:
        """Return whether the node was online when the engine last asked Flower."""
        return node in self._states and self._states[node].online

    def _update_nodes(self) -> None:
        """Ask Flower which nodes are online."""
        for state in self._states.values():
            state.name = None
        with self._limit:
            nodes = list(self.grid.get_nodes())
        for info in nodes:
            state = self._states.setdefault(info.node_id, NodeState())
            state.name, state.until = info.name, time.monotonic() + info.online_until - time.time()
        for identity, node in list(self._inbox.late.items()):
            if not self._is_online(node):  # a node that went offline has forgotten its request
                del self._inbox.late[identity]

    def _invite(self, deadline: Deadline) -> bool:
        """Ask the nodes that are due for their clients. Return whether one of them is asked for the first time."""
        self._update_nodes()
        now = time.monotonic()
        asked = set(self._asked.values())
        due = []
        for node, state in sorted(self._states.items()):
            if not state.online and node not in asked:
                state.due = now  # it is asked again when it returns
            if state.online and state.due <= now:
                due.append(node)
        content = getpropertiesins_to_recorddict(GetPropertiesIns({"code": self._code}))
        messages = []
        for node in due:
            ttl = max(deadline.left, self._states[node].patience) + GRACE_SECONDS
            messages.append(Message(content, node, MessageTypeLegacy.GET_PROPERTIES, ttl=ttl))
        has_new_node = not all(self._states[node].invited for node in due)
        for node, identity in zip(due, self._push(messages), strict=True):
            state = self._states[node]
            state.invited = True
            state.asked = now
            if identity is None:
                state.ask_again_later()
            else:
                state.due = inf
                self._asked[identity] = node
        return has_new_node

    def _note_registration(self, identity: str, message: Message | None) -> None:
        """Keep a node's reply to an invitation until :meth:`register` reads it."""
        node = self._asked.pop(identity)
        state = self._states[node]
        outcome = self._read(self._title(node), node, state.asked, message, _registrations)
        state.outcome = outcome
        if isinstance(outcome, Failure) and outcome.status == "lost":
            state.ask_again_later()
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
        """Exchange one message with the clients. See :class:`server.run.engine.Engine`.

        A late client's reply is discarded when it arrives. Until then its node is sent only the requests that need its
        scores. Otherwise it would answer one outdated request after the other.

        Raises:
            EngineError: a Ray actor died. Flower does not replace it, so every later round would lose clients.
        """
        if closing is None or not self.simulated:
            return self._collect(message, requests, seconds, keep, closing)
        replies, failures = self._collect(message, requests, seconds, keep, None)
        return without_the_late(replies, failures, closing)

    def _collect(
        self, message: Payload, requests: Mapping[str, Request], seconds: float, keep: Keep, closing: Closing | None
    ) -> tuple[list[Reply], list[Failure]]:
        """Send the requests; collect the replies until all are there, the exchange closes, or ``seconds`` are over."""
        blob = encode(message)
        self._update_nodes()
        clients, behind = self._recipients(requests, closing)
        deadline = Deadline(seconds)  # from before sending: a message that runs out first looks like a lost ClientApp
        waiting = self._send(blob, [requests[client] for client in clients], seconds)
        failures = []
        for client in sorted(requests.keys() - set(waiting.values()) - set(behind)):
            failures.append(Failure(client, "lost", "its node is offline", sent=False))
        for client in behind:
            failures.append(Failure(client, "late", "still at an earlier round", sent=False))
        replies: list[Reply] = []
        trained = 0
        asked = time.monotonic()
        report = WaitReport(self._on_waiting, max((request.round for request in requests.values()), default=None))

        def report_waiting() -> None:
            report(sorted(waiting.values()))

        for identity, received in self._receive(set(waiting), deadline, report_waiting):
            request = requests[waiting.pop(identity)]
            node = self._nodes[request.client]
            outcome = self._read(request.client, node, asked, received, partial(_reply, request))
            if isinstance(outcome, Failure):
                failures.append(outcome)
            else:
                replies.append(replace(outcome, payload=keep(outcome.payload)))
                trained += outcome.answer.trained
            if waiting and closing and closing.reached(trained, waiting.values()):
                for late_identity, client in waiting.items():
                    self._inbox.late[late_identity] = self._nodes[client]
                    failures.append(Failure(client, "late", ENOUGH))
                return replies, failures
        for client in waiting.values():
            failures.append(Failure(client, "lost", f"no complete answer within {seconds:.0f} s"))
        return replies, failures

    def _recipients(
        self, requests: Mapping[str, Request], closing: Closing | None
    ) -> tuple[Sequence[str], Sequence[str]]:
        """Return the clients with a node that is online, in order: those to send to, and those that are behind.

        A client is behind while its node works on an earlier request. If the exchange cannot close without this client,
        the engine still sends the request.
        """
        busy = set(self._inbox.late.values())
        clients = []
        behind = []
        for client in sorted(requests):
            node = self._nodes.get(client)
            if node is None or not self._is_online(node):
                continue
            may_skip = closing is not None and client not in closing.awaited
            if node in busy and may_skip:
                behind.append(client)
            else:
                clients.append(client)
        return clients, behind

    def _send(self, blob: bytes, requests: Sequence[Request], seconds: float) -> dict[str, str]:
        """Send the requests. Return the client by message id, without the clients that it could not be sent to.

        The messages share one record of tensors, so that it is held, hashed and sent once.
        """
        contents = [fitins_to_recorddict(request_to_fit_ins(blob, request), keep_input=True) for request in requests]
        if self.simulated and contents:
            for array in contents[0].array_records["fitins.parameters"].values():
                array.data = cast(bytes, InRay(blob))  # Flower passes it on without reading it
        messages: list[Message] = []
        for request, content in zip(requests, contents, strict=True):
            content.update(contents[0].array_records)
            node = self._nodes[request.client]
            ttl = seconds + GRACE_SECONDS
            messages.append(Message(content, node, MessageType.TRAIN, ttl=ttl, group_id=str(request.round)))
        pushed = zip(requests, self._push(messages), strict=True)
        return {identity: request.client for request, identity in pushed if identity is not None}

    def _push(self, messages: Sequence[Message]) -> list[str | None]:
        """Send messages. Return the id of each; ``None`` for a message that Flower did not accept.

        If the answer to a part is lost, Flower sends the part again, and the SuperLink refuses what it has. All is sent
        again then, which is to send what is missing.
        """
        for attempt in range(ATTEMPTS):
            try:
                with self._limit:
                    accepted = set(self.grid.push_messages(messages))
                break
            except ObjectPushError:
                if attempt == ATTEMPTS - 1:
                    raise
        identities = [message.metadata.message_id for message in messages]
        return [identity if identity in accepted else None for identity in identities]

    def _pull(self, identities: set[str]) -> Iterator[tuple[str, Message | None]]:
        """Yield the complete replies to messages as :meth:`.Inbox.pull` does, each received within the time limit."""
        replies = iter(self._inbox.pull(identities))
        while True:
            with self._limit:
                reply = next(replies, None)
            if reply is None:
                return
            yield reply

    def _receive(
        self, waiting: set[str], deadline: Deadline, report: Callable[[], None]
    ) -> Iterator[tuple[str, Message | None]]:
        """Yield the replies to the messages ``waiting`` as they arrive, until all are there or the deadline passes.

        ``report`` is called before each pause.
        """
        while waiting:
            has_reply = False
            for identity, message in self._pull(waiting | self._asked.keys()):
                if identity in self._asked:
                    self._note_registration(identity, message)
                    continue
                waiting.discard(identity)
                has_reply = True
                yield identity, message
            if deadline.passed:
                return
            if waiting:
                report()
                self._pause(deadline, has_reply=has_reply)

    def _title(self, node: int) -> str:
        """Return what a node is called in the record: the client that its key is enrolled for, or its number."""
        return self._states[node].name or f"node {node}"

    def _lost_reason(self, node: int, asked: float, flower_reason: str) -> str:
        """Return why a node sent no reply: whether it is online, with Flower's reason in brackets.

        Args:
            node: the node.
            asked: when it was asked, on the monotonic clock.
            flower_reason: Flower's reason.
        """
        seconds = time.monotonic() - asked
        self._update_nodes()
        state = "its node is online: its ClientApp ended without a reply, or its connection broke"
        if not self._is_online(node):
            state = "its node is offline: it was stopped, killed or dismissed, or cannot reach the SuperLink"
        return f"no reply {seconds:.0f} s after it was asked; {state} ({flower_reason})"

    def _read(
        self,
        name: str,
        node: int,
        asked: float,
        message: Message | None,
        read: Callable[[RecordDict], Outcome | Failure],
    ) -> Outcome | Failure:
        """Return what ``read`` makes of a reply's content, or the failure that the reply is.

        Args:
            name: the client or node that replied.
            node: the node.
            asked: when it was asked, on the monotonic clock.
            message: the reply; ``None`` if its parts were lost.
            read: reads the content.

        Raises:
            EngineError: Ray lost the reply, or its cluster cannot go on. Flower's simulation has a code of its own for
                each error that a client raises, so the code ``UNKNOWN`` comes from Ray alone.
        """
        if message is None:
            return Failure(name, "lost", "its answer did not arrive whole: no part came for 180 s, or it is too large")
        if message.has_error():
            if self.simulated and message.error.code == ENDS_RUN:
                raise EngineError(message.error.reason)
            if self.simulated and message.error.code == ErrorCode.UNKNOWN:
                raise EngineError(
                    f"the Ray actor that trained {name} died, most likely for want of memory; "
                    "go on with resume=true and fewer actors (engine.actors=1)"
                )
            reason = message.error.reason or f"Flower's error {message.error.code}"
            if message.error.code in NO_REPLY:
                reason = self._lost_reason(node, asked, reason)
            return Failure(name, "lost", reason)
        try:
            return read(message.content)
        except PayloadError as error:
            return Failure(name, "refused", str(error))
        except Exception as error:  # Flower can raise any type on records of a client that is not ours
            return Failure(name, "refused", f"not the answer of a Goldfinch client: {error!r}")

    def _pause(self, deadline: Deadline, *, has_reply: bool = False) -> None:
        """Sleep until the next poll; see :data:`MAX_DELAY_SHARE`.

        A node that was killed is offline for a moment only, from when it ought to have reported to when it is back, and
        only then does Flower say that its request is lost: that moment is not slept through.

        Args:
            deadline: when the wait ends; the pause grows with the time since it began.
            has_reply: a reply has just arrived, so that others are likely to follow at once.
        """
        pause = max(MIN_PAUSE_SECONDS, self._inbox.poll_seconds / MAX_POLLING_SHARE)
        if not has_reply:
            pause = max(pause, MAX_DELAY_SHARE * deadline.elapsed)
        if any(state.online and state.until <= time.monotonic() for state in self._states.values()):
            self._update_nodes()
        left = min([state.until for state in self._states.values() if state.online], default=inf) - time.monotonic()
        if left > 0:
            pause = min(pause, left + MIN_PAUSE_SECONDS)
        pause = min(pause, MAX_PAUSE_SECONDS, deadline.left)
        time.sleep(max(0.0, pause))

    def close(self) -> None:
        """Release nothing: the nodes are Flower's."""


class InRay:
    """A message's tensors in Ray's object store, once for all clients. Pickling it gives the reference to them.

    The tensors are stored as bytes, which clients copy. Clients would read an array in place, and it would stay in the
    store for the rest of the run.

    Args:
        blob: the encoded tensors.
    """

    def __init__(self, blob: bytes) -> None:
        self.blob = blob
        self.reference: Any = None
        self._once = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        import ray  # only a simulation has it

        # Flower's threads pickle messages at the same time. Of two references the first would be lost with its object,
        # and the actor that was sent it would wait for it until the round's limit.
        with self._once:
            if self.reference is None:
                self.reference = ray.put(self.blob)
        return ray.get, (self.reference,)


def _registrations(content: RecordDict) -> list[Registration]:
    return properties_to_registrations(recorddict_to_getpropertiesres(content))


def _reply(request: Request, content: RecordDict) -> Reply | Failure:
    """Return a client's reply to ``request``, or its failure."""
    client = request.client
    result = recorddict_to_fitres(content, keep_input=False)
    if result.status.code != Code.OK:
        trace = result.metrics.get("traceback")
        return Failure(client, "failed", result.status.message, trace if isinstance(trace, str) else "")
    try:
        answer, payload, bytes_up = fit_res_to_answer(result)
    except PayloadError as error:
        bytes_up = sum(len(tensor) for tensor in result.parameters.tensors)
        return Failure(client, "refused", str(error), bytes_up=bytes_up)
    return Reply(client, answer, payload, bytes_up)
