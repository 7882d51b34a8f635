"""FedDG-GA against its released loop in NumPy: gaps, steps, shares and the next model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.exchanges import local_exchange
from support.halves import Half, model_state, updates
from support.runs import run
from support.toy import toy_settings

from common.choices import CONF
from common.errors import PayloadError
from common.storage import tensors_sha256
from server.run.checkpoint import Checkpoints
from strategies.core.exchange import Measured
from strategies.core.method import Trained
from strategies.feddg_ga import AVERAGED_IN, LOSS_UNIT, MEASURED, MEASURED_IN, SHARES, TRAINED, FedDGGA, capped_shares

ROUNDS = 6
FLOATS = ["layer.weight", "layer.bias", "norm.running_mean", "norm.running_var"]


def released(received, trained, models, step, *, metric, centred, rounds, start):
    """The shares that average each round, and the averages.

    A loop in the order of the released code: train and measure, average, measure the average, move the shares.

    Args:
        received: ``[T, C]``, the metric of the average of round t at each client.
        trained: ``[T, C]``, the metric of the model that each client trained in round t.
        models: T lists of C states.
    """
    shares, used, averages = np.array(start, dtype=np.float64), [], []
    sign = 1.0 if metric == "loss" else -1.0
    for t in range(len(models)):
        used.append(shares.copy())
        average = dict.fromkeys(FLOATS, 0.0)
        for k, model in enumerate(models[t]):
            for name in FLOATS:
                average[name] = average[name] + shares[k] / shares.sum() * model[name].double().numpy()
        averages.append(average)
        gap = received[t] - trained[t]
        if centred:
            gap = gap - gap.mean()
        if np.abs(gap).max() < 1e-12:
            continue
        length = step * (1 - t / rounds)
        if not centred:  # the code's formula has t - 1 and its loop begins with 0
            length = step * (1 - (t - 1) / rounds) / len(shares)
        shares = shares + sign * length * gap / np.abs(gap).max()
        shares = np.maximum(shares, 0) if centred else np.clip(shares, 0, 1)
        shares = shares / shares.sum()
    return used, averages


def replies(number, received, trained, count, who=(0, 1, 2)):
    """Round ``number``'s updates with what the clients measured."""
    found = []
    for update in updates(number, who):
        index = update.client.index
        numbers = torch.tensor([int(received[index]), int(trained[index]), count])
        weights = {}
        for name, tensor in update.weights.items():
            weights[name] = tensor.double() if tensor.is_floating_point() else tensor
        found.append(replace(update, weights=weights, extra={MEASURED: numbers}))
    return found


@pytest.mark.parametrize("step", [0.2, 0.9], ids=["the code's step", "a step that reaches 0"])
@pytest.mark.parametrize("metric", ["accuracy", "loss"])
@pytest.mark.parametrize("centred", [False, True], ids=["released", "centred"])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_shares_and_models_are_the_released_ones(step, metric, centred, weighting):
    draws = np.random.default_rng(0)
    count, unit = 40, 1 / 40
    high = 41
    if metric == "loss":
        unit, high = LOSS_UNIT, 3_000_000
    received, trained = draws.integers(0, high, (ROUNDS, 3)), draws.integers(0, high, (ROUNDS, 3))
    models = [[model_state("client", t + 1, k) for k in range(3)] for t in range(ROUNDS)]
    start = [1 / 3, 1 / 3, 1 / 3] if weighting == "uniform" else [10 / 60, 30 / 60, 20 / 60]
    used, averages = released(
        received * unit, trained * unit, models, step, metric=metric, centred=centred, rounds=ROUNDS, start=start
    )
    method = FedDGGA(step_size=step, metric=metric, centred=centred, weighting=weighting)
    half = Half(rounds=ROUNDS, largest_share=1.0)
    state = method.initial_state(half.shared, half)
    before = np.zeros(3, dtype=int)
    for t in range(ROUNDS):
        half.round = t + 1
        state = method.aggregate(state, replies(t + 1, before, trained[t], count), half)
        np.testing.assert_allclose(state.extra[SHARES].numpy(), used[t], rtol=0, atol=1e-12)
        for name in FLOATS:
            np.testing.assert_allclose(state.weights[name].numpy(), averages[t][name], rtol=0, atol=1e-12)
        before = received[t]
    assert np.abs(used[-1] - np.array(start)).max() > 0.01, "no share has moved"
    if step == 0.9 and centred:
        assert min(shares.min() for shares in used) == 0


def two_rounds(method, received, trained=(8, 8, 8), who=(0, 1, 2), then=(0, 1, 2)):
    """Return the states after two rounds: models trained to ``trained`` of ten; their average has ``received``."""
    half = Half(largest_share=1.0)
    state = method.initial_state(half.shared, half)
    states = []
    for number, present in ((1, who), (2, then)):
        half.round = number
        state = method.aggregate(state, replies(number, received, trained, 10, present), half)
        states.append(state)
    return states


@pytest.mark.parametrize(
    ("centred", "received"),
    [(True, (5, 5, 5)), (True, (8, 8, 8)), (False, (8, 8, 8))],
    ids=["equal gaps, centred", "no gaps, centred", "no gaps"],
)
def test_equal_gaps_leave_the_shares_alone(centred, received):
    first, second = two_rounds(FedDGGA(centred=centred, weighting="samples"), received)
    assert torch.equal(first.extra[SHARES], second.extra[SHARES])


