"""Local SGD has the bits of torch.optim.SGD, and loads no compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.federation import ROOT
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


def test_a_run_without_torchvision_does_not_load_pytorchs_compiler(tmp_path: Path) -> None:
    words = ["data=glyphs", "engine=inline", "train.device=cpu", "train.rounds=1", "train.local_steps=1"]
    small = ["protocol.samples=24", "rounds.test_samples=8", f"output={tmp_path / 'run'}"]
    command = [sys.executable, "-c", RUN, "method=fpl", *words, *small]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
