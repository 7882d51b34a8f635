"""An exported model's folder: each format written, loaded back, and compared with what the run's own net says."""

import contextlib
import hashlib
import importlib
import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from common.errors import ConfigError, GoldfinchError, libraries_of, nearest, writing
from common.exports.description import CARD, DESCRIPTION, Description
from common.exports.model import PROTOTYPES, TrainedModel, load_model
from common.models.pretrained import WEIGHTS
from common.prototypes import PrototypeSet
from common.storage.files import write_json, write_tensors, write_text
from common.storage.state import with_prefix

Predictor = Callable[[Tensor], Tensor]
"""From images ``[N, 3, S, S]`` in 0..1 to probabilities ``[N, K]``."""

FORMATS = {"safetensors": WEIGHTS, "torch": "model.pt2", "onnx": "model.onnx", "executorch": "model.pte"}
NEEDS = {"onnx": ("export", ("onnxruntime", "onnxscript")), "executorch": ("edge", ("executorch.exir",))}
"""The extra that a format's packages are in, and what is imported of them."""

MAX_DIFFERENCE = 1e-3
"""Between probabilities of a written file and the run's own net; rounding makes about 1e-6."""

NEAR_SHARE = 0.95
"""Share of the images compared with that lie nearer to a prototype than the threshold of "none of the classes"."""

BATCH = 256


class ExportError(GoldfinchError):
    """A file that was written and does not say what the run's net says."""


@dataclass(frozen=True, eq=False)
class Content:
    """What goes into an exported model's folder.

    Args:
        description: what it is, but for files and threshold.
        weights: the net's state, or the part of it that is shared.
        prototypes: the global prototypes, or none.
        images: ``[N, 3, S, S]`` uint8 to compare files on.
        images_are: what they are, in words; empty for noise, on which no threshold can be set.
        expected: ``[N, K]`` probabilities by the run's own net; ``None`` takes those of the net made of ``weights``.
    """

    description: Description
    weights: Mapping[str, Tensor]
    prototypes: PrototypeSet
    images: Tensor
    images_are: str = ""
    expected: Tensor | None = None


def chosen_formats(names: Sequence[str]) -> list[str]:
    """The formats of ``names``, and safetensors, which is always written.

    Raises:
        ConfigError: there is no such format, or what writes it is not installed.
    """
    for name in names:
        if name not in FORMATS:
            raise ConfigError(f"--format {name}: {nearest(name, FORMATS)}")
        extra, modules = NEEDS.get(name, ("", ()))
        with libraries_of(extra, f"--format {name}"):
            for module in modules:
                importlib.import_module(module)
    return [name for name in FORMATS if name in ("safetensors", *names)]


