"""The command: every row once, nothing twice, what was interrupted goes on, and pages of what is there."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from common.errors import ConfigError
from goldfinch.cli import main
from goldfinch.commands import reproduce as command
from goldfinch.commands import sweep
from goldfinch.commands.reproduce import (
    ReproductionRequest,
    comparison_of,
    keep_records,
    planned_jobs,
    reproduce,
    request_of,
)
from goldfinch.commands.sweep import Job, execute
from goldfinch.record import RunRecord
from goldfinch.reproduction.published import PublishedRow, PublishedTable, Reduction, Sweep
from tests.support.runs import run

DOMAINS = {"handwritten": "by hand", "printed": "print", "signs": "signs", "sketch": "sketch"}
TINY = (
    "train.rounds=2",
    "train.epochs=1",
    "train.device=cpu",
    "protocol.fraction=0.01",
    "protocol.fractions={handwritten:0.02,printed:0.02,sketch:0.1}",
    "rounds.test_samples=20",
)


def demo_table(rows: tuple[PublishedRow, ...] | None = None) -> PublishedTable:
    """A table on the embedded glyphs with the demonstration's experiment."""
    rows = rows or (
        PublishedRow("FedAvg", ("method=fedavg",), (80.0, 90.0, 70.0, 60.0), average=75.0),
        PublishedRow("FPL", ("method=fpl",), (81.0, 91.0, 71.0, 61.0), average=76.0),
    )
    return PublishedTable(
        "demo", "A Paper", "Table 1", "final", DOMAINS, Reduction(("tiny",), TINY), own=rows[-1].label, listed=rows
    )


def quiet() -> Console:
    return Console(file=StringIO(), width=200)


def output_of(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def here(job: Job, **_: Any) -> tuple[Job, str]:
    """A run in this process, which takes seconds less than in one of its own."""
    replaces = job.decision().replaces
    run(replace(job.settings, resume=not replaces, overwrite=replaces))
    return job, ""


@pytest.fixture(autouse=True, scope="module")
def runs_in_this_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "run_subprocess", here)
        yield


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[ReproductionRequest, Path, str]:
    folder = tmp_path_factory.mktemp("reproduced")
    request = ReproductionRequest(demo_table(), "small", (), (0, 1), str(folder))
    console = quiet()
    path = reproduce(request, console)
    return request, path, output_of(console)


@pytest.mark.long
def test_every_row_runs_with_every_seed_and_four_files_are_written(done: tuple[ReproductionRequest, Path, str]) -> None:
    request, path, text = done
    assert "4 runs, 0 finished already" in text
    assert re.search(r"\[4/4, 0.0\s+s left\] FPL, seed 1: average \d+\.\d\d, worst \d+\.\d\d", text)
    assert re.search(r"split, SHA-256: [0-9a-f]{64}", text)
    for suffix in (".md", ".html", ".png", ".json"):
        assert path.with_suffix(suffix).stat().st_size > 500
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert len(list((request.folder / "runs").glob("*/seed-*/summary.json"))) == 4
    page = path.read_text()
    assert path.with_name("demo-bars.png").read_bytes().startswith(b"\x89PNG")
    assert page.count('src="data:image/png;base64,') == 2
    assert "data:image/png;base64," in page
    assert "http" not in page
    assert "SMALL SCALE" in page
    assert "SMALL SCALE" in path.with_suffix(".md").read_text()


def test_console_and_page_score_by_one_rule_and_name_it(tmp_path: Path) -> None:
    """The paper's rule is the mean of the last rounds: the console must not print the last round's average."""
    table = replace(demo_table(), rule="last_n")
    console = quiet()
    path = reproduce(ReproductionRequest(table, "small", ("FedAvg",), (0,), str(tmp_path)), console)
    content = json.loads(path.with_suffix(".json").read_text())["rows"][0]
    summary = RunRecord.open(Path(content["folders"]["0"])).summary
    found = re.search(r"FedAvg, seed 0: average ([\d.]+), worst ([\d.]+) \((.*)\)", output_of(console))
    assert found
    assert found[1] == f"{content['average']:.2f}" == f"{summary['scores']['last_n']['average']:.2f}"
    assert found[1] != f"{summary['scores']['final']['average']:.2f}"
    assert found[3] == "mean of the last rounds"
    assert "Test accuracy in %, mean of the last rounds;" in path.with_suffix(".md").read_text()


