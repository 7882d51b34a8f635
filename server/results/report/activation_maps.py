"""Test images of every domain with the class activation maps of the trained net."""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from common.config import build
from common.data.batches import EVALUATION_BATCH
from common.errors import GoldfinchError
from common.models.base import Model
from server.results.groups import Board, Group, run_name
from server.results.heat import coarseness, coloured, heat_maps
from server.results.run import Run

MAX_SEARCHED = 400
"""Test images of a domain from which examples are chosen."""

EACH = 4
"""Correctly classified examples of a domain, and misclassified ones."""

LARGEST_SIDE = 112
"""Pixels of the longer side of an example in the page."""

MAX_GROUPS = 6
"""Groups with examples in the page."""


class UnseenError(Exception):
    """The images of a run cannot be shown; the message says why."""


@dataclass(frozen=True)
class Example:
    """One test image with its prediction.

    Args:
        image: ``[H, W, 3]`` uint8.
        heat: ``[H, W]`` float in [0, 1], the class activation map of the predicted class.
        label: the true class.
        prediction: the predicted class.
        probability: of the predicted class, in per cent.
        cells: rows and columns of the map before it was resized to the image.
    """

    image: NDArray[np.uint8]
    heat: NDArray[np.float64]
    label: int
    prediction: int
    probability: float
    cells: tuple[int, int]


def activation_maps(boards: Sequence[Board]) -> list[dict[str, Any]]:
    """Return examples of the first run of each group.

    Returns:
        ``name``; ``domains``, the pictures of each domain; and ``note``, which says why there are none, or that the
        maps are coarse.
    """
    groups: list[Group] = []
    for board in boards:
        groups += board.groups
    galleries = []
    for group in groups[:MAX_GROUPS]:
        run = group.runs[0]
        gallery: dict[str, Any] = {"name": run_name(group, run), "domains": {}, "note": None}
        try:
            model, data = trained_model(run), build(run.config["data"], "data")
            for domain in run.domains:
                split = data.load(domain).test
                examples = find_examples(model, split.images, split.labels, data.augmentation.test)
                gallery["domains"][domain] = [_picture(example, run.class_names) for example in examples]
                if examples:
                    gallery["note"] = coarseness(examples[0].cells)
        except (GoldfinchError, UnseenError, OSError) as error:
            gallery["note"] = f"No images: {error}."
        galleries.append(gallery)
    return galleries


def trained_model(run: Run) -> Model:
    """Return the net that all clients share, as it was scored, in evaluation mode.

    Raises:
        UnseenError: clients share no net, or it has no class activation maps.
    """
    model = run.model()
    if run.method.personal or run.method.inference(model, run.checkpoint.state.prototypes, run.seed) is not model:
        raise UnseenError("this method does not classify by one net that all clients share")
    if not model.supports_cam:
        raise UnseenError("this net has no class activation maps; choose one that ends in pooling and a linear layer")
    return model


@torch.no_grad()
def find_examples(model: Model, images: Tensor, labels: Tensor, prepare: Callable[[Tensor], Tensor]) -> list[Example]:
    """Choose images of different classes: misclassified ones by descending probability, then correct ones in order.

    Args:
        model: a net with class activation maps, in evaluation mode.
        images: ``[N, 3, H, W]`` uint8.
        labels: ``[N]`` int64.
        prepare: turns uint8 images into the net's input.

    Returns:
        Up to ``EACH`` misclassified examples, then up to ``EACH`` correct ones.
    """
    step = -(-len(images) // MAX_SEARCHED)
    images, labels = images[::step], labels[::step]
    outputs = []
    for part in images.split(EVALUATION_BATCH):
        outputs.append(model(prepare(part))[1].float().softmax(1))
    probabilities, predictions = torch.cat(outputs).max(1)
    correct = predictions == labels
    order = torch.argsort(probabilities, descending=True, stable=True)
    chosen = _varied(order[~correct[order]].tolist(), labels)
    chosen += _varied(correct.nonzero().flatten().tolist(), labels)
    if not chosen:
        return []
    picked = torch.tensor(chosen)
    size = (images.shape[2], images.shape[3])
    heat, cells = heat_maps(model, prepare(images[picked]), predictions[picked], size)
    examples = []
    for position, index in enumerate(chosen):
        examples.append(
            Example(
                image=images[index].permute(1, 2, 0).numpy(),
                heat=heat[position].double().numpy(),
                label=int(labels[index]),
                prediction=int(predictions[index]),
                probability=100 * float(probabilities[index]),
                cells=cells,
            )
        )
    return examples


def _varied(candidates: Sequence[int], labels: Tensor) -> list[int]:
    """Return up to ``EACH`` candidates: the first of each true class, then further ones, both in their order."""
    first: dict[int, int] = {}
    for index in candidates:
        first.setdefault(int(labels[index]), index)
    chosen = list(first.values())[:EACH]
    for index in candidates:
        if len(chosen) < EACH and index not in chosen:
            chosen.append(index)
    return chosen


def _picture(example: Example, names: Sequence[str]) -> dict[str, Any]:
    label, prediction = names[example.label], names[example.prediction]
    correct = example.label == example.prediction
    caption = f"{prediction}, {example.probability:.0f} %"
    if not correct:
        caption = f"{label} taken for {caption}"
    return {
        "image": _data_url(example.image),
        "heat": _data_url(coloured(example.heat)),
        "label": label,
        "correct": correct,
        "caption": caption,
    }


def _data_url(pixels: NDArray[np.uint8]) -> str:
    """Return an image as a ``data:`` URL."""
    image = Image.fromarray(pixels)
    image.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"
