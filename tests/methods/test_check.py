"""A method checks the run's settings in its own file (``Method.check``)."""

from __future__ import annotations

import inspect

import pytest

import common.settings
from common.config import checked
from common.errors import ConfigError
from common.settings import RunSettings, load_settings, with_method
from strategies.core.federation import Federation
from strategies.fedavg import FedAvg


@checked
class Asking(FedAvg):
    """A method of a user's own, with a condition of its own."""

    def check(self, settings: RunSettings) -> None:
        super().check(settings)
        if settings.train.epochs < 2:
            raise ConfigError("it needs two epochs: set train.epochs=2")


@checked
class Plain(FedAvg):
    """A method of a user's own without conditions."""


def test_a_method_of_one_s_own_is_asked_when_settings_are_composed() -> None:
    own = f"method._target_={__name__}.Asking"
    with pytest.raises(ConfigError, match=r"set train\.epochs=2"):
        load_settings([own, "data=glyphs"])
    assert load_settings([own, "data=glyphs", "train.epochs=2"])


def test_a_method_that_was_put_in_later_is_asked_before_the_first_round() -> None:
    settings = load_settings(["data=glyphs"])
    Federation(with_method(settings, Plain()))
    with pytest.raises(ConfigError, match=r"set train\.epochs=2"):
        Federation(with_method(settings, Asking()))


def test_a_class_that_is_no_method_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be a method \(strategies\.core\.method\.Method\)"):
        load_settings(["method._target_=common.models.specs.Small", "data=glyphs"])


@pytest.mark.parametrize("chosen", [["method=fedgca"], ["method=fedapc", "method.reading=views"]])
def test_a_method_that_compares_views_needs_one(chosen: list[str]) -> None:
    assert load_settings([*chosen, "data=glyphs", "views=randconv"]).method.multi_view
    with pytest.raises(ConfigError, match=rf"{chosen[0]} compares views .* views=none gives none .*views\.count"):
        load_settings([*chosen, "data=glyphs", "views=none"])


@pytest.mark.parametrize(
    "chosen",
    [["method=fedbn"], ["method=fedpall"], ["method=single_set"], ["method=fedproto", "method.aggregate_models=false"]],
)
def test_a_model_for_each_client_has_no_score_where_there_is_none(chosen: list[str]) -> None:
    """Such a run trained all its rounds, and its score was partial or, with every domain unseen, an error."""
    left_out = ["data=glyphs", "protocol=leave_one_out", "protocol.leave_out=[sketch]"]
    for unseen in (left_out, ["data=glyphs", "protocol=dirichlet", "protocol.domain=signs"]):
        assert load_settings(["method=fedproto", *unseen])
        with pytest.raises(ConfigError, match=rf"{chosen[0]} has a model for each client and none for .*sketch"):
            load_settings([*chosen, *unseen])
    assert load_settings([*chosen, "data=glyphs", "protocol=one_per_domain"])


def test_only_a_method_with_a_smoothing_of_labels_refuses_a_second() -> None:
    """I2PFL has a setting of the same name, which smooths prototypes over the rounds."""
    assert load_settings(["method=i2pfl", "data=glyphs", "train.label_smoothing=0.1"])
    with pytest.raises(ConfigError, match=r"method=fedadg smooths labels .* set method\.smoothing instead"):
        load_settings(["method=fedadg", "data=glyphs", "train.label_smoothing=0.1"])


def test_the_settings_ask_no_method_for_a_field_by_its_name() -> None:
    """Every condition is in a ``check``, which knows its own fields."""
    source = inspect.getsource(common.settings)
    assert "getattr(settings.method" not in source
    assert "hasattr(settings.method" not in source
