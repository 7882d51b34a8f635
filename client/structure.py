"""The tensors inside an object of an exchange, and everything else of it, so that two such objects can be compared.

A captured training step reads tensors at fixed addresses. What an exchange prepares anew, such as the rows of a loss or
a frozen copy of the network, must therefore be copied into the tensors of the exchange in which the step was captured.
That is possible where the two have the same structure: equal kinds, names, shapes and plain values.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class CaptureError(Exception):
    """A training step cannot be captured; the message says why."""


PLAIN = (type(None), bool, int, float, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size, type)
"""Values that a captured step may have read, since they are compared."""


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in ``value``, in a fixed order.

    Raises:
        CaptureError: ``value`` holds something of which it is not known what a step reads from it.
    """
    tensors: list[Tensor] = []
    _walk(value, tensors)
    return tensors


def structure_of(value: object) -> object:
    """Return what ``value`` is except for the numbers in its tensors; two such results can be compared by ``==``.

    Raises:
        CaptureError: as in :func:`tensors_in`.
    """
    return _walk(value, [])


def with_own_containers(value: Any) -> Any:
    """Return ``value`` with containers of its own and the same tensors and networks.

    What a step puts into a container of the result is not in ``value``.
    """
    if isinstance(value, (Tensor, nn.Module, *PLAIN)):
        return value
    if isinstance(value, torch.optim.Optimizer):
        own_optimizer = copy.copy(value)
        own_optimizer.param_groups = [dict(group) for group in value.param_groups]
        own_optimizer.state = defaultdict(dict)
        for parameter, state in value.state.items():
            own_optimizer.state[parameter] = dict(state)
        return own_optimizer
    if isinstance(value, Mapping):
        return {key: with_own_containers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_own_containers(item) for item in value]
    if isinstance(value, tuple):
        return value  # as it is: a step cannot change it
    if not hasattr(value, "__dict__"):
        return value  # of which nothing is known: see structure_of
    own = copy.copy(value)
    for name, item in vars(own).items():
        object.__setattr__(own, name, with_own_containers(item))
    return own


def copy_tensors(source: object, target: object) -> None:
    """Copy the tensors in ``source`` into those in ``target``, which has the same structure."""
    kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for read, written in zip(tensors_in(source), tensors_in(target), strict=True):
        if read.data_ptr() == written.data_ptr():
            continue
        pair = kinds.setdefault(read.dtype, ([], []))
        pair[0].append(read)
        pair[1].append(written)
    with torch.no_grad():
        for reads, writes in kinds.values():
            torch._foreach_copy_(writes, reads)


def _walk(value: object, tensors: list[Tensor]) -> object:
    """Append the tensors in ``value`` to ``tensors``; return the structure of ``value``."""
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return "tensor", tuple(value.shape), value.stride(), value.dtype, value.device
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, nn.Module):
        return _module(value, tensors)
    if isinstance(value, torch.optim.Optimizer):
        return _optimizer(value, tensors)
    if isinstance(value, Mapping):
        return type(value), [(key, _walk(item, tensors)) for key, item in value.items()]
    if isinstance(value, Sequence):
        return type(value), [_walk(item, tensors) for item in value]
    if dataclasses.is_dataclass(value):
        return type(value), _walk(vars(value), tensors)
    raise CaptureError(f"it keeps a {type(value).__name__} between steps")


def _module(module: nn.Module, tensors: list[Tensor]) -> object:
    named: list[object] = []
    for name, parameter in module.named_parameters():
        named.append((name, parameter.requires_grad, _walk(parameter, tensors)))
    for name, buffer in module.named_buffers():
        named.append((name, _walk(buffer, tensors)))
    modes = [part.training for part in module.modules()]
    return type(module), named, modes


def _optimizer(optimizer: torch.optim.Optimizer, tensors: list[Tensor]) -> object:
    groups: list[object] = []
    for group in optimizer.param_groups:
        rates: dict[str, Any] = {name: value for name, value in group.items() if name != "params"}
        states = [_walk(optimizer.state.get(parameter, {}), tensors) for parameter in group["params"]]
        groups.append((_walk(rates, tensors), states))
    return type(optimizer), groups
