"""A score that lacks a domain is marked as partial: in the record, under every rule, in what is printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.runs import Run, TouchedEngine, run
from support.toy import DOMAINS, toy_settings

from common.errors import ConfigError
from common.metrics import UNDEFINED, Measure, RoundScore, named_missing, states, summarise
from common.scores import RunScores, ScoreSeries
from common.settings import RunSettings, load_settings
from common.wire.messages import Request
from common.wire.payload import Payload
from server.run.events import describe, plain_lines


def silent(client: str, rounds: Sequence[int]) -> Callable[[Request, Payload], Payload]:
    """A device that answers without its scores in some rounds; the score is of the round before."""

    def edit(request: Request, payload: Payload) -> Payload:
        if request.client != client or request.round - 1 not in rounds:
            return payload
        return replace(payload, header={**payload.header, "scores": []})

    return edit


def by_name(done: Run, name: str) -> list[Mapping[str, Any]]:
    return [entry for each, entry in done.events if each == name]


def missing_lines(done: Run) -> list[tuple[int, str, str]]:
    found = by_name(done, "score missing")
    return [(entry["round"], entry.get("client", ""), entry["domain"]) for entry in found]


# ---- devices that do not score ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def declined(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunSettings, Run]:
    """Three rounds; the dark device answers without its scores from the second on."""
    settings = toy_settings("fedavg", tmp_path_factory.mktemp("declined"), train={"rounds": 3})
    return settings, run(settings, TouchedEngine(settings, edit=silent("dark-0", [2, 3])))


def test_a_device_that_declines_to_score_is_reported_and_the_score_is_partial(
    declined: tuple[RunSettings, Run],
) -> None:
    done = declined[1]
    summary = done.summary
    assert summary["partial"] is True
    assert summary["missing"] == {"dark": 1}
    assert set(summary["accuracy"]) == {"bright", "noisy"}
    for rule, round_number, missing in (("final", 3, {"dark": 1}), ("best_round", 1, {})):
        assert (summary["scores"][rule]["round"], summary["scores"][rule]["missing"]) == (round_number, missing)
    assert summary["scores"]["last_n"]["missing"] == {"dark": 1}
    assert missing_lines(done) == [(2, "dark-0", "dark"), (3, "dark-0", "dark")]
    assert summary["answers"]["refused"] == 0, "what it trained counts"
    assert by_name(done, "score")[-1]["missing"] == {"dark": 1}
    assert by_name(done, "finish")[0]["missing"] == {"dark": 1}
    assert by_name(done, "start")[0]["test"] == dict.fromkeys(DOMAINS, 1)


def test_what_a_terminal_shows_names_what_is_missing_and_since_when(
    declined: tuple[RunSettings, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    settings, done = declined
    show = plain_lines(settings)
    for name, entry in done.events:
        show(name, entry)
    lines = capsys.readouterr().out.splitlines()
    assert sum("dark-0 did not score dark: " in line for line in lines) == 2
    scores = [line for line in lines if "average" in line]
    assert ["PARTIAL, without dark (last scored in round 1)" in line for line in scores] == [False, False, True, True]
    (end,) = [line for line in lines if "finished after round 3" in line]
    assert "THE FINAL SCORE IS PARTIAL, without dark (last scored in round 1)" in end


def test_a_client_that_is_gone_from_a_round_on_leaves_a_partial_score(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path, train={"rounds": 3}, rounds={"last_rounds": 2})
    gone = TouchedEngine(settings, failing=lambda request: request.client == "noisy-0" and request.round > 2)
    done = run(settings, gone)
    assert done.summary["missing"] == {"noisy": 1}
    last = done.summary["scores"]["last_n"]
    assert last["missing"] == {"noisy": 1}
    assert "noisy" not in last["accuracy"]
    assert missing_lines(done) == [(number, "noisy-0", "noisy") for number in (2, 3)]
    assert [entry["status"] for entry in by_name(done, "score missing")] == ["failed"] * 2
    assert describe("score missing", by_name(done, "score missing")[0], 4) == "", "its failure has a line of its own"


class Unable(TouchedEngine):
    """Devices that can score their own domain only, as real ones; one of them can score none."""

    def __init__(self, settings: Any, client: str) -> None:
        super().__init__(settings)
        for name, device in self.inner.devices.items():
            device.scores = () if name == client else (device.spec.domain,)


def test_a_domain_that_no_client_can_score_is_reported_once_and_marked_in_every_round(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path)
    done = run(settings, Unable(settings, "dark-0"))
    assert missing_lines(done) == [(0, "", "dark")]
    assert [entry["missing"] for entry in by_name(done, "score")] == [{"dark": None}] * 3
    assert done.summary["missing"] == {"dark": None}
    assert all(rule["missing"] == {"dark": None} for rule in done.summary["scores"].values())
    line = describe("score missing", by_name(done, "score missing")[0], 3)
    assert "dark is not scored" in line
    assert "dark (never scored)" in describe("finish", by_name(done, "finish")[0], 3)


def test_a_run_that_goes_on_knows_since_when(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path / "parted", train={"rounds": 4})
    decline = silent("dark-0", [2, 3, 4])
    run(settings, TouchedEngine(settings, edit=decline), stop_after=3)
    again = replace(settings, resume=True)
    done = run(again, TouchedEngine(again, edit=decline))
    assert done.summary["missing"] == {"dark": 1}
    assert by_name(done, "score")[-1]["missing"] == {"dark": 1}


def test_a_run_that_is_resumed_once_the_device_is_back_ends_with_a_whole_score(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path, train={"rounds": 2})
    gone = TouchedEngine(settings, failing=lambda request: request.client == "dark-0" and not request.train)
    first = run(settings, gone)
    assert first.summary["missing"] == {"dark": 1}
    again = run(replace(settings, resume=True))
    assert (again.summary["partial"], again.summary["missing"]) == (False, {})
    assert set(again.summary["accuracy"]) == set(DOMAINS)


@pytest.mark.parametrize("method", ["fedbn", "fedpall"])
def test_own_models_of_a_domain_are_all_scored_or_the_domain_is_missing(method: str, tmp_path: Path) -> None:
    settings = toy_settings(method, tmp_path, train={"rounds": 3})
    last = 3 if method == "fedpall" else 4  # which scores within the round
    failing = lambda request: request.client == "dark-0" and request.round == last  # noqa: E731
    done = run(settings, TouchedEngine(settings, failing=failing))
    assert done.summary["missing"] == {"dark": 2}


def test_several_clients_of_a_domain_with_models_of_their_own() -> None:
    def line(domain: str, correct: int, count: int) -> dict[str, Any]:
        return {"domain": domain, "correct": correct, "count": count}

    series = ScoreSeries({"a": 2, "b": 1})
    first = series.add(1, [line("a", 1, 2), line("a", 2, 2), line("b", 1, 1)])
    assert first is not None
    assert first.missing == {}
    second = series.add(2, [line("a", 1, 2), line("b", 1, 1)])
    assert second is not None
    assert second.missing == {"a": 1}, "one of its two clients is not there"
    assert second.accuracy == {"a": 50.0, "b": 100.0}


# ---- validation ------------------------------------------------------------------------------------------------------


def validating(method: str, output: Path, **more: Any) -> Any:
    return toy_settings(method, output, overrides=("protocol.validation=0.2",), **more)


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fedpall"])
def test_every_client_validates_also_if_it_does_not_train(method: str, tmp_path: Path) -> None:
    done = run(validating(method, tmp_path, rounds={"participation": 0.34}))
    found: dict[str, set[str]] = {}
    for row in done.scores("validation"):
        found.setdefault(row["round"], set()).add(row["domain"])
    assert len(found) >= 2
    assert all(domains == set(DOMAINS) for domains in found.values())
    assert all(entry["missing"] == {} for entry in by_name(done, "validation"))
    trained = {row["client"] for row in done.replies() if row["round"] == "1" and row["status"] == "trained"}
    assert 0 < len(trained) < len(DOMAINS), "some only validate"


def test_a_round_that_a_client_did_not_validate_is_not_chosen(tmp_path: Path) -> None:
    """The worst client by far misses one round. In that round the average over the others is the highest."""

    def told(request: Request, payload: Payload) -> Payload:
        validation = payload.header["validation"]
        correct = 0 if request.client == "dark-0" else validation["count"]
        return replace(payload, header={**payload.header, "validation": {**validation, "correct": correct}})

    settings = validating("fedavg", tmp_path, train={"rounds": 4})
    failing = lambda request: request.client == "dark-0" and request.round == 4  # noqa: E731
    done = run(settings, TouchedEngine(settings, failing=failing, edit=told))
    validations = {entry["round"]: entry for entry in by_name(done, "validation")}
    assert (validations[3]["average"], validations[3]["missing"]) == (100.0, {"dark": 2})
    assert done.summary["validation"] == {"round": 1, "average": pytest.approx(200 / 3), "missing": {}}
    assert done.summary["scores"]["validated"]["round"] == 1


def test_validation_and_oversampling_are_refused_together() -> None:
    words = ["rounds.participation=0.5", "rounds.oversample=1.5", "protocol.validation=0.2"]
    with pytest.raises(ConfigError, match=r"rounds.oversample=1.5 .* protocol.validation=0.2 .* choose one"):
        load_settings(words)


# ---- which rounds count ----------------------------------------------------------------------------------------------


def test_the_untrained_round_is_in_no_rule_but_the_curve(tmp_path: Path) -> None:
    """Round 0 is the best by what the clients report."""

    def flattering(request: Request, payload: Payload) -> Payload:
        right = 1.0 if request.round == 1 else 0.5
        scores = [{**entry, "correct": int(right * entry["count"])} for entry in payload.header["scores"]]
        validation = payload.header["validation"]
        validation = {**validation, "correct": int(right * validation["count"])}
        return replace(payload, header={**payload.header, "scores": scores, "validation": validation})

    settings = validating("fedavg", tmp_path, train={"rounds": 2}, rounds={"last_rounds": 5})
    done = run(settings, TouchedEngine(settings, edit=flattering))
    scores = done.summary["scores"]
    assert by_name(done, "score")[0]["average"] == 100.0
    assert (scores["last_n"]["average"], scores["last_n"]["rounds"]) == (50.0, 2)
    assert scores["best_round"]["round"] == 1
    assert scores["validated"]["round"] == 1
    assert done.summary["validation"]["round"] == 1
    kept = sorted(path.name for path in (tmp_path / "checkpoint").glob("best-*"))
    assert kept, "the best round's state"


def test_a_skipped_round_is_no_further_round(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path, train={"rounds": 4}, rounds={"last_rounds": 2, "quorum": 1.0})

    def one_only(request: Request) -> bool:
        return request.client == "dark-0" and request.train and request.round == 3

    done = run(settings, TouchedEngine(settings, failing=one_only))
    assert done.summary["rounds_skipped"] == 1
    scored: dict[int, dict[str, float]] = {}
    for row in done.history():
        scored.setdefault(int(row["round"]), {})[row["domain"]] = float(row["accuracy"])
    assert scored[2] == {name: scored[3][name] for name in ("bright", "noisy")}, "the same state, scored again"
    last = done.summary["scores"]["last_n"]
    assert last["accuracy"] == pytest.approx({name: (scored[3][name] + scored[4][name]) / 2 for name in DOMAINS})
    assert (last["rounds"], last["missing"]) == (2, {}), "its second score has every domain"


def test_a_skipped_round_s_whole_score_stands_for_a_partial_one_of_the_same_state() -> None:
    rounds = [
        RoundScore(0, {"a": 99.0, "b": 99.0}),
        RoundScore(1, {"a": 10.0}, {"b": 0}),
        RoundScore(2, {"a": 10.0, "b": 20.0}),
        RoundScore(3, {"a": 10.0, "b": 20.0}),
        RoundScore(4, {"a": 30.0, "b": 40.0}),
    ]
    assert [score.round for score in states(rounds, {2, 3})] == [2, 4]
    assert [score.round for score in states(rounds[:1])] == []
    assert [score.round for score in states(rounds, {1, 2, 3})] == [4], "skipped from the start: still untrained"


def test_a_score_of_a_state_that_a_skipped_round_throws_away_is_no_score(tmp_path: Path) -> None:
    """FedPall scores in its second exchange; a round that ends there leaves the state of the round before."""
    settings = toy_settings("fedpall", tmp_path, train={"rounds": 3}, rounds={"quorum": 1.0})
    scored_at = settings.method.scored_at
    failing = lambda request: (request.client, request.round, request.exchange) == ("dark-0", 3, scored_at)  # noqa: E731
    done = run(settings, TouchedEngine(settings, failing=failing))
    assert done.summary["rounds_skipped"] == 1
    assert sorted({int(row["round"]) for row in done.history()}) == [1, 2]
    assert (done.summary["scores"]["final"]["round"], done.summary["missing"]) == (2, {})


# ---- the rules, for any rounds ---------------------------------------------------------------------------------------

NAMES = ("a", "b", "c")


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[dict[str, Any]], set[int]]:
    """Rows of some rounds in which any domains are scored, and the rounds that were skipped."""
    rows = []
    for number in range(draw(st.integers(1, 8))):
        for name in draw(st.sets(st.sampled_from(NAMES))):
            right = draw(st.integers(0, 9))
            rows.append({"round": number, "domain": name, "scored_on": "test", "correct": right, "count": 9})
    return rows, draw(st.sets(st.integers(1, 8)))


@given(histories(), st.integers(1, 4))
def test_a_score_is_unmarked_if_and_only_if_its_rounds_scored_every_domain(
    history: tuple[list[dict[str, Any]], set[int]], last: int
) -> None:
    rows, skipped = history
    rounds = RunScores(rows, scorers={"test": dict.fromkeys(NAMES, 1)}).tested()
    scored = {score.round: {row["domain"] for row in rows if row["round"] == score.round} for score in rounds}
    rules = summarise(rounds, last, skipped=skipped)
    assert bool(rules) == bool(rows)
    used = {name: [rule["round"]] for name, rule in rules.items()}
    if "last_n" in rules:
        used["last_n"] = [score.round for score in states(rounds, skipped)[-last:]]
    for name, rule in rules.items():
        missing = rule["missing"]
        assert isinstance(missing, dict)
        whole = all(scored[number] == set(NAMES) for number in used[name])
        assert whole == (not missing)
        assert isinstance(rule["average"], float)
        for domain, seen in missing.items():
            earlier = [number for number in scored if domain in scored[number] and number < max(used[name])]
            assert seen is None or seen in earlier
    best = rules.get("best_round")
    if best is not None and best["missing"]:
        assert all(score.missing for score in states(rounds, skipped)), "a whole round goes before a partial one"


def test_a_domain_that_does_not_define_a_metric_was_scored() -> None:
    """Such as AUROC of a site whose test images are of one class."""
    lines = [{"domain": name, "correct": 1, "count": 100} for name in ("a", "b")]
    series = ScoreSeries(dict.fromkeys(("a", "b"), 1), "auroc", Measure("AUROC"))
    score = series.add(1, lines, {(1, "a"): {"auroc": 9.0}})
    assert score is not None
    assert score.accuracy == {"a": 9.0}
    assert score.missing == {"b": UNDEFINED}
    assert "never" not in named_missing(score.missing)
    assert named_missing({}) == ""
