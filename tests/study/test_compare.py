"""Comparisons: seeds and partitions, going on after a kill, the same numbers on every way, and what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from support.boards import TINY, compare_command, read_runs
from support.scripts import ROOT

import goldfinch as gf
from common import choices
from common.errors import ConfigError, EngineError
from common.settings import load_settings
from common.versions import code_sha256, combined_hash
from goldfinch.cli import main
from goldfinch.record import RunRecord
from goldfinch.run_model import RunModel
from goldfinch.study import compare
from goldfinch.study.compare import CompareRequest
from goldfinch.study.options import IN_DOMAIN, SCORES, STUDY_SEED, Rules
from goldfinch.study.ranking import StudyRun, marked_name
from goldfinch.study.rules import entrants_of, shared_settings, space_of
from server.run.conduct import FolderInUseError, run_lock

QUIET = Console(quiet=True)


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedAvg and FedProto, as the command writes them."""
    folder = tmp_path_factory.mktemp("compared") / "runs"
    assert main(compare_command(folder, "fedavg,fedproto")) == 0
    return folder


@pytest.fixture
def folder(compared: Path, tmp_path: Path) -> Path:
    """A copy of :func:`compared`."""
    return Path(shutil.copytree(compared, tmp_path / "runs"))


def results(folder: Path) -> list[StudyRun]:
    """The runs without times, and without bytes: a reply's header holds seconds as text."""
    return [dataclasses.replace(run, seconds=0.0, bytes=0) for run in read_runs(folder / "runs.csv")]


# ---- a real comparison -----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_trials_and_final_runs_are_as_the_rules_ask(compared: Path) -> None:
    runs = read_runs(compared / "runs.csv")
    counts = {
        (method, kind): sum((run.method, run.kind) == (method, kind) for run in runs)
        for method in ("fedavg", "fedproto")
        for kind in ("trial", "final")
    }
    assert counts == {
        ("fedavg", "trial"): 4,
        ("fedavg", "final"): 2,
        ("fedproto", "trial"): 8,
        ("fedproto", "final"): 2,
    }
    splits: set[str] = set()
    for stated in runs:
        if stated.kind == "final":
            assert stated.number == stated.study, "each study has a seed of its own"
            place = compared / stated.method / IN_DOMAIN / f"study-{stated.study}"
            run = RunRecord(place / f"seed-{stated.number}")
            assert run.seed == stated.number < STUDY_SEED
            assert run.options["protocol.partition_seed"] is None
            assert stated.state_sha256 == RunModel(run).checkpoint.state.sha256()
            assert stated.score == run.rules["final"]["average"]
            assert stated.code == run.code_by_package["goldfinch"]
            assert stated.images.split()[0] == combined_hash(run.facts.splits)
            best = load_settings([f"tuned={place / 'best.yaml'}"])
            assert best.train.learning_rate == stated.values["train.learning_rate"]
            assert run.options["train.learning_rate"] == stated.values["train.learning_rate"]
            splits.add(json.dumps(run.summary["splits"], sort_keys=True))
            assert list(place.glob("trial-*")) == []
    assert len(splits) == 2, "a partition for each study, the same for all methods"


def test_what_a_study_found_gives_the_same_hash_again(compared: Path, tmp_path: Path) -> None:
    stated = [run for run in read_runs(compared / "runs.csv") if run.kind == "final"][-1]
    best = compared / stated.method / IN_DOMAIN / f"study-{stated.study}" / "best.yaml"
    words = ["run", *TINY, f"tuned={best}", "protocol.partition_seed=null", f"seed={stated.number}"]
    assert main([*words, f"output={tmp_path / 'again'}", "--quiet"]) == 0
    assert RunRecord(tmp_path / "again").state_sha256 == stated.state_sha256


def test_the_page_has_the_command_and_each_method(compared: Path) -> None:
    text = (compared / "compare.md").read_text()
    assert "`goldfinch compare --methods fedavg,fedproto data=glyphs" in text
    assert text.count("| fedproto ") == 1
    assert "two studies of two trials for each searched setting" in text
    assert "best" not in text


