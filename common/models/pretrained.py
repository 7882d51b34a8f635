"""Initial weights of a network: of a torchvision backbone, or of a model that Goldfinch exported."""

import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from common.text import printable, shell_line, warn_once

WEIGHTS = "model.safetensors"
"""The file in an exported model's folder with its weights and the names of its classes."""

COUNTER = "num_batches_tracked"
"""End of the names of batch normalisation's counters, which no result depends on."""

MAX_LISTED = 4
"""Names of tensors in one message."""

MAX_DEPTH = 4
"""Entries in entries of a file that are looked into."""

MAX_ANCHORS = 8
"""Names of the network that are looked for in the names of a file, to find what all names begin and end with there."""

State = Mapping[str, Tensor]


def load_pretrained(backbone: nn.Module, path: Path) -> None:
    """Fill a torchvision ResNet with the tensors of ``model.pretrained_file``; see :func:`load_weights`."""
    load_weights(backbone, path, "model.pretrained_file", (), "check model.depth and model.norm")


@dataclass(frozen=True)
class WeightsReading:
    """One way to read a network in a file.

    Args:
        keys: the entries that lead to the tensors: none, or such as ``("model", "teacher")``.
        tensors: all tensors there, by their names in the file.
        affixes: what each of the network's names begins and ends with in the file.
        given: the name in the file of each tensor that the network has, by the network's name.
    """

    keys: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    affixes: tuple[str, str]
    given: Mapping[str, str]


def load_weights(backbone: nn.Module, path: Path, key: str, ignored: tuple[str, ...], advice: str) -> None:
    """Fill ``backbone`` with the tensors of a file, and log what was taken, dropped and missing.

    The network is found by its names: in whatever entry of the file, and with whatever prefix and suffix all of its
    names have. Tensors of other parts, such as classifiers, are dropped. Batch counters may be missing; all other
    tensors of ``backbone`` must be there.

    Args:
        backbone: a network without its classifier.
        path: a safetensors file, or one that ``torch.save`` wrote, by its first bytes; no code in it is run.
        key: the setting that names the file.
        ignored: beginnings of the names of further tensors that are not read.
        advice: what to check if the file is of another network.

    Raises:
        ModelError: the file is missing, unreadable, belongs to another network, holds several that fit, or has values
            that are not finite.
    """
    path = path.expanduser()
    state = backbone.state_dict()
    place = f"{key}={path}"
    reading = _chosen(_readings(_read_weights(path, key), state), state, path, key)
    given, read = reading.given, reading.tensors
    prefix, suffix = reading.affixes
    modules = {name.partition(".")[0] for name in state}
    dropped: list[str] = []
    unknown: list[str] = []
    for name in sorted(read.keys() - set(given.values())):
        inside = name.startswith(prefix) and name.endswith(suffix)
        bare = name.removeprefix(prefix)
        if inside and bare.partition(".")[0] in modules and not bare.startswith(ignored):
            unknown.append(name)
        else:
            dropped.append(name)
    missing = [name for name in state if name not in given]
    needed = [name for name in missing if not name.endswith(COUNTER)]
    misfits = [name for name in given if read[given[name]].shape != state[name].shape]
    for what, names in (("lacks", needed), ("has unknown tensors", unknown), ("has other shapes for", misfits)):
        if names:
            raise ModelError(f"{place} belongs to another network: it {what} {_some(names)}{_held(reading)}; {advice}")
    taken = {name: read[source] for name, source in given.items()}
    check_finite(taken, place)
    backbone.load_state_dict(taken, strict=False)
    warn_once(
        f"{place}: {len(taken)} tensors are taken{_found_at(reading)}; dropped: {_some(dropped)}; missing: "
        f"{_some(missing)}"
    )


def _some(names: Sequence[str]) -> str:
    return some_of(sorted(names), MAX_LISTED) or "none"


def _held(reading: WeightsReading) -> str:
    """Return what a file holds instead of the network, for messages; empty if it has most of the network's names."""
    if len(reading.given) > 1:
        return ""
    return f" (it holds {some_of(list(reading.tensors), MAX_LISTED)})"


def _found_at(reading: WeightsReading) -> str:
    """Return where in a file the network is, for messages: `` of 'model' by the prefix 'module.'``."""
    place = ""
    if reading.keys:
        place += f" of {'.'.join(reading.keys)!r}"
    for what, affix in zip(("prefix", "suffix"), reading.affixes, strict=True):
        if affix:
            place += f" by the {what} {affix!r}"
    return place


def _state_dicts(content: Mapping[Any, Any], keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], State]]:
    """Yield the tensors by name of each mapping in what ``torch.load`` returned, with the entries that lead to it."""
    tensors = {name: item for name, item in content.items() if isinstance(name, str) and isinstance(item, Tensor)}
    if tensors:
        yield keys, tensors
    for name, item in content.items():
        if isinstance(name, str) and isinstance(item, Mapping) and len(keys) < MAX_DEPTH:
            yield from _state_dicts(item, (*keys, name))


def _readings(dicts: Sequence[tuple[tuple[str, ...], State]], state: State) -> list[WeightsReading]:
    """Return the ways to read a network in a file, the one with most of its tensors first."""
    needed = [name for name in state if not name.endswith(COUNTER)]
    anchors = sorted(needed, key=len)[-MAX_ANCHORS:]
    readings: list[WeightsReading] = []
    for keys, tensors in dicts:
        affixes: dict[tuple[str, str], None] = {}
        for anchor in anchors:
            for name in tensors:
                before, between, after = name.partition(anchor)
                if between:
                    affixes[before, after] = None
        for before, after in affixes or {("", ""): None}:
            given = {name: f"{before}{name}{after}" for name in state if f"{before}{name}{after}" in tensors}
            readings.append(WeightsReading(keys, tensors, (before, after), given))
    return sorted(readings, key=lambda reading: -_fitting(reading, state))


