"""The relay's work: passes messages from the coordinator to one SuperLink, and replies back.

It keeps ids, not tensors. A message's objects go from the stream to the SuperLink one at a time, and a reply's objects
from the SuperLink to the stream. A reply stays in the SuperLink's store until the coordinator has confirmed it, so a
broken connection loses nothing: what was not confirmed is sent again.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
from flwr.proto.runtime_pb2 import (
    GetNodesRequest,
    GetNodesResponse,
    PullAppMessagesRequest,
    PushAppMessagesRequest,
)
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.superlink.grid.http_grid import HttpGrid

from server.relay.frames import MAX_BODY_BYTES, MAX_NODES, MAX_REPLY_BYTES, Frame, FrameError

MAX_WAITING_FRAMES = 4
"""Frames that wait to be sent. Fetching replies pauses while there are more: gRPC's flow control reaches this queue."""

MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.05, 3.0
MAX_DELAY_SHARE, MAX_POLLING_SHARE = 0.05, 0.1
"""As in :mod:`server.engines.flower`: a reply is noticed 0.05 of its time later, and polling takes at most a tenth."""

PROBE_SECONDS = 3.0
MAX_FAILED_PROBES = 4
"""Probes of the SuperLink's port that fail one after the other before the relay ends."""


class ConnectionLost(Exception):  # noqa: N818  # not an error of the relay: it connects again
    """The stream to the coordinator is closed."""


@dataclass
class Batch:
    """Messages that are being pushed to the SuperLink.

    Args:
        missing: ids of the objects that the SuperLink still needs.
        session: Flower's id of the upload.
        refused: ids of messages that the SuperLink did not accept.
    """

    missing: list[str]
    session: str
    refused: list[str]


@dataclass
class Announced:
    """A reply that the SuperLink has announced.

    Args:
        reply: id of the reply's message.
        parts: ids of its objects.
        connection: the connection that it is sent over.
        sent: how many of its objects were sent there.
        size: bytes of those.
        complete: all were sent there; the coordinator has not confirmed the reply yet.
    """

    reply: str
    parts: list[str]
    connection: Outgoing | None = None
    sent: int = 0
    size: int = 0
    complete: bool = False

    def send_over(self, connection: Outgoing) -> None:
        """Begin again if ``connection`` is a new one."""
        if self.connection is not connection:
            self.connection = connection
            self.sent = 0
            self.size = 0
            self.complete = False


@dataclass(eq=False)
class Outgoing:
    """The frames to send over one connection; a bounded queue that a broken connection closes."""

    frames: queue.Queue[Frame] = field(default_factory=lambda: queue.Queue(MAX_WAITING_FRAMES))
    closed: threading.Event = field(default_factory=threading.Event)

    def put(self, frame: Frame) -> None:
        """Add a frame; wait while the queue is full.

        Raises:
            ConnectionLost: the connection is closed.
        """
        while not self.closed.is_set():
            try:
                self.frames.put(frame, timeout=0.2)
            except queue.Full:
                continue
            return
        raise ConnectionLost

    def encoded(self) -> Iterator[bytes]:
        """Yield the frames as bytes until the connection is closed.

        gRPC drops this iterator once the stream has ended. That closes the queue: whoever waits in :meth:`put` may be
        the thread that reads the stream, which would not notice its end otherwise.
        """
        try:
            while not self.closed.is_set():
                try:
                    frame = self.frames.get(timeout=0.2)
                except queue.Empty:
                    continue
                yield frame.encode()
        finally:
            self.closed.set()