def test_what_is_done_is_not_done_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal has the lines of final runs, so that a machine without their folders makes the table, too."""
    before = results(folder)
    shutil.rmtree(folder / "fedproto" / IN_DOMAIN / "study-1")

    def refused(*arguments: Any) -> None:
        raise AssertionError("no run is done")

    monkeypatch.setattr("goldfinch.study.search.run_federation", refused)
    assert main(compare_command(folder, "fedavg,fedproto")) == 0
    assert results(folder) == before
    assert (folder / "fedproto" / IN_DOMAIN / "study-1" / "best.yaml").exists()


def test_python_and_the_command_line_give_the_same_numbers(folder: Path) -> None:
    """The same folder: had the settings been others, it would have been refused."""
    before = results(folder)
    given = [item for item in TINY if not item.startswith("data=")]
    table = gf.compare(
        ["fedavg", "fedproto"], *given, data="glyphs", trials=2, studies=2, runs=1, output=folder
    )  # fmt: skip
    assert results(folder) == before
    assert sorted(table.index) == ["fedavg", "fedproto"]
    for method in table.index:
        scores = [run.score for run in before if (run.method, run.kind) == (method, "final")]
        assert table.loc[method, "accuracy"] == pytest.approx(sum(scores) / 2)
    assert table["rank"].min() == 1
    assert table.attrs["folder"] == str(folder)
    assert any("fedavg" in note or "tested" in note for note in table.attrs["notes"])


@pytest.mark.slow
@pytest.mark.parametrize("line", [3, 12])
def test_a_killed_comparison_ends_with_the_same_numbers(
    line: int, compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL after some lines, in whatever the process does then."""
    monkeypatch.setattr("goldfinch.study.storage.SILENCE", 5)
    place = tmp_path / "killed"
    words = compare_command(place, "fedavg,fedproto")
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "goldfinch.cli", *words], cwd=ROOT, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        for number, _ in enumerate(process.stdout):
            if number == line:
                process.kill()
                break
    assert not (place / "runs.csv").exists()
    assert main(words) == 0
    assert results(place) == results(compared)


@pytest.mark.slow
def test_several_processes_give_the_same_numbers(compared: Path, tmp_path: Path) -> None:
    place = tmp_path / "parallel"
    assert main([*compare_command(place, "fedavg,fedproto"), "--jobs", "2"]) == 0
    assert results(place) == results(compared)


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from goldfinch.study import search

    words = (*TINY, "method=fedavg", "protocol.partition_seed=null", "seed=0", "train.rounds=3")
    search.run_here(words, tmp_path / "whole")
    asked: list[int] = []

    def interrupt() -> bool:
        asked.append(1)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return False

    seen: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        search.run_here(words, tmp_path / "parted", stop=interrupt)
    asked.clear()
    search.run_here(words, tmp_path / "parted", lambda name, entry: seen.append(f"{name} {entry.get('round')}"))
    assert RunRecord(tmp_path / "parted").state_sha256 == RunRecord(tmp_path / "whole").state_sha256
    assert {"validation 1", "validation 2", "validation 3"} <= set(seen), "also those of the part before"
    assert any(entry["event"] == "resume" for entry in RunRecord(tmp_path / "parted").events)


def test_a_trial_whose_deletion_was_interrupted_is_done_again(tmp_path: Path) -> None:
    """A kill while a trial's folder is deleted, before the journal has the trial, leaves some of its files."""
    from goldfinch.study import search

    folder = tmp_path / "trial-0"
    folder.mkdir()
    (folder / "scores.jsonl").touch()
    words = (*TINY, "method=fedavg", "train.rounds=1", "rounds.test=false")
    with pytest.raises(ConfigError, match="holds no run, but"):
        search.run_here(words, folder)
    search.run_here(words, folder, own=True)
    assert RunRecord.open(folder).rounds_done == 1


def test_a_trial_that_another_process_has_begun_is_not_deleted(tmp_path: Path) -> None:
    from goldfinch.study import search

    folder = tmp_path / "trial-0"
    settings = load_settings([*TINY, "method=fedavg", f"output={folder}"])
    with run_lock(folder):
        (folder / "scores.jsonl").touch()
        with pytest.raises(FolderInUseError):
            search._run_or_resume(settings, None, lambda: False, own=True)
        assert (folder / "scores.jsonl").exists()


