"""Tables of other metrics than accuracy, from the confusion counts that a run records."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, balanced_accuracy_score, f1_score, recall_score
from support.runs import run
from support.toy import DOMAINS, toy_settings

import goldfinch as gf
from common.metrics import METRICS, metric_of
from server.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("metrics")
    for seed in (0, 1):
        run(toy_settings("fedavg", folder / str(seed), seed=seed))
    return folder


@given(
    st.integers(2, 5).flatmap(
        lambda size: st.lists(st.lists(st.integers(0, 9), min_size=size, max_size=size), min_size=size, max_size=size)
    )
)
def test_metrics_are_those_of_scikit_learn(counts: list[list[int]]) -> None:
    counts[0][0] += 1  # at least one image
    true: list[int] = []
    predicted: list[int] = []
    for label, row in enumerate(counts):
        for guess, count in enumerate(row):
            true += [label] * count
            predicted += [guess] * count
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
        assert metric_of(counts, metric) == pytest.approx(100 * expected[metric]), metric


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
    frame = gf.compare(runs, metric=metric, values="mean")
    assert frame[DOMAINS[0]].iloc[0] == pytest.approx(table["rows"][0]["scores"][DOMAINS[0]]["mean"])


def test_a_table_names_its_metric(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", str(folder), "--metric", "macro_f1"]) == 0
    assert "macro F1 in %" in capsys.readouterr().out


def test_a_metric_without_counts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(toy_settings("fedavg", tmp_path / "run"))
    (tmp_path / "run" / "confusion.jsonl").unlink()
    assert main(["table", str(tmp_path)]) == 0
    assert main(["table", str(tmp_path), "--metric", "macro_f1"]) == 1
    assert "--metric accuracy" in capsys.readouterr().err
    with pytest.raises(gf.GoldfinchError, match="choose one of"):
        gf.compare([gf.load_run(tmp_path / "run")], metric="f1")  # type: ignore[arg-type]
