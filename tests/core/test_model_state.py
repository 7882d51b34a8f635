"""A model's state is read once, and is that of its ``state_dict`` whatever the network does with its tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from client.model_state import ModelState


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.norm(self.layer(rows))


class Replaces(Plain):
    """Puts a new tensor in a buffer's place in every forward pass, as many networks keep a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("moving", torch.zeros(2))
        self.register_buffer("not_kept", torch.zeros(2), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        result = super().forward(rows)
        self.moving = 0.5 * self.moving + result.detach().sum(0)
        return result


class SetsData(Plain):
    def forward(self, rows: Tensor) -> Tensor:
        result = super().forward(rows)
        self.layer.weight.data = self.layer.weight.data + 1
        return result


class Ties(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.again = self.layer


class OwnState(Plain):
    """Keeps its layer under another name."""

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "calls"] = torch.ones(1)

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: object) -> None:
        super()._load_from_state_dict({**state}, prefix, *rest)
        self.loaded = state[prefix + "calls"].clone()
        unexpected = rest[3]
        assert isinstance(unexpected, list)
        if prefix + "calls" in unexpected:
            unexpected.remove(prefix + "calls")


class Hooked(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(lambda module, _: setattr(module, "loads", self.loads + 1))
        self.loads = 0


NETWORKS = [Plain, Replaces, SetsData, Ties, OwnState, Hooked]


@pytest.mark.parametrize("make", NETWORKS)
def test_tensors_are_those_of_the_state_dict_after_every_pass(make: Callable[[], nn.Module]) -> None:
    model = make()
    state = ModelState(model, set(model.state_dict()))
    for _ in range(3):
        model(torch.randn(4, 3))
        expected = model.state_dict()
        assert list(state.tensors()) == list(expected)
        for name, tensor in state.tensors().items():
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("make", NETWORKS)
def test_what_is_installed_is_what_load_state_dict_installs(make: Callable[[], nn.Module]) -> None:
    model, other = make(), make()
    state = ModelState(model, set(model.state_dict()))
    model(torch.randn(4, 3))
    values = {name: torch.full_like(tensor, 3) for name, tensor in model.state_dict().items()}
    state.install(values)
    other.load_state_dict(values)
    for name, tensor in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert getattr(model, "loads", 0) == getattr(other, "loads", 0)
    assert torch.equal(model(torch.ones(4, 3)), other(torch.ones(4, 3)))


def test_a_copy_stays_when_the_model_trains() -> None:
    model = Plain()
    state = ModelState(model, set(model.state_dict()))
    before = state.copy()
    values = {name: torch.full_like(tensor, 3) for name, tensor in before.items()}
    state.install(values)
    for name, tensor in before.items():
        assert torch.equal(tensor, state.initial[name]), name
        assert not torch.equal(tensor, model.state_dict()[name]), name


@pytest.mark.parametrize("change", ["name", "shape"])
def test_what_does_not_fit_is_refused_and_changes_nothing(change: str) -> None:
    model = Plain()
    state = ModelState(model, set(model.state_dict()))
    values = {name: torch.full_like(tensor, 3) for name, tensor in state.initial.items()}
    if change == "name":
        values["other"] = values.pop("norm.bias")
    else:
        values["layer.weight"] = torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match=r"norm\.bias|layer\.weight"):
        state.install(values)


def test_parts_that_are_put_in_later_are_found() -> None:
    model = Plain()
    state = ModelState(model, set(model.state_dict()))
    model.layer = nn.Linear(3, 2)
    assert dict(state.reset()).keys() == dict(model.named_parameters()).keys()
    assert all(one is other for (_, one), (_, other) in zip(state.reset(), model.named_parameters(), strict=True))
    for name, tensor in model.state_dict().items():
        assert torch.equal(state.tensors()[name], tensor), name
    model.norm.register_parameter("more", nn.Parameter(torch.zeros(1)))
    assert "norm.more" in dict(state.reset())
    model.last = nn.Sequential(nn.Linear(2, 1))
    assert "last.0.weight" in state.tensors()
    model.last = Hooked()
    state.install(dict(model.state_dict()))
    assert model.last.loads == 1, "a part with a state of its own is installed by load_state_dict from now on"


def test_buffers_outside_the_state_begin_anew_with_each_installation() -> None:
    model = Replaces()
    state = ModelState(model, set(model.state_dict()))
    model.not_kept.add_(7)
    model.moving = torch.ones(2)
    state.install(state.initial)
    assert not model.not_kept.any()
    model.not_kept = torch.full((2,), 3.0)  # another tensor
    state.install(state.initial)
    assert not model.not_kept.any()


class PartlyFrozen(Plain):
    """Keeps its layer from training, and in evaluation mode."""

    def train(self, mode: bool = True) -> PartlyFrozen:
        super().train(mode)
        self.layer.eval()
        return self

    def requires_grad_(self, requires_grad: bool = True) -> PartlyFrozen:
        super().requires_grad_(requires_grad)
        self.layer.requires_grad_(False)
        return self


@pytest.mark.parametrize("before", ["new", "used", "evaluated"])
def test_a_model_is_reset_by_its_own_functions(before: str) -> None:
    model = PartlyFrozen()
    state = ModelState(model, set(model.state_dict()))
    if before != "new":
        state.reset()
        model.norm.requires_grad_(False)
        model.norm.weight.grad = torch.ones(2)
    if before == "evaluated":
        model.eval()
    parameters = dict(state.reset())
    assert model.training
    assert model.norm.training
    assert not model.layer.training
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    assert trained == {"norm.weight", "norm.bias"}
    assert all(parameter.grad is None for parameter in parameters.values())
