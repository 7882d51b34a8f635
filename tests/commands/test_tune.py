"""Searches: validation alone, bad trials broken off, interruption, and what is written; and comparisons by them."""

from __future__ import annotations

import json
import math
import re
import shlex
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from omegaconf import OmegaConf
from rich.console import Console

from common.choices import CONF
from common.config import Search, build, compose_config, printed_values, search_ranges, with_tuned
from common.errors import CheckpointError, ConfigError
from common.run_config import flat
from common.settings import load_settings
from server.cli import main
from server.commands import compare, sweep, tune
from server.commands.sweep import Job
from server.reproduction.published import published_table
from server.run.conduct import prepare_output, run_lock
from strategies.core.method import Method

METHODS = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))
PRINTED = [
    (path.stem, str(data))
    for path in sorted((CONF / "printed").glob("*.yaml"))
    for data in OmegaConf.to_container(OmegaConf.load(path))
]
TABLES = {
    ("fedplcc", "digits"): "fedplcc_digit5",
    ("fedplcc", "office_caltech"): "fedplcc_office",
    ("fedplcc", "domainnet"): "fedplcc_domainnet",
    ("fedpall", "digits"): "fedpall_digits",
    ("fedpall", "office_caltech"): "fedpall_office",
    ("fedpall", "pacs"): "fedpall_pacs",
    ("fedgca", "digits"): "fedgca_digits",
    ("fedgca", "pacs"): "fedgca_pacs",
    ("fpl", "digits"): "fpl_digits",
    ("fpl", "office_caltech"): "fpl_office",
    ("fedplvm", "digits"): "fedplcc_digit5",
    ("fccl+", "office_caltech"): "fedplcc_office",
}
"""The table that a paper's printed values are of, by the paper that ``source`` names, and the data set."""
WORDS = ["method=fedprox", "data=glyphs", "train.rounds=4", "train.device=cpu"]
QUIET = Console(quiet=True)


# ---- what is searched ------------------------------------------------------------------------------------------------


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
    assert tune.RATE in tune.space_of(settings)


# ---- a search --------------------------------------------------------------------------------------------------------


