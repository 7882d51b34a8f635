"""Messages as bytes: named tensors and a small header as one safetensors blob, checked before memory is allocated.

A message is one blob, because in Flower the number of tensors, not the number of bytes, determines the transfer time.
The header is JSON in the safetensors metadata. In a device's reply it contains the
:class:`~common.wire.messages.Answer`; in the server's message only the schema version, since the request is sent as
text. Nothing is pickled.

``rounds.transport`` halves the bytes: float32 tensors of two dimensions or more are rounded to bfloat16 or float16
before they are sent, and converted to float32 after they are received. Every engine sends the same values, so a run has
the same result on all of them. The server's own state stays float32. Integers, booleans and float64 are sent unchanged.
So are scalars and vectors, which have few bytes: next to 1, where the scales of a normalisation begin, numbers of
bfloat16 lie 2^-7 apart, and a round's step is shorter. So are prototype sets: a mean per class has a thousandth of a
model's bytes, and is a method's only information about other domains.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Buffer  # collections.abc has it from Python 3.12 on

from common.errors import DIVERGED, IN_A_NEW_RUN, PayloadError
from common.storage import DTYPES, Bundle, finite, safetensors_pieces, safetensors_table, split_tensors

warnings.filterwarnings("ignore", message="The given buffer is not writable")  # decode only reads it

SCHEMA = 1
"""Version of names and header; messages of another version are refused."""

TENSOR_TYPE = "safetensors"
"""The value of Flower's ``Parameters.tensor_type``."""

MAX_BYTES = 2 * 1024**3
MAX_HEADER_BYTES = 8 * 1024**2
MAX_TENSORS = 20_000
PREFIXES = ("weights/", "extra/")
PROTOTYPES = {"prototypes/vectors": ("F32", 2), "prototypes/labels": ("I64", 1), "prototypes/weights": ("F32", 1)}
"""Dtype and number of dimensions of each tensor of a prototype set."""

CARRIED = {DTYPES[dtype]: dtype for dtype in DTYPES if dtype not in (torch.int16, torch.int8)}
"""The dtypes that a message may contain, by their names in safetensors."""

TRANSPORTS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The choices of ``rounds.transport``."""


@dataclass(frozen=True, eq=False)
class Payload(Bundle):
    """The contents of one message.

    Args:
        header: scalars, lists and mappings that JSON can write: an answer's fields in a device's reply, else empty.
    """

    header: Mapping[str, Any] = field(default_factory=dict, kw_only=True)


def encode(payload: Payload) -> bytes:
    """Return the payload as bytes.

    Raises:
        PayloadError: a tensor has a dtype that messages cannot contain.
    """
    return b"".join(safetensors_pieces(*_contents(payload)))


def encoded_size(payload: Payload) -> int:
    """Return ``len(encode(payload))`` without copying a tensor, with the same error."""
    table, size = safetensors_table(*_contents(payload))
    return len(table) + size


def _contents(payload: Payload) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a message."""
    tensors = payload.tensors()
    for name, tensor in tensors.items():
        if tensor.dtype not in CARRIED.values():
            raise PayloadError(f"tensor {name} has dtype {tensor.dtype}, which messages cannot contain")
    header = {"schema": SCHEMA, **payload.header}
    try:
        text = json.dumps(header, separators=(",", ":"), sort_keys=True, allow_nan=False)
    except ValueError as error:
        wrong = sorted(key for key, value in header.items() if not _writable(value))
        raise PayloadError(
            f"the header's {', '.join(wrong)} cannot be written: a number is not finite. If it is a loss, {DIVERGED}"
        ) from error
    return tensors, {"goldfinch": text}


