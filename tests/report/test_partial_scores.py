"""A partial score is marked wherever it is shown, is never the best, and enters no mean unmarked."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType
from support.runs import TouchedEngine, run
from support.toy import toy_settings

from common.errors import ConfigError, EngineError
from common.metrics import PARTIAL
from common.settings import RunSettings
from common.wire.messages import Request
from goldfinch.cli import main
from goldfinch.commands.figure import bars_of
from goldfinch.commands.sweep import plan
from goldfinch.record import RunRecord
from goldfinch.results.figures.charts import score as figure_score
from goldfinch.results.frames import partial_notes, score_frame, score_sheet
from goldfinch.results.groups import ScoreTable
from goldfinch.results.report.figures import accuracy_against_bytes, accuracy_bars
from goldfinch.results.report.page import write_report
from goldfinch.results.rows import KnownRun, ScoreRow, best_row, ranked
from goldfinch.results.seeds import curve
from goldfinch.results.sheets import UNSEEN
from goldfinch.study import search
from goldfinch.study.options import Rules
from goldfinch.study.rules import entrants_of
from goldfinch.study.search import TuningStudy, finished_trials, state_of
from goldfinch.study.storage import storage_of
from goldfinch.trackers.live import LiveView
from goldfinch.trackers.scalars import scalars
from server.run.events import Subject

SMALL = ("engine=inline", "train.rounds=2", "rounds.test_samples=8", "train.local_steps=1", "train.device=cpu")


def dying(settings: RunSettings, client: str, since: int) -> TouchedEngine:
    """An engine in which a client has died when round ``since`` asks it."""

    def failing(request: Request) -> bool:
        return request.client == client and request.round >= since

    return TouchedEngine(settings, failing=failing)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of three rounds: ``whole`` and ``other``, and ``partial``, where the dark site died in the last round."""
    top = tmp_path_factory.mktemp("runs")
    for name, method, seed in (("whole", "fedavg", 0), ("other", "fedprox", 0)):
        run(toy_settings(method, top / name, train={"rounds": 3}, seed=seed))
    settings = toy_settings("fedavg", top / "partial", train={"rounds": 3}, seed=1)
    run(settings, dying(settings, "dark-0", 3))
    return {name: top / name for name in ("whole", "partial", "other")}


def group(label: str, *runs: Path) -> ScoreRow[RunRecord]:
    return ScoreRow(label, [RunRecord(each) for each in runs])


# ---- means over seeds ------------------------------------------------------------------------------------------------


def test_a_mean_over_seeds_with_a_partial_score_is_marked(folders: Mapping[str, Path]) -> None:
    mixed = group("fedavg", folders["whole"], folders["partial"])
    marked = {name: PARTIAL in str(mixed.value(name)) for name in ("average", "domain:dark", "domain:bright")}
    assert marked == {"average": True, "domain:dark": True, "domain:bright": False}
    assert partial_notes([mixed], "final") == [
        f"{PARTIAL} partial, not ranked: fedavg: seed 1: without dark (last scored in round 1)"
    ]
    whole = group("fedavg", folders["whole"])
    assert partial_notes([whole], "final") == []
    assert PARTIAL not in str(whole.value("average"))


def test_a_partial_score_is_never_the_best(folders: Mapping[str, Path]) -> None:
    partial, whole = group("partial", folders["partial"]), group("whole", folders["other"])
    assert not score_frame(board_of([partial, whole]), "final")["best"].any(), "however high the other is"
    assert ranked([partial, whole]) == [whole]
    assert best_row([partial, whole]) is None


def test_a_column_is_partial_only_without_a_domain_of_its_own() -> None:
    averages = {"average": 2.0, "seen_average": 1.0, "unseen_average": 3.0}
    final = {**averages, "accuracy": {"a": 1.0, "b": 3.0}, "missing": {"b": 1}}
    row = ScoreRow("fpl", [KnownRun(0, {"final": final}, unseen=["b"])])
    whole = [column for column in (*averages, "domain:a", "domain:b", ("a",), ("a", "b")) if not row.partial(column)]
    assert whole == ["seen_average", "domain:a", ("a",)]
    validated = {"validated": {**averages, "validation": 2.0, "accuracy": {"a": 1.0}, "validation_missing": {"b": 1}}}
    assert ScoreRow("fpl", [KnownRun(0, validated)]).partial("average", "validated"), "it may be another round's"


