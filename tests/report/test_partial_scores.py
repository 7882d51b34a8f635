"""A partial score is marked wherever it is shown, is never the best, and enters no mean unmarked."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.runs import TouchedEngine, run
from support.toy import toy_settings

from common.metrics import PARTIAL
from common.wire.messages import Request
from server.cli import main
from server.commands.sweep import plan
from server.results.groups import Group, best_run, cells, footnotes, ranked
from server.results.run import Run
from server.results.seeds import Value, curve
from server.trackers.base import scalars
from server.trackers.live import LiveView

SMALL = ("engine=inline", "train.rounds=2", "rounds.test_samples=8", "train.local_steps=1", "train.device=cpu")


def gone(client: str, since: int) -> Any:
    """Whether a client is asked after it has died in round ``since``."""

    def failing(request: Request) -> bool:
        return request.client == client and request.round >= since

    return failing


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of three rounds: ``whole`` twice, and ``partial``, whose dark site died in the last round."""
    top = tmp_path_factory.mktemp("runs")
    found = {}
    for name, method, seed in (("whole", "fedavg", 0), ("partial", "fedavg", 1), ("other", "fedprox", 0)):
        settings = toy_settings(method, top / name, train={"rounds": 3}, seed=seed)
        failing = gone("dark-0", 3) if name == "partial" else gone("nobody", 9)
        run(settings, TouchedEngine(settings, failing=failing))
        found[name] = top / name
    return found


def group(label: str, *runs: Path) -> Group:
    return Group(label, [Run(each) for each in runs])


# ---- means over seeds ------------------------------------------------------------------------------------------------


def test_a_mean_over_seeds_with_a_partial_score_is_marked(folders: Mapping[str, Path]) -> None:
    mixed = group("fedavg", folders["whole"], folders["partial"])
    average = mixed.value("average")
    assert average is not None
    assert average.partial
    assert str(average).endswith(f" {PARTIAL}")
    dark, bright = mixed.value("domain:dark"), mixed.value("domain:bright")
    assert dark is not None
    assert dark.partial, "one seed of two"
    assert bright is not None
    assert not bright.partial
    assert footnotes([mixed]) == [
        f"{PARTIAL} partial, not ranked: fedavg: seed 1: without dark (last scored in round 1)"
    ]
    whole = group("fedavg", folders["whole"])
    assert footnotes([whole]) == []
    assert str(whole.value("average")).replace(".", "").isdigit()


def test_a_partial_score_is_never_the_best(folders: Mapping[str, Path]) -> None:
    partial, whole = group("partial", folders["partial"]), group("whole", folders["other"])
    shown = cells([partial, whole], ["average", "worst", "domain:bright"], "final")
    assert [best for _, best in shown[0]][:2] == [False, False]
    assert [best for _, best in shown[1]][:2] == [True, True], "however high the other is"
    assert ranked([partial, whole]) == [whole]
    assert best_run([partial, whole]) is whole.runs[0]
    assert best_run([partial]) is None


