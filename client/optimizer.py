"""Stochastic gradient descent for local steps, with PyTorch's arithmetic and without its optimiser class."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

SETTINGS = ("lr", "momentum", "weight_decay", "dampening", "nesterov", "maximize")
"""What a group has besides its parameters."""


@dataclass(init=False, eq=False)
class SGD:
    """``torch.optim.SGD(parameters, lr, momentum, weight_decay=..., foreach=True)`` without what it loads.

    The first ``torch.optim.Optimizer`` of a process imports PyTorch's compiler: a second of processor time and 150 MB,
    in each run, each actor of a simulation and each device. torchvision imports it too, so networks made of its blocks
    gain nothing. A step is the same function of PyTorch, so its bits are the same.

    It has ``param_groups``, ``zero_grad`` and ``step``. What needs more of an optimiser, such as a scheduler, makes
    ``torch.optim.SGD`` itself.

    Attributes:
        param_groups: groups with the keys of those of ``torch.optim.SGD``. A step reads them anew.
        velocities: the velocity of each parameter that has taken a step with momentum, by the parameter's ``id``.
    """

    param_groups: list[dict[str, Any]]
    velocities: dict[int, Tensor]

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        group: dict[str, Any] = {"params": list(parameters), "lr": lr, "momentum": momentum}
        group |= {"weight_decay": weight_decay, "dampening": 0.0, "nesterov": False, "maximize": False}
        self.param_groups = [group]
        self.velocities = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients, or set them to zero."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.detach_().zero_()

    @torch.no_grad()
    def step(self) -> None:
        """Take one step with the parameters that have a gradient."""
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients = [parameter.grad for parameter in params]
            velocities = [self.velocities.get(id(parameter)) for parameter in params]
            settings = {name: group[name] for name in SETTINGS}
            # foreach: one call per operation instead of one per tensor; the same operations, so the same bits
            sgd(params, gradients, velocities, foreach=True, **settings)
            for parameter, velocity in zip(params, velocities, strict=True):
                if velocity is not None:
                    self.velocities[id(parameter)] = velocity