class RelayWorker:
    """Passes messages and replies between the coordinator and one SuperLink.

    Args:
        grid: Flower's way to the SuperLink.
        code: hash of this process's code.
        task: Flower's id of this task.

    Attributes:
        ended: why one side has ended the connection for good; ``None`` before, empty at the regular end.
        heard: when the coordinator's last frame arrived, on the monotonic clock; 0 before the first.
    """

    def __init__(self, grid: HttpGrid, code: str, task: int) -> None:
        self.grid = grid
        self.code = code
        self.task = task
        self.run = grid.run.run_id
        self.ended: str | None = None
        self.heard = 0.0
        self._lock = threading.Lock()
        self._waiting: set[str] = set()  # messages without an announced reply
        self._announced: dict[str, Announced] = {}  # by the id of the message that is answered
        self._batches: dict[int, Batch] = {}
        self._out = Outgoing()
        self._out.closed.set()
        self._last_reply = time.monotonic()

    # ---- the connection ----------------------------------------------------------------------------------------------

    def connected(self) -> Outgoing:
        """Begin a new connection. Return its queue, which starts with ``hello``."""
        out = Outgoing()
        fields = {"code": self.code, "run": self.run, "task": self.task, "insecure": self.grid._insecure}
        out.put(Frame("hello", fields))
        self._out = out
        return out

    def serve(self, frames: Iterator[Frame]) -> None:
        """Handle the coordinator's frames until the connection or the relay ends.

        Args:
            frames: the frames of the present connection.

        Raises:
            ConnectionLost: the connection was closed.
            FrameError: a frame that no coordinator sends.
        """
        handlers: dict[str, Callable[[Frame], None]] = {
            "welcome": self._welcome,
            "list": self._list,
            "push": self._push,
            "object": self._object,
            "taken": self._taken,
            "end": self._end,
        }
        for frame in frames:
            self.heard = time.monotonic()
            handler = handlers.get(frame.kind)
            if handler is None:
                raise FrameError(f"the coordinator sent a frame {frame.kind!r}, which this relay does not know")
            handler(frame)
            if self.ended is not None:
                return

    def say_end(self, reason: str) -> None:
        """Tell the coordinator that this relay ends, if it is connected."""
        self.ended = reason
        try:
            self._out.put(Frame("end", {"reason": reason}))
        except ConnectionLost:
            return

    def _end(self, frame: Frame) -> None:
        self.ended = frame.text("reason")

    def _welcome(self, frame: Frame) -> None:
        """Do nothing: the coordinator has accepted the connection."""

    # ---- from the coordinator ----------------------------------------------------------------------------------------

    def _list(self, frame: Frame) -> None:
        """Send the nodes that are online."""
        nodes = list(self.grid._runtime_client.GetNodes(GetNodesRequest()).nodes)
        number = frame.number("number")
        for first in range(0, max(1, len(nodes)), MAX_NODES):
            body = GetNodesResponse(nodes=nodes[first : first + MAX_NODES]).SerializeToString()
            last = first + MAX_NODES >= len(nodes)
            self._out.put(Frame("nodes", {"number": number, "last": last}, body))

    def _push(self, frame: Frame) -> None:
        """Announce a batch to the SuperLink, and ask the coordinator for the objects that the SuperLink lacks.

        After a new connection, the coordinator sends batches again that were not confirmed; the SuperLink knows them.
        """
        number = frame.number("batch")
        if number not in self._batches:
            request = PushAppMessagesRequest.FromString(frame.body)
            response = self.grid._runtime_client.PushMessages(request)
            refused = []
            accepted = []
            for head, identity in zip(request.messages_list, response.message_ids, strict=True):
                if identity:
                    accepted.append(identity)
                else:
                    refused.append(head.metadata.message_id)
            self._batches[number] = Batch(list(response.objects_to_push), response.session_id, refused)
            with self._lock:
                self._waiting.update(accepted)
        self._continue(number)

    def _continue(self, number: int) -> None:
        """Ask for the objects that a batch lacks, or confirm it."""
        batch = self._batches[number]
        if batch.missing:
            self._out.put(Frame("need", {"batch": number, "objects": batch.missing[:1000]}))
        else:
            self._out.put(Frame("pushed", {"batch": number, "refused": batch.refused}))

    def _object(self, frame: Frame) -> None:
        """Push one object to the SuperLink."""
        number = frame.number("batch")
        identity = frame.text("object")
        batch = self._batches.get(number)
        if batch is None:
            raise FrameError("the coordinator sent an object of no batch")
        if identity not in batch.missing:
            return
        request = PushObjectRequest(
            node=self.grid.node,
            run_id=self.run,
            object_id=identity,
            object_content=frame.body,
            session_id=batch.session,
        )
        response = self.grid._runtime_client.PushObject(request)
        if response.stored:
            batch.missing.remove(identity)
        else:  # the upload took too long; Flower has deleted its messages, and replies to them with errors
            batch.missing.clear()
            self._continue(number)
            return
        if frame.fields.get("last"):
            self._continue(number)

    def _taken(self, frame: Frame) -> None:
        """Allow the SuperLink to delete a reply."""
        with self._lock:
            announced = self._announced.pop(frame.text("message"), None)
        if announced is not None:
            self._confirm(announced)

    def _confirm(self, announced: Announced) -> None:
        request = ConfirmMessageReceivedRequest(node=self.grid.node, run_id=self.run, message_object_id=announced.reply)
        self.grid._runtime_client.ConfirmMessageReceived(request)

    # ---- from the SuperLink ------------------------------------------------------------------------------------------

    def fetch_replies(self, ended: threading.Event) -> None:
        """Poll the SuperLink for replies and send them, until ``ended`` is set."""
        while not ended.is_set():
            out = self._out
            if out.closed.is_set():
                ended.wait(MIN_PAUSE_SECONDS)
                continue
            try:
                pause = self._poll(out)
            except ConnectionLost:
                continue
            ended.wait(pause)

    def _poll(self, out: Outgoing) -> float:
        """Send what the SuperLink has. Return the seconds until the next poll."""
        with self._lock:
            waiting = set(self._waiting)
        began = time.monotonic()
        if waiting:
            self._announce(waiting)
        polling = time.monotonic() - began
        has_reply = False
        for message, announced in self._to_send(out):
            if self._send(message, announced, out):
                has_reply = True
        if has_reply:
            self._last_reply = time.monotonic()
        if not waiting:
            self._last_reply = time.monotonic()
            return MIN_PAUSE_SECONDS
        pause = max(MIN_PAUSE_SECONDS, polling / MAX_POLLING_SHARE)
        if not has_reply:
            pause = max(pause, MAX_DELAY_SHARE * (time.monotonic() - self._last_reply))
        return min(pause, MAX_PAUSE_SECONDS)

    def _announce(self, waiting: set[str]) -> None:
        """Ask the SuperLink which messages have replies."""
        pulled = self.grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=waiting))
        with self._lock:
            for head, tree in zip(pulled.messages_list, pulled.message_object_trees, strict=True):
                message = head.metadata.reply_to_message_id
                parts = dict.fromkeys(part.object_id for part in iterate_object_tree(tree))  # unique, in order
                self._announced[message] = Announced(head.metadata.message_id, list(parts))
                self._waiting.discard(message)

    def _to_send(self, out: Outgoing) -> list[tuple[str, Announced]]:
        """Return the announced replies that were not sent over the present connection."""
        found = []
        with self._lock:
            for message, announced in self._announced.items():
                announced.send_over(out)
                if not announced.complete:
                    found.append((message, announced))
        return found

    def _send(self, message: str, announced: Announced, out: Outgoing) -> bool:
        """Send the parts of a reply that have arrived. Return whether it is complete, or lost."""
        while announced.sent < len(announced.parts):
            identity = announced.parts[announced.sent]
            part = self.grid._runtime_client.PullObject(
                PullObjectRequest(node=self.grid.node, run_id=self.run, object_id=identity)
            )
            if not part.object_available:
                if part.object_found:
                    return False  # its sender is still sending it
                return self._give_up(message, announced, "a part of its reply got lost on the way", out)
            content = part.object_content
            if len(content) > MAX_BODY_BYTES or announced.size + len(content) > MAX_REPLY_BYTES:
                return self._give_up(message, announced, "its reply is too large", out)
            out.put(Frame("part", {"message": message, "object": identity}, content))
            announced.size += len(content)
            announced.sent += 1
        announced.complete = True
        out.put(Frame("reply", {"message": message, "reply": announced.reply}))
        return True

    def _give_up(self, message: str, announced: Announced, reason: str, out: Outgoing) -> bool:
        """Tell the coordinator that a reply is lost. It confirms this as it confirms a reply."""
        announced.complete = True
        out.put(Frame("lost", {"message": message, "reason": reason}))
        return True


def watch_superlink(address: str, ended: threading.Event, gone: Callable[[], None]) -> None:
    """Call ``gone`` once the port of the SuperLink refuses connections several times in a row.

    Flower repeats a call to a SuperLink without limit, so the relay would not notice otherwise. A SuperLink that is
    busy still accepts connections.

    Args:
        address: ``host:port``.
        ended: stops the probes.
        gone: called at most once.
    """
    host, _, port = address.rpartition(":")
    failed = 0
    while not ended.wait(PROBE_SECONDS):
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_SECONDS):
                failed = 0
        except OSError:
            failed += 1
        if failed >= MAX_FAILED_PROBES:
            gone()
            return
