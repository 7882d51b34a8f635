"""An engine that waits says for whom: after five seconds, when that changes, and when the wait has doubled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from server.engines import waiting
from server.engines.waiting import WaitReport
from server.run.events import describe
from server.run.history import record_waiting
from server.run.schema import EVENTS, check_events, read_lines


def test_a_wait_is_reported_when_it_changes_and_when_it_has_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    told: list[tuple[Sequence[str], float, int | None]] = []
    report = WaitReport(lambda names, seconds, number: told.append((names, seconds, number)), 3)
    for second in range(1, 31):
        now[0] = 100.0 + second
        report(["a", "b"] if second < 12 else ["b"])
    assert [(names, seconds) for names, seconds, _ in told] == [
        (["a", "b"], 5.0),
        (["a", "b"], 10.0),
        (["b"], 15.0),
        (["b"], 30.0),
    ]
    assert {number for _, _, number in told} == {3}


def test_nothing_is_reported_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    told: list[Sequence[str]] = []
    report = WaitReport(lambda names, *_: told.append(names))
    now[0] = 60.0
    report([])
    WaitReport(None)(["a"])
    assert told == []


def test_the_record_of_a_wait_is_read_and_described(tmp_path: Path) -> None:
    record_waiting(tmp_path, ["ward-b-0"], 12.34, 3)
    record_waiting(tmp_path, ["ward-b-0", "ward-c-0"], 5.0, None)
    entries = read_lines(tmp_path / EVENTS)
    check_events(tmp_path / EVENTS, entries)
    assert describe("waiting", entries[0], 5) == "round 3: waiting for ward-b-0 for 12 s"
    assert describe("waiting", entries[1], 5) == "waiting for ward-b-0, ward-c-0 for 5 s"
    assert "round" not in json.loads((tmp_path / EVENTS).read_text().splitlines()[1])
