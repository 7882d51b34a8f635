"""The report's numbers, against the runs' files and cases by hand."""

from __future__ import annotations

import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.runs import run
from support.toy import DOMAINS, toy_settings

from common.metrics import Measure
from goldfinch.record import RunRecord
from goldfinch.results.curves import AVERAGE, WORST, train_losses
from goldfinch.results.report.figures import (
    Shown,
    accuracy_against_bytes,
    accuracy_bars,
    class_samples,
    confusion_counts,
    costs,
    losses,
    other_metrics,
    over_rounds,
)
from goldfinch.results.report.page import write_report
from goldfinch.results.report.results import client_rows, cost, metric_tables, score_rows, worst_domain
from goldfinch.results.seeds import by_round


def test_scores_are_those_of_the_summaries(boards: Any) -> None:
    group = boards[0].rows[1]
    for rule in ("final", "last_n", "best_round"):
        summaries = [run.summary["scores"][rule] for run in group.runs]
        for column in ("average", "worst", "spread"):
            assert list(group.scores(column, rule).values()) == pytest.approx([entry[column] for entry in summaries])
        for domain in DOMAINS:
            expected = statistics.fmean(entry["accuracy"][domain] for entry in summaries)
            assert group.value(f"domain:{domain}", rule).mean == pytest.approx(expected)


def test_means_have_the_rounds_that_every_seed_has() -> None:
    """A later round of one seed, after an average over several, would be a step between two quantities."""
    found = by_round([{0: 1.0, 1: 2.0}, {0: 3.0, 1: 6.0, 2: 9.0}])
    assert {number: value.mean for number, value in found.items()} == {0: 2.0, 1: 4.0}
    assert [value.deviation for value in found.values()] == pytest.approx([2**0.5, 8**0.5], rel=1e-5)
    assert by_round([{4: 1.5}])[4].deviation is None


def lines(shown: Shown, panel: str = "") -> dict[str, np.ndarray]:
    """The points of each line of a panel."""
    (drawing,) = (each.drawing for each in shown.panels if each.name == panel)
    return {str(line.get_label()): line.get_xydata() for line in drawing.axes[0].get_lines()}


def test_curves_end_where_the_table_does(boards: Any) -> None:
    group = boards[0].rows[1]
    average, domains, *_ = over_rounds(boards[0])
    drawn = lines(average)[group.label]
    assert drawn[:, 0].tolist() == [0, 2, 3, 4], "in one run the dark domain was not scored after round 1"
    assert drawn[-1, 1] == pytest.approx(group.value("average").mean, rel=1e-5)
    assert lines(domains, WORST)[group.label][-1, 1] == pytest.approx(group.value("worst").mean, rel=1e-5)
    assert f"{group.label} {drawn[-1, 1]:.4g} in round 4" in average.panels[0].description
    (terms,) = losses(boards[0])
    assert {panel.name for panel in terms.panels} == {"cross entropy", "contrast", "consistency"}
    (cost_of,) = costs(boards[0])
    assert lines(cost_of, "MB up a round")[group.label][:, 0].tolist() == [1, 2, 3, 4]


def test_other_metrics_have_curves_that_end_where_their_tables_do(boards: Any) -> None:
    figures, others = other_metrics(boards[0]), metric_tables(boards[0])
    assert len(figures) == len(others) > 0
    for shown, (name, other) in zip(figures, others, strict=True):
        assert shown.caption.startswith(f"{name[0].upper()}{name[1:]} in %")
        group = other.rows[1]
        assert lines(shown, AVERAGE)[group.label][-1, 1] == pytest.approx(group.value("average").mean, rel=1e-5)


def test_the_curves_of_a_metric_have_its_unit_and_say_if_lower_is_better(
    boards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunRecord, "measure", Measure("Brier score", "", lower_is_better=True))
    for shown in other_metrics(boards[0]):
        assert shown.caption.startswith("Brier score (lower is better)")
        assert "%" not in shown.caption


def test_bars_and_points_are_the_means_and_deviations_of_the_table(boards: Any) -> None:
    (board,) = boards
    bars, points = accuracy_bars(board), accuracy_against_bytes(board)
    for group, (_, cells) in zip(board.rows, score_rows(board, "final"), strict=True):
        words = ", ".join(f"{cell['head']} {cell['mean']:.1f}" for cell in cells[:-1])
        assert f"{group.label}: {words}." in bars.panels[0].description
        traffic = statistics.fmean([run.summary["bytes"]["up"] + run.summary["bytes"]["down"] for run in group.runs])
        assert f"{group.label}: {cells[-3]['mean']:.1f} % at {traffic / 1e6:.4g} MB." in points.panels[0].description
    heights = [patch.get_height() for patch in bars.panels[0].drawing.axes[0].patches]
    assert heights == [cell["mean"] for _, cells in score_rows(board, "final") for cell in cells[:-1]]


@pytest.mark.usefixtures("undrawn")
def test_scores_on_own_models_are_marked(finished_runs: Path, tmp_path: Path) -> None:
    run(toy_settings("fedbn", tmp_path / "fedbn", train={"rounds": 1}))
    page = write_report([str(tmp_path), str(finished_runs / "fpl-0")]).read_text()
    assert "FedBN <small>own models</small>" in page
    assert "FPL <small>own models</small>" not in page
    assert "best of one kind only" in page


def test_loss_terms_are_weighted_by_samples(boards: Any) -> None:
    record = boards[0].rows[0].runs[0]
    rows = [row for row in record.replies if row["round"] == 3 and row["status"] in ("trained", "scaled")]
    total = sum(float(row["samples"]) for row in rows)
    expected = sum(float(row["samples"]) * row["losses"]["cross_entropy"] for row in rows) / total
    assert train_losses(record)["cross entropy"][3] == pytest.approx(expected)


def test_confusion_matrices_agree_with_the_scores(boards: Any) -> None:
    record = boards[0].rows[1].runs[0]
    number, found = confusion_counts(record)
    score = next(entry for entry in record.round_scores if entry.round == number)
    assert (number, set(found)) == (4, set(score.accuracy))
    for domain, matrix in found.items():
        assert 100 * np.trace(matrix) / matrix.sum() == pytest.approx(score.accuracy[domain])


def test_the_samples_of_clients_are_drawn_by_class(boards: Any) -> None:
    record = boards[0].rows[1].runs[0]
    shown = class_samples(record)
    assert shown is not None
    told = shown.panels[0].description
    for client, entry in record.registrations.items():
        classes = sum(count > 0 for count in entry["class_counts"])
        assert f"{client} has {sum(entry['class_counts'])} of {classes} classes" in told


def test_clients_add_up_to_the_run(boards: Any) -> None:
    record = boards[0].rows[1].runs[2]
    rows = client_rows(record)
    assert sum(row["up"] for row in rows) == record.summary["bytes"]["up"]
    assert {row["client"]: row["samples"] for row in rows} == record.summary["clients"]
    dark = next(row for row in rows if row["domain"] == "dark")
    assert (dark["trained"], dark["scaled"], dark["unused"]) == (3, 0, 1)
    total = sum(cost(record)["bytes"].values())
    assert total == pytest.approx(record.summary["bytes"]["up"] + record.summary["bytes"]["down"])


def test_all_domains_that_tie_for_the_worst_are_named() -> None:
    means = {"domain:bright": 80.0, "domain:dark": 62.5, "domain:noisy": 62.5}
    row: Any = SimpleNamespace(value=lambda name: SimpleNamespace(mean=means[name]))
    assert worst_domain(row, ("bright", "dark", "noisy")) == "dark and noisy"
    assert worst_domain(row, ("bright", "dark")) == "dark"
