"""An exchange on trial, and who may try: steps are captured of methods and networks that declare it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from client.capture import GRAPHS, CapturedSteps
from client.structure import CaptureError, with_own_containers
from client.trainer import RECEIVED, LocalExchange
from common.settings import RunSettings

OURS = ("torch", "torchvision", "common", "strategies")
"""Packages whose networks keep nothing but parameters and buffers."""


def captured_steps(settings: RunSettings, model: nn.Module, device: torch.device) -> CapturedSteps | None:
    """Return a place for the captured steps of a new model; ``None`` if its steps are to be plain ones.

    A method or a network that does not declare that its steps can be captured is said once.
    """
    if not settings.train.capture or device.type not in GRAPHS:
        return None
    steps = CapturedSteps(GRAPHS[device.type], on_trial)
    method = type(settings.method)
    if not vars(method).get("capturable", False):
        steps.refuse(f"{method.__name__} does not declare capturable = True")
        return steps
    for name, module in model.named_modules():
        kind = type(module)
        ours = kind.__module__.partition(".")[0] in OURS
        if not ours and not vars(kind).get("capturable", False):
            steps.refuse(f"the network's {name or 'class'} {kind.__name__} does not declare capturable = True")
            return steps
    return steps


def on_trial(exchange: LocalExchange) -> WatchedExchange:
    """Return the same exchange for a trial; what a step keeps there is not kept in ``exchange``."""
    watched: Any = copy.copy(exchange)
    watched.__class__ = WatchedExchange
    watched.reads, watched.touched = {}, set()
    watched._cache = with_own_containers(exchange._cache)
    watched.optimizer = with_own_containers(exchange.optimizer)
    return watched


class WatchedExchange(LocalExchange):
    """An exchange in which a step is captured; see :class:`client.capture.Watched`."""

    reads: dict[str, object]
    touched: set[str]

    def __getattribute__(self, name: str) -> Any:
        """Return the attribute, and note that the step read it."""
        if name in ("generator", "batches", "features", "score", "validate", "make_optimizer"):
            raise CaptureError(f"it calls {name}() in a step after the first of an exchange")
        value = super().__getattribute__(name)
        if name in ("round", "batch", "learning_rate", "client"):
            self.reads[name] = value
        elif name in RECEIVED:
            self.touched.add(name)
        return value

    def cached(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what is cached, and note that the step read it."""
        self.touched.add(f"cached {name}")
        return super().cached(name, make)
