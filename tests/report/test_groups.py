"""Which runs share a table and a row; that table, report and figure agree on it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.records import change_events, run_by_other_code
from support.runs import run
from support.scored import all_groups, scored_run
from support.toy import toy_settings

from common.data.folder import Folder
from goldfinch.commands.figure import named_groups
from goldfinch.record import RunRecord, find_runs
from goldfinch.results.frames import score_sheet
from goldfinch.results.groups import ScoreTable, group_runs
from goldfinch.results.report.page import render as page_of
from goldfinch.results.table import table_text


@pytest.fixture(scope="module")
def seeds(finished_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FPL with seeds 0 and 1, and a copy of seed 0 as from another engine."""
    folder = tmp_path_factory.mktemp("seeds")
    for source, name in (("fpl-0", "seed-0"), ("fpl-1", "seed-1"), ("fpl-0", "copy")):
        shutil.copytree(finished_runs / source, folder / name)
    return folder


def boards_of(folder: Path) -> list[ScoreTable]:
    return group_runs(find_runs([str(folder)]))


def changed(source: Path, target: Path, event: str, **content: Any) -> Path:
    """Copy a run, with other content of an event."""
    shutil.copytree(source, target)
    change_events(target, event, **content)
    return target


@pytest.mark.usefixtures("undrawn")
def test_table_report_and_figure_count_the_same_runs(seeds: Path) -> None:
    (board,) = boards_of(seeds)
    (group,) = board.rows
    assert group.seeds == [0, 1]
    assert [run.folder.name for run in group.duplicates] == ["seed-0"]  # "copy" comes first by name
    average = str(group.value("average"))
    assert average in table_text([board], "final", "md")
    mean, _, deviation = average.partition(" ± ")
    assert f">{mean} <small>± {deviation}</small>" in page_of([board])
    assert [len(found.runs) for found in named_groups(find_runs([str(seeds)]))] == [2]
    assert "counts once" in " ".join(board.notes())


def test_the_same_seed_with_another_state_is_named_and_does_not_count(seeds: Path, tmp_path: Path) -> None:
    shutil.copytree(seeds / "seed-0", tmp_path / "a")
    changed(seeds / "seed-0", tmp_path / "b", "finish", sha256="0" * 64)
    (board,) = boards_of(tmp_path)
    (group,) = board.rows
    assert (len(group.runs), [run.folder.name for run in group.contradictions]) == (1, ["b"])
    assert any("another state" in note and str(tmp_path / "b") in note for note in board.notes())


def test_rows_from_different_processors_are_named(seeds: Path, tmp_path: Path) -> None:
    (board,) = boards_of(seeds)
    assert not any("processors" in note for note in board.notes())
    kept = {"model": "AMD EPYC", "instruction_set": "DEFAULT", "ATEN_CPU_CAPABILITY": "default"}
    shutil.copytree(seeds / "seed-0", tmp_path / "a")
    changed(seeds / "seed-1", tmp_path / "b", "start", processor=kept)
    (board,) = boards_of(tmp_path)
    (note,) = [note for note in board.notes() if "different processors" in note]
    assert f"AMD EPYC, DEFAULT, default: {board.rows[0].label}" in note


def test_the_card_that_clients_train_on_is_named(seeds: Path, tmp_path: Path) -> None:
    for name, device in (("a", "NVIDIA H100 (cuda:0)"), ("b", "x86_64 CPU, 1 threads")):
        changed(seeds / "seed-0", tmp_path / name, "registered", device=device)
    on_a_card, on_none = (RunRecord(tmp_path / name) for name in "ab")
    assert on_a_card.processor == f"{on_none.processor}, NVIDIA H100"
    assert on_a_card.facts.processor["card"] == "NVIDIA H100"
    assert "card" not in on_none.facts.processor


def test_joined_batches_are_under_the_table(seeds: Path, tmp_path: Path) -> None:
    changed(seeds / "seed-0", tmp_path / "a", "finish", joined_batches=["noisy-0", "bright-0"])
    (board,) = boards_of(tmp_path)
    note = board.notes()[-1]
    assert "joined the batch before it at bright-0, noisy-0" in note
    assert note in score_sheet(board, "final").notes


