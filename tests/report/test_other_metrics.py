"""Tables of other metrics than accuracy, from the confusion counts that a run records."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, balanced_accuracy_score, f1_score, recall_score
from support.toy import DOMAINS

import goldfinch as gf
from common.errors import ConfigError
from common.metrics import COUNTED, METRICS, ClassTotals
from goldfinch.cli import main
from goldfinch.record import find_runs
from goldfinch.results.groups import group_runs
from goldfinch.results.report.page import render
from goldfinch.results.report.results import metric_tables
from server.run.schema import read_lines
from tests.support.records import without_counts


@pytest.fixture(scope="module")
def folder(finished_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedAvg with two seeds."""
    folder = tmp_path_factory.mktemp("metrics")
    for seed in ("0", "1"):
        shutil.copytree(finished_runs / f"fedavg-{seed}", folder / seed)
    return folder


def images_of(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The true and the predicted class of each image."""
    true, predicted = np.indices(counts.shape)
    return true.repeat(counts.ravel()), predicted.repeat(counts.ravel())


@given(
    st.integers(2, 5).flatmap(
        lambda size: st.lists(st.lists(st.integers(0, 9), min_size=size, max_size=size), min_size=size, max_size=size)
    )
)
def test_metrics_are_those_of_scikit_learn(counts: list[list[int]]) -> None:
    counts[0][0] += 1  # at least one image
    true, predicted = images_of(np.array(counts))
    present = sorted(set(true))
    expected = {
        "accuracy": accuracy_score(true, predicted),
        "balanced_accuracy": np.mean(recall_score(true, predicted, labels=present, average=None, zero_division=0)),
        "macro_f1": f1_score(true, predicted, average="macro", zero_division=0),
        "worst_class": min(recall_score(true, predicted, labels=present, average=None, zero_division=0)),
    }
    if len(present) > 1:
        assert expected["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(true, predicted))
    for metric in METRICS:
        assert ClassTotals.of(counts).metric(metric) == pytest.approx(100 * expected[metric]), metric


@pytest.mark.parametrize("metric", list(METRICS))
def test_a_table_of_a_metric_is_that_of_the_counts(
    folder: Path, metric: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["table", str(folder), "--format", "json", "--metric", metric]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert table["metric"] == metric
    runs = gf.load_runs(folder)
    for domain in DOMAINS:
        values = [run.metrics().loc[domain, metric] for run in runs]
        assert table["rows"][0]["scores"][domain]["mean"] == pytest.approx(np.mean(values), abs=1e-3)
    frame = gf.table(runs, metric=metric, values="mean")
    assert frame[DOMAINS[0]].iloc[0] == pytest.approx(table["rows"][0]["scores"][DOMAINS[0]]["mean"])


def test_the_records_hold_the_metrics_of_every_score(folder: Path) -> None:
    record = gf.load_run(folder / "0")
    for row in record.history.to_dict("records"):
        true, predicted = images_of(record.confusion(row["domain"], row["round"]).to_numpy())
        assert row["balanced_accuracy"] == pytest.approx(100 * balanced_accuracy_score(true, predicted), abs=1e-4)
        assert row["macro_f1"] == pytest.approx(100 * f1_score(true, predicted, average="macro"), abs=1e-4)
        assert row["worst_class"] == pytest.approx(100 * min(recall_score(true, predicted, average=None)), abs=1e-4)


@pytest.mark.usefixtures("undrawn")
def test_the_report_has_a_table_of_each_metric_where_counts_are_recorded(folder: Path, tmp_path: Path) -> None:
    page = render(group_runs(find_runs([str(folder)])))
    for metric in COUNTED:
        assert f"{METRICS[metric]} in %, after the last scored round" in page
        mean = np.mean([run.metrics()[metric].mean() for run in gf.load_runs(folder)])
        assert f"{mean:.2f}" in page
    shutil.copytree(folder, tmp_path / "copy")
    without_counts(tmp_path / "copy/1")
    (board,) = group_runs(find_runs([str(tmp_path / "copy")]))
    assert metric_tables(board) == []


@pytest.mark.parametrize(
    ("second", "complaint"),
    [((4, [1], [9]), "not below classes"), ((10, [9], [1]), "another number than in the first")],
    ids=["a class that does not exist", "other classes"],
)
def test_counts_of_impossible_classes_are_refused(
    second: tuple[int, list[int], list[int]], complaint: str, tmp_path: Path
) -> None:
    lines: list[str] = []
    for classes, true, predicted in ((4, [1], [3]), second):
        line = {"round": 0, "client": "a-0", "domain": "a", "scored_on": "test", "count": 2, "correct": 0, "loss": 1.0}
        cells = {"classes": classes, "true": true, "predicted": predicted, "count": [2]}
        lines.append(json.dumps(line | {"confusion": cells}))
    (tmp_path / "scores.jsonl").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=complaint):
        read_lines(tmp_path / "scores.jsonl")


def test_a_table_names_its_metric_and_one_without_counts_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["table", str(folder), "--metric", "macro_f1"]) == 0
    assert "macro F1 in %" in capsys.readouterr().out
    shutil.copytree(folder / "0", tmp_path / "run")
    without_counts(tmp_path / "run")
    assert main(["table", str(tmp_path)]) == 0
    assert main(["table", str(tmp_path), "--metric", "macro_f1"]) == 1
    assert "--metric accuracy" in capsys.readouterr().err
    with pytest.raises(gf.GoldfinchError, match="metric f1: choices: accuracy"):
        gf.load_runs(tmp_path).table(metric="f1")
