"""Schedules, optimizers, label smoothing, class weights, and runs that stop early."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exchanges import local_exchange
from support.runs import TouchedEngine, run
from support.scored import all_groups
from support.toy import Toy, toy_settings
from torch.nn import functional as F

from common.choices import CONF
from common.errors import ConfigError
from common.losses import balanced_weights, cross_entropy
from common.round_settings import TrainSettings
from common.settings import RunSettings, load_settings
from goldfinch.commands.sweep import Job
from goldfinch.record import RunRecord
from server.run.events import describe
from server.run.existing import Step, decide

METHODS = sorted(path.stem for path in (CONF / "method").glob("*.yaml") if path.stem != "fedadg")
"""FedADG smooths labels by a setting of its own."""

# ---- the learning rate -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "scheduler"),
    [
        ({"schedule": "step", "step_rounds": 3, "step_factor": 0.5}, {"name": "StepLR", "step_size": 3, "gamma": 0.5}),
        ({"schedule": "cosine"}, {"name": "CosineAnnealingLR", "T_max": 7}),
        ({"schedule": "constant"}, {"name": "ConstantLR", "factor": 1.0}),
    ],
    ids=lambda value: value.get("schedule"),
)
def test_schedules_are_torch_s_with_one_step_a_round(settings: dict[str, Any], scheduler: dict[str, Any]) -> None:
    train = TrainSettings(rounds=7, learning_rate=0.2, **settings)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.2)
    chosen = dict(scheduler)
    steps = getattr(torch.optim.lr_scheduler, chosen.pop("name"))(optimizer, **chosen)
    for number in range(1, 8):
        assert train.rate(number) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        steps.step()
    assert train.rate(8) == train.rate(7) > 0, "the exchange that only scores has a rate as well"


# ---- local training --------------------------------------------------------------------------------------------------

PLAIN = {
    "sgd": lambda weights, rate: torch.optim.SGD(weights, lr=rate, momentum=0.9, weight_decay=0.01),
    "adam": lambda weights, rate: torch.optim.Adam(weights, lr=rate, weight_decay=0.01),
    "adamw": lambda weights, rate: torch.optim.AdamW(weights, lr=rate, weight_decay=0.01),
}


@pytest.mark.parametrize("weights", ["none", "balanced"])
@pytest.mark.parametrize("optimizer", PLAIN)
def test_local_training_is_a_plain_torch_loop(optimizer: str, weights: str, tmp_path: Path) -> None:
    train = {
        "rounds": 4, "optimizer": optimizer, "schedule": "cosine", "learning_rate": 0.02, "weight_decay": 0.01,
        "label_smoothing": 0.1, "class_weights": weights,
    }  # fmt: skip
    settings = toy_settings("fedavg", tmp_path, train=train)
    trained, plain = (local_exchange(settings, round_number=3) for _ in range(2))
    trained.run()
    rate = 0.5 * 0.02 * (1 + math.cos(math.pi * 2 / 4))
    stepper = PLAIN[optimizer](plain.model.parameters(), rate)
    counts = torch.tensor(plain.client.class_counts)
    by_class = counts.sum() / (4 * counts) if weights == "balanced" else None
    for images, labels in plain.batches("epoch", 1):
        stepper.zero_grad()
        F.cross_entropy(plain.model(images)[1], labels, weight=by_class, label_smoothing=0.1).backward()
        stepper.step()
    for name, tensor in plain.model.state_dict().items():
        torch.testing.assert_close(trained.model.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)


def test_balanced_weights_give_every_present_class_the_same_total() -> None:
    torch.testing.assert_close(balanced_weights([30, 10, 0, 2]), torch.tensor([42 / 90, 42 / 30, 1.0, 42 / 6]))


def test_weighted_smoothed_cross_entropy_is_the_formula() -> None:
    logits = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels, weights, share = torch.tensor([0, 1, 2, 2, 1, 0]), torch.tensor([0.5, 1.0, 4.0]).double(), 0.3
    log_probabilities = logits.log_softmax(1)
    total = torch.zeros((), dtype=torch.float64)
    for row, label in zip(log_probabilities, labels.tolist(), strict=True):
        total += -(1 - share) * weights[label] * row[label] - share / 3 * (weights * row).sum()
    found = cross_entropy(logits, labels, share, weights)
    torch.testing.assert_close(found, total / weights[labels].sum())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.long
def test_smoothing_and_class_weights_act_on_every_method(method: str, tmp_path: Path) -> None:
    found: set[str] = set()
    for number, changes in enumerate(({}, {"label_smoothing": 0.3}, {"class_weights": "balanced"})):
        one = {"data": Toy(domains=("bright",)), "train": {"rounds": 1, "local_steps": 2, **changes}}
        done = run(toy_settings(method, tmp_path / str(number), **one))
        found.add(json.dumps([row["losses"] for row in done.replies()]))
    assert len(found) == 3


def test_a_method_with_a_smoothing_of_its_own_refuses_a_second() -> None:
    with pytest.raises(ConfigError, match=r"set method\.smoothing instead"):
        load_settings(["method=fedadg", "train.label_smoothing=0.1"])


# ---- identity --------------------------------------------------------------------------------------------------------


# ---- early stopping --------------------------------------------------------------------------------------------------


def patient(method: str, output: Path, patience: int | None = 2, **more: Any) -> RunSettings:
    """Settings of a run that cannot improve: its steps are too small to change a prediction."""
    train = {"rounds": 9, "patience": patience, "learning_rate": 1e-12, "weight_decay": 0.0, **more.pop("train", {})}
    return toy_settings(method, output, overrides=("protocol.validation=0.2", "model.norm=group"), train=train, **more)


@pytest.mark.parametrize(("method", "scored_after"), [("fedavg", 1), ("fedpall", 0)])
def test_a_run_without_improvement_stops_with_a_message(method: str, scored_after: int, tmp_path: Path) -> None:
    """FedPall's server trains the classifier, so its run improves at first; it scores the state of its own round."""
    found = run(patient(method, tmp_path))
    scores = {entry["round"]: entry["average"] for name, entry in found.events if name == "validation"}
    best = found.summary["validation"]["round"]
    done = best + 2 + scored_after
    assert found.summary["stopped_early"] == {"rounds_planned": 9, "patience": 2, "best_round": best}
    assert found.summary["rounds"] == done < 9
    assert scores[best] == max(scores.values())
    assert found.summary["scores"]["final"]["round"] == done
    assert not found.summary["partial"]
    assert found.summary["scores"]["final"]["accuracy"].keys() == {"bright", "dark", "noisy"}
    line = describe("stopped early", dict(found.events)["stopped early"], 9)
    assert f"stopped early after round {done} of 9" in line
    stored = RunRecord(tmp_path)
    assert (stored.status, stored.stopped_early) == ("finished", True)


