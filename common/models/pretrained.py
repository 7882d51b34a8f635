"""Weights that a network starts from: of a torchvision backbone, or of a model that Goldfinch exported."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from common.models.base import Model, ModelError
from common.storage.files import read_tensors

WEIGHTS = "model.safetensors"
"""The file of an exported model's folder that holds its weights and says of which classes."""

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
    missing = {name for name in set(state) - set(given) if name.rpartition(".")[2] != "num_batches_tracked"}
    unknown = set(given) - set(state)
    misfits = {name for name in set(state) & set(given) if state[name].shape != given[name].shape}
    for what, names in (("lacks", missing), ("has unknown tensors", unknown), ("has other shapes for", misfits)):
        if names:
            raise ModelError(
                f"model.pretrained_file={path} belongs to another network: it {what} {', '.join(sorted(names)[:3])}"
                f"{' ...' if len(names) > 3 else ''}; check model.depth and model.norm"
            )
    backbone.load_state_dict(given, strict=False)


def start_from(model: Model, folder: Path, classes: Sequence[str]) -> None:
    """Fill ``model`` with the weights of an exported model; its classifier only if it is of the same classes.

    Args:
        model: a network of the same kind.
        folder: that ``goldfinch export`` wrote.
        classes: names of the classes that ``model`` is for, in order.

    Raises:
        ModelError: the folder holds no exported model, or one of another network.
    """
    state, (weights, known) = model.state_dict(), _exported(folder)
    parts = ("backbone.", "head.") if known == list(classes) else ("backbone.",)
    taken, given = ({name for name in names if name.startswith(parts)} for names in (state, weights))
    misfit = sorted(name for name in taken | given if name in taken ^ given or weights[name].shape != state[name].shape)
    if misfit:
        raise ModelError(
            f"model.pretrained={folder} is of another network: {misfit[0]} differs; choose the model and the image "
            "size that its model.json names"
        )
    model.load_state_dict({**state, **{name: weights[name] for name in taken}})


def same_classes(folder: Path, classes: Sequence[str]) -> bool:
    """Whether the exported model in ``folder`` is of these classes, in this order.

    Raises:
        ModelError: the folder holds no exported model.
    """
    return _exported(folder)[1] == list(classes)


def _exported(folder: Path) -> tuple[Mapping[str, Tensor], list[str]]:
    """The tensors of an exported model, and the names of its classes."""
    path = folder.expanduser() / WEIGHTS
    try:
        tensors, metadata = read_tensors(path)
        return tensors, json.loads(metadata["goldfinch"])["classes"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"model.pretrained={folder}: no exported model ({error}); goldfinch export RUN --to {folder} writes one"
        ) from error
