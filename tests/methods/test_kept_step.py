"""Methods whose clients keep a correction of their own step: what it equals, and under which settings it could not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.exchanges import device_of, request_to
from support.nets import kept
from support.runs import run
from support.toy import toy_settings
from torch import Tensor

from common.config import checked
from common.errors import ConfigError
from common.settings import load_settings
from common.storage import under_prefix
from server.run.checkpoint import Checkpoints
from strategies.core.federation import Federation
from strategies.core.method import ClientContext, Trained, Upload
from strategies.fedavg import FedAvg


def kept_by_clients(folder: Path, prefix: str) -> list[dict[str, Tensor]]:
    """The newest tensors of each client under a prefix."""
    return [under_prefix(f"local/{prefix}", tensors) for tensors in kept(folder).values()]


@pytest.mark.parametrize("participation", [1.0, 0.4], ids=["all", "some"])
@pytest.mark.parametrize(
    ("method", "server", "client"), [("feddyn", "h/", "lambda/"), ("scaffold", "control/", "control/")]
)
def test_the_servers_correction_is_the_mean_of_the_clients(
    method: str, server: str, client: str, participation: float, tmp_path: Path
) -> None:
    """To the rounding of float32. Clients that have not taken part yet have zeros."""
    rounds = {"participation": participation, "evaluate_every": 4}
    done = run(toy_settings(method, tmp_path, rounds=rounds, train={"rounds": 4}))
    checkpoint = Checkpoints(done.folder / "checkpoint").load()
    assert checkpoint is not None
    clients = kept_by_clients(tmp_path, client)
    error, size = 0.0, 0.0
    for name, correction in under_prefix(server, checkpoint.state.extra).items():
        mean = torch.stack([each[name].double() for each in clients]).sum(0) / 3
        error += float((correction - mean).square().sum())
        size += float(mean.square().sum())
    print(f"relative difference {(error / size) ** 0.5:.2g}")
    assert error**0.5 <= 1e-6 * size**0.5


@pytest.mark.parametrize("method", ["scaffold", "feddyn", "fedgca", "combined"])
@pytest.mark.parametrize(
    ("overrides", "remedies"),
    [
        (["rounds=guarded"], ["rounds.outliers=off"]),
        (["rounds.outliers=clip"], ["rounds.outliers=off"]),
        (["aggregation=geometric_median"], ["aggregation=mean"]),
        (["aggregation=geometric_median", "rounds=guarded"], ["rounds.outliers=off", "aggregation=mean"]),
    ],
    ids=lambda given: given[0],
)
def test_settings_that_change_updates_are_refused_at_the_start(
    method: str, overrides: Sequence[str], remedies: Sequence[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings([f"method={method}", *overrides])
    assert f"set {' '.join(remedies)}, or" in str(caught.value)
    load_settings([f"method={method}", *overrides, *remedies])


def test_noised_updates_are_refused_too() -> None:
    private = ["privacy=gaussian", "privacy.update_clip=1", "privacy.update_noise_multiplier=1"]
    with pytest.raises(ConfigError, match=r"privacy.update_clip=1 may change .* set privacy.update_clip=null"):
        load_settings(["method=feddyn", *private])


@pytest.mark.parametrize(
    "overrides",
    [
        ["method=scaffold", "method.control=0", "rounds.outliers=clip"],
        ["method=feddyn", "method.alpha=0", "aggregation=geometric_median"],
        ["method=moon", "rounds=guarded"],
    ],
    ids=["without control", "without alpha", "the client's own model"],
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
    with pytest.raises(ConfigError, match=r"\(mine\) and does not declare .* keeps_step .* set rounds.outliers=off"):
        device.answer(request, message)
    assert not list((tmp_path / "device").glob("*"))
