"""Domains on which no client trains, and how many test images are scored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from common.data.protocols import Dirichlet, LeaveOut, test_subset
from common.errors import ConfigError
from common.round_settings import RoundSettings
from common.settings import load_settings
from tests.support.runs import run
from tests.support.toy import DOMAINS, Toy, toy_settings

test_subset.__test__ = False  # type: ignore[attr-defined]  # a function of the library, not a test


def test_a_run_in_which_clients_pause_resumes_to_the_same_state(tmp_path: Path) -> None:
    settings = toy_settings("scaffold", tmp_path / "whole", rounds={"participation": 0.6}, train={"rounds": 3})
    cut = replace(settings, output=str(tmp_path / "cut"))
    whole = run(settings)
    run(cut, stop_after=1)
    assert run(replace(cut, resume=True)).sha256 == whole.sha256
    assert [row["status"] for row in whole.replies()].count("trained") < 9


def test_scored_images_are_no_part_of_what_a_run_is() -> None:
    assert load_settings(["rounds.test_samples=5"]).identity == load_settings([]).identity
    with pytest.raises(ValueError, match="should be"):
        RoundSettings(test_samples=0)


def test_a_test_subset_is_the_same_in_every_run(tmp_path: Path) -> None:
    split = Toy().load("bright").test
    chosen = test_subset(split, 7, "bright")
    assert len(chosen) == 7
    assert chosen.images.equal(test_subset(split, 7, "bright").images)
    assert test_subset(split, None, "bright") is split
    assert test_subset(split, 16, "bright") is split
    done = run(toy_settings("fedavg", tmp_path, rounds={"test_samples": 5}))
    assert {row["count"] for row in done.history()} == {"5"}


# ---- unseen domains --------------------------------------------------------------------------------------------------


def test_a_domain_that_is_left_out_has_no_client_and_is_scored() -> None:
    """A whole run is in tests/report/test_partial_scores.py."""
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