class Pretended:
    """Runs that take no time: after round n, validation is ``quality(values)`` times n over all rounds."""

    def __init__(self, quality: Callable[[dict[str, Any]], float]) -> None:
        self.quality, self.jobs = quality, list[Job]()
        self.interrupt_at = self.fail_at = -1

    def __call__(self, job: Job, running: Any, show: Any, enough: Callable[[], bool] = lambda: False) -> Any:
        self.jobs.append(job)
        if len(self.jobs) == self.interrupt_at:
            raise KeyboardInterrupt
        prepare_output(job.settings)
        rounds, quality = job.settings.train.rounds, self.quality(values_of(job))
        lines = [
            {"event": "start", "time": 0.0, "round": 0, "rounds": rounds, "clients": [], "method": "m", "data": "d"}
        ]
        if len(self.jobs) == self.fail_at:
            lines.append({"event": "failed", "time": 0.0, "round": 1, "reason": "not finite"})
            self.write(job, lines)
            return job, "not finite"
        for number in range(1, rounds + 1):
            value = quality * number / rounds
            score = {"round": number, "accuracy": {"a": value}, "average": value, "worst": value}
            lines.append({"event": "validation", "time": 0.0, **score})
            self.write(job, lines)
            if enough():
                return job, ""
        test = {"round": rounds, "accuracy": {"a": quality}, "average": quality + job.settings.seed, "worst": quality}
        scored = {} if not job.settings.rounds.test else {"validated": {**test, "spread": 0.0}}
        summary = {
            "method": job.settings.method.name, "data": "glyphs", "protocol": "p", "model": "m",
            "seed": job.settings.seed, "identity": job.settings.identity, "configuration": "c", "rounds": rounds,
            "rounds_skipped": 0, "scored": "global model", "scores": scored, "average": quality if scored else None,
            "worst": quality if scored else None, "validation": {"round": rounds, "average": quality},
            "state_sha256": "0", "bytes": {"up": 10**6, "down": 10**6}, "wall_seconds": 3600.0,
        }  # fmt: skip
        (job.folder / "summary.json").write_text(json.dumps(summary))
        return job, ""

    def write(self, job: Job, lines: list[dict[str, Any]]) -> None:
        (job.folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def values_of(job: Job) -> dict[str, Any]:
    return {"mu": getattr(job.settings.method, "mu", 0.0), "rate": job.settings.train.learning_rate}


def peak(values: dict[str, Any]) -> float:
    """Best, 90, at mu=0.1 and a rate of 0.03."""
    return 90.0 - 10 * abs(math.log10(values["mu"] or 1) + 1) - 20 * abs(math.log10(values["rate"] / 0.03))


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    made = Pretended(peak)
    monkeypatch.setattr(tune, "run_subprocess", made)
    monkeypatch.setattr(sweep, "run_subprocess", made)
    return made


def new_search(output: Path, trials: int, *more: str) -> tune.TuningSearch:
    return tune.plan_search([*WORDS, *more], output, trials, (0, 1))


def outcomes(study: optuna.Study) -> list[tuple[dict[str, float], float | None, str]]:
    return [(trial.params, trial.value, trial.state.name) for trial in tune.finished_trials(study)]


def test_no_trial_reads_the_test_split(pretended: Pretended, tmp_path: Path) -> None:
    """What ``rounds.test=false`` leaves alone is tested in tests/core/test_validation.py."""
    tune.run_search(new_search(tmp_path, 4), 1, QUIET)
    assert len(pretended.jobs) == 4
    for job in pretended.jobs:
        assert not job.settings.rounds.test
        assert job.settings.protocol.validation == tune.VALIDATION
        assert job.settings.seed == tune.SEARCH_SEED


def test_the_printed_values_are_the_first_trial_and_the_search_finds_better(
    pretended: Pretended, tmp_path: Path
) -> None:
    study = tune.run_search(new_search(tmp_path, 25), 1, QUIET)
    first = tune.finished_trials(study)[0]
    assert first.params == {"train.learning_rate": 0.01, "method.mu": 0.01}
    assert first.value == pytest.approx(peak({"mu": 0.01, "rate": 0.01}))
    assert study.best_value > first.value + 5
    assert {trial.state.name for trial in tune.finished_trials(study)} == {"COMPLETE", "PRUNED"}


def test_a_bad_run_is_broken_off_by_its_rounds(pretended: Pretended, tmp_path: Path) -> None:
    pretended.quality = lambda values: 80.0 if len(pretended.jobs) <= 6 else 10.0
    ends = tune.finished_trials(tune.run_search(new_search(tmp_path, 8, "train.rounds=8"), 1, QUIET))
    assert [trial.state.name for trial in ends] == ["COMPLETE"] * 6 + ["PRUNED"] * 2
    assert max(ends[-1].intermediate_values) == 2, "a quarter of the rounds is no verdict"


@pytest.mark.parametrize("at", [1, 3, 7])
def test_an_interrupted_search_goes_on_as_the_same_search(at: int, pretended: Pretended, tmp_path: Path) -> None:
    whole = tune.run_search(new_search(tmp_path / "whole", 8), 1, QUIET)
    pretended.jobs.clear()
    pretended.interrupt_at = at
    with pytest.raises(KeyboardInterrupt):
        tune.run_search(new_search(tmp_path / "parted", 8), 1, QUIET)
    broken = pretended.jobs[-1].folder
    again = tune.run_search(new_search(tmp_path / "parted", 8), 1, QUIET)
    assert outcomes(again) == outcomes(whole)
    assert pretended.jobs[at].folder == broken, "the trial that was interrupted goes on where it was"
    count = len(pretended.jobs)
    tune.run_search(new_search(tmp_path / "parted", 8), 1, QUIET)
    assert len(pretended.jobs) == count, "what is done is not done again"
    assert len(tune.finished_trials(tune.run_search(new_search(tmp_path / "parted", 10), 1, QUIET))) == 10


def test_several_at_a_time_do_as_many_trials(pretended: Pretended, tmp_path: Path) -> None:
    study = tune.run_search(new_search(tmp_path, 9), 3, QUIET)
    assert len(tune.finished_trials(study)) == len(pretended.jobs) == len({job.folder for job in pretended.jobs}) == 9


def test_an_error_in_the_last_parallel_trial_ends_the_search(pretended: Pretended, tmp_path: Path) -> None:
    """``study.optimize`` does not raise what its last parallel trials raised."""
    pretended.interrupt_at = 3
    with pytest.raises(KeyboardInterrupt):
        tune.run_search(new_search(tmp_path, 3), 3, QUIET)
    study = tune.run_search(new_search(tmp_path, 3), 3, QUIET)
    assert len(tune.finished_trials(study)) == 3


def test_a_trial_is_run_again_once_if_its_process_was_killed(pretended: Pretended, tmp_path: Path) -> None:
    search = new_search(tmp_path, 3)
    study = tune.run_search(new_search(tmp_path, 2), 1, QUIET)
    values = {"train.learning_rate": 0.02, "method.mu": 0.3}
    study.enqueue_trial(values)
    killed = study.ask()
    for name, each in tune.space_of(search.settings).items():
        killed.suggest_float(name, each.low, each.high, log=each.log)
    study = tune.run_search(search, 1, QUIET)
    assert outcomes(study)[-1][0] == values
    study = tune.run_search(new_search(tmp_path, 5), 1, QUIET)
    repeated = [trial.params for trial in tune.finished_trials(study)].count(values)
    assert (len(tune.finished_trials(study)), repeated) == (5, 1)


def test_a_search_that_stops_ends_its_running_trial(pretended: Pretended, tmp_path: Path) -> None:
    stopping, search = threading.Event(), new_search(tmp_path, 1)
    study = tune.run_search(search, 1, QUIET)
    trial, asked = study.ask(), list[bool]()

    def running(job: Job, running: Any, show: Any, enough: Callable[[], bool]) -> tuple[Job, str]:
        asked.append(enough())
        stopping.set()
        asked.append(enough())
        return job, ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "run_subprocess", running)
        with pytest.raises(KeyboardInterrupt):
            tune.run_trial(search, trial, {"train.learning_rate": 0.5}, lambda label, line: None, stopping)
    assert asked == [False, True]


