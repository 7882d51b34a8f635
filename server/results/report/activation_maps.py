"""What a trained net looks at: test images of every domain with their class activation maps."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from common.config import build
from common.errors import GoldfinchError
from common.models.base import Model
from server.results.groups import Board, run_name
from server.results.run import Run

MAX_SEARCHED = 400
"""Test images of a domain among which examples are looked for."""

EACH = 4
"""Examples of a domain that the net gets right, and as many that it gets wrong."""

LARGEST_SIDE = 112
"""Pixels of an example in the page."""

MAX_GROUPS = 6

MIN_CELLS = 4
"""Rows and columns of a class activation map below which it points at nothing."""


class UnseenError(Exception):
    """Why nothing can be shown of a run."""


@dataclass(frozen=True)
class Example:
    """One test image and what the net made of it.

    Args:
        image: ``[H, W, 3]`` uint8.
        heat: ``[H, W]`` float in [0, 1], the class activation map of the class that the net chose.
        label, guess: the true class and the chosen one.
        sure: the probability of the chosen one, in per cent.
        cells: rows and columns of the map before it was made as large as the image.
    """

    image: NDArray[np.uint8]
    heat: NDArray[np.float64]
    label: int
    guess: int
    sure: float
    cells: tuple[int, int]


def activation_maps(boards: Sequence[Board]) -> list[dict[str, Any]]:
    """Examples of the first run of each group: ``name``, ``domains`` with pictures each, and what there is to say."""
    made = []
    for group in [group for board in boards for group in board.groups][:MAX_GROUPS]:
        run = group.runs[0]
        look: dict[str, Any] = {"name": run_name(group, run), "domains": {}, "says": ""}
        try:
            model, data = trained_model(run), build(run.config["data"], "data")
            for domain in run.domains:
                split = data.load(domain).test
                examples = find_examples(model, split.images, split.labels, data.augmentation.test)
                look["domains"][domain] = [_picture(example, run.class_names) for example in examples]
                look["says"] = next((says for example in examples if (says := coarseness(example.cells))), "")
        except (GoldfinchError, UnseenError, OSError) as error:
            look["says"] = f"No images: {error}."
        made.append(look)
    return made


def coarseness(cells: tuple[int, int]) -> str:
    """What to say of a class activation map of so few cells, rows and columns, that it points at nothing."""
    if min(cells) >= MIN_CELLS:
        return ""
    rows, columns = cells
    return (
        f"This net's last feature maps have {rows} x {columns} cells: the overlay says which part of the image weighs "
        "most, and is too coarse to point at anything in it."
    )


def trained_model(run: Run) -> Model:
    """The net that all clients share as it was scored, in evaluation mode.

    Raises:
        UnseenError: the run has none, or one without class activation maps.
    """
    model = run.model()
    if run.method.personal or run.method.inference(model, run.checkpoint.state.prototypes, run.seed) is not model:
        raise UnseenError("this method does not classify by one net that all clients share")
    if not model.supports_cam:
        raise UnseenError("this net has no class activation maps; choose one that ends in pooling and a linear layer")
    return model


@torch.no_grad()
def find_examples(model: Model, images: Tensor, labels: Tensor, prepare: object) -> list[Example]:
    """The first images of different classes that the net gets wrong, surest first, then of those it gets right.

    Args:
        model: a net with class activation maps, in evaluation mode.
        images: ``[N, 3, H, W]`` uint8.
        labels: ``[N]`` int64.
        prepare: from uint8 images to the net's input.
    """
    assert callable(prepare)
    step = -(-len(images) // MAX_SEARCHED)
    images, labels = images[::step], labels[::step]
    chances = torch.cat([model(prepare(part))[1].float().softmax(1) for part in images.split(64)])
    sure, guesses = chances.max(1)
    wrong = guesses != labels
    order = torch.argsort(sure, descending=True, stable=True)
    chosen = _varied([index for index in order.tolist() if bool(wrong[index])], labels)
    chosen += _varied([index for index in range(len(labels)) if not bool(wrong[index])], labels)
    if not chosen:
        return []
    picked = torch.tensor(chosen)
    heat, cells = heat_maps(model, prepare(images[picked]), guesses[picked], (images.shape[2], images.shape[3]))
    return [
        Example(
            images[index].permute(1, 2, 0).numpy(),
            heat[position].double().numpy(),
            int(labels[index]),
            int(guesses[index]),
            100 * float(sure[index]),
            cells,
        )
        for position, index in enumerate(chosen)
    ]


def heat_maps(model: Model, prepared: Tensor, labels: Tensor, size: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
    """Class activation maps of ``prepared [N, 3, H, W]`` for ``labels [N]``, as large as asked for.

    Returns:
        ``[N, *size]`` in [0, 1], and the rows and columns that they had.
    """
    maps = model.class_activation_maps(model.feature_maps(prepared), labels)
    heat = nn.functional.interpolate(maps[:, None].float(), size, mode="bilinear")[:, 0].clamp_min(0)
    return heat / heat.amax((1, 2), keepdim=True).clamp_min(1e-12), (maps.shape[1], maps.shape[2])


def overlay(image: Image.Image, heat: NDArray[np.float64]) -> Image.Image:
    """``image`` under ``heat [H, W]`` in [0, 1], which is as large."""
    return Image.alpha_composite(image.convert("RGBA"), Image.fromarray(_coloured(heat))).convert("RGB")


def _varied(candidates: Sequence[int], labels: Tensor) -> list[int]:
    """Up to ``EACH`` of them, of as many true classes as there are, in their order."""
    seen: dict[int, int] = {}
    for index in candidates:
        seen.setdefault(int(labels[index]), index)
    first = list(seen.values())[:EACH]
    rest = [index for index in candidates if index not in first]
    return first + rest[: EACH - len(first)]


def _picture(example: Example, names: Sequence[str]) -> dict[str, Any]:
    label, guess = names[example.label], names[example.guess]
    right = example.label == example.guess
    said = f"{guess}, {example.sure:.0f} %" if right else f"{label} taken for {guess}, {example.sure:.0f} %"
    image, heat = _address(example.image), _address(_coloured(example.heat))
    return {"image": image, "heat": heat, "label": label, "right": right, "said": said}


def _coloured(heat: NDArray[np.float64]) -> NDArray[np.uint8]:
    """``[H, W, 4]``: gold, the more opaque the more evidence."""
    layer = np.zeros((*heat.shape, 4))
    layer[..., 0], layer[..., 1], layer[..., 2] = 255, 170 - 110 * heat, 20
    layer[..., 3] = 200 * heat
    return layer.round().astype(np.uint8)


def _address(pixels: NDArray[np.uint8]) -> str:
    """The image as a ``data:`` address."""
    image = Image.fromarray(pixels)
    image.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"
