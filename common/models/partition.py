"""How a network's state is divided: body and head, normalisation layers, statistics and counters.

All functions take a module and return state-dict names; layers are told apart by their type, never by their name (in
torchvision's ResNets the normalisation of a shortcut is called ``downsample.1``).
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

COUNTER = "num_batches_tracked"


def norm_state_names(model: nn.Module) -> set[str]:
    """Names of every parameter, statistic and counter of BatchNorm of any dimension (SyncBatchNorm too)."""
    names: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            names.update(f"{path}.{name}" if path else name for name in module.state_dict())
    return names


def body_names(model: nn.Module) -> set[str]:
    """Names of the backbone's state."""
    return {name for name in model.state_dict() if name.startswith("backbone.")}
