"""Initial weights of a network: of a torchvision backbone, or of a model that Goldfinch exported."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from common.models.base import Model, ModelError
from common.regular_files import MAX_TENSOR_FILE, check_regular
from common.storage import read_tensors

WEIGHTS = "model.safetensors"
"""The file in an exported model's folder with its weights and the names of its classes."""

STATE_DICTS = (".pth", ".pt", ".bin")
"""Endings of files that ``torch.save`` wrote; all others are read as safetensors."""

IGNORED = "fc."
"""torchvision's classifier; the network has its own head."""


def load_pretrained(backbone: nn.Module, path: Path) -> None:
    """Fill a torchvision ResNet with the tensors of ``model.pretrained_file``; see :func:`load_weights`."""
    load_weights(backbone, path, "model.pretrained_file", (IGNORED,), "check model.depth and model.norm")


def load_weights(backbone: nn.Module, path: Path, key: str, ignored: tuple[str, ...], advice: str) -> None:
    """Fill ``backbone`` with the tensors of a file; batch counters may be missing, all others must match.

    Args:
        backbone: a network without its classifier.
        path: a safetensors file, or a state dict that ``torch.save`` wrote; no code in it is run.
        key: the setting that names the file.
        ignored: beginnings of the names of tensors that are not read, such as the classifier's.
        advice: what to check if the file is of another network.

    Raises:
        ModelError: the file is missing, unreadable, or belongs to another network.
    """
    path = path.expanduser()
    given: dict[str, Tensor] = {}
    for name, tensor in _read_weights(path, key).items():
        if not name.startswith(ignored):
            given[name] = tensor
    state = backbone.state_dict()
    missing: list[str] = []
    misfits: list[str] = []
    for name, tensor in state.items():
        if name not in given:
            if not name.endswith("num_batches_tracked"):
                missing.append(name)
        elif given[name].shape != tensor.shape:
            misfits.append(name)
    unknown = given.keys() - state.keys()
    for what, names in (("lacks", missing), ("has unknown tensors", unknown), ("has other shapes for", misfits)):
        if names:
            listed = ", ".join(sorted(names)[:3])
            if len(names) > 3:
                listed += " ..."
            raise ModelError(f"{key}={path} belongs to another network: it {what} {listed}; {advice}")
    backbone.load_state_dict(given, strict=False)


def _read_weights(path: Path, key: str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file or of a state dict, on the CPU.

    Raises:
        ModelError: the file is missing or unreadable.
    """
    if not path.exists():
        raise ModelError(
            f"{key}={path}: no such file; write one with safetensors.torch.save_file("
            f"torchvision.models.resnet18(weights='DEFAULT').state_dict(), 'resnet18.safetensors')"
        )
    try:
        check_regular(path, MAX_TENSOR_FILE)
        if path.suffix not in STATE_DICTS:
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{key}={path}: not a readable safetensors file: {error}") from error
    except Exception as error:  # torch raises many types for what is no state dict
        raise ModelError(
            f"{key}={path} cannot be read as a state dict, which is all that is read of such a file: "
            f"{str(error).partition(chr(10))[0]}; write one with torch.save(network.state_dict(), 'network.pth')"
        ) from error
    if not isinstance(content, Mapping) or not all(isinstance(item, Tensor) for item in content.values()):
        raise ModelError(f"{key}={path} is no state dict: torch.save(network.state_dict(), 'network.pth') writes one")
    return dict(content)


def start_from(model: Model, folder: Path, classes: Sequence[str]) -> None:
    """Fill ``model`` with the weights of an exported model; the classifier only if the classes are the same.

    Of an export that holds only what clients share, such as FedBN's without batch norm, the rest keeps its initial
    weights.

    Args:
        model: a network of the same kind.
        folder: a folder that ``goldfinch export`` wrote.
        classes: names of the classes of ``model``, in order.

    Raises:
        ModelError: the folder holds no exported model, one of another network, or one without weights.
    """
    state, (weights, description) = model.state_dict(), _exported(folder)
    known, complete = description["classes"], description.get("complete", True)
    if not complete and not any(name in state for name in weights):
        raise ModelError(
            f"model.pretrained={folder}: clients of {description.get('method')} share no weights of the network, so "
            "there are none to start from; export the own model of a client with --client instead"
        )
    parts: tuple[str, ...] = ("backbone.",)
    if known == list(classes):
        parts = ("backbone.", "head.")
    taken: dict[str, Tensor] = {}
    for name in sorted(state.keys() | weights.keys()):
        if not name.startswith(parts):
            continue
        if name not in weights and not complete:
            continue  # a part that each client keeps
        if name not in state or name not in weights or weights[name].shape != state[name].shape:
            raise ModelError(
                f"model.pretrained={folder} is of another network: {name} differs; choose the model and the image "
                "size that its model.json names"
            )
        taken[name] = weights[name]
    model.load_state_dict({**state, **taken})


def same_classes(folder: Path, classes: Sequence[str]) -> bool:
    """Return whether the exported model in ``folder`` has a classifier of these classes, in this order.

    Raises:
        ModelError: the folder holds no exported model.
    """
    weights, description = _exported(folder)
    has_classifier = any(name.startswith("head.") for name in weights)
    return has_classifier and bool(description["classes"] == list(classes))


def _exported(folder: Path) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    """Return the tensors of an exported model, and its description."""
    path = folder.expanduser() / WEIGHTS
    try:
        tensors, metadata = read_tensors(path)
        description = json.loads(metadata["goldfinch"])
        if "classes" not in description:
            raise ValueError("it names no classes")
        return tensors, description
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"model.pretrained={folder}: no exported model ({error}); goldfinch export RUN --to {folder} writes one"
        ) from error
