"""Initial weights of a network: of a torchvision backbone, or of a model that Goldfinch exported."""

import json
from argparse import Namespace
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from common.errors import some_of
from common.models.base import Model, ModelError
from common.regular_files import MAX_TENSOR_FILE, check_regular
from common.storage import read_tensors
from common.text import warn_once

WEIGHTS = "model.safetensors"
"""The file in an exported model's folder with its weights and the names of its classes."""

WRAPPERS = ("state_dict", "model", "teacher", "model_state_dict")
"""Entries of a file of ``torch.save`` that hold the state dict, beside an optimizer, counts and settings."""

PREFIXES = ("module.", "backbone.", "encoder.", "model.")
"""Beginnings of names that a wrapper put there, such as DataParallel or a method of self-supervised learning."""

PARTS = ("backbone.", "encoder.")
"""Prefixes of one part of a larger network; its other parts are dropped."""

HEADS = ("fc.", "classifier.", "head.", "heads.")
"""Beginnings of the names of classifiers; the network has its own head."""

COUNTER = "num_batches_tracked"
"""End of the names of batch normalisation's counters, which no result depends on."""

MAX_LISTED = 4
"""Names of tensors in one message."""


def load_pretrained(backbone: nn.Module, path: Path) -> None:
    """Fill a torchvision ResNet with the tensors of ``model.pretrained_file``; see :func:`load_weights`."""
    load_weights(backbone, path, "model.pretrained_file", (), "check model.depth and model.norm")


def load_weights(backbone: nn.Module, path: Path, key: str, ignored: tuple[str, ...], advice: str) -> None:
    """Fill ``backbone`` with the tensors of a file, and log what was taken, dropped and missing.

    Names may begin with :data:`PREFIXES`. Classifiers (:data:`HEADS`) and the other parts of a larger network are
    dropped. Batch counters may be missing; all other tensors of ``backbone`` must be there.

    Args:
        backbone: a network without its classifier.
        path: a safetensors file, or one that ``torch.save`` wrote, by its first bytes; no code in it is run.
        key: the setting that names the file.
        ignored: beginnings of the names of further tensors that are not read.
        advice: what to check if the file is of another network.

    Raises:
        ModelError: the file is missing, unreadable, belongs to another network, or has values that are not finite.
    """
    path = path.expanduser()
    state = backbone.state_dict()
    read = _read_weights(path, key)
    given, rest = _by_name(read, state, f"{key}={path}")
    part = _part(given, read)
    dropped: list[str] = []
    unknown: list[str] = []
    for name in rest:
        if _bare(name, state).startswith((*ignored, *HEADS)) or not name.startswith(part):
            dropped.append(name)
        else:
            unknown.append(name)
    missing = [name for name in state if name not in given]
    needed = [name for name in missing if not name.endswith(COUNTER)]
    misfits = [name for name in given if read[given[name]].shape != state[name].shape]
    for what, names in (("lacks", needed), ("has unknown tensors", unknown), ("has other shapes for", misfits)):
        if names:
            raise ModelError(
                f"{key}={path} belongs to another network: it {what} {some_of(sorted(names), MAX_LISTED)}; {advice}"
            )
    taken = {name: read[source] for name, source in given.items()}
    check_finite(taken, f"{key}={path}")
    backbone.load_state_dict(taken, strict=False)
    warn_once(
        f"{key}={path}: {len(taken)} tensors are taken; dropped: {some_of(dropped, MAX_LISTED) or 'none'}; missing: "
        f"{some_of(missing, MAX_LISTED) or 'none'}"
    )


def _by_name(read: Mapping[str, Tensor], state: Mapping[str, Tensor], place: str) -> tuple[dict[str, str], list[str]]:
    """Return the name in a file of each tensor that the network has, by the network's name, and the names of the rest.

    Raises:
        ModelError: two tensors of the file are of one name.
    """
    given: dict[str, str] = {}
    rest: list[str] = []
    for source in read:
        name = _bare(source, state)
        if name not in state:
            rest.append(source)
        elif name in given:
            raise ModelError(
                f"{place}: {given[name]} and {source} may both be {name}: save the one that is meant, with "
                "safetensors.torch.save_file"
            )
        else:
            given[name] = source
    return given, rest