def test_the_numbers_on_the_page_are_those_of_the_runs(done: tuple[ReproductionRequest, Path, str]) -> None:
    _, path, _ = done
    content = json.loads(path.with_suffix(".json").read_text())
    for row in content["rows"]:
        scores = [RunRecord.open(Path(folder)).summary["scores"]["final"] for folder in row["folders"].values()]
        assert len(scores) == 2
        mean = sum(score["average"] for score in scores) / 2
        assert row["average"] == pytest.approx(mean)
        assert row["ours"]["signs"] == pytest.approx(sum(score["accuracy"]["signs"] for score in scores) / 2)
        gap = mean - row["published_average"]
        shown = re.escape(f"({gap:+.2f}; ")
        assert re.search(shown + r"\d+\.\d\d\) \|", path.with_suffix(".md").read_text())


def test_a_picture_that_is_drawn_of_few_rows_leaves_when_there_are_more(
    done: tuple[ReproductionRequest, Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, _, _ = done
    kept = replace(request, records=str(tmp_path))
    jobs = planned_jobs(request.table, request.table.rows, request.seeds, "small", request.folder)
    keep_records(kept, jobs, request.seeds, {})
    assert (tmp_path / "demo-bars.png").exists()
    monkeypatch.setattr("goldfinch.commands.reproduce.MAX_BARS", 1)
    keep_records(kept, jobs, request.seeds, {})
    assert {file.name for file in tmp_path.glob("*.png")} == {"demo.png"}


@pytest.mark.long
def test_records_are_kept_of_finished_runs_only(done: tuple[ReproductionRequest, Path, str], tmp_path: Path) -> None:
    """One seed finished of two: page, curves, summary and history; nothing of machines or places."""
    request, _, _ = done
    kept = replace(request, seeds=(0, 2), records=str(tmp_path / "kept"))
    jobs = planned_jobs(request.table, request.table.rows, kept.seeds, "small", request.folder)
    keep_records(kept, jobs, kept.seeds, {})
    files = {str(file.relative_to(tmp_path / "kept")) for file in (tmp_path / "kept").rglob("*") if file.is_file()}
    runs = {f"demo/{job.folder.parent.name}/seed-0" for job in jobs}
    assert files == {f"{run}/{name}" for run in runs for name in ("summary.json", "scores.jsonl")} | {
        "demo.md", "demo.png", "demo-bars.png",
    }  # fmt: skip
    for job in jobs[:1]:
        copied = tmp_path / "kept" / "demo" / job.folder.parent.name / "seed-0" / "summary.json"
        assert copied.read_bytes() == (job.folder / "summary.json").read_bytes()
    assert not [file for file in files if file.endswith(("md", "json", "jsonl"))
                and str(request.folder) in (tmp_path / "kept" / file).read_text()]  # fmt: skip
    again = replace(kept, seeds=(0,), records=str(tmp_path / "again"))
    reproduce(again, quiet())
    assert (tmp_path / "again" / "demo.md").read_text().startswith("# demo, scale=small")


def test_what_is_finished_is_skipped_and_a_new_seed_is_not(done: tuple[ReproductionRequest, Path, str]) -> None:
    request, _, _ = done
    before = {file: file.stat().st_mtime_ns for file in request.folder.rglob("summary.json")}
    console = quiet()
    reproduce(request, console)
    assert "4 runs, 4 finished already" in output_of(console)
    assert {file: file.stat().st_mtime_ns for file in request.folder.rglob("summary.json")} == before
    jobs = planned_jobs(request.table, request.table.rows[:1], (0, 1, 2), "small", request.folder)
    assert [job.record() is None for job in jobs] == [False, False, True]


@pytest.mark.long
def test_runs_of_other_code_are_kept_and_said_until_they_are_to_be_trained_again(
    done: tuple[ReproductionRequest, Path, str], tmp_path: Path
) -> None:
    folder = tmp_path / "reproduced"
    shutil.copytree(done[0].folder, folder)
    request = replace(done[0], output=str(folder))
    summaries = sorted(folder.rglob("summary.json"))
    for path in summaries[:3]:
        record = path.with_name("code.json")
        record.write_text(json.dumps(json.loads(record.read_text()) | {"strategies/fpl.py": "feedfeedfeedfeed"}))
    before = [path.read_bytes() for path in summaries]
    console = quiet()
    page = reproduce(request, console)
    printed = output_of(console)
    assert "4 runs, 1 finished already, 3 kept" in printed
    assert (
        f"train again: goldfinch reproduce demo --scale small --seeds 0,1 --output {folder} overwrite=true" in printed
    )
    assert f"--output {tmp_path / 'reproduced-2'}\n" in printed
    assert [path.read_bytes() for path in summaries] == before
    assert "NOT THE SAME IN ALL RUNS: " in page.with_suffix(".md").read_text()
    console = quiet()
    reproduce(replace(request, overwrite=True), console)
    assert "4 runs, 1 finished already\n" in output_of(console)
    assert "train again" not in output_of(console)
    assert "NOT THE SAME" not in page.with_suffix(".md").read_text()


def test_another_setting_is_another_run(done: tuple[ReproductionRequest, Path, str]) -> None:
    request, _, _ = done
    rows = request.table.rows[:1]
    (job,) = planned_jobs(request.table, rows, (0,), "small", request.folder)
    assert job.record() is not None
    for change in ("train.rounds=3", "train.learning_rate=0.02", "rounds.test_samples=10"):
        (other,) = planned_jobs(request.table, rows, (0,), "small", request.folder, [change])
        assert other.folder != job.folder, change
        assert other.record() is None


def test_rows_that_two_tables_share_are_one_run(done: tuple[ReproductionRequest, Path, str]) -> None:
    request, _, _ = done
    twice = (PublishedRow("neither", ("method=fedavg",)), PublishedRow("again", ("method=fedavg",)))
    jobs = planned_jobs(demo_table(twice), twice, (0,), "small", request.folder)
    assert jobs[0].folder == jobs[1].folder
    console = quiet()
    assert execute(jobs, 1, console) == {}
    assert "1 run, 1 finished already" in output_of(console)


def test_an_interrupted_run_goes_on_to_the_same_state(
    done: tuple[ReproductionRequest, Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ReproductionRequest(demo_table(), "small", ("fpl",), (0,), str(tmp_path))

    def interrupted(job: Job, **_: Any) -> tuple[Job, str]:
        run(job.settings, stop_after=1)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sweep, "run_subprocess", interrupted)
        with pytest.raises(KeyboardInterrupt):
            reproduce(request, quiet())
    assert "not run yet" in (tmp_path / "demo.md").read_text()  # a page of what is there, all the same
    console = quiet()
    reproduce(request, console)
    assert "1 run, 0 finished already" in output_of(console)
    mine = next(iter((tmp_path / "runs").rglob("summary.json")))
    twin = next(path for path in (done[0].folder / "runs").glob("fpl-*/seed-0"))
    assert RunRecord.open(mine.parent).summary["state_sha256"] == RunRecord.open(twin).summary["state_sha256"]


def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(job: Job, **_: Any) -> tuple[Job, str]:
        return (job, "the camera fell off") if job.label.startswith("FedAvg") else here(job)

    monkeypatch.setattr(sweep, "run_subprocess", failing)
    request = ReproductionRequest(demo_table(), "small", (), (0,), str(tmp_path), records=str(tmp_path / "kept"))
    console = quiet()
    with pytest.raises(ConfigError, match="some runs are missing") as caught:
        reproduce(request, console)
    assert "fedavg-" in str(caught.value)  # the folder, with the log
    assert "FedAvg, seed 0: FAILED: the camera fell off" in output_of(console)
    text = (tmp_path / "demo.md").read_text()
    assert "the camera fell off" in text
    assert (tmp_path / "kept" / "demo.md").read_text() == text
    assert re.search(r"\| FPL \| \d", text)


def test_a_bound_is_a_row_like_the_others(tmp_path: Path) -> None:
    """Papers print it among them, so it is ranked, tested and may be the best."""
    rows = tuple(PublishedRow(name, (f"method={name}",)) for name in ("single_set", "fedavg"))
    request = ReproductionRequest(demo_table(rows), "small", (), (0,), str(tmp_path))
    jobs = planned_jobs(request.table, rows, request.seeds, "small", request.folder)
    assert jobs[0].settings.method.bound == "lower"
    again = planned_jobs(request.table, rows, (0,), "small", request.folder, ("train.rounds=4", "rounds=3"))
    assert again[0].settings.train.rounds == 3, "a short key is the whole one"
    lines = comparison_of(request, jobs, request.seeds, {}).lines
    assert [line.ours.bound for line in lines] == [None, None]


def test_a_mistake_in_any_row_stops_before_the_first_run(tmp_path: Path) -> None:
    request = ReproductionRequest(demo_table(), "small", (), (0,), str(tmp_path), ("train.epoch=2",))
    with pytest.raises(ConfigError, match="did you mean 'epochs'"):
        reproduce(request, quiet())
    assert not (tmp_path / "runs").exists()
    superlink = ReproductionRequest(demo_table(), "small", (), (0,), str(tmp_path), ("engine=superlink",))
    with pytest.raises(ConfigError, match="inline or ray"):
        reproduce(superlink, quiet())


def test_words_of_the_command_line() -> None:
    request = request_of(["fpl_office", "train.rounds=2"], "small", ("fedavg", "FPL"), (3, 1), Path("x"))
    assert (request.table.name, request.scale, request.methods) == ("fpl_office", "small", ("fedavg", "FPL"))
    assert (request.seeds, request.overrides, request.folder) == ((3, 1), ("train.rounds=2",), Path("x"))
    assert (
        request.command
        == "goldfinch reproduce fpl_office --scale small --methods fedavg,FPL --seeds 3,1 train.rounds=2"
    )
    assert request_of(["fpl_office"]).folder == Path("outputs/reproduce/paper")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fpl_ofice"], "did you mean 'fpl_office'"),
        (["fpl_office", "seed=1"], "use --methods A,B and --seeds 0,1,2"),
        (["fpl_office", "attack=sign_flip"], "no client of a paper's table is hostile"),
        (["fpl_office", "fedapc_office"], "needs one table"),
        (["train.rounds=2"], "needs a table"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        request_of(words)


def test_without_a_table_the_command_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce"]) == 0
    text = capsys.readouterr().out
    assert "fedplcc_digit5_losses" in text
    assert "--scale small" in text
    assert main(["reproduce", "nothing"]) == 1


def test_a_stand_in_is_scored_under_its_own_name(tmp_path: Path) -> None:
    row = PublishedRow("FedAvg", ("method=fedavg",), (80.0, 90.0, 70.0, 60.0))
    domains = {"handwritten": "by hand", "printed": "print", "signs": "signs", "photos": "Photos"}
    table = PublishedTable(
        "demo", "A Paper", "Table 1", "final", domains, Reduction(("tiny",), TINY, {"photos": "sketch"}), listed=(row,)
    )
    request = ReproductionRequest(table, "small", (), (0,), str(tmp_path))
    jobs = planned_jobs(table, table.rows, (0,), "small", tmp_path)
    execute(jobs, 1, quiet())
    command.write_pages(request, jobs, (0,), {})
    text = (tmp_path / "demo.md").read_text()
    assert "sketch (stands in for Photos)" in text
    found = comparison_of(request, jobs, (0,), {})
    assert found.gap(found.lines[0], found.columns[3]) is None
    assert found.gap(found.lines[0], found.columns[0]) is not None
    assert re.search(r"\| FedAvg \| [^|]+\| [^|]+\| [^|]+\| 60.00 \| 75.00 \|", text)  # neither has a gap


@pytest.mark.long
def test_a_sweep_is_a_heat_map_with_the_papers_names(tmp_path: Path) -> None:
    axes = {"method.temperature": (0.02, 0.5), "method.contrast": (0.0, 1.0)}
    sweep = Sweep(("method=fpl",), axes, {"method.temperature": "tau", "method.contrast": "CPCL"})
    table = PublishedTable(
        "demo", "A Paper", "Figure 1", "final", DOMAINS, Reduction(("tiny",), TINY), seeds=(0,), sweeps=(sweep,)
    )
    request = ReproductionRequest(table, "small", (), (), str(tmp_path), ("train.rounds=1",))
    path = reproduce(request, quiet())
    assert (tmp_path / "demo-sweep-1.png").read_bytes().startswith(b"\x89PNG")
    assert "![tau, CPCL](demo-sweep-1.png)" in path.with_suffix(".md").read_text()
    points = [row["point"] for row in json.loads(path.with_suffix(".json").read_text())["rows"]]
    assert points == [{"method.temperature": a, "method.contrast": b} for a in (0.02, 0.5) for b in (0.0, 1.0)]


@pytest.mark.long
def test_a_measure_is_computed_once_and_shown_with_the_published_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = PublishedRow("mask", ("method=fedpall", "method.protection=mask"), average=60.0, measured=3.04)
    table = PublishedTable(
        "demo",
        "A Paper",
        "Privacy",
        "best_round",
        DOMAINS,
        Reduction(("tiny",), TINY),
        listed=(row,),
        measure="mutual_information",
    )
    request = ReproductionRequest(table, "small", (), (0,), str(tmp_path), ("train.rounds=1",))
    text = reproduce(request, quiet()).with_suffix(".md").read_text()
    nats = json.loads((tmp_path / "demo.json").read_text())["rows"][0]["measured"][0]
    assert f"| {nats:.2f} |" in text, "of a measure no row is the best"
    assert "| 3.04 |" in text
    (estimate,) = tmp_path.glob("runs/*/*/mutual_information.json")
    estimate.write_text("{")
    assert reproduce(request, quiet()).with_suffix(".md").read_text() == text, "a damaged one is computed again"
    monkeypatch.setattr(
        "goldfinch.results.information.information_of_run", lambda folder: pytest.fail("measured twice")
    )
    assert reproduce(request, quiet()).with_suffix(".md").read_text() == text
