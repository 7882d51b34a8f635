"""A run that begins with what another one left."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from exports.conftest import Apart
from support.toy import Toy

from common.errors import EngineError
from common.exports.model import read_export
from common.models.base import ModelError
from common.models.pretrained import same_classes
from common.overrides import quoted_override
from common.settings import load_settings
from goldfinch.cli import main
from goldfinch.record import RunRecord
from goldfinch.run_model import RunModel
from server.flower import submit

TINY = ["data=folder", "model=small", "method=fedavg", "data.image_size=16", "data.augmentation.mean=[0.5]"]
TINY += ["data.augmentation.std=[0.25]", "train.rounds=1", "train.local_steps=1", "train.device=cpu"]


@pytest.mark.long
def test_the_first_score_is_the_exported_model_s(
    trained: RunRecord, exported: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY, quoted_override("data.root", pictures), quoted_override("model.pretrained", exported)]
    same = f"data.classes=[{','.join(Toy().class_names)}]"
    assert main(["run", *words, same, quoted_override("output", tmp_path / "run")]) == 0
    assert f"starts from {exported}, with its classifier" in capsys.readouterr().out
    assert RunRecord(tmp_path / "run").round_scores[0].accuracy == trained.summary["accuracy"]
    assert main(["run", *words, quoted_override("output", tmp_path / "other")]) == 0  # by default, in order of names
    assert "with a new classifier, since the classes differ" in capsys.readouterr().out
    assert RunRecord(tmp_path / "other").round_scores[0].accuracy != trained.summary["accuracy"]


def test_a_missing_model_is_an_error_before_anything_is_written(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY, quoted_override("data.root", pictures), f"model.pretrained={tmp_path / 'absent'}"]
    assert main(["run", *words, f"output={tmp_path / 'run'}"]) == 1
    assert "no exported model" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_sent_configuration_has_absolute_paths(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(exported.parent)
    monkeypatch.setattr(submit, "write_bundle", lambda place, client_app: place)
    monkeypatch.setattr(submit, "_call", lambda *words: "{}")
    words = [*TINY, "data.domains=[a]", "data.classes=[x,y]", f"model.pretrained={exported.name}", f"output={tmp_path}"]
    with pytest.raises(EngineError, match="refused"):
        submit.submit(load_settings(words), None, {}, tmp_path, {}, [])
    sent = json.loads(tomllib.loads((tmp_path / "run.toml").read_text())["configuration"])
    assert sent["model"]["pretrained"] == str(exported)


@pytest.mark.parametrize(("method", "classifier"), [("fedbn", True), ("fedrep", False)])
def test_a_site_that_joins_later_starts_from_what_clients_share(
    method: str, classifier: bool, apart: Callable[[str], Apart]
) -> None:
    shared, names = apart(method).shared, Toy().class_names
    spec = RunModel(RunRecord(apart(method).run)).settings.model
    plain = spec.build(len(names), 16, 0, names).state_dict()
    started = replace(spec, pretrained=shared).build(len(names), 16, 0, names).state_dict()
    weights = read_export(shared)[1]
    assert 0 < len(weights) < len(plain)
    for name, tensor in started.items():
        assert torch.equal(tensor, weights.get(name, plain[name])), name
    assert same_classes(shared, names) == classifier


def test_a_method_that_shares_no_weights_leaves_nothing_to_start_from(apart: Callable[[str], Apart]) -> None:
    found = apart("fedpall")
    spec = RunModel(RunRecord(found.run)).settings.model
    with pytest.raises(ModelError, match="clients of fedpall share no weights of the network"):
        replace(spec, pretrained=found.shared).build(4, 16, 0, Toy().class_names)
