"""What many clients of one machine share: images, nets, and the bits of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.toy import Toy, toy_settings
from torch import Tensor, nn

from client.device import Device
from client.store import Store
from client.trainer import LocalExchange
from common.data.protocols import ClientSpec
from common.prototypes import PrototypeSet
from common.settings import RunSettings
from common.wire.messages import Request
from common.wire.payload import Payload
from strategies.core.method import Client, build_model


def request(settings: RunSettings, domain: str, number: int) -> Request:
    return Request(
        run="run", identity=settings.identity, method=settings.method.name, round=number, exchange="train",
        client=f"{domain}-0", client_count=3, client_index=0, train=True, score=["noisy"], code=settings.code,
    )  # fmt: skip


def device(settings: RunSettings, domain: str) -> Device:
    store = Store(settings.output_folder / "device")
    return Device(settings, ClientSpec(domain, 0), lambda run: store, scores=("bright", "noisy"))


def test_the_whole_of_a_split_is_the_split_itself() -> None:
    split = Toy().load("bright").train
    everything = torch.arange(len(split))
    assert split.subset(everything) is split
    for part in (everything[:-1], everything.flip(0), torch.cat([everything, everything[:1]])):
        found = split.subset(part)
        assert found is not split
        assert torch.equal(found.images, split.images[part])


def test_images_are_kept_once_per_process_and_nets_are_loaded_in_place(tmp_path: Path) -> None:
    settings = toy_settings("fedproto", tmp_path)
    bright, dark = device(settings, "bright"), device(settings, "dark")
    places: set[tuple[int, ...]] = set()
    for number in (1, 2, 3):
        for made, domain in ((bright, "bright"), (dark, "dark")):
            weights = {name: tensor + number for name, tensor in initial(settings).items()}
            made.answer(request(settings, domain, number), Payload({}, weights))
            domain_data = settings.data.load(domain)
            assert made._own_data()[0].images.data_ptr() == domain_data.train.images.data_ptr()
            assert made._test_data("noisy").images.data_ptr() == settings.data.load("noisy").test.images.data_ptr()
            model, _ = made._model(3)
            places.add(tuple(tensor.data_ptr() for tensor in model.state_dict().values()))
    assert len(places) == 1


def initial(settings: RunSettings) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in build_model(settings, 3).state_dict().items()}


@pytest.mark.parametrize(("momentum", "decay"), [(0.9, 1e-5), (0.0, 0.0), (0.5, 0.1)])
def test_one_call_per_operation_changes_no_bit(momentum: float, decay: float, tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path, train={"momentum": momentum, "weight_decay": decay})
    fast, slow = (build_model(settings, 3) for _ in range(2))
    split = Toy().load("bright").train
    local = LocalExchange(
        settings, settings.method, fast, Client("bright-0", "bright", len(split), (7, 6, 6, 6), 0, 3), split,
        weights={}, prototypes=PrototypeSet.empty(128), extra={}, kept={}, round_number=1, exchange="train",
        device=torch.device("cpu"),
    )  # fmt: skip
    optimizers: list[tuple[nn.Module, Any]] = [
        (fast, local.make_optimizer(fast.parameters())),
        (
            slow,
            torch.optim.SGD(
                slow.parameters(), settings.train.learning_rate, momentum=momentum, weight_decay=decay, foreach=False
            ),
        ),
    ]
    for _ in range(4):
        for model, optimizer in optimizers:
            optimizer.zero_grad()
            logits = model(settings.data.augmentation.test(split.images))[1]
            nn.functional.cross_entropy(logits, split.labels).backward()
            optimizer.step()
    for name, tensor in fast.state_dict().items():
        assert torch.equal(tensor, slow.state_dict()[name]), name
