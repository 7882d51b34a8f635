"""A running, a resumed and a finished run are read alike: rules and metrics are computed from the records."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from common.metrics import METRICS
from common.scores import RunScores
from goldfinch.record import RunRecord
from server.run.schema import read_lines
from tests.support.runs import Run, run
from tests.support.toy import toy_settings

MEASURED = ("protocol.validation=0.2", "rounds.scores=true", "rounds.metric=macro_f1")


def measured(folder: Path, rounds: int = 4, **more: Any) -> Run:
    stop_after = more.pop("stop_after", None)
    settings = toy_settings("fedavg", folder, overrides=MEASURED, train={"rounds": rounds}, **more)
    return run(settings, stop_after=stop_after)


def by_metric(folder: Path) -> dict[str, Mapping[str, Any]]:
    """The rules of every metric."""
    found = RunRecord(folder)
    return {metric: found.by_metric(metric).rules for metric in found.measures}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return measured(tmp_path_factory.mktemp("whole"))


def test_the_rules_of_the_records_are_those_of_the_summary(whole: Run) -> None:
    found = RunRecord(whole.folder)
    events = read_lines(whole.folder / "events.jsonl")
    scores = RunScores(found.score_lines, events, chosen_by="macro_f1")
    assert scores.rules(int(found.config["rounds"]["last_rounds"])) == whole.summary["scores"]
    for name, entry in whole.summary["metrics"].items():
        assert found.by_metric(name).round_scores[-1].accuracy == entry["domains"]


def test_a_run_without_its_summary_has_the_same_rules(whole: Run, tmp_path: Path) -> None:
    shutil.copytree(whole.folder, tmp_path / "copy")
    (tmp_path / "copy" / "summary.json").unlink()
    copy = RunRecord(tmp_path / "copy")
    assert copy.status == "finished"
    assert by_metric(copy.folder) == by_metric(whole.folder)
    assert set(METRICS) < set(copy.measures)


def test_a_resumed_run_has_the_rules_of_an_uninterrupted_one(whole: Run, tmp_path: Path) -> None:
    measured(tmp_path, stop_after=2)
    stopped = by_metric(tmp_path)
    assert stopped["accuracy"]["final"]["round"] == 1, "the state after round 2 is not scored yet"
    measured(tmp_path, resume=True)
    assert by_metric(tmp_path) == by_metric(whole.folder)
