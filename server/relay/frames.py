"""The frames that a relay and the coordinator send each other: a small JSON header and bytes, never pickled.

Frames travel in one bidirectional gRPC stream, :data:`STREAM`. The relay opens it. This module imports neither torch
nor Flower.

=========  ==============  ============================================================================================
kind       sender          content
=========  ==============  ============================================================================================
hello      relay           ``code`` (hash of its code), ``run`` and ``task`` (Flower's ids), ``insecure`` (no TLS)
welcome    coordinator     the connection is accepted
list       coordinator     ``number``: asks which nodes are online
nodes      relay           ``number``, ``last``; body: Flower's ``GetNodesResponse``, at most 2,000 nodes a frame
push       coordinator     ``batch``; body: Flower's ``PushAppMessagesRequest``, at most 64 messages
need       relay           ``batch``, ``objects``: ids of the objects that the SuperLink does not have yet
object     coordinator     ``batch``, ``object``, ``last``; body: the object
pushed     relay           ``batch``, ``refused``: ids of messages that the SuperLink did not accept
part       relay           ``message``, ``object``: one object of the reply to a message; body: the object
reply      relay           ``message``, ``reply``: all parts of the reply with this id were sent
lost       relay           ``message``, ``reason``: there will be no reply
taken      coordinator     ``message``: the ``reply`` or ``lost`` has arrived, and the SuperLink may delete the reply
end        both            ``reason``: the sender ends the connection for good
=========  ==============  ============================================================================================
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from common.errors import EngineError

STREAM = "/goldfinch.Relay/Connect"
"""The gRPC method."""

NAME = "goldfinch-coordinator"
"""The name in the coordinator's certificate. Relays expect it at every address."""

TOKEN = "authorization"  # noqa: S105  # the name of the metadata, not a secret
"""The gRPC metadata that has the relay's token, after :data:`BEARER`."""

BEARER = "Bearer "

ANNOUNCEMENT = "goldfinch relay sha256:"
"""What a relay prints before the SHA-256 of its token."""

MAX_FRAME_BYTES = 16 * 2**20
"""Largest frame. Flower sends arrays in objects of 5 MB."""

MAX_BODY_BYTES = MAX_FRAME_BYTES - 2**20
MAX_HEADER_BYTES = 2**20 - 4
MAX_BATCH = 64
"""Messages in one ``push``. Flower gives each upload 180 seconds, so one batch is pushed after the other."""

MAX_NODES = 2000
"""Nodes in one ``nodes``."""

MAX_REPLY_BYTES = 2 * 2**30 + 2**20
"""Largest reply; the same as :data:`server.engines.inbox.MAX_REPLY_BYTES`. Importing that module would import torch."""

RECONNECT_SECONDS = 15.0
"""Seconds that a broken connection has to come back before the relay counts as lost."""

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)
"""Options of both ends: limits of size, and pings that detect that the peer's machine is gone."""


class FrameError(EngineError):
    """A frame cannot be read or written."""


@dataclass(frozen=True)
class Frame:
    """One frame.

    Args:
        kind: see the module's table.
        fields: the header's other fields: JSON values.
        body: the content.
    """

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    body: bytes = b""

    def encode(self) -> bytes:
        """Return the frame as bytes: the header's length (4 bytes, big endian), the header, the body.

        Raises:
            FrameError: the frame is larger than :data:`MAX_FRAME_BYTES`.
        """
        header = json.dumps({**self.fields, "kind": self.kind}).encode()
        if len(header) > MAX_HEADER_BYTES or len(self.body) > MAX_BODY_BYTES:
            raise FrameError(f"a frame {self.kind!r} of {len(header)} + {len(self.body)} bytes is too large")
        return b"".join((struct.pack(">I", len(header)), header, self.body))

    def text(self, key: str) -> str:
        """Return a field that must be a text.

        Raises:
            FrameError: it is missing, or another type.
        """
        value = self.fields.get(key)
        if not isinstance(value, str):
            raise FrameError(f"a frame {self.kind!r} without a text {key!r}")
        return value

    def number(self, key: str) -> int:
        """Return a field that must be a whole number.

        Raises:
            FrameError: it is missing, or another type.
        """
        value = self.fields.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise FrameError(f"a frame {self.kind!r} without a number {key!r}")
        return value

    def texts(self, key: str) -> list[str]:
        """Return a field that must be a list of texts.

        Raises:
            FrameError: it is missing, or another type.
        """
        value = self.fields.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise FrameError(f"a frame {self.kind!r} without a list of texts {key!r}")
        return value


def decode(content: bytes) -> Frame:
    """Return the frame that ``content`` encodes.

    Args:
        content: what :meth:`Frame.encode` returned.

    Raises:
        FrameError: it is no frame.
    """
    if len(content) < 4:
        raise FrameError("a frame is shorter than its own length")
    (length,) = struct.unpack(">I", content[:4])
    if length > MAX_HEADER_BYTES or length > len(content) - 4:
        raise FrameError(f"a frame's header claims {length} bytes")
    try:
        fields = json.loads(content[4 : 4 + length])
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a frame's header is not JSON: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("kind"), str):
        raise FrameError("a frame's header names no kind")
    kind = fields.pop("kind")
    return Frame(kind, fields, content[4 + length :])
