"""A metric of the user's own, and scores of confidence: counted on devices, added up, recorded, shown, chosen by."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score
from support.exchanges import device_of, request_to
from support.halves import Half
from support.own_metrics import ClassF1, Wrong
from support.runs import Recorded, Run, TouchedEngine, run
from support.toy import CLASSES, DOMAINS, toy_settings

import common.choices
import goldfinch as gf
from client.ledger import Ledger
from common.choices import trust
from common.confidence import ConfidenceCounts, count_confidence, read_confidence
from common.config import to_config
from common.contract import Contract
from common.data.protocols import Allocation
from common.errors import ConfigError, PayloadError
from common.metrics import CONFIDENCE_MEASURES
from common.own_metric import SumRange, check_own_metric, count_sums, values_of
from common.scores import recorded_values
from common.settings import RunSettings, load_settings
from common.wire.messages import Answer, Request, read_header
from common.wire.payload import Payload
from goldfinch.cli import main
from goldfinch.commands.evaluate import measures
from goldfinch.record import RunRecord, find_runs
from goldfinch.results.groups import group_runs
from goldfinch.results.report.page import render
from goldfinch.run_model import RunModel
from goldfinch.trackers.scalars import scalars
from server.run.measures import resolutions_of
from server.run.schema import read_lines
from strategies.core.gate import Gate
from strategies.core.method import Client, UploadSpec
from tests.support.records import rewrite

OWN = "support.own_metrics.ClassF1"


def measured(output: Path, *overrides: str, method: str = "fedavg", **more: Any) -> RunSettings:
    """Settings of a run with a metric of the user's own and confidences."""
    trust([OWN, "support.own_metrics.Wrong"])
    chosen = (f"own_metric={OWN}", "own_metric.label=1", "rounds.scores=true", *overrides)
    return toy_settings(method, output, overrides=chosen, **more)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Run]:
    """Two runs of FedAvg and one of FedProx with every metric, by the names of their folders."""
    folder = tmp_path_factory.mktemp("further")
    found: dict[str, Run] = {}
    for name, method, seed in (("fedavg-0", "fedavg", 0), ("fedavg-1", "fedavg", 1), ("fedprox", "fedprox", 0)):
        settings = measured(folder / name, "protocol.validation=0.2", method=method, seed=seed)
        found[name] = run(settings, TouchedEngine(settings))
    return found


@pytest.fixture
def folder(runs: Mapping[str, Run]) -> Path:
    """The folder of the three runs."""
    return runs["fedprox"].folder.parent


# ---- confidences -----------------------------------------------------------------------------------------------------


def drawn(images: int, classes: int, seed: int, sharpness: float) -> tuple[torch.Tensor, torch.Tensor]:
    draws = np.random.default_rng(seed)
    labels = torch.from_numpy(np.concatenate([np.arange(classes), draws.integers(0, classes, images - classes)]))
    scores = torch.from_numpy(draws.normal(0, sharpness, (images, classes))).float()
    scores[torch.arange(images), labels] += sharpness / 2
    return scores, labels


def calibration_error(probabilities: Any, labels: Any) -> float:
    """The formula of Guo et al., image by image."""
    bins: dict[int, list[tuple[float, float]]] = {}
    for row, label in zip(probabilities, labels, strict=True):
        place = max(1, int(np.ceil(row.max() * 15)))
        bins.setdefault(place, []).append((float(row.argmax() == label), float(row.max())))
    gap = 0.0
    for images in bins.values():
        gap += abs(float(np.mean([right for right, _ in images]) - np.mean([sure for _, sure in images]))) * len(images)
    return 100 * gap / len(labels)


