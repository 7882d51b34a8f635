"""Answers are picked up soon after they arrive, without asking the SuperLink too often."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.superlink.grid.http_grid import HttpGrid

from server.engines import prompt_grid
from server.engines.prompt_grid import LONGEST_SECONDS, PromptGrid, promptly


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Scripted:
    """A grid whose answers arrive at given instants."""

    def __init__(self, clock: Clock, arrivals: dict[str, float]) -> None:
        self.clock, self.arrivals, self.looks = clock, arrivals, 0

    def push_messages(self, messages: Any) -> list[str]:
        return list(messages)

    def pull_messages(self, identities: Any) -> list[Any]:
        self.looks += 1
        arrived = [name for name in sorted(identities) if name and self.arrivals[name] <= self.clock.now]
        return [SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=name)) for name in arrived]


def test_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 5 % late, at most 3 s late, and in an hour not much more looks than Flower's own."""
    for arrival, waiting in ((0.0, 2), (5.0, 2), (5.0, 20), (40.0, 2), (3600.0, 2), (3600.0, 100)):
        clock = Clock()
        monkeypatch.setattr(prompt_grid, "time", clock)
        grid = Scripted(clock, {"a": arrival})
        answers = list(PromptGrid(grid, waiting).send_and_receive(["a"]))  # type: ignore[arg-type]
        assert [answer.metadata.reply_to_message_id for answer in answers] == ["a"]
        late = clock.now - arrival
        assert late <= min(LONGEST_SECONDS, max(waiting / 10, 0.06 * arrival)) + 1e-6
        assert grid.looks <= arrival / LONGEST_SECONDS + 60


def test_a_timeout_and_a_message_that_was_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(prompt_grid, "time", clock)
    grid = PromptGrid(Scripted(clock, {"a": 1.0, "b": 9e9}), 2)  # type: ignore[arg-type]
    assert len(list(grid.send_and_receive(["a", "b"], timeout=10.0))) == 1  # type: ignore[list-item]
    assert 10 < clock.now < 11
    assert list(grid.send_and_receive([None])) == []  # type: ignore[list-item]  # what Flower says of a bad one


def test_only_nodes_over_http_are_looked_for() -> None:
    other = object()
    assert promptly(other, 2) is other  # type: ignore[arg-type]
    simulated = GridClientProxy(1, object(), 7)  # type: ignore[arg-type]
    assert promptly(simulated, 2) is simulated
    grid = HttpGrid.__new__(HttpGrid)
    prompt = promptly(GridClientProxy(1, grid, 7), 2)
    assert isinstance(prompt, GridClientProxy)
    assert isinstance(prompt.grid, PromptGrid)
    assert (prompt.node_id, prompt.run_id, prompt.grid.grid, prompt.grid.shortest) == (1, 7, grid, 0.2)
