"""A run that begins with what another one left."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exports.conftest import Apart
from safetensors.torch import save_file
from support.runs import run
from support.toy import Toy, toy_settings

from common.errors import EngineError
from common.exports.model import read_export
from common.models.base import ModelError
from common.models.pretrained import same_classes
from common.models.residual import ResidualBackbone
from common.overrides import quoted_override
from common.settings import load_settings, settings_of
from goldfinch.cli import main
from goldfinch.commands.export import export
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


FILE = "weights.safetensors"
RESNET = "{_target_: common.models.specs.TorchvisionResNet, pretrained_file: weights.safetensors}"
PATHS: dict[str, tuple[list[str], Callable[[Any], Any]]] = {
    "pretrained_file": (
        ["model=resnet18", f"model.pretrained_file={FILE}"],
        lambda model: model["pretrained_file"],
    ),
    "weights": (["model=torchvision", f"model.weights={FILE}"], lambda model: model["weights"]),
    "of a domain": (
        ["method=fedproto", "method.aggregate_models=false", "model=by_domain", f"model.networks={{a: {RESNET}}}"],
        lambda model: model["networks"]["a"]["pretrained_file"],
    ),
    "of other domains": (
        ["method=fedproto", "method.aggregate_models=false", "model=by_domain", f"model.others={RESNET}"],
        lambda model: model["others"]["pretrained_file"],
    ),
}


@pytest.mark.parametrize(("words", "sent_path"), PATHS.values(), ids=PATHS)
def test_every_path_of_the_network_is_sent_absolute(
    words: list[str], sent_path: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file(ResidualBackbone((2, 2, 2, 2)).state_dict(), FILE)
    settings = load_settings(["data=folder", "data.domains=[a]", "data.classes=[x,y]", *words])
    sent = submit.remote_configuration(settings)
    assert sent_path(sent["model"]) == str(tmp_path / FILE)
    assert submit.remote_configuration(settings_of(sent)) == sent


@pytest.mark.long
@pytest.mark.parametrize("mixed", [False, True], ids=["one network", "by domain"])
def test_a_run_is_exported_without_the_file_that_it_started_from(mixed: bool, tmp_path: Path) -> None:
    file = tmp_path / FILE
    state = ResidualBackbone((2, 2, 2, 2), norm="none").state_dict()
    save_file(state, file)
    node = f"{{_target_: common.models.specs.TorchvisionResNet, norm: none, pretrained_file: '{file}'}}"
    words = ("model=resnet18", "model.norm=none", f"model.pretrained_file='{file}'")
    method, client = "fedavg", None
    if mixed:
        method, client = "fedproto", "dark-0"
        words = ("method.aggregate_models=false", "model=by_domain", f"model.others={node}")
    train = {"rounds": 1, "local_steps": 1}
    run(toy_settings(method, tmp_path / "run", overrides=words, data=Toy(image_size=32), train=train))
    file.unlink()
    export(tmp_path / "run", tmp_path / "model", client=client)
    assert str(tmp_path) not in (tmp_path / "model" / "model.json").read_text()


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
