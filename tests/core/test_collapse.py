"""A model that predicts one class in evaluation is reported, and a run that is no better than chance."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.runs import TouchedEngine, run
from support.toy import toy_settings

import goldfinch as gf
from bench.normalisation import write_shapes
from common.errors import ConfigError
from common.metrics import ClassTotals
from common.settings import load_settings
from common.wire.messages import Request
from common.wire.payload import Payload
from server.run.chance import chance, one_class, remedies
from server.run.events import describe
from server.run.history import read_lines
from strategies.core.federation import Federation


@pytest.mark.parametrize(
    ("confusion", "expected"),
    [
        ([[5, 0], [5, 0]], (0, 1.0)),
        ([[1, 9], [0, 10]], (1, 0.95)),
        ([[5, 5], [3, 7]], None),
        ([[2, 8], [1, 9]], None),
        ([[0, 0], [1, 9]], None),
        ([[0, 4], [0, 6]], None),
        ([[0, 0], [0, 0]], None),
    ],
    ids=["all images", "nearly all", "both classes", "most", "images of one class", "most of one class", "no images"],
)
def test_one_class_is_found_by_the_confusion_counts(
    confusion: list[list[int]], expected: tuple[int, float] | None
) -> None:
    assert one_class(confusion) == expected


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of shapes on unlike backgrounds."""
    folder = tmp_path_factory.mktemp("shapes")
    write_shapes(folder)
    return folder


def shapes_run(shapes: Path, output: Path, *overrides: str, rounds: int = 3) -> gf.Run:
    return gf.run(
        "model=small", "tuned=none", "train.batch_size=16", *overrides,
        method="fedavg", data="folder", rounds=rounds, settings={"data.root": shapes}, output=output, quiet=True,
    )  # fmt: skip


@pytest.mark.long
def test_a_run_on_unlike_backgrounds_reports_each_domain_once_and_names_remedies(shapes: Path, tmp_path: Path) -> None:
    run = shapes_run(shapes, tmp_path, "train.learning_rate=0.05", "train.epochs=10")
    found = [entry for entry in read_lines(run.folder / "events.jsonl") if entry["event"] == "collapsed"]
    domains = [entry["domain"] for entry in found]
    assert domains, "batch normalisation collapses on these backgrounds"
    assert len(domains) == len(set(domains))
    text = describe("collapsed", found[0], 3)
    assert "model.norm=group" in text
    assert "method.refresh_statistics=true" in text


@pytest.mark.parametrize(
    ("norm", "loss", "blamed"), [("batch", 0.0, True), ("batch", 1.0, False), ("group", 0.0, False)]
)
def test_batch_normalisation_is_blamed_only_where_training_fits_and_its_statistics_are_averaged(
    norm: str, loss: float, blamed: bool, tmp_path: Path
) -> None:
    def collapsed(request: Request, payload: Payload) -> Payload:
        scores = []
        for score in payload.header["scores"]:
            counts = [[sum(row), *[0] * (len(row) - 1)] for row in score["confusion"]]
            scores.append({**score, "confusion": counts, "correct": counts[0][0]})
        return replace(payload, header={**payload.header, "losses": {"cross_entropy": loss}, "scores": scores})

    overrides = ("model=small", f"model.norm={norm}")
    settings = toy_settings("fedavg", tmp_path, train={"rounds": 4, "local_steps": 1}, overrides=overrides)
    told = dict(run(settings, TouchedEngine(settings, edit=collapsed)).events)
    assert ("collapsed" in told) == blamed


def at_chance(run: gf.Run) -> list[dict[str, Any]]:
    return [entry for entry in read_lines(run.folder / "events.jsonl") if entry["event"] == "at chance"]


def test_a_run_at_chance_says_so_before_it_finishes_and_names_remedies(shapes: Path, tmp_path: Path) -> None:
    run = shapes_run(shapes, tmp_path, "train.local_steps=1", "train.learning_rate=0.0001")
    (entry,) = at_chance(run)
    assert (entry["round"], entry["chance"], entry["images"], entry["steps"]) == (3, 25.0, 72, 1)
    assert entry["average"] == pytest.approx(run.average, abs=1e-3)
    assert read_lines(run.folder / "events.jsonl")[-1]["event"] == "finish"
    text = describe("at chance", entry, 3)
    for part in ("AT CHANCE", "normalisation=image", "train.epochs=5", "train.optimizer=adam", "model.norm=group"):
        assert part in text
    assert "batch_size" not in text, "smaller batches are no more steps where train.local_steps counts them"


