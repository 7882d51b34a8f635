"""The seconds that a deployment's exchange may take: given, or derived from the exchanges before and said once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from server.run.patience import EXCHANGES, FIRST_SECONDS, LEAST_SECONDS, ExchangePatience


class Told(list[tuple[str, dict[str, Any]]]):
    def __call__(self, name: str, **content: Any) -> None:
        self.append((name, content))


def patience(deadline: float | None, told: Told, *, simulated: bool = False) -> ExchangePatience:
    return ExchangePatience(deadline, simulated=simulated, event=told)


def took(*seconds: float) -> list[Any]:
    """Replies that arrived so long after 100."""
    return [SimpleNamespace(time=100.0 + each) for each in seconds]


def test_from_the_fourth_exchange_on_it_is_ten_times_the_median_and_said_once() -> None:
    told = Told()
    chosen = patience(None, told)
    for seconds in (20.0, 900.0, 40.0):
        assert chosen.seconds(1) == FIRST_SECONDS
        chosen.note(100.0, took(1.0, seconds))
    assert chosen.seconds(4) == 400.0
    chosen.note(100.0, took(20.0))
    assert chosen.seconds(5) == 300.0
    assert told == [("deadline derived", {"round": 4, "seconds": 400.0})]


def test_clients_that_never_reply_do_not_lengthen_it_and_it_has_bounds() -> None:
    told = Told()
    chosen = patience(None, told)
    for _ in range(EXCHANGES):
        chosen.note(100.0, [])
    assert chosen.seconds(4) == FIRST_SECONDS, "nobody has replied yet"
    for _ in range(EXCHANGES):
        chosen.note(100.0, took(0.5))
    assert chosen.seconds(5) == LEAST_SECONDS
    for _ in range(9):
        chosen.note(100.0, took(2000.0))
    assert chosen.seconds(6) == FIRST_SECONDS


@pytest.mark.parametrize(("deadline", "simulated", "expected"), [(50.0, False, 50.0), (None, True, FIRST_SECONDS)])
def test_a_given_deadline_holds_and_a_simulation_derives_none(
    deadline: float | None, simulated: bool, expected: float
) -> None:
    told = Told()
    chosen = patience(deadline, told, simulated=simulated)
    for number in range(5):
        assert chosen.seconds(number) == expected
        chosen.note(100.0, took(1.0))
    assert told == []