def test_a_run_without_a_score_counts_as_none_right(pretended: Pretended, tmp_path: Path) -> None:
    pretended.fail_at = 2
    ends = tune.finished_trials(tune.run_search(new_search(tmp_path, 3), 1, QUIET))
    assert [trial.value == 0.0 for trial in ends] == [False, True, False]


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "differs"),
    [
        (["train.rounds=5"], "train.rounds"),
        (["protocol.validation=0.2"], "protocol.validation"),
        (["model=digit_cnn"], "model"),
    ],
    ids=["rounds", "share", "model"],
)
def test_a_study_of_other_settings_is_refused(
    words: list[str], differs: str, pretended: Pretended, tmp_path: Path
) -> None:
    tune.run_search(new_search(tmp_path, 1), 1, QUIET)
    with pytest.raises(ConfigError, match=rf"holds a study of other settings \(.*{differs}"):
        tune.run_search(new_search(tmp_path, 1, *words), 1, QUIET)


def test_a_study_of_another_method_or_data_set_is_refused(pretended: Pretended, tmp_path: Path) -> None:
    tune.run_search(new_search(tmp_path, 1), 1, QUIET)
    place = tmp_path / "glyphs" / "moon"
    (tmp_path / "glyphs" / "fedprox").rename(place)
    with pytest.raises(ConfigError, match=r"other settings \(.*method\._target_"):
        tune.run_search(new_search(tmp_path, 1, "method=moon"), 1, QUIET)


