"""The texts and blobs that a transport carries between a server and its nodes, without the transport.

A request is JSON text beside one blob of tensors; a node's registrations are JSON text. Flower's messages
(:mod:`strategies.core.flower`) and a device's resident trainer (:mod:`client.resident`) carry the same two.
"""

import json
from collections.abc import Sequence

from common.errors import PayloadError
from common.wire.messages import Registration, Request, header_of, read_header
from common.wire.payload import TENSOR_TYPE, Payload, decode

MAX_REGISTERED = 2**24
"""Characters of a node's registrations: those of 20,000 clients."""


def read_request(text: object, tensor_type: str, tensors: Sequence[bytes]) -> tuple[Request, Payload]:
    """The request in ``text`` and the tensors every participant was sent.

    Raises:
        PayloadError: the instruction was not made by Goldfinch, or its blob is not good.
    """
    if not isinstance(text, str):
        raise PayloadError("the instruction carries no request: is the server's strategy FlowerStrategy?")
    header = _json(text)
    if not isinstance(header, dict):
        raise PayloadError("the request is not a JSON object")
    return read_header(Request, header), decode(only_blob(tensor_type, tensors))


def write_registrations(registrations: Sequence[Registration]) -> str:
    """The registrations of the clients that a node hosts, as JSON text."""
    return json.dumps([header_of(registration) for registration in registrations])


def read_registrations(text: str) -> list[Registration]:
    """Inverse of :func:`write_registrations`.

    Raises:
        PayloadError: the text is something else.
    """
    if len(text) > MAX_REGISTERED:
        raise PayloadError(f"the node's registrations have {len(text)} characters; at most {MAX_REGISTERED} are read")
    content = _json(text)
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise PayloadError("the node's registrations are not a list of objects")
    registrations = [read_header(Registration, item) for item in content]
    clients = {registration.client for registration in registrations}
    if len(clients) < len(registrations):
        raise PayloadError(f"the node registers {len(clients)} clients {len(registrations)} times; once each is read")
    return registrations


def only_blob(tensor_type: str, tensors: Sequence[bytes]) -> bytes:
    """The one blob of a message.

    Raises:
        PayloadError: there are several, none, or it is of another type.
    """
    if tensor_type != TENSOR_TYPE or len(tensors) != 1:
        raise PayloadError(f"expected one tensor of type {TENSOR_TYPE}; got {len(tensors)} of {tensor_type!r}")
    return tensors[0]


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"a header is not JSON: {error}") from error
