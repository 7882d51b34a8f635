"""How requests and registrations are written as text and bytes.

A request is JSON text and one blob of tensors. A node's registrations are JSON text. Flower's messages
(:mod:`strategies.core.flower`) and the messages of a device's resident trainer (:mod:`client.resident`) carry the same
texts and blobs.
"""

import json
from collections.abc import Sequence

from common.errors import PayloadError
from common.wire.messages import Registration, Request, header_of, read_header
from common.wire.payload import TENSOR_TYPE, Payload, decode

MAX_REGISTERED = 2**24
"""Most characters of a node's registrations, enough for 20,000 clients."""


def read_request(text: object, tensor_type: str, tensors: Sequence[bytes]) -> tuple[Request, Payload]:
    """Return the request in ``text`` and the tensors that all participants receive.

    Raises:
        PayloadError: the instruction was not made by Goldfinch, or its blob is not valid.
    """
    if not isinstance(text, str):
        raise PayloadError("the instruction carries no request: is the server's strategy FlowerStrategy?")
    header = _json(text)
    if not isinstance(header, dict):
        raise PayloadError("the request is not a JSON object")
    return read_header(Request, header), decode(only_blob(tensor_type, tensors))


def write_registrations(registrations: Sequence[Registration]) -> str:
    """Return the registrations of the clients that a node hosts, as JSON text."""
    return json.dumps([header_of(registration) for registration in registrations])


def read_registrations(text: str) -> list[Registration]:
    """Return the registrations in ``text``, the inverse of :func:`write_registrations`.

    Raises:
        PayloadError: the text is too long, is not a list of registrations, or names a client twice.
    """
    if len(text) > MAX_REGISTERED:
        raise PayloadError(f"the node's registrations have {len(text)} characters; at most {MAX_REGISTERED} are read")
    content = _json(text)
    if not isinstance(content, list):
        raise PayloadError("the node's registrations are not a list of objects")
    registrations: dict[str, Registration] = {}
    for item in content:
        if not isinstance(item, dict):
            raise PayloadError("the node's registrations are not a list of objects")
        registration = read_header(Registration, item)
        if registration.client in registrations:
            raise PayloadError(f"the node registers client {registration.client} twice; once is expected")
        registrations[registration.client] = registration
    return list(registrations.values())


def only_blob(tensor_type: str, tensors: Sequence[bytes]) -> bytes:
    """Return the one blob of a message.

    Raises:
        PayloadError: there is not exactly one blob, or it has another type.
    """
    if tensor_type != TENSOR_TYPE or len(tensors) != 1:
        raise PayloadError(f"expected one tensor of type {TENSOR_TYPE}; got {len(tensors)} of {tensor_type!r}")
    return tensors[0]


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"a header is not JSON: {error}") from error
