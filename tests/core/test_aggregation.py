"""Averages: in float64, by samples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from common.numerics import derive, generator, numpy_generator
from strategies.core.aggregation import BLOCK_ELEMENTS, average, cap_shares
from strategies.parts.edits import add_linear, pull_towards


def states(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    draws = generator(seed, "states")
    return [
        {"w": torch.randn(7, 3, generator=draws), "half": torch.randn(5, generator=draws).half(), "n": torch.tensor(k)}
        for k in range(count)
    ]


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=6), st.integers(0, 99))
def test_an_average_in_loops(samples: list[int], seed: int) -> None:
    given_states = states(len(samples), seed)
    found = average(given_states, samples)
    for name in ("w", "half"):
        expected = sum(n * state[name].double() for n, state in zip(samples, given_states, strict=True)) / sum(samples)
        tolerance = 1e-3 if name == "half" else 1e-6
        assert found[name].dtype == given_states[0][name].dtype
        assert torch.allclose(found[name].double(), expected, atol=tolerance, rtol=tolerance)
    assert int(found["n"]) == (len(samples) - 1) // 2


def test_sums_are_in_double_precision() -> None:
    """Float32 sums would lose the small ones next to the large."""
    parts = [{"w": torch.tensor([1e8])}, {"w": torch.tensor([1.0])}, {"w": torch.tensor([-1e8])}]
    assert average(parts, [1, 1, 1])["w"].item() == pytest.approx(1 / 3, rel=1e-6)


def test_states_without_any_weight_have_no_average() -> None:
    with pytest.raises(ValueError, match="positive number; got 0"):
        average(states(2), [0, 0])


@pytest.mark.parametrize("block", [1, 7, 64, 2**18])
@pytest.mark.parametrize("small", [0, 2**14])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_blocks_and_joined_tensors_do_not_change_a_bit(
    block: int, small: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strategies.core.aggregation.BLOCK_ELEMENTS", block)
    monkeypatch.setattr("strategies.core.aggregation.SMALL_ELEMENTS", small)
    draws = generator(3, "blocks")
    shape, samples = (5, 4, 3, 3), [11, 2, 7, 600]
    given_states = [
        {"w": torch.randn(shape, generator=draws), "one": torch.randn((), generator=draws)} for _ in samples
    ]
    if layout == "channels_last":
        for state in given_states:
            state["w"] = state["w"].contiguous(memory_format=torch.channels_last)
    found = average(given_states, samples)
    assert list(found) == ["w", "one"]
    for name in ("w", "one"):
        assert found[name].shape == given_states[0][name].shape
        whole = torch.zeros_like(given_states[0][name], dtype=torch.float64)
        for state, count in zip(given_states, samples, strict=True):
            whole.add_(state[name].double(), alpha=count / sum(samples))
        assert torch.equal(found[name], whole.float())


def test_nothing_is_changed_or_shared() -> None:
    given_states = states(2)
    before = [{name: tensor.clone() for name, tensor in state.items()} for state in given_states]
    found = average(given_states, [1, 2])
    found["n"].add_(5)
    found["w"].zero_()
    for state, old in zip(given_states, before, strict=True):
        assert all(torch.equal(state[name], old[name]) for name in state)


@pytest.mark.parametrize(
    ("parts", "weights", "reason"),
    [([], [], "nothing to average"), (states(2), [0, 0], "positive"), (states(1), [-1], "positive")],
    ids=["nothing", "weights of zero", "a negative weight"],
)
def test_what_cannot_be_averaged(parts: list[dict[str, torch.Tensor]], weights: list[float], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        average(parts, weights)


# ---- gradient edits --------------------------------------------------------------------------------------------------


def net() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    draws = generator(0, "net")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draws))
    return made


def distance(model: nn.Sequential, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return sum((value - tensors[name]).square().sum() for name, value in model.named_parameters())


def inner(model: nn.Sequential, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return sum((value * tensors[name]).sum() for name, value in model.named_parameters())


@pytest.mark.parametrize(
    ("edit", "coefficient", "term", "factor"),
    [(pull_towards, 0.3, distance, 0.15), (add_linear, -0.7, inner, -0.7)],
)
def test_an_edit_is_the_gradient_of_its_term(
    edit: Callable[..., None], coefficient: float, term: Callable[..., torch.Tensor], factor: float
) -> None:
    by_edit, by_graph = net(), net()
    draws = generator(0, "reference")
    tensors = {name: torch.randn(value.shape, generator=draws) for name, value in by_edit.named_parameters()}
    images = torch.randn(5, 3, generator=draws)
    by_edit(images).square().sum().backward()
    edit(by_edit, tensors, coefficient)
    (by_graph(images).square().sum() + factor * term(by_graph, tensors)).backward()
    for mine, theirs in zip(by_edit.parameters(), by_graph.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-4, rtol=1e-4)


def test_edits_leave_frozen_parameters_and_zero_alone() -> None:
    model = net()
    model[0].requires_grad_(False)
    model(torch.ones(2, 3)).sum().backward()
    before = [None if value.grad is None else value.grad.clone() for value in model.parameters()]
    zeros = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    pull_towards(model, zeros, 0.0)
    add_linear(model, {}, 1.0)
    pull_towards(model, {}, 1.0)
    for value, old in zip(model.parameters(), before, strict=True):
        assert (value.grad is None) if old is None else torch.equal(value.grad, old)
    pull_towards(model, zeros, 1.0)
    assert model[0].weight.grad is None


# ---- random numbers --------------------------------------------------------------------------------------------------


def test_keys_are_typed_ordered_and_independent() -> None:
    keys = [(), (1,), ("1",), (1, 2), (2, 1), ("a", "b"), ("ab",), ("a,b",), ("a", 1), ("a", -1)]
    assert len({derive(0, *key) for key in keys} | {derive(1, *key) for key in keys}) == 2 * len(keys)
    assert all(0 <= derive(seed, "x") < 2**63 for seed in (0, 1, 2**62))
    assert torch.equal(torch.rand(5, generator=generator(3, "x")), torch.rand(5, generator=generator(3, "x")))
    assert numpy_generator(3, "x").random() == numpy_generator(3, "x").random()


def test_the_streams_are_those_of_every_other_machine() -> None:
    assert (
        derive(0, "initialisation") == int.from_bytes(hashlib.sha256(b"(0, 'initialisation')").digest()[:8], "big") >> 1
    )


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=8))
def test_a_largest_share_of_1_leaves_every_share_as_it_is(shares: list[float]) -> None:
    assert cap_shares(shares, 1.0) == shares


def test_the_shares_of_two_clients_stay_as_they_are() -> None:
    assert cap_shares([9.0, 1.0], 0.5) == [9.0, 1.0]
    assert cap_shares([9.0, 1.0, 1.0], 0.5) == [2.0, 1.0, 1.0]


@pytest.mark.parametrize("other", [{"a": 4, "b": 3}, {"a": 3}, {"a": 3, "b": 4, "c": 1}, {"a": 3, "m": 4}])
def test_states_that_do_not_fit_each_other_are_refused(other: dict[str, int]) -> None:
    given_states = [{"a": torch.ones(3), "b": torch.zeros(4)}, {name: torch.ones(size) for name, size in other.items()}]
    with pytest.raises(ValueError, match="different names or shapes"):
        average(given_states, [1, 1])


def test_truth_values_have_a_median_too() -> None:
    given_states = [{"mask": torch.tensor([each, True, False])} for each in (True, False, True)]
    found = average(given_states, [1, 1, 1])["mask"]
    assert found.tolist() == [True, True, False]
    assert found.dtype == torch.bool


def test_of_each_state_one_block_is_copied_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies may lie in files, and all of them must not come into memory together."""
    joined: list[int] = []
    cat = torch.cat

    def noted(parts: list[torch.Tensor]) -> torch.Tensor:
        whole = cat(parts)
        joined.append(len(whole))
        return whole

    given_states = [{f"w{index}": torch.full((3000,), float(index + state)) for index in range(70)} for state in (0, 2)]
    monkeypatch.setattr(torch, "cat", noted)
    found = average(given_states, [1, 1])
    assert all(torch.equal(tensor, torch.full((3000,), index + 1.0)) for index, tensor in enumerate(found.values()))
    assert max(joined) <= BLOCK_ELEMENTS
    assert sum(joined) == 2 * 70 * 3000
