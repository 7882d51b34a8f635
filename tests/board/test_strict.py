"""Strict comparisons: studies, budgets, seeds and partitions, going on after an end, and what is refused."""

from __future__ import annotations

import json
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from support.boards import TINY, strict_command
from support.scripts import ROOT

from common.errors import EngineError
from common.settings import load_settings
from server.cli import main
from server.commands import strict
from server.commands.tune import TuningSearch, plan_search, space_of, starting_values
from server.results.board.record import (
    IN_DOMAIN,
    STUDY_SEED,
    BoardRecord,
    Rules,
    Study,
    Trial,
    read_record,
    write_record,
)
from server.results.run import Run

NAME = "glyphs-small-views_none-uniform"
RULES = Rules(studies=3, trials=8, runs=5, rounds=8, startup=2, unpruned=5)


def record_in(folder: Path) -> BoardRecord:
    return read_record(folder / f"{NAME}.json")


def trial(scores: Mapping[int, float], state: str = "complete", **values: float) -> Trial:
    return Trial.model_validate(
        {
            "values": values or {"train.learning_rate": 0.01},
            "state": state,
            "score": scores[max(scores)],
            "curve": dict(scores),
            "rounds": max(scores),
            "seconds": 0.0,
        }
    )


# ---- a real comparison -----------------------------------------------------------------------------------------------


def test_studies_and_final_runs_are_as_the_rules_ask(runs: Path) -> None:
    record = record_in(runs)
    assert list(record.rows) == ["fedavg", "fedproto"]
    for name, row in record.rows.items():
        case = row.cases[IN_DOMAIN]
        assert case.whole(record.rules)
        assert [study.seed for study in case.studies] == [STUDY_SEED, STUDY_SEED + 1]
        for study in case.studies:
            assert study.rounds == record.rules.budget == 4
            assert study.done
        assert [run.study for run in case.runs] == [0, 1, 0]
        for stated in case.runs:
            run = Run(runs / NAME / name / IN_DOMAIN / f"seed-{stated.seed}")
            assert run.seed == stated.seed
            assert run.options["protocol.partition_seed"] is None
            assert run.options["method.weighting"] == "uniform"
            assert stated.state_sha256 == run.checkpoint.state.sha256()
            assert stated.average == run.rules["final"]["average"]
            best = case.studies[stated.study].best
            assert best is not None
            assert run.options["train.learning_rate"] == best.values["train.learning_rate"]
            assert any(stated.state_sha256[:16] in line for line in stated.log)


def test_each_study_and_each_final_run_has_a_partition_of_its_own(runs: Path) -> None:
    record = record_in(runs)
    splits: set[str] = set()
    for stated in record.rows["fedavg"].cases[IN_DOMAIN].runs:
        run = Run(runs / NAME / "fedavg" / IN_DOMAIN / f"seed-{stated.seed}")
        splits.add(json.dumps(run.summary["splits"], sort_keys=True))
    assert len(splits) == record.rules.runs
    seeds = {STUDY_SEED + number for number in range(record.rules.studies)}
    assert not seeds & set(range(record.rules.runs))


def test_the_first_trials_have_the_starting_values_and_studies_differ_after_them(runs: Path) -> None:
    studies = record_in(runs).rows["fedproto"].cases[IN_DOMAIN].studies
    assert studies[0].trials[0].values == studies[1].trials[0].values
    assert studies[0].trials[1].values != studies[1].trials[1].values


def test_the_command_of_a_cell_gives_its_hash(runs: Path, tmp_path: Path) -> None:
    stated = record_in(runs).rows["fedproto"].cases[IN_DOMAIN].runs[1]
    words = shlex.split(stated.command)[1:]
    assert main([*words, f"output={tmp_path / 'again'}", "--quiet"]) == 0
    assert Run(tmp_path / "again").state_sha256 == stated.state_sha256


