"""Rows of somebody else: honest ones are taken, damaged and altered ones are refused with what was wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from common.storage import read_tensors, write_tensors
from server.cli import main
from server.results.board.record import IN_DOMAIN, BoardRecord, Case, read_record, write_record

NAME = "glyphs-small-views_none-uniform"


@pytest.fixture
def board(runs: Path, tmp_path: Path) -> Path:
    """A folder of records; their board has FedAvg alone."""
    record = read_record(runs / f"{NAME}.json")
    del record.rows["fedproto"]
    folder = tmp_path / "board"
    write_record(folder / f"{NAME}.json", record)
    return folder


def submit(runs: Path, board: Path, *more: str) -> int:
    return main(["board", "submit", str(runs), "--records", str(board), "--by", "a lab", *more])


def final_run(runs: Path, seed: int = 1) -> Path:
    return runs / NAME / "fedproto" / IN_DOMAIN / f"seed-{seed}"


def test_an_honest_row_is_appended_with_its_source(runs: Path, board: Path, tmp_path: Path) -> None:
    assert submit(runs, board) == 0
    record = read_record(board / f"{NAME}.json")
    assert list(record.rows) == ["fedavg", "fedproto"]
    assert record.rows["fedproto"].source == "a lab"
    theirs = read_record(runs / f"{NAME}.json").rows["fedproto"]
    assert record.rows["fedproto"].cases == theirs.cases
    page, text = tmp_path / "board.html", tmp_path / "board.md"
    assert main(["board", "show", str(board), "--output", str(page), "--markdown", str(text)]) == 0
    assert "submitted by a lab" in text.read_text()


def test_a_row_is_not_taken_twice(runs: Path, board: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(runs, board) == 0
    assert submit(runs, board) == 1
    assert "no row that the boards" in capsys.readouterr().err
    assert submit(runs, board, "--methods", "fedproto") == 1
    assert "is not replaced" in capsys.readouterr().err


# ---- altered records -------------------------------------------------------------------------------------------------


def case_of(record: BoardRecord) -> Case:
    return record.rows["fedproto"].cases[IN_DOMAIN]


def _other_hash(record: BoardRecord) -> None:
    case_of(record).runs[1].state_sha256 = "0" * 64


def _better_score(record: BoardRecord) -> None:
    run = case_of(record).runs[1]
    run.accuracy = {domain: min(100.0, value + 8.0) for domain, value in run.accuracy.items()}


def _better_average(record: BoardRecord) -> None:
    case_of(record).runs[1].average += 5.0


def _fewer_runs(record: BoardRecord) -> None:
    case_of(record).runs.pop()


def _the_best_run_twice(record: BoardRecord) -> None:
    case_of(record).runs[2] = case_of(record).runs[1]


def _another_study(record: BoardRecord) -> None:
    case_of(record).runs[1].study = 0


def _more_trials(record: BoardRecord) -> None:
    study = case_of(record).studies[0]
    study.trials += study.trials


def _fewer_studies(record: BoardRecord) -> None:
    case_of(record).studies.pop()


def _a_chosen_seed(record: BoardRecord) -> None:
    case_of(record).studies[0].seed += 7


def _another_choice(record: BoardRecord) -> None:
    trials = case_of(record).studies[1].trials
    for trial in trials:
        trial.score, trial.curve = 1.0, {2: 1.0}
    trials[1].score, trials[1].curve = 99.0, {2: 99.0}
    trials[0].values, trials[1].values = trials[1].values, trials[0].values
    trials[1].values = {**trials[1].values, "train.learning_rate": 0.0123}


def _ended_early(record: BoardRecord) -> None:
    trial = case_of(record).studies[0].trials[1]
    trial.state, trial.rounds = "pruned", 1


def _other_rules(record: BoardRecord) -> None:
    record.rules.trials = 3


def _other_settings(record: BoardRecord) -> None:
    record.shared["train.epochs"] = 3


def _other_weighting(record: BoardRecord) -> None:
    record.rows["fedproto"].weighting = "samples"


def _fewer_bytes(record: BoardRecord) -> None:
    case_of(record).runs[1].bytes["up"] -= 1


RECORDS = [
    (_other_hash, "the hash of the state in summary.json"),
    (_better_score, "the accuracy on"),
    (_better_average, "the score differs"),
    (_fewer_runs, "final runs have seeds [0, 1]"),
    (_the_best_run_twice, "final runs have seeds [0, 1, 1]"),
    (_another_study, "it has the setting of study 0"),
    (_more_trials, "the budget is 4"),
    (_fewer_studies, "1 studies; the rules ask for 2"),
    (_a_chosen_seed, "the rules ask for 1000"),
    (_another_choice, "train.learning_rate"),
    (_ended_early, "ended early"),
    (_other_rules, "rules differ"),
    (_other_settings, "train.epochs differ"),
    (_other_weighting, "weighs clients by samples"),
    (_fewer_bytes, "the bytes in activity.csv"),
]


@pytest.mark.parametrize(
    ("alter", "reason"), RECORDS, ids=[alter.__name__.strip("_").replace("_", " ") for alter, _ in RECORDS]
)
def test_an_altered_record_is_refused(
    alter: Callable[[BoardRecord], None],
    reason: str,
    runs: Path,
    board: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = runs / f"{NAME}.json"
    record = read_record(path)
    alter(record)
    write_record(path, record)
    before = (board / f"{NAME}.json").read_text()
    assert submit(runs, board) == 1
    assert reason in capsys.readouterr().err
    assert (board / f"{NAME}.json").read_text() == before


# ---- altered and damaged run folders ---------------------------------------------------------------------------------


def _change_summary(folder: Path, **changes: Any) -> None:
    path = folder / "summary.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes}))


def _no_checkpoint(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoint")


def _another_checkpoint(folder: Path) -> None:
    """The state of another seed, under the name of this run's."""
    shutil.rmtree(folder / "checkpoint")
    shutil.copytree(folder.parent / "seed-0" / "checkpoint", folder / "checkpoint")


