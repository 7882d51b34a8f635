"""A trained net for inference: from images in 0..1 to probabilities of named classes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import get_annotations
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from common.client_state import ClientStore, Version
from common.config import build, class_of
from common.data.batches import standardised
from common.data.image_files import decode_with_remark
from common.data.value_ranges import Remark, check_remarks
from common.errors import CheckpointError, ConfigError, DataError, GoldfinchError, PayloadError
from common.exports.description import DESCRIPTION, Description, read_description
from common.models.base import Model, shapes_only
from common.models.pretrained import WEIGHTS
from common.models.specs import ModelSpec
from common.prototypes import PrototypeSet, normalise_rows
from common.regular_files import file_sha256
from common.storage import LOCAL_PREFIX, MODEL_PREFIX, finite, read_tensors, under_prefix
from common.wire.messages import OwnVersion

PROTOTYPES = "prototypes."
PATHS = ("root", "pretrained", "pretrained_file", "weights")
"""Settings with paths of the machine that trained, which a trained network does not need."""

NO_PROTOTYPE = 2.0
"""The distance to a class without a prototype: the largest cosine distance."""


class TrainedModel(nn.Module):
    """A trained net in evaluation mode that normalises its input itself.

    Args:
        description: the description of the model.
        weights: the state of ``net``.
        prototypes: the global prototypes; may be empty.

    Attributes:
        classes: names of the classes, in the order of the outputs.
        image_size: side of the images, pixels.
        net: the network itself, from prepared images to ``(features, logits)``.

    Raises:
        CheckpointError: the weights are not those of the network.
    """

    rows: Tensor
    mean: Tensor
    std: Tensor

    def __init__(self, description: Description, weights: Mapping[str, Tensor], prototypes: PrototypeSet) -> None:
        super().__init__()
        self.description, self.classes, self.image_size = description, description.classes, description.image_size
        parts, self.prototypes = description.architecture, prototypes
        spec, method = build(parts["model"], "model"), build(parts["method"], "method")
        if not isinstance(spec, ModelSpec) or not hasattr(method, "extend") or not hasattr(method, "inference"):
            raise CheckpointError("model.json: architecture names classes that are no network and no method")
        spec = without_start(spec)

        def build_net() -> Model:
            plain = spec.build(len(self.classes), self.image_size, parts["seed"])
            return without_training_parts(method.extend(plain, parts["clients"], parts["seed"]))

        with shapes_only():  # a small model.json can describe a network of many GiB
            check_shapes(build_net(), weights)
        self.net = build_net()
        self.net.load_state_dict(weights)
        self.inference: nn.Module = method.inference(self.net, prototypes, parts["seed"])
        self.register_buffer("rows", prototypes.normalised)
        self.register_buffer("mean", torch.tensor(description.mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(description.std).view(1, -1, 1, 1))
        self.eval().requires_grad_(False)

    def read(self, source: Path | BinaryIO, name: str = "", remarks: list[Remark] | None = None) -> Tensor:
        """Return an image file as the model takes it, float32 ``[3, S, S]`` in 0..1.

        Args:
            source: its path, or an open binary file.
            name: what error messages call it; by default the source.
            remarks: gets what reading made of the image, for :meth:`doubts`.

        Raises:
            DataError: it is no image that can be read.
        """
        pixels, remark = decode_with_remark(source, self.image_size, name or str(source), self.description.reading)
        if remarks is not None:
            remarks.append(remark)
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255

    def doubts(self, remarks: Sequence[Remark]) -> str:
        """Return why images that were read may not show what is in their files; empty if all do."""
        try:
            return check_remarks(remarks, self.description.reading.value_range)
        except DataError as error:
            return f"training would refuse such images: {error}"

    def prepare(self, images: Tensor) -> Tensor:
        """Return ``images [N, 3, S, S]``, float in 0..1, normalised as in training."""
        if self.description.normalisation == "image":
            return standardised(images)
        return (images - self.mean) / self.std

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return the outputs of the net for images.

        Args:
            images: ``[N, 3, S, S]`` float32 in 0..1, RGB; S is ``image_size``.

        Returns:
            ``probabilities [N, K]``; ``features [N, D]``; if there are prototypes, ``distances [N, K]``: the cosine
            distance, in 0..2, to the nearest prototype of each class; 2 for a class without one.
        """
        features, scores = self.inference(self.prepare(images))
        outputs = {"probabilities": scores.softmax(1), "features": features}
        if len(self.prototypes):
            near = normalise_rows(features) @ self.rows.T
            edges = self.prototypes.offsets(len(self.classes)).tolist()
            columns: list[Tensor] = []
            for first, last in pairwise(edges):
                if last > first:
                    columns.append(1 - near[:, first:last].amax(1))
                else:
                    columns.append(torch.full_like(near[:, 0], NO_PROTOTYPE))
            outputs["distances"] = torch.stack(columns, 1)
        return outputs


