"""A method's defaults are the same for all data, and its YAML lists all of them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from support.scripts import ROOT

from common.composition import changed_config
from common.overlays import find_overlay
from common.run_config import yaml_of
from common.settings import load_settings, settings_of
from goldfinch.record import RunRecord

OFFLINE = "train.device=cpu"


def test_a_run_can_be_resumed_without_its_tuned_file(tmp_path):
    """Its config.yaml has the choice of the file and the values; the values are what it is."""
    raw = load_settings(["method=moon", "method.mu=1.0", OFFLINE]).raw
    choices = {**raw["choices"], "tuned": "moon_on_glyphs"}
    (tmp_path / "config.yaml").write_text(yaml_of({**raw, "choices": choices}))
    assert settings_of(changed_config(RunRecord(tmp_path).config, [])).method.mu == 1.0


@pytest.mark.parametrize(
    "method",
    ["moon", "fdse", "feddap", "feddyn", "fedopt", "fedproc", "fedapc", "fedplvm", "fedplcc", "scaffold", "fccl_plus"],
)
def test_the_yaml_says_every_option_and_the_class_s_defaults(method):
    """Both places that state a default agree; textures follow the data's image size."""
    chosen = load_settings([f"method={method}", "tuned=none", OFFLINE])
    assert chosen.method == type(chosen.method)()
    fields = {field.name for field in dataclasses.fields(chosen.method)}
    assert set(chosen.raw["method"]) == fields | {"_target_"}


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "tuned").glob("*_on_*.yaml")), ids=lambda path: path.stem)
def test_a_tuned_file_says_whether_its_search_had_guards(path: Path) -> None:
    source = find_overlay("tuned", path.stem).source
    assert re.search(r"with the guards of [0-9a-f]{7} \(rounds\.outliers=clip\)", source)
