"""``summary.json`` repeats a run's other files: it can be made again, and nothing that Goldfinch shows reads it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.runs import TouchedEngine, run
from support.toy import attacked_settings, toy_settings

import goldfinch as gf
from common.choices import trust
from common.errors import EngineError
from common.settings import RunSettings
from common.storage import write_json
from common.wire.messages import Request
from goldfinch.cli import main
from goldfinch.record import RunRecord, find_runs
from goldfinch.results.report.page import write_report
from server.run.schema import read_lines
from server.run.summary import summary_of

COVERED = ("privacy=gaussian", "privacy.randomness=system", "privacy.update_clip=1")


def plain(folder: Path) -> None:
    run(toy_settings("fpl", folder))


def personal(folder: Path) -> None:
    run(toy_settings("fedbn", folder))


def resumed(folder: Path) -> None:
    run(toy_settings("fedavg", folder, train={"rounds": 3}), stop_after=1)
    run(toy_settings("fedavg", folder, train={"rounds": 3}, resume=True))


def longer(folder: Path) -> None:
    run(toy_settings("fedavg", folder))
    run(toy_settings("fedavg", folder, train={"rounds": 3}, resume=True))


def stopped(folder: Path) -> None:
    run(toy_settings("fedprox", folder, train={"rounds": 3}), stop_after=2)


def early(folder: Path) -> None:
    chosen = ("protocol.validation=0.2", "train.patience=1", "rounds.metric=macro_f1")
    run(toy_settings("fedavg", folder, overrides=chosen, train={"rounds": 6, "patience": 1, "learning_rate": 1e-6}))


def own_metric(folder: Path) -> None:
    trust(["support.own_metrics.ClassF1"])
    metric = ("own_metric=support.own_metrics.ClassF1", "own_metric.label=1", "rounds.scores=true")
    chosen = (*metric, "protocol.validation=0.2")
    run(toy_settings("fedavg", folder, overrides=chosen))


def attacked(folder: Path) -> None:
    run(attacked_settings("sign_flip", "fedavg", folder, ()))


def bound(folder: Path) -> None:
    run(toy_settings("pooled", folder))


def private(folder: Path) -> None:
    pytest.importorskip("opacus")
    run(toy_settings("fedavg", folder, overrides=COVERED))


def failing(folder: Path, fails: Callable[[Request], bool], **rounds: Any) -> None:
    settings: RunSettings = toy_settings("fedavg", folder, train={"rounds": 3}, rounds=rounds)
    run(settings, TouchedEngine(settings, failing=fails))


def skipping(folder: Path) -> None:
    failing(folder, lambda request: request.client == "dark-0" and request.round == 2, quorum=1.0)


def partial(folder: Path) -> None:
    failing(folder, lambda request: request.client == "dark-0" and request.round >= 3)


def unscored(folder: Path) -> None:
    with pytest.raises(EngineError, match="no final score"):
        failing(folder, lambda request: request.round > 3)


def broken(folder: Path) -> None:
    with pytest.raises(EngineError, match="raised the same"):
        failing(folder, lambda request: request.round == 2)


KINDS = (plain, personal, resumed, longer, stopped, early, own_metric, attacked, bound, private, skipping, partial)
KINDS += (unscored, broken)
UNFINISHED = ("broken",)
"""Kinds that end by an error in the midst of a round, and so have no summary."""


@pytest.fixture(scope="module", params=KINDS, ids=[kind.__name__ for kind in KINDS])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded run of each kind."""
    folder = tmp_path_factory.mktemp("recorded") / request.param.__name__
    request.param(folder)
    return folder


def values(folder: Path) -> dict[str, Any]:
    """What Python returns of a run."""
    found = gf.load_run(folder)
    told: dict[str, Any] = {"finished": found.finished, "summary": dict(found.summary), "sha256": found.sha256}
    told |= {"method": found.method, "seed": found.seed, "shown": repr(found)}
    told |= {name: getattr(found, name).to_csv() for name in ("history", "scores", "replies")}
    if "final" in RunRecord(folder).rules:
        told |= {"accuracy": found.accuracy, "average": f"{found.average}", "worst": f"{found.worst}"}
        told |= {"metrics": found.metrics().to_csv(), "recall": found.recall().to_csv(), "missing": found.missing}
    return told