def _bare(name: str, known: Container[str]) -> str:
    """Return a tensor's name without :data:`PREFIXES`, as far as it takes to be ``known``."""
    while name not in known:
        prefix = next((each for each in PREFIXES if name.startswith(each)), "")
        if not prefix:
            return name
        name = name.removeprefix(prefix)
    return name


def _part(given: Mapping[str, str], read: Mapping[str, Tensor]) -> str:
    """Return what a network's names begin with in a file of a larger network; empty if it is the whole."""
    removed = {source.removesuffix(name) for name, source in given.items()}
    if len(removed) != 1:
        return ""
    (prefix,) = removed
    if prefix.endswith(PARTS) and any(not name.startswith(prefix) for name in read):
        return prefix
    return ""


def check_finite(tensors: Mapping[str, Tensor], place: str) -> None:
    """Refuse initial weights that are infinite or no numbers.

    Raises:
        ModelError: some are; the message names their tensors.
    """
    bad = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        raise ModelError(
            f"{place}: values that are not finite in {some_of(bad, MAX_LISTED)}: the training that wrote it diverged; "
            "take another file"
        )


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
        with path.open("rb") as stream:
            start = stream.read(9)
            is_safetensors = start[8:] == b"{"  # after the length of the header
            if is_safetensors or not start.startswith((b"PK", b"\x80")):  # a ZIP archive, a pickle: torch.save's
                return load_file(path)
            stream.seek(0)  # given its path, torch would go by the suffix
            with torch.serialization.safe_globals([Namespace]):  # the settings that training scripts save along
                content = torch.load(stream, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{key}={path}: not a readable safetensors file, nor one of torch.save: {error}") from error
    except Exception as error:  # torch raises many types for what is no state dict
        raise ModelError(
            f"{key}={path} cannot be read as a state dict, which is all that is read of such a file: "
            f"{str(error).partition(chr(10))[0]}; write one with torch.save(network.state_dict(), 'network.pth')"
        ) from error
    return _unwrapped(content, f"{key}={path}")


def _unwrapped(content: Any, place: str) -> dict[str, Tensor]:
    """Return the state dict in what ``torch.load`` returned: itself, or an entry of :data:`WRAPPERS`.

    Raises:
        ModelError: there is none; the message names what there is.
    """
    while isinstance(content, Mapping):
        if content and all(isinstance(item, Tensor) for item in content.values()):
            return {str(name): tensor for name, tensor in content.items()}
        inner = next((name for name in WRAPPERS if isinstance(content.get(name), Mapping)), None)
        if inner is None:
            raise ModelError(
                f"{place} is no state dict: it holds {some_of(list(map(str, content)), MAX_LISTED) or 'nothing'}, and "
                f"none of {', '.join(WRAPPERS)}; torch.save(network.state_dict(), 'network.pth') writes one"
            )
        content = content[inner]
    raise ModelError(f"{place} is no state dict: torch.save(network.state_dict(), 'network.pth') writes one")


def start_from(model: Model, folder: Path, classes: Sequence[str]) -> None:
    """Fill ``model`` with the weights of an exported model; the classifier only if the classes are the same.

    Of an export that holds only what clients share, such as FedBN's without batch norm, the rest keeps its initial
    weights.

    Args:
        model: a network of the same kind.
        folder: a folder that ``goldfinch export`` wrote.
        classes: names of the classes of ``model``, in order.

    Raises:
        ModelError: the folder holds no exported model, one of another network, one without weights, or values that
            are not finite.
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
    check_finite(taken, f"model.pretrained={folder}")
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
