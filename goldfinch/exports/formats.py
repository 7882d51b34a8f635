"""Writes an exported model's folder: each format is written, loaded again, and compared with the run's own net."""

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

from common.errors import DIVERGED, ConfigError, DataError, GoldfinchError, nearest, writing
from common.exports.description import DESCRIPTION, Description
from common.exports.model import PROTOTYPES, TrainedModel, load_model
from common.extras import libraries_of
from common.models.pretrained import WEIGHTS
from common.prototypes import PrototypeSet
from common.storage import with_prefix, write_json, write_tensors, write_text
from common.text import quantity
from goldfinch.exports.card import CARD, model_card

Predictor = Callable[[Tensor], Tensor]
"""From images ``[N, 3, S, S]`` in 0..1 to probabilities ``[N, K]``."""

FORMATS = {"safetensors": WEIGHTS, "onnx": "model.onnx"}
ONNX_MODULES = ("onnxruntime", "onnxscript")
"""Modules of the extra ``export``, which write a file of ONNX and compare it."""

OPSETS = (18, 19, 20)
"""Opsets that PyTorch's exporter writes. Asked for an earlier one, it writes 18."""

MAX_DIFFERENCE = 1e-3
"""Largest difference of probabilities of a written file and of the run's own net; rounding gives about 1e-6."""

NEAR_SHARE = 0.95
"""Share of the compared images that are nearer to a prototype than the threshold of "none of the classes"."""

BATCH = 256
"""Images that a net takes at once."""


class ExportError(GoldfinchError):
    """A written file with other outputs than the run's net."""


@dataclass(frozen=True, eq=False)
class Content:
    """The content of an exported model's folder.

    Args:
        description: the description, without files and threshold.
        weights: the net's state, or the part of it that is shared.
        prototypes: the global prototypes; may be empty.
        images: ``[N, 3, S, S]`` uint8, on which files are compared.
        images_are: a text that describes them; empty for noise, on which no threshold can be set.
        expected: ``[N, K]`` probabilities by the run's own net; ``None`` takes those of the net with ``weights``.
    """

    description: Description
    weights: Mapping[str, Tensor]
    prototypes: PrototypeSet
    images: Tensor
    images_are: str = ""
    expected: Tensor | None = None


def chosen_formats(names: Sequence[str]) -> list[str]:
    """Return the formats of ``names``, and safetensors, which is always written.

    Raises:
        ConfigError: the format does not exist, or a package that writes it is not installed.
    """
    for name in names:
        if name not in FORMATS:
            raise ConfigError(f"--format {name}: {nearest(name, FORMATS)}")
    if "onnx" in names:
        with libraries_of("export", "--format onnx"):
            for module in ONNX_MODULES:
                importlib.import_module(module)
    return [name for name in FORMATS if name in ("safetensors", *names)]


def check_opset(opset: int | None, formats: Sequence[str]) -> None:
    """Check that a chosen opset can be written.

    Raises:
        ConfigError: it cannot, or no ONNX is written.
    """
    if opset is None:
        return
    if opset not in OPSETS:
        known = ", ".join(map(str, OPSETS))
        raise ConfigError(f"--opset {opset}: PyTorch's exporter writes {known}; a later runtime reads earlier opsets")
    if "onnx" not in formats:
        raise ConfigError(f"--opset {opset} is of ONNX: add --format onnx, or leave it out")


