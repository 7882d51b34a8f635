"""``model.freeze=backbone``: only the classifier trains, and features are computed once on each device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import run
from support.toy import Toy, toy_settings
from torch import nn

from client.device import Device
from common.choices import CONF
from common.data.batches import Augmentation
from common.errors import ConfigError
from common.settings import RunSettings, load_settings
from goldfinch.record import RunRecord
from goldfinch.run_model import RunModel
from strategies.core.method import build_model

PLAIN = Augmentation(mean=(0.5,), std=(0.25,))
METHODS = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))


def frozen(method: str, output: Path, augmentation: Augmentation = PLAIN, **more: Any) -> RunSettings:
    data = replace(Toy(), augmentation=augmentation)
    train = {"epochs": 2, **more.pop("train", {})}
    return toy_settings(method, output, overrides=("model.freeze=backbone",), data=data, train=train, **more)


def passes(settings: RunSettings, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each call of a backbone appends its number of images."""
    counts: list[int] = []
    kind = type(build_model(settings, 3).backbone)
    forward = kind.forward

    def counted(self: nn.Module, images: torch.Tensor) -> torch.Tensor:
        counts.append(len(images))
        return forward(self, images)

    monkeypatch.setattr(kind, "forward", counted)
    return counts


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.long
def test_every_method_trains_the_classifier_alone_or_refuses_with_the_reason(method: str, tmp_path: Path) -> None:
    settings = frozen(method, tmp_path, train={"rounds": 1, "epochs": 1})
    if method == "fedsr":  # it puts layers of its own between backbone and classifier
        with pytest.raises(ConfigError, match=r"set model\.freeze=none"):
            run(settings)
        return
    if method == "fedrep":  # it trains classifier and backbone one after the other
        with pytest.raises(ConfigError, match=r"nothing to train in phase 2 of a round: set model\.freeze=none"):
            run(settings)
        assert not tmp_path.joinpath("events.jsonl").exists(), "before the run begins"
        return
    run(settings)
    initial = build_model(settings, 3).state_dict()
    state = RunModel(RunRecord(tmp_path)).checkpoint.state.weights
    for name, tensor in state.items():
        if name.startswith("backbone."):
            assert torch.equal(tensor, initial[name]), name
    heads = [name for name in state if name.startswith("head.")]
    assert not heads or any(not torch.equal(state[name], initial[name]) for name in heads)


PROBES = 1
"""Images that are passed to find out whether the network can train on a batch of one."""


def test_features_are_computed_once_on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = frozen("fpl", tmp_path)
    counts = passes(settings, monkeypatch)
    done = run(settings)
    samples = sum(int(row["samples"]) for row in done.replies() if row["round"] == "1")
    tested = sum(int(row["count"]) for row in done.scores("test") if row["round"] == "0")
    assert sum(counts) == samples + tested + PROBES


def test_the_cache_changes_nothing_but_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = run(frozen("fpl", tmp_path / "cached"))
    monkeypatch.setattr(Device, "_feature_cache", lambda self, state: None)
    computed = run(frozen("fpl", tmp_path / "computed"))
    first, second = (RunModel(RunRecord(done.folder)).checkpoint.state for done in (cached, computed))
    for name, tensor in first.weights.items():
        torch.testing.assert_close(tensor, second.weights[name], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first.prototypes.vectors, second.prototypes.vectors, rtol=1e-4, atol=1e-5)


def test_augmented_images_are_passed_through_the_backbone_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = frozen("fedavg", tmp_path, Augmentation(crop_padding=1, mean=(0.5,), std=(0.25,)))
    counts = passes(settings, monkeypatch)
    done = run(settings)
    samples = sum(int(row["samples"]) for row in done.replies() if row["round"] == "1")
    tested = sum(int(row["count"]) for row in done.scores("test") if row["round"] == "0")
    assert sum(counts) == 2 * 2 * samples + tested + PROBES


def test_noise_on_the_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"privacy\.update_clip=null"):
        load_settings(["model.freeze=backbone", "privacy=gaussian", "privacy.update_clip=1"])
