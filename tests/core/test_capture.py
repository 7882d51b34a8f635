"""Captured steps compute what plain steps compute, or are not taken. A CPU stand-in records and replays operators."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support.recorded_graph import RecordedGraph
from support.runs import run
from support.toy import method_at_defaults, toy_settings, with_method
from torch import Tensor, nn

import client.device
from client.capture import GRAPHS, CapturedSteps
from client.watched import captured_steps
from common.choices import CONF
from common.config import checked
from common.settings import RunSettings
from goldfinch.papers import NAMES
from goldfinch.readings import plain_methods
from strategies.core.method import Averaging, Batch, ClientContext, Losses

DECLARED = [
    path.stem for path in sorted((CONF / "method").glob("*.yaml")) if type(method_at_defaults(path.stem)).capturable
]
QUICK = ("fpl", "fedpall", "scaffold", "fedrep")
every_declared = pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long]) for name in DECLARED]
)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CapturedSteps]]:
    """The captured steps of the test's runs, which are those of the stand-in."""
    monkeypatch.setitem(GRAPHS, "cpu", RecordedGraph)
    steps: list[CapturedSteps] = []

    def noted(settings: RunSettings, model: nn.Module, device: torch.device) -> CapturedSteps | None:
        new = captured_steps(settings, model, device)
        if new is not None:
            steps.append(new)
        return new

    monkeypatch.setattr(client.device, "captured_steps", noted)
    monkeypatch.delattr(client.device._MODELS, "key", raising=False)
    return iter([steps])


@pytest.fixture
def steps(made: Iterator[list[CapturedSteps]]) -> list[CapturedSteps]:
    return next(made)


def both(make: Callable[[Path], RunSettings], folder: Path) -> tuple[str, str]:
    """Return the state's hash after a run with plain steps, and after one with captured steps."""
    hashes: list[str] = []
    for capture in (False, True):
        settings = make(folder / str(capture))
        settings = replace(settings, train=replace(settings.train, capture=capture))
        hashes.append(str(run(settings).summary["state_sha256"]))
    return hashes[0], hashes[1]


def toy(method: str, **changes: Any) -> Callable[[Path], RunSettings]:
    train = {"rounds": 3, "epochs": 2, **changes.pop("train", {})}
    return lambda folder: toy_settings(method, folder, train=train, **changes)


@every_declared
def test_a_method_that_declares_it_computes_the_same(method: str, steps: list[CapturedSteps], tmp_path: Path) -> None:
    plain, captured = both(toy(method), tmp_path)
    assert captured == plain
    assert [taken.reason for taken in steps] == [""]
    assert steps[0].played > steps[0].captured > 0


OPTIONS: dict[str, dict[str, Any]] = {
    "no momentum": {"train": {"momentum": 0.0, "weight_decay": 1e-3}},
    "a gradient that is clipped": {"train": {"clip_norm": 0.5}},
    "smoothed labels, balanced classes": {"train": {"label_smoothing": 0.1, "class_weights": "balanced"}},
    "bfloat16": {"train": {"precision": "bfloat16"}},
    "channels last": {"train": {"channels_last": True}},
    "a rate that falls": {"train": {"schedule": "cosine"}},
    "last batches dropped": {"train": {"last_batch": "drop"}},
    "a frozen backbone": {"overrides": ("model.freeze=backbone",)},
    "augmented views": {"overrides": ("views=augmented",)},
}


@pytest.mark.long
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_computes_the_same(option: str, steps: list[CapturedSteps], tmp_path: Path) -> None:
    plain, captured = both(toy("fpl", **OPTIONS[option]), tmp_path)
    assert captured == plain
    assert [taken.reason for taken in steps] == [""]
    assert steps[0].played > steps[0].captured > 0


@pytest.mark.long
def test_what_steps_read_is_copied_to_where_they_read_it_or_captured_again(
    steps: list[CapturedSteps], tmp_path: Path
) -> None:
    both(toy("fedavg", train={"rounds": 4}), tmp_path / "fedavg")
    sizes = steps[0].captured
    both(toy("fedprox", train={"rounds": 4}), tmp_path / "fedprox")
    assert steps[1].captured == sizes  # the reference point of each round and client has one address
    both(toy("fpl", train={"rounds": 4}), tmp_path / "fpl")
    assert sizes < steps[2].captured < steps[2].played  # the prototypes had another number of rows