def write_export(
    folder: Path, content: Content, formats: Sequence[str], *, overwrite: bool = False, opset: int | None = None
) -> tuple[Description, dict[str, float]]:
    """Write an exported model's folder, complete or not at all.

    Args:
        folder: the folder; it must not hold anything else.
        content: the content of the folder.
        formats: names in :data:`FORMATS`.
        overwrite: replace an exported model that the folder holds, with all its files.
        opset: of :data:`OPSETS`, for ONNX; ``None`` is the first, whatever PyTorch's exporter would choose.

    Returns:
        The description, and the largest difference of a probability by format, of a complete net.

    Raises:
        ConfigError: the folder holds something else, or cannot be written.
        ExportError: a file has other outputs than the run's net.
    """
    if folder.exists() and not (folder / DESCRIPTION).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--to {folder}: it has files that are not an exported model; choose another folder")
    if (folder / DESCRIPTION).is_file() and not overwrite:
        files = ", ".join(sorted(path.name for path in folder.iterdir()))
        raise ConfigError(
            f"--to {folder}: it holds an exported model already ({files}), which would be deleted; choose another "
            "folder, or add --overwrite"
        )
    with writing(folder, "another --to"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
            written = _fill(Path(temporary, "new"), content, formats, opset)
            if folder.exists():
                folder.rename(Path(temporary, "old"))
            Path(temporary, "new").rename(folder)
    return written


def _fill(
    place: Path, content: Content, formats: Sequence[str], opset: int | None
) -> tuple[Description, dict[str, float]]:
    """Write the files, load them again and compare their outputs."""
    description, prototypes = content.description, content.prototypes
    rows = {"vectors": prototypes.vectors, "labels": prototypes.labels, "weights": prototypes.weights}
    tensors = dict(content.weights)
    if len(prototypes):
        tensors |= with_prefix(PROTOTYPES, rows)
    model = None
    if description.complete:
        model = TrainedModel(description, content.weights, prototypes)
    if model and len(prototypes) and content.images_are:
        distances = in_batches(lambda part: model(part)["distances"].amin(1), content.images)
        rule = f"{NEAR_SHARE:.0%} of {content.images_are} lie nearer"
        known = {**(description.prototypes or {}), "threshold": float(distances.quantile(NEAR_SHARE)), "rule": rule}
        model.description = description = replace(description, prototypes=known)
    metadata = json.dumps(asdict(description))
    write_tensors(place / WEIGHTS, tensors, {"format": "pt", "goldfinch": metadata})
    for name in formats:
        path = place / FORMATS[name]
        with quiet():
            if model and name == "onnx":
                _write_onnx(model, path, metadata, opset or OPSETS[0])
        written = path.read_bytes()
        entry = {"name": path.name, "sha256": hashlib.sha256(written).hexdigest(), "bytes": len(written)}
        description = replace(description, files={**description.files, name: entry})
    write_json(place / DESCRIPTION, asdict(description))
    write_text(place / CARD, model_card(description))
    if model is None:
        return description, {}
    expected = content.expected
    if expected is None:
        expected = in_batches(lambda part: model(part)["probabilities"], content.images)
    differences = {}
    for name in formats:
        with quiet():
            predict = READERS[name](place / FORMATS[name])
        predicted = in_batches(predict, content.images)
        difference = float((predicted - expected).abs().max())
        if not difference <= MAX_DIFFERENCE:
            raise ExportError(f"{FORMATS[name]} differs by {difference:.2g} from the run's own net: nothing is written")
        differences[name] = difference
    return description, differences


@torch.no_grad()
def in_batches(predict: Predictor, images: Tensor) -> Tensor:
    """Return ``predict`` of all ``images [N, 3, S, S]`` uint8, scaled to 0..1, :data:`BATCH` at a time.

    Raises:
        DataError: see :func:`finite_outputs`.
    """
    outputs = torch.cat([predict(part.float() / 255) for part in images.split(BATCH)])
    return finite_outputs(outputs, f"one or more of {quantity(len(images), 'image')}")


def finite_outputs(outputs: Tensor, images: str) -> Tensor:
    """Return the outputs of a model for images after checking them: of large finite weights, sums may overflow.

    Raises:
        DataError: an output is not finite.
    """
    if not bool(outputs.isfinite().all()):
        raise DataError(f"the model's outputs for {images} are not finite: {DIVERGED}")
    return outputs


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress logs and warnings of the exporters, which users cannot act on."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _write_onnx(model: TrainedModel, path: Path, metadata: str, opset: int) -> None:
    example = torch.zeros(2, 3, model.image_size, model.image_size)
    program = torch.onnx.export(
        model,
        (example,),
        dynamo=True,
        opset_version=opset,
        dynamic_shapes={"images": {0: torch.export.Dim("batch", min=1)}},
        input_names=["images"],
        output_names=list(model(example)),
        verbose=False,
    )
    assert program is not None
    written = program.model.opset_imports[""]
    if written != opset:
        raise ExportError(f"the exporter wrote opset {written} instead of {opset}: nothing is written")
    program.model.metadata_props["goldfinch"] = metadata
    proto = program.model_proto
    # Shapes between layers, of which those of transposed weights are wrong: ONNX Runtime's quantiser refuses the file.
    proto.graph.ClearField("value_info")
    path.write_bytes(proto.SerializeToString())


def _read_net(path: Path) -> Predictor:
    model = load_model(path.parent)
    return lambda images: model(images)["probabilities"]


def _read_onnx(path: Path) -> Predictor:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["probabilities"], {"images": images.numpy()})[0])


READERS = {"safetensors": _read_net, "onnx": _read_onnx}
