"""Validation samples: held out of training, scored by who holds them, and what chooses the best round."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, f1_score, recall_score
from support.own_states import versions
from support.runs import TouchedEngine, run
from support.toy import DOMAINS, Toy, toy_settings

from client.device import Device
from common.client_state import ClientStore
from common.data.batches import Split
from common.data.domain import Domain
from common.data.protocols import ClientSpec, OneClientPerDomain
from common.data.splits import split_hash
from common.errors import CheckpointError, ConfigError, DataError
from common.metrics import METRICS, RoundScore, best_round, summarise
from common.settings import RunSettings, load_settings
from common.wire.messages import Request
from common.wire.payload import Payload
from goldfinch.cli import main
from goldfinch.record import RunRecord
from goldfinch.run_model import RunModel
from server.run.checkpoint import BEST, Checkpoint, Checkpoints
from server.run.existing import Step, decide
from strategies.core.participants import Registry

CLIENTS = [ClientSpec(domain, 0) for domain in DOMAINS]


def validating(method: str, output: Path, rounds: int = 3, **more: Any) -> RunSettings:
    train = {"rounds": rounds, "local_steps": 1, **more.pop("train", {})}
    more["rounds"] = more.pop("rounds_", {})
    return toy_settings(method, output, overrides=("protocol.validation=0.2",), train=train, **more)


def best(folder: Path) -> Checkpoint:
    found = Checkpoints(folder / "checkpoint", kind=BEST).load()
    assert found is not None
    return found


# ---- the split -------------------------------------------------------------------------------------------------------


def domain(*counts: int) -> Domain:
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    split = Split(torch.zeros(len(labels), 3, 8, 8, dtype=torch.uint8), labels)
    return Domain("d", split, split)


@pytest.mark.parametrize("share", [0.05, 0.1, 0.25, 0.5])
@pytest.mark.parametrize("counts", [(20, 20, 20), (2, 40, 7), (1, 1, 30), (2, 2, 2, 3, 3, 2, 7)], ids=str)
def test_each_class_gives_its_share_and_never_its_last_sample(counts: tuple[int, ...], share: float) -> None:
    for seed in range(10):
        protocol = OneClientPerDomain(validation=share, partition_seed=None)
        held = domain(*counts)
        trained, validated = protocol.parts(held, ClientSpec("d", 0), seed)
        assert sorted([*trained.tolist(), *validated.tolist()]) == list(range(sum(counts)))
        assert len(validated) == min(
            int(share * sum(n for n in counts if n > 1) + 0.5), sum(n for n in counts if n > 1) // 2
        )
        given = held.train.labels[validated].bincount(minlength=len(counts))
        for count, gave in zip(counts, given.tolist(), strict=True):
            assert abs(gave - share * count) <= 1
            assert gave < count


def test_the_choice_is_keyed_by_the_partition_s_seed_and_part_of_the_split_s_hash() -> None:
    held, client = domain(20, 20), ClientSpec("d", 0)

    def parts(seed: int, partition_seed: int | None) -> list[torch.Tensor]:
        return list(OneClientPerDomain(validation=0.2, partition_seed=partition_seed).parts(held, client, seed))

    assert parts(1, 0)[1].tolist() == parts(2, 0)[1].tolist()
    assert parts(1, None)[1].tolist() == parts(1, None)[1].tolist() != parts(2, None)[1].tolist()
    trained, validated = parts(1, 0)
    labels = held.train.labels
    assert split_hash("d", client.id, trained, labels) != split_hash("d", client.id, trained, labels, validated)


def test_a_share_that_leaves_nothing_is_refused_with_a_message() -> None:
    with pytest.raises(DataError, match=r"d-0 has 4 training samples, and protocol.validation=0.1 of them is none"):
        OneClientPerDomain(validation=0.1).parts(domain(2, 2), ClientSpec("d", 0), 0)
    with pytest.raises(DataError, match=r"of them is none: set protocol\.validation=0\.13 or more"):
        OneClientPerDomain(validation=0.1).parts(domain(2, 2), ClientSpec("d", 0), 0)
    assert len(OneClientPerDomain(validation=0.13).parts(domain(2, 2), ClientSpec("d", 0), 0)[1]) == 1
    with pytest.raises(DataError, match=r"one of each class, which it trains on: .*set protocol\.validation=0$"):
        OneClientPerDomain(validation=0.5).parts(domain(1, 1), ClientSpec("d", 0), 0)
    assert len(OneClientPerDomain(validation=0).parts(domain(1, 1), ClientSpec("d", 0), 0)[0]) == 2
    held_out = (
        r"would train on 1 sample besides 1 that protocol\.validation=0\.5 holds out; .*set protocol\.validation=0,"
    )
    with pytest.raises(DataError, match=held_out):
        OneClientPerDomain(validation=0.5).parts(domain(2), ClientSpec("d", 0), 0)
    assert len(OneClientPerDomain(validation=0).parts(domain(2), ClientSpec("d", 0), 0)[0]) == 2
    with pytest.raises(DataError, match="would train on 1 sample; it needs two or more: give the domain more images"):
        OneClientPerDomain().parts(domain(1), ClientSpec("d", 0), 0)


def in_groups(*sizes: int, one_class_each: bool = False) -> Domain:
    """A domain whose samples are in groups of these sizes, with both classes in each group or one."""
    groups = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    labels = groups if one_class_each else torch.arange(len(groups)) % 2
    held = domain(len(groups), 0)
    names = tuple(f"p{number}" for number in groups.tolist())
    return replace(held, train=Split(held.train.images, labels), train_groups=names)


@pytest.mark.parametrize(
    ("sizes", "share", "words"),
    [
        ((30, 30, 30), 0.2, "is at most 18, while the smallest whole group has 30: set protocol.validation=0.34 or"),
        ((40, 60), 0.1, "is at most 10, while the smallest whole group has 40: set protocol.validation=0.4 or more"),
        ((90,), 0.5, "its largest value, 0.5, is too little: give the client more groups"),
    ],
)
def test_groups_that_are_too_large_to_hold_out_are_named(sizes: tuple[int, ...], share: float, words: str) -> None:
    held, client = in_groups(*sizes), ClientSpec("d", 0)
    with pytest.raises(DataError, match=words):
        OneClientPerDomain(validation=share).parts(held, client, 0)
    if remedy := re.search(r"validation=([\d.]+) or", words):
        assert len(OneClientPerDomain(validation=float(remedy[1])).parts(held, client, 0)[1]) == min(sizes)


def test_groups_that_have_a_class_to_themselves_are_named() -> None:
    with pytest.raises(DataError, match="all samples of a class: give the client more groups with that class"):
        OneClientPerDomain(validation=0.5).parts(in_groups(10, 10, one_class_each=True), ClientSpec("d", 0), 0)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("protocol.validation=0.6", "protocol.validation="),
        ("protocol.validation=-0.1", "protocol.validation="),
        ("rounds.test=false", "leaves nothing to score"),
        ("rounds.metric=macro_f1", "protocol.validation=0 holds none out"),
    ],
)
def test_settings_that_cannot_be(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_settings([override])


def test_public_images_may_not_be_of_the_run_s_own_domains() -> None:
    public = ["method.public.source._target_=common.data.glyphs.Glyphs", "method.public.source.domains=[sketch]"]
    words = ["method=fccl_plus", "data=glyphs", *public, "method.public.domain=sketch"]
    assert load_settings(words)
    with pytest.raises(ConfigError, match="choose another public set"):
        load_settings([*words, "protocol.validation=0.1"])


# ---- on the device ---------------------------------------------------------------------------------------------------


def test_what_is_held_out_is_no_part_of_what_a_method_is_given(tmp_path: Path) -> None:
    settings = validating("fpl", tmp_path)
    device = Device(settings, CLIENTS[0], lambda run: ClientStore(tmp_path / "own"))
    trained, validated = device._own_data()
    whole = Toy().load("bright").train
    assert len(trained) + len(validated) == len(whole)
    rows = {image.numpy().tobytes() for image in validated.images}
    assert not rows & {image.numpy().tobytes() for image in trained.images}
    assert device.register().samples == len(trained)
    assert sum(device.register().class_counts) == len(trained)
    assert device.register().validation == len(validated)
    assert torch.equal(RunModel(RunRecord(run(settings).folder)).train_split(CLIENTS[0]).images, trained.images)


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedbn", "fedpall", "fccl_plus"])
def test_every_client_scores_its_own_samples_in_the_same_exchange(method: str, tmp_path: Path) -> None:
    settings = validating(method, tmp_path, engine={"wire": True, "workers": 2})
    engine = TouchedEngine(settings)
    done = run(settings, engine)
    rows, tested = done.scores("validation"), done.scores("test")
    rounds = sorted({int(row["round"]) for row in tested})
    assert [(int(row["round"]), row["client"], row["domain"]) for row in rows] == [
        (number, f"{name}-0", name) for number in rounds for name in DOMAINS
    ]
    averages = [entry["average"] for name, entry in done.events if name == "validation"]
    chosen = max(number for number in rounds if number)  # never the untrained round 0
    for number, average in reversed(list(zip(rounds, averages, strict=True))):
        if number and average >= averages[rounds.index(chosen)]:
            chosen = number
    validated = done.summary["scores"]["validated"]
    assert done.summary["validation"] == {"round": chosen, "average": averages[rounds.index(chosen)], "missing": {}}
    assert (validated["round"], validated["validation"]) == (chosen, averages[rounds.index(chosen)])
    by_round = {score.round: score.average for score in RunRecord(done.folder).round_scores}
    assert validated["average"] == by_round[chosen]
    assert best(tmp_path).state.round == chosen
    asked = [one.request for one in engine.messages if one.request.validate]
    assert all(request.train or request.score for request in asked), "validation costs no message of its own"


def test_the_best_round_s_state_is_the_one_that_was_scored(tmp_path: Path) -> None:
    settings = validating("fedavg", tmp_path, train={"learning_rate": 0.3})
    done = run(settings, TouchedEngine(settings))
    kept = best(tmp_path).state
    validating_it = (one for one in done.messages if one.request.validate and one.request.round == kept.round + 1)
    sent = next(validating_it).message.weights
    assert all(torch.equal(kept.weights[name], sent[name]) for name in sent)


@pytest.mark.parametrize("method", ["fedrep", "fedpall"])
@pytest.mark.long
def test_a_run_that_goes_on_chooses_the_same_round(method: str, tmp_path: Path) -> None:
    by_f1: dict[str, Any] = {"rounds": 4, "rounds_": {"metric": "macro_f1"}}
    whole = run(validating(method, tmp_path / "whole", **by_f1))
    parted = validating(method, tmp_path / "parted", **by_f1)
    run(parted, stop_after=2)
    again = run(replace(parted, resume=True))
    assert again.scores("validation") == whole.scores("validation")
    assert again.summary["validation"] == whole.summary["validation"]
    assert best(again.folder).state.sha256() == best(whole.folder).state.sha256()


def test_own_models_of_the_best_round_are_still_there(tmp_path: Path) -> None:
    """The first round is the best by what the clients report; six rounds later its own state is not yet dropped."""

    def flattering(request: Request, payload: Payload) -> Payload:
        validation = payload.header["validation"]
        correct = validation["count"] if request.round == 2 else 0
        return replace(payload, header={**payload.header, "validation": {**validation, "correct": correct}})

    settings = validating("fedrep", tmp_path, rounds=7)
    done = run(settings, TouchedEngine(settings, edit=flattering))
    assert done.summary["validation"] == {"round": 1, "average": 100.0, "missing": {}}
    kept = versions(tmp_path / "clients" / best(tmp_path).run / "bright-0")
    assert [version.position for version in kept] == [1, 5, 6, 7]


def test_test_sets_are_left_alone_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Any, domain: str) -> Split:
        raise AssertionError(f"a device read the test split of {domain}")

    monkeypatch.setattr(Device, "_test_data", read)
    done = run(validating("fedavg", tmp_path, rounds_={"test": False}))
    assert done.scores("test") == []
    assert len({row["round"] for row in done.scores("validation")}) == 4
    assert done.summary["average"] is None
    assert done.summary["validation"]["average"] > 0


def test_a_run_whose_last_validation_lacks_a_client_is_not_finished(tmp_path: Path) -> None:
    """Another client scored the test images of the one that was lost, and nobody else has its validation samples."""
    settings = validating("fedavg", tmp_path, rounds=2)
    done = run(settings, TouchedEngine(settings, lost=lambda asked: asked.client == "dark-0" and asked.round > 1))
    assert (done.summary["missing"], set(done.summary["validation"]["missing"])) == ({}, {"dark"})
    assert decide(replace(settings, resume=True)).step is Step.GO_ON
    assert run(replace(settings, resume=True)).summary["validation"]["missing"] == {}
    assert decide(replace(settings, resume=True)).step is Step.NOTHING


# ---- what clients may report -----------------------------------------------------------------------------------------

LIES: list[tuple[dict[str, Any], str]] = [
    ({"count": 500, "correct": 500}, "counts 500 images; 5 were registered"),
    ({"correct": 6}, "claims 6 correct of 5"),
    ({"count": 2, "correct": 2}, "counts 2 images; 5 were registered"),
    ({"domain": "noisy"}, "is of noisy; the client holds dark"),
    ({"loss": -1.0}, "has loss -1"),
]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    """A client tells one lie a round, after a round without."""

    def lying(request: Request, payload: Payload) -> Payload:
        if request.client != "dark-0" or request.round not in range(2, 2 + len(LIES)):
            return payload
        score = {**payload.header["validation"], **LIES[request.round - 2][0]}
        return replace(payload, header={**payload.header, "validation": score})

    settings = validating("fedavg", tmp_path, rounds=1 + len(LIES))
    done = run(settings, TouchedEngine(settings, edit=lying))
    refused = [row for row in done.replies() if row["status"] == "refused"]
    assert [(row["client"], int(row["round"])) for row in refused] == [("dark-0", 2 + k) for k in range(len(LIES))]
    for row, (_, reason) in zip(refused, LIES, strict=True):
        assert reason in row["reason"]
    assert [row["client"] for row in done.scores("validation") if row["round"] == "1"] == ["bright-0", "noisy-0"]


@pytest.mark.parametrize("asked", [True, False], ids=["missing", "unasked"])
def test_a_score_comes_if_and_only_if_it_was_asked_for(asked: bool, tmp_path: Path) -> None:
    score = None if asked else {"domain": "dark", "count": 5, "correct": 5, "loss": 0.0}

    def other(request: Request, payload: Payload) -> Payload:
        header = {**payload.header, "validation": score}
        return replace(payload, header=header) if request.client == "dark-0" else payload

    settings = validating("fedavg", tmp_path, rounds=1) if asked else toy_settings("fedavg", tmp_path)
    done = run(settings, TouchedEngine(settings, edit=other))
    assert done.summary["answers"]["refused"] > 0


@pytest.mark.parametrize(("share", "claimed"), [(0.2, 0), (0.2, 50), (0.0, 3)], ids=["none", "too many", "unasked"])
def test_a_registration_of_impossible_validation_samples_is_refused(share: float, claimed: int, tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path, overrides=(f"protocol.validation={share}",))
    device = Device(settings, CLIENTS[0], lambda run: ClientStore(tmp_path / "own"))
    registry = Registry(settings)
    assert registry.admit(device.register()) is None
    assert "validation samples" in str(registry.admit(replace(device.register(), validation=claimed)))


# ---- by another metric -----------------------------------------------------------------------------------------------


def random_labels(request: Request, count: int) -> tuple[Any, Any]:
    """True and predicted classes of the client's validation samples in a round, at random."""
    draws = np.random.default_rng([request.round, *request.client.encode()])
    true, predicted = draws.integers(0, 4, (2, count))
    return true, np.where(draws.random(count) < 0.5, true, predicted)


