"""What a run leaves on the disk survives a crash anywhere, and is never mistaken for another run's."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import CheckpointError, ConfigError
from common.metrics import RoundScore, domain_accuracy, summarise
from common.prototypes import PrototypeSet
from common.scores import COLUMNS, score_row
from common.storage import GlobalState, read_tensors, write_tensors, write_text
from goldfinch.commands.report import write_csv
from goldfinch.record import RunRecord
from server.run.checkpoint import Checkpoint, Checkpoints
from server.run.files import ReplyTotals, RunFiles, last_replies
from server.run.history import REPLY_COLUMNS, History, append_lines, mean_losses, reply_row
from server.run.schema import read_lines
from tests.support.runs import run
from tests.support.toy import toy_settings


def state(number: int) -> GlobalState:
    weights = {"w": torch.full((20, 30), float(number)), "n": torch.tensor(number)}
    prototypes = PrototypeSet(torch.ones(2, 3), torch.tensor([0, 1]), torch.tensor([1.0, 2.0]))
    return GlobalState(weights, prototypes, {"h": torch.ones(3)}, round=number)


def checkpoint(number: int) -> Checkpoint:
    return Checkpoint(state(number), "run", "fpl", "abcd", 7, 12, 7)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "deep" / "checkpoint")
    assert store.load() is None
    store.save(checkpoint(3))
    found = store.load()
    assert found is not None
    assert (found.run, found.method, found.identity, found.seed, found.state.round) == ("run", "fpl", "abcd", 7, 3)
    assert found.state.sha256() == state(3).sha256()


def test_the_last_ones_are_kept_and_saving_again_is_the_same(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, keep=3)
    for number in (*range(1, 12), 11, 11):
        store.save(checkpoint(number))
    assert store.series.numbers() == [9, 10, 11]
    store.clear()
    assert store.load() is None


def test_a_file_torn_anywhere_gives_the_one_before(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    store.save(checkpoint(1))
    store.save(checkpoint(2))
    newest = store.series.path(2)
    whole = newest.read_bytes()
    for place in range(50):
        newest.write_bytes(whole[: place * len(whole) // 50])
        found = store.load()
        assert found is not None
        assert found.state.sha256() == state(1).sha256()
    newest.write_bytes(whole)
    found = store.load()
    assert found is not None
    assert found.state.round == 2


def test_a_flipped_bit_anywhere_gives_the_one_before(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    store.save(checkpoint(1))
    store.save(checkpoint(2))
    newest = store.series.path(2)
    whole = bytearray(newest.read_bytes())
    for position in range(0, len(whole), 37):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        newest.write_bytes(damaged)
        found = store.load()
        assert found is not None
        assert found.state.sha256() in (state(1).sha256(), state(2).sha256())
        if position >= 8 + int.from_bytes(whole[:8], "little"):
            assert found.state.round == 1


@pytest.mark.parametrize("facts", ["[]", "null", "3", "{}", "not json", '{"round": "x"}'])
def test_no_good_checkpoint_is_an_error_with_a_remedy(facts: str, tmp_path: Path) -> None:
    path = tmp_path / "round-000001.safetensors"
    write_tensors(path, state(1).tensors(), {"goldfinch": facts})
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is good .*overwrite=true"):
        Checkpoints(tmp_path).load()


def test_nothing_in_a_checkpoint_is_code(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(checkpoint(1))
    tensors, metadata = read_tensors(next(tmp_path.iterdir()))
    assert set(tensors) == {
        "weights/w", "weights/n", "prototypes/vectors", "prototypes/labels", "prototypes/weights", "extra/h",
    }  # fmt: skip
    facts = {"run", "method", "identity", "seed", "rounds", "seconds", "key", "attempt", "counted", "sha256"}
    assert set(json.loads(metadata["goldfinch"])) == facts


# ---- history ---------------------------------------------------------------------------------------------------------


def score(number: int, domain: str = "signs", correct: int = 5) -> dict[str, Any]:
    row = {
        "round": number,
        "client": f"{domain}-0",
        "client_domain": domain,
        "domain": domain,
        "scored_on": "test",
        "count": 10,
    }
    return {**row, "correct": correct, "loss": 0.25}


def reply(number: int, **more: Any) -> dict[str, Any]:
    return {"round": number, "exchange": "train", "client": "signs-0", "domain": "signs", "status": "trained", **more}


def filled(folder: Path) -> History:
    history = History(folder)
    history.event("start", round=0)
    for number in range(1, 4):
        history.add_scores([score(number - 1)])
        history.event("score", round=number - 1, average=1.0)
        history.add_replies([reply(number, bytes_up=10, bytes_down=3)])
        history.event("round done", round=number)
    return history


def events(folder: Path) -> list[tuple[str, int]]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [(line["event"], line["round"]) for line in lines]


def test_rows_are_on_the_disk_as_they_come(tmp_path: Path) -> None:
    told: list[str] = []
    history = History(tmp_path, listeners=[lambda name, entry: told.append(name)])
    history.event("start", round=0)
    history.add_scores([score(0), score(0, "sketch", 10)])
    history.add_replies([reply(1, losses={"a": 1.0}, reason='answered "no",\nthen left')])
    assert told[0] == "start"
    lines = read_lines(tmp_path / "scores.jsonl")
    assert lines == [score(0), score(0, "sketch", 10)]
    assert list(score_row(lines[0])) == list(COLUMNS)
    assert score_row(lines[0])["accuracy"] == 50.0
    (line,) = read_lines(tmp_path / "replies.jsonl")
    assert line["reason"] == 'answered "no",\nthen left'
    assert list(reply_row(line)) == list(REPLY_COLUMNS)
    assert reply_row(line)["losses"] == '{"a": 1.0}'
    assert history.round_scores() == [RoundScore(0, {"signs": 50.0, "sketch": 100.0})]


def test_a_resumed_run_drops_what_it_will_write_again(tmp_path: Path) -> None:
    filled(tmp_path)
    again = History(tmp_path, 2, 1)
    assert [row["round"] for row in read_lines(tmp_path / "scores.jsonl")] == [0, 1]
    assert [row["round"] for row in read_lines(tmp_path / "replies.jsonl")] == [1, 2]
    assert ("round done", 3) not in events(tmp_path)
    assert ("round done", 2) in events(tmp_path)
    assert [entry for entry in events(tmp_path) if entry[0] == "score"] == [("score", 0), ("score", 1)]
    assert ReplyTotals.of(read_lines(tmp_path / "replies.jsonl")).bytes == {"up": 20, "down": 6}
    again.add_scores([score(2, correct=7)])
    assert [found.accuracy["signs"] for found in again.round_scores()] == [50, 50, 70]


def test_a_resumed_run_says_again_what_followed_from_the_scores_that_it_drops(tmp_path: Path) -> None:
    history = filled(tmp_path)
    for number in (2, 3):  # the run's last round is scored after it
        for name in ("score missing", "metric failed", "collapsed"):
            history.event(name, round=number, domain="signs", label="a", share=1.0, loss=0.1, status="lost", reason="")
    history.event("privacy spent", round=3, reason="")
    history.event("at chance", round=3, average=1.0, chance=2.0, images=3, steps=4, remedies=[])
    History(tmp_path, 3, 2)
    kept = [entry for entry in events(tmp_path) if entry[0] not in ("start", "score", "round done")]
    assert kept == [("score missing", 2), ("metric failed", 2), ("collapsed", 2)]
    history.event("at chance", round=3, average=1.0, chance=2.0, images=3, steps=4, remedies=[])
    History(tmp_path, 4, 4)  # of a method whose rounds are scored in themselves
    assert "at chance" not in [name for name, _ in events(tmp_path)]


def test_a_line_after_a_torn_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "replies.jsonl"
    append_lines(path, [reply(1)])
    with path.open("a") as stream:
        stream.write('{"round": 2, "excha')
    append_lines(path, [reply(3)])
    append_lines(path, [reply(4)])
    assert [line["round"] for line in read_lines(path)] == [1, 3, 4]


def test_who_did_not_reply_last_and_steps_and_losses_of_the_last_training_are_in_the_replies() -> None:
    lines = [
        reply(1, steps=7, domain="signs", losses={"cross_entropy": 0.5}),
        reply(1, exchange="second", steps=0),
        reply(1, client="sketch-0", status="lost"),
        reply(1, client="clay-0", status="lost"),
        reply(1, client="webcam-0", status="lost"),
        reply(2, client="sketch-0", status="failed"),
        reply(2, client="clay-0", status="scored", steps=0),
        reply(2, client="webcam-0", status="late"),
    ]
    assert last_replies(lines) == ({"signs-0": 7}, {"signs": 0.5}, {"sketch-0", "webcam-0"})


@pytest.mark.parametrize("name", ["scores.jsonl", "replies.jsonl", "events.jsonl"])
def test_a_last_line_torn_anywhere_is_dropped(name: str, tmp_path: Path) -> None:
    for cut in range(1, 25):
        filled(tmp_path)
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[:-cut])
        History(tmp_path, 9, 9)
        assert len(read_lines(tmp_path / "scores.jsonl")) == (2 if name == "scores.jsonl" and cut > 1 else 3)
        assert len(read_lines(tmp_path / "replies.jsonl")) == (2 if name == "replies.jsonl" and cut > 1 else 3)
        assert len(events(tmp_path)) == (6 if name == "events.jsonl" and cut > 1 else 7)  # its end shows in itself


# ---- scores ----------------------------------------------------------------------------------------------------------


ODD: dict[str, tuple[str, dict[str, Any], str]] = {
    "an event without its round": ("events.jsonl", {"event": "client failed", "client": "a", "reason": ""}, "round"),
    "an end without its seconds": (
        "events.jsonl", {"event": "stopped", "round": 1, "sha256": "0", "server_peak_bytes": 1}, "seconds",
    ),
    "columns of unlike length": ("scores.jsonl", {"true": [0, 1], "predicted": [0], "count": [1]}, "of one length"),
    "a class beyond the last": ("scores.jsonl", {"true": [2], "predicted": [0], "count": [1]}, "not below classes"),
    "classes of another run": ("scores.jsonl", {"classes": 3, "true": [2], "predicted": [0], "count": [1]}, "another"),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_a_line_that_no_run_writes_is_named(case: str, tmp_path: Path) -> None:
    name, changes, named = ODD[case]
    entries: list[dict[str, Any]] = [{"event": "round", "time": 0.0}, {"time": 1.0, **changes}]
    if name == "scores.jsonl":
        counts = {"classes": 2, "true": [1], "predicted": [0], "count": [1]}
        entries = [{**score(0), "confusion": counts}, {**score(1), "confusion": {**counts, **changes}}]
    append_lines(tmp_path / name, entries)
    files = RunFiles(tmp_path)
    with pytest.raises(ConfigError, match=rf"{name}: entry 2: .*{named}"):
        _ = files.events if name == "events.jsonl" else files.score_lines


def test_scores_of_a_round() -> None:
    found = RoundScore(1, {"a": 90.0, "b": 50.0, "c": 70.0})
    assert (found.average, found.worst) == (70.0, 50.0)
    assert found.spread == pytest.approx((800 / 3) ** 0.5)
    assert domain_accuracy([("b", 1, 2), ("a", 3, 4), ("b", 1, 1)]) == {"a": 75.0, "b": 75.0}


def test_rules_of_a_run() -> None:
    rounds = [RoundScore(n, {"a": float(10 * n), "b": 100.0 - 30 * (n == 3)}) for n in range(1, 4)]
    found = summarise(rounds, 2)
    assert found["final"]["accuracy"] == {"a": 30.0, "b": 70.0}
    assert found["last_n"]["accuracy"] == {"a": 25.0, "b": 85.0}
    assert found["last_n"]["rounds"] == 2
    assert found["last_n"]["average"] == 55.0
    assert found["best_round"]["round"] == 2
    assert summarise(rounds, 99)["last_n"]["rounds"] == 3
    assert summarise([], 5) == {}


# ---- copies and older versions ---------------------------------------------------------------------------------------


def test_a_run_is_copied_for_a_spreadsheet(tmp_path: Path) -> None:
    """With all columns, the scores on validation samples too, and nothing that a spreadsheet runs."""
    done = run(toy_settings("fedavg", tmp_path / "run", train={"rounds": 1}, overrides=("protocol.validation=0.2",)))
    scores, replies = write_csv([str(tmp_path)])
    with scores.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0]) == list(COLUMNS)
    assert {row["scored_on"] for row in rows} == {"test", "validation"}
    written = [float(row["macro_f1"]) for row in rows]
    assert written == [score_row(line)["macro_f1"] for line in read_lines(done.folder / "scores.jsonl")]
    with replies.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0]) == list(REPLY_COLUMNS)
    assert sum(int(row["bytes_up"]) for row in rows) == done.summary["bytes"]["up"]
    run(toy_settings("fedavg", tmp_path / "run", train={"rounds": 1}, overwrite=True))
    assert not scores.exists(), "they would be of the run before"
    assert not replies.exists()


def test_the_names_of_a_single_device_are_in_no_mean_of_losses() -> None:
    rows: list[dict[str, Any]] = []
    for value, samples in ((1.0, 10), (2.0, 30), (4.0, 20)):
        rows.append({"samples": samples, "losses": {"cross_entropy": value}})
    rows[1]["losses"]["contrast"] = 0.5  # of two of four
    rows[2]["losses"]["contrast"] = 0.7
    rows.append({"samples": 5, "losses": {f"term{number}": 1.0 for number in range(50)}})
    rows.append({"samples": 9})  # only scored
    assert mean_losses(rows) == {
        "cross_entropy": pytest.approx((10 + 60 + 80) / 60),
        "contrast": pytest.approx((15 + 14) / 50),
    }
    assert mean_losses([]) == {}


def test_a_run_of_an_older_version_is_refused_in_plain_words_and_kept(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path, train={"rounds": 1})
    run(settings)
    (tmp_path / "scores.jsonl").rename(tmp_path / "history.csv")
    before = sorted((path.name, path.stat().st_size) for path in tmp_path.glob("*"))
    longer = toy_settings("fedavg", tmp_path, train={"rounds": 2}, resume=True)
    for action in (lambda: run(longer), lambda: RunRecord(tmp_path).round_scores, lambda: RunRecord(tmp_path).replies):
        with pytest.raises(ConfigError, match=r"older version .* history\.csv.*another output=.*overwrite=true"):
            action()
    assert sorted((path.name, path.stat().st_size) for path in tmp_path.glob("*")) == before
    again = run(toy_settings("fedavg", tmp_path, train={"rounds": 1}, overwrite=True))
    assert len(RunRecord(again.folder).round_scores) == 2
    assert not (tmp_path / "history.csv").exists()


def test_a_file_that_cannot_be_made_is_named_by_its_own_name(tmp_path: Path) -> None:
    """The name of the temporary file beside it, which is longer, says nothing to a user."""
    path = tmp_path / f"{'a' * 245}.json"
    with pytest.raises(OSError, match="too long") as caught:
        write_text(path, "{}")
    assert caught.value.filename == str(path)
