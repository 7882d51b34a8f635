"""Tensors move between devices together, one copy for each dtype, whatever their number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from client.transfer import check_unchanged, copied_to_cpu, moved, received
from common.errors import ConfigError
from common.losses.prototype_terms import prepared_rows
from common.prototypes import PrototypeSet
from common.wire.payload import Payload

ELSEWHERE = torch.device("meta")  # a device that every machine has; its tensors have no numbers


class Copies(TorchDispatchMode):
    """Counts copies between devices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.overloadpacket.__name__ == "_to_copy"
        return function(*args, **(kwargs or {}))


def tensors() -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for number in range(40):
        named[f"weight {number}"] = torch.randn(3, number + 1)
        named[f"count {number}"] = torch.tensor(number)
    named["across"] = torch.randn(4, 3).t()
    return named


def test_one_copy_for_each_dtype() -> None:
    named = tensors()
    with Copies() as copies:
        there = moved(named, ELSEWHERE)
    assert copies.count == 2
    assert list(there) == list(named)
    for name, tensor in there.items():
        assert (tensor.shape, tensor.dtype, tensor.device) == (named[name].shape, named[name].dtype, ELSEWHERE)
    with Copies() as copies:
        assert moved(there, ELSEWHERE) == there
    assert copies.count == 0


def test_copies_on_the_cpu_have_the_numbers_and_memory_of_their_own() -> None:
    named = tensors()
    copies = copied_to_cpu(named)
    for name, tensor in copies.items():
        assert torch.equal(tensor, named[name]), name
        assert tensor.data_ptr() != named[name].data_ptr()


def test_clients_of_a_round_share_one_copy_of_the_message() -> None:
    message = Payload(tensors(), PrototypeSet(torch.eye(3), torch.arange(3), torch.ones(3)), {"extra": torch.ones(2)})
    with Copies() as copies:
        first = received(message, "float32", ELSEWHERE)
    assert copies.count == 2 + 3 + 1
    with Copies() as copies:
        assert received(message, "float32", ELSEWHERE) is first
    assert copies.count == 0
    other = Payload(message.weights, message.prototypes, message.extra)
    assert received(other, "float32", ELSEWHERE) is not first
    here = received(message, "float32", torch.device("cpu"))
    assert here.weights is message.weights
    assert here.extra is message.extra


def test_what_a_set_of_prototypes_remembers_is_each_client_s_own() -> None:
    message = Payload({}, PrototypeSet(torch.eye(3), torch.arange(3), torch.ones(3)))
    one = received(message, "float32", torch.device("cpu")).prototypes
    other = received(message, "float32", torch.device("cpu")).prototypes
    assert one is not None
    assert other is not None
    prepared_rows(one)
    assert set(vars(one)) > set(vars(other)), "a thread would find what another thread computes, and may replace"
    assert one.vectors.data_ptr() == other.vectors.data_ptr()


@pytest.mark.parametrize("transport", ["float32", "float16"])
def test_a_received_tensor_that_is_changed_in_place_is_found(transport: str) -> None:
    prototypes = PrototypeSet(torch.eye(3), torch.arange(3), torch.ones(3))
    message = Payload({"weight": torch.ones(3), "other": torch.ones(3)}, prototypes, {"extra": torch.ones(2)})
    there = received(message, transport, torch.device("cpu"))
    assert there.prototypes is not None
    check_unchanged("mine")
    for name, tensor in (
        ("weight", there.weights["weight"]),
        ("extra", there.extra["extra"]),
        ("prototypes.vectors", there.prototypes.vectors),
    ):
        received(message, transport, torch.device("cpu"))
        check_unchanged("mine")
        there = received(message, "float32", torch.device("cpu"))
        tensor.detach().mul_(2)
        with pytest.raises(ConfigError, match=rf"method=mine changed .*\({name}\).*tensor.clone"):
            check_unchanged("mine")
    with torch.inference_mode():
        received(Payload({"weight": torch.ones(3)}), "float32", torch.device("cpu"))
    check_unchanged("mine")