def test_a_run_that_improves_is_whole(tmp_path: Path) -> None:
    found = run(patient("fedavg", tmp_path, patience=3, train={"rounds": 4}))
    assert found.summary["rounds"] == 4
    assert "stopped_early" not in found.summary


def test_a_run_that_stopped_early_ends_again_and_goes_on_with_more_patience(tmp_path: Path) -> None:
    settings = patient("fedavg", tmp_path)
    first = run(settings)
    [group] = all_groups([RunRecord(tmp_path)])
    assert group.label == f"fedavg (stopped early after round {first.summary['rounds']})"
    assert Job((), settings, "same").finished()
    assert not Job((), patient("fedavg", tmp_path, patience=3), "more patience").finished()
    assert decide(patient("fedavg", tmp_path, resume=True)).step is Step.NOTHING
    again = run(patient("fedavg", tmp_path, resume=True))
    assert (again.sha256, again.summary["rounds"]) == (first.sha256, first.summary["rounds"])
    assert again.averages() == first.averages()[-1:], "only the last state is scored again"
    on = run(patient("fedavg", tmp_path, patience=4, resume=True))
    assert on.summary["rounds"] == first.summary["rounds"] + 2


def test_rounds_without_a_client_s_score_do_not_count_against_patience(tmp_path: Path) -> None:
    """A device that was offline from round 3 on ended the run of all others, which improved."""
    settings = patient("fedavg", tmp_path, train={"learning_rate": 0.02})
    engine = TouchedEngine(settings, lost=lambda request: request.round >= 3 and request.client == "noisy-0")
    found = run(settings, engine)
    assert found.summary["rounds"] == 9
    assert "stopped_early" not in found.summary


def test_patience_needs_validation() -> None:
    with pytest.raises(ConfigError, match=r"protocol\.validation to a share"):
        load_settings(["train.patience=3"])
