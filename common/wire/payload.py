"""The wire: named tensors and a small header as one safetensors blob, checked before anything is allocated.

One blob per message, because the number of tensors, not their bytes, sets Flower's time on the wire. The header is
JSON in the safetensors metadata. A device's reply carries its :class:`~common.wire.messages.Answer` there; the server's
message carries the schema version alone, since its request travels beside the blob. Nothing is pickled.

``rounds.transport`` halves the bytes: float32 tensors are rounded to bfloat16 or float16 before they are sent, and are
float32 again after they are received. Every engine carries the same bytes, so a run has the same result on all of them.
The server's own state stays float32; only the copy that is sent is rounded. Integers, booleans and float64 are sent as
they are. So are prototype sets: a class mean per class is a thousandth of a model's bytes, and a method's only
information about other domains.
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

from common.errors import PayloadError
from common.prototypes import PrototypeSet
from common.storage.files import DTYPES, safetensors_pieces, safetensors_table
from common.storage.state import finite, named_tensors

warnings.filterwarnings("ignore", message="The given buffer is not writable")  # decode only reads it

SCHEMA = 1
"""Version of names and header; a peer with another version is refused."""

TENSOR_TYPE = "safetensors"
"""The value of Flower's ``Parameters.tensor_type``."""

MAX_BYTES = 2 * 1024**3
MAX_HEADER_BYTES = 8 * 1024**2
MAX_TENSORS = 20_000
PREFIXES = ("weights/", "extra/")
PROTOTYPES = {"prototypes/vectors": ("F32", 2), "prototypes/labels": ("I64", 1), "prototypes/weights": ("F32", 1)}
CARRIED = {DTYPES[dtype]: dtype for dtype in DTYPES if dtype not in (torch.int16, torch.int8)}
"""The dtypes that a message may contain, by their names in safetensors."""

TRANSPORTS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The choices of ``rounds.transport``."""


@dataclass(frozen=True, eq=False)
class Payload:
    """The contents of one message.

    Args:
        header: JSON-able scalars, lists and mappings; the fields of an answer in a device's reply, else empty.
        weights: model state by name.
        prototypes: a prototype set, or ``None`` when the message has none (an empty set is something else).
        extra: further tensors by name.
    """

    header: Mapping[str, Any]
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    prototypes: PrototypeSet | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors under their wire names, sorted."""
        return named_tensors(self.weights, self.prototypes, self.extra)

    def part_bytes(self) -> dict[str, int]:
        """Bytes of the tensors by part: weights, prototypes, extra."""
        sizes = {"weights": 0, "prototypes": 0, "extra": 0}
        for name, tensor in self.tensors().items():
            sizes[name.partition("/")[0]] += tensor.numel() * tensor.element_size()
        return sizes


def encode(payload: Payload) -> bytes:
    """The payload as bytes.

    Raises:
        PayloadError: a tensor has a dtype the wire does not carry.
    """
    tensors = payload.tensors()
    for name, tensor in tensors.items():
        if tensor.dtype not in CARRIED.values():
            raise PayloadError(f"tensor {name} has dtype {tensor.dtype}, which the wire does not carry")
    return b"".join(safetensors_pieces(tensors, {"goldfinch": _header_text(payload)}))


def encoded_size(payload: Payload) -> int:
    """``len(encode(payload))`` without copying a tensor."""
    table, size = safetensors_table(payload.tensors(), {"goldfinch": _header_text(payload)})
    return len(table) + size


def _header_text(payload: Payload) -> str:
    header = {"schema": SCHEMA, **payload.header}
    try:
        return json.dumps(header, separators=(",", ":"), sort_keys=True, allow_nan=False)
    except ValueError as error:
        odd = sorted(key for key, value in header.items() if not _writable(value))
        raise PayloadError(
            f"the header's {', '.join(odd)} cannot be written: a number is not finite. If it is a loss, training "
            "diverged: lower train.learning_rate, or set train.clip_norm"
        ) from error


