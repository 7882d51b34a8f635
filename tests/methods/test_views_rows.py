"""``views=...`` with any method: the rows "+RC" of FedGCA's tables, and what must not change because of it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from support.exchanges import local_exchange
from support.runs import Run, TouchedEngine, run
from support.toy import composed, toy_settings

from common.choices import CONF
from common.data.views import Views
from common.prototypes import PrototypeSet
from strategies.core.method import Batch

METHODS = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))
MULTI_VIEW = ("fedgca",)
VIEWS = sorted(path.stem for path in (CONF / "views").glob("*.yaml") if path.stem != "none")


@cache
def plain(method: str, root: Path) -> Run:
    return go(method, root / f"{method}-plain", rounds=1)


def go(method: str, folder: Path, *overrides: str, rounds: int = 2, views: Views | None = None) -> Run:
    settings = toy_settings(method, folder, overrides=overrides, train={"rounds": rounds, "local_steps": 2})
    settings = replace(settings, views=views or settings.views)
    return run(settings, TouchedEngine(settings))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


def losses(done: Run) -> list[dict[str, float]]:
    return [dict(item.reply.answer.losses) for item in done.messages if item.request.train]


def sent(done: Run) -> list[tuple[int, int]]:
    """Bytes of weights and extra tensors; how many prototypes clustering finds depends on the views."""
    parts = [item.reply.payload.part_bytes() for item in done.messages if item.request.train]
    return [(part["weights"], part["extra"]) for part in parts]


def steps(done: Run) -> list[int]:
    return [item.reply.answer.steps for item in done.messages if item.request.train]


@pytest.mark.parametrize("method", [method for method in METHODS if method not in MULTI_VIEW])
def test_every_method_has_its_row_with_random_convolutions(method, root, tmp_path):
    assert not toy_settings(method, tmp_path).method.multi_view, "it belongs into MULTI_VIEW"
    without, done = plain(method, root), go(method, tmp_path, views=composed("views=randconv").views)
    first = len(losses(without))
    assert done.summary["rounds"] == 2
    assert losses(done)[:first] != losses(without)
    assert steps(done)[:first] == steps(without)  # a batch is longer, not more
    assert all(math.isfinite(value) for terms in losses(done) for value in terms.values())
    assert not [row for row in done.replies() if row["status"] not in ("trained", "scaled", "scored")]
    assert sent(done)[:first] == sent(without)


@pytest.mark.parametrize("views", VIEWS)
def test_every_kind_of_view_gives_a_row(views, root, tmp_path):
    done = go("fedavg", tmp_path, f"views={views}", "views.count=2", rounds=1)
    assert done.sha256 != plain("fedavg", root).sha256
    assert steps(done) == steps(plain("fedavg", root))


def test_cross_entropy_is_the_mean_over_the_views(tmp_path):
    local = local_exchange(toy_settings("fedavg", tmp_path, overrides=("views=randconv", "views.count=2")))
    batch = local.forward(*next(local.batches("a")))
    logits, labels = batch.logits.unflatten(0, (3, -1)), batch.labels.unflatten(0, (3, -1))
    each = [
        sum(-row.log_softmax(0)[label] for row, label in zip(logits[v], labels[v], strict=True)) / len(labels[v])
        for v in range(3)
    ]
    torch.testing.assert_close(local.method.loss(batch, local).terms["cross_entropy"], sum(each) / 3)


@pytest.mark.parametrize("method", ["fpl", "fedproto", "fedproc", "fedplcc", "fedapc", "moon"])
def test_feature_terms_are_over_all_views(method, tmp_path):
    """With prototypes or a previous model at hand, a term is the mean of its values on each view alone."""
    settings = toy_settings(method, tmp_path, overrides=("views=randconv", "views.count=2"))
    draws = torch.Generator().manual_seed(0)
    state = local_exchange(settings).model.state_dict()
    previous = {f"previous/{k}": t + 0.1 * torch.rand(t.shape, generator=draws).to(t.dtype) for k, t in state.items()}
    rows = PrototypeSet(torch.rand(4, 128, generator=draws), torch.arange(4), torch.ones(4))
    local = local_exchange(settings, prototypes=rows, kept=previous, round_number=2)
    batch = local.forward(*next(local.batches("a")))
    size = len(batch.labels) // 3
    whole = local.method.loss(batch, local).terms
    assert len(whole) > 1
    each = []
    for view in range(3):
        part = slice(view * size, (view + 1) * size)
        single = Batch(batch.images[part], batch.labels[part], batch.features[part], batch.logits[part], 1)
        each.append(local.method.loss(single, local).terms)
    for name, value in whole.items():
        assert each[0][name].item() != pytest.approx(each[1][name].item(), rel=1e-4)
        torch.testing.assert_close(value, sum(terms[name] for terms in each) / 3, rtol=1e-4, atol=1e-6)