@hypothesis_settings(deadline=None, max_examples=40)
@given(st.integers(2, 6), st.integers(12, 80), st.integers(0, 99), st.sampled_from([0.01, 0.5, 2.0, 20.0]))
def test_scores_of_confidence_are_scikit_learn_s(classes: int, images: int, seed: int, sharpness: float) -> None:
    scores, labels = drawn(images, classes, seed, sharpness)
    counts = count_confidence(scores, labels)
    probabilities = scores.double().softmax(1).numpy()
    truth = np.eye(classes)[labels.numpy()]
    values = counts.values()
    area = counts.auroc()
    assert area is not None
    exact = 100 * roc_auc_score(truth, probabilities, average="macro")
    assert abs(area[0] - exact) <= area[1] + 1e-9, "farther off than the resolution that is stated"
    assert values["brier_score"] == pytest.approx(((probabilities - truth) ** 2).sum(1).mean())
    assert values["log_loss"] == pytest.approx(log_loss(labels, probabilities, labels=list(range(classes))), rel=1e-6)
    assert values["calibration_error"] == pytest.approx(calibration_error(probabilities, labels.numpy()))
    evaluated = measures(torch.from_numpy(probabilities), labels)
    assert evaluated["auroc"] == pytest.approx(exact)
    assert evaluated["log_loss"] == pytest.approx(values["log_loss"])
    sent = json.loads(json.dumps(counts.as_dict()))
    correct = int((scores.argmax(1) == labels).sum())
    assert read_confidence(sent, classes, images, correct) == counts


def test_the_areas_of_sharp_and_of_even_models_are_near_the_exact_ones() -> None:
    for sharpness, worst in ((0.05, 25.0), (0.5, 2.5), (3.0, 0.5)):
        scores, labels = drawn(2000, 10, 0, sharpness)
        area = count_confidence(scores, labels).auroc()
        assert area is not None
        exact = 100 * roc_auc_score(labels, scores.double().softmax(1).numpy(), multi_class="ovr")
        assert area[1] < worst
        assert abs(area[0] - exact) < worst / 4


def test_counts_of_parts_add_up_to_those_of_the_whole() -> None:
    scores, labels = drawn(60, 4, 3, 2.0)
    whole = count_confidence(scores, labels)
    parts = ConfidenceCounts.empty(4)
    for chosen in torch.arange(60).split(17):
        parts = parts.plus(count_confidence(scores[chosen], labels[chosen]))
    assert (parts.positive, parts.negative, parts.count) == (whole.positive, whole.negative, whole.count)
    assert parts.values() == pytest.approx(whole.values())


def test_what_has_no_value_has_none() -> None:
    assert set(ConfidenceCounts.empty(3).values().values()) == {None}
    scores, _ = drawn(12, 3, 0, 1.0)
    one_class = count_confidence(scores, torch.zeros(12, dtype=torch.int64))
    assert one_class.values()["auroc"] is None
    assert one_class.values()["brier_score"] is not None
    certain = count_confidence(torch.tensor([[0.0, -torch.inf]]), torch.tensor([1]))
    assert certain.values()["log_loss"] == pytest.approx(52 * np.log(2))
    with pytest.raises(ValueError, match="not finite"):
        count_confidence(torch.tensor([[0.0, torch.nan]]), torch.tensor([1]))


Counts = dict[str, Any]


def in_an_empty_bin(value: Counts) -> Counts:
    """One correct prediction moved from the bin that holds all images to the first one, which holds none."""
    correct = list(value["correct"])
    correct[correct.index(3)] = 2
    correct[0] = 1
    return {**value, "correct": correct}