def test_a_group_of_which_a_run_has_no_score_is_partial(folders: Mapping[str, Path], tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    shutil.copytree(folders["partial"], lost)
    (lost / "scores.jsonl").write_text("")
    assert PARTIAL in str(group("both", folders["whole"], lost).value("average"))


def test_an_average_by_round_is_of_all_domains(folders: Mapping[str, Path]) -> None:
    whole, partial = RunRecord(folders["whole"]), RunRecord(folders["partial"])
    assert sorted(curve([whole, partial])) == [0, 1]
    assert sorted(curve([partial], ["bright", "noisy"])) == [0, 1, 2, 3]
    assert partial.domains == ["bright", "dark", "noisy"]


# ---- while a run goes on ---------------------------------------------------------------------------------------------


def score(number: int, missing: Mapping[str, int | None], **accuracy: float) -> dict[str, Any]:
    average = sum(accuracy.values()) / len(accuracy)
    means = {"average": average, "worst": min(accuracy.values())}
    return {"round": number, "accuracy": accuracy, **means, "missing": missing}


def test_the_live_view_marks_what_is_missing_and_keeps_the_best_of_whole_rounds(tmp_path: Path) -> None:
    view = LiveView(Subject.of(toy_settings("fedavg", tmp_path)), Console(width=100))
    view("score", score(1, {}, dark=40.0, bright=60.0))
    assert PARTIAL not in shown(view)
    view("score", score(2, {"dark": 1}, bright=70.0))
    lines = {line.split()[0]: line for line in shown(view).splitlines() if line.strip()}
    assert lines["average"].split()[1:3] == [PARTIAL, "70.0"]
    assert "50.0" in lines["average"], "the best of a whole round"
    assert lines["dark"].split()[1:3] == [PARTIAL, "-"]
    assert "without dark (last scored in round 1)" in lines[PARTIAL]
    assert PARTIAL not in lines["bright"]
    view("finish", {"round": 2, "sha256": "0" * 64, "missing": {"dark": 1}})
    assert "finished, score partial" in shown(view)


def test_trackers_do_not_mix_partial_means_with_whole_ones() -> None:
    partial = {each.tag: each.value for each in scalars("score", score(2, {"dark": 1}, bright=60.0))}
    assert "summary/average" not in partial
    assert (partial["summary/partial/average"], partial["summary/missing_domains"]) == (60.0, 1)


def test_the_card_of_an_exported_model_names_missing_domains(folders: Mapping[str, Path], tmp_path: Path) -> None:
    assert main(["export", str(folders["partial"]), "--to", str(tmp_path / "model"), "--format", "safetensors"]) == 0
    content = json.loads((tmp_path / "model" / "model.json").read_text())
    assert content["score"]["missing"] == {"dark": 1}
    assert "PARTIAL, without dark (last scored in round 1)" in (tmp_path / "model" / "README.md").read_text()


# ---- commands --------------------------------------------------------------------------------------------------------


def test_a_partial_score_is_marked_at_the_end_of_a_run_and_in_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("goldfinch.commands.running.InlineEngine", lambda settings: dying(settings, "sketch-0", 3))
    words = [*SMALL, "method=fedavg", "seed=0,1"]
    first, second = plan(words, tmp_path)[0]
    assert main(["run", *first.overrides, "--quiet"]) == 0
    warned = capsys.readouterr()
    assert warned.out == ""
    assert "PARTIAL, without sketch (last scored in round 1)" in warned.err
    assert main(["run", *second.overrides]) == 0
    assert "PARTIAL, without sketch" in capsys.readouterr().out


# ---- tables and pages ------------------------------------------------------------------------------------------------

LACKS = "seed 1: without dark (last scored in round 1)"


def board_of(groups: list[ScoreRow[RunRecord]]) -> ScoreTable:
    return ScoreTable("toy", "one_per_domain", "small", groups)


def shown(drawn: RenderableType, width: int = 100) -> str:
    """What a terminal of that width shows."""
    stream = io.StringIO()
    Console(file=stream, width=width).print(drawn)
    return stream.getvalue()


def printed(groups: list[ScoreRow[RunRecord]]) -> str:
    return shown(score_sheet(board_of(groups), "final").terminal(), 200)


def test_tables_keep_the_column_of_a_domain_that_is_missing(folders: Mapping[str, Path]) -> None:
    """A row of a site that died has its column with a dash, its average a mark, and a line below states since when."""
    text = printed([group("fedavg", folders["partial"])])
    assert {"bright", "dark", "noisy", "average", "worst"} <= set(text.split())
    cells = next(line.split() for line in text.splitlines() if line.strip().startswith("fedavg"))
    assert cells.count(PARTIAL) == 2, "average and worst"
    assert "-" in cells
    assert LACKS in text


@pytest.mark.usefixtures("undrawn")
def test_the_report_marks_a_partial_score_and_gives_it_no_rank(folders: Mapping[str, Path], tmp_path: Path) -> None:
    page = write_report([str(folders["partial"]), str(folders["other"])], tmp_path / "report.html").read_text()
    assert f"{PARTIAL} partial, not ranked: FedAvg: {LACKS}." in page
    assert "<strong>FedAvg" not in page
    assert "<strong>FedProx" in page
    assert "THE FINAL SCORE IS PARTIAL" in page
    whole = write_report([str(folders["other"])], tmp_path / "whole.html").read_text()
    assert PARTIAL not in whole


def test_figures_leave_partial_values_out(folders: Mapping[str, Path]) -> None:
    board = board_of([group("FedAvg", folders["partial"]), group("FedProx", folders["other"])])
    ours, others = accuracy_bars(board).panels[0].description.split("FedProx: ")
    columns = ("bright", "dark", "noisy", "average", "worst")
    assert [name for name in columns if name in ours] == ["bright", "noisy"]
    assert [name for name in columns if name in others] == list(columns)
    assert "FedAvg" not in accuracy_against_bytes(board).panels[0].description
    partial = RunRecord(folders["partial"])
    with pytest.raises(ConfigError, match=r"partial score, without dark \(last scored in round 1\)"):
        figure_score(partial, "final", "average")
    drawn = bars_of([partial, RunRecord(folders["other"])], "final")
    (axes,) = drawn.axes
    assert "without dark (last scored in round 1)" in " ".join(drawn.get_suptitle().split())
    counts = sorted(len(each.patches) for each in axes.containers if hasattr(each, "patches"))
    assert counts == [2, 4], "the partial domain and the partial average have no bar"


# ---- leave-one-out ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def left_out(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One run for each of two domains on which no client trains."""
    top = tmp_path_factory.mktemp("left")
    for name in ("dark", "noisy"):
        settings = toy_settings("fedavg", top / name, overrides=("protocol=leave_one_out",))
        protocol = replace(settings.protocol, leave_out=(name,))
        raw = {**settings.raw, "protocol": {**settings.raw["protocol"], "leave_out": [name]}}
        run(replace(settings, protocol=protocol, raw=raw))
    return {name: top / name for name in ("dark", "noisy")}


def test_the_unseen_domain_is_marked_with_averages_of_both_kinds(left_out: Mapping[str, Path]) -> None:
    record = RunRecord(left_out["dark"])
    assert record.summary["unseen"] == ["dark"]
    final = record.rules["final"]
    accuracy = final["accuracy"]
    assert final["missing"] == {}, "it is scored all the same"
    assert final["seen_average"] == pytest.approx((accuracy["bright"] + accuracy["noisy"]) / 2)
    assert final["unseen_average"] == accuracy["dark"]
    text = printed([group("fedavg", left_out["dark"])])
    head = next(line for line in text.splitlines() if "average" in line)
    assert head.split()[-5:] == ["seen", "unseen", "rounds", "seeds", "MB"]
    assert head.count("(unseen)") == head.count("dark (unseen)") == 1


@pytest.mark.usefixtures("undrawn")
def test_rows_that_leave_out_different_domains_mark_their_own(left_out: Mapping[str, Path], tmp_path: Path) -> None:
    sheet = score_sheet(board_of([group(name, left_out[name]) for name in ("dark", "noisy")]), "final")
    assert not any("(unseen)" in head for head in sheet.heads)
    for name, *cells in sheet.rows:
        marked = [head for head, cell in zip(sheet.heads[1:], cells, strict=True) if UNSEEN in cell]
        assert marked == [name]
    assert f"{UNSEEN} on a domain that no client of this row trained on" in " ".join(sheet.notes)
    page = write_report([str(each) for each in left_out.values()], tmp_path / "report.html").read_text()
    assert page.count(f" {UNSEEN}</td>") >= 2
    alone = write_report([str(left_out["dark"])], tmp_path / "alone.html").read_text()
    assert '<th scope="col">dark (unseen)</th>' in alone


# ---- searches and comparisons ----------------------------------------------------------------------------------------


def test_a_comparison_refuses_a_partial_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client is gone in the last round: the final run leaves its row without a result."""
    study = study_of(tmp_path)
    settings = toy_settings("fedavg", study.folder / "seed-0", train={"rounds": 3})
    run(settings, dying(settings, "dark-0", 3))
    monkeypatch.setattr(search, "run_here", lambda overrides, folder, listener, **_: None)
    with pytest.raises(EngineError, match=r"the score is without dark"):
        search.final_run(study, {}, 0)


def test_a_search_does_not_judge_a_trial_by_rounds_that_lack_a_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial has failed at the first such round."""
    monkeypatch.setattr(search, "InlineEngine", lambda settings: dying(settings, "sketch-0", 2))
    study = study_of(tmp_path)
    shared = search.open_study(study, storage_of(tmp_path), "the journal")
    assert search.next_trial(shared, lambda line: None)
    (trial,) = finished_trials(shared.trials)
    assert state_of(trial) == "failed"
    assert "not validated by every client: it is without sketch" in trial.user_attrs["problem"]
    assert trial.intermediate_values == {}, "round 0 is untrained, and the others lack a client"


def study_of(folder: Path) -> TuningStudy:
    """A study of one trial."""
    numbers = Rules(trials=1)
    (entrant,), _ = entrants_of(["fedavg"], ["data=glyphs", *SMALL], numbers)
    return TuningStudy(entrant, 0, numbers, folder)