def test_a_damaged_study_is_named(pretended: Pretended, tmp_path: Path) -> None:
    folder = new_search(tmp_path, 1).folder
    folder.mkdir(parents=True)
    (folder / "study.db").write_bytes(b"not a database" * 100)
    with pytest.raises(CheckpointError, match=r"study.db is damaged"):
        tune.run_search(new_search(tmp_path, 1), 1, QUIET)


def test_a_study_with_settings_of_another_type_is_damaged(pretended: Pretended, tmp_path: Path) -> None:
    study = tune.run_search(new_search(tmp_path, 1), 1, QUIET)
    study.set_user_attr("subject", ["of another program"])
    with pytest.raises(CheckpointError, match=r"study.db is damaged"):
        tune.run_search(new_search(tmp_path, 2), 1, QUIET)


def test_a_second_search_in_one_folder_is_refused_and_touches_nothing(pretended: Pretended, tmp_path: Path) -> None:
    """It marked the first one's running trials as failed."""
    search = new_search(tmp_path, 1)
    with run_lock(search.folder), pytest.raises(ConfigError, match="another process is writing a search"):
        tune.run_search(search, 1, QUIET)
    assert list(search.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "trials", "message"),
    [
        (["seed=1"], 3, "1 is the seed of the search"),
        ([], 0, "needs one trial or more"),
        (["rounds.test=true"], 3, "are set by the search"),
        (["protocol.validation=0"], 3, "leaves nothing to score"),
        (["protocol.validation=0.7"], 3, r"protocol.validation=0.7"),
        (["method.my=1"], 3, "method.my: no such key"),
    ],
    ids=["its own seed", "no trial", "test", "no validation", "share", "unknown key"],
)
def test_bad_input_is_refused(words: list[str], trials: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        new_search(tmp_path, trials, *words)
    assert not list(tmp_path.iterdir())


def test_a_space_of_one_value_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "search_ranges", lambda target: {"mu": Search(0.1, 0.1)})
    with pytest.raises(ConfigError, match=r"method.mu is searched from 0.1 to 0.1"):
        new_search(tmp_path, 3)


# ---- what is written -------------------------------------------------------------------------------------------------


def test_the_best_setting_is_a_file_that_a_run_takes(pretended: Pretended, tmp_path: Path, capsys: Any) -> None:
    tune.tune(WORDS, tmp_path, 12, (0, 1))
    folder = tmp_path / "glyphs" / "fedprox"
    best = optuna.load_study(study_name="goldfinch", storage=f"sqlite:///{folder / 'study.db'}").best_params
    settings = load_settings([f"tuned={folder / 'best.yaml'}"])
    assert (settings.method.name, settings.data.name) == ("fedprox", "glyphs")
    assert (settings.method.mu, settings.train.learning_rate) == (best["method.mu"], best["train.learning_rate"])
    assert load_settings([f"tuned={folder / 'best.yaml'}", "method.mu=0.5"]).method.mu == 0.5, "what the user says wins"
    assert settings.protocol.validation == 0
    assert (folder / "trials.png").read_bytes().startswith(b"\x89PNG")
    fresh = [job for job in pretended.jobs if job.settings.rounds.test]
    assert sorted(job.settings.seed for job in fresh) == [0, 0, 1, 1]
    gained = peak({"mu": best["method.mu"], "rate": best["train.learning_rate"]}) - peak({"mu": 0.01, "rate": 0.01})
    assert f"gained          {gained:.2f} ± 0.00 points" in (folder / "gain.txt").read_text()
    assert "seeds 0, 1, none of them in the search" in capsys.readouterr().out


FILE = "method: fedprox\ndata: glyphs\nfound: by hand\nvalues: {method.mu: 0.5, train.learning_rate: 0.02}\n"


