"""One device's training exchange without a federation around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from support.toy import Toy
from torch import Tensor

from client.device import Device
from client.model_state import ModelState
from client.trainer import LocalExchange
from common.client_state import ClientStore
from common.data.protocols import ClientSpec
from common.prototypes import PrototypeSet
from common.settings import RunSettings
from common.wire.messages import Registration, Request
from strategies.core.method import Client, build_model

COUNTS = {"bright-0": [7, 6, 6, 6], "dark-0": [6, 6, 6, 6], "noisy-0": [6, 6, 6, 0]}
"""Training samples of each class, by client of the toy data."""


def local_exchange(
    settings: RunSettings,
    *,
    position: int = 0,
    prototypes: PrototypeSet | None = None,
    extra: Mapping[str, Tensor] | None = None,
    kept: Mapping[str, Tensor] | None = None,
    round_number: int = 1,
) -> LocalExchange:
    """What the trainer makes for the federation's client at ``position``, with the initial model, in training mode."""
    specs = settings.protocol.clients(settings.data)
    domain = settings.data.load(specs[position].domain)
    split = domain.train.subset(settings.protocol.split(domain, specs[position], settings.seed))
    counts = tuple(split.class_counts(settings.data.class_count).tolist())
    model = build_model(settings, len(specs)).train()
    return LocalExchange(
        settings,
        settings.method,
        ModelState(model, settings.method.shared_names(model)),
        Client(specs[position].id, specs[position].domain, len(split), counts, position, len(specs)),
        split,
        weights={name: tensor.clone() for name, tensor in model.state_dict().items()},
        prototypes=prototypes or PrototypeSet.empty(int(model.feature_size)),
        extra=extra or {},
        kept=kept or {},
        round_number=round_number,
        exchange="train",
        device=torch.device("cpu"),
        validation=split.subset(torch.arange(0)),
    )


def device_of(settings: RunSettings, domain: str = "bright", **more: Any) -> Device:
    """Return the device that holds ``domain``; it keeps its state in the folder ``device`` of the run's output."""
    store = ClientStore(settings.output_folder / "device")
    return Device(settings, ClientSpec(domain, 0), lambda run: store, **more)


def request_to(settings: RunSettings, domain: str = "bright", **changes: Any) -> Request:
    """Return the request to train and score that the holder of ``domain`` gets in round 1, with ``changes`` to it."""
    fields = {
        "run": "run",
        "identity": settings.identity,
        "method": settings.method.name,
        "round": 1,
        "exchange": "train",
        "client": f"{domain}-0",
        "client_count": 3,
        "client_index": 0,
        "train": True,
        "score": [domain],
        "code": settings.code,
    }
    return Request(**{**fields, **changes})


def registration(settings: RunSettings, client: str, **changes: Any) -> Registration:
    """Return what a client of the toy data registers, with ``changes`` to it; other clients hold one of each class."""
    counts = COUNTS.get(client, [1, 1, 1, 1])
    fields = {
        "client": client,
        "domain": client.partition("-")[0],
        "samples": sum(counts),
        "class_counts": counts,
        "scores": list(Toy().domains),
        "split": "0" * 64,
        "classes": settings.data.classes_sha256,
        "identity": settings.identity,
        "code": settings.code,
        "device": "a CPU",
        "versions": {"python": "3"},
    }
    return Registration(**{**fields, **changes})


ANSWER: dict[str, Any] = {
    "run": "r", "method": "fpl", "round": 1, "exchange": "train", "client": "dark-0", "samples": 24,
    "class_counts": [6, 6, 6, 6], "trained": True, "scores": [], "losses": {"cross_entropy": 1.0}, "steps": 3,
    "seconds": {"train": 0.5}, "peak_bytes": 1000, "device": "a CPU", "releases": 0,
}  # fmt: skip
"""The header of an answer of the client ``dark-0``."""