def shown(folder: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What the commands show of a run, without the time at which a report was made."""
    told: dict[str, str] = {}
    for words in (["table"], ["table", "--rule", "last_n"], ["table", "--classes"]):
        capsys.readouterr()
        status = main([words[0], str(folder), *words[1:]])
        told[" ".join(words)] = f"{status} {''.join(capsys.readouterr())}"
    if RunRecord(folder).ended and "final" in RunRecord(folder).rules:
        told["json"] = _file(main(["table", str(folder), "--output", str(place / "table.json")]), place / "table.json")
    page = write_report([str(folder)], place / "page.html").read_text()
    told["report"] = re.sub(r"on \d{4}-\d\d-\d\d \d\d:\d\d UTC", "", page)
    return told


def _file(status: int, path: Path) -> str:
    assert status == 0
    return path.read_text()


def test_a_summary_can_be_made_again_bit_for_bit(recorded: Path, tmp_path: Path) -> None:
    path = recorded / "summary.json"
    assert path.exists() == (recorded.name not in UNFINISHED)
    write_json(tmp_path / "again.json", summary_of(RunRecord(recorded)))
    if path.exists():
        assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    else:
        assert json.loads((tmp_path / "again.json").read_text()) == {}


OTHER = '{"average": 99.9, "scores": {}, "state_sha256": "0", "rounds": 1}'


@pytest.mark.long
@pytest.mark.usefixtures("undrawn")
def test_what_is_shown_does_not_depend_on_the_summary(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "runs" / "run"
    shutil.copytree(recorded, copy)
    ended = recorded.name not in UNFINISHED
    with_summary = values(copy), shown(copy, tmp_path, capsys)
    assert [run.folder for run in find_runs([str(copy.parent)], finished=False) if run.ended] == [copy] * ended
    (copy / "summary.json").unlink(missing_ok=True)
    assert (values(copy), shown(copy, tmp_path, capsys)) == with_summary
    (copy / "summary.json").write_text(OTHER)
    assert values(copy) == with_summary[0]


def test_a_fact_is_in_one_place(recorded: Path) -> None:
    """No line of events repeats what scores and replies hold."""
    scores = {"accuracy", "average", "worst", "missing", "answers"}
    events = read_lines(recorded / "events.jsonl")
    for entry in events:
        if entry["event"] in ("score", "validation", "resume", "finish"):
            assert not scores & set(entry)
    told = list(RunRecord(recorded).told_events())
    assert [entry["event"] for entry in told] == [entry["event"] for entry in events]
    record = RunRecord(recorded)
    averages = [entry["average"] for entry in told if entry["event"] == "score"]
    assert averages == [score.average for score in record.round_scores]


def test_a_resumed_run_tells_what_its_listeners_were_told(tmp_path: Path) -> None:
    """A view that follows the files shows what one beside the run shows."""
    chosen = ("protocol.validation=0.2", "rounds.metric=macro_f1")
    parts = [run(toy_settings("fedavg", tmp_path, overrides=chosen), stop_after=1)]
    parts.append(run(toy_settings("fedavg", tmp_path, overrides=chosen, resume=True)))
    told: list[Mapping[str, Any]] = []
    for part in parts:
        told += [entry for name, entry in part.events if name in ("resume", "score", "validation", "finish")]
    read = [entry for entry in RunRecord(tmp_path).told_events() if entry["event"] in _names(told)]
    names = ("accuracy", "average", "worst", "missing", "answers", "metric")
    assert [_those(names, entry) for entry in read] == [_those(names, entry) for entry in told]


def _names(entries: list[Mapping[str, Any]]) -> set[str]:
    return {str(entry["event"]) for entry in entries}


def _those(names: tuple[str, ...], entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"event": entry["event"]} | {name: entry[name] for name in names if name in entry}
