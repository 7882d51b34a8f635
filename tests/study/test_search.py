"""Studies: what is searched, validation alone, bad trials ended early, interruption, damage, and what is written."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from PIL import Image

from common.choices import CONF
from common.composition import compose_config
from common.config import Search, build, search_ranges
from common.errors import CheckpointError, ConfigError, EngineError
from common.settings import load_settings, settings_of
from goldfinch.study import rules, search
from goldfinch.study.compare import result_of
from goldfinch.study.options import IN_DOMAIN, STUDY_SEED, Rules
from goldfinch.study.rules import entrants_of
from goldfinch.study.search import TuningStudy, best_trial, finished_trials, state_of
from goldfinch.study.storage import JOURNAL, storage_of
from strategies.core.method import Method

METHODS = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))
WORDS = ["data=glyphs", "train.rounds=4", "train.device=cpu"]
Outcome = tuple[dict[str, float], float | None, str]


# ---- what is searched ------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_a_method_s_space_lies_within_its_ranges_and_around_its_printed_values(name: str) -> None:
    raw = compose_config([f"method={name}", "views=randconv"])
    settings = load_settings([f"method={name}", "views=randconv"])
    space = search_ranges(type(settings.method))
    assert len(space) <= 3
    for field, (low, high, log) in space.items():
        assert low <= getattr(settings.method, field) <= high
        assert low < high
        assert low > 0 or not log
        for value in (low, high, math.sqrt(low * high)):
            found: Method = build({**raw["method"], field: value}, "method")
            assert getattr(found, field) == value
    assert rules.RATE in rules.space_of(settings)


@pytest.mark.usefixtures("no_files_needed")
def test_a_range_reaches_the_printed_value(tmp_path: Path) -> None:
    found = study_of(tmp_path, "fedgca", "data=pacs", "views=randconv").entrant
    assert found.space["method.alpha"] == Search(0.001, 10.0)
    assert found.space["method.beta"] == Search(0.01, 8.0)
    assert rules.starting_values(found.settings, found.space)["method.alpha"] == 10.0
    assert study_of(tmp_path, "fedavg", "train.learning_rate=0.5").entrant.space == {rules.RATE: Search(0.05, 5.0)}


def test_trials_grow_with_the_searched_settings(tmp_path: Path) -> None:
    """Budgets that are equal in rounds would tune each setting of a method with several of them less."""
    budgets = {name: study_of(tmp_path, name, trials=5).budget for name in ("fedavg", "fedprox", "fpl")}
    assert budgets == {"fedavg": 5, "fedprox": 10, "fpl": 20}


# ---- a study ---------------------------------------------------------------------------------------------------------


class Pretended:
    """Runs that take no time: after round n, validation is ``quality(values)`` times n over all rounds."""

    def __init__(self, quality: Callable[[dict[str, Any]], float]) -> None:
        self.quality = quality
        self.runs: list[tuple[str, ...]] = []
        self.interrupt_at = self.fail_at = -1

    def __call__(
        self, overrides: tuple[str, ...], folder: Path, listener: Any, stop: Callable[[], bool], **_: bool
    ) -> None:
        self.runs.append(overrides)
        given = dict(item.split("=", 1) for item in overrides)
        rounds = int(given["train.rounds"])
        values = {"mu": float(given.get("method.mu", 0.0)), "rate": float(given["train.learning_rate"])}
        for number in range(1, rounds + 1):
            if stop():
                return
            if number == 2 and len(self.runs) == self.interrupt_at:
                raise KeyboardInterrupt
            if number == 2 and len(self.runs) == self.fail_at:
                raise EngineError("not finite\nand more")
            average = self.quality(values) * number / rounds
            listener("validation", {"round": number, "average": average})
            listener("round done", {"round": number})


def peak(values: dict[str, Any]) -> float:
    """Best, 90, at mu=0.1 and a rate of 0.03."""
    return 90.0 - 10 * abs(math.log10(values["mu"] or 1) + 1) - 20 * abs(math.log10(values["rate"] / 0.03))


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    made = Pretended(peak)
    monkeypatch.setattr(search, "run_here", made)
    return made


def study_of(output: Path, method: str, *more: str, trials: int = 4, number: int = 0) -> TuningStudy:
    numbers = Rules(studies=2, trials=trials)
    entrants, _ = entrants_of([method], [*WORDS, *more], numbers)
    output.mkdir(parents=True, exist_ok=True)
    return TuningStudy(entrants[0], number, numbers, output)


def opened(study: TuningStudy) -> search.SharedStudy:
    return search.open_study(study, storage_of(study.output), str(study.output / JOURNAL))


def searched(study: TuningStudy) -> optuna.Study:
    """All trials of a study in this process."""
    shared = opened(study)
    while search.next_trial(shared, lambda line: None):
        pass
    return shared.trials


def outcomes(study: optuna.Study) -> list[Outcome]:
    return [(trial.params, trial.value, trial.state.name) for trial in finished_trials(study)]


def run(output: Path, *more: str, trials: int = 4, number: int = 0) -> optuna.Study:
    """A study of FedProx, which has two searched settings."""
    return searched(study_of(output, "fedprox", *more, trials=trials, number=number))


def test_no_trial_scores_test_images(pretended: Pretended, tmp_path: Path) -> None:
    """What ``rounds.test=false`` leaves alone is tested in tests/core/test_validation.py."""
    run(tmp_path, trials=2, number=1)
    assert len(pretended.runs) == 4
    for overrides in pretended.runs:
        settings = settings_of(compose_config(overrides))
        assert not settings.rounds.test
        assert settings.protocol.validation == 0.1
        assert settings.seed == STUDY_SEED + 1
        assert settings.raw["protocol"]["partition_seed"] is None, "the run's own seed draws the partition"


def test_the_first_trial_has_the_values_in_the_settings_and_the_search_finds_better(
    pretended: Pretended, tmp_path: Path
) -> None:
    study = run(tmp_path, trials=12)
    first = finished_trials(study)[0]
    assert first.params == {"train.learning_rate": 0.01, "method.mu": 0.01}
    assert first.value == pytest.approx(peak({"mu": 0.01, "rate": 0.01}))
    best = best_trial(finished_trials(study))
    assert best is not None
    assert (best.value or 0.0) > first.value + 5


def test_a_bad_run_is_ended_after_five_complete_ones_and_a_quarter_of_the_rounds(
    pretended: Pretended, tmp_path: Path
) -> None:
    pretended.quality = lambda values: 80.0 if len(pretended.runs) in (2, 3, 4, 5, 7) else 10.0
    ends = finished_trials(run(tmp_path, "train.rounds=8"))
    assert [trial.state.name for trial in ends] == ["COMPLETE"] * 5 + ["PRUNED", "COMPLETE", "PRUNED"]
    assert len(ends[0].intermediate_values) == 8, "there was nothing to compare it with"
    assert max(ends[-1].intermediate_values) == 3, "a quarter of the rounds is no verdict"
    assert ends[-1].user_attrs["rounds"] == 3


def test_the_scores_choose_once_as_many_trials_as_are_searched_were_drawn_at_random(
    pretended: Pretended, tmp_path: Path
) -> None:
    found = []
    for name, sign in (("up", 1), ("down", -1)):
        pretended.quality = lambda values, sign=sign: 50 + sign * peak(values) / 9
        study = dataclasses.replace(study_of(tmp_path / name, "fedprox"), rules=Rules(studies=2, trials=4, batch=1))
        found.append([trial.params for trial in finished_trials(searched(study))])
    same = [one == other for one, other in zip(*found, strict=True)]
    assert same[:4] == [True, True, True, False], "the values in the settings, two at random, one by the scores"


def test_studies_differ_in_what_they_draw_and_each_draws_the_same_again(pretended: Pretended, tmp_path: Path) -> None:
    first, again = run(tmp_path / "one"), run(tmp_path / "again")
    other = run(tmp_path / "one", number=1)
    assert outcomes(first) == outcomes(again)
    assert outcomes(first)[0][0] == outcomes(other)[0][0]
    assert outcomes(first)[1][0] != outcomes(other)[1][0]


@pytest.mark.parametrize("at", [1, 7])
def test_an_interrupted_study_goes_on_as_the_same_study(at: int, pretended: Pretended, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    pretended.runs.clear()
    pretended.interrupt_at = at
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parted")
    again = run(tmp_path / "parted")
    assert outcomes(again) == outcomes(whole)
    assert pretended.runs[at] == pretended.runs[at - 1], "the trial that was interrupted is done again"
    count = len(pretended.runs)
    run(tmp_path / "parted")
    assert len(pretended.runs) == count, "what is done is not done again"


def test_a_run_without_a_score_counts_and_is_never_chosen(pretended: Pretended, tmp_path: Path) -> None:
    pretended.fail_at = 2
    study = run(tmp_path, trials=2)
    assert [state_of(trial) for trial in finished_trials(study)] == ["complete", "failed", "complete", "complete"]
    assert finished_trials(study)[1].user_attrs["problem"] == "not finite"
    assert best_trial(finished_trials(study)) != finished_trials(study)[1]


def test_a_run_without_a_score_is_below_every_score(pretended: Pretended, tmp_path: Path) -> None:
    """A metric of the user's own can be below 0; with a 0 in its place the search would look where runs fail."""
    pretended.quality, pretended.fail_at = lambda values: peak(values) - 200, 1
    study = study_of(tmp_path, "fedprox")
    path, _ = written(study)
    failed, *others = finished_trials(opened(study).trials)
    assert state_of(failed) == "failed"
    assert all((failed.value or 0.0) < (trial.value or 0.0) < 0 for trial in others)
    runs, _ = result_of(opened(study))
    assert [run.score for run in runs if run.state == "failed"] == [0.0], "its file holds numbers alone"
    assert "and no score with the default values" in " ".join(path.read_text().split())


