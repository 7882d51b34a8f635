"""The whole method in one file trains the same model as ``goldfinch run`` with the settings that the file names."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.scripts import load_script

from common.prototypes import PrototypeSet
from common.settings import load_settings
from common.storage import GlobalState
from goldfinch.record import RunRecord
from goldfinch.run_model import RunModel
from server.engines.inline import InlineEngine
from server.run.conduct import prepare_output, run_federation

FILE = Path(__file__).resolve().parents[2] / "docs" / "fpl_in_one_file.py"


@pytest.fixture(scope="module")
def one_file() -> ModuleType:
    return load_script("docs/fpl_in_one_file.py")


def command_in_the_file() -> list[str]:
    """The words of the ``goldfinch run`` command in the file's docstring."""
    found = re.search(r"goldfinch run (.+)", FILE.read_text())
    assert found is not None
    return found[1].split()


@pytest.mark.long
def test_scores_and_tensors_are_those_of_goldfinch(
    one_file: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two domains and two rounds, in the second of which there are prototypes; other settings are in the state."""
    whole = load_settings(command_in_the_file())
    assert (whole.train.rounds, whole.data.domains) == (one_file.ROUNDS, one_file.DOMAINS)
    monkeypatch.setattr(one_file, "ROUNDS", 2)
    monkeypatch.setattr(one_file, "DOMAINS", ("printed", "signs"))
    fewer = ["train.rounds=2", "data.domains=[printed,signs]", f"output={tmp_path}"]
    settings = load_settings([*command_in_the_file(), *fewer])
    prepare_output(settings)
    summary = run_federation(settings, InlineEngine(settings))

    scores, weights, found = one_file.run()

    assert {name: f"{score:.2f}" for name, score in scores.items()} == {
        name: f"{score:.2f}" for name, score in summary["accuracy"].items()
    }
    counts = RunModel(RunRecord(tmp_path)).checkpoint.state.prototypes.weights  # how many class means each cluster has
    state = GlobalState(weights, PrototypeSet(found.vectors, found.labels, counts), round=2)
    assert state.sha256() == summary["state_sha256"]


def test_the_gradient_is_that_of_the_formulas(one_file: ModuleType) -> None:
    draws = torch.Generator().manual_seed(0)
    features = torch.rand(9, 128, generator=draws, dtype=torch.float64).requires_grad_()
    labels = torch.arange(9)
    vectors = torch.rand(20, 128, generator=draws, dtype=torch.float64)
    prototypes = one_file.Prototypes(vectors, torch.arange(10).repeat_interleave(2))
    unbiased = torch.rand(10, 128, generator=draws, dtype=torch.float64)

    loss = torch.zeros((), dtype=torch.float64)
    for feature, label in zip(features, labels, strict=True):
        similarity = torch.cosine_similarity(feature[None], vectors) / one_file.TEMPERATURE
        own = similarity[prototypes.labels == label].exp().sum()
        loss = loss - torch.log(own / similarity.exp().sum()) / 9
        loss = loss + (feature - unbiased[label]).square().mean() / 9
    (expected,) = torch.autograd.grad(loss, features)

    found = one_file.prototype_gradient(features, labels, prototypes, unbiased)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_it_is_short_and_stands_on_its_own() -> None:
    text = FILE.read_text()
    assert len(text.splitlines()) <= 300
    imported = set(re.findall(r"^\s*(?:from|import) (\S+)", text, re.MULTILINE))
    ours = {name for name in imported if name.split(".")[0] in ("common", "strategies", "client", "server")}
    assert ours == {"common.data.batches", "common.data.glyphs", "common.numerics"}
    others = {name.split(".")[0] for name in imported - ours}
    assert others == {"__future__", "copy", "typing", "warnings", "torch", "finch"}