SPOILED: dict[str, tuple[Callable[[Counts], Any], str]] = {
    "no counts": (lambda value: None, "the counts of confidence are not"),
    "another name": (lambda value: {**value, "more": 1}, "the counts of confidence are not"),
    "a class too few": (lambda value: {**value, "positive": value["positive"][:1]}, "positive is not a list"),
    "a bin too few": (lambda value: {**value, "negative": [value["negative"][0][1:]] * 2}, "negative does not have"),
    "a negative count": (lambda value: {**value, "count": [-1, *value["count"][1:-1], 5]}, "count has a bin"),
    "half images": (lambda value: {**value, "correct": [0.5] * 15}, "correct has a bin"),
    "more correct than the score": (lambda value: {**value, "correct": [4, *[0] * 14]}, "do not hold 3 correct"),
    "more correct than images in a bin": (in_an_empty_bin, "bin 1 has 1 correct of 0 images"),
    "an image of no class": (lambda value: {**value, "positive": value["negative"]}, "log-odds of a class"),
    "images of two classes": (
        lambda value: {
            **value,
            "positive": [value["negative"][0], value["positive"][1]],
            "negative": [value["positive"][0], value["negative"][1]],
        },
        "log-odds of the true classes",
    ),
    "confidences of other bins": (lambda value: {**value, "confidence": value["confidence"][::-1]}, "confidences of"),
    "an error below zero": (lambda value: {**value, "squared_error": -1.0}, "squared_error is -1"),
    "an endless loss": (lambda value: {**value, "log_loss": float("inf")}, "log_loss is inf"),
    "a loss as text": (lambda value: {**value, "log_loss": "little"}, "log_loss is 'little'"),
}


@pytest.mark.parametrize("change", SPOILED)
def test_counts_that_cannot_be_are_refused(change: str) -> None:
    """Three images of the first of two classes and one of the other, all taken for the first."""
    scores, labels = torch.tensor([[2.0, 0.0]] * 4), torch.tensor([0, 0, 0, 1])
    value = count_confidence(scores, labels).as_dict()
    assert read_confidence(value, 2, 4, 3)
    spoil, reason = SPOILED[change]
    with pytest.raises(ValueError, match=reason):
        read_confidence(spoil(value), 2, 4, 3)


# ---- a whole run -----------------------------------------------------------------------------------------------------


def test_asking_for_metrics_changes_no_state_and_no_other_score(tmp_path: Path, folder: Path) -> None:
    plain = run(toy_settings("fedavg", tmp_path, overrides=("protocol.validation=0.2",)))
    summary = json.loads((folder / "fedavg-0/summary.json").read_text())
    assert summary["state_sha256"] == plain.sha256
    assert summary["scores"] == plain.summary["scores"]
    assert "metrics" not in plain.summary
    for name in ("scores.jsonl", "events.jsonl"):
        text = (tmp_path / name).read_text()
        assert "auroc" not in text
        assert '"sums"' not in text


def test_every_record_has_the_metrics(folder: Path) -> None:
    names = {*CONFIDENCE_MEASURES, "class_f1", "brier"}
    lines = read_lines(folder / "fedavg-0/scores.jsonl")
    assert len(lines) == 3 * 2 * len(DOMAINS), "rounds 0 to 2, test and validation"
    events = read_lines(folder / "fedavg-0/events.jsonl")
    recorded = {scored_on: recorded_values(events, scored_on) for scored_on in ("test", "validation")}
    for line in lines:  # one client scores a domain
        values = recorded[line["scored_on"]][line["round"], line["domain"]]
        assert set(values) == names
        for name, value in values.items():
            assert (name not in line["values"]) == (value is None)
            if value is not None:
                assert line["values"][name] == pytest.approx(value, abs=1e-5)
        assert line["sums"]["images"] == line["count"]
        assert values["brier"] == pytest.approx(values["brier_score"], rel=1e-5)
    summary = json.loads((folder / "fedavg-0/summary.json").read_text())
    assert set(summary["metrics"]) == names
    record = gf.load_run(folder / "fedavg-0").records
    for name, entry in summary["metrics"].items():
        score = record.by_metric(name).round_scores[-1]
        assert entry["domains"] == pytest.approx(dict(score.accuracy))
        assert entry["average"] == pytest.approx(score.average)
        choose = max if entry["lower_is_better"] else min
        assert entry["worst"] == choose(entry["domains"].values())


