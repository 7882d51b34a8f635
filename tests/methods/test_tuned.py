"""conf/tuned: what suits a method on a data set is chosen by the two names, and gives way to what the user says."""

from __future__ import annotations

import dataclasses

import pytest

from common.config import CONF
from common.settings import load_settings

TUNED = sorted(path.stem for path in (CONF / "tuned").glob("*.yaml") if path.stem != "none")
OFFLINE = "train.device=cpu"


@pytest.mark.parametrize("name", TUNED)
def test_a_tuned_file_changes_its_method_on_its_data_only(name):
    method, _, data = name.partition("_on_")
    tuned = load_settings([f"method={method}", f"data={data}", OFFLINE]).method
    plain = load_settings([f"method={method}", f"data={data}", "tuned=none", OFFLINE]).method
    assert tuned.name == method
    assert tuned != plain
    elsewhere = load_settings([f"method={method}", "data=digits", OFFLINE]).method
    assert elsewhere == plain


def test_what_the_user_says_wins():
    assert load_settings(["method=moon", "method.mu=3", OFFLINE]).method.mu == 3.0


def test_the_choice_of_a_method_without_a_file_is_its_own_defaults():
    for method in ("fedavg", "fedprox", "fedapc"):
        tuned = load_settings([f"method={method}", OFFLINE]).method
        assert tuned == load_settings([f"method={method}", "tuned=none", OFFLINE]).method


@pytest.mark.parametrize(
    "method", ["moon", "feddyn", "fedopt", "fedproc", "fedapc", "fedplvm", "fedplcc", "scaffold", "fccl_plus"]
)
def test_the_yaml_says_every_option_and_the_class_s_defaults(method):
    """Both places that state a default agree; textures follow the data's image size."""
    chosen = load_settings([f"method={method}", "tuned=none", OFFLINE])
    assert chosen.method == type(chosen.method)()
    fields = {field.name for field in dataclasses.fields(chosen.method)}
    assert set(chosen.raw["method"]) == fields | {"_target_"}