def _changed_history(folder: Path) -> None:
    path = folder / "history.csv"
    lines = path.read_text().splitlines()
    head = lines[0].split(",")
    for number, line in enumerate(lines[1:], 1):
        cells = dict(zip(head, line.split(","), strict=True))
        if cells["round"] == "2" and cells["scored_on"] == "test":
            cells["correct"] = cells["count"]
            lines[number] = ",".join(cells.values())
    path.write_text("\n".join(lines) + "\n")


def _other_learning_rate(folder: Path) -> None:
    path = folder / "config.yaml"
    lines = []
    for line in path.read_text().splitlines():
        if line.strip().startswith("learning_rate:"):
            line = line.partition(":")[0] + ": 0.5"
        lines.append(line)
    path.write_text("\n".join(lines) + "\n")


def _no_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def _cut_confusions(folder: Path) -> None:
    (folder / "confusion.jsonl").write_text("")


def _other_code(folder: Path) -> None:
    _change_summary(folder, code="0123456789abcdef")


def _torn_summary(folder: Path) -> None:
    text = (folder / "summary.json").read_text()
    (folder / "summary.json").write_text(text[: len(text) // 2])


FOLDERS = [
    (_no_checkpoint, "has no checkpoint"),
    (_another_checkpoint, "the hash of the state in the checkpoint"),
    (_changed_history, "differs: "),
    (_other_learning_rate, "the hash of the settings in config.yaml"),
    (_no_folder, "holds no"),
    (_cut_confusions, "confusion.jsonl"),
    (_other_code, "the hash of the code"),
    (_torn_summary, "summary.json"),
]


@pytest.mark.parametrize(
    ("damage", "reason"), FOLDERS, ids=[damage.__name__.strip("_").replace("_", " ") for damage, _ in FOLDERS]
)
def test_a_damaged_run_is_refused(
    damage: Callable[[Path], None], reason: str, runs: Path, board: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(final_run(runs))
    before = (board / f"{NAME}.json").read_text()
    assert submit(runs, board) == 1
    told = capsys.readouterr().err
    assert reason in told
    assert "seed-1" in told
    assert (board / f"{NAME}.json").read_text() == before


def test_scores_that_the_model_does_not_have_are_refused(
    runs: Path, board: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every file agrees with every other, but the model is another one; only scoring it again shows that."""
    folder = final_run(runs)
    path = max((folder / "checkpoint").glob("*.safetensors"))
    tensors, facts = read_tensors(path)
    for name, tensor in load_file(path).items():
        if tensor.is_floating_point() and tensor.dim() > 1:
            tensors[name] = torch.zeros_like(tensor)
    write_tensors(path, tensors, facts)
    from server.results.run import Run

    state = Run(folder).checkpoint.state.sha256()
    _change_summary(folder, state_sha256=state)
    record = read_record(runs / f"{NAME}.json")
    run = case_of(record).runs[1]
    run.state_sha256 = state
    run.accuracy = dict.fromkeys(run.accuracy, 100.0)
    run.average, run.curve = 100.0, {**run.curve, 2: 100.0}
    write_record(runs / f"{NAME}.json", record)
    _change_summary(folder, accuracy=run.accuracy)
    _perfect(folder)
    assert submit(runs, board) == 1
    assert "its model has" in capsys.readouterr().err
    assert submit(runs, board, "--no-rescore") == 0


def _perfect(folder: Path) -> None:
    """Let history and confusion counts state that every prediction of the last round was correct."""
    _changed_history(folder)
    path = folder / "confusion.jsonl"
    lines: list[str] = []
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if entry["round"] == 2:
            entry["predicted"] = entry["true"]
        lines.append(json.dumps(entry))
    path.write_text("\n".join(lines) + "\n")


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "damaged"), ('{"format": 2}', "format"), ('{"format": 1, "extra": 1}', "damaged"), ("[]", "damaged")],
    ids=["torn", "another format", "unknown entries", "no object"],
)
def test_a_damaged_record_is_named(
    text: str, reason: str, runs: Path, board: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / f"{NAME}.json").write_text(text)
    assert submit(runs, board) == 1
    told = capsys.readouterr().err
    assert reason in told
    assert f"{NAME}.json" in told


def test_what_is_missing_on_the_command_line_is_named(
    runs: Path, board: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, reason in (
        (["submit", str(runs)], "--records"),
        (["submit", str(runs), "--records", str(board)], "--by"),
        (["submit", str(tmp_path / "nowhere"), "--records", str(board), "--by", "x"], "does not exist"),
        (["submit", str(tmp_path), "--records", str(board), "--by", "x"], "no record"),
        (["submit", str(runs), "--records", str(tmp_path / "other"), "--by", "x"], "has no board"),
        (["submit", str(runs), "--records", str(board), "--by", "x", "--methods", "moon"], "no row moon"),
        (["shown", str(board)], "show"),
    ):
        assert main(["board", *words]) == 1
        assert reason in capsys.readouterr().err