@pytest.mark.parametrize("metric", ["class_f1", "auroc"])
def test_a_table_of_the_metric_is_that_of_the_records(
    metric: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["table", str(folder), "--metric", metric, "--format", "json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert table["metric"] == metric
    for row, names in zip(table["rows"], (["fedavg-0", "fedavg-1"], ["fedprox"]), strict=True):
        found: list[float] = []
        for name in names:
            entry = json.loads((folder / name / "summary.json").read_text())["metrics"][metric]
            found.append(entry["average"])
        assert row["scores"]["average"]["mean"] == pytest.approx(np.mean(found))


def test_a_table_says_how_far_a_binned_metric_may_be_off_and_where_lower_is_better(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = [resolutions_of(read_lines(path), 2)["auroc"] for path in folder.glob("*/events.jsonl")]
    assert main(["table", str(folder), "--metric", "auroc"]) == 0
    assert f"binned: after the last round it differs from the exact one by at most {max(limits):.2f}." in " ".join(
        capsys.readouterr().out.split()
    )
    assert main(["table", str(folder), "--metric", "brier"]) == 0
    shown = capsys.readouterr().out
    assert "(lower is better)" in shown
    assert "binned" not in shown


@pytest.mark.long
def test_the_report_has_a_table_of_each_metric(folder: Path) -> None:
    page = render(group_runs(find_runs([str(folder)])))
    for title in ("F1 of one class in %", "Brier score of my own (lower is better)", "AUROC in %", "log loss in nats"):
        assert title in page


def test_trackers_get_the_metrics_by_client_and_by_domain(runs: Mapping[str, Run]) -> None:
    done = runs["fedavg-0"]
    tags: dict[str, float] = {}
    for name, entry in done.events:
        for scalar in scalars(name, entry):
            tags[scalar.tag] = scalar.value
    final = done.summary["metrics"]
    for metric in ("class_f1", "brier", "auroc", "log_loss"):
        for domain, value in final[metric]["domains"].items():
            assert tags[f"summary/{metric}/{domain}"] == pytest.approx(value)
            assert tags[f"{metric}/{domain}/{domain}-0"] == pytest.approx(value, abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("metric", ["brier", "log_loss"])
def test_the_metric_chooses_the_round(metric: str, tmp_path: Path) -> None:
    """The one with the lowest average; tests/core/test_validation.py has a metric of which higher is better."""
    done = run(measured(tmp_path, "protocol.validation=0.3", f"rounds.metric={metric}", train={"rounds": 4}))
    scores = [score for score in RunRecord(tmp_path).validation_scores if score.round and not score.missing]
    assert len(scores) == 4
    averages = {score.round: score.average for score in scores}
    chosen = min(averages, key=lambda number: averages[number])
    assert done.summary["validation"] == {
        "round": chosen,
        "average": pytest.approx(averages[chosen]),
        "missing": {},
        "metric": metric,
    }
    assert done.summary["scores"]["validated"]["round"] == chosen


@pytest.mark.long
def test_a_resumed_run_has_the_records_of_an_uninterrupted_one(tmp_path: Path) -> None:
    more: dict[str, Any] = {"train": {"rounds": 4}}
    overrides = ("protocol.validation=0.3", "rounds.metric=brier")
    whole = run(measured(tmp_path / "whole", *overrides, **more))
    run(measured(tmp_path / "again", *overrides, **more), stop_after=2)
    again = run(measured(tmp_path / "again", *overrides, resume=True, **more))
    assert again.sha256 == whole.sha256
    assert (tmp_path / "again/scores.jsonl").read_text() == (tmp_path / "whole/scores.jsonl").read_text()
    found = [recorded_values(read_lines(tmp_path / name / "events.jsonl"), "test") for name in ("again", "whole")]
    assert found[0] == found[1] != {}
    for key in ("scores", "metrics", "validation"):
        assert again.summary[key] == whole.summary[key]


def test_clients_of_one_domain_count_together(tmp_path: Path) -> None:
    """Every client of FedBN scores its own model; the metric of a domain is of all its images together."""
    settings = measured(tmp_path, method="fedbn")
    protocol = Allocation(counts={"bright": 2, "dark": 2, "noisy": 1}, fraction=0.4)
    raw = {**settings.raw, "protocol": to_config(protocol)}
    settings = replace(settings, protocol=protocol, raw=raw)
    engine = TouchedEngine(settings)
    run(settings, engine)
    sums: dict[str, dict[str, float]] = {}
    last = max(item.request.round for item in engine.messages)
    for item in engine.messages:
        if item.reply is None or item.request.round != last:
            continue
        for entry in item.reply.answer.scores:
            total = sums.setdefault(entry["domain"], dict.fromkeys(ClassF1.sum_names, 0.0))
            for name, value in entry["sums"].items():
                total[name] += value
    assert len(sums) == len(DOMAINS)
    assert sums["bright"]["images"] == 2 * sums["noisy"]["images"] == 32.0
    recorded = recorded_values(read_lines(tmp_path / "events.jsonl"), "test")
    for domain, total in sums.items():
        values = recorded[last - 1, domain]
        assert values == pytest.approx(values | values_of(ClassF1(label=1), total))


# ---- mistakes --------------------------------------------------------------------------------------------------------


DECLARATIONS: dict[str, tuple[str, Any, str]] = {
    "a name that is taken": ("measures", {"macro_f1": gf.Measure("mine")}, "macro_f1, which is taken"),
    "a name that is no column": ("measures", {"my score": gf.Measure("mine")}, "'my score'; a name is like"),
    "text for a measure": ("measures", {"mine": "mine"}, "must be a Measure"),
    "no sums": ("sum_names", (), "sum_names must have 1 to 50"),
    "a range of no sum": ("sum_ranges", {"other": SumRange()}, "not in Wrong.sum_names"),
    "a range that is none": ("sum_ranges", {"images": SumRange(2.0, 1.0)}, "low <= high"),
}


@pytest.mark.parametrize("case", DECLARATIONS)
def test_a_wrong_declaration_is_refused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attribute, value, reason = DECLARATIONS[case]
    monkeypatch.setattr(Wrong, attribute, value)
    with pytest.raises(ConfigError, match=reason):
        check_own_metric(Wrong(), 4)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Wrong own_metric.kind='other sums'", r"returned \['images', 'more'\]"),
        ("Wrong own_metric.kind='no number'", "images is not a number"),
        ("Wrong own_metric.kind='not finite'", "images is inf"),
        ("Wrong own_metric.kind='raises'", "Wrong.sums fails on 20 images of 10 classes: IndexError"),
        ("Wrong own_metric.kind=mean", r"sums: images of 20 images is 0.3\d+, and in two batches 0.[67]\d+; return"),
        ("Wrong own_metric.kind='mean margin'", r"sums: images of 20 images is 0.1\d+, and in two batches 0.\d+;"),
        ("Wrong own_metric.kind='no values'", "Wrong does not define values"),
        (
            "Wrong own_metric.kind='no number of values'",
            r"own_metric: Wrong.values\(\)\['mine'\] is a list, and must be float \| None",
        ),
        ("Wrong own_metric.kind='other values'", r"Wrong.values returned \['yours'\]"),
        ("Absent", "has no class Absent"),
    ],
)
def test_a_wrong_metric_is_refused_before_the_run(name: str, reason: str) -> None:
    cls, _, kind = name.partition(" ")
    words = [f"own_metric=support.own_metrics.{cls}"]
    if kind:
        words.append(kind)
    with pytest.raises(ConfigError, match=reason):
        load_settings(words)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["rounds.metric=auroc"], "set rounds.scores=true, too"),
        (["rounds.metric=brier"], "rounds.metric='brier': "),
        (["rounds.metric=macro_f2"], "did you mean 'macro_f1'|choices: accuracy"),
        ([f"own_metric={OWN}", "privacy=gaussian"], "covers no metric of your own"),
    ],
    ids=["no confidences", "no own metric", "a slip", "privacy"],
)
def test_a_choice_that_cannot_be_is_refused(words: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_settings(["protocol.validation=0.1", *words])


def test_a_metric_that_fails_on_the_server_is_reported_once_and_the_run_goes_on(tmp_path: Path) -> None:
    trust(["support.own_metrics.Wrong"])
    overrides = ("own_metric=support.own_metrics.Wrong", "own_metric.kind='raises later'")
    done = run(toy_settings("fedavg", tmp_path, overrides=overrides))
    told = [entry for name, entry in done.events if name == "metric failed"]
    assert len(told) == 1
    assert "Wrong.values: KeyError: 'nothing'" in told[0]["reason"]
    assert done.summary["metrics"]["mine"]["domains"] == {}
    assert len(done.averages()) == 3
    assert main(["table", str(tmp_path)]) == 0


def test_a_table_says_that_no_image_defines_a_metric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trust(["support.own_metrics.Wrong"])
    run(
        toy_settings(
            "fedavg", tmp_path, overrides=("own_metric=support.own_metrics.Wrong", "own_metric.kind=undefined")
        )
    )
    assert main(["table", str(tmp_path), "--metric", "mine"]) == 0
    assert "seed 0: the images of no domain define the metric" in " ".join(capsys.readouterr().out.split())


BEYOND = {"found": 1e299, "true": -1e9, "predicted": 2.0**80, "squares": 2.001 * 16, "images": 15.5}
"""Sums that no 16 images have."""


def changed(entry: Mapping[str, Any], **sums: float) -> dict[str, Any]:
    """A score with these sums instead of its own."""
    return {**entry, "sums": {**entry["sums"], **sums}}


OTHER_COUNTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "no sums": lambda entry: {**entry, "sums": {}},
    "another sum": lambda entry: changed(entry, more=1.0),
    "no number": lambda entry: changed(entry, images=float("nan")),
    **{name: partial(changed, **{name: value}) for name, value in BEYOND.items()},
    "no confidences": lambda entry: {**entry, "confidence": None},
    "other confidences": lambda entry: {**entry, "confidence": {**entry["confidence"], "squared_error": 1e6}},
}


