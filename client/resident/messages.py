"""The messages between a ClientApp and its resident trainer, on a connection of :mod:`multiprocessing.connection`.

A message is a JSON header and then one byte string per tensor. Only ``send_bytes`` and ``recv_bytes`` with a maximum
length are used: ``send`` and ``recv`` would pickle. This module imports neither torch nor flwr, because the ClientApp
process imports it again for every message.
"""

from __future__ import annotations

import json
import sys
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from client.reasons import reason_for
from common.errors import PayloadError, reason_of, traceback_of

MAX_HEADER_BYTES = 16 * 1024**2
MAX_TENSOR_BYTES = 2 * 1024**3
"""The limit for all tensors of a message together; the same as :data:`common.wire.payload.MAX_BYTES`."""


@dataclass(frozen=True)
class Question:
    """A ClientApp's question to its trainer.

    Args:
        kind: ``register``, ``answer`` or ``leave``. The last one asks the trainer to end.
        run: Flower's number of the run.
        run_config: Flower's configuration of the run, see :func:`common.settings.settings_in`.
        configuration: the node's configuration.
        request: the text of the server's request, unchecked; the trainer checks it. To ``register``, the server's hash
            of code.
        tensor_type: the type of tensors that the message names.
        tensors: the message's tensors.
    """

    kind: str
    run: int = 0
    run_config: Mapping[str, Any] = field(default_factory=dict)
    configuration: Mapping[str, Any] = field(default_factory=dict)
    request: object = None
    tensor_type: str = ""
    tensors: Sequence[bytes] = ()


@dataclass(frozen=True)
class TrainerReply:
    """A trainer's reply.

    Args:
        ok: whether the trainer did what was asked.
        text: the registrations, or the error in one line.
        traceback: the error's traceback; empty on a private device.
        samples: training samples of the client that answered.
        tensors: the encoded answer, one byte string.
    """

    ok: bool
    text: str = ""
    traceback: str = ""
    samples: int = 0
    tensors: Sequence[bytes] = ()

    @classmethod
    def of(cls, error: Exception, *, private: bool) -> TrainerReply:
        """Return a reply with the error that is being handled, and print its traceback to the node's log.

        The printed lines are indented and printable: an error may repeat what a server sent, and no text of a server
        may pass for a line of this log.

        Args:
            error: the error.
            private: whether the device or the run is private, so that the reply has a reason of
                :data:`client.reasons.REASONS` and nothing else of the error.
        """
        trace = traceback_of(traceback.format_exc())
        print(textwrap.indent(trace, "  "), file=sys.stderr, flush=True)
        if private:
            return cls(ok=False, text=reason_for(error))
        return cls(ok=False, text=reason_of(f"{type(error).__name__}: {error}"), traceback=trace)


Content = TypeVar("Content", Question, TrainerReply)


def send(connection: Connection, message: Question | TrainerReply) -> None:
    """Send ``message``.

    Raises:
        PayloadError: the message is larger than the other side accepts; nothing was sent.
        OSError: the other side closed the connection.
    """
    header = {item.name: getattr(message, item.name) for item in fields(message) if item.name != "tensors"}
    header["sizes"] = [len(tensor) for tensor in message.tensors]
    send_header(connection, header)
    for tensor in message.tensors:
        connection.send_bytes(tensor)


def receive(connection: Connection, kind: type[Content]) -> Content:
    """Return the next message, which must be of class ``kind``.

    Raises:
        ConnectionError: the other side closed the connection.
        PayloadError: the message is too large, or is not of this class.
    """
    header = receive_header(connection)
    name = kind.__name__.lower()
    sizes = header.pop("sizes", None)
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise PayloadError(f"the resident trainer's {name} does not give the lengths of its tensors")
    _check_size(0, sum(sizes))
    tensors = []
    for size in sizes:
        tensor = _receive_bytes(connection, size)
        if len(tensor) != size:
            raise PayloadError(f"the resident trainer's {name} names a tensor of {size} bytes and sends {len(tensor)}")
        tensors.append(tensor)
    try:
        return kind(**header, tensors=tensors)
    except TypeError as error:
        raise PayloadError(f"the resident trainer's {name} cannot be read: {error}") from error


def send_header(connection: Connection, header: Mapping[str, Any]) -> None:
    """Send a JSON object.

    Raises:
        PayloadError: the object, or the tensors that its ``sizes`` name, are larger than the other side accepts.
        OSError: the other side closed the connection.
    """
    text = json.dumps(header, separators=(",", ":")).encode()
    _check_size(len(text), sum(header.get("sizes", ())))
    connection.send_bytes(text)


def receive_header(connection: Connection) -> dict[str, Any]:
    """Return the next JSON object.

    Raises:
        ConnectionError: the other side closed the connection.
        PayloadError: the message is too large, or is not a JSON object.
    """
    try:
        header = json.loads(_receive_bytes(connection, MAX_HEADER_BYTES))
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"the message on the trainer's socket has a header that is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise PayloadError("the message on the trainer's socket has a header that is not a JSON object")
    return header


def _check_size(header_bytes: int, tensor_bytes: int) -> None:
    if header_bytes > MAX_HEADER_BYTES or tensor_bytes > MAX_TENSOR_BYTES:
        raise PayloadError(
            f"the message on the trainer's socket has {header_bytes} bytes of header and {tensor_bytes} of tensors; "
            f"the limit is {MAX_HEADER_BYTES} and {MAX_TENSOR_BYTES}"
        )


def _receive_bytes(connection: Connection, limit: int) -> bytes:
    """Return the next byte string of at most ``limit`` bytes. The length is checked before memory is allocated."""
    try:
        return connection.recv_bytes(limit)
    except (EOFError, OSError) as error:
        if not connection.readable:  # recv_bytes leaves a connection so when the length is above the limit
            raise PayloadError(
                f"a part of the message on the trainer's socket is too long; the limit is {limit} bytes"
            ) from error
        raise ConnectionError("the other side of the trainer's socket closed it") from error
