"""FedProto: with and without averaging, by classifier and by prototype; distances in loops."""

from __future__ import annotations

import pytest
import torch
from support.exchanges import local_exchange
from support.nets import kept, numbers, trained
from support.runs import TouchedEngine, run
from support.toy import toy_settings

from common.numerics import generator
from common.prototypes import PrototypeSet


def test_the_original_sends_prototypes_and_no_model(tmp_path):
    settings = toy_settings("fedproto", tmp_path, hyper={"aggregate_models": False})
    done = run(settings, TouchedEngine(settings))
    for item in trained(done):
        rows = sum(count > 0 for count in item.reply.answer.class_counts)
        down = 0 if item.request.round == 1 else 4
        assert item.reply.payload.part_bytes() == {"weights": 0, "prototypes": rows * (4 * 128 + 8 + 4), "extra": 0}
        assert item.message.part_bytes() == {"weights": 0, "prototypes": down * (4 * 128 + 8 + 4), "extra": 0}
    names = {f"model/{name}" for name in local_exchange(settings).model.state_dict()}
    assert all(set(tensors) == names for tensors in kept(tmp_path).values())
    assert done.summary["scored"] == "own model"


def test_the_nearest_prototype_is_predicted(tmp_path):
    settings = toy_settings("fedproto", tmp_path, hyper={"predict_with": "prototypes"})
    size = int(local_exchange(settings).model.feature_size)
    draws = generator(0, "nearest")
    table = PrototypeSet(torch.rand(3, size, generator=draws), torch.tensor([0, 2, 3]), torch.ones(3))
    local = local_exchange(settings, prototypes=table)
    features, logits = torch.rand(20, size, generator=draws), torch.randn(20, 4, generator=draws)
    scores = local.method.predict(features, logits, local)
    for row, z in zip(scores, numbers(features), strict=True):
        distances = {
            label: sum((a - b) ** 2 for a, b in zip(z, g, strict=True))
            for label, g in zip([0, 2, 3], numbers(table.vectors), strict=True)
        }
        assert int(row.argmax()) == min(distances, key=distances.get)
        for label, distance in distances.items():
            assert float(row[label]) == pytest.approx(-distance, rel=1e-4)
    assert bool((scores[:, 1] == -torch.inf).all())  # no client has class 1
    assert len(set(scores.argmax(1).tolist())) > 1
    empty = local_exchange(settings)
    assert torch.equal(empty.method.predict(features, logits, empty), logits)


def test_how_it_predicts_does_not_change_how_it_trains(tmp_path):
    runs = [
        run(toy_settings("fedproto", tmp_path / how, hyper={"predict_with": how}, train={"rounds": 4, "epochs": 2}))
        for how in ("classifier", "prototypes")
    ]
    assert runs[0].sha256 == runs[1].sha256
    correct = [[(r["round"], r["domain"], r["correct"]) for r in done.history()] for done in runs]
    assert correct[0] != correct[1]
    assert correct[0][:3] == correct[1][:3]  # round 0 has no prototypes
