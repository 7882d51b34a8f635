"""What a private device sends to a server that attacks: by numbers that are none, and by what it knows of the noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exchanges import local_exchange
from support.runs import TouchedEngine, run
from support.toy import ChangedToy, Toy, toy_settings

from client.privacy import Protection
from client.trainer import LocalExchange
from common.errors import ConfigError
from common.privacy import GaussianPrivacy, clip_factor, clip_rows, finite_copy
from common.settings import RunSettings

CLIP = 1.0
COVERED = ("privacy=gaussian", f"privacy.clip={CLIP}", f"privacy.update_clip={CLIP}")
NOISELESS = ("privacy.noise_multiplier=1e-9", "privacy.update_noise_multiplier=1e-9")
NAN, INFINITE = float("nan"), float("inf")


def private(method: str, output: Path, *overrides: str, **more: Any) -> RunSettings:
    return toy_settings(method, output, overrides=(*COVERED, *overrides), **more)


def exchange(settings: RunSettings, *, changed: bool = False, first_layer: float = 1.0) -> LocalExchange:
    """A client's exchange; the server sent a first layer of ``first_layer``, and one training image may be changed."""
    local = local_exchange(replace(settings, data=ChangedToy() if changed else Toy()))
    state = local.model.state_dict()
    name = next(name for name, tensor in state.items() if tensor.ndim == 4)
    if first_layer != 1.0:
        state[name] = state[name].sign() * first_layer
    local.model.load_state_dict(state)
    local.weights = {name: tensor.clone() for name, tensor in state.items()}
    return local


def protection(settings: RunSettings, local: LocalExchange) -> Protection:
    assert isinstance(settings.privacy, GaussianPrivacy)
    return Protection(settings.privacy, local, simulated=True)


# ---- numbers that are none -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, INFINITE, -INFINITE], ids=["nan", "infinity", "minus infinity"])
def test_one_value_that_is_no_number_does_not_switch_clipping_off(value: float, tmp_path: Path) -> None:
    local = exchange(private("fedavg", tmp_path, *NOISELESS))
    names = [name for name, tensor in local.weights.items() if tensor.is_floating_point()]
    trained = {name: tensor.clone() for name, tensor in local.weights.items()}
    trained[names[0]].view(-1)[0] = value
    trained[names[1]] = trained[names[1]] + 500.0
    sent = protection(local.settings, local).weights(trained)
    moved = torch.cat([(sent[name].double() - local.weights[name].double()).flatten() for name in names])
    assert bool(torch.isfinite(moved).all())
    assert 0.9 * CLIP <= float(moved.norm()) <= CLIP + 1e-3


def test_a_norm_that_overflows_sends_noise_alone(tmp_path: Path) -> None:
    local = exchange(private("fedavg", tmp_path, *NOISELESS))
    wide = {"w": torch.zeros(4, dtype=torch.float64)}
    local.weights = wide
    sent = protection(local.settings, local).weights({"w": torch.full((4,), 1e200, dtype=torch.float64)})
    assert float(sent["w"].abs().max()) < 1e-6


def test_rows_that_hold_no_numbers_are_no_longer_than_any() -> None:
    rows = torch.tensor([[NAN, 500.0], [INFINITE, 3.0], [3e38, 3e38], [NAN, NAN], [0.3, 0.4]])
    clipped = clip_rows(rows, CLIP)
    assert clipped.norm(dim=1).tolist() == pytest.approx([1.0, 1.0, 1.0, 0.0, 0.5])
    assert clip_rows(torch.full((1, 2), 1e200, dtype=torch.float64), CLIP).tolist() == [[0.0, 0.0]]
    assert finite_copy(rows).tolist()[3] == [0.0, 0.0]
    assert [clip_factor(norm, 2.0) for norm in (0.0, 2.0, 8.0, NAN, INFINITE)] == [1.0, 1.0, 0.25, 0.0, 0.0]


