"""Nothing is overwritten unasked, and runs of other settings, scoring or code are not mixed in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.records import run_by_other_code
from support.runs import run
from support.toy import toy_settings

from common.errors import ConfigError
from common.settings import RunSettings
from goldfinch.cli import main
from goldfinch.commands.sweep import Job, check_folder, default_output, run_subprocess
from goldfinch.record import RunRecord, find_runs
from goldfinch.reproduction.pages import _codes
from goldfinch.results.groups import group_runs
from server.run.existing import Step

TINY = ["method=fedavg", "data=glyphs", "seed=0,1", "train.rounds=1"]


def job_of(settings: RunSettings) -> Job:
    return Job((), settings, "a run")


def test_folders_without_a_name_are_another_one_for_every_choice() -> None:
    assert default_output("sweep", TINY) == default_output("sweep", list(reversed(TINY)))
    assert default_output("sweep", TINY) != default_output("sweep", [*TINY, "rounds.test_samples=4"])
    assert default_output("sweep", TINY) != default_output("compare", TINY)


def test_a_run_that_is_scored_otherwise_is_another_run(tmp_path: Path) -> None:
    few = toy_settings("fedavg", tmp_path, rounds={"test_samples": 4})
    run(few)
    assert job_of(few).finished()
    whole = toy_settings("fedavg", tmp_path)
    assert whole.identity == few.identity
    assert not job_of(whole).finished()
    assert "rounds.test_samples=" in job_of(whole).decision().reason


def test_a_run_of_other_code_is_kept_and_counts(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path)
    run(settings)
    run_by_other_code(tmp_path)
    assert job_of(settings).finished()
    assert job_of(settings).decision().step is Step.KEEP
    assert "differs in strategies/fedavg.py" in job_of(settings).decision().reason


class FailingProcesses:
    """Processes that fail at once."""

    def __init__(self) -> None:
        self.started: list[list[str]] = []

    def start(self, words: list[str], threads: int, stream: Any) -> Any:
        self.started.append(words)
        return SimpleNamespace(wait=lambda timeout: 1)


def test_a_run_of_a_sweep_that_fails_to_go_on_is_not_replaced(tmp_path: Path) -> None:
    whole = toy_settings("fedavg", tmp_path, train={"rounds": 2})
    expected = {"new": [], "unfinished": ["resume=true"], "finished": None, "other": None, "again": ["overwrite=true"]}
    found: dict[str, list[str] | None] = {}
    for kind in expected:
        processes = FailingProcesses()
        settings = whole
        if kind == "unfinished":
            run(whole, stop_after=1)
        elif kind == "finished":
            run(replace(whole, resume=True))
        elif kind in ("other", "again"):
            settings = replace(toy_settings("fedavg", tmp_path, seed=5), overwrite=kind == "again")
        run_subprocess(Job(("a",), settings, kind), processes, lambda label, line: None)  # type: ignore[arg-type]
        (tmp_path / "run.log").unlink(missing_ok=True)
        assert len(processes.started) < 2
        found[kind] = processes.started[0][2:] if processes.started else None
    assert found == expected


def sweep_folder(folder: Path, words: list[str]) -> Path:
    """A folder as a sweep leaves it, with one run that is a file."""
    (folder / "old").mkdir(parents=True)
    (folder / "old" / "config.yaml").write_text("")
    (folder / "sweep.json").write_text(json.dumps({"arguments": words, "runs": ["old"]}))
    return folder


def test_another_sweep_is_neither_mixed_nor_replaced_unasked(tmp_path: Path) -> None:
    folder = sweep_folder(tmp_path / "sweep", TINY)
    check_folder(folder, list(reversed(TINY)))  # the same words
    with pytest.raises(ConfigError, match=r"holds another sweep \(method=fedavg.*overwrite=true"):
        check_folder(folder, [*TINY, "train.epochs=2"])
    assert (folder / "old").exists()
    check_folder(folder, [*TINY, "train.epochs=2"], overwrite=True)
    assert not (folder / "old").exists()
    assert not (folder / "sweep.json").exists()


@pytest.mark.parametrize("name", ["../outside", "/tmp"])
def test_a_sweep_s_record_names_nothing_outside_to_delete(tmp_path: Path, name: str) -> None:
    folder = sweep_folder(tmp_path / "sweep", TINY)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "config.yaml").write_text("")
    (folder / "sweep.json").write_text(json.dumps({"arguments": TINY, "runs": [name]}))
    check_folder(folder, [*TINY, "train.epochs=2"], overwrite=True)
    assert (tmp_path / "outside" / "config.yaml").exists()


def test_a_run_is_not_written_into_a_run_nor_around_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(toy_settings("fedavg", tmp_path / "run"))
    inner = tmp_path / "run" / "deeper" / "inner"
    for words in (
        ["run", "method=fedavg", "train.rounds=1", f"output={inner}"],
        ["sweep", "method=fedavg", "train.rounds=1", "--output", str(inner)],
        ["compare", "--methods", "fpl", "--output", str(inner)],
        ["reproduce", "fpl_office", "--methods", "FedAvg", "--output", str(inner)],
    ):
        assert main(words) == 1
        assert "lies in the folder of a run" in capsys.readouterr().err
    assert not inner.parent.exists()
    assert main(["run", "method=fedavg", "train.rounds=1", f"output={tmp_path}"]) == 1
    assert "holds other runs" in capsys.readouterr().err


def test_a_search_s_trials_are_no_rows_of_a_table_of_tests(tmp_path: Path) -> None:
    run(toy_settings("fedavg", tmp_path / "fresh"))
    run(toy_settings("fedavg", tmp_path / "trial", seed=1000))
    config = tmp_path / "trial" / "config.yaml"
    config.write_text(config.read_text().replace("  test: true", "  test: false"))
    assert not RunRecord(tmp_path / "trial").scored
    boards = group_runs([found for found in find_runs([str(tmp_path)]) if found.scored])
    assert [group.seeds for board in boards for group in board.rows] == [[0]]


def lines(*codes: str) -> Any:
    runs = [SimpleNamespace(seed=seed, code=code) for seed, code in enumerate(codes)]
    line = SimpleNamespace(printed=SimpleNamespace(label="FPL"), ours=SimpleNamespace(runs=runs))
    return SimpleNamespace(lines=[line])


def test_a_page_names_the_code_that_ran() -> None:
    assert _codes(lines("aaaa", "aaaa")) == "aaaa"
    assert _codes(lines()) == "-"
    mixed = _codes(lines("aaaa", "bbbb"))
    assert mixed == "NOT THE SAME IN ALL RUNS: aaaa: FPL seed 0; bbbb: FPL seed 1"


def test_a_run_resumed_with_other_code_is_marked(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path, train={"rounds": 1})
    run(settings)
    assert RunRecord(tmp_path).code == settings.code
    with (tmp_path / "events.jsonl").open("a") as stream:
        stream.write(json.dumps({"event": "code changed", "time": 0.0, "round": 1, "reason": "common/x.py"}) + "\n")
    run(toy_settings("fedavg", tmp_path, train={"rounds": 2}, resume=True))
    assert RunRecord(tmp_path).code == f"{settings.code} (changed)"