def guessing(request: Request, payload: Payload) -> Payload:
    """Put a score by :func:`random_labels` in the place of the client's own."""
    own = payload.header["validation"]
    true, predicted = random_labels(request, own["count"])
    counts = confusion_matrix(true, predicted, labels=range(4))
    score = {**own, "correct": int(np.trace(counts)), "confusion": counts.tolist()}
    return replace(payload, header={**payload.header, "validation": score})


def rounds_by(metric: str, done: Any) -> dict[int, float]:
    """The average over domains of scikit-learn's metric of the same labels, in per cent by round."""
    found: dict[int, list[float]] = {}
    for message in done.messages:
        true, predicted = random_labels(message.request, message.reply.answer.validation["count"])
        present = sorted(set(true))
        recalls = recall_score(true, predicted, labels=present, average=None, zero_division=0)
        values = {
            "accuracy": np.mean(true == predicted),
            "balanced_accuracy": np.mean(recalls),
            "macro_f1": f1_score(true, predicted, average="macro", zero_division=0),
            "worst_class": np.min(recalls),
        }
        found.setdefault(message.request.round - 1, []).append(100 * values[metric])
    return {number: float(np.mean(values)) for number, values in found.items() if number}


@pytest.mark.long
@pytest.mark.parametrize("metric", METRICS)
def test_the_metric_chooses_the_round_as_scikit_learn_would(metric: str, tmp_path: Path) -> None:
    settings = validating("fedavg", tmp_path / "run", rounds=6, rounds_={"metric": metric})
    done = run(settings, TouchedEngine(settings, edit=guessing))
    expected = rounds_by(metric, done)
    chosen = max(expected, key=lambda number: expected[number])
    assert done.summary["validation"]["round"] == chosen
    assert done.summary["validation"]["average"] == pytest.approx(expected[chosen])
    assert done.summary["validation"].get("metric", "accuracy") == metric
    assert done.summary["scores"]["validated"]["round"] == chosen
    assert best(tmp_path / "run").state.round == chosen
    averages = {score.round: score.average for score in RunRecord(tmp_path / "run").validation_scores if score.round}
    assert averages == pytest.approx(expected)
    if metric == "macro_f1":
        assert chosen != max(rounds_by("accuracy", done), key=lambda number: rounds_by("accuracy", done)[number])