def _fitting(reading: WeightsReading, state: State) -> int:
    """Return how many of a network's tensors a reading has, in their shapes and without counters."""
    count = 0
    for name, source in reading.given.items():
        if not name.endswith(COUNTER) and reading.tensors[source].shape == state[name].shape:
            count += 1
    return count


def _chosen(readings: Sequence[WeightsReading], state: State, path: Path, key: str) -> WeightsReading:
    """Return the reading that fits best.

    Raises:
        ModelError: another fits as well, with other values; the message has the commands that keep one of them.
    """
    best = readings[0]
    needed = sum(not name.endswith(COUNTER) for name in state)
    different = [best]
    for other in readings[1:]:
        if _fitting(best, state) < needed or _fitting(other, state) < needed:
            break
        if not any(_same_values(known, other) for known in different):
            different.append(other)
    if len(different) == 1:
        return best
    ways: list[str] = []
    for number, reading in enumerate(different[:MAX_LISTED], 1):
        target = path.with_name(f"{path.stem}-{number}.pth")
        others = [other for other in different if other is not reading and other.keys == reading.keys]
        command = _keeping(reading, others, path, target)
        ways.append(f"{_found_at(reading).strip() or 'without a prefix'}: {command} and {key}={target}")
    raise ModelError(f"{key}={path} holds {len(different)} networks that fit; keep one, {'; or '.join(ways)}")


def _same_values(reading: WeightsReading, other: WeightsReading) -> bool:
    for name, source in reading.given.items():
        if name in other.given and not torch.equal(reading.tensors[source], other.tensors[other.given[name]]):
            return False
    return True


def _keeping(reading: WeightsReading, others: Sequence[WeightsReading], path: Path, target: Path) -> str:
    """Return the command that writes one of a file's networks to another file."""
    before, after = reading.affixes
    kept = f"k.startswith({before!r}) and k.endswith({after!r})"
    for first, last in [other.affixes for other in others]:
        if first.startswith(before) and last.endswith(after):  # its names would be kept as well
            kept += f" and not (k.startswith({first!r}) and k.endswith({last!r}))"
    entry = "".join(f"[{name!r}]" for name in reading.keys)
    loaded = f"safetensors.torch.load_file({str(path)!r})"
    with path.open("rb") as stream:
        if not _is_safetensors(stream.read(9)):
            loaded = f"torch.load({str(path)!r}, 'cpu', weights_only=True){entry}"
    code = (
        "import argparse, safetensors.torch, torch; torch.serialization.add_safe_globals([argparse.Namespace]); "
        f"torch.save({{k: v for k, v in {loaded}.items() if {kept}}}, {str(target)!r})"
    )
    return shell_line([sys.executable, "-P", "-c", code])


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


def _is_safetensors(start: bytes) -> bool:
    """Return whether a file that begins with these nine bytes is read as safetensors."""
    if start[8:] == b"{":  # after the length of the header
        return True
    return not start.startswith((b"PK", b"\x80"))  # a ZIP archive, a pickle: torch.save's


def _read_weights(path: Path, key: str) -> list[tuple[tuple[str, ...], State]]:
    """Return the tensors by name in a safetensors file, or in each entry of one of ``torch.save``, on the CPU.

    Raises:
        ModelError: the file is missing or unreadable, or holds no tensors by name.
    """
    place = f"{key}={path}"
    if not path.exists():
        raise ModelError(
            f"{place}: no such file; write one with safetensors.torch.save_file("
            f"torchvision.models.resnet18(weights='DEFAULT').state_dict(), 'resnet18.safetensors')"
        )
    try:
        check_regular(path, MAX_TENSOR_FILE)
        with path.open("rb") as stream:
            if _is_safetensors(stream.read(9)):
                return [((), load_file(path))]
            stream.seek(0)  # given its path, torch would go by the suffix
            with torch.serialization.safe_globals([Namespace]):  # the settings that training scripts save along
                content = torch.load(stream, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{place}: not a readable safetensors file, nor one of torch.save: {error}") from error
    except Exception as error:  # torch raises many types for what is no state dict
        raise ModelError(
            f"{place} cannot be read as a state dict, which is all that is read of such a file: "
            f"{_why_not_read(error)}; write one with torch.save(network.state_dict(), 'network.pth')"
        ) from error
    held = type(content).__name__
    if isinstance(content, Mapping):
        dicts = list(_state_dicts(content))
        if dicts:
            return dicts
        held = some_of(list(map(str, content)), MAX_LISTED) or "nothing"
    raise ModelError(
        f"{place} is no state dict: it holds {held}, and no tensors by name; "
        "torch.save(network.state_dict(), 'network.pth') writes one"
    )


def _why_not_read(error: Exception) -> str:
    """Return why torch does not load a file, in one printable line, without its advice to load the file unsafely."""
    text, _, _ = str(error).partition("\n\nCheck the documentation")
    *_, reason = text.strip().split("\n\n")
    _, _, reason = reason.rpartition("WeightsUnpickler error: ")
    reason, _, _ = reason.partition(". Please use")
    line, _, _ = reason.strip().partition("\n")
    return printable(line.rstrip("."))


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
                f"model.pretrained={folder} is of another network: {name} differs; choose the model that its "
                f"model.json names, for a transformer also the image size; if its method ({description.get('method')}) "
                "changed the layers, as fdse does, none fits"
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
