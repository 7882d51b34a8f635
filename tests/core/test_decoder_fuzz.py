"""Thousands of malformed messages: each is refused with a reason, or decoded exactly as its own table states."""

from __future__ import annotations

import json
import resource
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.exchanges import ANSWER

from common.errors import PayloadError
from common.numerics import generator
from common.prototypes import PrototypeSet
from common.wire.messages import Answer, Request, read_header
from common.wire.payload import CARRIED, SCHEMA, Payload, decode, encode

SCORE = {"domain": "dark", "count": 4, "correct": 2, "loss": 0.5, "confusion": [[1, 1], [1, 1]]}
FEW, MANY = 300, 10_000
"""Cases of the test of every day, and of the slow one."""

MAX_GROWTH = 256 * 2**20
"""Bytes that the process may grow by over all cases."""


def seeds() -> list[bytes]:
    """Good messages of every kind, which the cases are made from."""
    draws = generator(0, "fuzz")
    tensors = {"a.weight": torch.randn(3, 4, generator=draws), "a.num_batches_tracked": torch.tensor(7)}
    every = {str(dtype).removeprefix("torch."): torch.ones(2, dtype=dtype) for dtype in CARRIED.values()}
    rows = PrototypeSet(torch.randn(3, 5, generator=draws), torch.tensor([0, 0, 1]), torch.rand(3, generator=draws))
    return [
        encode(Payload()),
        encode(Payload(tensors, rows, {"counts": torch.tensor([1, 2])}, header={**ANSWER, "scores": [SCORE]})),
        encode(Payload({}, rows)),
        encode(Payload(every, PrototypeSet.empty(4), header={"note": "ü"})),
    ]


SEEDS = seeds()
POSITIONS = st.floats(0, 1, exclude_max=True)
BYTES = (
    st.binary(min_size=1, max_size=12)
    | st.sampled_from([b"\0" * 8, b"\xff" * 8, b"\0\0\xc0\x7f", b"\0\0\x80\xff"])
    | st.sampled_from([b"{", b"[" * 64, b'"weights/w":', b"9" * 40, b"-1", b"1e999"])
)
MUTATIONS = st.lists(
    st.tuples(st.sampled_from(["flip", "put", "insert", "cut", "repeat", "swap", "end", "length"]), POSITIONS, BYTES),
    min_size=1,
    max_size=6,
)


def mutated(blob: bytes, mutations: list[tuple[str, float, bytes]]) -> bytes:
    """The message after these wounds."""
    found = bytearray(blob)
    for kind, place, data in mutations:
        at = int(place * len(found))
        if kind == "flip" and found:
            found[at] ^= 1 << (data[0] % 8)
        elif kind == "put":
            found[at : at + len(data)] = data
        elif kind == "insert":
            found[at:at] = data
        elif kind == "cut":
            del found[at : at + 1 + data[0] % 64]
        elif kind == "repeat":
            found[at:at] = found[at : at + 1 + data[0]]
        elif kind == "swap":
            found[:] = found[at:] + found[:at]
        elif kind == "end":
            del found[at:]
        elif kind == "length":
            found[:8] = (len(blob) - 8 if data[0] % 2 else int.from_bytes(data[:8], "little")).to_bytes(8, "little")
    return bytes(found)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ["weights/w", "weights/", "extra/x", "prototypes/vectors", "prototypes/labels"]
) | st.sampled_from(
    ["prototypes/weights", "prototypes/secret", "__metadata__", "", "weights/\0", "../weights/w", "w" * 5_000]
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*CARRIED, "F8_E4M3", "C64", "f32"]) | json_values,
        "shape": st.lists(st.integers(-2, 9) | st.sampled_from([2**31, 2**47, 2**48, 2**63]), max_size=9) | json_values,
        "data_offsets": st.lists(st.integers(-2, 80) | st.sampled_from([2**40, 2**64]), min_size=1, max_size=3)
        | json_values,
    }
)
tables = st.dictionaries(NAMES, entries | json_values, max_size=6)


@st.composite
def honest_tables(draw: Callable[[Any], Any]) -> tuple[dict[str, Any], bytes]:
    """A table with offsets that add up, so that the decoder reaches what lies behind them."""
    table: dict[str, Any] = {}
    position = 0
    for name in draw(st.lists(NAMES, unique=True, max_size=4)):
        dtype = draw(st.sampled_from(list(CARRIED)))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        size = CARRIED[dtype].itemsize
        for length in shape:
            size *= length
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    return table, draw(st.binary(min_size=position, max_size=position))


