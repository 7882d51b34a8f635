"""What many clients of one machine share: images, nets, and the bits of a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.exchanges import device_of, local_exchange, request_to
from support.toy import Toy, toy_settings
from torch import nn

from common.wire.payload import Payload
from strategies.core.method import build_model


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
    devices = {domain: device_of(settings, domain, scores=("bright", "noisy")) for domain in ("bright", "dark")}
    initial = build_model(settings, 3).state_dict()
    places: set[tuple[int, ...]] = set()
    for number in (1, 2, 3):
        for domain, device in devices.items():
            request = request_to(settings, domain, round=number, score=["noisy"])
            device.answer(request, Payload({name: tensor + number for name, tensor in initial.items()}))
            own = settings.data.load(domain).train.images
            assert device._own_data()[0].images.data_ptr() == own.data_ptr()
            assert device._test_data("noisy").images.data_ptr() == settings.data.load("noisy").test.images.data_ptr()
            model = device._model(3).model
            places.add(tuple(tensor.data_ptr() for tensor in model.state_dict().values()))
    assert len(places) == 1


@pytest.mark.parametrize(("momentum", "decay"), [(0.9, 1e-5), (0.0, 0.0)])
def test_one_call_per_operation_changes_no_bit(momentum: float, decay: float, tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path, train={"momentum": momentum, "weight_decay": decay})
    split = Toy().load("bright").train
    local = local_exchange(settings)
    fast, slow = local.model, build_model(settings, 3)
    fast_optimizer = local.make_optimizer(fast.parameters())
    options = {"momentum": momentum, "weight_decay": decay, "foreach": False}
    slow_optimizer = torch.optim.SGD(slow.parameters(), settings.train.learning_rate, **options)
    for _ in range(4):
        for model, optimizer in ((fast, fast_optimizer), (slow, slow_optimizer)):
            optimizer.zero_grad()
            logits = model(settings.data.augmentation.test(split.images))[1]
            nn.functional.cross_entropy(logits, split.labels).backward()
            optimizer.step()
    for name, tensor in fast.state_dict().items():
        assert torch.equal(tensor, slow.state_dict()[name]), name
