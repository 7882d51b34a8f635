"""The coordinator's end of the relays' connections: a gRPC server, and what is on its way to and from each SuperLink.

The server's certificate is drawn for each run and is the only one that relays trust. A relay is accepted if the SHA-256
of its token was read from the log of the run that this coordinator submitted; see :mod:`server.relay.app`. Before that
no frame of it is read.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import GetNodesResponse
from flwr.supercore.inflatable.inflatable_object import InflatableObject

from common.errors import EngineError
from common.versions import code_sha256
from server.admission.certificates import self_signed
from server.relay.frames import (
    BEARER,
    CHANNEL_OPTIONS,
    MAX_REPLY_BYTES,
    NAME,
    STREAM,
    TOKEN,
    Frame,
    FrameError,
    decode,
)

MAX_STORED_BYTES = 64 * 2**20
"""Bytes of whole replies that wait for the engine, for each SuperLink. Beyond them nothing is read from its relay."""

GOODBYE_SECONDS = 3.0
"""Seconds that a relay has to read its last frame."""


@dataclass(frozen=True, eq=False)
class Received:
    """What became of a message.

    Args:
        reply: id of the reply's message; empty if there is none.
        parts: the reply's objects by id.
        problem: why there is no reply.
    """

    reply: str
    parts: Mapping[str, bytes] = field(default_factory=dict)
    problem: str = ""

    @property
    def size(self) -> int:
        """Bytes of the objects."""
        return sum(map(len, self.parts.values()))


@dataclass(frozen=True, eq=False)
class Batch:
    """Messages for one SuperLink that it has not confirmed yet.

    Args:
        run: Flower's id of the relay's run that they are for.
        identities: the messages' ids.
        body: Flower's ``PushAppMessagesRequest``.
        objects: all objects of the messages, by id. They share the tensors.
    """

    run: int
    identities: Sequence[str]
    body: bytes
    objects: Mapping[str, InflatableObject]


class Connection:
    """One connection of a relay: frames to send, made when they are sent."""

    def __init__(self) -> None:
        self._frames: deque[Callable[[], Frame]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._ends = False

    @property
    def closed(self) -> bool:
        """Whether the connection is closed."""
        return self._closed

    def send(self, make: Callable[[], Frame]) -> None:
        """Send the frame that ``make`` returns, when the relay can take it."""
        with self._changed:
            self._frames.append(make)
            self._changed.notify_all()

    def end(self, reason: str) -> None:
        """Send what waits, then that this relay is not needed any more, and close.

        Args:
            reason: why; empty at the run's regular end.
        """
        with self._changed:
            self._frames.append(lambda: Frame("end", {"reason": reason}))
            self._ends = True
            self._changed.notify_all()

    def close(self) -> None:
        """Close at once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def encoded(self) -> Iterator[bytes]:
        """Yield the frames as bytes until the connection is closed."""
        while True:
            with self._changed:
                while not (self._frames or self._closed or self._ends):
                    self._changed.wait()
                if self._closed or not self._frames:
                    return
                make = self._frames.popleft()
            yield make().encode()


