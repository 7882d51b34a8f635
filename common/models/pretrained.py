"""Weights that a backbone starts from, read from a safetensors file."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from common.models.base import ModelError
from common.models.partition import COUNTER

IGNORED = "fc."
"""torchvision's classifier; the network has its own head."""


def load_pretrained(backbone: nn.Module, path: Path) -> None:
    """Fill ``backbone`` with the tensors of ``path``; batch counters may be missing, all else must fit exactly.

    Args:
        backbone: a network with torchvision's parameter names.
        path: a safetensors file, for instance ``safetensors.torch.save_file(network.state_dict(), path)`` of a
            torchvision network.

    Raises:
        ModelError: the file is missing, unreadable, or belongs to another network.
    """
    if not path.is_file():
        raise ModelError(
            f"model.pretrained_file={path}: no such file; write one with safetensors.torch.save_file("
            f"torchvision.models.resnet18(weights='DEFAULT').state_dict(), 'resnet18.safetensors')"
        )
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"model.pretrained_file={path}: not a readable safetensors file: {error}") from error
    state = backbone.state_dict()
    given = {name: tensor for name, tensor in tensors.items() if not name.startswith(IGNORED)}
    missing = {name for name in set(state) - set(given) if name.rpartition(".")[2] != COUNTER}
    unknown = set(given) - set(state)
    misfits = {name for name in set(state) & set(given) if state[name].shape != given[name].shape}
    for what, names in (("lacks", missing), ("has unknown tensors", unknown), ("has other shapes for", misfits)):
        if names:
            raise ModelError(
                f"model.pretrained_file={path} belongs to another network: it {what} {', '.join(sorted(names)[:3])}"
                f"{' ...' if len(names) > 3 else ''}; check model.depth and model.norm"
            )
    backbone.load_state_dict(given, strict=False)