def test_the_values_of_a_tuned_file_are_sent_to_subprocesses_as_overrides(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(FILE)
    overrides = with_tuned([f"tuned={path}", "seed=3"])
    assert overrides == ["method.mu=0.5", "train.learning_rate=0.02", "data=glyphs", "method=fedprox", "seed=3"]
    assert with_tuned(overrides) == overrides
    assert with_tuned(["tuned=none", "seed=3"]) == ["seed=3"]


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (FILE, ["method=moon"], "was found for method=fedprox, not moon"),
        (FILE, ["data=digits"], "was found for data=glyphs, not digits"),
        (FILE.replace("0.5", "often"), [], "values"),
        (FILE.replace("found", "lost"), [], "lost: no such key"),
        ("- 1", [], "not what goldfinch compare writes"),
        ("{", [], "not what goldfinch compare writes"),
        (FILE.replace("method.mu", "method.my"), [], "method.my: no such key"),
    ],
    ids=["method", "data", "no number", "unknown key", "list", "no yaml", "no setting"],
)
def test_a_tuned_file_that_does_not_fit_is_refused(text: str, words: list[str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        compose_config([f"tuned={path}", *words])


def test_a_tuned_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"tuned=moon_on_nothing: no such file"):
        compose_config(["tuned=moon_on_nothing"])


# ---- what papers print -----------------------------------------------------------------------------------------------


def weights(words: list[str]) -> tuple[float, float]:
    method = load_settings(words).method
    return method.contrast, method.correction


def test_printed_values_are_those_of_the_data_set(tmp_path: Path) -> None:
    words = ["method=fedplcc", "protocol=fedplcc"]
    assert weights([*words, "data=digits", "printed=true"]) == (100, 1000)
    assert weights([*words, "data=office_caltech", "printed=true"]) == (20, 200)
    assert weights([*words, "data=domainnet", "printed=true"]) == (1, 10)
    assert weights([*words, "data=office_caltech", "printed=false"]) == (100, 1000)
    assert weights([*words, "data=office_caltech", "printed=true", "method.contrast=3"]) == (3, 200), "the user wins"
    assert weights(["experiment=fedplcc_office", "printed=true"]) == (20, 200), "also where an experiment chooses"
    jobs, _ = sweep.plan(["method=fpl,fedplcc", "data=office_caltech", "printed=true,false"], tmp_path)
    assert [job.settings.method.contrast for job in jobs] == [1, 1, 20, 100]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["method=fedapc", "data=digits", "printed=true"], "no settings for method=fedapc data=digits"),
        (["method=fedplcc", "data=glyphs", "printed=true"], "no settings for method=fedplcc data=glyphs"),
        (["printed=maybe"], "printed=maybe: true takes"),
        (["printed=true", "tuned=fpl_on_digits"], "leave one out"),
    ],
    ids=["no paper", "no paper's data", "neither true nor false", "tuned too"],
)
def test_printed_values_that_are_not_on_file_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose_config(words)


ROW_OF_DEFAULTS = ("fccl_plus", "digits")
"""FedPLCC does not say how its row of FCCL+ was made; ours on Digit-5 has the default public batch."""


@pytest.mark.parametrize(
    ("method", "data"), [each for each in PRINTED if each != ROW_OF_DEFAULTS], ids=lambda value: value
)
def test_the_published_tables_are_made_with_the_printed_values(method: str, data: str) -> None:
    """A data set's printed values and the rows of the table that they are from cannot say different things."""
    printed = printed_values(method, data)
    assert printed is not None
    paper = re.split(r"'s|,", printed.source)[0].lower()
    table = TABLES[paper, data]
    rows = [row for row in published_table(table).listed if f"method={method}" in row.overrides]
    assert len(rows) == 1
    found = flat({"method": compose_config([f"experiment={table}", *rows[0].overrides])["method"]})
    assert {key: found[key] for key in printed.values} == printed.values


@pytest.mark.parametrize("path", sorted((CONF / "tuned").glob("*_on_*.yaml")), ids=lambda path: path.stem)
def test_a_tuned_file_calls_its_first_values_printed_only_if_they_are(path: Path) -> None:
    """The files in conf/tuned/ were found by searches that began with the defaults of conf/method/."""
    method, _, data = path.stem.partition("_on_")
    printed = printed_values(method, data)
    defaults = flat({"method": compose_config([f"method={method}", f"data={data}"])["method"]})
    same = printed is not None and all(defaults[key] == value for key, value in printed.values.items())
    words = " ".join(path.read_text().split())
    assert f"with the {'printed' if same else 'default'} values" in words


