"""Class activation maps and how they are drawn: for the report's page, the figures and ``goldfinch predict``."""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from common.models.base import Model

MIN_CELLS = 4
"""Fewest rows and columns of a class activation map that can point at a part of an image."""


@torch.no_grad()
def heat_maps(model: Model, prepared: Tensor, labels: Tensor, size: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
    """Return class activation maps, resized to ``size``.

    Only evidence for the class is shown: negative values become zero. Each map is divided by its maximum.

    Args:
        model: a net with class activation maps.
        prepared: ``[N, 3, H, W]``, the net's input.
        labels: ``[N]`` int64, the class of each map.
        size: rows and columns of the result.

    Returns:
        ``[N, *size]`` in [0, 1], and the maps' own rows and columns.

    Raises:
        ModelError: the net has no class activation maps.
    """
    maps = model.class_activation_maps(model.feature_maps(prepared), labels)
    heat = F.interpolate(maps[:, None].float(), size, mode="bilinear")[:, 0].clamp_min(0)
    return heat / heat.amax((1, 2), keepdim=True).clamp_min(1e-12), (maps.shape[1], maps.shape[2])


def coarseness(cells: tuple[int, int]) -> str | None:
    """Return a warning if a class activation map of ``cells`` (rows, columns) is too coarse; ``None`` if it is not."""
    if min(cells) >= MIN_CELLS:
        return None
    rows, columns = cells
    return (
        f"This net's last feature maps have {rows} x {columns} cells: the overlay shows which part of the image weighs "
        "most, but is too coarse to point at an object in it."
    )


def coloured(heat: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return ``[H, W, 4]``: from gold to red, more opaque where ``heat [H, W]`` in [0, 1] is larger."""
    layer = np.zeros((*heat.shape, 4))
    layer[..., 0], layer[..., 1], layer[..., 2] = 255, 170 - 110 * heat, 20
    layer[..., 3] = 200 * heat
    return layer.round().astype(np.uint8)


def overlay(image: Image.Image, heat: NDArray[np.float64]) -> Image.Image:
    """Draw ``heat [H, W]`` in [0, 1] over ``image``, which has the same size."""
    return Image.alpha_composite(image.convert("RGBA"), Image.fromarray(coloured(heat))).convert("RGB")