def test_adam_is_left_to_plain_steps(
    steps: list[CapturedSteps], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        plain, captured = both(toy("fedavg", train={"optimizer": "adam"}), tmp_path)
    assert captured == plain
    assert steps[0].played == 0
    assert caplog.text.count("steps are not captured, and run as without it") == 1


# ---- a step that breaks the rules ------------------------------------------------------------------------------------


class Own(Averaging):
    """A method of one's own that declares what it does not keep."""

    def factor(self, batch: Batch, local: ClientContext) -> Any:
        """Return what the loss is multiplied by."""
        raise NotImplementedError

    def loss(self, batch: Batch, local: ClientContext) -> Losses:
        """Return the cross-entropy times :meth:`factor`."""
        return Losses({"cross_entropy": batch.cross_entropy() * self.factor(batch, local)})


@checked
class WaitsForANumber(Own):
    """Reads a number of the batch in Python."""

    capturable: ClassVar[bool] = True

    def factor(self, batch: Batch, local: ClientContext) -> Any:
        return 1.0 + float(batch.logits.detach().abs().mean())


@checked
class BranchesOnANumber(Own):
    """Takes another way if a number of the batch is large."""

    capturable: ClassVar[bool] = True

    def factor(self, batch: Batch, local: ClientContext) -> Any:
        return 2.0 if batch.logits.detach().mean() > 0 else 1.0


@checked
class PicksByAMask(Own):
    """Picks rows by a mask, whose number the graph cannot know."""

    capturable: ClassVar[bool] = True

    def factor(self, batch: Batch, local: ClientContext) -> Any:
        return 1.0 + batch.logits.detach()[batch.labels > 1].sum().sigmoid()


@checked
class DrawsInAStep(Own):
    """Makes a generator in every step."""

    capturable: ClassVar[bool] = True

    def factor(self, batch: Batch, local: ClientContext) -> Any:
        return 1.0 + torch.rand((), generator=local.generator("own", local.batch))


@checked
class KeepsAGenerator(Own):
    """Draws from a generator that it keeps."""

    capturable: ClassVar[bool] = True

    def factor(self, batch: Batch, local: ClientContext) -> Any:
        return 1.0 + torch.rand((), generator=local.cached("draws", lambda: local.generator("own")))


@checked
class DrawsWithNumPy(Own):
    """Draws from NumPy's generator, which it keeps."""

    capturable: ClassVar[bool] = True

    def factor(self, batch: Batch, local: ClientContext) -> Any:
        return 1.0 + local.cached("draws", lambda: np.random.default_rng(local.round)).random()


@checked
class Counts(Own):
    """Counts its steps in Python."""

    capturable: ClassVar[bool] = True

    def factor(self, batch: Batch, local: ClientContext) -> Any:
        count = local.cached("count", lambda: [0])
        count[0] += 1
        return 1.0 / count[0]


@checked
class ReplacesATensor(Own):
    """Puts a new tensor where the next step reads."""

    capturable: ClassVar[bool] = True

    def factor(self, batch: Batch, local: ClientContext) -> Any:
        kept = local.cached("mean", lambda: {"mean": torch.zeros(())})
        kept["mean"] = 0.5 * kept["mean"] + batch.logits.detach().abs().mean()
        return 1.0 + kept["mean"]


@checked
class HoldsBatches(Own):
    """Keeps a batch for the next step."""

    capturable: ClassVar[bool] = True

    def factor(self, batch: Batch, local: ClientContext) -> Any:
        held: list[Tensor] = local.cached("held", list)
        held.append(batch.logits.detach().abs().mean())
        return 1.0 + held[len(held) // 2]


@checked
class MakesAnOptimizer(Own):
    """Makes an optimiser in every step."""

    capturable: ClassVar[bool] = True

    def factor(self, batch: Batch, local: ClientContext) -> Any:
        point = nn.Parameter(torch.zeros(()))
        optimizer = local.make_optimizer([point])
        (point * batch.logits.detach().mean()).backward()
        optimizer.step()
        return 1.0 + point.detach()


@checked
class PreparesLater(Own):
    """Prepares something in the second step of an exchange."""

    capturable: ClassVar[bool] = True

    def factor(self, batch: Batch, local: ClientContext) -> Any:
        first = local.cached("first", lambda: batch.logits.detach().abs().mean())
        steps = local.cached("steps", lambda: torch.zeros(()))
        steps += 1
        second = local.cached(f"made in batch {local.batch}", lambda: batch.logits.detach().abs().mean())
        return 1.0 + first + second


BREAKING = [
    WaitsForANumber,
    BranchesOnANumber,
    PicksByAMask,
    DrawsInAStep,
    KeepsAGenerator,
    DrawsWithNumPy,
    Counts,
    ReplacesATensor,
    HoldsBatches,
    MakesAnOptimizer,
    PreparesLater,
]


@checked
class ReadsTheExchange(Own):
    """Reads plain values of the exchange, which is allowed: each value has a graph."""

    capturable: ClassVar[bool] = True

    def factor(self, batch: Batch, local: ClientContext) -> Any:
        return 1.0 + local.round + local.client.index + 0.1 * (local.batch % 2)


@checked
class ChangesInPlace(Own):
    """Keeps a mean over steps in one tensor, which is allowed."""

    capturable: ClassVar[bool] = True

    def factor(self, batch: Batch, local: ClientContext) -> Any:
        mean = local.cached("mean", lambda: torch.zeros(()))
        mean.mul_(0.5).add_(batch.logits.detach().abs().mean())
        return 1.0 + mean.clone()


@checked
class Inherits(ChangesInPlace):
    """Does not declare anything itself."""

    def factor(self, batch: Batch, local: ClientContext) -> Any:
        return 1.0 + float(batch.logits.detach().abs().mean())


def own(kind: type[Any]) -> Callable[[Path], RunSettings]:
    make = toy("fedavg")
    return lambda folder: with_method(make(folder), kind())


@pytest.mark.long
@pytest.mark.parametrize("kind", BREAKING)
def test_a_step_that_breaks_the_rules_is_plain_and_says_why(
    kind: type[Any], steps: list[CapturedSteps], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        plain, captured = both(own(kind), tmp_path)
    assert captured == plain
    assert steps[0].played == 0
    assert steps[0].reason
    assert caplog.text.count(steps[0].reason) == 1


@pytest.mark.parametrize("kind", [ReadsTheExchange, ChangesInPlace])
def test_what_is_allowed_is_captured(kind: type[Any], steps: list[CapturedSteps], tmp_path: Path) -> None:
    plain, captured = both(own(kind), tmp_path)
    assert captured == plain
    assert not steps[0].reason
    assert steps[0].played > 0


def test_a_class_declares_for_itself_alone(steps: list[CapturedSteps], tmp_path: Path) -> None:
    plain, captured = both(own(Inherits), tmp_path)
    assert captured == plain
    assert "Inherits does not declare" in steps[0].reason


class WrongGraph(RecordedGraph):
    """Leaves out the last operator that changes a tensor: the update of the parameters."""

    def capture(self, work: Callable[[], None]) -> None:
        super().capture(work)
        updates = [call for call in self._calls if call[0].overloadpacket.__name__.startswith("_foreach_add_")]
        self._calls.remove(updates[-1])


def test_a_replay_that_computes_something_else_is_found(
    steps: list[CapturedSteps], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GRAPHS, "cpu", WrongGraph)
    plain, captured = both(toy("fedavg", train={"momentum": 0.0, "weight_decay": 0.0}), tmp_path)
    assert captured == plain
    assert steps[0].reason == "a replay differs from the step itself"


@pytest.mark.parametrize("method", ["fpl", pytest.param("scaffold", marks=pytest.mark.long)])
def test_clients_side_by_side_compute_the_same(method: str, steps: list[CapturedSteps], tmp_path: Path) -> None:
    _, alone = both(toy(method), tmp_path / "alone")
    plain, captured = both(toy(method, engine={"workers": 3}), tmp_path / "beside")
    assert plain == captured == alone
    assert len(steps) > 2, "each thread has a model, and captured steps, of its own"
    assert [taken.reason for taken in steps] == [""] * len(steps)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", ["fedavg", "fpl", "scaffold"])
def test_clients_on_streams_of_a_gpu_compute_the_same(method: str, tmp_path: Path) -> None:
    train = {"device": "cuda", "deterministic": True}
    alone = both(toy(method, train=dict(train)), tmp_path / "alone")
    beside = both(toy(method, train=dict(train), engine={"workers": 4}), tmp_path / "beside")
    assert set(alone + beside) == {alone[0]}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_declared
def test_a_gpu_computes_the_same(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[CapturedSteps | None] = []

    def noted(settings: RunSettings, model: nn.Module, device: torch.device) -> CapturedSteps | None:
        taken.append(captured_steps(settings, model, device))
        return taken[-1]

    monkeypatch.setattr(client.device, "captured_steps", noted)
    plain, captured = both(toy(method, train={"device": "cuda", "deterministic": True}), tmp_path)
    assert captured == plain
    assert taken[-1] is not None
    assert not taken[-1].reason
    assert taken[-1].played > 0


def test_the_page_names_the_methods_that_declare_no_capture() -> None:
    plain = [NAMES[name].replace("-", "") for name, method in plain_methods().items() if not method.capturable]
    page = (CONF.parent / "docs" / "performance.md").read_text()
    assert f"\n{', '.join(plain)} and Adam run plain steps" in page
