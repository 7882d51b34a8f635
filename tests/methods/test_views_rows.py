"""``views=...`` with any method: the rows "+RC" of FedGCA's tables, and what must not change because of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.exchanges import local_exchange
from support.runs import Run, TouchedEngine, run
from support.toy import composed, toy_settings

from common.choices import CONF
from common.prototypes import PrototypeSet
from strategies.core.method import Batch

METHODS = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))
METHODS.remove("fedgca")  # its clients need views; its other tests have them
ROWS_OF_SAMPLES = ("adcol", "fedpall", "fccl_plus", "fedavg", "rucr")
"""Methods that send or keep something for each sample, and one that does not."""
VIEWS = sorted(path.stem for path in (CONF / "views").glob("*.yaml") if path.stem != "none")


def go(method: str, folder: Path, views: str = "none") -> Run:
    settings = toy_settings(method, folder, train={"rounds": 2, "local_steps": 2})
    settings = replace(settings, views=composed(f"views={views}").views)
    return run(settings, TouchedEngine(settings))


def losses(done: Run) -> list[dict[str, float]]:
    return [dict(item.reply.answer.losses) for item in done.messages if item.request.train]


def sent(done: Run) -> list[tuple[int, int]]:
    """Bytes of weights and extra tensors; how many prototypes clustering finds depends on the views."""
    parts = [item.reply.payload.part_bytes() for item in done.messages if item.request.train]
    return [(part["weights"], part["extra"]) for part in parts]


def steps(done: Run) -> list[int]:
    return [item.reply.answer.steps for item in done.messages if item.request.train]


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ROWS_OF_SAMPLES])
@pytest.mark.long
def test_every_method_has_its_row_with_random_convolutions(method, tmp_path):
    done = go(method, tmp_path, "randconv")
    assert done.summary["rounds"] == 2
    assert all(math.isfinite(value) for terms in losses(done) for value in terms.values())
    assert {row["status"] for row in done.replies()} <= {"trained", "scaled", "scored"}


@pytest.mark.parametrize("method", ROWS_OF_SAMPLES)
@pytest.mark.long
def test_a_batch_is_longer_and_nothing_is_sent_twice(method, tmp_path):
    done, plain = go(method, tmp_path / "views", "randconv"), go(method, tmp_path / "plain")
    assert losses(done) != losses(plain)
    assert all(math.isfinite(value) for terms in losses(done) for value in terms.values())
    assert steps(done) == steps(plain)
    assert sent(done) == sent(plain)


def test_every_kind_of_view_gives_a_row_of_its_own(tmp_path):
    found = [go("fedavg", tmp_path / views, views) for views in ("none", *VIEWS)]
    assert len({done.sha256 for done in found}) == len(found)
    assert len({tuple(steps(done)) for done in found}) == 1


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