def _writable(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def _parse(text: bytes | str, what: str) -> dict[str, Any]:
    """The JSON object in ``text``: no name twice, no NaN, whatever Python's own reader would let through."""
    try:
        found = json.loads(text, object_pairs_hook=_once, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"the message's {what} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise PayloadError(f"the message's {what} is not a JSON object")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no number")


def decode(blob: Buffer, *, max_bytes: int = MAX_BYTES) -> Payload:
    """The payload in ``blob``, after its table was checked.

    Its tensors lie in the blob, which they keep, and of which nobody may have another use that a write would spoil. Who
    receives tensors does not write into them: the inline engine gives all clients the same.

    Raises:
        PayloadError: too large, truncated, another schema, an unknown name or dtype, shapes and offsets that do not
            agree, or numbers that are not finite. The message says which.
    """
    view = memoryview(blob)
    table = _read_table(view, max_bytes)
    header = _read_header(table)
    begin = 8 + int.from_bytes(view[:8], "little")
    _check_table(table, len(view) - begin)
    whole = torch.frombuffer(view, dtype=torch.uint8)
    tensors = {name: _tensor(whole, begin, table[name]) for name in sorted(table)}
    for name, tensor in tensors.items():
        if not finite(tensor):
            bad = int((~torch.isfinite(tensor)).sum())
            raise PayloadError(f"tensor {name:.99} has {bad} of {tensor.numel()} values that are not finite")
    return Payload(header, *_parts(tensors))


def _tensor(whole: Tensor, begin: int, entry: Mapping[str, Any]) -> Tensor:
    """A view of the message; or a copy, where the sender's table puts a number across the borders of its kind."""
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
        raise PayloadError(f"the message is truncated or no safetensors blob: its table claims {length} bytes")
    table = _parse(bytes(blob[8 : 8 + length]), "table")
    if len(table) > MAX_TENSORS:
        raise PayloadError(f"the message names {len(table)} tensors; the limit is {MAX_TENSORS}")
    return table


def _read_header(table: dict[str, Any]) -> dict[str, Any]:
    metadata = table.pop("__metadata__", None)
    text = metadata.get("goldfinch") if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise PayloadError("the message has no Goldfinch header")
    header = _parse(text, "header")
    schema = header.pop("schema", None)
    if schema != SCHEMA:
        raise PayloadError(f"the message has schema {schema!r:.99}, this side speaks {SCHEMA}; run the same Goldfinch")
    return header


def _check_table(table: Mapping[str, Any], data_bytes: int) -> None:
    spans = []
    for name, entry in table.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise PayloadError(f"tensor {name!r:.99} has a malformed entry")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in CARRIED:
            raise PayloadError(f"tensor {name!r:.99} has dtype {dtype!r:.99}, which the wire does not carry")
        if not _counts(shape) or not _counts(offsets) or len(offsets) != 2 or len(shape) > 8 or not _fits(shape):
            raise PayloadError(f"tensor {name!r:.99} has shape {shape!r:.99} and offsets {offsets!r:.99}")
        if offsets[1] - offsets[0] != math.prod(shape) * CARRIED[dtype].itemsize or offsets[1] > data_bytes:
            raise PayloadError(f"tensor {name!r:.99} of shape {shape} does not fill its place {offsets} in the message")
        if name in PROTOTYPES:
            if (dtype, len(shape)) != PROTOTYPES[name]:
                raise PayloadError(f"{name} must be {PROTOTYPES[name]}; got {dtype} of shape {shape}")
        elif not name.startswith(PREFIXES):
            raise PayloadError(f"tensor {name!r:.99}: names begin with weights/, prototypes/ or extra/")
        spans.append((offsets[0], offsets[1]))
    present = [name for name in PROTOTYPES if name in table]
    if present and len(present) < len(PROTOTYPES):
        raise PayloadError(f"a prototype set needs {', '.join(PROTOTYPES)}; only {', '.join(present)} came")
    if present and len({table[name]["shape"][0] for name in PROTOTYPES}) != 1:
        raise PayloadError(f"prototype rows do not match: {[table[name]['shape'] for name in PROTOTYPES]}")
    position = 0
    for start, end in sorted(spans):
        if start != position:
            raise PayloadError("the message's tensors overlap or leave gaps")
        position = end
    if position != data_bytes:
        raise PayloadError(f"the message is truncated or padded: {position} bytes named, {data_bytes} present")


def _counts(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**48 for value in values)


def _fits(shape: Sequence[int]) -> bool:
    """Whether a tensor's strides can be written down, which an empty one has too."""
    return math.prod(length or 1 for length in shape) < 2**48


def _parts(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], PrototypeSet | None, dict[str, Tensor]]:
    weights = {name[8:]: tensor for name, tensor in tensors.items() if name.startswith("weights/")}
    extra = {name[6:]: tensor for name, tensor in tensors.items() if name.startswith("extra/")}
    prototypes = None
    if "prototypes/vectors" in tensors:
        try:
            prototypes = PrototypeSet(*(tensors[name] for name in PROTOTYPES))
        except ValueError as error:
            raise PayloadError(f"the message's prototype set: {error}") from error
    return weights, prototypes, extra


# ---- half the bytes --------------------------------------------------------------------------------------------------


def cast_down(payload: Payload, transport: str) -> Payload:
    """The payload as it travels.

    Raises:
        PayloadError: a number is too large for the transport, or none; it is named rather than sent as infinity.
    """
    if transport == "float32":
        return payload
    return replace(
        payload,
        weights={name: _narrow(name, tensor, transport) for name, tensor in payload.weights.items()},
        extra={name: _narrow(name, tensor, transport) for name, tensor in payload.extra.items()},
    )


def _narrow(name: str, tensor: Tensor, transport: str) -> Tensor:
    if tensor.dtype != torch.float32:
        return tensor
    found = tensor.to(TRANSPORTS[transport])
    if not bool(torch.isfinite(found).all()):
        worst = float(tensor.abs().nan_to_num(nan=float("inf"), posinf=float("inf")).max())
        what = f"reaches {worst:.3g}" if worst < float("inf") else "has values that are not finite"
        raise PayloadError(
            f"rounds.transport={transport} cannot carry {name:.99}: it {what}, the largest number is "
            f"{torch.finfo(TRANSPORTS[transport]).max:.3g}. If training diverged, lower train.learning_rate; else take "
            + ("rounds.transport=bfloat16" if transport == "float16" else "rounds.transport=float32")
        )
    return found


def cast_up(payload: Payload, transport: str) -> Payload:
    """The payload as it is used: what :func:`cast_down` rounded is float32 again.

    Raises:
        PayloadError: a tensor came as float32, which the run's transport leaves to no sender.
    """
    if transport == "float32":
        return payload
    return replace(payload, weights=_widen(payload.weights, transport), extra=_widen(payload.extra, transport))


def _widen(tensors: Mapping[str, Tensor], transport: str) -> dict[str, Tensor]:
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float32:
            raise PayloadError(f"{name:.99} came as float32; this run's transport is {transport}")
    dtype = TRANSPORTS[transport]
    return {name: tensor.float() if tensor.dtype == dtype else tensor for name, tensor in tensors.items()}