def test_a_run_that_goes_on_knows_before_each_round_what_a_whole_run_knows(tmp_path: Path) -> None:
    """By the score of a round that is done again a trial would end early where a whole one goes on."""
    from goldfinch.study import search

    words = (*TINY, "method=fedavg", "protocol.partition_seed=null", "seed=0", "train.rounds=4", "rounds.test=false")

    def known(folder: str, interrupted_at: int | None = None) -> list[int]:
        scored, before_rounds = [-1], []

        def listener(name: str, entry: Mapping[str, Any]) -> None:
            if name == "validation":
                scored.append(entry["round"])
                if entry["round"] == interrupted_at:
                    raise KeyboardInterrupt

        def stop() -> bool:
            before_rounds.append(max(scored))
            return False

        with contextlib.suppress(KeyboardInterrupt):
            search.run_here(words, tmp_path / folder, listener, stop)
        return before_rounds

    assert known("whole") == known("parted", interrupted_at=3) == [-1, 0, 1, 2]
    assert known("parted") == [2], "the fourth round again"


def test_a_domain_that_is_left_out_has_studies_of_its_own(tmp_path: Path) -> None:
    words = compare_command(tmp_path / "out", "fedavg", "--scores", "leave_one_out", studies=1, trials=1)
    assert main(words) == 0
    finals = [run for run in read_runs(tmp_path / "out" / "runs.csv") if run.kind == "final"]
    assert [run.case for run in finals] == ["leave_out:handwritten", "leave_out:printed"]
    for stated in finals:
        domain = stated.case.partition(":")[2]
        run = RunRecord(tmp_path / "out" / "fedavg" / f"leave_out-{domain}" / "study-0" / "seed-0")
        assert list(run.registrations) == [f"{other}-0" for other in ("handwritten", "printed") if other != domain]
        assert stated.score == stated.accuracy[domain]


