"""Local SGD has the bits of torch.optim.SGD, and loads no compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exchanges import local_exchange
from support.federation import ROOT
from support.toy import toy_settings
from torch import nn

from client.optimizer import SGD
from common.models.specs import Small
from common.numerics import generator

RUN = """
import sys
from goldfinch.cli import main
sys.argv = ["goldfinch", "run", *sys.argv[1:]]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
assert "torch" in sys.modules
assert "torch._dynamo" not in sys.modules, "PyTorch's compiler was loaded"
"""


def nets() -> tuple[nn.Module, nn.Module]:
    one, other = Small().build(5, 16, 0), Small().build(5, 16, 0)
    other.load_state_dict(one.state_dict())
    return one, other


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 1e-2])
def test_the_bits_are_those_of_pytorchs_optimiser(momentum: float, decay: float) -> None:
    ours, theirs = nets()
    mine = SGD(ours.parameters(), 0.1, momentum, decay)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=momentum, weight_decay=decay, foreach=True)
    draws = generator(0, "steps")
    for step in range(4):
        for position, pair in enumerate(zip(ours.parameters(), theirs.parameters(), strict=True)):
            gradient = torch.randn(pair[0].shape, generator=draws)
            for parameter in pair:  # some have their first gradient late, and some miss one
                parameter.grad = gradient.clone() if (step + position) % 3 else None
        if step == 2:
            mine.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = 0.03
        mine.step()
        reference.step()
        for mine_now, theirs_now in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine_now, theirs_now)
    assert any(
        not torch.equal(now, first) for now, first in zip(ours.parameters(), nets()[0].parameters(), strict=True)
    )


@pytest.mark.parametrize("change", [{"nesterov": True}, {"dampening": 0.5}, {"maximize": True}, {"momentum": 0.0}])
def test_a_step_reads_its_groups_as_pytorchs_does(change: dict[str, float]) -> None:
    ours, theirs = nets()
    mine = SGD(list(ours.parameters())[:4], lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(list(theirs.parameters())[:4], lr=0.1, momentum=0.9, foreach=True)
    draws = generator(0, "groups")
    for step in range(4):
        for pair in zip(ours.parameters(), theirs.parameters(), strict=True):
            gradient = torch.randn(pair[0].shape, generator=draws)
            for parameter in pair:
                parameter.grad = gradient.clone()
        if step == 1:
            mine.param_groups[0] |= change
            reference.param_groups[0] |= change
        if step == 2:
            others = {"params": list(ours.parameters())[4:], "lr": 0.01}
            mine.param_groups.append(mine.param_groups[0] | others)
            others["params"] = list(theirs.parameters())[4:]
            reference.add_param_group(reference.param_groups[0] | others)
        mine.step()
        reference.step()
    for mine_now, theirs_now in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine_now, theirs_now)


def test_groups_and_mistakes_are_left_to_pytorch(tmp_path: Path) -> None:
    local = local_exchange(toy_settings("fedavg", tmp_path))
    first, *others = local.model.parameters()
    grouped: Any = [{"params": [first], "lr": 0.5}, {"params": others}]
    assert [group["lr"] for group in local.make_optimizer(grouped).param_groups] == [0.5, local.learning_rate]
    with pytest.raises(ValueError, match="empty parameter list"):
        local.make_optimizer([])
    moved: Any = nn.Parameter(torch.ones(2)).to(torch.float64)
    with pytest.raises(ValueError, match="non-leaf"):
        local.make_optimizer([moved])


def test_gradients_are_removed_or_set_to_zero() -> None:
    net, _ = nets()
    optimizer = SGD(net.parameters(), lr=0.1)
    first = next(net.parameters())
    first.grad = torch.ones_like(first)
    optimizer.zero_grad(set_to_none=False)
    assert first.grad is not None
    assert not first.grad.any()
    optimizer.zero_grad()
    assert first.grad is None


@pytest.mark.long
def test_a_run_without_torchvision_does_not_load_pytorchs_compiler(tmp_path: Path) -> None:
    words = ["data=glyphs", "engine=inline", "train.device=cpu", "train.rounds=1", "train.local_steps=1"]
    small = ["protocol.samples=24", "rounds.test_samples=8", f"output={tmp_path / 'run'}"]
    command = [sys.executable, "-c", RUN, "method=fpl", *words, *small]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
