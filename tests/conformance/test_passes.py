"""What a method declares of its work on a device is what it does there: passes that train, models that it measures."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import run
from support.toy import method_at_defaults, toy_settings

from client.device import Device
from client.trainer import LocalExchange
from common.choices import choices_of

EPOCHS, ROUNDS = 2, 2

PUBLIC = {"fccl_plus": 1}
"""Passes over public images by method: they are not the client's, and no epochs of its training."""


class Work:
    """Counts, by round and client, shuffles of samples that are followed by gradients, and measured models."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: Counter[tuple[int, str]] = Counter()
        self.measured = 0
        self.place: tuple[int, str] | None = None
        self.shuffled = False
        take_part, shuffle, backward = Device._take_part, torch.randperm, torch.Tensor.backward
        validate = LocalExchange.validate

        def taking_part(device: Device, local: Any, request: Any, *more: Any) -> Any:
            self.place, self.shuffled = (request.round, request.client), False
            try:
                return take_part(device, local, request, *more)
            finally:
                self.place = None

        def shuffling(*arguments: Any, **more: Any) -> Any:
            self.shuffled = True
            return shuffle(*arguments, **more)

        def descending(*arguments: Any, **more: Any) -> None:
            if self.place is not None and self.shuffled:
                self.passes[self.place] += 1
            self.shuffled = False
            backward(*arguments, **more)

        def measuring(local: LocalExchange) -> Any:
            self.measured += 1
            return validate(local)

        monkeypatch.setattr(Device, "_take_part", taking_part)
        monkeypatch.setattr(torch, "randperm", shuffling)
        monkeypatch.setattr(torch.Tensor, "backward", descending)
        monkeypatch.setattr(LocalExchange, "validate", measuring)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(choices_of("method")))
def test_a_method_declares_its_passes_and_what_it_measures(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The contract of a device counts the declared passes, and refuses what measures where no image is scored."""
    settings = toy_settings(name, tmp_path, train={"rounds": ROUNDS, "epochs": EPOCHS})
    work = Work(monkeypatch)
    run(settings)
    declared = settings.method.local_epochs(EPOCHS) + PUBLIC.get(name, 0)
    last = {client: count for (number, client), count in work.passes.items() if number == ROUNDS}
    assert last == dict.fromkeys(last, declared)
    assert last
    assert max(work.passes.values()) == declared
    assert (work.measured > 0) == method_at_defaults(name).validates