@pytest.mark.usefixtures("no_files_needed")
def test_a_search_begins_with_the_printed_values_and_reports_them(pretended: Pretended, tmp_path: Path) -> None:
    words = ["method=fedpall", "data=digits", "train.rounds=4", "train.device=cpu"]
    begun = tune.plan_search(words, tmp_path, 2, (0,))
    assert (begun.start, begun.settings.method.contrast, begun.settings.method.divergence) == ("printed", 0.7, 0.3)
    assert begun.fixed == {"method.server_training.epochs": 1}, "which is not searched, and every trial has it"
    tune.tune(words, tmp_path, 2, (0,))
    folder = tmp_path / "digits" / "fedpall"
    assert "with the printed values" in " ".join((folder / "best.yaml").read_text().split())
    assert "  printed values  " in (folder / "gain.txt").read_text()
    assert load_settings([f"tuned={folder / 'best.yaml'}"]).method.server_training.epochs == 1
    assert {job.settings.method.server_training.epochs for job in pretended.jobs} == {1}


@pytest.mark.usefixtures("no_files_needed")
@pytest.mark.parametrize(
    ("words", "start"),
    [
        (["method=fedplcc", "data=glyphs"], "default"),
        (["method=fedplcc", "data=office_caltech"], "printed"),
        (["method=fedplcc", "data=office_caltech", "printed=false"], "default"),
        (["method=fedplcc", "data=office_caltech", "method.contrast=5"], "given"),
    ],
    ids=["no paper's data", "a paper's data", "declined", "the user's own"],
)
def test_the_first_trial_has_its_name(words: list[str], start: str, pretended: Pretended, tmp_path: Path) -> None:
    words = [*words, "train.rounds=4", "train.device=cpu"]
    tune.tune(words, tmp_path, 1, (0,))
    folder = tmp_path / words[1].removeprefix("data=") / "fedplcc"
    assert f"with the {start} values" in " ".join((folder / "best.yaml").read_text().split())
    assert f"  {start} values  " in (folder / "gain.txt").read_text()


@pytest.mark.usefixtures("no_files_needed")
def test_a_range_reaches_the_printed_value(tmp_path: Path) -> None:
    begun = tune.plan_search(["method=fedgca", "data=pacs", "train.device=cpu"], tmp_path, 2, (0,))
    space = tune.space_of(begun.settings)
    assert space["method.alpha"] == Search(0.001, 10.0)
    assert space["method.beta"] == Search(0.01, 8.0)
    assert tune.starting_values(begun.settings, space)["method.alpha"] == 10.0


def test_fresh_runs_vary_the_partition_and_the_search_does_not(pretended: Pretended, tmp_path: Path) -> None:
    words = ["data=glyphs", "train.rounds=4", "train.device=cpu"]
    compare.compare(["fedprox"], words, tmp_path / "varied", 2, (0, 1))
    trials = [job.settings for job in pretended.jobs if not job.settings.rounds.test]
    fresh = [job.settings for job in pretended.jobs if job.settings.rounds.test]
    assert {each.protocol.partition_seed for each in trials} == {0}
    assert {each.protocol.partition_seed for each in fresh} == {None}, "the run's own seed"
    assert len({each.configuration for each in fresh if each.method.name == "fedprox"}) == 1, "one row"
    assert "partitions drawn by the same seeds" in (tmp_path / "varied" / "compare.md").read_text()
    pretended.jobs.clear()
    compare.compare(["fedprox"], [*words, "protocol.partition_seed=3"], tmp_path / "fixed", 2, (0, 1))
    assert {job.settings.protocol.partition_seed for job in pretended.jobs} == {3}
    assert "seeds 0, 1, partition_seed=3" in (tmp_path / "fixed" / "compare.md").read_text()


# ---- a comparison ----------------------------------------------------------------------------------------------------


