"""A run that begins with what another one left."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from support.toy import Toy

from common.errors import EngineError
from common.overrides import quoted_override, split_overrides
from common.settings import load_settings
from server.cli import main
from server.flower import submit
from server.results.run import Run

TINY = ["data=folder", "model=small", "method=fedavg", "data.image_size=16", "data.augmentation.mean=[0.5]"]
TINY += ["data.augmentation.std=[0.25]", "train.rounds=1", "train.local_steps=1", "train.device=cpu"]


def test_the_first_score_is_the_exported_model_s(
    trained: Run, exported: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY, quoted_override("data.root", pictures), quoted_override("model.pretrained", exported)]
    same = f"data.classes=[{','.join(Toy().class_names)}]"
    assert main(["run", *words, same, quoted_override("output", tmp_path / "run")]) == 0
    assert f"starts from {exported}, with its classifier" in capsys.readouterr().out
    assert Run(tmp_path / "run").round_scores[0].accuracy == trained.summary["accuracy"]
    assert main(["run", *words, quoted_override("output", tmp_path / "other")]) == 0  # by default, in order of names
    assert "with a new classifier, since the classes differ" in capsys.readouterr().out
    assert Run(tmp_path / "other").round_scores[0].accuracy != trained.summary["accuracy"]


def test_a_model_that_is_not_there_is_said_before_anything_is_written(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY, quoted_override("data.root", pictures), f"model.pretrained={tmp_path / 'absent'}"]
    assert main(["run", *words, f"output={tmp_path / 'run'}"]) == 1
    assert "no exported model" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_flower_is_told_an_absolute_place(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(exported.parent)
    monkeypatch.setattr(submit, "write_bundle", lambda place: place)
    monkeypatch.setattr(submit, "_call", lambda *words: "{}")
    words = [*TINY, "data.domains=[a]", "data.classes=[x,y]", f"model.pretrained={exported.name}", f"output={tmp_path}"]
    with pytest.raises(EngineError, match="refused"):
        submit.submit(load_settings(words), words, None, {}, tmp_path, {}, [])
    told = split_overrides(tomllib.loads((tmp_path / "run.toml").read_text())["overrides"])
    assert told[-1] == quoted_override("model.pretrained", exported)
