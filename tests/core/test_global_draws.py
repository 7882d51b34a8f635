"""Code of the user's own that draws from the global generators repeats, on every engine and after a resumption."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from support.runs import run
from support.toy import toy_settings
from torch import Tensor, nn

import goldfinch as gf
from common.config import checked
from common.models.base import initialised
from common.numerics import seeded_globals
from common.settings import RunSettings
from common.storage import GlobalState
from server.run.schema import read_lines
from strategies.core.context import ClientContext, ServerContext
from strategies.core.exchange import Batch, Download, Losses, Update
from strategies.fedavg import FedAvg


@checked
class Drawing(FedAvg):
    """A method with dropout before the classifier and noise from all three generators."""

    def loss(self, batch: Batch, local: ClientContext) -> Losses:
        features = nn.functional.dropout(batch.features, 0.5)
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))  # noqa: NPY002
        logits = local.model.head(features)
        return Losses({"cross_entropy": (1 + noise) * nn.functional.cross_entropy(logits, batch.labels)})


@checked
class DrawingMetric(gf.OwnMetric):
    """A metric of a random half of the images."""

    sum_names = ("chosen", "found")
    measures: ClassVar[Mapping[str, gf.Measure]] = {"half": gf.Measure("of a half")}

    def sums(self, probabilities: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        chosen = torch.rand(len(labels)) < 0.5
        return {"chosen": chosen.sum(), "found": (chosen & (probabilities.argmax(1) == labels)).sum()}

    def values(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        return {"half": 100 * sums["found"] / sums["chosen"]}


@checked
class DrawingServer(Drawing):
    """A method whose server draws from the global generators wherever it has its say."""

    def initial_state(self, weights: Mapping[str, Tensor], server: ServerContext) -> GlobalState:
        return super().initial_state(noisy(weights), server)

    def download(self, state: GlobalState, server: ServerContext) -> Download:
        return Download(noisy(state.weights))

    def aggregate(self, state: GlobalState, updates: Sequence[Update], server: ServerContext) -> GlobalState:
        return replace(state, weights=noisy(super().aggregate(state, updates, server).weights))


def noisy(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with noise from all three generators."""
    noise = random.random() + float(np.random.rand()) + float(torch.rand(()))  # noqa: NPY002
    return {name: tensor + tensor.new_tensor(0.01 * noise) for name, tensor in weights.items()}


def drawing(folder: Path, rounds: int = 2, engine: Mapping[str, object] | None = None) -> RunSettings:
    settings = toy_settings("fedavg", folder, train={"rounds": rounds}, engine=dict(engine or {}))
    return replace(settings, method=Drawing(), own_metric=DrawingMetric())


def drawn(folder: Path) -> list[object]:
    return [line["values"] for line in read_lines(folder / "scores.jsonl")]


def test_a_run_with_draws_of_one_s_own_repeats(tmp_path: Path) -> None:
    first = run(drawing(tmp_path / "first"))
    torch.rand(7)
    random.random()
    again = run(drawing(tmp_path / "again", engine={"wire": True}))
    assert again.sha256 == first.sha256
    assert drawn(tmp_path / "again") == drawn(tmp_path / "first")
    run(drawing(tmp_path / "half", rounds=1))
    resumed = run(replace(drawing(tmp_path / "half"), resume=True))
    assert resumed.sha256 == first.sha256
    assert drawn(tmp_path / "half") == drawn(tmp_path / "first")


def test_a_run_whose_server_draws_repeats(tmp_path: Path) -> None:
    def run_of(name: str, rounds: int = 2, *, resume: bool = False) -> str:
        settings = replace(drawing(tmp_path / name, rounds), method=DrawingServer(), resume=resume)
        return run(settings).sha256

    first = run_of("first")
    torch.rand(7)
    np.random.rand()  # noqa: NPY002
    random.random()
    assert run_of("again") == first
    assert run_of("half", 1) != first
    torch.rand(7)
    assert run_of("half", resume=True) == first


def test_clients_and_exchanges_draw_differently() -> None:
    found = []
    for key in (("train", 1, "a"), ("train", 2, "a"), ("train", 1, "b")):
        with seeded_globals(0, *key):
            found.append((random.random(), float(np.random.rand()), float(torch.rand(()))))  # noqa: NPY002
    for each in zip(*found, strict=True):
        assert len(set(each)) == 3


@pytest.mark.parametrize("fails", [False, True])
def test_the_generators_go_on_where_they_were(fails: bool) -> None:
    def draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002

    with seeded_globals(1, "outer"):
        draws()
        expected = draws()
    with seeded_globals(1, "outer"):
        draws()
        try:
            with seeded_globals(2, "inner"):
                draws()
                if fails:
                    raise KeyError
        except KeyError:
            pass
        assert draws() == expected


def test_a_client_that_begins_does_not_disturb_another_s_initial_weights() -> None:
    with initialised(0, "net"):
        expected = [nn.Linear(4, 4).weight for _ in range(2)]

    def begin() -> None:
        with seeded_globals(1, "another client"):
            pass

    other = threading.Thread(target=begin)
    with initialised(0, "net"):
        found = [nn.Linear(4, 4).weight]
        other.start()
        other.join(timeout=0.2)
        assert other.is_alive()
        found.append(nn.Linear(4, 4).weight)
    other.join()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
