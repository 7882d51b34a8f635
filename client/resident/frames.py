"""Messages between a thin ClientApp and its resident trainer: one length-prefixed frame of JSON and bytes. No pickle.

Frame: magic, header length (uint32), blob length (uint64), all big-endian; JSON header; blob. Lengths are checked
before anything is allocated. This module imports neither torch nor flwr: the thin ClientApp pays for its imports in
every message.
"""

from __future__ import annotations

import json
import socket
import struct
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from common.errors import PayloadError

MAGIC = b"GFR1"
LEAVE = {"kind": "leave"}
"""What a caller says to a trainer that it cannot use."""

PREFIX = struct.Struct("!4sIQ")
MAX_HEADER_BYTES = 16 * 1024**2
MAX_BLOB_BYTES = 2 * 1024**3
"""As on the wire between server and node: :data:`common.wire.payload.MAX_BYTES`."""


@dataclass(frozen=True)
class Question:
    """What a ClientApp was sent, for its trainer.

    Args:
        kind: ``register`` or ``answer``.
        run: Flower's number of the run.
        overrides: the run's overrides.
        configuration: the node's configuration.
        request: the request's text, as it came; whatever else came in its place is refused by the trainer.
        tensor_type: what the message says its tensors are.
        tensors: the message's tensors.
    """

    kind: str
    run: int
    overrides: str
    configuration: Mapping[str, Any]
    request: object = None
    tensor_type: str = ""
    tensors: Sequence[bytes] = ()


@dataclass(frozen=True)
class Reply:
    """What a trainer says.

    Args:
        ok: whether it did what was asked.
        text: registrations, or the error in one line.
        traceback: the error's traceback.
        samples: training samples of the client that answered.
        tensors: the encoded answer, alone.
    """

    ok: bool
    text: str = ""
    traceback: str = ""
    samples: int = 0
    tensors: Sequence[bytes] = ()

    @classmethod
    def of(cls, error: Exception) -> Reply:
        """The error that is being handled; it is printed too, for the node's own log."""
        traceback.print_exc()
        return cls(ok=False, text=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())


Said = TypeVar("Said", Question, Reply)


def send(connection: socket.socket, message: Question | Reply) -> None:
    """Send ``message`` as one frame.

    Raises:
        PayloadError: it is larger than the other side accepts.
        OSError: the other side is gone.
    """
    header = {field.name: getattr(message, field.name) for field in fields(message) if field.name != "tensors"}
    send_frame(connection, header | {"sizes": [len(tensor) for tensor in message.tensors]}, message.tensors)


def read(kind: type[Said], header: Mapping[str, Any], blob: bytes) -> Said:
    """The message in a frame that :func:`send` made.

    Raises:
        PayloadError: it is not of this kind.
    """
    content, name = dict(header), kind.__name__.lower()
    sizes = content.pop("sizes", None)
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise PayloadError(f"the resident trainer's {name} does not say how long its tensors are")
    if sum(sizes) != len(blob):
        raise PayloadError(f"the resident trainer's {name} names {sum(sizes)} bytes of tensors and has {len(blob)}")
    ends = list(accumulate(sizes, initial=0))
    try:
        return kind(**content, tensors=[blob[start:end] for start, end in pairwise(ends)])
    except TypeError as error:
        raise PayloadError(f"the resident trainer's {name} cannot be read: {error}") from error


def send_frame(connection: socket.socket, header: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> None:
    """Send a frame.

    Raises:
        PayloadError: it is larger than the other side accepts.
        OSError: the other side is gone.
    """
    text = json.dumps(header, separators=(",", ":")).encode()
    size = sum(len(blob) for blob in blobs)
    _check(len(text), size)
    connection.sendall(PREFIX.pack(MAGIC, len(text), size) + text)
    for blob in blobs:
        connection.sendall(blob)


def receive_frame(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    """The next frame: its header and its blob.

    Raises:
        ConnectionError: the other side is gone.
        PayloadError: too large, or no frame of this protocol.
    """
    magic, header_size, blob_size = PREFIX.unpack(_exactly(connection, PREFIX.size))
    if magic != MAGIC:
        raise PayloadError(f"the message on the trainer's socket begins with {magic!r}, not {MAGIC!r}")
    _check(header_size, blob_size)
    try:
        header = json.loads(_exactly(connection, header_size))
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"the message on the trainer's socket has a header that is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise PayloadError("the message on the trainer's socket has a header that is not a JSON object")
    return header, _exactly(connection, blob_size)


def _check(header_size: int, blob_size: int) -> None:
    if header_size > MAX_HEADER_BYTES or blob_size > MAX_BLOB_BYTES:
        raise PayloadError(
            f"the message on the trainer's socket has {header_size} + {blob_size} bytes; the limit is "
            f"{MAX_HEADER_BYTES} + {MAX_BLOB_BYTES}"
        )


def _exactly(connection: socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    view, position = memoryview(buffer), 0
    while position < size:
        count = connection.recv_into(view[position:])
        if not count:
            raise ConnectionError("the other side of the trainer's socket is gone")
        position += count
    return bytes(buffer)
