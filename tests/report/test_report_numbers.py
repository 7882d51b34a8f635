"""The report's numbers, against the runs' files and cases by hand."""

from __future__ import annotations

import json
import statistics
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.runs import run
from support.toy import DOMAINS, toy_settings

from server.results.groups import group_runs
from server.results.report.page import write_report
from server.results.report.plots import (
    AVERAGE,
    WORST,
    accuracy_against_bytes,
    accuracy_bars,
    band,
    confusion_data,
    costs,
    losses,
    over_rounds,
    train_losses,
)
from server.results.report.results import client_rows, cost, metric_boards, score_rows
from server.results.run import find_runs


def test_scores_are_those_of_the_summaries(boards: Any) -> None:
    group = boards[0].groups[1]
    for rule in ("final", "last_n", "best_round"):
        summaries = [run.summary["scores"][rule] for run in group.runs]
        for column in ("average", "worst", "spread"):
            assert group.values(column, rule) == pytest.approx([entry[column] for entry in summaries])
        for domain in DOMAINS:
            expected = statistics.fmean(entry["accuracy"][domain] for entry in summaries)
            assert group.value(f"domain:{domain}", rule).mean == pytest.approx(expected)


def test_bands_have_the_rounds_that_every_seed_has() -> None:
    """A later round of one seed, after an average over several, would be a step between two quantities."""
    found = band([{0: 1.0, 1: 2.0}, {0: 3.0, 1: 6.0, 2: 9.0}])
    assert found == {"x": [0, 1], "y": [2.0, 4.0], "sd": pytest.approx([2**0.5, 8**0.5], rel=1e-5)}
    assert band([{4: 1.5}]) == {"x": [4], "y": [1.5], "sd": [None]}


def line(plot: Any, **fields: str) -> Any:
    (found,) = [row for row in plot["rows"] if fields.items() <= row.items()]
    return found


def test_curves_end_where_the_table_does(boards: Any) -> None:
    group, plot = boards[0].groups[1], over_rounds(boards[0])
    average = line(plot, method="FPL (seeds 0,1,2)", domain=AVERAGE, measure="Test accuracy in %")
    assert average["x"] == [0, 2, 3, 4], "in one run the dark domain was not scored after round 1"
    assert average["y"][-1] == pytest.approx(group.value("average").mean, rel=1e-5)
    worst = line(plot, method="FPL (seeds 0,1,2)", domain=WORST, measure="Test accuracy in %")
    assert worst["y"][-1] == pytest.approx(group.value("worst").mean, rel=1e-5)
    assert {row["term"] for row in losses(boards[0])["rows"]} == {"cross entropy", "contrast", "consistency"}
    assert line(costs(boards[0]), method="FPL (seeds 0,1,2)", cost="bytes up a round")["x"] == [1, 2, 3, 4]


def test_other_metrics_have_curves_that_end_where_their_tables_do(boards: Any) -> None:
    plot, others = over_rounds(boards[0]), dict(metric_boards(boards[0]))
    assert plot["measures"][2:] == [f"{name[0].upper()}{name[1:]} in %" for name in others]
    for name, other in others.items():
        group = other.groups[1]
        measure = f"{name[0].upper()}{name[1:]} in %"
        for domain in DOMAINS:
            curve = line(plot, method=group.label, domain=domain, measure=measure)
            assert curve["y"][-1] == pytest.approx(group.value(f"domain:{domain}").mean, rel=1e-5)


@pytest.mark.parametrize("rule", ["final", "best_round"])
def test_bars_and_points_are_the_means_and_deviations_of_the_table(boards: Any, rule: str) -> None:
    (board,) = boards
    plot = accuracy_bars(board, rule)
    assert plot["groups"] == [*DOMAINS, "average", "worst"]
    for group, (_, cells) in zip(board.groups, score_rows(board, rule), strict=True):
        bar, point = line(plot, method=group.label), line(accuracy_against_bytes(board, rule), method=group.label)
        assert bar["y"] == [cell["mean"] for cell in cells[:-1]]
        assert bar["sd"] == [cell["std"] for cell in cells[:-1]]
        assert (point["y"], point["sd"]) == (bar["y"][-2:-1], bar["sd"][-2:-1])
        traffic = [run.summary["bytes"]["up"] + run.summary["bytes"]["down"] for run in group.runs]
        assert point["x"] == [pytest.approx(statistics.fmean(traffic))]


def test_scores_on_own_models_are_marked_and_not_ranked_with_those_on_one(boards: Any, tmp_path: Path) -> None:
    for method in ("fedavg", "fpl", "fedbn"):
        run(toy_settings(method, tmp_path / method, train={"rounds": 1}))
    own = tmp_path / "fedbn" / "summary.json"  # the best of all, on models of its own
    summary = json.loads(own.read_text())
    assert summary["scored"] == "own model"
    (board,) = group_runs(find_runs([str(tmp_path)], finished=False), name=attrgetter("title"))
    rows = {group.label: cells for group, cells in score_rows(board, "final")}
    assert not any(cell["best"] for cells in rows.values() for cell in cells), "one seed tells none apart"
    page = write_report([str(tmp_path)]).read_text()
    assert "FedBN <small>own models</small>" in page
    assert "FPL <small>own models</small>" not in page
    assert "a bold figure is the best of one kind only" in page


def test_loss_terms_are_weighted_by_samples(boards: Any) -> None:
    record = boards[0].groups[0].runs[0]
    rows = [row for row in record.replies if row["round"] == 3 and row["status"] in ("trained", "scaled")]
    total = sum(float(row["samples"]) for row in rows)
    expected = sum(float(row["samples"]) * row["losses"]["cross_entropy"] for row in rows) / total
    assert train_losses(record)["cross entropy"][3] == pytest.approx(expected)


def test_confusion_matrices_agree_with_the_scores(boards: Any) -> None:
    record = boards[0].groups[1].runs[0]
    found = confusion_data(record)
    assert found is not None
    classes = len(record.class_names)
    for position, number in enumerate(found["rounds"]):
        score = next(entry for entry in record.round_scores if entry.round == number)
        for domain, frames in found["domains"].items():
            matrix = np.array(frames[position]).reshape(classes, classes)
            assert 100 * np.trace(matrix) / matrix.sum() == pytest.approx(score.accuracy[domain])


def test_clients_add_up_to_the_run(boards: Any) -> None:
    record = boards[0].groups[1].runs[2]
    rows = client_rows(record)
    assert sum(row["up"] for row in rows) == record.summary["bytes"]["up"]
    assert {row["client"]: row["samples"] for row in rows} == record.summary["clients"]
    dark = next(row for row in rows if row["domain"] == "dark")
    assert (dark["trained"], dark["scaled"], dark["unused"]) == (3, 0, 1)
    total = sum(cost(record)["bytes"].values())
    assert total == pytest.approx(record.summary["bytes"]["up"] + record.summary["bytes"]["down"])