def crafted(table: dict[str, Any], data: bytes, header: Any) -> bytes:
    """A message with this table and this data, and a header of its own where the table brings none."""
    text = json.dumps({"schema": SCHEMA, **header} if isinstance(header, dict) else header)
    whole = json.dumps({"__metadata__": {"goldfinch": text}, **table}).encode()
    return len(whole).to_bytes(8, "little") + whole + data


def bomb(kind: int, size: int) -> bytes:
    """Tables that are large or deep: nests, long names, many tensors, many digits."""
    entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    metadata = '"__metadata__":{"goldfinch":"{\\"schema\\":1}"}'
    text = {
        0: "[" * size,
        1: '{"a":' * size,
        2: "{" + metadata + "," + ",".join(f'"weights/{i}":{entry}' for i in range(min(size, 25_000))) + "}",
        3: '{"__metadata__":{"goldfinch":"' + '{\\"a\\":' * size + '"}}',
        4: "{" + metadata + ',"weights/w":{"dtype":"F32","shape":[' + "9" * size + '],"data_offsets":[0,4]}}',
        5: "{" + metadata + ',"' + "w" * size + f'":{entry}}}',
        6: '{"__metadata__":{"goldfinch":"{\\"schema\\":1,\\"round\\":' + "1" * size + '}"}}',
        7: " " * size,
    }[kind].encode()
    return len(text).to_bytes(8, "little") + text


CASES = st.one_of(
    st.tuples(st.sampled_from(SEEDS), MUTATIONS).map(lambda case: mutated(*case)),
    st.tuples(st.sampled_from(SEEDS), POSITIONS).map(lambda case: case[0][: int(case[1] * len(case[0]))]),
    st.binary(max_size=200),
    st.tuples(tables, st.binary(max_size=80), json_values).map(lambda case: crafted(*case)),
    st.tuples(honest_tables(), st.just({})).map(lambda case: crafted(*case[0], case[1])),
    st.tuples(st.integers(0, 7), st.integers(1, 20_000)).map(lambda case: bomb(*case)),
)


def check_accepted(blob: bytes, found: Payload) -> None:
    """Nothing was accepted wrongly: what was decoded is what a plain reading of the blob says, byte for byte."""
    end = 8 + int.from_bytes(blob[:8], "little")
    table, data = json.loads(blob[8:end]), blob[end:]
    header = json.loads(table.pop("__metadata__")["goldfinch"])
    assert header.pop("schema") == SCHEMA
    assert found.header == header
    tensors = found.tensors()
    assert set(tensors) == set(table)
    for name, tensor in tensors.items():
        entry = table[name]
        assert tensor.dtype == CARRIED[entry["dtype"]]
        assert list(tensor.shape) == entry["shape"]
        assert not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
        if not name.startswith("prototypes/"):  # a set is sorted by class when it is read
            raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
            assert raw == data[slice(*entry["data_offsets"])]
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) == len(data)
    assert encode(decode(encode(found))) == encode(found)


def attack(blob: bytes, outcomes: Counter[str]) -> None:
    """One case: decoded within its memory, refused or right, and its header read no further than it is good."""
    found, reason = None, ""
    tracemalloc.start()
    try:
        found = decode(blob)
    except PayloadError as error:
        reason = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 60 * len(blob) + 2**20, f"{peak} bytes for a message of {len(blob)}"
    if found is None:
        assert 0 < len(reason) < 5_000
        outcomes["refused"] += 1
        return
    outcomes["accepted"] += 1
    check_accepted(blob, found)
    for kind in (Answer, Request):
        try:
            read_header(kind, found.header)
            outcomes[kind.__name__] += 1
        except PayloadError:
            pass


def campaign(cases: int) -> Counter[str]:
    outcomes: Counter[str] = Counter()

    @settings(max_examples=cases, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(CASES)
    def run(blob: bytes) -> None:
        attack(blob, outcomes)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MAX_GROWTH, f"the process grew by {grown} bytes"
    outcomes["grown KiB"] = grown // 1024
    return outcomes


def test_good_messages_are_accepted_and_their_headers_read() -> None:
    outcomes: Counter[str] = Counter()
    for blob in SEEDS:
        attack(blob, outcomes)
    assert outcomes == {"accepted": len(SEEDS), "Answer": 1}


def test_hostile_bytes_are_refused_or_read_rightly() -> None:
    outcomes = campaign(FEW)
    assert outcomes["refused"] >= FEW // 2
    assert outcomes["accepted"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_hostile_messages() -> None:
    outcomes = campaign(MANY)
    print(dict(outcomes))
    assert outcomes["refused"] + outcomes["accepted"] >= MANY
    assert outcomes["accepted"] > MANY // 100