def test_the_metric_changes_no_state_and_its_row_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = run(validating("fedavg", tmp_path / "runs/whole", rounds_={"metric": "macro_f1"}))
    plain = run(validating("fedavg", tmp_path / "runs/plain"))
    assert plain.sha256 == chosen.sha256
    assert main(["table", str(tmp_path / "runs"), "--rule", "validated"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "metric accuracy (fedavg, metric=accuracy), macro_f1 (fedavg, metric=macro_f1)" in shown
    assert "fedavg, metric=macro_f1: validation is macro F1 (rounds.metric=macro_f1)" in shown


def test_a_metric_needs_counts_that_fit(tmp_path: Path) -> None:
    def without(request: Request, payload: Payload) -> Payload:
        if request.client != "dark-0":
            return payload
        score = {**payload.header["validation"], "confusion": [[1]]}
        return replace(payload, header={**payload.header, "validation": score})

    settings = validating("fedavg", tmp_path / "run", rounds=1, rounds_={"metric": "macro_f1"})
    done = run(settings, TouchedEngine(settings, edit=without))
    (reason,) = {row["reason"] for row in done.replies() if row["status"] == "refused"}
    assert "confusion counts" in reason
    assert "rounds.metric=macro_f1" in reason


# ---- the rule --------------------------------------------------------------------------------------------------------


def test_the_best_round_is_the_earliest_of_the_highest_average_over_most_domains() -> None:
    scores = [
        RoundScore(1, {"a": 99.0}, {"b": None}),
        RoundScore(2, {"a": 50.0, "b": 60.0}),
        RoundScore(3, {"a": 60.0, "b": 50.0}),
        RoundScore(4, {"a": 10.0, "b": 20.0}),
    ]
    chosen = best_round(scores)
    assert chosen is not None
    assert chosen.round == 2
    assert best_round([]) is None
    partial = [RoundScore(1, {"a": 99.0}, {"b": None, "c": None}), RoundScore(2, {"a": 50.0, "b": 60.0}, {"c": None})]
    chosen = best_round(partial)
    assert chosen is not None
    assert (chosen.round, chosen.missing) == (2, {"c": None}), "the most domains, where no round scored all"


def test_the_validated_round_is_scored_on_test() -> None:
    tested = [RoundScore(number, {"a": value}) for number, value in ((1, 30.0), (2, 50.0), (3, 40.0))]
    held_out = [RoundScore(number, {"a": value}) for number, value in ((1, 10.0), (2, 20.0), (3, 30.0))]
    rules = summarise(tested, 2, held_out)
    assert (rules["validated"]["round"], rules["validated"]["average"]) == (3, 40.0)
    expected = {"final": 30.0, "last_n": 25.0, "best_round": 20.0, "validated": 30.0}
    assert {name: rule["validation"] for name, rule in rules.items()} == expected
    assert "validated" not in summarise(tested, 2)
    assert "validated" not in summarise(tested[:2], 2, held_out), "its best round was not scored on test"


# ---- a kill while the best model is kept -----------------------------------------------------------------------------


class KilledError(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize("written", [0, 1], ids=["before the best", "between the best and the last"])
def test_a_run_that_is_killed_while_it_keeps_its_best_model_has_it_once_resumed(
    written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = validating("fedpall", tmp_path)
    whole = Checkpoints.save
    killed: list[int] = []
    saved: list[int] = []

    def save(self: Checkpoints, checkpoint: Checkpoint) -> None:
        if checkpoint.state.round == 1:
            saved.append(1)
        if checkpoint.state.round == 1 and len(saved) > written and not killed:
            killed.append(1)
            raise KilledError
        whole(self, checkpoint)

    monkeypatch.setattr(Checkpoints, "save", save)
    with pytest.raises(KilledError):
        run(settings)
    found = run(replace(settings, resume=True))
    assert best(found.folder).state.round == found.summary["validation"]["round"]


def test_a_best_model_of_an_earlier_round_is_not_taken_for_the_best(tmp_path: Path) -> None:
    folder = run(validating("fedavg", tmp_path)).folder
    kept = best(folder)
    record = RunRecord(folder)
    assert RunModel(record, "best").checkpoint.state.round == kept.state.round > 0
    earlier = replace(kept, state=replace(kept.state, round=kept.state.round - 1))
    Checkpoints(folder / "checkpoint", kind=BEST).replace(earlier)
    with pytest.raises(CheckpointError, match=rf"best round by validation is {kept.state.round}, and.*round last"):
        _ = RunModel(record, "best").checkpoint
    assert RunModel(record, "last").checkpoint.state.round == 3
