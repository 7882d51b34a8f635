"""One device's training exchange without a federation around it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from client.trainer import LocalExchange
from common.prototypes import PrototypeSet
from common.settings import RunSettings
from strategies.core.method import Client, build_model


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
        model,
        Client(specs[position].id, specs[position].domain, len(split), counts, position, len(specs)),
        split,
        weights={name: tensor.clone() for name, tensor in model.state_dict().items()},
        prototypes=prototypes or PrototypeSet.empty(int(model.feature_size)),
        extra=extra or {},
        kept=kept or {},
        round_number=round_number,
        exchange="train",
        device=torch.device("cpu"),
    )
