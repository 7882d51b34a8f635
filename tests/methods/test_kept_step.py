"""Methods whose clients keep a correction of their own step: what it equals, and under which settings it could not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.exchanges import device_of, request_to
from support.toy import toy_settings

from common.config import checked
from common.errors import ConfigError
from common.settings import load_settings
from strategies.core.federation import Federation
from strategies.core.method import ClientContext, Trained, Upload
from strategies.fedavg import FedAvg


@pytest.mark.parametrize(
    ("overrides", "remedies"),
    [
        ("rounds=guarded", "rounds.outliers=off"),
        ("aggregation=geometric_median", "aggregation=mean"),
        ("aggregation=geometric_median rounds=guarded", "rounds.outliers=off aggregation=mean"),
        ("rounds.transport=bfloat16", "rounds.transport=float32"),
    ],
)
def test_settings_that_change_updates_are_refused_at_the_start(overrides: str, remedies: str) -> None:
    """Of every method that keeps its own step the conformance tests know it."""
    with pytest.raises(ConfigError, match=f"set {remedies}"):
        load_settings(["method=feddyn", *overrides.split()])
    load_settings(["method=feddyn", *overrides.split(), *remedies.split()])


def test_noised_updates_are_refused_too() -> None:
    private = ["privacy=gaussian", "privacy.update_clip=1", "privacy.update_noise_multiplier=1"]
    with pytest.raises(ConfigError, match=r"set privacy\.update_clip=null"):
        load_settings(["method=feddyn", *private])


@pytest.mark.parametrize(
    "overrides",
    [
        ["method=scaffold", "method.control=0", "rounds.outliers=clip"],
        ["method=feddyn", "method.alpha=0", "aggregation=geometric_median"],
        ["method=moon", "rounds=guarded"],
        ["method=fedheal", "rounds.transport=float16"],
    ],
    ids=["without control", "without alpha", "the client's own model", "counts of signs"],
)
def test_what_changes_no_kept_step_is_allowed(overrides: list[str]) -> None:
    load_settings(overrides)


@checked
class Undeclared(FedAvg):
    """Keeps a tensor, and does not say what it is."""

    def upload(self, local: ClientContext, trained: Trained) -> Upload:
        return replace(super().upload(local, trained), local={"mine": torch.ones(1)})


@checked
class Declared(Undeclared):
    """Keeps the same tensor, which is nothing of the server's."""

    @property
    def keeps_step(self) -> bool:
        return False


@pytest.mark.parametrize("outliers", ["off", "clip"])
@pytest.mark.parametrize("method", [Undeclared(), Declared()], ids=["undeclared", "declared"])
def test_a_device_keeps_nothing_undeclared_where_updates_may_change(
    method: FedAvg, outliers: str, tmp_path: Path
) -> None:
    settings = toy_settings("fedavg", tmp_path, rounds={"outliers": outliers})
    settings = replace(settings, method=method)
    federation = Federation(settings)
    device = device_of(settings)
    request = request_to(settings, score=[])
    message = federation.message(federation.initial_state())
    if isinstance(method, Declared) or outliers == "off":
        device.answer(request, message)
        return
    with pytest.raises(ConfigError, match=r"\(mine\) .* keeps_step .* set rounds.outliers=off"):
        device.answer(request, message)
    assert not list((tmp_path / "device").glob("*"))
