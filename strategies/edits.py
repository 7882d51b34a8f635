"""Gradient edits between backward and step: proximal and linear terms without a graph, one multi-tensor pass each."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


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
