"""The local loop: keyed randomness, running class means, phases, scores; and what a device refuses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exchanges import device_of, local_exchange, request_to
from support.own_states import own_state
from support.toy import CLASSES, Toy, toy_settings
from torch import Tensor, nn

from client.trainer import LocalExchange, memory_format
from common.errors import DataError, PayloadError
from common.models.specs import DigitCNN
from common.prototypes import PrototypeSet, class_means
from common.settings import RunSettings, with_method
from common.wire.messages import Answer, read_header
from common.wire.payload import Payload
from strategies.core.method import ClientContext, Losses, Phase, build_model
from strategies.fedavg import FedAvg
from strategies.fedproto import FedProto

# ---- one exchange ----------------------------------------------------------------------------------------------------


def weights_of(local: LocalExchange) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in local.model.state_dict().items()}


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def test_training_is_keyed_and_blind_to_the_global_generator(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path)
    first = local_exchange(settings)
    torch.manual_seed(1)
    first.run()
    second = local_exchange(settings)
    torch.manual_seed(2)
    torch.rand(100)
    before = torch.get_rng_state()
    second.generator("something else").seed()
    second.features(augmented=2)
    second.run()
    assert torch.equal(torch.get_rng_state(), before)
    assert same(weights_of(first), weights_of(second))


@pytest.mark.parametrize("what", ["round", "client", "seed"])
def test_another_key_is_another_course(what: str, tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path)
    orders = []
    for changed in (False, True):
        chosen = toy_settings("fedavg", tmp_path, seed=5) if changed and what == "seed" else settings
        local = local_exchange(chosen, round_number=2 if changed and what == "round" else 1)
        if changed and what == "client":
            local.client = replace(local.client, id="bright-7")
        orders.append(torch.cat([images for images, _ in local.batches("epoch", 1)]))
    assert not torch.equal(*orders)


def test_an_epoch_shows_every_sample_once_and_epochs_differ(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path)
    local = local_exchange(settings)
    epochs = [torch.cat([labels for _, labels in local.batches("epoch", number)]) for number in (1, 2)]
    for labels in epochs:
        assert torch.bincount(labels).tolist() == [7, 6, 6, 6]
    assert not torch.equal(*epochs)
    again = torch.cat([labels for _, labels in local.batches("epoch", 1)])
    assert torch.equal(again, epochs[0])


@dataclass(frozen=True)
class Watched(FedProto):
    """Notes the features of every batch's original view, as a method's loss sees them."""

    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def loss(self, batch: Any, local: ClientContext) -> Losses:
        originals = len(batch.labels) // batch.views
        self.seen.append((batch.features[:originals].detach().clone(), batch.labels[:originals].clone()))
        return super().loss(batch, local)


@pytest.mark.parametrize("views", [(), ("views=randconv",)], ids=["one view", "views"])
def test_running_class_means_are_those_of_the_last_epoch_before_each_step(
    views: tuple[str, ...], tmp_path: Path
) -> None:
    method = Watched()
    settings = replace(
        toy_settings("fedproto", tmp_path, overrides=views, train={"epochs": 3, "batch_size": 8}), method=method
    )
    trained = local_exchange(settings, position=2).run()
    last = method.seen[-3:]
    assert len(method.seen) == 9
    assert [len(labels) for _, labels in last] == [8, 8, 2]
    expected = class_means(torch.cat([row[0] for row in last]), torch.cat([row[1] for row in last]), CLASSES)
    assert trained.prototypes == expected
    assert trained.prototypes.classes == [0, 1, 2]
    assert trained.prototypes.weights.tolist() == [6, 6, 6]
    assert trained.steps == 9


def test_means_after_training_are_of_the_trained_model_at_rest(tmp_path: Path) -> None:
    settings = toy_settings("fedproto", tmp_path, hyper={"prototype_mode": "post_eval"})
    local = local_exchange(settings)
    trained = local.run()
    local.model.eval()
    with torch.no_grad():
        features = local.model(settings.data.augmentation.test(local.split.images))[0]
    expected = class_means(features, local.split.labels, CLASSES)
    assert trained.prototypes.classes == expected.classes
    assert torch.allclose(trained.prototypes.vectors, expected.vectors, atol=1e-5)


@dataclass(frozen=True)
class TwoPhases(FedAvg):
    """Head, then body."""

    def phases(self, epochs: int) -> tuple[Phase, ...]:
        return (
            Phase(1, lambda name: name.startswith("head.")),
            Phase(2, lambda name: name.startswith("backbone.")),
        )

    def step(self, local: ClientContext, images: Tensor, labels: Tensor) -> Losses:
        before = {name: tensor.clone() for name, tensor in local.model.named_parameters()}
        losses = super().step(local, images, labels)
        part, still = ("head.", "backbone.") if local.phase == 0 else ("backbone.", "head.")
        after = dict(local.model.named_parameters())
        assert all(torch.equal(after[name], before[name]) for name in after if name.startswith(still))
        assert any(not torch.equal(after[name], before[name]) for name in after if name.startswith(part))
        return losses


def test_phases_train_their_parameters_and_leave_nothing_frozen(tmp_path: Path) -> None:
    settings = with_method(toy_settings("fedavg", tmp_path), TwoPhases())
    local = local_exchange(settings)
    assert local.run().steps == 9
    assert all(parameter.requires_grad for parameter in local.model.parameters())
    assert not any(name == "momentum" for group in local.optimizer.param_groups for name in group if group["lr"] == 0)


def test_gradients_are_clipped_to_the_norm(tmp_path: Path) -> None:
    local = local_exchange(toy_settings("fedavg", tmp_path, train={"clip_norm": 0.01}))
    images, labels = next(iter(local.batches("epoch", 1)))
    batch = local.forward(images, labels)
    local.backward(nn.functional.cross_entropy(batch.logits, labels) * 100)
    norm = torch.linalg.vector_norm(torch.cat([value.grad.flatten() for value in local.model.parameters()]))
    assert float(norm) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("epochs", [1, 3])
def test_the_losses_are_means_over_the_last_epoch(epochs: int, tmp_path: Path) -> None:
    """Of the first loss, by a net that hardly moves: it is that of a guess."""
    settings = toy_settings("fedavg", tmp_path, train={"epochs": epochs, "learning_rate": 1e-9})
    assert local_exchange(settings).run().losses["cross_entropy"] == pytest.approx(math.log(CLASSES), abs=0.3)


def test_local_steps_end_an_epoch_early(tmp_path: Path) -> None:
    assert local_exchange(toy_settings("fedavg", tmp_path, train={"local_steps": 2, "epochs": 3})).run().steps == 6


def test_frozen_copies_are_made_once_at_rest_and_stay_as_they_were(tmp_path: Path) -> None:
    local = local_exchange(toy_settings("fedavg", tmp_path))
    start = weights_of(local)
    copy = local.frozen("global")
    assert local.frozen("global") is copy
    assert not copy.training
    assert not any(parameter.requires_grad for parameter in copy.parameters())
    local.run()
    assert same(start, copy.state_dict())
    assert not same(start, weights_of(local))
    assert same(start, local.frozen("later").state_dict())
    assert same({name: start[name] for name in local.reference()}, local.reference())
    zeros = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    assert not any(bool(tensor.any()) for tensor in local.frozen("zero", zeros).state_dict().values())


def test_a_feature_pass_changes_nothing_unless_it_trains(tmp_path: Path) -> None:
    local = local_exchange(toy_settings("fedavg", tmp_path))
    start = weights_of(local)
    rows, labels = local.features()
    assert rows.shape == (25, 128)
    assert torch.equal(labels, local.split.labels)
    assert torch.equal(local.features()[0], rows)
    assert local.model.training
    assert same(start, weights_of(local))
    assert not torch.equal(local.features(augmented=2)[0], rows)
    local.features(training_mode=True)
    assert not same(start, weights_of(local))


def test_a_score_is_counted_sample_by_sample(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path)
    local = local_exchange(settings)
    local.run()
    split = Toy().load("dark").test
    found = local.score(split)
    local.model.eval()
    correct, loss = 0, 0.0
    confusion = [[0] * CLASSES for _ in range(CLASSES)]
    for image, label in zip(split.images, split.labels.tolist(), strict=True):
        with torch.no_grad():
            logits = local.model(settings.data.augmentation.test(image[None]))[1][0].double()
        predicted = int(logits.argmax())
        confusion[label][predicted] += 1
        correct += predicted == label
        loss += float(logits.logsumexp(0) - logits[label])
    assert (found["count"], found["correct"], found["confusion"]) == (16, correct, confusion)
    assert found["loss"] == pytest.approx(loss / 16, rel=1e-5)


def test_bfloat16_trains_and_keeps_weights_and_prototypes_in_float32(tmp_path: Path) -> None:
    local = local_exchange(toy_settings("fedproto", tmp_path, train={"precision": "bfloat16", "channels_last": True}))
    trained = local.run()
    assert {tensor.dtype for tensor in weights_of(local).values()} == {torch.float32, torch.int64}
    assert trained.prototypes.vectors.dtype == torch.float32
    assert trained.losses["cross_entropy"] > 0


@pytest.mark.parametrize(("chosen", "last"), [(None, True), (True, True), (False, False)])
def test_channels_last_where_it_was_measured_faster(tmp_path: Path, chosen: bool | None, last: bool) -> None:
    """The trained net and its images; what is sent is laid out as ever."""
    settings = toy_settings("fedavg", tmp_path, train={"channels_last": chosen})
    assert (memory_format(settings) == torch.channels_last) is last
    slower = replace(settings, model=DigitCNN())
    assert (memory_format(slower) == torch.channels_last) is bool(chosen)
    answered = device_of(settings).answer(request_to(settings), message(settings))
    assert all(tensor.is_contiguous() for tensor in answered.weights.values())


# ---- the device ------------------------------------------------------------------------------------------------------


def message(settings: RunSettings) -> Payload:
    return Payload(build_model(settings, 3).state_dict())


def test_a_reply_records_what_was_done(tmp_path: Path) -> None:
    settings = toy_settings("fedproto", tmp_path)
    made = device_of(settings)
    answered = made.answer(request_to(settings), message(settings))
    facts = read_header(Answer, answered.header)
    assert (facts.samples, facts.class_counts, facts.trained, facts.steps) == (25, [7, 6, 6, 6], True, 3)
    assert [entry["domain"] for entry in facts.scores] == ["bright"]
    assert set(facts.seconds) == {"load", "score", "train", "save"}
    assert answered.prototypes is not None
    assert answered.prototypes.classes == [0, 1, 2, 3]
    assert own_state(tmp_path / "device") == {}
    before = {name: tensor.clone() for name, tensor in answered.weights.items()}
    made.answer(request_to(settings, round=2), message(settings))
    assert same(before, answered.weights)


WRONG = {
    "other code": ({"code": "0" * 16}, "install the same Goldfinch"),
    "other settings": ({"identity": "0" * 16}, "give both the same overrides"),
    "another method": ({"method": "fpl"}, "give both the same overrides"),
    "another client": ({"client": "dark-0"}, "the request is for dark-0"),
    "another exchange": ({"exchange": "collaborate"}, "has no exchange 'collaborate'"),
    "a position beyond the clients": ({"client_index": 3}, "this is client 3 of 3; the run has 3"),
    "more clients than the run has": ({"client_count": 10**9}, "client 0 of 1000000000; the run has 3"),
    "a domain it cannot score": ({"score": ["dark"]}, "cannot score dark; it can score bright"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_device_refuses(case: str, tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path)
    changes, reason = WRONG[case]
    with pytest.raises(PayloadError, match=reason):
        device_of(settings).answer(request_to(settings, **changes), message(settings))


def spoiled(settings: RunSettings) -> dict[str, dict[str, Tensor]]:
    whole = dict(message(settings).weights)
    return {
        "head.bias": {**whole, "head.bias": torch.zeros(7)},
        "does not fit": {name: tensor for name, tensor in whole.items() if name != "head.bias"},
        "tail.bias": {**whole, "tail.bias": torch.zeros(1)},
    }


@pytest.mark.parametrize("case", ["head.bias", "does not fit", "tail.bias"])
def test_a_device_refuses_another_model(case: str, tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path)
    with pytest.raises(PayloadError, match=case):
        device_of(settings).answer(request_to(settings), Payload(spoiled(settings)[case]))


@pytest.mark.parametrize(
    ("label", "size", "reason"),
    [(4, 128, "a prototype of class 4; the run has 4"), (0, 3, "prototypes of 3 features; the model has 128")],
    ids=["class", "features"],
)
def test_a_device_refuses_prototypes_that_do_not_fit(label: int, size: int, reason: str, tmp_path: Path) -> None:
    settings = toy_settings("fpl", tmp_path)
    rows = PrototypeSet(torch.ones(1, size), torch.tensor([label]), torch.ones(1))
    with pytest.raises(PayloadError, match=reason):
        device_of(settings).answer(request_to(settings), replace(message(settings), prototypes=rows))


def test_a_client_needs_two_samples(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path)
    alone = replace(settings, protocol=replace(settings.protocol, samples=1))
    with pytest.raises(DataError, match="it needs two or more"):
        device_of(alone).register()


def test_a_registration_lists_the_samples_and_domains(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path)
    made = device_of(settings, "noisy").register()
    assert (made.client, made.samples, made.class_counts) == ("noisy-0", 18, [6, 6, 6, 0])
    assert made.scores == ["noisy"]
    assert len(made.split) == 64
    assert device_of(settings, "noisy").register() == made
    assert device_of(settings, "dark").register().split != made.split


@dataclass(frozen=True)
class Fails(TwoPhases):
    """Fails in the middle of its first phase, with the body frozen."""

    def step(self, local: ClientContext, images: Tensor, labels: Tensor) -> Losses:
        raise RuntimeError("out of memory")


def test_a_failure_leaves_no_trace_for_the_next_client_of_the_thread(tmp_path: Path) -> None:
    """Devices of one thread share a net; what a failed client froze or switched must not stay so."""
    settings = with_method(toy_settings("fedavg", tmp_path), Fails())
    made = device_of(settings)
    with pytest.raises(RuntimeError, match="out of memory"):
        made.answer(request_to(settings), message(settings))
    assert own_state(tmp_path / "device") == {}
    other = device_of(settings, "dark")
    split, validation = other._own_data()
    local = other._install(message(settings), request_to(settings, "dark"), split, validation, {})
    assert all(parameter.requires_grad and parameter.grad is None for parameter in local.model.parameters())
    assert all(module.training for module in local.model.modules())