def test_a_score_above_chance_by_a_few_images_is_called_so() -> None:
    entry = {"round": 5, "average": 75.0, "chance": 50.0, "images": 16, "steps": 9, "remedies": []}
    line = describe("at chance", entry, 5)
    for part in ("PERHAPS AT CHANCE", "75.0 %", "50.0 %", "16 test images"):
        assert part in line


@pytest.mark.parametrize(("right", "told"), [(5, True), (7, False)])
def test_a_score_is_above_chance_from_two_standard_errors_on(right: int, told: bool, tmp_path: Path) -> None:
    """Chance is 25 %; the standard error of the mean of three domains with 16 images each is 6.25 points."""

    def scored(request: Request, payload: Payload) -> Payload:
        scores = []
        for score in payload.header["scores"]:
            counts, left = [], right
            for label, row in enumerate(score["confusion"]):
                hits = min(left, sum(row))
                left -= hits
                counts.append([0] * len(row))
                counts[label][label], counts[label][label - 1] = hits, sum(row) - hits
            scores.append({**score, "confusion": counts, "correct": right})
        return replace(payload, header={**payload.header, "scores": scores})

    settings = toy_settings("fedavg", tmp_path, train={"rounds": 3, "local_steps": 1})
    assert ("at chance" in dict(run(settings, TouchedEngine(settings, edit=scored)).events)) == told


def test_a_remedy_that_is_set_is_not_named() -> None:
    words = ["method=fedbn", "method.refresh_statistics=true", "train.epochs=5", "train.batch_size=8"]
    named = " ".join(remedies(load_settings(words), 9))
    assert "train.epochs" not in named
    assert "train.batch_size" not in named
    assert "model.norm" not in named
    assert "train.batch_size=8 (" in " ".join(remedies(load_settings(["train.epochs=5"]), 9))
    for steps, named_too in ((0, False), (199, True), (200, False)):
        once = " ".join(remedies(load_settings(["train.rounds=1"]), steps))
        assert ("train.epochs=5" in once) == named_too, "a run that takes many steps needs no more"


@pytest.mark.parametrize(
    ("method", "refused"),
    [("scaffold", "train.optimizer=adam"), ("fedbn", "model.norm=group"), ("fdse", "model.norm=group")],
)
def test_a_remedy_that_the_method_refuses_is_not_named(method: str, refused: str) -> None:
    settings = load_settings([f"method={method}", "data=glyphs"])
    assert refused not in " ".join(remedies(settings, 9))
    assert refused in " ".join(remedies(load_settings(["method=fedavg", "data=glyphs"]), 9))
    with pytest.raises(ConfigError):
        Federation(load_settings([f"method={method}", "data=glyphs", refused]))


def test_a_run_that_learns_is_not_called_at_chance(shapes: Path, tmp_path: Path) -> None:
    run = shapes_run(
        shapes, tmp_path, "data.augmentation.normalisation=image", "train.epochs=4", "train.batch_size=8",
        "train.optimizer=adam", "train.learning_rate=0.002",
    )  # fmt: skip
    assert run.average > 60
    assert not at_chance(run)


def test_one_or_two_rounds_are_too_early_to_be_called_at_chance(shapes: Path, tmp_path: Path) -> None:
    run = shapes_run(shapes, tmp_path, "train.local_steps=1", "train.learning_rate=0.0001", rounds=2)
    assert not at_chance(run)


def test_chance_is_the_mean_share_of_the_most_frequent_class() -> None:
    even, uneven = ClassTotals.of([[1, 9], [3, 7]]), ClassTotals.of([[8, 0], [0, 2]])
    found = chance([even, uneven])
    assert found.average == pytest.approx(100 * (0.5 + 0.8) / 2)
    assert found.error == pytest.approx(100 * math.sqrt(0.5 * 0.5 / 20 + 0.8 * 0.2 / 10) / 2)


@pytest.mark.parametrize("confusion", [None, 7, [["a"]], [[1, 2], [3]], [[10**9] * 4] * 4], ids=str)
def test_a_device_that_sends_no_counts_that_fit_does_not_end_the_run(confusion: object, tmp_path: Path) -> None:
    def lie(request: Request, payload: Payload) -> Payload:
        if request.client != "bright-0":
            return payload
        scores = [{**score, "confusion": confusion} for score in payload.header["scores"]]
        if confusion is None:
            scores = [{name: value for name, value in score.items() if name != "confusion"} for score in scores]
        return replace(payload, header={**payload.header, "losses": {"cross_entropy": 0.0}, "scores": scores})

    settings = toy_settings("fedavg", tmp_path, train={"rounds": 4, "local_steps": 1})
    found = run(settings, TouchedEngine(settings, edit=lie))
    assert found.summary["rounds"] == 4
