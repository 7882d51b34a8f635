"""The headers of requests and answers: which fields a message between server and device carries, and how they are read.

A request asks a device to score the model it is sent, to train it, or to answer a later exchange. An answer carries the
scores, the update and what they cost. Both travel as :class:`~common.wire.payload.Payload` on every engine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from common.errors import PayloadError

PACKAGES = ("common", "strategies", "client", "server", "conf")


@lru_cache(maxsize=1)
def code_sha256() -> str:
    """16 hex digits over the application's source and configuration: equal where both sides run the same code."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in (".py", ".yaml") and "__pycache__" not in path.parts:
                digest.update(path.relative_to(root).as_posix().encode() + b"\0")
                digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Request:
    """What the server asks of one device in one exchange.

    Args:
        run: id of the run; the device keeps its state under it.
        identity: the run's settings, hashed; a device with other settings refuses.
        method: name of the method.
        round: 1-based round; ``rounds + 1`` for the scoring after the last.
        exchange: name of the exchange.
        client: id of the client that is asked.
        client_count: clients in the federation.
        client_index: position of the client among them, by id.
        train: whether to take part in the exchange, or only to score.
        score: domains whose test sets this device scores.
        code: the server's :func:`code_sha256`.
    """

    run: str
    identity: str
    method: str
    round: int
    exchange: str
    client: str
    client_count: int
    client_index: int
    train: bool
    score: list[str]
    code: str = field(default_factory=code_sha256)


@dataclass(frozen=True)
class Answer:
    """What a device says besides tensors.

    Args:
        run, method, round, exchange, client: as in the request.
        samples: training samples N_k.
        class_counts: training samples per class.
        trained: whether the answer carries an update.
        scores: one entry per scored domain: domain, count, correct, loss, confusion.
        losses: mean of each loss term over the last local epoch.
        steps: optimiser steps.
        seconds: wall seconds by phase: load, score, train, save.
        peak_bytes: peak resident memory of the process.
        device: where it was computed, as a person would say it.
        releases: noised uploads of this client in this run, this one included; 0 without differential privacy.
    """

    run: str
    method: str
    round: int
    exchange: str
    client: str
    samples: int
    class_counts: list[int]
    trained: bool
    scores: list[dict[str, Any]]
    losses: dict[str, float]
    steps: int
    seconds: dict[str, float]
    peak_bytes: int
    device: str
    releases: int = 0


@dataclass(frozen=True)
class Registration:
    """What a device says of itself before the first round.

    Args:
        client: id of the client.
        domain: its domain.
        samples: training samples.
        class_counts: training samples per class.
        scores: domains whose test sets it can score.
        split: SHA-256 of its split of the data.
        identity, code: as in :class:`Request`.
        device: where it computes.
        versions: package versions.
    """

    client: str
    domain: str
    samples: int
    class_counts: list[int]
    scores: list[str]
    split: str
    identity: str
    code: str
    device: str
    versions: dict[str, str]


def header_of(message: Request | Answer | Registration) -> dict[str, Any]:
    """The message as JSON-able containers."""
    return asdict(message)


def request_text(request: Request) -> str:
    """The request as it travels beside the tensors."""
    return json.dumps(header_of(request), separators=(",", ":"))


Message = TypeVar("Message", Request, Answer, Registration)


def read_header(kind: type[Message], header: Mapping[str, Any]) -> Message:
    """The message in ``header``.

    Raises:
        PayloadError: a field is missing, unknown, or of another type.
    """
    names = {item.name: str(item.type) for item in fields(kind)}
    if set(header) != set(names):
        missing, unknown = sorted(set(names) - set(header)), sorted(set(header) - set(names))
        raise PayloadError(f"the message's header lacks {missing} and has unknown {unknown}")
    for name, declared in names.items():
        if not _fits(header[name], declared):
            raise PayloadError(f"the message's header says {name}={header[name]!r:.200}; expected {declared}")
    return kind(**header)


def _fits(value: object, declared: str) -> bool:
    """Whether ``value`` is of the type written as ``declared``, its members too; numbers finite, integers 64-bit."""
    outer, _, inner = declared.partition("[")
    if declared == "Any":
        return True
    if isinstance(value, bool) or outer == "bool":
        return isinstance(value, bool) and outer == "bool"
    if outer == "float":
        return isinstance(value, int | float) and abs(value) < MOST_FLOAT
    if outer == "int":
        return isinstance(value, int) and abs(value) < 2**63
    if outer == "list":
        return isinstance(value, list) and all(_fits(item, inner.removesuffix("]")) for item in value)
    if outer == "dict":
        _, _, member = inner.removesuffix("]").partition(", ")
        return isinstance(value, dict) and all(
            isinstance(key, str) and _fits(item, member) for key, item in value.items()
        )
    return outer == "str" and isinstance(value, str)


MOST_FLOAT = 1e300
"""Larger numbers, infinities and not-a-numbers measure nothing."""
