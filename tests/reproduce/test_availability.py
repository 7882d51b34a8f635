"""Domains on which no client trains, domains that join late, clients that are away at random."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.data.protocols import Dirichlet, LeaveOut, test_subset
from common.errors import ConfigError
from common.settings import RoundSettings, RunSettings, load_settings
from common.wire.messages import Registration
from strategies.core.registry import Registry
from tests.support.runs import Run, run
from tests.support.toy import CLASSES, DOMAINS, Toy, toy_settings

test_subset.__test__ = False  # type: ignore[attr-defined]  # a function of the library, not a test


def roster_of(settings: RunSettings) -> Registry:
    registry = Registry(settings)
    for client in registry.expected:
        reason = registry.admit(
            Registration(
                client=client,
                domain=client.rpartition("-")[0],
                samples=CLASSES,
                class_counts=[1] * CLASSES,
                scores=list(DOMAINS),
                split="s",
                identity=settings.identity,
                code=settings.code,
                device="cpu",
                versions={},
            )
        )
        assert reason is None
    return registry


def present(registry: Registry, rounds: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {client: [] for client in registry.expected}
    for number in range(1, rounds + 1):
        for client in registry.sample(number):
            found[client.id].append(number)
    return found


def trained(done: Run) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for row in done.rows("activity.csv"):
        if row["status"] in ("trained", "scaled"):
            found.setdefault(row["client"], []).append(int(row["round"]))
    return found


def test_a_domain_trains_from_its_round_on_and_is_scored_before(tmp_path: Path) -> None:
    rounds = {"joins": {"dark": 3}}
    done = run(toy_settings("fpl", tmp_path, rounds=rounds, train={"rounds": 4}))
    assert trained(done) == {"bright-0": [1, 2, 3, 4], "dark-0": [3, 4], "noisy-0": [1, 2, 3, 4]}
    scored = {(int(row["round"]), row["domain"]) for row in done.rows("history.csv")}
    assert scored == {(number, domain) for number in range(5) for domain in DOMAINS}


def test_until_a_domain_joins_the_run_is_as_without_it(tmp_path: Path) -> None:
    late = run(toy_settings("fedavg", tmp_path / "late", rounds={"joins": {"dark": 2}}, train={"rounds": 2}))
    never = run(toy_settings("fedavg", tmp_path / "never", rounds={"joins": {"dark": 3}}, train={"rounds": 2}))
    assert late.averages()[:2] == never.averages()[:2]  # initial state, and after round 1
    assert late.sha256 != never.sha256


def test_absence_is_random_keyed_and_has_the_right_frequency(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path, rounds={"absence": 0.3})
    found = present(roster_of(settings), 300)
    assert found == present(roster_of(settings), 300)
    for rounds in found.values():
        assert 0.62 < len(rounds) / 300 < 0.78  # 0.7 plus what the never-empty rule adds; four deviations are 0.105
    other = present(roster_of(toy_settings("fedavg", tmp_path, rounds={"absence": 0.3}, seed=1)), 300)
    assert other != found


def test_a_client_does_not_notice_whether_others_are_there(tmp_path: Path) -> None:
    all_three = present(roster_of(toy_settings("fedavg", tmp_path, rounds={"absence": 0.5})), 50)
    two = {"absence": 0.5, "joins": {"bright": 50}}
    without = present(roster_of(toy_settings("fedavg", tmp_path, rounds=two, train={"rounds": 50})), 50)
    noisy_is_there = set(all_three["noisy-0"]) & set(without["noisy-0"])  # present, and not as the only client
    assert len(noisy_is_there) > 15
    assert noisy_is_there & set(all_three["dark-0"]) == noisy_is_there & set(without["dark-0"])
    assert set(without["bright-0"]) <= {50}


def test_somebody_is_always_there(tmp_path: Path) -> None:
    registry = roster_of(toy_settings("fedavg", tmp_path, rounds={"absence": 0.99}))
    counts = [len(registry.sample(number)) for number in range(1, 101)]
    assert min(counts) == 1
    assert sum(counts) < 110


def test_a_run_with_absent_clients_resumes_to_the_same_state(tmp_path: Path) -> None:
    rounds = {"absence": 0.4}
    whole = run(toy_settings("scaffold", tmp_path / "whole", rounds=rounds, train={"rounds": 4}))
    run(toy_settings("scaffold", tmp_path / "cut", rounds=rounds, train={"rounds": 4}), stop_after=2)
    resumed = run(toy_settings("scaffold", tmp_path / "cut", rounds=rounds, train={"rounds": 4}, resume=True))
    assert resumed.sha256 == whole.sha256
    assert sum(map(len, trained(whole).values())) < 12


def test_names_rounds_and_probabilities_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"rounds.joins.skech: .*did you mean 'sketch'"):
        load_settings(["rounds.joins={skech:2}"])
    with pytest.raises(ConfigError, match="after the last round, 10"):
        load_settings(["rounds.joins={sketch-0:11}"])
    with pytest.raises(ConfigError, match=r"rounds.joins.sketch='soon': must be a valid integer"):
        load_settings(["rounds.joins={sketch:soon}"])
    for wrong in ({"absence": 1.0}, {"absence": -0.1}, {"joins": {"a": 0}}, {"test_samples": 0}):
        with pytest.raises(ValueError, match="should be"):
            RoundSettings(**wrong)  # type: ignore[arg-type]  # wrong on purpose


def test_absence_and_joins_are_part_of_what_a_run_is_but_not_how_it_is_scored() -> None:
    plain = load_settings([]).identity
    assert load_settings(["rounds.absence=0.1"]).identity != plain
    assert load_settings(["rounds.joins={sketch:2}"]).identity != plain
    assert load_settings(["rounds.test_samples=5"]).identity == plain


def test_a_test_subset_is_the_same_in_every_run(tmp_path: Path) -> None:
    split = Toy().load("bright").test
    chosen = test_subset(split, 7, "bright")
    assert len(chosen) == 7
    assert chosen.images.equal(test_subset(split, 7, "bright").images)
    assert test_subset(split, None, "bright") is split
    assert test_subset(split, 16, "bright") is split
    done = run(toy_settings("fedavg", tmp_path, rounds={"test_samples": 5}))
    assert {row["count"] for row in done.rows("history.csv")} == {"5"}


# ---- unseen domains --------------------------------------------------------------------------------------------------


def test_a_domain_that_is_left_out_has_no_client_and_is_scored() -> None:
    protocol = LeaveOut(leave_out=("dark",))
    assert [spec.id for spec in protocol.clients(Toy())] == ["bright-0", "noisy-0"]
    assert protocol.test_domains(Toy()) == DOMAINS
    assert LeaveOut(leave_out=("dark",), score="unseen").test_domains(Toy()) == ("dark",)
    assert LeaveOut().left_out(Toy()) == ("noisy",)


def test_the_whole_of_an_unseen_domain_can_be_scored() -> None:
    whole, train = Toy().load("dark"), Toy().load("bright")
    protocol = LeaveOut(leave_out=("dark",), unseen="whole")
    assert len(protocol.test_split(whole)) == len(whole.train) + len(whole.test)
    assert protocol.test_split(train) is train.test
    source = Dirichlet(domain="bright", unseen="whole")
    assert len(source.test_split(whole)) == len(whole.train) + len(whole.test)
    assert source.test_split(train) is train.test  # what was trained on is never scored


def test_leaving_out_a_run(tmp_path: Path) -> None:
    overrides = ("protocol=leave_one_out",)
    settings = toy_settings("fedavg", tmp_path, overrides=overrides)
    done = run(settings)
    assert set(trained(done)) == {"bright-0", "dark-0"}
    assert {row["domain"] for row in done.rows("history.csv")} == set(DOMAINS)


def test_mistakes_in_what_is_left_out() -> None:
    with pytest.raises(ConfigError, match="did you mean 'dark'"):
        LeaveOut(leave_out=("drak",)).clients(Toy())
    with pytest.raises(ConfigError, match="no domain is left to train on"):
        LeaveOut(leave_out=DOMAINS).clients(Toy())
    with pytest.raises(ValueError, match="a name is repeated"):
        LeaveOut(leave_out=("dark", "dark"))
    with pytest.raises(ValueError, match="needs leave_out"):
        LeaveOut(unseen="whole")
    with pytest.raises(ValueError, match=r"needs protocol\.domain"):
        Dirichlet(unseen="whole")