def _writable(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def _parse(text: bytes | str, what: str) -> dict[str, Any]:
    """Return the JSON object in ``text``; stricter than Python's own reader.

    Names are unique; NaN is refused, and half a surrogate pair, which no file can hold.
    """
    try:
        content = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
        json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"the message's {what} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise PayloadError(f"the message's {what} is not a JSON object")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name is used twice")
    return members


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def decode(blob: Buffer, *, max_bytes: int = MAX_BYTES) -> Payload:
    """Return the payload in ``blob``, after checking its table.

    The tensors are views of the blob, so the blob must not change afterwards. A receiver must not write into them
    either: the inline engine gives all clients the same tensors.

    Raises:
        PayloadError: the message is too large or truncated, has another schema, an unknown name or dtype, shapes and
            offsets that do not agree, or numbers that are not finite. The error says which.
    """
    view = memoryview(blob)
    table = _read_table(view, max_bytes)
    header = _read_header(table)
    begin = 8 + int.from_bytes(view[:8], "little")
    _check_table(table, len(view) - begin)
    whole = torch.frombuffer(view, dtype=torch.uint8)
    tensors: dict[str, Tensor] = {}
    for name in sorted(table):
        tensor = _tensor(whole, begin, table[name])
        if not finite(tensor):
            bad = int((~torch.isfinite(tensor)).sum())
            fact = f"{bad} of {tensor.numel()} values that are not finite"
            raise PayloadError(f"tensor {name:.99} has {fact}: {DIVERGED}")
        tensors[name] = tensor
    try:
        bundle = split_tensors(tensors)
    except ValueError as error:
        raise PayloadError(f"the message's prototype set: {error}") from error
    return Payload(bundle.weights, bundle.prototypes, bundle.extra, header=header)


def _tensor(whole: Tensor, begin: int, entry: Mapping[str, Any]) -> Tensor:
    """Return a view of the message, or a copy if the sender did not align the tensor."""
    start, end = entry["data_offsets"]
    part, dtype = whole[begin + start : begin + end], CARRIED[entry["dtype"]]
    if part.data_ptr() % dtype.itemsize or part.storage_offset() % dtype.itemsize:
        part = part.clone()
    return part.view(dtype).view(entry["shape"])


def _read_table(blob: memoryview, max_bytes: int) -> dict[str, Any]:
    if len(blob) > max_bytes:
        raise PayloadError(f"the message has {len(blob)} bytes; the limit is {max_bytes}")
    if len(blob) < 8:
        raise PayloadError(f"the message is truncated: {len(blob)} bytes")
    length = int.from_bytes(blob[:8], "little")
    if length > min(MAX_HEADER_BYTES, len(blob) - 8):
        raise PayloadError(f"the message is truncated or not a safetensors blob: its table claims {length} bytes")
    table = _parse(bytes(blob[8 : 8 + length]), "table")
    if len(table) > MAX_TENSORS:
        raise PayloadError(f"the message names {len(table)} tensors; the limit is {MAX_TENSORS}")
    return table


def _read_header(table: dict[str, Any]) -> dict[str, Any]:
    metadata = table.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not isinstance(metadata.get("goldfinch"), str):
        raise PayloadError("the message has no Goldfinch header")
    header = _parse(metadata["goldfinch"], "header")
    schema = header.pop("schema", None)
    if schema != SCHEMA:
        raise PayloadError(
            f"the message has schema {schema!r:.99}, this side has {SCHEMA}; install the same Goldfinch on both"
        )
    return header


def _check_table(table: Mapping[str, Any], data_bytes: int) -> None:
    """Check the entry of each tensor, and that the tensors fill the message's data without gaps.

    Raises:
        PayloadError: the first fault.
    """
    spans: list[tuple[int, int]] = []
    for name, entry in table.items():
        _check_entry(name, entry, data_bytes)
        start, end = entry["data_offsets"]
        spans.append((start, end))
    present = [name for name in PROTOTYPES if name in table]
    if present and len(present) < len(PROTOTYPES):
        raise PayloadError(f"a prototype set needs {', '.join(PROTOTYPES)}; the message has only {', '.join(present)}")
    rows = [table[name]["shape"][0] for name in present]
    if len(set(rows)) > 1:
        raise PayloadError(f"prototype rows do not match: {', '.join(present)} have {rows}")
    position = 0
    for start, end in sorted(spans):
        if start != position:
            raise PayloadError("the message's tensors overlap or leave gaps")
        position = end
    if position != data_bytes:
        raise PayloadError(f"the message is truncated or padded: {position} bytes named, {data_bytes} present")


def _check_entry(name: str, entry: object, data_bytes: int) -> None:
    """Check a tensor's name, dtype, shape and position in the message."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise PayloadError(f"tensor {name!r:.99} has a malformed entry")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in CARRIED:
        raise PayloadError(f"tensor {name!r:.99} has dtype {dtype!r:.99}, which messages cannot contain")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2 or len(shape) > 8 or not _fits(shape):
        raise PayloadError(f"tensor {name!r:.99} has shape {shape!r:.99} and offsets {offsets!r:.99}")
    if offsets[1] - offsets[0] != math.prod(shape) * CARRIED[dtype].itemsize or offsets[1] > data_bytes:
        raise PayloadError(f"tensor {name!r:.99} of shape {shape} does not fill its place {offsets} in the message")
    if name in PROTOTYPES:
        if (dtype, len(shape)) != PROTOTYPES[name]:
            raise PayloadError(f"{name} must be {PROTOTYPES[name]}; got {dtype} of shape {shape}")
    elif not name.startswith(PREFIXES):
        raise PayloadError(f"tensor {name!r:.99}: names begin with weights/, prototypes/ or extra/")


def _counts(values: object) -> bool:
    """Return whether ``values`` is a list of integers that a length or an offset may have."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**48 for value in values)


def _fits(shape: Sequence[int]) -> bool:
    """Return whether torch can represent the strides of this shape, also if the tensor is empty."""
    return math.prod(max(length, 1) for length in shape) < 2**48


# ---- half the bytes --------------------------------------------------------------------------------------------------


def cast_down(payload: Payload, transport: str) -> Payload:
    """Return the payload to send, with float32 tensors of two dimensions or more rounded to the transport's dtype.

    Raises:
        PayloadError: a number is not finite, or becomes infinite in the transport's dtype.
    """
    if transport == "float32":
        return payload
    return replace(payload, weights=_narrow(payload.weights, transport), extra=_narrow(payload.extra, transport))


def _narrow(tensors: Mapping[str, Tensor], transport: str) -> dict[str, Tensor]:
    narrowed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        narrowed[name] = tensor
        if tensor.dtype == torch.float32 and tensor.ndim >= 2:
            narrowed[name] = tensor.to(TRANSPORTS[transport])
            if not bool(torch.isfinite(narrowed[name]).all()):
                raise PayloadError(_not_carried(name, tensor, transport))
    return narrowed


def _not_carried(name: str, tensor: Tensor, transport: str) -> str:
    """Return the message about a tensor that has no finite form in the transport's dtype."""
    largest = float(tensor.abs().nan_to_num(nan=float("inf"), posinf=float("inf")).max())
    fact = "it has values that are not finite"
    if largest < float("inf"):
        fact = f"it reaches {largest:.3g}"
    wider = "float32"
    if transport == "float16":
        wider = "bfloat16"
    return (
        f"rounds.transport={transport} cannot carry {name:.99}: {fact}, the largest number is "
        f"{torch.finfo(TRANSPORTS[transport]).max:.3g}. If training diverged, lower train.learning_rate; otherwise set "
        f"rounds.transport={wider}; both {IN_A_NEW_RUN}"
    )


def cast_up(payload: Payload, transport: str) -> Payload:
    """Return a received payload with its tensors as float32 again, the inverse of :func:`cast_down`.

    Raises:
        PayloadError: a tensor of two dimensions or more was sent as float32, although the run's transport is another.
    """
    if transport == "float32":
        return payload
    return replace(payload, weights=_widen(payload.weights, transport), extra=_widen(payload.extra, transport))


def _widen(tensors: Mapping[str, Tensor], transport: str) -> dict[str, Tensor]:
    widened: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float32 and tensor.ndim >= 2:
            raise PayloadError(f"{name:.99} was sent as float32; this run's transport is {transport}")
        if tensor.dtype == TRANSPORTS[transport]:
            tensor = tensor.float()
        widened[name] = tensor
    return widened
