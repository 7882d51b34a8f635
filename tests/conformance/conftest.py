"""What the conformance tests look at besides results."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest

from common.wire.payload import Payload, decode


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test's messages are read by the inline engine, and no reader writes into bytes that others read."""
    came: list[tuple[bytes, str]] = []

    def digest(blob: bytes) -> str:
        return hashlib.sha256(blob).hexdigest()

    def noted(blob: bytes) -> Payload:
        came.append((blob, digest(blob)))
        return decode(blob)

    monkeypatch.setattr("server.engines.inline.decode", noted)
    yield
    assert came
    assert all(digest(blob) == before for blob, before in came)
