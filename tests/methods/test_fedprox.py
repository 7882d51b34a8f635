"""FedProx: its term as a gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.exchanges import local_exchange
from support.toy import toy_settings


@pytest.mark.parametrize(("scale", "pull"), [(1.0, 0.125), (0.01, 0.00125)], ids=["the paper's", "the code's"])
def test_the_pull_is_mu_times_scale_times_the_distance(scale: float, pull: float, tmp_path: Path) -> None:
    local = local_exchange(toy_settings("fedprox", tmp_path, hyper={"mu": 0.5, "scale": scale}))
    local.reference()  # taken before the model moves
    with torch.no_grad():
        for parameter in local.model.parameters():
            parameter += 0.25
            parameter.grad = torch.zeros_like(parameter)
    local.method.edit_gradients(local)
    for name, parameter in local.model.named_parameters():
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, pull), rtol=1e-4, atol=0, msg=name)