def test_a_client_that_was_not_in_the_last_round_keeps_its_share():
    first, second = two_rounds(FedDGGA(), (2, 7, 8), who=(0, 1), then=(0, 1, 2))
    assert second.extra[SHARES][2] == pytest.approx(1 / 3)
    assert float(second.extra[SHARES][:2].sum()) == pytest.approx(2 / 3)
    step = 0.2 / 3 * (1 + 1 / 10)  # a third, although two clients took part
    moved = 1 / 3 + step, 1 / 3 + step / 6  # gaps of -0.6 and -0.1
    assert second.extra[SHARES][0] == pytest.approx(2 / 3 * moved[0] / sum(moved))
    assert first.extra[MEASURED_IN].tolist() == [1, 1, 0]
    _, absent = two_rounds(FedDGGA(), (2, 7, 8), then=(0, 1))
    assert absent.extra[SHARES][2] == pytest.approx(1 / 3)
    assert absent.extra[TRAINED].tolist() == [0.8, 0.8, 0.8]
    assert int(absent.extra[AVERAGED_IN]) == 2


def test_a_client_that_returns_is_not_judged_by_a_model_of_before_the_last_round():
    half, method = Half(largest_share=1.0), FedDGGA()
    state = method.initial_state(half.shared, half)
    for number, who in enumerate([(0, 1, 2), (0, 1), (0, 1, 2)], start=1):
        half.round = number
        state = method.aggregate(state, replies(number, (2, 7, 5), (8, 8, 8), 10, who), half)
    assert state.extra[SHARES][2] == pytest.approx(1 / 3)
    assert state.extra[SHARES][0] > 1 / 3
    assert state.extra[MEASURED_IN].tolist() == [3, 3, 3]


def test_participants_without_any_share_count_the_same():
    assert capped_shares([0.0, 0.0, 0.0], 0.5) == [1.0, 1.0, 1.0]
    assert capped_shares([0.0, 0.0, 1.0], 0.5) == [1.0, 1.0, 1.0]
    assert capped_shares([1.0, 1.0, 9.0], 0.5) == [1.0, 1.0, 2.0]


def test_what_a_liar_gains_by_the_scaling_is_on_the_page():
    method = FedDGGA()
    gaps = {0: -0.1, 1: 0.1, 2: 0.1, 3: 0.1}
    lied = method.moved(dict.fromkeys(range(4), 0.25), gaps, 1.0, Half(client_count=4))
    assert lied[0] - 0.25 > method.step_size / 4
    text = " ".join((CONF.parent / "docs" / "methods.md").read_text().split())
    assert f"of four equal shares, one can rise from 0.25 to {lied[0]:.2f}." in text


@pytest.mark.parametrize(
    ("metric", "numbers"),
    [
        ("accuracy", (11, 5, 10)),
        ("accuracy", (5, -1, 10)),
        ("accuracy", (0, 0, 0)),
        ("loss", (-1, 5, 10)),
        ("loss", (5, 2 * 10**12, 10)),
    ],
    ids=["more than all are right", "less than none", "no samples", "a negative loss", "a loss beyond the largest"],
)
def test_impossible_measurements_are_refused(metric, numbers):
    update = replace(updates(1)[0], extra={MEASURED: torch.tensor(numbers)})
    with pytest.raises(PayloadError, match=f"which is no {metric}"):
        FedDGGA(metric=metric).inspect(update, Half())


def test_a_model_that_has_diverged_has_the_largest_loss():
    method = FedDGGA(metric="loss")
    assert method._sent(Measured(4, 1, float("nan"))) == method._sent(Measured(4, 1, 1e9)) == 10**12
    assert method._sent(Measured(4, 1, 0.25)) == 250_000


# ---- on the device ---------------------------------------------------------------------------------------------------


def test_the_device_measures_validation_samples_and_leaves_the_model_alone(tmp_path):
    local = local_exchange(toy_settings("feddg_ga", tmp_path))
    local.model.train()
    before = tensors_sha256(local.model.state_dict())
    on_training = local.validate()
    assert on_training.samples == len(local.split) == 25
    held = local.split.subset(torch.arange(5))
    local.validation = held
    local.model.eval()
    images = local.settings.data.augmentation.test(held.images)
    right = int((local.model(images)[1].argmax(1) == held.labels).sum())
    local.model.train()
    assert local.validate()[:2] == (5, right)
    assert tensors_sha256(local.model.state_dict()) == before
    assert local.model.training


def test_it_sends_the_received_and_the_trained_model(tmp_path):
    settings = toy_settings("feddg_ga", tmp_path, train={"epochs": 8})
    local = local_exchange(settings)
    settings.method.begin(local)
    untrained = local.validate().correct
    local.run()
    upload = settings.method.upload(local, Trained(None, 1, {}))
    after = local.validate().correct
    assert upload.extra[MEASURED].tolist() == [untrained, after, 25]
    assert after > untrained


def test_a_run_moves_the_shares_by_what_clients_measured(tmp_path):
    run(toy_settings("feddg_ga", tmp_path, train={"rounds": 3}, overrides=("protocol.validation=0.2",)))
    state = Checkpoints(tmp_path / "checkpoint").load().state
    assert float(state.extra[SHARES].sum()) == pytest.approx(1)
    assert len(set(state.extra[SHARES].tolist())) > 1
    assert state.extra[MEASURED_IN].tolist() == [3, 3, 3]
    held = (state.extra[TRAINED] * torch.tensor([5.0, 5.0, 4.0])).tolist()
    assert held == pytest.approx([round(value) for value in held]), "not shares of the validation samples"


def test_steps_depend_on_the_number_of_rounds():
    assert FedDGGA().scheduled
    assert not FedDGGA(step_size=0.0).scheduled
