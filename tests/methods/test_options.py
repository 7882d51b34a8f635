"""The options of every method: a value out of range is refused, and another value changes the trained state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import yaml
from support.runs import run
from support.toy import Toy, method_at_defaults, toy_settings

OUT_OF_RANGE = {
    "adcol": "divergence=-0.1",
    "fccl_plus": "public_batch=1 public_batch=15 correlation=-1.0 similarity_temperature=0.0",
    "fdse": "split=3 consistency=-1.0 similarity_temperature=0.0 depth_growth=-0.1",
    "combined": "alpha=-0.1 contrast=-1.0 temperature=0.0",
    "fedadg": "adversarial_epochs=-1 weight=1.0 rate=0.0 smoothing=1.0",
    "fedapc": "temperature=0.0 contrast=-1.0 prototype_views=-1",
    "feddap": "temperature=0.0 alignment=-1.0 contrast=-1.0",
    "feddg_ga": "step_size=1.0 step_size=-0.1",
    "feddyn": "alpha=-0.1 clip=0.0",
    "fedgca": "beta=-1.0 alpha=-1.0",
    "fedheal": "threshold=1.0 threshold=-1.1 momentum=1.5 momentum=-0.1",
    "fedopt": "server_learning_rate=0.0 momentum=1.0 epsilon=0.0",
    "fedpall": "temperature=0.0 contrast=-1.0 divergence=-1.0 mix_low=1.1 mask_share=0.0",
    "fedplcc": "temperature=0.0 alpha=0.0 contrast=-1.0 correction=-1.0 fraction=0.0",
    "fedplvm": "temperature=0.0 alpha=0.0 alpha=1.5 contrast=-1.0 correction=-1.0",
    "fedproc": "temperature=0.0",
    "fedrep": "head_epochs=0",
    "fedsam": "rho=-0.1",
    "fedsr": "norm=-1.0 divergence=-1.0",
    "i2pfl": "temperature=0.0 contrast=-1.0 alignment=-1.0 smoothing=1.0 smoothing=-0.1",
    "moon": "mu=-1.0 temperature=0.0",
    "per_fedavg": "inner_rate=-1.0 adapt_steps=-1",
    "rucr": "temperature=0.0 contrast=-1.0 rebalance_epochs=-1 rebalance_rate=0.0",
    "scaffold": "server_learning_rate=0.0 control=1.5",
}
"""By method, options that its class refuses; one option a word."""

OTHERS = {
    "adcol": "feature_mode=eval",
    "combined": "temperature=1.0",
    "fccl_plus": "public_mode=eval distillation=0.0 distillation_temperature=1.0",
    "fdse": "split=1 consistency=1.0 similarity_temperature=0.01 depth_growth=2.0 form=printed form=kl",
    "feddap": "temperature=0.1 prototype_mode=post_eval",
    "feddg_ga": "metric=loss",
    "feddyn": "clip=0.01",
    "fedgca": "predictions=false maps=false",
    "fedheal": "weighting=samples",
    "fedpall": "protection=none feature_mode=eval",
    "fedproc": "prototype_mode=last_epoch_running",
    "moon": "frozen_mode=train temperature=1.0",
}
"""By method, options that change its result and that no test of its formulas sets; one change a word."""

START: dict[str, dict[str, Any]] = {
    "fccl_plus": {"public_learning_rate": 1e-3, "distillation": 1.0},
    "fedgca": {"beta": 1.0},
    "fdse": {"consistency": 0.5},
}
"""Options of a method's first run, from which the others differ; elsewhere its defaults."""


def cases(table: dict[str, str]) -> list[Any]:
    found = []
    for method, words in table.items():
        for word in words.split():
            name, value = word.split("=")
            found.append(pytest.param(method, {name: yaml.safe_load(value)}, id=f"{method}: {word}"))
    return found


@pytest.mark.parametrize(("method", "wrong"), cases(OUT_OF_RANGE))
def test_values_out_of_range_are_refused(method: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(method_at_defaults(method), **wrong)


@pytest.fixture(scope="module")
def state_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a function that runs a method with options and gives the hash of its state, each run once."""
    hashes: dict[str, str] = {}

    def of(method: str, options: dict[str, Any]) -> str:
        key = f"{method} {options}"
        if key not in hashes:
            data = Toy(image_size=32) if method == "fedgca" else Toy()  # for activation maps of several positions
            hyper = {**START.get(method, {}), **options}
            settings = toy_settings(method, tmp_path_factory.mktemp(method), hyper=hyper, data=data)
            hashes[key] = run(settings).sha256
        return hashes[key]

    return of


@pytest.mark.parametrize(("method", "options"), cases(OTHERS))
@pytest.mark.long
def test_every_option_changes_the_result(method: str, options: dict[str, Any], state_of: Callable[..., str]) -> None:
    assert state_of(method, options) != state_of(method, {})
