"""Bytes on the wire by formula, for the methods whose payloads hang on samples, on nets, or on a part of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import TouchedEngine, run
from support.toy import CLASSES, DOMAINS, TRAIN, toy_settings

from common.wire.payload import encode
from strategies.fedbn import norm_state_names
from strategies.parts.server_nets import Discriminator

SIZE = 128
ROW = 4 * SIZE + 8 + 4  # vector, label, weight
MODEL = toy_settings("fedavg", Path("unused")).model.build(CLASSES, 16, 0)


def size(state):
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def part(names):
    return size({name: tensor for name, tensor in MODEL.state_dict().items() if name in names})


WHOLE, BODY, HEAD = size(MODEL.state_dict()), size(MODEL.backbone.state_dict()), size(MODEL.head.state_dict())
NORM = part(norm_state_names(MODEL))
NET = size(Discriminator(SIZE, len(DOMAINS)).state_dict())


UP = {
    ("single_set", "train"): lambda samples, held: 0,
    ("per_fedavg", "train"): lambda samples, held: WHOLE,
    ("fedbn", "train"): lambda samples, held: WHOLE - NORM,
    ("fedrep", "train"): lambda samples, held: BODY,
    ("fedproto", "train"): lambda samples, held: WHOLE + held * ROW,
    ("adcol", "train"): lambda samples, held: 4 * samples * SIZE,
    ("fedpall", "train"): lambda samples, held: held * ROW,
    ("fedpall", "mix"): lambda samples, held: samples * (4 * SIZE + 8),
    ("rucr", "train"): lambda samples, held: WHOLE,
    ("rucr", "rebalance"): lambda samples, held: HEAD + held * ROW,
}
DOWN = {
    ("single_set", "train"): 0,
    ("per_fedavg", "train"): WHOLE,
    ("fedbn", "train"): WHOLE - NORM,
    ("fedrep", "train"): BODY,
    ("fedproto", "train"): WHOLE + CLASSES * ROW,
    ("adcol", "train"): NET,
    ("fedpall", "train"): NET + HEAD + CLASSES * ROW,
    ("fedpall", "mix"): CLASSES * ROW,
    ("rucr", "train"): WHOLE + CLASSES * ROW,
    ("rucr", "rebalance"): WHOLE,
}


@pytest.mark.parametrize("method", sorted({method for method, _ in UP}))
def test_bytes_are_the_formula_s(method, tmp_path):
    settings = toy_settings(method, tmp_path)
    done = run(settings, TouchedEngine(settings))
    rows = {
        (r["round"], r["exchange"], r["client"]): r
        for r in done.rows("activity.csv")
        if r["status"] in ("trained", "clipped")
    }
    second = [item for item in done.messages if item.request.train and item.request.round == 2]
    assert len(second) == len(DOMAINS) * len(settings.method.exchanges)
    for item in second:
        key = method, item.request.exchange
        samples = TRAIN[item.request.client.removesuffix("-0")]
        held = sum(count > 0 for count in item.reply.answer.class_counts)
        up, down = UP[key](samples, held), DOWN[key]
        assert sum(item.reply.payload.part_bytes().values()) == up
        assert sum(item.message.part_bytes().values()) == down
        row = rows["2", item.request.exchange, item.request.client]
        for recorded, payload, tensors in (
            (row["bytes_up"], item.reply.payload, up),
            (row["bytes_down"], item.message, down),
        ):
            header = int(recorded) - tensors
            assert 0 < header < 3_000 + 150 * len(payload.tensors())
        assert int(row["bytes_up"]) == len(encode(item.reply.payload))
    first = next(item for item in done.messages if item.request.round == 1)
    assert first.message.prototypes is None or not len(first.message.prototypes)


def test_the_parts_are_what_they_should_be():
    assert BODY + HEAD == WHOLE
    assert HEAD == 4 * (SIZE * CLASSES + CLASSES)
    assert NORM == 5 * 8 + 4 * 4 * (16 + 32 + 64 + 64 + 128)
    assert NET == 4 * (SIZE * 512 + 512 * 512 + 512 * 3 + 2 * 4 * 512) + 2 * 8