def without_start(spec: ModelSpec) -> ModelSpec:
    """Return the network's settings without files that training started from; the weights replace those anyway."""
    paths = [name for name in _paths_of(type(spec)) if isinstance(getattr(spec, name), (str, Path))]
    without: dict[str, Any] = dict.fromkeys(paths)
    return replace(spec, **without)


def without_paths(node: Any, where: str) -> Any:
    """Return a node of the configuration with ``None`` for paths of the machine that trained.

    Args:
        node: of a network, a method, or what they have; ``_target_`` names the class.
        where: its key, for messages.

    Raises:
        ConfigError: a node's class is no class.
    """
    if not isinstance(node, Mapping):
        return node
    paths: Sequence[str] = PATHS
    if "_target_" in node:
        paths = _paths_of(class_of(node["_target_"], where))
    values: dict[str, Any] = {}
    for key, value in node.items():
        if key in paths and isinstance(value, str):
            values[key] = None
        else:
            values[key] = without_paths(value, f"{where}.{key}")
    return values


def _paths_of(kind: type) -> list[str]:
    """Return the settings of a class that are paths because Goldfinch declares them; one's own may be called alike."""
    declared: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.startswith("common."):
            declared.update(get_annotations(base))
    return [name for name in PATHS if name in declared]


def check_shapes(net: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Check that weights are those of a network.

    Raises:
        CheckpointError: a tensor is missing or unknown, or has another shape.
    """
    state = net.state_dict()
    for name in sorted(state.keys() | weights.keys()):
        if name not in state or name not in weights or state[name].shape != weights[name].shape:
            raise CheckpointError(
                f"the weights are not those of the network in model.json: {name} differs; export the run again"
            )


def without_training_parts(model: nn.Module) -> Model:
    """Return the model without the nets that only training needs, such as a discriminator."""
    assert isinstance(model, Model)
    for name, _ in list(model.named_children()):
        if name not in ("backbone", "head"):
            delattr(model, name)
    return model


def load_model(folder: Path | str) -> TrainedModel:
    """Return the model in a folder that ``goldfinch export`` wrote, on the CPU, in evaluation mode.

    Raises:
        ConfigError: the folder holds no exported model, or a part of one.
        CheckpointError: a file is missing or changed.
    """
    description, weights, prototypes = read_export(Path(folder))
    if not description.complete:
        raise ConfigError(
            f"{folder} holds the part of the model that clients of {description.method} share; each client keeps the "
            f"rest: on its device, goldfinch export STATE --shared {folder} --to DIR"
        )
    try:
        return TrainedModel(description, weights, prototypes)
    except GoldfinchError:
        raise
    except Exception as error:  # a network from elsewhere may raise any error
        place = Path(folder) / DESCRIPTION
        raise CheckpointError(
            f"{place} describes no network that can be built ({type(error).__name__}: {error}); export the run again"
        ) from error


def read_export(folder: Path) -> tuple[Description, dict[str, Tensor], PrototypeSet]:
    """Return the description, the net's state and the prototypes in an exported model's folder.

    Raises:
        ConfigError: the folder holds no exported model.
        CheckpointError: a file is missing or changed.
    """
    description, path = read_description(folder), folder / WEIGHTS
    try:
        if file_sha256(path) != description.files["safetensors"]["sha256"]:
            raise ValueError("its SHA-256 is not the one in model.json")
        tensors = read_tensors(path)[0]
        if wrong := [name for name, tensor in tensors.items() if not finite(tensor)]:
            raise ValueError(f"{wrong[0]} has values that are not finite")
        rows = under_prefix(PROTOTYPES, tensors)
        weights = {name: tensor for name, tensor in tensors.items() if not name.startswith(PROTOTYPES)}
        prototypes = PrototypeSet.empty()
        if rows:
            prototypes = PrototypeSet(**rows)
        return description, weights, prototypes
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used ({error}); export the run again") from error


def kept_part(
    folder: Path, named: OwnVersion | None, method: Any, extra: Mapping[str, Tensor], place: int
) -> dict[str, Tensor]:
    """Return the part of the model that is a client's own, as it is scored.

    Args:
        folder: the client's own folder.
        named: the version of its own state that belongs to the round, ``None`` if no reply of the client has counted.
        method: the run's method.
        extra: further tensors of the server's state, none on a device.
        place: the client's index.

    Raises:
        CheckpointError: there is no such version, or it is damaged.
    """
    if named is None:
        raise CheckpointError(
            f"{folder.name} has no own state of that round: none of its replies had counted; choose another client, or "
            "train again"
        )
    store = ClientStore(folder)
    try:
        version = Version.of(named, method.exchanges)
        if version not in store.versions():
            raise CheckpointError(
                f"{folder.name}'s own state of that round is not in {folder}: it stays on the device that trained it"
            )
        kept = store.load(version).tensors
        own = method.own_weights(extra, under_prefix(LOCAL_PREFIX, kept), place)
        return {**under_prefix(MODEL_PREFIX, kept), **own}
    except (DataError, PayloadError) as error:
        raise CheckpointError(f"the client's own state in {folder} cannot be used: {error}") from error
