"""What a run leaves on the disk survives a crash anywhere, and is never mistaken for another run's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import CheckpointError
from common.metrics import RoundScore, domain_accuracy, summarise
from common.prototypes import PrototypeSet
from common.storage import GlobalState, read_tensors, write_tensors
from server.run.checkpoint import Checkpoint, Checkpoints
from server.run.conduct import bytes_total
from server.run.history import ACTIVITY, SCORES, History, read_rows


def state(number: int) -> GlobalState:
    weights = {"w": torch.full((20, 30), float(number)), "n": torch.tensor(number)}
    prototypes = PrototypeSet(torch.ones(2, 3), torch.tensor([0, 1]), torch.tensor([1.0, 2.0]))
    return GlobalState(weights, prototypes, {"h": torch.ones(3)}, round=number)


def checkpoint(number: int) -> Checkpoint:
    return Checkpoint(state(number), "run", "fpl", "abcd", 7, 12)


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
    return {**row, "correct": correct, "accuracy": 10.0 * correct, "loss": 0.25}


def activity(number: int, **more: Any) -> dict[str, Any]:
    return {"round": number, "exchange": "train", "client": "signs-0", "domain": "signs", "status": "trained", **more}


def filled(folder: Path) -> History:
    history = History(folder)
    history.event("start", round=0)
    for number in range(1, 4):
        history.add_scores([score(number - 1)])
        history.event("score", round=number - 1, average=1.0)
        history.add_activity([activity(number, bytes_up=10, bytes_down=3)])
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
    history.add_activity([activity(1, losses='{"a": 1}', reason='answered "no",\nthen left')])
    assert told[0] == "start"
    assert (tmp_path / "history.csv").read_text().splitlines()[0] == ",".join(SCORES)
    rows = read_rows(tmp_path / "activity.csv")
    assert list(rows[0]) == list(ACTIVITY)
    assert rows[0]["reason"] == 'answered "no",\nthen left'
    assert history.round_scores() == [RoundScore(0, {"signs": 50.0, "sketch": 100.0})]


def test_a_new_run_starts_with_empty_records(tmp_path: Path) -> None:
    filled(tmp_path)
    History(tmp_path)
    assert not any(read_rows(tmp_path / name) for name in ("history.csv", "activity.csv"))
    assert events(tmp_path) == []


def test_a_resumed_run_drops_what_it_will_write_again(tmp_path: Path) -> None:
    filled(tmp_path)
    again = History(tmp_path, 2, 1)
    assert [row["round"] for row in read_rows(tmp_path / "history.csv")] == ["0", "1"]
    assert [row["round"] for row in read_rows(tmp_path / "activity.csv")] == ["1", "2"]
    assert ("round done", 3) not in events(tmp_path)
    assert ("round done", 2) in events(tmp_path)
    assert [entry for entry in events(tmp_path) if entry[0] == "score"] == [("score", 0), ("score", 1)]
    assert bytes_total(read_rows(tmp_path / "activity.csv")) == {"up": 20, "down": 6}
    again.add_scores([score(2, correct=7)])
    assert [found.accuracy["signs"] for found in again.round_scores()] == [50, 50, 70]


def test_failed_clients_have_no_bytes(tmp_path: Path) -> None:
    history = filled(tmp_path)
    history.add_activity([activity(3, status="failed", reason="boom")])
    assert bytes_total(read_rows(tmp_path / "activity.csv")) == {"up": 30, "down": 9}
    History(tmp_path, 3, 3)
    assert bytes_total(read_rows(tmp_path / "activity.csv")) == {"up": 30, "down": 9}


@pytest.mark.parametrize("name", ["history.csv", "activity.csv", "events.jsonl"])
def test_a_last_line_torn_anywhere_is_dropped(name: str, tmp_path: Path) -> None:
    for cut in range(1, 25):
        filled(tmp_path)
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[:-cut])
        History(tmp_path, 9, 9)
        assert len(read_rows(tmp_path / "history.csv")) == (2 if name == "history.csv" else 3)
        assert len(read_rows(tmp_path / "activity.csv")) == (2 if name == "activity.csv" else 3)
        assert len(events(tmp_path)) == (6 if name == "events.jsonl" and cut > 1 else 7)  # its end shows in itself


def test_a_line_torn_within_quotes_is_dropped(tmp_path: Path) -> None:
    history = filled(tmp_path)
    history.add_activity([activity(3, status="failed", reason='a\nb, "c"\nd')])
    content = (tmp_path / "activity.csv").read_text()
    (tmp_path / "activity.csv").write_text(content[: content.rindex("b, ") + 12])
    History(tmp_path, 9, 9)
    assert len(read_rows(tmp_path / "activity.csv")) == 3


# ---- scores ----------------------------------------------------------------------------------------------------------


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


def test_rows_of_earlier_rounds_are_not_kept_in_memory(tmp_path: Path) -> None:
    history = History(tmp_path)
    for number in range(1, 6):
        history.add_activity([activity(number), activity(number, client="sketch-0")])
        assert history.round_totals(number)["outcomes"] == {"trained": 2}
    held = [row for value in vars(history).values() if isinstance(value, list) for row in value]
    assert {row["round"] for row in held} == {5}
    assert len(read_rows(tmp_path / "activity.csv")) == 10