def test_a_trial_that_a_client_did_not_validate_is_never_chosen(
    pretended: Pretended, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The mean over the clients that are left is no score to compare with others."""

    def lacking(overrides: Any, folder: Path, listener: Any, stop: Any, **_: bool) -> None:
        listener("validation", {"round": 1, "average": 99.0, "missing": {"sketch": 0}})

    monkeypatch.setattr(search, "run_here", lacking)
    (trial, *_) = finished_trials(run(tmp_path, trials=1))
    assert (state_of(trial), best_trial([trial])) == ("failed", None)
    assert "round 1 was not validated by every client: it is without sketch" in trial.user_attrs["problem"]


def test_a_score_that_is_no_number_counts_as_a_failed_trial(pretended: Pretended, tmp_path: Path) -> None:
    """Optuna does not count such a trial, so the search would go on for ever."""
    pretended.quality = lambda values: math.nan
    study = run(tmp_path, trials=1)
    assert [state_of(trial) for trial in finished_trials(study)] == ["failed", "failed"]
    assert best_trial(finished_trials(study)) is None


def test_the_chosen_trial_is_the_best_by_its_last_round_and_the_earliest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scores = iter([[90.0, 30.0, 20.0, 30.0], [10.0, 10.0, 10.0, 40.0], [10.0, 10.0, 10.0, 40.0], [99.0, 0.0, 0.0, 0.0]])

    def shown(overrides: tuple[str, ...], folder: Path, listener: Any, stop: Any, **_: bool) -> None:
        for number, score in enumerate(next(scores), 1):
            listener("validation", {"round": number, "average": score})
            listener("round done", {"round": number})

    monkeypatch.setattr(search, "run_here", shown)
    study = run(tmp_path, trials=2)
    best = best_trial(finished_trials(study))
    assert best is not None
    assert (best.number, best.value) == (finished_trials(study)[1].number, 40.0)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_study_of_other_images_of_one_s_own_is_not_continued(tmp_path: Path) -> None:
    for domain in ("a", "b"):
        for name in ("x", "y"):
            folder = tmp_path / "images" / domain / name
            folder.mkdir(parents=True)
            for number in range(40):
                Image.new("RGB", (16, 16), (number, ord(name), ord(domain))).save(folder / f"{number}.png")
    shutil.copytree(tmp_path / "images", tmp_path / "others")
    words = ["data=folder", "data.domains=[a,b]", "data.classes=[x,y]"]
    study, other = (
        study_of(tmp_path, "fedavg", *words, f"data.root={tmp_path / root}") for root in ("images", "others")
    )
    opened(study)
    with pytest.raises(ConfigError, match=r"with other settings \(data.root\)"):
        opened(other)


def test_a_damaged_journal_is_named(pretended: Pretended, tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_bytes(b"not a journal\n" * 100)
    with pytest.raises(CheckpointError, match=r"journal.log is damaged"):
        run(tmp_path, trials=1)


def test_a_study_with_settings_of_another_type_is_damaged(pretended: Pretended, tmp_path: Path) -> None:
    study = run(tmp_path, trials=1)
    study.set_user_attr("subject", ["of another program"])
    with pytest.raises(CheckpointError, match=r"journal.log is damaged"):
        run(tmp_path, trials=2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["protocol.validation=0"], "leaves nothing to score"),
        (["protocol.validation=0.7"], "protocol.validation=0.7"),
        (["privacy=gaussian"], "validation scores"),
        (["rounds.scores=true", "rounds.metric=brier_score"], "highest score, and of this metric lower is better"),
    ],
    ids=["no validation", "share", "privacy", "lower is better"],
)
def test_bad_input_is_refused(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        study_of(tmp_path, "fedprox", *words)


def test_a_space_of_one_value_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "search_ranges", lambda target: {"mu": Search(0.1, 0.1)})
    with pytest.raises(ConfigError, match=r"method.mu is searched from 0.1 to 0.1"):
        study_of(tmp_path, "fedprox")


# ---- what is written -------------------------------------------------------------------------------------------------


def written(study: TuningStudy) -> tuple[Path, optuna.trial.FrozenTrial]:
    """The file with the best trial's values, and that trial."""
    searched(study)
    shared = opened(study)
    best = best_trial(shared.counted)
    assert best is not None
    return search.write_best(shared, best), best


def test_what_a_study_found_is_a_file_that_a_run_takes(pretended: Pretended, tmp_path: Path) -> None:
    study = study_of(tmp_path, "fedprox")
    path, best = written(study)
    settings = load_settings([f"tuned={path}"])
    assert (settings.method.name, settings.data.name) == ("fedprox", "glyphs")
    assert settings.method.mu == best.params["method.mu"]
    assert settings.train.learning_rate == best.params["train.learning_rate"]
    assert load_settings([f"tuned={path}", "method.mu=0.5"]).method.mu == 0.5, "what the user says wins"
    assert settings.protocol.validation == 0
    assert study.folder == tmp_path / "fedprox" / IN_DOMAIN / "study-0"


def test_what_a_study_found_does_not_name_the_searched_settings_that_were_given(
    pretended: Pretended, tmp_path: Path
) -> None:
    """Who repeats a final run with them would have their values in place of those that were found."""
    path, _ = written(study_of(tmp_path, "fedprox", "learning_rate=0.02", "epochs=2"))
    comment = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert "learning_rate" not in "".join(comment)
    assert "epochs=2" in "".join(comment)


@pytest.mark.usefixtures("no_files_needed")
def test_a_search_begins_with_the_printed_values_and_reports_them(pretended: Pretended, tmp_path: Path) -> None:
    study = study_of(tmp_path, "fedpall", "data=digits", trials=1)
    entrant = study.entrant
    assert entrant.start == "printed"
    assert (entrant.settings.method.contrast, entrant.settings.method.divergence) == (0.7, 0.3)
    assert entrant.fixed == {"method.server_training.epochs": 1}, "which is not searched, and every trial has it"
    path, _ = written(study)
    assert "with the printed values" in " ".join(path.read_text().split())
    assert load_settings([f"tuned={path}"]).method.server_training.epochs == 1
    epochs = {settings_of(compose_config(each)).method.server_training.epochs for each in pretended.runs}
    assert epochs == {1}
    own = study_of(tmp_path / "own", "fedpall", "data=digits", "method.server_training.epochs=3").entrant
    assert (own.start, own.fixed) == ("given", {}), "what the user says wins"


@pytest.mark.usefixtures("no_files_needed")
@pytest.mark.parametrize(
    ("words", "start", "contrast"),
    [(["data=glyphs"], "default", 100.0), (["data=office_caltech", "method.contrast=5"], "given", 5.0)],
    ids=["no paper's data", "the user's own"],
)
def test_the_first_trial_has_its_name(words: list[str], start: str, contrast: float, tmp_path: Path) -> None:
    entrant = study_of(tmp_path, "fedplcc", *words).entrant
    assert (entrant.start, entrant.settings.method.contrast) == (start, contrast)
