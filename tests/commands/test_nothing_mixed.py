"""Nothing is overwritten unasked, and runs of other settings, scoring or code are not mixed in."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from support.records import run_by_other_code
from support.runs import run
from support.toy import toy_settings

from common.errors import ConfigError
from common.overlays import overlay_text
from common.settings import RunSettings
from goldfinch.cli import main
from goldfinch.commands import sweep
from goldfinch.commands.sweep import Job, check_folder, default_output, plan, run_subprocess
from goldfinch.record import RunRecord, find_runs
from goldfinch.reproduction.pages import _codes
from goldfinch.results.groups import group_runs
from server.run.conduct import run_lock
from server.run.existing import Step

TINY = ["method=fedavg", "data=glyphs", "seed=0,1", "train.rounds=1"]


def job_of(settings: RunSettings) -> Job:
    return Job((), settings, "a run")


def test_folders_without_a_name_are_another_one_for_every_choice() -> None:
    assert default_output("sweep", TINY) == default_output("sweep", tuple(TINY))
    assert default_output("sweep", TINY) != default_output("sweep", list(reversed(TINY))), "it names folders otherwise"
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


def test_a_run_that_is_replaced_stays_whole_if_the_new_one_s_data_are_refused(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        for number in range(4):
            image = tmp_path / "images" / "site" / folder / f"{number}.png"
            image.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (16, 16), (number, 0, len(folder) + ord(folder))).save(image)
    words = ["run", "method=fedavg", "data=folder", f"data.root={tmp_path / 'images'}", "data.image_size=16"]
    words += ["train.rounds=1", "train.batch_size=2", f"output={tmp_path / 'run'}"]
    assert main(words) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert main([*words, "data.classes=[x,z]", "overwrite=true"]) == 1
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    assert main([*words, "seed=1", "overwrite=true"]) == 0


class FailingProcesses:
    """Processes that fail at once."""

    ended = False

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


def test_a_sweep_s_log_keeps_the_rounds_before_an_interruption(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("error: of another day\nround 7 of 9\n")
    processes = FailingProcesses()
    job = Job(("a",), toy_settings("fedavg", tmp_path), "a run")
    _, problem = run_subprocess(job, processes, lambda label, line: None)  # type: ignore[arg-type]
    assert problem == "exit code 1", "the error is this process's own"
    assert (tmp_path / "run.log").read_text() == "error: of another day\nround 7 of 9\n"


@pytest.mark.parametrize("seen", ["before it starts", "by the error of its process"])
def test_a_run_of_a_sweep_waits_for_another_process_that_writes_to_its_folder(
    seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that a killed sweep has left: its run is done by it, and has not failed."""
    settings = toy_settings("fedavg", tmp_path)
    processes = FailingProcesses()
    lock = ExitStack()
    monkeypatch.setattr(sweep, "POLL_SECONDS", 0.01)

    def show(label: str, line: str) -> None:
        if seen == "by the error of its process" and not processes.started:
            return
        if line.startswith("waits"):
            lock.close()
            run(settings)

    def start(*_: Any) -> Any:
        processes.started.append(["run"])
        lock.enter_context(run_lock(tmp_path))
        return SimpleNamespace(wait=lambda timeout: 1)

    if seen == "before it starts":
        lock.enter_context(run_lock(tmp_path))
    else:
        monkeypatch.setattr(processes, "start", start)
    _, problem = run_subprocess(Job(("a",), settings, "a run"), processes, show)  # type: ignore[arg-type]
    assert problem == ""
    assert len(processes.started) == (seen != "before it starts")
    assert job_of(settings).finished()


def test_combinations_of_a_sweep_have_a_folder_each_or_are_refused(tmp_path: Path) -> None:
    jobs, _ = plan(["train.learning_rate=0.1,0.10,1e-1,0.2"], tmp_path)
    assert [job.settings.train.learning_rate for job in jobs] == [0.1, 0.2]
    for place, rate in (("a/b", 0.1), ("a-b", 0.2)):
        path = tmp_path / f"{place}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(overlay_text("", "found by hand", "fedavg", "glyphs", {"train.learning_rate": rate}))
    with pytest.raises(ConfigError, match="would both be in"):
        plan([f"tuned={tmp_path}/a/b.yaml,{tmp_path}/a-b.yaml"], tmp_path)


def test_a_sweep_without_test_scores_does_all_of_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def here(job: Job, **_: Any) -> tuple[Job, str]:
        run(job.settings)
        return job, ""

    monkeypatch.setattr(sweep, "run_subprocess", here)
    words = [*TINY, "rounds.test=false", "protocol.validation=0.2", "protocol.samples=24", "train.local_steps=1"]
    assert main(["sweep", *words, "--output", str(tmp_path)]) == 0
    assert [each.seed for each in find_runs([str(tmp_path)])] == [0, 1]


def test_runs_behind_links_are_found_once_and_a_circle_ends(tmp_path: Path) -> None:
    """As on a cluster, where runs lie on another disk: a seed that is left out is a wrong mean."""
    runs = tmp_path / "runs"
    elsewhere = tmp_path / "elsewhere" / "sweep"
    run(toy_settings("fedavg", runs / "seed-0"))
    run(toy_settings("fedavg", elsewhere / "seed-1", seed=1))
    for link, target in (("linked", elsewhere), ("again", runs / "seed-0"), ("circle", runs), ("up", tmp_path)):
        (runs / link).symlink_to(target)
    assert [each.folder.relative_to(runs).as_posix() for each in find_runs([str(runs)])] == ["linked/seed-1", "seed-0"]


def sweep_folder(folder: Path, words: list[str]) -> Path:
    """A folder as a sweep leaves it, with one run that is a file."""
    (folder / "old").mkdir(parents=True)
    (folder / "old" / "config.yaml").write_text("")
    (folder / "sweep.json").write_text(json.dumps({"arguments": words, "runs": ["old"]}))
    return folder


def test_another_sweep_is_neither_mixed_nor_replaced_unasked(tmp_path: Path) -> None:
    folder = sweep_folder(tmp_path / "sweep", TINY)
    check_folder(folder, tuple(TINY))
    for other in ([*TINY, "train.epochs=2"], list(reversed(TINY))):  # whose folders are in the order of its words
        with pytest.raises(ConfigError, match=r"holds another sweep \(method=fedavg.*overwrite=true"):
            check_folder(folder, other)
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
    before = sorted((tmp_path / "run").rglob("*"))
    for words in (
        ["sweep", "method=fedavg,fpl", "train.rounds=1", "--output", str(tmp_path / "run")],
        ["compare", "--methods", "fpl", "--output", str(tmp_path / "run")],
        ["reproduce", "fpl_office", "--methods", "FedAvg", "--output", str(tmp_path / "run")],
    ):
        assert main(words) == 1
        assert "lies in the folder of a run" in capsys.readouterr().err
    assert sorted((tmp_path / "run").rglob("*")) == before
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