class Shard:
    """One SuperLink and its relay, as the coordinator sees them.

    Args:
        name: name of the connection in Flower's ``config.toml``.

    Attributes:
        run, task: Flower's ids of the relay's run and task at this SuperLink.
        insecure: whether the SuperLink works without TLS, and so without keys of nodes.
        problem: why the relay has ended; empty while it has not.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.run = 0
        self.task = 0
        self.insecure = False
        self.problem = ""
        self.changed = threading.Condition(threading.RLock())
        self._connection: Connection | None = None
        self._since = time.monotonic()
        self._is_ready = False
        self._is_connected = False
        self._lists = 0
        self._listing: list[NodeInfo] = []
        self._listed = 0
        self._nodes: list[NodeInfo] = []
        self._awaited: set[str] = set()
        self._parts: dict[str, dict[str, bytes]] = {}
        self._received: dict[str, Received] = {}
        self._stored = 0
        self._batches: dict[int, Batch] = {}
        self._last_batch = 0

    # ---- the connection ----------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether a relay has connected and is not lost; its connection may be broken for a while."""
        return self._is_ready

    @property
    def away(self) -> float:
        """Seconds since a relay was connected or, before that, expected; 0 while it is."""
        if self._is_connected:
            return 0.0
        return time.monotonic() - self._since

    def expect(self) -> None:
        """Expect a new relay, which knows nothing of an earlier one's messages."""
        with self.changed:
            self.problem = ""
            self._is_ready = False
            self._since = time.monotonic()

    def connect(self, connection: Connection) -> None:
        """Take a new connection of the relay in place of an earlier one."""
        with self.changed:
            if self._connection is not None:
                self._connection.close()
            self._connection = connection
            self._is_connected = False
            self._parts.clear()
            self._listing = []
            connection.send(lambda: Frame("welcome"))

    def disconnect(self, connection: Connection) -> None:
        """Note that a connection is closed. What is on its way waits for the next one."""
        connection.close()
        with self.changed:
            if self._connection is connection:
                self._connection = None
                self._is_connected = False
                self._since = time.monotonic()
            self.changed.notify_all()

    def lose(self, reason: str) -> None:
        """Give up the relay: every message that has no reply gets ``reason`` in its place."""
        with self.changed:
            if self._connection is not None:
                self._connection.close()
            self._connection = None
            self._is_connected = False
            self._is_ready = False
            self._since = time.monotonic()
            self._nodes = []
            self._listed = self._lists
            self._batches.clear()
            self._parts.clear()
            for identity in self._awaited:
                self._received[identity] = Received("", problem=reason)
            self._awaited.clear()
            self.changed.notify_all()

    def end(self) -> None:
        """Tell the relay that the run has ended."""
        with self.changed:
            connection = self._connection
        if connection is not None:
            connection.end("")

    # ---- to the nodes ------------------------------------------------------------------------------------------------

    def ask_for_nodes(self) -> int:
        """Ask which nodes are online. Return the number of the question; 0 without a relay."""
        with self.changed:
            if not self._is_ready:
                return 0
            self._lists += 1
            number = self._lists
            self._send(_list_frame(number))
            return number

    def nodes(self, number: int, deadline: float) -> list[NodeInfo]:
        """Return the nodes that were online when question ``number`` was answered, or earlier if that takes too long.

        Args:
            number: what :meth:`ask_for_nodes` returned.
            deadline: when to stop waiting, on the monotonic clock.
        """
        with self.changed:
            while self._is_ready and self._listed < number:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self.changed.wait(left)
            if not self._is_ready:
                return []
            return list(self._nodes)

    def push(self, batch: Batch) -> bool:
        """Send messages, over the next connection if the present one is broken. Return whether there is a relay."""
        with self.changed:
            if not self._is_ready or batch.run != self.run:
                return False
            self._last_batch += 1
            number = self._last_batch
            self._batches[number] = batch
            self._awaited.update(batch.identities)
            if len(self._batches) == 1:
                self._send(_push_frame(number, batch))
            return True

    def _push_next(self) -> None:
        """Send the first batch that is not confirmed, if there is one; the caller holds the lock."""
        for number, batch in self._batches.items():
            self._send(_push_frame(number, batch))
            return

    def _send(self, make: Callable[[], Frame]) -> None:
        """Send a frame if a relay is connected; the caller holds the lock."""
        if self._connection is not None and self._is_connected:
            self._connection.send(make)

    # ---- from the nodes ----------------------------------------------------------------------------------------------

    def take(self, wanted: set[str]) -> tuple[str, Received] | None:
        """Return a message of ``wanted`` and what became of it, once; ``None`` if nothing has arrived.

        What became of other messages is forgotten.
        """
        with self.changed:
            while self._received:
                identity, received = self._received.popitem()
                self._stored -= received.size
                self.changed.notify_all()
                if identity in wanted:
                    return identity, received
            return None

    def handle(self, connection: Connection, frame: Frame) -> None:
        """Handle one frame of the relay.

        Raises:
            FrameError: a frame that no relay sends, or not at this time.
        """
        handlers: dict[str, Callable[[Connection, Frame], None]] = {
            "nodes": self._take_nodes,
            "need": self._take_need,
            "pushed": self._take_pushed,
            "part": self._take_part,
            "reply": self._take_reply,
            "lost": self._take_lost,
            "end": self._take_end,
        }
        if frame.kind == "hello":
            self._take_hello(connection, frame)
            return
        if frame.kind not in handlers or not self._is_connected:
            raise FrameError(f"the relay of {self.name} sent {frame.kind!r} at the wrong time")
        handlers[frame.kind](connection, frame)

    def _take_hello(self, connection: Connection, frame: Frame) -> None:
        """Check the relay's code, then send again what was not confirmed."""
        own = code_sha256()
        code = frame.text("code")
        if code != own:
            reason = f"the relay runs code {code}, the server {own}; install the same Goldfinch on both"
            with self.changed:
                self.problem = reason
                self.changed.notify_all()
            connection.end(reason)
            return
        with self.changed:
            if self._connection is not connection:
                return
            self.run = frame.number("run")
            self.task = frame.number("task")
            self.insecure = frame.fields.get("insecure") is True
            self._is_ready = True
            self._is_connected = True
            self._push_next()
            if self._listed < self._lists:
                connection.send(_list_frame(self._lists))
            self.changed.notify_all()

    def _take_nodes(self, _: Connection, frame: Frame) -> None:
        with self.changed:
            self._listing.extend(GetNodesResponse.FromString(frame.body).nodes)
            if frame.fields.get("last"):
                self._nodes = self._listing
                self._listing = []
                self._listed = frame.number("number")
                self.changed.notify_all()

    def _take_need(self, connection: Connection, frame: Frame) -> None:
        number = frame.number("batch")
        wanted = frame.texts("objects")
        with self.changed:
            batch = self._batches.get(number)
        if batch is None:
            return
        for position, identity in enumerate(wanted):
            if identity not in batch.objects:
                raise FrameError(f"the relay of {self.name} needs an object that no message has")
            last = position == len(wanted) - 1
            connection.send(_object_frame(number, identity, batch.objects[identity], last))

    def _take_pushed(self, _: Connection, frame: Frame) -> None:
        with self.changed:
            if self._batches.pop(frame.number("batch"), None) is not None:
                self._push_next()
            for identity in frame.texts("refused"):
                self._finish(identity, Received("", problem="its SuperLink did not accept the message"))

    def _take_part(self, _: Connection, frame: Frame) -> None:
        message = frame.text("message")
        with self.changed:
            if message not in self._awaited:
                return
            parts = self._parts.setdefault(message, {})
            parts[frame.text("object")] = frame.body
            if sum(map(len, parts.values())) > MAX_REPLY_BYTES:
                raise FrameError(f"the relay of {self.name} sent a reply that is too large")

    def _take_reply(self, connection: Connection, frame: Frame) -> None:
        """Store a whole reply, once there is room: the relay's stream is not read before."""
        message = frame.text("message")
        with self.changed:
            received = Received(frame.text("reply"), self._parts.pop(message, {}))
            while self._stored and self._stored + received.size > MAX_STORED_BYTES and not connection.closed:
                self.changed.wait(1.0)
            self._finish(message, received)
        connection.send(lambda: Frame("taken", {"message": message}))

    def _take_lost(self, connection: Connection, frame: Frame) -> None:
        message = frame.text("message")
        with self.changed:
            self._parts.pop(message, None)
            self._finish(message, Received("", problem=frame.text("reason")))
        connection.send(lambda: Frame("taken", {"message": message}))

    def _take_end(self, _: Connection, frame: Frame) -> None:
        with self.changed:
            self.problem = frame.text("reason") or "its relay ended"
            self.changed.notify_all()

    def _finish(self, message: str, received: Received) -> None:
        """Note what became of a message that has no reply yet; the caller holds the lock."""
        if message not in self._awaited:
            return
        self._awaited.discard(message)
        self._received[message] = received
        self._stored += received.size
        self.changed.notify_all()