def admit(item: Recorded, change: Callable[[dict[str, Any]], dict[str, Any]], gate: Gate) -> None:
    """Let the gate check the scores of a recorded reply with a change to each."""
    assert item.reply is not None
    header = item.reply.payload.header
    scores = [change(entry) for entry in header["scores"]]
    answer = read_header(Answer, {**header, "scores": scores, "trained": False})
    client = Client(answer.client, "bright", answer.samples, tuple(answer.class_counts))
    gate.admit(replace(item.request, train=False), answer, item.reply.payload, client)


@pytest.mark.parametrize("case", OTHER_COUNTS)
def test_the_gate_refuses_other_counts_than_were_asked_for(case: str, runs: Mapping[str, Run]) -> None:
    item = runs["fedavg-0"].messages[0]
    gate = Gate(UploadSpec(), Half(class_count=CLASSES), sum_ranges=ClassF1().ranges(), confidence=True)
    admit(item, dict, gate)
    with pytest.raises(PayloadError, match="score"):
        admit(item, OTHER_COUNTS[case], gate)
    with pytest.raises(PayloadError, match=r"asked for were \[\]"):
        admit(item, dict, Gate(UploadSpec(), Half(class_count=CLASSES)))


def test_the_gate_refuses_confidences_that_were_not_asked_for(runs: Mapping[str, Run]) -> None:
    """The run has rounds.scores=false, and the metric of the user's own."""
    gate = Gate(UploadSpec(), Half(class_count=CLASSES), sum_ranges=ClassF1().ranges(), confidence=False)
    with pytest.raises(PayloadError, match="counts of confidences that were not asked for"):
        admit(runs["fedavg-0"].messages[0], dict, gate)


