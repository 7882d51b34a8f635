"""Changes of gradients and parameters between the backward pass and the optimiser step.

Proximal and linear terms are added to the gradients without a graph; :func:`displace` moves the parameters and
:func:`restore` moves them back. Each function is one multi-tensor pass over the parameters.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def _with_gradients(model: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return gradients, parameters and the tensors of the same names, for parameters that have a gradient."""
    gradients: list[Tensor] = []
    parameters: list[Tensor] = []
    partners: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and name in tensors:
            gradients.append(parameter.grad)
            parameters.append(parameter.detach())
            partners.append(tensors[name])
    return gradients, parameters, partners


@torch.no_grad()
def pull_towards(model: nn.Module, reference: Mapping[str, Tensor], coefficient: float) -> None:
    """Add ``coefficient (w - reference)``, the gradient of ``coefficient / 2 ||w - reference||^2`` (FedProx)."""
    if coefficient == 0:
        return
    gradients, parameters, references = _with_gradients(model, reference)
    if gradients:
        torch._foreach_add_(gradients, torch._foreach_sub(parameters, references), alpha=coefficient)


@torch.no_grad()
def add_linear(model: nn.Module, direction: Mapping[str, Tensor], coefficient: float) -> None:
    """Set ``g <- g + coefficient * direction``: the gradient of ``coefficient <direction, w>`` (FedDyn)."""
    if coefficient == 0:
        return
    gradients, _, directions = _with_gradients(model, direction)
    if gradients:
        torch._foreach_add_(gradients, directions, alpha=coefficient)


@torch.no_grad()
def displace(model: nn.Module, coefficient: Tensor | float) -> list[tuple[nn.Parameter, Tensor]]:
    """Set ``w <- w + coefficient g``; return the changed parameters with copies of their old values."""
    origin: list[tuple[nn.Parameter, Tensor]] = []
    parameters: list[Tensor] = []
    gradients: list[Tensor] = []
    for parameter in model.parameters():
        if parameter.grad is not None:
            origin.append((parameter, parameter.detach().clone()))
            parameters.append(parameter.detach())
            gradients.append(parameter.grad)
    if origin:
        torch._foreach_add_(parameters, torch._foreach_mul(gradients, coefficient))
    return origin


@torch.no_grad()
def restore(origin: list[tuple[nn.Parameter, Tensor]]) -> None:
    """Undo :func:`displace` bit for bit; gradients stay."""
    for parameter, value in origin:
        parameter.copy_(value)


@contextmanager
def running_statistics_kept(model: nn.Module, keep: bool = True) -> Iterator[None]:
    """Within the context, batch norm in training mode does not update its running statistics.

    Args:
        model: the model.
        keep: ``False`` makes this a context without effect.
    """
    layers: list[_BatchNorm] = []
    if keep:
        for layer in model.modules():
            if isinstance(layer, _BatchNorm) and layer.track_running_stats:
                layers.append(layer)
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True
