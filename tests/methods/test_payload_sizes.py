"""Bytes on the wire and on the device, by formula: what a method sends and keeps equals its docstring."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from support.nets import kept
from support.runs import Recorded, TouchedEngine, run
from support.toy import CLASSES, DOMAINS, TRAIN, toy_settings
from torch import Tensor

from common.storage import tensors_sha256
from common.wire.payload import Payload, encode
from strategies.fdse import is_eraser
from strategies.fedadg import DISCRIMINATOR
from strategies.fedbn import norm_state_names
from strategies.fedsr import GAUSSIANS
from strategies.parts.server_nets import Discriminator

FEATURES, PUBLIC_ROWS, PUBLIC_BATCH = 128, 32, 16
ROW = 4 * FEATURES + 8 + 4  # vector, label, weight
MODEL = toy_settings("fedavg", Path("unused")).model.build(CLASSES, 16, 0)


def size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def extended(method: str) -> dict[str, Tensor]:
    """The state of the network as the method extends it."""
    settings = toy_settings(method, Path("unused"))
    return dict(settings.method.extend(settings.model.build(CLASSES, 16, 0), len(DOMAINS), 0).state_dict())


def part(state: dict[str, Tensor], module: str) -> int:
    return size(tensor for name, tensor in state.items() if name.startswith(f"{module}."))


NORM = size(MODEL.state_dict()[name] for name in norm_state_names(MODEL))
FLOATS = [tensor for tensor in MODEL.state_dict().values() if tensor.is_floating_point()]
SPLIT, ADVERSARIAL, PROBABILISTIC = (extended(method) for method in ("fdse", "fedadg", "fedsr"))
STATISTICS = size(
    tensor for name, tensor in SPLIT.items() if is_eraser(name) and "weight" not in name and "bias" not in name
)
FIXED = {
    "split state": size(SPLIT.values()) - STATISTICS,
    "eraser statistics and the trained model": size(SPLIT.values()),
    "erasers of all": len(DOMAINS) * (size(tensor for name, tensor in SPLIT.items() if is_eraser(name)) - STATISTICS),
    "state": size(MODEL.state_dict().values()),
    "parameters": size(MODEL.parameters()),
    "body": size(MODEL.backbone.state_dict().values()),
    "head": size(MODEL.head.state_dict().values()),
    "norm layers": NORM,
    "without norm layers": size(MODEL.state_dict().values()) - NORM,
    "discriminator": size(Discriminator(FEATURES, len(DOMAINS)).state_dict().values()),
    "public": 4 * PUBLIC_ROWS * CLASSES + 4 * PUBLIC_ROWS * (PUBLIC_BATCH - 1) + 8,  # logits, similarities, fingerprint
    "domain rows": (len(DOMAINS) * CLASSES - 1) * (ROW + 8),  # the noisy domain lacks a class; with each row its domain
    "measured": 3 * 8,
    "adversarial discriminator": part(ADVERSARIAL, DISCRIMINATOR),
    "network and generator": size(ADVERSARIAL.values()) - part(ADVERSARIAL, DISCRIMINATOR),
    "class Gaussians": part(PROBABILISTIC, GAUSSIANS),
    "probabilistic network": size(PROBABILISTIC.values()) - part(PROBABILISTIC, GAUSSIANS),
    "mask": sum((tensor.numel() + 7) // 8 for tensor in FLOATS),
    "counts": 4 * sum(tensor.numel() for tensor in FLOATS) + 8,
    "synthetic": 50 * CLASSES * (4 * FEATURES + 8),  # features and labels, fifty of each class
}
"""Bytes of parts that do not depend on the client."""

UP = {
    ("adcol", "train"): ["features"],
    ("fccl_plus", "train"): ["public"],
    ("fccl_plus", "collaborate"): ["state"],
    ("fdse", "train"): ["split state"],
    ("fedadg", "train"): ["network and generator"],
    ("fedapc", "train"): ["state", "class means"],
    ("fedbn", "train"): ["without norm layers"],
    ("feddap", "train"): ["state", "class means"],
    ("feddg_ga", "train"): ["state", "measured"],
    ("feddyn", "train"): ["state"],
    ("fedgca", "train"): ["state"],
    ("fedheal", "train"): ["state", "mask"],
    ("fedopt", "train"): ["state"],
    ("fedpall", "train"): ["class means"],
    ("fedpall", "mix"): ["features", "labels"],
    ("fedplcc", "train"): ["state", "clusters"],
    ("fedplvm", "train"): ["state", "clusters"],
    ("fedproc", "train"): ["state", "class means"],
    ("fedproto", "train"): ["state", "class means"],
    ("fedrep", "train"): ["body"],
    ("fedsam", "train"): ["state"],
    ("fedsr", "train"): ["probabilistic network"],
    ("fpl_heal", "train"): ["state", "class means", "mask"],
    ("i2pfl", "train"): ["state", "class means"],
    ("moon", "train"): ["state"],
    ("per_fedavg", "train"): ["state"],
    ("rucr", "train"): ["state"],
    ("rucr", "rebalance"): ["head", "class means"],
    ("scaffold", "train"): ["state", "parameters"],
    ("single_set", "train"): [],
}
"""What a client sends, by method and exchange."""

DOWN = UP | {
    ("adcol", "train"): ["discriminator"],
    ("fccl_plus", "train"): ["state"],
    ("fccl_plus", "collaborate"): ["public"],
    ("fdse", "train"): ["split state", "erasers of all"],
    ("feddap", "train"): ["state", "domain rows"],
    ("feddg_ga", "train"): ["state"],
    ("feddyn", "train"): ["state", "parameters"],  # the mean of the client models, which is scored
    ("fedgca", "train"): ["state", "parameters"],
    ("fedheal", "train"): ["state"],
    ("fedpall", "train"): ["discriminator", "head", "class means"],
    ("fedpall", "mix"): ["class means"],
    ("fpl_heal", "train"): ["state", "class means"],  # of each class FINCH makes one cluster of two or three means
    ("rucr", "train"): ["state", "class means"],
    ("rucr", "rebalance"): ["state"],
}
"""What a client receives from round 2 on."""

KEPT = {
    "adcol": "state",
    "fccl_plus": "state",
    "fdse": "eraser statistics and the trained model",
    "fedadg": "adversarial discriminator",
    "fedbn": "norm layers",
    "feddyn": "parameters",
    "fedgca": "parameters",
    "fedheal": "counts",
    "fedpall": "state",
    "fedrep": "head",
    "fedsr": "class Gaussians",
    "fpl_heal": "counts",
    "moon": "state",
    "rucr": "synthetic",
    "scaffold": "parameters",
    "single_set": "state",
}
"""What a client keeps between rounds; with the other methods nothing."""


def expected_bytes(parts: list[str], payload: Payload, item: Recorded, *, sent: bool) -> int:
    """Return the bytes of ``parts`` in a payload that the client of ``item`` sent or received."""
    assert item.reply is not None
    samples = TRAIN[item.request.client.removesuffix("-0")]
    means = sum(count > 0 for count in item.reply.answer.class_counts) if sent else CLASSES
    clusters = 0 if payload.prototypes is None else len(payload.prototypes)
    varying = {"features": 4 * samples * FEATURES, "labels": 8 * samples, "class means": ROW * means}
    table = {**FIXED, **varying, "clusters": ROW * clusters}
    return sum(table[part] for part in parts)


@pytest.mark.parametrize("method", sorted({method for method, _ in UP}))
@pytest.mark.long
def test_bytes_are_the_formula_s(method: str, tmp_path: Path) -> None:
    settings = toy_settings(method, tmp_path)
    done = run(settings, TouchedEngine(settings))
    second = [item for item in done.messages if item.request.train and item.request.round == 2]
    assert len(second) == len(DOMAINS) * len(settings.method.exchanges)
    for item in second:
        assert item.reply is not None
        for payload, table, sent in ((item.reply.payload, UP, True), (item.message, DOWN, False)):
            total = sum(payload.part_bytes().values())
            parts = table[method, item.request.exchange]
            assert total == expected_bytes(parts, payload, item, sent=sent)
            assert total < len(encode(payload)) < total + 3_000 + 150 * len(payload.tensors())
    states = kept(tmp_path)
    assert set(states) == (set(done.summary["clients"]) if method in KEPT else set())
    for tensors in states.values():
        assert size(tensors.values()) == FIXED[KEPT[method]]
        assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
    own = {tensors_sha256(tensors) for tensors in states.values()}
    assert len(own) == len(states), "each client keeps its own"


def test_the_parts_are_what_they_should_be() -> None:
    assert FIXED["body"] + FIXED["head"] == FIXED["state"]
    assert FIXED["head"] == 4 * (FEATURES * CLASSES + CLASSES)
    assert FIXED["norm layers"] == 5 * 8 + 4 * 4 * (16 + 32 + 64 + 64 + 128)
    halves = 8 + 16 + 32 + 32 + 64
    assert FIXED["eraser statistics and the trained model"] - FIXED["split state"] == 4 * 2 * halves + 8 * 5
    assert FIXED["erasers of all"] == 3 * 4 * (2 + 9) * halves
    assert FIXED["adversarial discriminator"] == 4 * ((FEATURES + CLASSES) * 256 + 256 * 256 + 256 + 256 + 1)
    assert FIXED["class Gaussians"] == 4 * (2 * CLASSES * FEATURES + 1)
    assert FIXED["discriminator"] == 4 * (FEATURES * 512 + 512 * 512 + 512 * 3 + 2 * 4 * 512) + 2 * 8