@pytest.mark.parametrize("case", ["no sums", "no confidences"])
def test_a_device_that_sends_other_counts_leaves_its_domain_without_a_score(case: str, tmp_path: Path) -> None:
    def edit(request: Request, payload: Payload) -> Payload:
        if request.client != "dark-0":
            return payload
        scores = [OTHER_COUNTS[case](entry) for entry in payload.header["scores"]]
        return replace(payload, header={**payload.header, "scores": scores})

    settings = measured(tmp_path, train={"rounds": 1})
    done = run(settings, TouchedEngine(settings, edit=edit))
    assert {row["client"] for row in done.replies() if row["status"] == "refused"} == {"dark-0"}
    assert done.summary["missing"] == {"dark": None}


def test_a_private_device_refuses_a_metric_of_the_server_s(tmp_path: Path) -> None:
    private = toy_settings("fedavg", tmp_path, overrides=("privacy=gaussian", "privacy.update_clip=1.0"))
    settings = replace(private, own_metric=ClassF1())
    device = device_of(settings, contract=Contract(simulated=True), ledger=Ledger(tmp_path / "ledger"))
    with pytest.raises(ConfigError, match="covers no metric of your own"):
        device.answer(request_to(settings), Payload())


def test_a_table_of_a_metric_leaves_out_a_run_that_lacks_it_and_names_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(toy_settings("fedavg", tmp_path / "plain"))
    command = ["table", str(folder), str(tmp_path), "--metric", "auroc", "--format"]
    assert main([*command, "json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert len(table["rows"]) == 2
    (note,) = [note for note in table["notes"] if "lack this metric" in note]
    assert str(tmp_path / "plain") in note
    assert "rounds.scores=true" in note
    assert main([*command, "csv"]) == 0
    assert str(tmp_path / "plain") in capsys.readouterr().err
    shutil.copytree(folder / "fedavg-1", tmp_path / "damaged")
    events = tmp_path / "damaged/events.jsonl"
    rewrite(events, lambda line: {name: line[name] for name in line if name != "values"})
    assert main(["table", str(tmp_path / "damaged"), "--metric", "auroc"]) == 1
    assert f"{tmp_path / 'damaged'}: its events have no values of auroc" in capsys.readouterr().err


def test_a_record_is_read_without_importing_the_metric(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common.choices, "_OWN_NAMES", {"support.toy.Toy"})
    assert main(["table", str(folder), "--metric", "class_f1"]) == 0
    assert "F1 of one class" in capsys.readouterr().out
    monkeypatch.delitem(sys.modules, "support.own_metrics")
    with pytest.raises(ConfigError, match="imported only if you name it"):
        _ = RunModel(RunRecord(folder / "fedavg-0")).settings


def test_a_metric_is_checked_alone() -> None:
    check_own_metric(ClassF1(), 4)
    assert values_of(ClassF1(), dict.fromkeys(ClassF1.sum_names, 0.0)) == {"class_f1": None, "brier": None}
    assert values_of(Wrong(kind="an array"), {"images": 1.0}) == {"mine": 0.5}
    with pytest.raises(PayloadError, match=r"images: it is 3 over 2 images.*sum_ranges"):
        count_sums(Wrong(kind="too many"), torch.ones(2, 2), torch.zeros(2, dtype=torch.int64))


@given(low=st.floats(-1e3, 1e3), width=st.floats(0, 1e3), parts=st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_a_sum_within_its_range_is_accepted_whatever_the_rounding(low: float, width: float, parts: list[float]) -> None:
    low, width = round(low, 3), round(width, 3)
    limits = SumRange(low, low + width)
    total = torch.tensor([low + width * part for part in parts], dtype=torch.float32).sum()
    assert not limits.mistake(float(total), len(parts))
    assert limits.mistake(limits.high * len(parts) + 1 + abs(limits.high), len(parts))