@pytest.mark.parametrize("first_layer", [1.0, 1e20, 1e38], ids=["an honest model", "1e20", "1e38"])
@pytest.mark.parametrize("unit", ["sample", "client"])
def test_no_received_model_moves_prototypes_beyond_the_bound(unit: str, first_layer: float, tmp_path: Path) -> None:
    """A server that sends a first layer of 1e38 got prototypes without a bound."""
    settings = private("fpl", tmp_path, *NOISELESS, f"privacy.unit={unit}")
    found = []
    for changed in (False, True):
        local = exchange(settings, changed=changed, first_layer=first_layer)
        guard = protection(settings, local)
        guard.before_training()
        found.append(guard.prototypes(local.run().prototypes))
    before, after = found
    assert before.labels.tolist() == after.labels.tolist()
    assert bool(torch.isfinite(before.vectors).all())
    distances = (before.vectors.double() - after.vectors.double()).norm(dim=1)
    if unit == "client":
        assert float(distances.norm()) <= 2 * CLIP * len(before) ** 0.5 + 1e-5
    else:
        assert float(distances[0]) <= 2 * CLIP / float(before.weights[0]) + 1e-5
        assert float(distances[1:].max()) <= 1e-6


# ---- noise that the seed tells ---------------------------------------------------------------------------------------


def noised(settings: RunSettings) -> dict[str, torch.Tensor]:
    """The update that a client sends after training that moved every weight by a thousandth."""
    local = exchange(settings)
    floats = [name for name, tensor in local.weights.items() if tensor.is_floating_point() and "running" not in name]
    trained = {name: tensor + 0.001 if name in floats else tensor for name, tensor in local.weights.items()}
    sent = protection(settings, local).weights(trained)
    return {name: sent[name].double() - local.weights[name].double() for name in floats}


def test_two_mechanisms_of_one_seed_do_not_cancel(tmp_path: Path) -> None:
    """With the same noise in both, twice the first update minus the second is the update without any."""
    keyed = ("privacy.randomness=keyed",)
    once = noised(private("fedavg", tmp_path, *keyed, "privacy.update_noise_multiplier=1"))
    twice = noised(private("fedavg", tmp_path, *keyed, "privacy.update_noise_multiplier=2"))
    rest = torch.cat([(2 * once[name] - twice[name]).flatten() for name in once])
    assert float((rest - 0.001).abs().median()) > 0.5


# ---- what else an answer holds ---------------------------------------------------------------------------------------


def test_a_private_reply_names_the_source_of_its_noise_and_has_no_measurements(tmp_path: Path) -> None:
    for randomness, overrides in (("keyed", COVERED), ("system", (*COVERED, "privacy.randomness=system")), ("", ())):
        settings = toy_settings("fpl", tmp_path / f"is {randomness}", overrides=overrides, train={"rounds": 1})
        engine = TouchedEngine(settings)
        done = run(settings, engine)
        replies = [item.reply.answer for item in engine.messages if item.reply]
        trained = [answer for answer in replies if answer.trained]
        assert trained
        assert {answer.randomness for answer in trained} == {randomness}
        assert {answer.randomness for answer in replies if not answer.trained} == {""}
        assert {bool(answer.seconds or answer.peak_bytes) for answer in replies} == {not randomness}
        assert done.replies()[0]["randomness"] == randomness
        if randomness:
            assert done.summary["privacy"]["unprotected"] == []
            assert done.summary["privacy"]["randomness"] == [randomness]


def test_a_device_answers_no_exchange_that_carries_no_noise(tmp_path: Path) -> None:
    """The server refuses such methods before the first round; one that does not is refused by the device."""
    settings = private("rucr", tmp_path, train={"rounds": 1})
    plain = toy_settings("rucr", tmp_path, train={"rounds": 1})
    engine = TouchedEngine(plain)
    run(plain, engine)
    later = next(item for item in engine.messages if item.request.exchange != "train" and item.request.train)
    device = TouchedEngine(settings).inner.devices[later.request.client]
    request = replace(later.request, identity=settings.identity, code=settings.code)
    with pytest.raises(ConfigError, match="also sends replies in further exchanges"):
        device.answer(request, later.message)