def write_export(
    folder: Path, content: Content, formats: Sequence[str], *, overwrite: bool = False
) -> tuple[Description, dict[str, float]]:
    """Write an exported model's folder, complete or not at all.

    Args:
        folder: must not hold anything else.
        content: of the folder.
        formats: of :data:`FORMATS`.
        overwrite: replace an exported model that the folder holds, with all its files.

    Returns:
        The description, and the largest difference of a probability by format, of a complete net.

    Raises:
        ConfigError: the folder holds something else, or cannot be written.
        ExportError: a file does not say what the run's net says.
    """
    if folder.exists() and not (folder / DESCRIPTION).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--to {folder}: it holds something else than an exported model; choose another folder")
    if (folder / DESCRIPTION).is_file() and not overwrite:
        files = ", ".join(sorted(path.name for path in folder.iterdir()))
        raise ConfigError(
            f"--to {folder}: it holds an exported model already ({files}), which would be deleted; choose another "
            "folder, or add --overwrite"
        )
    with writing(folder, "another --to"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
            found = _fill(Path(temporary, "new"), content, formats)
            if folder.exists():
                folder.rename(Path(temporary, "old"))
            Path(temporary, "new").rename(folder)
    return found


def _fill(place: Path, content: Content, formats: Sequence[str]) -> tuple[Description, dict[str, float]]:
    """Write the files, load them back and compare."""
    description, prototypes = content.description, content.prototypes
    rows = {"vectors": prototypes.vectors, "labels": prototypes.labels, "weights": prototypes.weights}
    tensors = {**content.weights, **(with_prefix(PROTOTYPES, rows) if len(prototypes) else {})}
    model = TrainedModel(description, content.weights, prototypes) if description.complete else None
    if model and len(prototypes) and content.images_are:
        distances = in_batches(lambda part: model(part)["distances"].amin(1), content.images)
        rule = f"{NEAR_SHARE:.0%} of {content.images_are} lie nearer"
        known = {**(description.prototypes or {}), "threshold": float(distances.quantile(NEAR_SHARE)), "rule": rule}
        model.description = description = replace(description, prototypes=known)
    said = json.dumps(asdict(description))
    write_tensors(place / WEIGHTS, tensors, {"format": "pt", "goldfinch": said})
    for name in formats:
        path = place / FORMATS[name]
        with quiet():
            if model and name in WRITERS:
                WRITERS[name](model, path, said)
        written = path.read_bytes()
        entry = {"name": path.name, "sha256": hashlib.sha256(written).hexdigest(), "bytes": len(written)}
        description = replace(description, files={**description.files, name: entry})
    write_json(place / DESCRIPTION, asdict(description))
    write_text(place / CARD, description.card())
    if model is None:
        return description, {}
    expected = content.expected
    if expected is None:
        expected = in_batches(lambda part: model(part)["probabilities"], content.images)
    differences = {}
    for name in formats:
        with quiet():
            predict = READERS[name](place / FORMATS[name])
        answers = in_batches(predict, content.images, 1 if name == "executorch" else BATCH)
        difference = float((answers - expected).abs().max())
        if not difference <= MAX_DIFFERENCE:
            raise ExportError(f"{FORMATS[name]} is {difference:.2g} off the run's own net: nothing is written")
        differences[name] = difference
    return description, differences


@torch.no_grad()
def in_batches(predict: Predictor, images: Tensor, size: int = BATCH) -> Tensor:
    """``predict`` of all of ``images [N, 3, S, S]`` uint8, scaled to 0..1, ``size`` at a time."""
    return torch.cat([predict(part.float() / 255) for part in images.split(size)])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Exporters print and warn about what no user can change."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _traced(model: TrainedModel, batch: int | None = None) -> torch.export.ExportedProgram:
    """The model as a graph, for any number of images or for ``batch`` of them."""
    example = torch.zeros(batch or 2, 3, model.image_size, model.image_size)
    shapes = None if batch else {"images": {0: torch.export.Dim("batch", min=1)}}
    program = torch.export.export(model, (example,), dynamic_shapes=shapes)
    program.example_inputs = None  # they would be saved too
    return program


def _write_torch(model: TrainedModel, path: Path, said: str) -> None:
    torch.export.save(_traced(model), path, extra_files={DESCRIPTION: said})


def _write_onnx(model: TrainedModel, path: Path, said: str) -> None:
    example = torch.zeros(2, 3, model.image_size, model.image_size)
    program = torch.onnx.export(
        model,
        (example,),
        dynamo=True,
        dynamic_shapes={"images": {0: torch.export.Dim("batch", min=1)}},
        input_names=["images"],
        output_names=list(model(example)),
        verbose=False,
    )
    assert program is not None
    program.model.metadata_props["goldfinch"] = said
    program.save(path, external_data=False)


def _write_executorch(model: TrainedModel, path: Path, said: str) -> None:  # noqa: ARG001  # it has no place for words
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    program = to_edge_transform_and_lower(_traced(model, batch=1), partitioner=[XnnpackPartitioner()]).to_executorch()
    path.write_bytes(program.buffer)


def _read_net(path: Path) -> Predictor:
    model = load_model(path.parent) if path.name == WEIGHTS else torch.export.load(path).module()
    return lambda images: model(images)["probabilities"]


def _read_onnx(path: Path) -> Predictor:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["probabilities"], {"images": images.numpy()})[0])


def _read_executorch(path: Path) -> Predictor:
    from executorch.runtime import Runtime

    method = Runtime.get().load_program(path).load_method("forward")
    return lambda images: method.execute([images])[0].clone()


WRITERS = {"torch": _write_torch, "onnx": _write_onnx, "executorch": _write_executorch}
READERS = {"safetensors": _read_net, "torch": _read_net, "onnx": _read_onnx, "executorch": _read_executorch}
