"""A run is not resumed with settings that contradict its rounds: nothing starts, and the folder keeps every byte."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from support.runs import run
from support.toy import toy_settings

import goldfinch as gf
from common.errors import CheckpointError
from common.run_config import CHANGEABLE_ON_RESUME, SCORING_SETTINGS
from goldfinch.cli import main
from goldfinch.commands import running
from goldfinch.record import RunRecord
from server.run.existing import Step, decide

TINY = ["method=fpl", "data=glyphs", "train.local_steps=1", "protocol.samples=24", "rounds.test_samples=8"]
BEGAN = [*TINY, "train.rounds=4", "protocol.validation=0.25"]

CONTRADICTIONS = {
    "fewer rounds than are kept": ("train.rounds=2", "is at round 4: a run cannot be resumed to fewer"),
    "fewer rounds, kept": ("train.rounds=3", "is at round 4: a run cannot be resumed to fewer"),
    "learning rate": ("train.learning_rate=0.5", "train.learning_rate=0.5, which was 0.0"),
    "images that are scored": ("rounds.test_samples=20", "rounds.test_samples=20, which was 8"),
    "rounds that are scored": ("rounds.evaluate_every=2", "rounds.evaluate_every=2, which was 1"),
    "whether tests are scored": ("rounds.test=false", "rounds.test=false, which was true"),
    "samples": ("protocol.samples=30", "protocol.samples=30, which was 24"),
    "validation": ("protocol.validation=0.2", "protocol.validation=0.2, which was 0.25"),
    "clients": ("protocol=glyphs_uneven", "protocol=glyphs_uneven, which was"),
    "seed": ("seed=1", "seed=1, which was 0"),
    "method": ("method=fedavg", "method=fedavg, which was fpl"),
    "method's own setting": ("method.temperature=0.5", "method.temperature=0.5, which was 0.0"),
    "guard": ("rounds=guarded", "rounds=guarded, which was default"),
    "aggregation": ("aggregation=geometric_median", "aggregation=geometric_median, which was mean"),
    "domains": ("data.domains=[sketch]", "data.domains=['sketch'], which was"),
}


def content(folder: Path) -> dict[str, bytes]:
    """Every file below the folder, by its path."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four rounds, which the tests leave as it is."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert main(["run", *BEGAN, "--quiet", f"output={folder}"]) == 0
    return folder


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail as soon as an engine is started."""

    def start(*_: object, **__: object) -> None:
        raise AssertionError("an engine was started")

    for name in ("InlineEngine", "run_federation", "run_on_ray", "run_on_superlink"):
        monkeypatch.setattr(running, name, start)
    monkeypatch.setattr("server.flower.superlink.simulation_link", start)


ENGINES = (["engine=inline"], ["engine=ray"], ["engine=superlink"])


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(("change", "told"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
@pytest.mark.long
def test_a_contradiction_is_refused_and_every_byte_is_kept(
    change: str, told: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(finished)
    assert main(["resume", str(finished), change]) == 1
    message = capsys.readouterr().err
    assert told in message
    assert "add output=DIR" in message
    with pytest.raises(CheckpointError, match=re.escape(told)):
        gf.resume(finished, change)
    assert content(finished) == before


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("engine", ENGINES, ids=" ".join)
def test_it_is_refused_before_an_engine_is_started(
    engine: list[str], finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(finished)
    for words in (["resume", str(finished)], ["run", *BEGAN, f"output={finished}", "resume=true"]):
        for change in ("train.rounds=2", "train.learning_rate=0.5"):
            assert main([*words, change, *engine]) == 1
            assert change in capsys.readouterr().err
    assert content(finished) == before


def test_the_remedies_work_when_typed(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = content(finished)
    assert main(["resume", str(finished), "train.rounds=2"]) == 1
    message = capsys.readouterr().err
    assert "kept are 3, 4" in message
    assert main(["resume", str(finished), "train.rounds=2", "--quiet", f"output={tmp_path / 'short'}"]) == 0
    short = RunRecord.open(tmp_path / "short")
    assert short.rounds_done == 2
    first_rounds = RunRecord.open(finished).round_scores[:3]
    assert [score.accuracy for score in short.round_scores] == [score.accuracy for score in first_rounds]

    assert main(["resume", str(finished), "train.rounds=3"]) == 1
    found = re.search(r"(goldfinch export .*? --to) DIR", capsys.readouterr().err)
    assert found is not None
    model = tmp_path / "model"
    assert main([*shlex.split(found[1])[1:], str(model)]) == 0
    assert json.loads((model / "model.json").read_text())["round"] == 3

    onward = ["resume", str(finished), "train.learning_rate=0.5", "--quiet", f"output={tmp_path / 'onward'}"]
    assert main([*onward, f"model.pretrained={model}"]) == 0
    assert RunRecord.open(tmp_path / "onward").config["train"]["learning_rate"] == 0.5

    assert main(["resume", str(finished), "train.learning_rate=0.5"]) == 1
    own = re.search(r"\((goldfinch resume .*?) takes", capsys.readouterr().err)
    assert own is not None
    assert main(shlex.split(own[1])[1:]) == 0
    assert content(finished) == before


def test_patience_without_validation_is_told_of_the_new_run_that_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    assert main(["run", *TINY, "train.rounds=1", "--quiet", f"output={folder}"]) == 0
    assert main(["resume", str(folder), "train.patience=4"]) == 1
    message = capsys.readouterr().err
    assert "set protocol.validation to a share such as 0.1, in a new run (goldfinch resume: add output=DIR)" in message
    advised = ["train.patience=4", "protocol.validation=0.1"]
    assert main(["resume", str(folder), *advised]) == 1
    assert main(["resume", str(folder), *advised, "--quiet", f"output={other}"]) == 0
    assert RunRecord.open(other).config["train"]["patience"] == 4


def test_a_finished_run_stays_as_it_is(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = content(finished)
    assert main(["resume", str(finished)]) == 0
    assert "has finished, and nothing is left to do" in capsys.readouterr().out
    assert main(["run", *BEGAN, f"output={finished}", "resume=true", "--quiet"]) == 0
    assert gf.resume(finished, quiet=True).average == RunRecord.open(finished).summary["average"]
    assert content(finished) == before


def test_what_may_change_changes(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    assert main(["resume", str(folder), "train.rounds=5", "rounds.last_rounds=2", "--quiet"]) == 0
    longer = RunRecord.open(folder)
    assert longer.rounds_done == 5
    assert [score.round for score in longer.round_scores] == [0, 1, 2, 3, 4, 5]
    assert longer.config["rounds"]["last_rounds"] == 2
    whole = tmp_path / "whole"
    assert main(["run", *BEGAN, "train.rounds=5", "rounds.last_rounds=2", "--quiet", f"output={whole}"]) == 0
    assert longer.state_sha256 == RunRecord.open(whole).state_sha256
    assert longer.summary["scores"] == RunRecord.open(whole).summary["scores"]


def test_every_scoring_setting_is_refused_or_allowed_by_name() -> None:
    refused = {change.partition("=")[0] for change, _ in CONTRADICTIONS.values()}
    for key in SCORING_SETTINGS:
        assert (key in refused) != (key in CHANGEABLE_ON_RESUME), key


def test_a_run_that_was_stopped_is_not_taken_for_finished(tmp_path: Path) -> None:
    stopped = run(toy_settings("fedavg", tmp_path, train={"rounds": 3}), stop_after=1)
    assert stopped.summary["average"] is not None
    settings = toy_settings("fedavg", tmp_path, train={"rounds": 3}, resume=True)
    assert decide(settings).step is Step.GO_ON
    run(settings)
    assert decide(settings).step is Step.NOTHING


def test_a_changed_config_is_named(tmp_path: Path) -> None:
    run(toy_settings("fedavg", tmp_path, train={"rounds": 1}))
    config = tmp_path / "config.yaml"
    now = toy_settings("fedavg", tmp_path, train={"rounds": 2, "learning_rate": 0.5}, resume=True)
    config.write_text(config.read_text().replace("learning_rate: 0.05", "learning_rate: 0.5"))
    before = content(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.yaml, which was changed|which was 0\."):
        run(now)
    assert content(tmp_path) == before