def test_a_group_of_which_a_run_has_no_score_is_partial(folders: Mapping[str, Path], tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    lost.mkdir()
    for path in folders["partial"].glob("*.*"):
        (lost / path.name).write_bytes(path.read_bytes())
    summary = json.loads((lost / "summary.json").read_text())
    del summary["scores"]["final"]
    (lost / "summary.json").write_text(json.dumps(summary))
    value = group("both", folders["whole"], lost).value("average")
    assert value is not None
    assert value.partial


def test_a_summary_of_before_does_not_hide_a_domain_that_was_scored_once(
    folders: Mapping[str, Path], tmp_path: Path
) -> None:
    for name in ("config.yaml", "history.csv", "summary.json"):
        (tmp_path / name).write_bytes((folders["partial"] / name).read_bytes())
    summary = json.loads((tmp_path / "summary.json").read_text())
    for rule in summary["scores"].values():
        del rule["missing"]
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert Run(tmp_path).rules["final"]["missing"] == {"dark": 1}


def test_an_average_by_round_is_of_all_domains(folders: Mapping[str, Path]) -> None:
    whole, partial = Run(folders["whole"]), Run(folders["partial"])
    assert sorted(curve([whole])) == [0, 1, 2, 3]
    assert sorted(curve([partial])) == [0, 1]
    assert sorted(curve([whole, partial])) == [0, 1]
    assert sorted(curve([partial], ["bright", "noisy"])) == [0, 1, 2, 3]
    assert partial.domains == ["bright", "dark", "noisy"]


def test_values_say_what_they_are() -> None:
    assert str(Value(50.0, 2.0, partial=True)) == f"50.00 ± 2.00 {PARTIAL}"
    assert str(Value(50.0, None)) == "50.00"


# ---- while a run goes on ---------------------------------------------------------------------------------------------


def score(number: int, missing: Mapping[str, int | None], **accuracy: float) -> dict[str, Any]:
    average = sum(accuracy.values()) / len(accuracy)
    means = {"average": average, "worst": min(accuracy.values())}
    return {"round": number, "accuracy": accuracy, **means, "missing": missing}


def shown(view: LiveView, console: Console, stream: io.StringIO) -> str:
    stream.truncate(0)
    stream.seek(0)
    console.print(view)
    return stream.getvalue()


def test_the_live_view_marks_what_is_missing_and_keeps_the_best_of_whole_rounds(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=100)
    view = LiveView(toy_settings("fedavg", tmp_path), console)
    view("score", score(1, {}, dark=40.0, bright=60.0))
    assert PARTIAL not in shown(view, console, stream)
    view("score", score(2, {"dark": 1}, bright=70.0))
    lines = {line.split()[0]: line for line in shown(view, console, stream).splitlines() if line.strip()}
    assert lines["average"].split()[1:3] == [PARTIAL, "70.0"]
    assert "50.0" in lines["average"], "the best of a whole round"
    assert lines["dark"].split()[1:3] == [PARTIAL, "-"]
    assert "without dark (last scored in round 1)" in lines[PARTIAL]
    assert PARTIAL not in lines["bright"]
    view("finish", {"round": 2, "sha256": "0" * 64, "missing": {"dark": 1}})
    assert "finished, score partial" in shown(view, console, stream)


def test_trackers_do_not_mix_partial_means_with_whole_ones() -> None:
    whole = {each.tag: each.value for each in scalars("score", score(1, {}, dark=40.0, bright=60.0))}
    assert (whole["summary/average"], whole["summary/missing_domains"]) == (50.0, 0)
    partial = {each.tag: each.value for each in scalars("score", score(2, {"dark": 1}, bright=60.0))}
    assert "summary/average" not in partial
    assert (partial["summary/partial/average"], partial["summary/missing_domains"]) == (60.0, 1)
    held_out = {"round": 2, "average": 60.0, "missing": {"dark": 1}}
    assert [each.tag for each in scalars("validation", held_out)] == ["summary/partial/validation"]


# ---- commands --------------------------------------------------------------------------------------------------------


def test_a_run_with_a_partial_score_says_so_last_and_in_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("server.commands.running.InlineEngine", _dying)
    words = [*SMALL, "method=fedavg", "seed=0,1"]
    first, second = plan(words, tmp_path)[0]
    assert main(["run", *first.overrides, "--quiet"]) == 0
    warned = capsys.readouterr()
    assert warned.out == ""
    assert "warning: the final score is PARTIAL, without sketch (last scored in round 1)" in warned.err
    assert main(["run", *second.overrides]) == 0
    assert "THE FINAL SCORE IS PARTIAL, without sketch" in capsys.readouterr().out


def _dying(settings: Any) -> TouchedEngine:
    """Its last client is gone when the last state is scored."""
    return TouchedEngine(settings, failing=gone("sketch-0", 3))
