"""FedSAM: the two-phase step by hand, where it leads with rho = 0, and what batch norm sees."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from support.exchanges import local_exchange
from support.toy import toy_settings
from torch import nn
from torch.nn import functional as F

from strategies.fedsam import NORM_FLOOR, ascend

RHO = 0.3


def first_step(tmp_path, **hyper):
    """A device after one step, the step's batch, and a copy of the model as it was before."""
    settings = toy_settings("fedsam", tmp_path, hyper={"rho": RHO, **hyper})
    local = local_exchange(settings)
    local._prepare(settings.method.phases(1)[0])
    images, labels = next(local.batches("test"))
    before = copy.deepcopy(local.model)
    losses = settings.method.step(local, images, labels)
    return local, before, images, labels, losses


def gradients(model: nn.Module, images, labels):
    loss = F.cross_entropy(model(images)[1], labels)
    return loss, torch.autograd.grad(loss, list(model.parameters()))


def test_the_step_is_the_gradient_at_the_neighbour_taken_at_the_origin(tmp_path):
    local, model, images, labels, losses = first_step(tmp_path)
    origin = [p.detach().clone() for p in model.parameters()]
    loss, first = gradients(model, images, labels)
    norm = math.sqrt(sum(float(value) ** 2 for g in first for value in g.flatten().tolist()))
    with torch.no_grad():
        for p, g in zip(model.parameters(), first, strict=True):
            p += RHO * g / (norm + NORM_FLOOR)
    _, second = gradients(model, images, labels)
    rate, decay = local.train.learning_rate, local.train.weight_decay
    assert losses.terms["cross_entropy"].item() == pytest.approx(loss.item(), rel=1e-6)
    for p, w, g in zip(local.model.parameters(), origin, second, strict=True):
        torch.testing.assert_close(p.detach(), w - rate * (g + decay * w), rtol=1e-4, atol=1e-7)
    difference = max(float((g - plain).abs().max()) for g, plain in zip(second, first, strict=True))
    assert difference > 1e-3  # the neighbour's gradient is another one


def test_only_the_pass_at_the_model_itself_moves_the_running_statistics(tmp_path):
    local, model, images, labels, _ = first_step(tmp_path)
    gradients(model, images, labels)
    for (name, ours), wanted in zip(local.model.named_buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6, msg=name)
    assert all(m.track_running_stats for m in local.model.modules() if isinstance(m, nn.BatchNorm2d))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_a_gradient_there_is_no_neighbour(dtype):
    model = nn.Linear(2, 2).to(dtype)
    assert ascend(model, RHO) == []
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = model.weight.detach().clone()
    ascend(model, RHO)
    assert torch.equal(model.weight, before)  # 0 / (0 + floor), not 0 / 0


def test_the_norm_has_the_floor_of_the_released_code():
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    model.weight.grad = torch.full_like(model.weight, 1e-13)
    ascend(model, RHO)
    assert model.weight.item() == pytest.approx(RHO * 1e-13 / (1e-13 + 1e-16))