# ---- the procedure, without runs -------------------------------------------------------------------------------------


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Trials and final runs that take no time; the names of the final runs."""
    done: list[str] = []

    def trial(overrides: Any, folder: Path, listener: Any, stop: Any, **_: bool) -> None:
        for number in (1, 2):
            listener("validation", {"round": number, "average": 50.0})
            listener("round done", {"round": number})

    def final(study: Any, values: Any, seed: int, listener: Any) -> Any:
        done.append(f"{study.name} {seed}")
        if study.entrant.method == "fedprox" and study.number == 1:
            raise EngineError("not finite; the last state is kept")
        average = 60.0 + seed
        end = SimpleNamespace(seconds=1.0, sha256="0")
        return SimpleNamespace(
            facts=SimpleNamespace(rounds=2, scored="global model", bound=None, end=end),
            rules={"final": {"average": average, "accuracy": {"a": average}}},
            reply_totals=SimpleNamespace(bytes={"up": 1, "down": 1}),
            code_by_package={"goldfinch": "c", "mylib": "m"},
            processor="AMD EPYC, AVX2",
            at_chance=False,
            validation_images=40,
            client_images={("a-0", "samples"): "pixels"},
        )

    monkeypatch.setattr("goldfinch.study.search.run_here", trial)
    monkeypatch.setattr(compare, "final_run", final)
    return done


def request(output: Path, *methods: str, **numbers: Any) -> CompareRequest:
    return CompareRequest(methods, tuple(TINY), output, Rules(**{"studies": 2, "trials": 1, "runs": 2, **numbers}))


def test_every_study_has_seeds_that_nothing_else_has(short: list[str], tmp_path: Path) -> None:
    compare.compare(request(tmp_path, "moon", "fedavg"), console=QUIET)
    assert short == [
        *("fedavg/in_domain/0 0", "fedavg/in_domain/0 1", "fedavg/in_domain/1 2", "fedavg/in_domain/1 3"),
        *("moon/in_domain/0 0", "moon/in_domain/0 1", "moon/in_domain/1 2", "moon/in_domain/1 3"),
    ], "FedAvg first, and the same seeds for all methods"


def test_other_numbers_of_final_runs_do_not_share_a_folder(short: list[str], tmp_path: Path) -> None:
    """A seed that was the first study's would be the second's, and both folders would be read."""
    compare.compare(request(tmp_path, "fedavg", runs=1), console=QUIET)
    before = (tmp_path / "runs.csv").read_text()
    with pytest.raises(ConfigError, match=r"another number of --runs, by which fedavg/in_domain/1 would take seeds"):
        compare.compare(request(tmp_path, "fedavg", runs=2), console=QUIET)
    assert (tmp_path / "runs.csv").read_text() == before


def test_what_is_switched_off_is_not_searched(tmp_path: Path) -> None:
    """Of a range that is drawn by its logarithm, 0 is no value."""
    settings = load_settings([*TINY, "method=fpl", "method.contrast=0", f"output={tmp_path}"])
    assert sorted(space_of(settings)) == ["method.consistency", "method.temperature", "train.learning_rate"]
    words = compare_command(tmp_path / "off", "feddyn", "method.alpha=0", studies=1, trials=1)
    assert main(words) == 0
    trials = [run for run in read_runs(tmp_path / "off" / "runs.csv") if run.kind == "trial"]
    assert [list(run.values) for run in trials] == [["train.learning_rate"]]


def test_the_weighting_that_was_tuned_for_is_part_of_what_was_found(tmp_path: Path) -> None:
    place = tmp_path / "weighted"
    uneven = [item for item in TINY if not item.startswith(("protocol.samples=", "data.domains="))]
    uneven += ["data.domains=[printed,signs,sketch]", "protocol.fraction=0.05"]
    numbers = ["--studies=1", "--trials=1", "--runs=1", "--weighting=uniform"]
    assert main(["compare", "--methods", "fedavg", *uneven, *numbers, "--output", str(place)]) == 0
    (stated,) = [run for run in read_runs(place / "runs.csv") if run.kind == "final"]
    best = place / "fedavg" / IN_DOMAIN / "study-0" / "best.yaml"
    words = ["run", *uneven, f"tuned={best}", "protocol.partition_seed=null", f"seed={stated.number}"]
    assert main([*words, f"output={tmp_path / 'again'}", "--quiet"]) == 0
    assert RunRecord(tmp_path / "again").state_sha256 == stated.state_sha256
    assert main([*words, f"output={tmp_path / 'other'}", "--quiet", "method.weighting=samples"]) == 0
    assert RunRecord(tmp_path / "other").state_sha256 != stated.state_sha256


def test_a_final_run_that_fails_leaves_its_row_without_a_rank(short: list[str], tmp_path: Path) -> None:
    found = compare.compare(request(tmp_path, "fedavg", "fedprox"), console=QUIET)
    assert [(marked_name(row), row.rank) for row in found.tables[0].rows] == [("fedavg", 1), ("fedprox †", None)]
    failed = [f"fedprox/in_domain/1: its final run with seed {seed} failed: not finite." for seed in (2, 3)]
    assert found.notes == failed, "each that failed is named"
    assert found.notes[1] in (tmp_path / "compare.md").read_text()


def test_a_study_without_final_runs_of_any_method_leaves_all_rows_without_a_rank(
    short: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the other study would be the whole comparison, and its deviation would be over final runs."""
    pretended = compare.final_run

    def final(study: Any, *rest: Any) -> Any:
        if study.number == 1:
            raise EngineError("not finite; the last state is kept")
        return pretended(study, *rest)

    monkeypatch.setattr(compare, "final_run", final)
    (table,) = compare.compare(request(tmp_path, "fedavg", "moon"), console=QUIET).tables
    assert [(marked_name(row), row.rank, row.unit) for row in table.rows] == [
        ("fedavg †", None, "study"), ("moon †", None, "study"),
    ]  # fmt: skip
    assert table.rows[0].absent == {"in_domain, study 1": "0 of 2 final runs"}


