"""The seconds that a deployment's exchange may take: given, or derived from the exchanges before and said once."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.exchanges import registration
from support.toy import toy_settings

from server.engines.inline import InlineEngine
from server.run.conduct import prepare_output, run_federation
from server.run.deployment import DEADLINE_SECONDS, LEAST_SECONDS, ExchangePatience, exchange_seconds, slow_start
from server.run.schema import read_lines


def derived(*took: float) -> float:
    return exchange_seconds(None, took)


def test_from_the_fourth_exchange_on_it_is_ten_times_the_median_within_bounds() -> None:
    assert derived() == derived(20.0, 900.0) == DEADLINE_SECONDS
    assert derived(20.0, 900.0, 40.0) == 400.0
    assert derived(20.0, 900.0, 40.0, 20.0) == 300.0
    assert derived(0.5, 0.5, 0.5) == LEAST_SECONDS
    assert derived(900.0, 900.0, 900.0) == DEADLINE_SECONDS


def test_exchanges_that_nobody_replied_to_do_not_count() -> None:
    patience = ExchangePatience(None, lambda *_, **content: pytest.fail(f"derived: {content}"))
    for _ in range(4):
        patience.note(0.0, [])
    assert patience.seconds(5) == DEADLINE_SECONDS


def test_a_given_deadline_holds() -> None:
    assert exchange_seconds(50.0, [1.0] * 9) == 50.0


@pytest.mark.parametrize(
    ("seconds", "deadline", "words"),
    [(30.0, 9.0, ()), (31.0, None, ("31 s to start",)), (31.0, 60.0, ("31 s to start", "60 s for an exchange"))],
    ids=["in time", "slowly", "slowly with a deadline"],
)
def test_a_device_that_starts_slowly_is_reported_with_the_deadline(
    seconds: float, deadline: float | None, words: tuple[str, ...], tmp_path: Path
) -> None:
    slow = registration(toy_settings("fedavg", tmp_path), "dark-0", start_seconds=seconds)
    told = slow_start(slow, deadline)
    assert bool(told) == bool(words)
    assert all(word in told for word in words)
    assert ("rounds.deadline" in told) == (len(words) == 2)


class Deployed(InlineEngine):
    """Clients that are taken for devices; notes how long each exchange might have taken."""

    seconds: list[float]

    def exchange(self, message, requests, seconds, **more):  # type: ignore[no-untyped-def]
        self.seconds = [*getattr(self, "seconds", []), seconds]
        return super().exchange(message, requests, seconds, **more)


@pytest.mark.parametrize("deadline", [None, 77.0])
def test_a_deployment_derives_it_and_says_so_once(tmp_path: Path, deadline: float | None) -> None:
    rounds = {} if deadline is None else {"deadline": deadline}
    settings = toy_settings("fedavg", tmp_path / "run", train={"rounds": 5, "local_steps": 1}, rounds=rounds)
    engine = Deployed(settings)
    engine.simulated = False
    prepare_output(settings)
    run_federation(settings, engine)
    told = [entry for entry in read_lines(tmp_path / "run" / "events.jsonl") if entry["event"] == "deadline derived"]
    if deadline is None:
        assert engine.seconds[:3] == [DEADLINE_SECONDS] * 3
        assert set(engine.seconds[3:]) == {LEAST_SECONDS}
        assert [(entry["round"], entry["seconds"]) for entry in told] == [(4, LEAST_SECONDS)]
    else:
        assert set(engine.seconds) == {deadline}
        assert told == []


def test_a_simulation_derives_none(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path / "run", train={"rounds": 5, "local_steps": 1})
    engine = Deployed(settings)
    engine.simulated = True
    prepare_output(settings)
    run_federation(settings, engine)
    assert set(engine.seconds) == {DEADLINE_SECONDS}
