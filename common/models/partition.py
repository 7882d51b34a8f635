"""How a network's state is divided: body and head, normalisation layers, statistics and counters.

All functions take a module and return state-dict names; layers are told apart by their type, never by their name (in
torchvision's ResNets the normalisation of a shortcut is called ``downsample.1``).
"""

from __future__ import annotations

from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

COUNTER = "num_batches_tracked"


def norm_state_names(model: nn.Module, kind: Literal["batch", "all"] = "batch") -> set[str]:
    """Names of every parameter, statistic and counter of normalisation layers.

    Args:
        model: any module.
        kind: ``batch`` for BatchNorm of any dimension (SyncBatchNorm too), as FedBN keeps them; ``all`` adds
            InstanceNorm, GroupNorm, LayerNorm and RMSNorm.
    """
    types: tuple[type[nn.Module], ...] = (_BatchNorm,)
    if kind == "all":
        types = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
    names: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, types):
            names.update(f"{path}.{name}" if path else name for name in module.state_dict())
    return names


def body_names(model: nn.Module) -> set[str]:
    """Names of the backbone's state."""
    return {name for name in model.state_dict() if name.startswith("backbone.")}


def head_names(model: nn.Module) -> set[str]:
    """Names of the head's state."""
    return {name for name in model.state_dict() if name.startswith("head.")}


def parameter_names(model: nn.Module) -> set[str]:
    """Names of what an optimiser may change."""
    return {name for name, _ in model.named_parameters()}


def buffer_names(model: nn.Module) -> set[str]:
    """Names of state that is no parameter: running means and variances, and counters."""
    return set(model.state_dict()) - parameter_names(model)


def counter_names(model: nn.Module) -> set[str]:
    """Names of the integer batch counters of normalisation layers; they are copied, not averaged."""
    return {name for name in norm_state_names(model, "all") if name.rpartition(".")[2] == COUNTER}