@pytest.mark.usefixtures("undrawn")
def test_runs_of_other_code_are_other_rows_and_marked_everywhere(seeds: Path, tmp_path: Path) -> None:
    shutil.copytree(seeds / "seed-0", tmp_path / "a")
    shutil.copytree(seeds / "seed-1", tmp_path / "b")
    code = run_by_other_code(tmp_path / "b")
    (board,) = boards_of(tmp_path)
    assert [group.seeds for group in board.rows] == [[0], [1]]
    assert f"code {code}" in board.rows[1].label
    assert "different code" in table_text([board], "final", "md")
    page = page_of(group_runs(find_runs([str(tmp_path)], finished=False)))
    leading = page[page.index('<div class="standfirst">') : page.index('<dl class="figures">')]
    assert code in leading


def test_runs_scored_on_other_images_share_neither_row_nor_table(tmp_path: Path) -> None:
    for name, samples in (("all", None), ("few", 4)):
        run(toy_settings("fpl", tmp_path / name, rounds={"test_samples": samples}))
    boards = boards_of(tmp_path)
    assert [len(board.runs) for board in boards] == [1, 1]
    assert len({board.title for board in boards}) == 2


def test_another_scoring_is_another_row(tmp_path: Path) -> None:
    for name, last in (("five", 5), ("one", 1)):
        run(toy_settings("fpl", tmp_path / name, rounds={"last_rounds": last}))
    (board,) = boards_of(tmp_path)
    assert [len(group.runs) for group in board.rows] == [1, 1]


def test_fewer_rounds_are_marked(seeds: Path, tmp_path: Path) -> None:
    shutil.copytree(seeds / "seed-0", tmp_path / "a")
    run(toy_settings("fedavg", tmp_path / "b", train={"rounds": 1}))
    (board,) = boards_of(tmp_path)
    assert [bool(group.marks) for group in board.rows] == [False, True]
    assert "1 rounds" in board.rows[1].label


def test_a_run_without_a_list_of_its_files_has_no_known_code(seeds: Path, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    shutil.copytree(seeds / "seed-0", folder)
    assert RunRecord(folder).code == json.loads((folder / "summary.json").read_text())["code"]
    (folder / "code.json").unlink()
    assert RunRecord(folder).code == "unknown"


@pytest.mark.parametrize(
    ("pairs", "rows"),
    [
        ([(0, 0), (1, 0), (2, 0)], [[0, 1, 2]]),
        ([(0, 0), (1, 1), (2, 2)], [[0, 1, 2]]),
        ([(0, None), (1, None)], [[0, 1]]),
        ([(0, 5), (1, 6)], [[0], [1]]),
        ([(0, 0), (1, 0), (2, 2)], [[0, 1], [2]]),
    ],
    ids=["one partition", "the seed's own", "the run's seed by default", "two others", "two kinds"],
)
def test_a_partition_that_follows_the_seed_is_one_row(
    pairs: list[tuple[int, int | None]], rows: list[list[int]]
) -> None:
    runs: list[RunRecord] = []
    for seed, partition in pairs:
        settings = {"protocol.partition_seed": partition}
        runs.append(scored_run(50.0 + len(runs), seed=seed, settings=settings))
    assert sorted(group.seeds for group in all_groups(runs)) == rows


def test_runs_on_other_images_of_one_s_own_share_no_table(tmp_path: Path) -> None:
    """Whatever the file in conf/data/ is called."""
    runs: list[RunRecord] = []
    for seed, root in enumerate(("images", "images", "others")):
        data = Folder(domains=("a", "b"), classes=("x", "y"), root=str(tmp_path / root))
        run = scored_run(50.0 + seed, seed=seed)
        del vars(run)["options"]
        vars(run)["config"] = toy_settings("fedavg", tmp_path, data=data).raw
        runs.append(run)
    tables = group_runs(runs)
    assert [len(table.rows[0].runs) for table in tables] == [2, 1]
    assert [str(tmp_path / root) in table.title for table, root in zip(tables, ("images", "others"), strict=True)]
