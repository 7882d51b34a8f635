"""Bytes on the wire and on the device, by formula: what a method sends is exactly what its docstring says."""

from __future__ import annotations

import pytest
import torch
from support.runs import TouchedEngine, run
from support.toy import CLASSES, toy_settings

from client.store import Store
from common.data.public import PublicImages
from common.data.textures import Textures
from common.wire.payload import encode

ROWS, PUBLIC_BATCH = 32, 16
HYPER = {
    "fccl_plus": {
        "public": PublicImages(Textures(image_size=16), "textures", ROWS),
        "public_batch": PUBLIC_BATCH,
    }
}
PUBLIC_BYTES = 4 * ROWS * CLASSES + 4 * ROWS * (PUBLIC_BATCH - 1) + 8  # logits, similarities, fingerprint
STATE, PARAMETERS, PROTOTYPES, PUBLIC = "state", "parameters", "prototypes", "public"
UP = {
    ("moon", "train"): (STATE,),
    ("feddyn", "train"): (STATE,),
    ("fedopt", "train"): (STATE,),
    ("fedproc", "train"): (STATE, PROTOTYPES),
    ("fedapc", "train"): (STATE, PROTOTYPES),
    ("fedplvm", "train"): (STATE, PROTOTYPES),
    ("fedplcc", "train"): (STATE, PROTOTYPES),
    ("scaffold", "train"): (STATE, PARAMETERS),
    ("fccl_plus", "train"): (PUBLIC,),
    ("fccl_plus", "collaborate"): (STATE,),
}
DOWN = UP | {
    ("fccl_plus", "train"): (STATE,),
    ("fccl_plus", "collaborate"): (PUBLIC,),
    ("feddyn", "train"): (STATE, PARAMETERS),  # the mean of the client models, which is scored
}
KEPT = {"moon": STATE, "fccl_plus": STATE, "feddyn": PARAMETERS, "scaffold": PARAMETERS}
METHODS = sorted({method for method, _ in UP})


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("method", METHODS)
def test_bytes_are_the_formula_s(method, tmp_path):
    settings = toy_settings(method, tmp_path, hyper=HYPER.get(method, {}))
    done = run(settings, TouchedEngine(settings))
    model = settings.model.build(CLASSES, 16, 0)
    sizes = {STATE: size(model.state_dict().values()), PARAMETERS: size(model.parameters()), PUBLIC: PUBLIC_BYTES}
    row = 4 * model.feature_size + 8 + 4  # vector, label, weight
    seen = set()
    for item in (item for item in done.messages if item.request.train):
        seen.add(item.request.exchange)
        for payload, parts in ((item.reply.payload, UP), (item.message, DOWN)):
            wanted = parts[method, item.request.exchange]
            rows = len(payload.prototypes) if payload.prototypes is not None else 0
            assert (payload.prototypes is not None) == (PROTOTYPES in wanted)
            total = sum(payload.part_bytes().values())
            assert total == sum(row * rows if part == PROTOTYPES else sizes[part] for part in wanted)
            assert total < len(encode(payload)) < total + 2_000 + 150 * len(payload.tensors())
        if method in ("fedproc", "fedapc"):
            assert len(item.reply.payload.prototypes) == sum(count > 0 for count in item.reply.answer.class_counts)
            assert len(item.message.prototypes) == (0 if item.request.round == 1 else CLASSES)
    assert seen == {exchange for name, exchange in UP if name == method}


@pytest.mark.parametrize("method", METHODS)
def test_a_client_keeps_what_is_said_and_no_more(method, tmp_path):
    done = run(toy_settings(method, tmp_path, hyper=HYPER.get(method, {})))
    model = toy_settings(method, tmp_path).model.build(CLASSES, 16, 0)
    sizes = {STATE: size(model.state_dict().values()), PARAMETERS: size(model.parameters())}
    folders = [folder for of_run in (tmp_path / "clients").glob("*") for folder in of_run.iterdir()]
    kept = {folder.name: Store(folder).load(10) for folder in folders}
    assert set(kept) == (set(done.summary["clients"]) if method in KEPT else set())
    for tensors in kept.values():
        assert size(tensors.values()) == sizes[KEPT[method]]
        assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
