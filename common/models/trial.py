"""The trial of a network of the user's own, before it trains."""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy

from common.models.base import Model, ModelError


def try_on(model: Model, size: int, made_by: type) -> None:
    """Check the sizes of what a network computes, on two black images; afterwards it is in training mode again.

    Args:
        model: the network.
        size: side of the images in pixels.
        made_by: its class; Goldfinch's own are not tried.

    Raises:
        ModelError: it fails on images, or its features or logits have other sizes than it states.
    """
    name = made_by.__name__
    if made_by.__module__.startswith("common.models."):
        return
    device = next(model.parameters(), torch.empty(0)).device
    lazy = any(is_lazy(parameter) for parameter in model.parameters())  # they get their sizes here
    if device.type == "meta" and not lazy:  # not every operation knows it
        return
    try:
        with torch.no_grad():
            features, logits = model.eval()(torch.zeros(2, 3, size, size, device=device))
    except Exception as error:
        raise ModelError(f"{name} fails on images [2, 3, {size}, {size}]: {type(error).__name__}: {error}") from error
    finally:
        model.train()
    for what, found, expected in (
        ("features", features, model.feature_size),
        ("logits", logits, model.class_count),
    ):
        shape = getattr(found, "shape", None)
        if shape != (2, expected):
            given = type(found).__name__ if shape is None else list(shape)
            raise ModelError(
                f"{name}: {what} of two images are {given}, and must be [2, {expected}], as the network "
                "says in Model(backbone, head, feature_size, class_count)"
            )
