"""Stochastic gradient descent for local steps, with PyTorch's arithmetic and without its optimiser class."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd


@dataclass(init=False)
class SGD:
    """``torch.optim.SGD(parameters, lr, momentum, weight_decay=..., foreach=True)`` without what it loads.

    The first ``torch.optim.Optimizer`` of a process imports PyTorch's compiler: a second of processor time and 150 MB,
    in each run, each actor of a simulation and each device. torchvision imports it too, so networks made of its blocks
    gain nothing. A step is the same function of PyTorch, so its bits are the same.

    Attributes:
        param_groups: one group: ``params``, ``lr``, ``momentum`` and ``weight_decay``. A step reads them anew.
        buffers: the velocity of each parameter, ``None`` before its first step.
    """

    param_groups: list[dict[str, Any]]
    buffers: list[Tensor | None]

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        params = list(parameters)
        self.param_groups = [{"params": params, "lr": lr, "momentum": momentum, "weight_decay": weight_decay}]
        self.buffers = [None] * len(params)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients, or set them to zero."""
        for parameter in self.param_groups[0]["params"]:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    @torch.no_grad()
    def step(self) -> None:
        """Take one step with the parameters that have a gradient."""
        group = self.param_groups[0]
        params: list[Tensor] = []
        gradients: list[Tensor] = []
        positions: list[int] = []
        for position, parameter in enumerate(group["params"]):
            if parameter.grad is not None:
                params.append(parameter)
                gradients.append(parameter.grad)
                positions.append(position)
        buffers = [self.buffers[position] for position in positions]
        sgd(
            params,
            gradients,
            buffers,
            foreach=True,  # one call per operation instead of one per tensor; the same operations, so the same bits
            lr=group["lr"],
            momentum=group["momentum"],
            weight_decay=group["weight_decay"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        for position, buffer in zip(positions, buffers, strict=True):
            self.buffers[position] = buffer
