"""A run's configuration holds every setting, also the defaults of a class that no file describes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.own import forget

from common.run_config import read_config
from common.settings import load_settings, settings_of
from common.text import warn_once
from goldfinch.cli import main

OWN = '''
"""A data set, a network and a method of somebody's own."""
from dataclasses import field
from typing import Any, ClassVar
import torch
from common.config import NonNegative, checked
from common.data.batches import Augmentation, Split
from common.data.domain import DataSource, Domain
from common.models.specs import Small
from strategies.core.method import Method


@checked
class Stripes(DataSource):
    name: ClassVar[str] = "stripes"
    generated: ClassVar[bool] = True
    domains: tuple[str, ...] = ("a", "b")
    image_size: int = 16
    noise: float = 0.5
    kinds: tuple[str, ...] = ("x", "y")
    table: Any = field(default_factory=lambda: torch.zeros(2))

    @property
    def class_names(self):
        return self.kinds

    def _read(self, domain):
        draws = torch.Generator().manual_seed(len(domain) + ord(domain))
        images = torch.randint(0, 256, (40, 3, 16, 16), generator=draws, dtype=torch.uint8)
        labels = torch.arange(40) % 2
        return Domain(domain, Split(images[:30], labels[:30]), Split(images[30:], labels[30:]))


@checked
class Grey(Stripes):
    augmentation: Augmentation = field(default_factory=lambda: Augmentation(mean=(0.5,), std=(0.5,)))


@checked
class Wide(Small):
    features: int = 24


@checked
class QFair(Method):
    q: NonNegative = 1.0
'''
TINY = ["train.rounds=1", "train.local_steps=1", "engine=inline", "train.device=cpu"]
CHOSEN = ["data=ownset.Stripes", "model=ownset.Wide", "method=ownset.QFair"]


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "ownset.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path / "site")
    warn_once.cache_clear()
    yield
    forget("ownset")


def test_the_configuration_holds_the_defaults_of_ones_own_classes(tmp_path: Path) -> None:
    output = tmp_path / "run"
    assert main(["run", *CHOSEN, *TINY, "data.noise=0.25", f"output={output}", "--quiet"]) == 0
    config = read_config(output / "config.yaml")
    assert config["data"]["noise"] == 0.25
    assert config["data"]["kinds"] == ["x", "y"]
    assert config["data"]["augmentation"]["mean"] == [0.485, 0.456, 0.406]
    assert config["data"]["augmentation"]["normalisation"] == "fixed"
    assert "table" not in config["data"], "YAML cannot express it"
    assert (config["model"]["features"], config["model"]["norm"]) == (24, "batch")
    assert config["method"]["q"] == 1.0
    again = settings_of(config)
    assert again.identity == json.loads((output / "summary.json").read_text())["identity"]
    assert main(["resume", str(output), *CHOSEN, "train.rounds=2", "--quiet"]) == 0


def test_a_changed_default_changes_the_identity(tmp_path: Path) -> None:
    before = load_settings(CHOSEN).identity
    assert load_settings([*CHOSEN, "data.noise=0.5", "method.q=1"]).identity == before
    forget("ownset")
    (tmp_path / "site" / "ownset.py").write_text(OWN.replace("noise: float = 0.5", "noise: float = 0.75"))
    assert load_settings(CHOSEN).identity != before


def test_a_class_of_goldfinchs_own_by_its_dotted_name_is_completed_too() -> None:
    settings = load_settings(["data=glyphs", "model=common.models.specs.ResNet10"])
    assert settings.raw["model"]["width"] == 64


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data=ownset.Stripes"], True),
        (["data=ownset.Stripes", "data.augmentation.flip=true"], True),
        (["data=ownset.Stripes", "data.augmentation.normalisation=image"], False),
        (["data=ownset.Stripes", "data.augmentation.mean=[0.485,0.456,0.406]"], False),
        (["data=ownset.Grey"], False),
        (["data=glyphs"], False),
    ],
)
def test_imagenets_mean_is_not_taken_without_a_word(
    overrides: list[str], said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load_settings(overrides)
    assert ("normalised by ImageNet's mean" in caplog.text) == said
    assert ("data.augmentation.normalisation=image" in caplog.text) == said
