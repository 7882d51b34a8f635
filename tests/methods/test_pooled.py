"""Pooled: one client holds all images. Both bounds of a table: their marks, and that they are never ranked."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.container import BarContainer
from support.boards import read_runs
from support.records import rewrite
from support.runs import Run, run
from support.toy import DOMAINS, TRAIN, method_at_defaults, toy_settings

from common.choices import choices_of
from common.data.protocols import ClientSpec
from common.errors import ConfigError
from common.settings import check_deployable, load_settings
from goldfinch.record import RunRecord
from goldfinch.results.frames import score_frame, score_sheet, starred_bounds
from goldfinch.results.groups import ScoreTable, group_runs
from goldfinch.results.rows import best_row, comparable, ranked
from goldfinch.run_model import RunModel
from goldfinch.study.ranking import StudyRun, marked_name, rank_methods, ranked_table, runs_csv
from server.engines.inline import InlineEngine
from server.run.rounds import RoundLoop

# ---- what it trains on -----------------------------------------------------------------------------------------------


def test_one_client_has_the_images_of_all_and_scores_all_domains(tmp_path: Path) -> None:
    done = run(toy_settings("pooled", tmp_path))
    assert done.summary["clients"] == {"pooled-0": sum(TRAIN.values())}
    assert set(done.summary["accuracy"]) == set(DOMAINS)
    assert done.summary["unseen"] == []
    assert done.summary["images"] == dict.fromkeys(DOMAINS, 16), "the test images of the other rows"


def test_it_holds_what_the_clients_of_the_protocol_hold(tmp_path: Path) -> None:
    record = RunModel(RunRecord(tmp_path))
    settings = toy_settings("pooled", tmp_path, overrides=("protocol.fraction=0.5", "protocol.validation=0.2"))
    record.__dict__["settings"] = settings
    (client,) = record.clients
    parts = [record.train_split(spec) for spec in client.others]
    validation = [record.validation_split(spec) for spec in client.others]
    whole = record.train_split(client)
    assert torch.equal(whole.images, torch.cat([part.images for part in parts]))
    assert torch.equal(whole.labels, torch.cat([part.labels for part in parts]))
    assert len(record.validation_split(client)) == sum(map(len, validation)) > 0
    assert client.holds == client.others == tuple(ClientSpec(name, 0) for name in DOMAINS)
    assert ClientSpec("dark", 0).holds == (ClientSpec("dark", 0),)


def test_it_takes_the_steps_of_all_clients_together(tmp_path: Path) -> None:
    """Batches of 8: 25, 24 and 18 samples are 3 batches each (a last one of one sample joins), and 9 in one place."""
    alone = run(toy_settings("fedavg", tmp_path / "fedavg", train={"epochs": 3}))
    together = run(toy_settings("pooled", tmp_path / "pooled", train={"epochs": 3}))

    def steps(done: Run) -> list[int]:
        return [int(row["steps"]) for row in done.replies() if row["round"] == "1" and row["status"] == "trained"]

    assert steps(together) == [3 * 9] == [sum(steps(alone))]
    limited = run(toy_settings("pooled", tmp_path / "limited", train={"local_steps": 2}))
    assert steps(limited) == [2 * len(DOMAINS)]


def test_a_validated_run_chooses_its_round_by_all_validation_samples(tmp_path: Path) -> None:
    done = run(toy_settings("pooled", tmp_path, overrides=("protocol.validation=0.2",), train={"rounds": 3}))
    assert done.summary["validation"]["missing"] == {}
    assert "validated" in done.summary["scores"]


# ---- only simulated --------------------------------------------------------------------------------------------------

BOUNDS = [name for name in choices_of("method") if method_at_defaults(name).bound]


def test_the_bounds_are_one_of_each_kind() -> None:
    assert {name: method_at_defaults(name).bound for name in BOUNDS} == {"pooled": "upper", "single_set": "lower"}


@pytest.mark.parametrize("method", BOUNDS)
def test_a_deployment_refuses_a_bound(method: str, tmp_path: Path) -> None:
    settings = toy_settings(method, tmp_path)
    with pytest.raises(ConfigError, match=f"method={method} .*only simulated: set engine=inline"):
        check_deployable(settings)
    engine = InlineEngine(settings)
    engine.simulated = False
    with pytest.raises(ConfigError, match="only simulated"):
        RoundLoop(settings, engine)
    engine.close()


def test_it_is_refused_under_privacy() -> None:
    with pytest.raises(ConfigError, match=r"one place.*privacy=none"):
        load_settings(["method=pooled", "data=glyphs", "privacy=gaussian"])


# ---- in a table ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> ScoreTable:
    folder = tmp_path_factory.mktemp("bounds")
    found = []
    for method in ("pooled", "single_set", "fedavg", "fedprox"):
        done = run(toy_settings(method, folder / method, train={"rounds": 1}))
        found.append(RunRecord(done.folder))
    (only,) = group_runs(found)
    return only


def test_bounds_are_marked_and_come_last_and_are_never_ranked_or_best(board: ScoreTable) -> None:
    assert [group.label for group in board.rows] == [
        "fedavg",
        "fedprox",
        "single_set (lower bound)",
        "pooled (upper bound)",
    ]
    assert board.bounds == {"single_set (lower bound)": "lower", "pooled (upper bound)": "upper"}
    names = {group.label for group in comparable(board.rows)}
    assert names == {"fedavg", "fedprox"} == {group.label for group in ranked(board.rows)}
    assert best_row([group for group in board.rows if group.bound]) is None
    frame = score_frame(board, "final")
    assert not frame[frame["method"].isin(board.bounds)]["best"].any()
    sheet = score_sheet(board, "final")
    assert [row[-1] for row in sheet.rows[2:]] == ["-", "-"], "no bytes"
    assert any("bounds, never ranked" in note for note in sheet.notes)


def test_an_unfinished_run_of_a_bound_is_one_too(board: ScoreTable, tmp_path: Path) -> None:
    shutil.copytree(board.rows[-1].runs[0].folder, tmp_path / "run")
    rewrite(tmp_path / "run" / "events.jsonl", lambda line: None if line["event"] == "finish" else line)
    unfinished = RunRecord(tmp_path / "run")
    assert not unfinished.ended
    assert unfinished.bound == "upper"


def test_bounds_are_lines_in_figures(board: ScoreTable) -> None:
    from goldfinch.commands.figure import bars_of, curves_of

    bars = bars_of(board.runs, "final").axes[0]
    assert [each.get_label() for each in bars.containers if isinstance(each, BarContainer)] == ["fedavg", "fedprox"]
    assert {str(lines.get_label()) for lines in bars.collections} >= set(starred_bounds(board.rows))
    lines = {str(line.get_label()): line for line in curves_of(board.runs).axes[0].get_lines()}
    assert lines["pooled (upper bound)"].get_linestyle() == "--"
    assert lines["single_set (lower bound) *"].get_linestyle() == ":"
    assert lines["pooled (upper bound)"].get_marker() == "None"


@pytest.mark.long
def test_the_report_names_them_and_ranks_none(board: ScoreTable) -> None:
    from goldfinch.results.report.page import render

    (two,) = group_runs([board.rows[0].runs[0], board.rows[-1].runs[0]])
    page = render([two])
    assert "pooled (upper bound)" in page
    assert "<strong>pooled" not in page
    assert "bounds, never ranked" in page


def final(method: str, study: int, score: float, bound: str = "") -> StudyRun:
    values = {"train.learning_rate": 0.1}
    return StudyRun(
        "b", method, "in_domain", study, "final", study, "complete", score, 2, 1.0, values, {"a": score}, bound=bound
    )


def test_a_comparison_never_ranks_or_tests_a_bound(tmp_path: Path) -> None:
    runs: list[StudyRun] = []
    for study in range(3):
        runs.append(final("pooled", study, 99.0 + study / 10, "upper"))
        runs.append(final("moon", study, 70.0 + study))
        runs.append(final("fpl", study, 80.0 + 2 * study))
        runs.append(replace(final("single_set", study, 20.0, "lower"), scored="own model"))
    (table,) = rank_methods(runs)
    assert table.base == "moon", "a bound is no base"
    assert [(marked_name(row), row.rank) for row in table.rows] == [
        ("fpl", 1), ("moon", 2), ("single_set (lower bound) *", None), ("pooled (upper bound)", None)
    ]  # fmt: skip
    bounds = [row for row in table.rows if row.bound]
    assert [(row.difference, row.p) for row in bounds] == [(None, None), (None, None)]
    tested = next(row for row in table.rows if row.label == "fpl")
    assert tested.difference is not None
    assert tested.p == tested.difference.p, "Holm's family has one test"
    (tmp_path / "runs.csv").write_text(runs_csv(runs))
    assert read_runs(tmp_path / "runs.csv") == runs
    assert "single_set, pooled: bounds, never ranked or tested" in ranked_table(table)
