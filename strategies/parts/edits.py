"""Edits between backward and step: proximal and linear terms without a graph, and steps to a point that is left again.

Each is one multi-tensor pass over the parameters.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def _with_gradients(model: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Gradients, parameters and the named tensors that belong to them, for parameters that have a gradient."""
    gradients, parameters, partners = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and name in tensors:
            gradients.append(parameter.grad)
            parameters.append(parameter.detach())
            partners.append(tensors[name])
    return gradients, parameters, partners


@torch.no_grad()
def pull_towards(model: nn.Module, reference: Mapping[str, Tensor], coefficient: float) -> None:
    """``g <- g + coefficient (w - reference)``: the gradient of ``coefficient / 2 ||w - reference||^2`` (FedProx)."""
    if coefficient == 0:
        return
    gradients, parameters, references = _with_gradients(model, reference)
    if gradients:
        torch._foreach_add_(gradients, torch._foreach_sub(parameters, references), alpha=coefficient)


@torch.no_grad()
def add_linear(model: nn.Module, direction: Mapping[str, Tensor], coefficient: float) -> None:
    """``g <- g + coefficient * direction``: the gradient of ``coefficient <direction, w>`` (FedDyn)."""
    if coefficient == 0:
        return
    gradients, _, directions = _with_gradients(model, direction)
    if gradients:
        torch._foreach_add_(gradients, directions, alpha=coefficient)


@torch.no_grad()
def displace(model: nn.Module, coefficient: Tensor | float) -> list[tuple[nn.Parameter, Tensor]]:
    """``w <- w + coefficient g``; the parameters that moved, with copies of where they were."""
    origin = [(item, item.detach().clone()) for item in model.parameters() if item.grad is not None]
    if origin:
        gradients = [item.grad for item, _ in origin if item.grad is not None]
        torch._foreach_add_([item.detach() for item, _ in origin], torch._foreach_mul(gradients, coefficient))
    return origin


@torch.no_grad()
def restore(origin: list[tuple[nn.Parameter, Tensor]]) -> None:
    """Undo :func:`displace`, to the bit; gradients stay."""
    for parameter, value in origin:
        parameter.copy_(value)


@contextmanager
def running_statistics_kept(model: nn.Module, keep: bool = True) -> Iterator[None]:
    """Inside, training-mode batch norm normalises with the batch's statistics and leaves its running ones alone."""
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]
    for layer in layers if keep else ():
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True