def test_all_methods_have_the_same_budget_and_are_ranked_on_fresh_seeds(pretended: Pretended, tmp_path: Path) -> None:
    words = ["data=glyphs", "train.rounds=4", "train.device=cpu"]
    compare.compare(["fedprox", "fedbn"], words, tmp_path, 4, (0, 1, 2))
    searches = [job.settings.method.name for job in pretended.jobs if not job.settings.rounds.test]
    assert {name: searches.count(name) for name in searches} == {"fedavg": 4, "fedprox": 4, "fedbn": 4}
    fresh = [(job.settings.method.name, job.settings.seed) for job in pretended.jobs if job.settings.rounds.test]
    assert len(fresh) == len(set(fresh)) == 9
    text = (tmp_path / "compare.md").read_text()
    assert [line.split(" | ")[:2] for line in text.splitlines() if line[2:3].isdigit()] == [
        ["| 1", "fedavg"], ["| 2", "fedbn *"], ["| 3", "fedprox"],
    ]  # fmt: skip
    rows = {
        line.split(" | ")[1]: line.split(" | ")
        for line in text.splitlines()
        if line.startswith("| ") and "rank" not in line
    }
    assert text.splitlines()[-1].startswith("A star: scored with each client's own model"), "and not one shared model"
    for name, study in (("fedavg", "fedavg"), ("fedbn *", "fedbn")):
        best = (tmp_path / "glyphs" / study / "best.yaml").read_text()
        assert rows[name][3] in best, "the best validation score of the search"
    assert rows["fedavg"][4] == ""
    assert float(rows["fedavg"][5]) >= 3.0, "three fresh runs of an hour"
    assert rows["fedavg"][6] == "2.0 |"
    scores = json.loads((tmp_path / "compare.json").read_text())["scores"]
    assert set(scores) == {"fedavg", "fedprox", "fedbn"}
    count = len(pretended.jobs)
    compare.compare(["fedprox", "fedbn"], words, tmp_path, 4, (0, 1, 2))
    assert [job for job in pretended.jobs[count:] if not job.finished()] == []
    assert len(pretended.jobs) == count


def test_the_difference_is_paired_and_its_interval_is_student_s() -> None:
    base = [70.0, 80.0, 90.0]
    shown = compare.interval([72.0, 81.0, 93.0], base)
    half = 4.302653 * 1.0 / math.sqrt(3)  # t of two degrees of freedom; the differences 2, 1, 3 deviate by one
    assert shown == f"+2.00 [{2 - half:+.2f}, {2 + half:+.2f}]"
    assert compare.interval([72.0], [70.0]) == "+2.00"


@pytest.mark.parametrize(
    ("methods", "seeds", "message"),
    [([], (0,), "--methods"), (["fpl", "fpll"], (0,), "did you mean 'fpl'"), (["fpl"], (), "--seeds")],
    ids=["no method", "unknown", "no seed"],
)
def test_a_comparison_without_methods_or_seeds_is_refused(
    methods: list[str], seeds: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        compare.compare(methods, ["data=glyphs"], tmp_path, 2, seeds)


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_documented_commands_do_what_the_page_says(
    pretended: Pretended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (CONF.parent / "docs" / "fair-comparison.md").read_text()
    commands = [
        line for block in re.findall(r"```bash\n(.*?)```", page, flags=re.DOTALL) for line in block.splitlines()
    ]
    seen = []
    for words in map(shlex.split, commands):
        seen.append(words[1])
        if words[1] == "run":
            compose_config(words[2:])
        if words[1] in ("tune", "compare"):
            short = ["2" if word == "20" else word for word in words[2:]]
            assert main([words[1], *short, "train.rounds=2", "train.device=cpu"]) == 0
    assert seen == ["run", "table", "tune", "run", "run", "compare"]
    rows = re.findall(r"^\| `([\w.]+)` \|", page, flags=re.MULTILINE)
    assert rows == ["study.db", "best.yaml", "trials.png", "gain.txt"]
    assert all((tmp_path / "outputs" / "tune" / "glyphs" / "fedplcc" / name).is_file() for name in rows)