def _list_frame(number: int) -> Callable[[], Frame]:
    return lambda: Frame("list", {"number": number})


def _push_frame(number: int, batch: Batch) -> Callable[[], Frame]:
    return lambda: Frame("push", {"batch": number}, batch.body)


def _object_frame(number: int, identity: str, content: InflatableObject, last: bool) -> Callable[[], Frame]:
    """Return what makes an object's frame; the object becomes bytes only when it is sent."""
    return lambda: Frame("object", {"batch": number, "object": identity, "last": last}, content.deflate())


class Coordinator:
    """Accepts the connections of relays.

    Args:
        shards: the SuperLinks.
        listen: ``host:port`` to listen on; port 0 lets the system choose one.
        advertised: ``host:port`` that relays connect to; ``None`` is what is listened on.

    Attributes:
        certificate: the server's certificate, PEM.
        address: ``host:port`` that relays connect to.

    Raises:
        EngineError: the address cannot be listened on.
    """

    def __init__(self, shards: Sequence[Shard], listen: str, advertised: str | None = None) -> None:
        self.shards = shards
        self._tokens: dict[str, Shard] = {}  # by SHA-256
        key, self.certificate = self_signed(NAME)
        workers = ThreadPoolExecutor(2 * len(shards) + 4, thread_name_prefix="relay")
        self._server = grpc.server(workers, options=list(CHANNEL_OPTIONS), maximum_concurrent_rpcs=4 * len(shards) + 8)
        handler = grpc.stream_stream_rpc_method_handler(self._connect)
        service, _, method = STREAM.strip("/").partition("/")
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        credentials = grpc.ssl_server_credentials([(key, self.certificate)])
        try:
            port = self._server.add_secure_port(listen, credentials)
        except RuntimeError as error:
            raise EngineError(
                f"engine.listen={listen}: this address cannot be listened on; name an address of this machine and a "
                "free port, or port 0"
            ) from error
        self.address = advertised or f"{listen.rpartition(':')[0]}:{port}"
        self._server.start()

    def accept(self, token: str, shard: Shard) -> None:
        """Accept the relay with this token for a SuperLink, and no earlier one.

        Args:
            token: SHA-256 of the relay's token, 64 hex digits.
            shard: the relay's SuperLink.
        """
        self.forget(shard)
        shard.expect()
        self._tokens[token] = shard

    def forget(self, shard: Shard) -> None:
        """Accept no relay for a SuperLink."""
        for token, other in list(self._tokens.items()):
            if other is shard:
                del self._tokens[token]

    def close(self) -> None:
        """Tell all relays that the run has ended, and stop the server."""
        for shard in self.shards:
            shard.end()
        self._server.stop(GOODBYE_SECONDS).wait()

    def _connect(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterable[bytes]:
        shard = self._shard_of(context.invocation_metadata())
        if shard is None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "this coordinator does not know the relay's token")
            return  # not reached: abort raises
        connection = Connection()
        context.add_callback(lambda: shard.disconnect(connection))
        shard.connect(connection)
        threading.Thread(target=self._read, args=(shard, connection, requests), daemon=True).start()
        yield from connection.encoded()

    def _shard_of(self, metadata: Sequence[Any]) -> Shard | None:
        """Return the SuperLink of the relay that has the token in a call's metadata."""
        for key, value in metadata:
            if key == TOKEN and isinstance(value, str):
                token = value.removeprefix(BEARER)
                return self._tokens.get(hashlib.sha256(token.encode()).hexdigest())
        return None

    @staticmethod
    def _read(shard: Shard, connection: Connection, requests: Iterator[bytes]) -> None:
        """Handle a relay's frames until its connection is closed."""
        try:
            for content in requests:
                if connection.closed:
                    break
                shard.handle(connection, decode(content))
        except FrameError as error:
            connection.end(str(error))
        except Exception:  # grpc raises a bare Exception of its own when the stream breaks
            shard.disconnect(connection)
