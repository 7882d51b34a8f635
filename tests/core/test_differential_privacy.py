"""Differential privacy: the claimed sensitivities, the promised noise, and nothing else that leaves."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import kstest, norm
from support.exchanges import local_exchange
from support.runs import TouchedEngine, run
from support.toy import CLASSES, ChangedToy, Toy, toy_settings

from client.device import Device
from client.privacy import Protection
from common.accounting import composed, epsilon
from common.client_state import ClientStore
from common.data.protocols import ClientSpec
from common.errors import ConfigError, PayloadError
from common.numerics import generator
from common.privacy import GaussianPrivacy, NoPrivacy, clip_rows, gaussian
from common.prototypes import PrototypeSet
from common.settings import RunSettings, load_settings, settings_of
from strategies.core.method import Upload
from strategies.core.protection import check_nothing_else

CLIP, ON = 2.0, ("privacy=gaussian", "privacy.clip=2.0")


def private(method: str, output: Path, *overrides: str, **more: Any) -> RunSettings:
    return toy_settings(method, output, overrides=(*ON, *overrides), **more)


def released(settings: RunSettings, *, simulated: bool = True) -> PrototypeSet:
    local = local_exchange(settings)
    assert isinstance(settings.privacy, GaussianPrivacy)
    protection = Protection(settings.privacy, local, simulated=simulated)
    protection.before_training()
    return protection.prototypes(local.run().prototypes)


# ---- sensitivity -----------------------------------------------------------------------------------------------------


def test_without_protection_one_image_moves_every_class_mean(tmp_path: Path) -> None:
    """Why prototypes come from the received model: after training, every feature depends on every image."""
    settings = toy_settings("fpl", tmp_path)
    before, after = (
        local_exchange(replace(settings, data=data)).run().prototypes.vectors for data in (Toy(), ChangedToy())
    )
    assert bool(((after - before).norm(dim=1) > 0).all())


def test_clipping_shortens_and_never_lengthens() -> None:
    rows = torch.randn(50, 7, generator=generator(0, "rows")) * torch.logspace(-3, 3, 50)[:, None]
    clipped = clip_rows(rows, 1.5)
    lengths = rows.norm(dim=1)
    assert torch.allclose(clipped.norm(dim=1), lengths.clamp_max(1.5), rtol=1e-5)
    assert torch.equal(clipped[lengths < 1.4], rows[lengths < 1.4])
    assert torch.equal(clip_rows(torch.zeros(2, 3), 1.0), torch.zeros(2, 3))


# ---- noise -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["sample", "client"])
def test_noise_has_the_deviation_that_is_promised(unit: str, tmp_path: Path) -> None:
    small = (f"privacy.unit={unit}", "privacy.clip=100")  # so long that nothing is shortened afterwards
    clean = released(private("fpl", tmp_path, *small, "privacy.noise_multiplier=0"))
    noised = released(private("fpl", tmp_path, *small, "privacy.noise_multiplier=0.005"))
    assert torch.equal(clean.labels, noised.labels)
    assert torch.equal(clean.weights, noised.weights)
    noise = (noised.vectors - clean.vectors).double()
    for row, count in zip(noise, clean.weights.tolist(), strict=True):
        sensitivity = 200 / count if unit == "sample" else 200 * math.sqrt(CLASSES)
        assert kstest((row / (0.005 * sensitivity)).numpy(), norm.cdf).pvalue > 1e-4


@pytest.mark.parametrize("draws", [generator(0, "x"), None], ids=["keyed", "system"])
def test_standard_normal_numbers_are_that(draws: torch.Generator | None) -> None:
    numbers = gaussian((40, 500), draws)
    assert numbers.dtype == torch.float64
    assert bool(torch.isfinite(numbers).all())
    assert kstest(numbers.flatten().numpy(), norm.cdf).pvalue > 1e-6
    assert len(numbers.unique()) == numbers.numel()


def test_the_largest_and_the_smallest_word_of_the_system_are_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    for byte, sign in ((b"\xff", 1.0), (b"\x00", -1.0)):
        monkeypatch.setattr("os.urandom", lambda count, byte=byte: byte * count)
        number = sign * float(gaussian((1,), None))
        assert 8.2 < number < 8.3


def test_noise_repeats_in_simulation_and_never_on_a_device_of_its_own(tmp_path: Path) -> None:
    settings = private("fpl", tmp_path)
    assert released(settings) == released(settings)
    assert released(settings, simulated=False) != released(settings, simulated=False)
    keyed = private("fpl", tmp_path, "privacy.randomness=keyed")
    assert released(keyed, simulated=False) == released(keyed)
    system = private("fpl", tmp_path, "privacy.randomness=system")
    assert released(system) != released(system)


def test_a_device_plays_one_client_unless_the_engine_simulates(tmp_path: Path) -> None:
    settings = private("fpl", tmp_path)
    store = ClientStore(tmp_path / "device")
    assert not Device(settings, ClientSpec("bright", 0), lambda run: store).contract.simulated
    assert all(device.contract.simulated for device in TouchedEngine(settings).inner.devices.values())


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clip", "noise"), [(0.05, 0.0), (1e6, 0.0), (0.05, 0.01)])
def test_updates_are_clipped_together_and_noised(clip: float, noise: float, tmp_path: Path) -> None:
    more = (f"privacy.update_clip={clip}", f"privacy.update_noise_multiplier={noise}")
    settings = private("fedavg", tmp_path, *more)
    local = local_exchange(settings)
    assert isinstance(settings.privacy, GaussianPrivacy)
    protection = Protection(settings.privacy, local, simulated=True)
    local.run()
    trained = {name: tensor.clone() for name, tensor in local.model.state_dict().items()}
    sent = protection.weights(trained)
    floats = [name for name, tensor in trained.items() if tensor.is_floating_point()]
    update = torch.cat([(trained[name] - local.weights[name]).flatten() for name in floats]).double()
    moved = torch.cat([(sent[name] - local.weights[name]).flatten() for name in floats]).double()
    if noise:
        deviation = noise * 2 * clip
        rest = moved - update * min(1.0, clip / float(update.norm()))
        assert abs(float(rest.std()) / deviation - 1) < 0.05
    else:
        assert float(moved.norm()) == pytest.approx(min(clip, float(update.norm())), rel=1e-3)
        assert float(torch.cosine_similarity(moved, update, dim=0)) > 0.999
    counters = [name for name in trained if name not in floats]
    assert counters
    assert all(torch.equal(sent[name], local.weights[name]) for name in counters)


def test_weights_without_a_clip_are_as_trained(tmp_path: Path) -> None:
    settings = private("fpl", tmp_path)
    assert isinstance(settings.privacy, GaussianPrivacy)
    weights = {"w": torch.ones(2)}
    assert Protection(settings.privacy, local_exchange(settings), simulated=True).weights(weights) is weights


# ---- the accountant --------------------------------------------------------------------------------------------------


def exact_epsilon(multiplier: float, releases: int, delta: float) -> float:
    """Of the composition of Gaussian mechanisms, which is one itself (Dong, Roth and Su, 2022, Corollaries 1 and 2)."""
    mu = math.sqrt(releases) / multiplier

    def excess(value: float) -> float:
        tail = math.exp(value + norm.logcdf(-value / mu - mu / 2))
        return float(norm.cdf(-value / mu + mu / 2) - tail - delta)

    return float(brentq(excess, 1e-9, 500.0))


@pytest.mark.parametrize("multiplier", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("releases", [1, 8, 100])
def test_the_accountant_bounds_the_exact_epsilon_closely(multiplier: float, releases: int) -> None:
    found, exact = epsilon([multiplier], releases, 1e-5), exact_epsilon(multiplier, releases, 1e-5)
    assert exact <= found <= 1.25 * exact + 0.1


def test_mechanisms_of_one_answer_and_of_several_runs_compose() -> None:
    assert epsilon([2.0, 2.0], 5, 1e-5) == pytest.approx(epsilon([2.0], 10, 1e-5))
    assert epsilon([2.0], 0, 1e-5) == 0.0
    assert epsilon([2.0, 3.0], 2**62, 1e-5) > 1e9  # no loop over the releases
    assert epsilon([2.0, 0.0], 1, 1e-5) == math.inf
    several = composed([([2.0, 3.0], 5), ([4.0], 1), ([1.0], 0)], 1e-5)
    assert several == pytest.approx(composed([([2.0], 5), ([3.0], 5), ([4.0], 1)], 1e-5))
    assert composed([], 1e-5) == 0.0


def test_the_summary_has_the_privacy_budget_spent_by_each_client(tmp_path: Path) -> None:
    settings = private("fpl", tmp_path)
    engine = TouchedEngine(settings, failing=lambda request: request.client == "dark-0" and request.round == 2)
    done = run(settings, engine)
    report = done.summary["privacy"]
    assert report["releases"] == {"bright-0": 2, "dark-0": 1, "noisy-0": 2}
    conditional = report["conditional_epsilon"]
    assert conditional["bright-0"] == pytest.approx(epsilon([1.0], 2, 1e-5), abs=1e-3)
    assert conditional["dark-0"] == pytest.approx(epsilon([1.0], 1, 1e-5), abs=1e-3)
    assert report["epsilon"] == dict.fromkeys(conditional)  # weights leave in the clear
    assert (report["covers"], report["unprotected"][:1]) == (["prototypes"], ["weights"])
    assert "opacus" in report["accountant"]
    rows = [row for row in done.replies() if row["status"] in ("trained", "scaled")]
    assert [row["releases"] for row in rows if row["client"] == "bright-0"] == ["1", "2"]
    assert all(json.loads(row["losses"]) == {} for row in rows)
    sent = [item.reply.payload for item in engine.messages if item.request.train and item.reply]
    assert all(bool((payload.prototypes.vectors.norm(dim=1) <= CLIP + 1e-4).all()) for payload in sent)


def test_weights_are_covered_where_they_are_clipped(tmp_path: Path) -> None:
    done = run(private("fpl", tmp_path, "privacy.update_clip=0.1", train={"rounds": 1}))
    report = done.summary["privacy"]
    assert report["covers"] == ["prototypes", "weights"]
    assert not {"prototypes", "weights"} & set(report["unprotected"])
    assert report["conditional_epsilon"]["bright-0"] == pytest.approx(epsilon([1.0, 1.0], 1, 1e-5), abs=1e-3)


def test_a_resumed_private_simulation_is_bit_equal(tmp_path: Path) -> None:
    whole = run(private("fpl", tmp_path / "whole"))
    run(private("fpl", tmp_path / "parts"), stop_after=1)
    parts = run(private("fpl", tmp_path / "parts", resume=True))
    assert parts.sha256 == whole.sha256
    assert parts.summary["privacy"]["releases"] == whole.summary["privacy"]["releases"]


# ---- nothing else leaves ---------------------------------------------------------------------------------------------


def test_the_device_checks_the_result_again() -> None:
    noised = PrototypeSet(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), torch.ones(1))
    check_nothing_else(Upload(prototypes=noised), noised, {"w"})
    for upload in (
        Upload(prototypes=replace(noised, vectors=torch.ones(1, 4))),
        Upload(extra={"features": torch.ones(1)}),
        Upload(weights={"other": torch.ones(1)}),
        Upload(weights={"w": torch.ones(1), "other": torch.ones(1)}),
    ):
        with pytest.raises(PayloadError, match="nothing was sent"):
            check_nothing_else(upload, noised, {"w"})
    for upload in (Upload(prototypes=noised), Upload(weights={"w": torch.ones(1)})):
        with pytest.raises(PayloadError, match="nothing was sent"):
            check_nothing_else(upload, None, ())


# ---- settings --------------------------------------------------------------------------------------------------------


def test_a_missing_accountant_is_named_before_the_first_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    with pytest.raises(ConfigError, match=r"\[privacy\]"):
        run(private("fpl", tmp_path))


def test_privacy_is_chosen_and_makes_another_run() -> None:
    plain = load_settings(["method=fpl"])
    assert plain.privacy == NoPrivacy()
    with pytest.raises(ConfigError, match="no privacy chosen"):
        settings_of({key: value for key, value in plain.raw.items() if key != "privacy"})
    assert load_settings(["method=fpl", "privacy=gaussian"]).identity != plain.identity
    assert load_settings(["privacy=gaussian"]).privacy == GaussianPrivacy()


@pytest.mark.parametrize(
    ("key", "value"),
    [("clip", 0), ("noise_multiplier", -1), ("update_clip", 0), ("update_noise_multiplier", -1), ("delta", 0)],
)
def test_values_out_of_range_are_named(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=key):
        load_settings(["privacy=gaussian", f"privacy.{key}={value}"])