def test_a_comparison_without_a_result_writes_its_trials_and_is_an_error(
    short: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a night in which every final run diverged."""

    def final(*_: Any) -> Any:
        raise EngineError("not finite; the last state is kept")

    monkeypatch.setattr(compare, "final_run", final)
    with pytest.raises(ConfigError, match=r"no method has a result; .*compare\.md says why"):
        compare.compare(request(tmp_path, "fedprox", "fedavg"), console=QUIET)
    assert {run.kind for run in read_runs(tmp_path / "runs.csv")} == {"trial"}
    assert "its final run with seed 0 failed: not finite." in (tmp_path / "compare.md").read_text()


def test_a_method_of_one_s_own_is_no_other_code(
    short: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hash of a run with the user's package covers that package, too."""
    folders = [*choices.FOLDERS, Path.cwd() / "mylib" / "conf"]
    monkeypatch.setattr(choices, "FOLDERS", folders)
    found = compare.compare(request(tmp_path, "fedavg", "moon"), console=QUIET)
    assert {run.code for run in found.runs if run.kind == "final"} == {"c"}
    assert {run.code for run in found.runs if run.kind == "trial"} == {code_sha256()}
    assert " --config-dir=mylib/conf`" in (tmp_path / "compare.md").read_text(), "the command finds the class again"


def test_a_method_is_added_by_the_same_command_with_more_methods(short: list[str], tmp_path: Path) -> None:
    first = compare.compare(request(tmp_path, "fedavg"), console=QUIET)
    both = compare.compare(request(tmp_path, "fedavg", "moon"), console=QUIET)
    trials = [run for run in both.runs if run.kind == "trial" and run.method == "fedavg"]
    assert trials == [run for run in first.runs if run.kind == "trial"], "not done again"


@pytest.mark.parametrize(
    ("methods", "numbers", "named"),
    [
        (["fedavg"], {}, "3 trials of moon/in_domain/0"),
        (["fedavg", "moon"], {"studies": 1}, "of fedavg/in_domain/1"),
        (["fedavg", "moon"], {"runs": 1}, "2 final runs of fedavg/in_domain/0"),
    ],
    ids=["a method less", "a study less", "a run less"],
)
def test_a_smaller_comparison_does_not_replace_the_table_of_a_larger_one(
    methods: list[str], numbers: dict[str, int], named: str, short: list[str], tmp_path: Path
) -> None:
    compare.compare(request(tmp_path, "fedavg", "moon"), console=QUIET)
    before = {name: (tmp_path / name).read_bytes() for name in (compare.PAGE, compare.RUNS)}
    count = len(short)
    smaller = request(tmp_path, *methods, **numbers)
    with pytest.raises(ConfigError, match=f"holds a larger comparison .*{named}.*would be replaced.*overwrite=true"):
        compare.compare(smaller, console=QUIET)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert len(short) == count
    compare.compare(dataclasses.replace(smaller, overwrite=True), console=QUIET)
    assert len(read_runs(tmp_path / compare.RUNS)) < before[compare.RUNS].count(b"\n") - 1
    compare.compare(smaller, console=QUIET)


def test_a_smaller_budget_chooses_among_its_own_trials(
    short: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the folder of a larger budget, whose fourth trial is the best: the page says two trials, and so it is."""
    scores = iter([30.0, 40.0, 20.0, 90.0])

    def trial(overrides: Any, folder: Path, listener: Any, stop: Any, **_: bool) -> None:
        listener("validation", {"round": 2, "average": next(scores)})
        listener("round done", {"round": 2})

    monkeypatch.setattr("goldfinch.study.search.run_here", trial)
    large = compare.compare(request(tmp_path, "fedavg", studies=1, trials=4), console=QUIET)
    asked = dataclasses.replace(request(tmp_path, "fedavg", studies=1, trials=2), overwrite=True)
    small = compare.compare(asked, console=QUIET)
    trials = [[run for run in each.runs if run.kind == "trial"] for each in (large, small)]
    assert trials[1] == trials[0][:2]
    chosen = [{str(run.values) for run in each.runs if run.kind == "final"} for each in (large, small)]
    assert chosen == [{str(trials[0][3].values)}, {str(trials[0][1].values)}]
    best = (tmp_path / "fedavg" / IN_DOMAIN / "study-0" / "best.yaml").read_text()
    assert "2 trials (0 ended early)" in " ".join(best.replace("#", " ").split())
    assert {row.label: small.tables[0].trials[row.label] for row in small.tables[0].rows} == {"fedavg": 2}


def test_a_longer_search_that_is_interrupted_leaves_what_its_page_is_of(
    short: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare.compare(request(tmp_path, "fedavg", studies=1), console=QUIET)
    best = tmp_path / "fedavg" / IN_DOMAIN / "study-0" / "best.yaml"
    before = best.read_text()
    scores = iter([90.0])

    def trial(overrides: Any, folder: Path, listener: Any, stop: Any, **_: bool) -> None:
        listener("validation", {"round": 2, "average": next(scores)})
        listener("round done", {"round": 2})

    def final(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("goldfinch.study.search.run_here", trial)
    monkeypatch.setattr(compare, "final_run", final)
    with pytest.raises(KeyboardInterrupt):
        compare.compare(request(tmp_path, "fedavg", studies=1, trials=2), console=QUIET)
    assert best.read_text() == before


def test_a_final_run_that_failed_is_tried_again_by_the_next_call(short: list[str], tmp_path: Path) -> None:
    asked = request(tmp_path, "fedavg", "fedprox")
    first = compare.compare(asked, console=QUIET)
    count = len(short)
    again = compare.compare(asked, console=QUIET)
    assert short[count:] == ["fedprox/in_domain/1 2", "fedprox/in_domain/1 3"]
    assert again.notes == first.notes


def test_a_comparison_of_other_code_is_kept_and_both_commands_work(
    short: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(tmp_path / "out", "fedavg")
    compare.compare(asked, console=QUIET)
    before = {path: path.read_bytes() for path in asked.output.rglob("*") if path.is_file()}
    monkeypatch.setattr("common.settings.code_sha256", lambda own=(): "feedfeedfeedfeed")
    with pytest.raises(ConfigError, match=r"holds a comparison of other code\.") as caught:
        compare.compare(asked, console=QUIET)
    assert {path: path.read_bytes() for path in asked.output.rglob("*") if path.is_file()} == before
    both, again = re.findall(r"(?:keep both|train again): +goldfinch (.*)", str(caught.value))
    count = len(short)
    assert main(shlex.split(both)) == 0
    assert {path: path.read_bytes() for path in asked.output.rglob("*") if path.is_file()} == before
    assert (tmp_path / "out-2" / "compare.md").exists()
    assert main(shlex.split(again)) == 0
    assert len(short) == 3 * count, "all final runs were done again, twice"
    assert main(shlex.split(again)) == 0
    assert main(asked.words) == 0
    assert len(short) == 3 * count, "one that has begun is continued, with and without the word"
    assert "overwrite" not in (asked.output / "compare.md").read_text()


def test_final_runs_of_other_settings_are_kept_unless_they_are_to_be_replaced(tmp_path: Path) -> None:
    """As of a comparison whose journal was lost."""
    from goldfinch.study import search

    words = (*TINY, "method=fedavg", "protocol.partition_seed=null", "seed=0", "train.rounds=1")
    folder = tmp_path / "seed-0"
    search.run_here(words, folder)
    before = (folder / "summary.json").read_bytes()
    other = (*words, "train.learning_rate=0.02")
    with pytest.raises(
        ConfigError, match=r"is kept: it has other settings: train\.learning_rate=0\.02.*overwrite=true"
    ):
        search.run_here(other, folder)
    assert (folder / "summary.json").read_bytes() == before
    search.run_here(other, folder, overwrite=True)
    replaced = RunRecord(folder)
    assert replaced.options["train.learning_rate"] == 0.02
    search.run_here(other, folder, overwrite=True)
    assert RunRecord(folder).events == replaced.events, "what is finished is not done again"
    search.run_here(words, folder, own=True)
    assert RunRecord(folder).options["train.learning_rate"] != 0.02


def test_the_page_does_not_show_the_database(short: list[str], tmp_path: Path) -> None:
    """Its URL may have a password."""
    asked = dataclasses.replace(request(tmp_path, "fedavg"), storage=f"sqlite:///{tmp_path / 'studies.db'}")
    compare.compare(asked, console=QUIET)
    assert "studies.db" not in (tmp_path / "compare.md").read_text()
    assert not (tmp_path / "journal.log").exists()


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["method.temperature=0.1"], "method.temperature=0.1: settings of a method are for it alone"),
        (["method=moon"], "--methods A,B"),
        (["seed=3"], "seed"),
        (["protocol.partition_seed=0"], "protocol.partition_seed"),
        (["tuned=fpl_on_glyphs"], "tuned"),
        (["printed=false"], "printed"),
        (["--weighting", "equal"], "weighting equal"),
        (["weighting=uniform"], "--weighting uniform"),
        (["--scores", "seen"], "scores seen"),
        (["rules=x"], "--studies, --trials, --runs, --scores, --weighting, --batch"),
        (["--runs", "1001"], "at most 1000 final runs"),
        (["rules=strict"], "every comparison follows the rules"),
        (["views=blurred"], "blurred"),
        (["protocol=dirichlet", "protocol.samples=null", "--scores", "leave_one_out"], "leave_one_out"),
        (["engine=ray"], "engine=ray"),
        (["rounds.metric=log_loss", "rounds.scores=true"], "lower"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_settings_of_the_rules_and_unknown_choices_are_refused(
    words: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["compare", "--methods", "fedavg,moon", *TINY, "--output", str(tmp_path / "out"), *words]
    assert main(asked) == 1
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [{"trials": 0}, {"runs": "2"}, {"studies": True}, {"scores": []}])
def test_a_number_that_is_out_of_range_is_named(number: dict[str, Any]) -> None:
    (name,) = number
    with pytest.raises(ConfigError, match=f"^{name}"):
        gf.compare(["fedavg"], data="glyphs", **number)


def test_the_page_and_the_help_have_the_numbers_of_the_rules(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "fair-comparison.md").read_text()
    assert main(["compare", "--help"]) == 0
    help_of_options = " ".join(capsys.readouterr().out.split())
    for each in dataclasses.fields(Rules):
        meaning, default = each.metadata["meaning"], each.metadata["default"]
        assert f"| `--{each.name}` | {default} | {meaning} |" in page
        assert f"{meaning[1:]}; {default} by default." in help_of_options, each.name
        assert f"--{each.name} " in help_of_options
        if "choices" in each.metadata:  # no word is named that the option does not take
            assert set(re.split(", | or ", meaning.partition(": ")[2])) == set(each.metadata["choices"])


def test_options_of_the_rules_make_the_same_rules() -> None:
    rules = Rules(studies=4, trials=5, runs=6, scores=SCORES, weighting="samples", batch=7)
    given = {}
    for word in rules.options:
        name, _, value = word.removeprefix("--").partition("=")
        given[name] = value
    assert given.keys() == {each.name for each in dataclasses.fields(Rules)}
    assert given == {
        "studies": "4",
        "trials": "5",
        "runs": "6",
        "scores": "in_domain,leave_one_out",
        "weighting": "samples",
        "batch": "7",
    }
    assert "--weighting=" not in " ".join(Rules().options), "each method's own"


def test_a_setting_of_a_method_can_be_given_if_it_is_compared_alone() -> None:
    (entrant,), _ = entrants_of(["fpl"], [*TINY, "method.temperature=0.3"], Rules())
    assert entrant.settings.method.temperature == 0.3


def test_a_comparison_with_other_settings_is_not_continued(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "runs.csv").read_text()
    assert main([*compare_command(folder, "fedavg"), "train.epochs=2"]) == 1
    assert "train.epochs" in capsys.readouterr().err
    assert (folder / "runs.csv").read_text() == before


@pytest.mark.parametrize(
    ("methods", "named"),
    [(["fedavg,fpl"], "'fedavg,fpl'"), (["*", "fedavg"], r"'\*'")],
    ids=["two names in one", "all and one"],
)
def test_names_in_one_word_are_refused_with_what_to_write(methods: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"{named} is no method: write --methods A,B, in Python \['A', 'B'\]; "):
        entrants_of(methods, TINY, Rules())


def test_a_method_that_cannot_take_part_is_an_error_or_left_out_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"fedgca: .*views\..*views=randconv"):
        entrants_of(["fedavg", "fedgca"], TINY, Rules())
    with pytest.raises(ConfigError, match=r"fedgca: .*views=none"):
        entrants_of(["fedavg", "fedgca"], [*TINY, "views=none"], Rules())
    monkeypatch.setattr("goldfinch.study.rules.choices_of", lambda group: {"fedgca": Path(), "fedavg": Path()})
    entrants, left_out = entrants_of(["*"], [*TINY, "views=none"], Rules())
    assert [entrant.method for entrant in entrants] == ["fedavg"]
    assert "views=none" in left_out["fedgca"]


@pytest.mark.long
def test_rows_have_the_same_settings_and_the_weighting_that_was_asked_for() -> None:
    names = ["fpl", "feddyn", "fedplvm", "moon", "adcol", "fedheal"]
    for weighting in ("uniform", "samples"):
        entrants, _ = entrants_of(["fedavg", *names], [*TINY, "views=randconv"], Rules(weighting=weighting))
        assert [entrant.method for entrant in entrants] == ["fedavg", *names]
        for entrant in entrants:
            raw = entrant.settings.raw
            assert entrant.settings.choices["views"] == "randconv"
            assert dict(raw["method"]).get("weighting", weighting) == weighting
            assert shared_settings(raw) == shared_settings(entrants[0].settings.raw)
