"""The wire: exact there and back; each refusal has its reason, and test_decoder_fuzz.py tries far more of them."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import PayloadError
from common.numerics import generator
from common.prototypes import PrototypeSet
from common.storage import DTYPES, bytes_of, tensors_sha256
from common.wire.payload import CARRIED, MAX_HEADER_BYTES, PROTOTYPES, SCHEMA, Payload, decode, encode, encoded_size

HEADER = {"round": 3, "client": "webcam-0", "losses": {"cross_entropy": 0.5}, "note": 'ü"\\\n'}


def prototypes(rows: int = 3, size: int = 5) -> PrototypeSet:
    draws = generator(0, "wire", rows)
    vectors = torch.randn(rows, size, generator=draws)
    return PrototypeSet(vectors, torch.arange(rows) // 2, torch.rand(rows, generator=draws))


def full() -> Payload:
    weights = {"head.weight": torch.arange(6.0).view(2, 3), "bn.num_batches_tracked": torch.tensor(7)}
    return Payload(weights, prototypes(), {"counts": torch.tensor([1, 2], dtype=torch.int32)}, header=HEADER)


def values(dtype: torch.dtype) -> torch.Tensor:
    """The extremes that a dtype has, and a few others."""
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        return torch.tensor([info.max, info.min, info.tiny, info.eps, -0.0, 1 / 3], dtype=dtype)
    if dtype == torch.bool:
        return torch.tensor([True, False])
    limits = torch.iinfo(dtype)
    return torch.tensor([limits.min, limits.max, 0, 1], dtype=dtype)


@pytest.mark.parametrize("dtype", CARRIED.values(), ids=str)
def test_every_dtype_comes_back_exactly(dtype: torch.dtype) -> None:
    tensors = {"a": values(dtype), "scalar": values(dtype)[0], "none": values(dtype)[:0].view(0, 3)}
    sent = Payload(tensors, None, {"again": values(dtype).view(2, -1)})
    back = decode(encode(sent))
    assert tensors_sha256(back.tensors()) == tensors_sha256(sent.tensors())
    assert all(back.tensors()[name].dtype == dtype for name in back.tensors())
    assert encoded_size(sent) == len(encode(sent))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_finite_means_every_value_not_their_norm(dtype: torch.dtype) -> None:
    largest = torch.full((3,), torch.finfo(dtype).max, dtype=dtype)
    assert torch.equal(decode(encode(Payload({"w": largest}))).weights["w"], largest)
    for value in (float("nan"), float("inf"), float("-inf")):
        for position in range(3):
            spoilt = largest.clone()
            spoilt[position] = value
            with pytest.raises(PayloadError, match="1 of 3 values that are not finite"):
                decode(encode(Payload({"w": spoilt})))


def test_no_prototypes_and_no_rows_are_two_things() -> None:
    assert decode(encode(Payload())).prototypes is None
    empty = decode(encode(Payload(prototypes=PrototypeSet.empty(9)))).prototypes
    assert empty is not None
    assert (len(empty), empty.feature_size) == (0, 9)


def as_array(blob: bytes) -> Any:
    return np.frombuffer(blob, np.uint8)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, as_array], ids=lambda kind: kind.__name__)
def test_decoded_tensors_are_views_of_the_message_in_any_buffer(kind: Callable[[bytes], Any]) -> None:
    sent = full()
    blob = kind(encode(sent))
    place = np.frombuffer(blob, np.uint8).ctypes.data
    back = decode(blob).tensors()
    assert tensors_sha256(back) == tensors_sha256(sent.tensors())
    for name in set(back) - set(PROTOTYPES):  # a set is sorted by class when it is read
        assert place <= back[name].data_ptr() < place + len(blob)


@pytest.mark.parametrize("dtype", CARRIED.values(), ids=str)
def test_numbers_that_lie_across_their_borders_are_read_all_the_same(dtype: torch.dtype) -> None:
    sent = values(dtype)
    place = entry(DTYPES[dtype], list(sent.shape), [1, 1 + sent.nbytes])
    blob = craft({"weights/before": entry("U8", [1], [0, 1]), "weights/w": place}, b"\0" + bytes(bytes_of(sent)))
    found = decode(blob).weights["w"]
    assert torch.equal(found, sent)
    assert found.data_ptr() % dtype.itemsize == 0


def test_views_and_transposed_tensors_are_sent_as_they_look() -> None:
    base = torch.arange(24.0).view(4, 6)
    sent = Payload({"column": base[:, 2], "turned": base.T, "same": base, "alias": base})
    back = decode(encode(sent))
    assert all(torch.equal(back.weights[name], tensor) for name, tensor in sent.weights.items())
    assert encoded_size(sent) == len(encode(sent))


names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=12)
shapes = st.lists(st.integers(0, 4), max_size=4)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(
    st.dictionaries(names, st.tuples(st.sampled_from(list(CARRIED.values())), shapes), max_size=5),
    st.dictionaries(names.filter(lambda name: name != "schema"), plain, max_size=3),
)
def test_size_is_known_without_encoding(described: dict[str, Any], header: dict[str, Any]) -> None:
    tensors = {name: torch.ones(shape).to(dtype) for name, (dtype, shape) in described.items()}
    for sent in (Payload(tensors, header=header), Payload({}, prototypes(), tensors, header=header)):
        blob = encode(sent)
        assert encoded_size(sent) == len(blob)
        metadata = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])["__metadata__"]
        assert blob == safetensors.torch.save({name: each.clone() for name, each in sent.tensors().items()}, metadata)
        back = decode(blob)
        assert back.header == sent.header
        assert tensors_sha256(back.tensors()) == tensors_sha256(sent.tensors())


def test_a_dtype_that_the_wire_does_not_carry_is_refused_at_the_sender() -> None:
    for act in (encode, encoded_size):
        for dtype in (torch.int16, torch.int8):
            with pytest.raises(PayloadError, match=str(dtype)):
                act(Payload({"w": torch.zeros(1, dtype=dtype)}))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_diverged_loss_is_named_at_the_sender(value: float) -> None:
    sent = Payload(header={"round": 1, "losses": {"cross_entropy": value}})
    for act in (encode, encoded_size):
        with pytest.raises(PayloadError, match=r"losses.*learning_rate"):
            act(sent)


# ---- hostile ---------------------------------------------------------------------------------------------------------


def craft(table: Any, data: bytes = b"", *, header: Any = None, claim: int | None = None) -> bytes:
    """Return a message of any table, any data and any claimed length."""
    if isinstance(table, dict) and "__metadata__" not in table:
        text = header if isinstance(header, str) else json.dumps({"schema": SCHEMA, **(header or {})})
        table = {"__metadata__": {"goldfinch": text}, **table}
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return (len(text) if claim is None else claim).to_bytes(8, "little") + text + data


def entry(dtype: str = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_a_blob_written_by_hand_is_read() -> None:
    back = decode(craft({"weights/w": entry()}, b"\0\0\x80\x3f", header={"round": 2}))
    assert back.header == {"round": 2}
    assert back.weights["w"].tolist() == [1.0]


def test_truncated_at_every_position() -> None:
    blob = encode(full())
    for length in range(len(blob)):
        with pytest.raises(PayloadError):
            decode(blob[:length])


def test_every_single_bit_flip_in_the_table_is_refused_or_decodes_to_clean_tensors() -> None:
    blob = bytearray(encode(Payload({"w": torch.ones(2)}, prototypes(2, 2), header={"round": 1})))
    end = 8 + int.from_bytes(blob[:8], "little")
    refused = 0
    for position in range(end):
        for bit in range(8):
            blob[position] ^= 1 << bit
            try:
                back = decode(bytes(blob))
                assert all(bool(torch.isfinite(tensor).all()) for tensor in back.tensors().values())
            except PayloadError:
                refused += 1
            blob[position] ^= 1 << bit
    assert refused > 0.8 * end * 8


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "truncated"),
    "padded": (lambda: encode(full()) + b"\0", "padded"),
    "table claims 2^63 bytes": (lambda: craft({}, claim=2**63), "claims"),
    "table beyond the limit": (lambda: craft(b" " * (MAX_HEADER_BYTES + 1)), "claims"),
    "table is a thousand brackets": (lambda: craft(b"[" * 200_000), "not JSON"),
    "header is NaN": (lambda: craft({}, header='{"schema":1,"loss":NaN}'), "NaN"),
    "header is a list": (lambda: craft({}, header="[1]"), "not a JSON object"),
    "header names one thing twice": (lambda: craft({}, header='{"schema":1,"round":1,"round":2}'), "twice"),
    "no header": (lambda: craft({"__metadata__": {}}), "no Goldfinch header"),
    "another schema": (lambda: craft({}, header='{"schema":99}'), "schema 99"),
    "tensor named twice": (
        lambda: craft(
            b'{"__metadata__":{"goldfinch":"{\\"schema\\":1}"},"weights/w":%(e)s,"weights/w":%(e)s}'
            % {b"e": json.dumps(entry()).encode()},
            bytes(4),
        ),
        "twice",
    ),
    "30,000 tensors": (
        lambda: craft({f"weights/{i}": entry(shape=[0], offsets=[0, 0]) for i in range(30_000)}),
        "names",
    ),
    "terabytes in the shape": (lambda: craft({"weights/w": entry(shape=[2**40], offsets=[0, 2**42])}), "place"),
    "shape that overflows": (lambda: craft({"weights/w": entry(shape=[2**47] * 8, offsets=[0, 0])}), "shape"),
    "shape beyond 2^48": (lambda: craft({"weights/w": entry(shape=[2**48], offsets=[0, 4])}, bytes(4)), "shape"),
    "nothing, times much": (lambda: craft({"weights/w": entry(shape=[0, 2**47, 2**47], offsets=[0, 0])}), "shape"),
    "negative shape": (lambda: craft({"weights/w": entry(shape=[-1], offsets=[0, -4])}), "shape"),
    "fractional shape": (lambda: craft({"weights/w": entry(shape=[1.0])}, bytes(4)), "shape"),
    "shape is true": (lambda: craft({"weights/w": entry(shape=[True])}, bytes(4)), "shape"),
    "nine dimensions": (lambda: craft({"weights/w": entry(shape=[1] * 9)}, bytes(4)), "shape"),
    "three offsets": (lambda: craft({"weights/w": entry(offsets=[0, 4, 8])}, bytes(8)), "offsets"),
    "offsets backwards": (lambda: craft({"weights/w": entry(offsets=[4, 0])}, bytes(4)), "place"),
    "offsets beyond": (lambda: craft({"weights/w": entry(offsets=[4, 8])}, bytes(4)), "place"),
    "gap": (lambda: craft({"weights/a": entry(), "weights/b": entry(offsets=[8, 12])}, bytes(12)), "gaps"),
    "gap at the front": (lambda: craft({"weights/w": entry(offsets=[4, 8])}, bytes(8)), "gaps"),
    "overlap": (lambda: craft({"weights/a": entry(), "weights/b": entry()}, bytes(4)), "overlap"),
    "half overlap": (
        lambda: craft({"weights/a": entry(shape=[2], offsets=[0, 8]), "weights/b": entry(offsets=[4, 8])}, bytes(8)),
        "overlap",
    ),
    "unknown dtype": (lambda: craft({"weights/w": entry("F8_E5M2")}, bytes(4)), "dtype"),
    "dtype is a list": (lambda: craft({"weights/w": entry(["F32"])}, bytes(4)), "dtype"),  # type: ignore[arg-type]
    "dtype of another size": (lambda: craft({"weights/w": entry("F64")}, bytes(4)), "place"),
    "entry is a number": (lambda: craft({"weights/w": 1}), "malformed"),
    "name elsewhere": (lambda: craft({"state/w": entry()}, bytes(4)), "names begin"),
    "name that no file can have": (lambda: craft({"weights/\ud800": entry()}, bytes(4)), "surrogates not allowed"),
    "header that no file can hold": (lambda: encode(Payload(header={"reason": "\ud800"})), "surrogates not allowed"),
    "not a number": (lambda: craft({"weights/w": entry()}, b"\0\0\xc0\x7f"), "not finite"),
    "infinity": (lambda: craft({"extra/w": entry()}, b"\0\0\x80\x7f"), "not finite"),
    "half a prototype set": (lambda: craft({"prototypes/vectors": entry(shape=[1, 1])}, bytes(4)), "needs"),
    "flat prototypes": (lambda: proto(vectors=entry(shape=[1])), "must be"),
    "prototype rows do not match": (lambda: proto(rows=2), "match"),
    "negative prototype class": (lambda: proto(label=-1), "labels must be >= 0"),
    "negative prototype weight": (lambda: proto(weight=b"\0\0\x80\xbf"), "weights must be >= 0"),
}


def proto(
    vectors: Any = None, labels: Any = None, rows: int = 1, label: int = 0, weight: bytes = b"\0\0\x80\x3f"
) -> bytes:
    """A set of one row: labels [0, 8), vectors and weights behind."""
    labels = labels or entry("I64", [1], [0, 8])
    shift = labels["data_offsets"][1]
    vectors = vectors or entry(shape=[rows, 1], offsets=[shift, shift + 4 * rows])
    vectors["data_offsets"] = [shift, shift + 4 * rows]
    end = shift + 4 * rows
    table = {
        "prototypes/labels": labels,
        "prototypes/vectors": vectors,
        "prototypes/weights": entry(offsets=[end, end + 4]),
    }
    return craft(table, label.to_bytes(8, "little", signed=True)[:shift] + bytes(4 * rows) + weight)


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_blobs_are_refused_with_a_reason_and_without_memory(case: str) -> None:
    make, reason = HOSTILE[case]
    blob = make()
    tracemalloc.start()
    try:
        with pytest.raises(PayloadError, match=reason):
            decode(blob)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 * len(blob) + 2**20, f"{peak} bytes for a message of {len(blob)}"


def test_a_message_beyond_the_limit_is_not_read_and_a_long_name_makes_a_short_reason() -> None:
    with pytest.raises(PayloadError, match="limit"):
        decode(encode(full()), max_bytes=100)
    with pytest.raises(PayloadError) as caught:
        decode(craft({"x" * 1_000_000: entry()}, bytes(4)))
    assert len(str(caught.value)) < 2_000