def test_what_is_done_is_not_done_again_and_the_record_alone_suffices(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = runs / f"{NAME}.json"
    whole = path.read_text()
    record = record_in(runs)
    case = record.rows["fedproto"].cases[IN_DOMAIN]
    removed = case.studies[1].trials.pop()
    case.studies[1].done = False
    gone = case.runs.pop()
    path.write_text(record.model_dump_json())
    shutil.rmtree(runs / NAME)  # as in another session, which has the record alone
    done: list[str] = []
    for name in ("run_trial", "run_final"):
        _count_calls(monkeypatch, name, done)
    assert main(strict_command(runs, "fedproto", "--scores", "in_domain")) == 0
    assert done == ["run_trial", "run_final"]
    again = record_in(runs).rows["fedproto"].cases[IN_DOMAIN]
    assert again.studies[1].trials[-1].values == removed.values
    assert again.studies[1].trials[-1].score == removed.score
    assert again.runs[-1].state_sha256 == gone.state_sha256
    assert len(path.read_text()) == pytest.approx(len(whole), rel=0.02)


def _count_calls(monkeypatch: pytest.MonkeyPatch, name: str, done: list[str]) -> None:
    real = getattr(strict, name)

    def counted(*arguments: object) -> object:
        done.append(name)
        return real(*arguments)

    monkeypatch.setattr(strict, name, counted)


@pytest.mark.slow
def test_a_killed_comparison_loses_one_trial_at_most(strict_runs: Path, tmp_path: Path) -> None:
    """SIGKILL after the second trial; then the same command ends with the record of a comparison without a kill."""
    folder = tmp_path / "killed"
    words = strict_command(folder, "fedproto", "--scores", "in_domain")
    path = folder / f"{NAME}.json"
    with subprocess.Popen([sys.executable, "-m", "server.cli", *words], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for number, _ in enumerate(process.stdout):
            if number == 1:
                process.kill()
                break
    before = read_record(path).rows["fedavg"].cases[IN_DOMAIN].studies
    assert sum(len(study.trials) for study in before) in (2, 3)
    assert main(words) == 0
    assert results(read_record(path)) == results(record_in(strict_runs))


def results(record: BoardRecord) -> dict[str, object]:
    """All that a record holds of its rows, without times, and without bytes: a reply's header holds seconds as text."""
    made = record.model_copy(deep=True)
    for row in made.rows.values():
        for case in row.cases.values():
            for run in case.runs:
                run.seconds, run.bytes = 0.0, {}
            for study in case.studies:
                for each in study.trials:
                    each.seconds = 0.0
    return made.model_dump(include={"rows"})


def test_the_overrides_of_a_command_are_each_there_once() -> None:
    words = ["a=1", "b=2", "a=3", "protocol=x", "protocol.samples=4"]
    assert strict.last_of_each(words) == ["b=2", "a=3", "protocol=x", "protocol.samples=4"]


def test_a_domain_that_is_left_out_has_studies_of_its_own(tmp_path: Path) -> None:
    words = strict_command(tmp_path / "loo", "fedavg", "--scores", "leave_one_out", "--studies", "1", "--trials", "1")
    assert main([*words, "--runs", "1"]) == 0
    cases = record_in(tmp_path / "loo").rows["fedavg"].cases
    assert list(cases) == ["leave_out:handwritten", "leave_out:printed"]
    for name, case in cases.items():
        domain = name.partition(":")[2]
        run = Run(tmp_path / "loo" / NAME / "fedavg" / name.replace(":", "-") / "seed-0")
        assert list(run.registrations) == [f"{other}-0" for other in ("handwritten", "printed") if other != domain]
        assert case.runs[0].average == case.runs[0].accuracy[domain]


# ---- one study, without runs -----------------------------------------------------------------------------------------


@pytest.fixture
def search(tmp_path: Path) -> TuningSearch:
    return plan_search(["method=fedprox", *TINY, f"seed={STUDY_SEED}"], tmp_path / "search", 8, [0])


def test_values_depend_on_the_seed_and_the_earlier_trials_alone(search: TuningSearch) -> None:
    study = Study(seed=STUDY_SEED)
    first = strict.next_values(search, study, 2)
    assert first == starting_values(search.settings, space_of(search.settings))
    study.trials.append(trial({8: 40.0}, **first))
    second = strict.next_values(search, study, 2)
    again = read_back(study)
    assert strict.next_values(search, again, 2) == second
    other = study.model_copy(update={"seed": STUDY_SEED + 1})
    assert strict.next_values(search, other, 2) != second


def read_back(study: Study) -> Study:
    return Study.model_validate_json(study.model_dump_json())


def test_values_after_the_start_are_tpe_s_and_lie_near_good_trials(search: TuningSearch) -> None:
    """With trials that score by their learning rate, TPE draws higher learning rates than at random."""
    drawn: list[float] = []
    for seed in range(STUDY_SEED, STUDY_SEED + 8):
        study = Study(seed=seed)
        for _ in range(12):
            values = strict.next_values(search, study, 2)
            score = 1000 * values["train.learning_rate"]
            study.trials.append(trial({8: min(score, 100.0)}, **values))
        drawn += [each.values["train.learning_rate"] for each in study.trials[6:]]
    low, high, _ = space_of(search.settings)["train.learning_rate"]
    assert statistics.median(drawn) > (low * high) ** 0.5 * 2


def test_no_trial_is_ended_before_five_are_complete() -> None:
    good = {number: 10.0 * number for number in range(1, 9)}
    bad = {1: 1.0, 2: 1.0, 3: 1.0}
    for count in range(8):
        study = Study(seed=STUDY_SEED, trials=[trial(good) for _ in range(count)])
        assert strict.below_median(bad, study, RULES) == (count >= 5)
    study = Study(seed=STUDY_SEED, trials=[trial(good) for _ in range(6)])
    assert not strict.below_median({1: 1.0, 2: 1.0}, study, RULES)  # in the first quarter of the rounds
    assert not strict.below_median({}, study, RULES)
    assert not strict.below_median({3: 31.0}, study, RULES)
    pruned = [trial(good, "pruned") for _ in range(9)]
    assert not strict.below_median(bad, Study(seed=STUDY_SEED, trials=pruned), RULES)


def finished(rounds: int, state: str) -> Callable[..., Trial]:
    def run(search: TuningSearch, study: Study, values: Mapping[str, float], rules: Rules) -> Trial:
        made = trial({rounds: 20.0}, state, **values)
        if state == "failed":
            made.score, made.curve = 0.0, {}
        return made

    return run


@pytest.mark.parametrize(
    ("rounds", "state", "count"),
    [(2, "complete", 8), (1, "pruned", 15), (1, "failed", 15)],
    ids=["trials that end", "pruned ones free rounds for others", "failed ones count a round"],
)
def test_the_budget_is_in_completed_rounds(
    rounds: int, state: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strict, "run_trial", finished(rounds, state))
    monkeypatch.setattr(strict, "_run_finals", lambda *_: None)
    monkeypatch.setattr(strict, "_result_line", lambda _: "")
    words = strict_command(tmp_path / "budget", "fedavg", "--scores", "in_domain", "--trials", "8")
    assert main(words) == 0
    for study in record_in(tmp_path / "budget").rows["fedavg"].cases[IN_DOMAIN].studies:
        assert len(study.trials) == count
        assert 16 - 2 < study.rounds <= 16


def test_the_chosen_trial_is_the_best_complete_one_by_its_last_round() -> None:
    early = trial({4: 90.0, 8: 30.0}, a=1.0)
    last = trial({4: 10.0, 8: 40.0}, a=2.0)
    ended = trial({4: 95.0}, "pruned", a=3.0)
    assert Study(seed=STUDY_SEED, trials=[early, ended, last]).best is not None
    assert Study(seed=STUDY_SEED, trials=[early, ended, last]).best.values == {"a": 2.0}  # type: ignore[union-attr]
    assert Study(seed=STUDY_SEED, trials=[ended]).best is None


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["method.temperature=0.1"], "method.temperature"),
        (["seed=3"], "seed"),
        (["protocol.partition_seed=0"], "protocol.partition_seed"),
        (["tuned=fpl_on_glyphs"], "tuned"),
        (["weighting=equal"], "weighting equal"),
        (["--scores", "seen"], "--scores seen"),
        (["--runs", "1"], "--runs 1"),
        (["rules=severe"], "--rules severe"),
        (["--jobs", "2"], "--jobs"),
        (["--seeds", "7,8"], "--seeds 7,8"),
        (["views=blurred"], "blurred"),
        (["protocol=dirichlet"], "leave_one_out"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_settings_of_the_rules_and_unknown_choices_are_refused(
    words: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["compare", "rules=strict", "--methods", "fedavg", "data=glyphs", "--output", str(tmp_path / "out"), *words]
    assert main(asked) == 1
    assert reason in capsys.readouterr().err
    assert not list((tmp_path / "out").rglob("*.json"))


def test_a_board_with_other_settings_is_not_continued(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (runs / f"{NAME}.json").read_text()
    assert main([*strict_command(runs, "fedavg", "--scores", "in_domain"), "train.epochs=2"]) == 1
    assert "train.epochs" in capsys.readouterr().err
    assert (runs / f"{NAME}.json").read_text() == before


def test_the_command_of_a_continued_board_names_all_its_rows_and_scores(tmp_path: Path) -> None:
    plan = [(["fedavg", "fpl"], ["leave_one_out"]), (["fpl", "moon"], [IN_DOMAIN])]
    for methods, scores in plan:
        request = strict.request_of(methods, TINY, tmp_path, None, scores, 1, 1, 1)
        path, board, _ = strict._plan(request, "none", "uniform")
        write_record(path, board)
    words = shlex.split(board.command)
    assert words[words.index("--methods") + 1] == "fedavg,fpl,moon"
    assert "--scores=in_domain,leave_one_out" in words


def test_a_method_that_needs_other_settings_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strict, "_run_studies", lambda *_: None)
    monkeypatch.setattr(strict, "_run_finals", lambda *_: None)
    monkeypatch.setattr(strict, "_result_line", lambda _: "")
    request = strict.request_of(["fedgca"], TINY, tmp_path, None, [IN_DOMAIN], 1, 1, 1)
    _, board, entrants = strict._plan(request, "none", "uniform")
    assert [entrant.method for entrant in entrants] == ["fedavg"]
    assert "views=none" in board.left_out["fedgca"]


def test_rows_have_the_same_settings_and_the_weighting_of_the_board(tmp_path: Path) -> None:
    names = ["fpl", "feddyn", "fedplvm", "moon", "adcol", "fedheal"]
    request = strict.request_of(names, [*TINY, "views=randconv"], tmp_path, None, [IN_DOMAIN], 1, 1, 1)
    for weighting in ("uniform", "samples"):
        _, board, entrants = strict._plan(request, "randconv", weighting)
        assert len(entrants) == len(names) + 1
        for entrant in entrants:
            settings = load_settings(list(entrant.overrides))
            assert settings.choices["views"] == "randconv"
            assert dict(settings.raw["method"]).get("weighting", weighting) == weighting
            assert strict.shared_settings(settings.raw) == board.shared


def test_a_run_with_a_partial_score_has_failed() -> None:
    watcher = strict.Watcher(2)
    with pytest.raises(EngineError, match="sketch"):
        watcher("validation", {"round": 1, "average": 5.0, "missing": {"sketch": None}})
