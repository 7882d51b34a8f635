"""The round loop: quorum, refusals, deadlines missed, runs that stop and go on, folders that are taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import Run, TouchedEngine, run
from support.toy import toy_settings

from common.errors import CheckpointError, ConfigError, EngineError
from common.settings import with_method
from common.storage import GlobalState
from common.wire.messages import Request
from common.wire.payload import Payload
from goldfinch.record import RunRecord
from server.run.checkpoint import BEST, Checkpoints
from server.run.conduct import prepare_output
from server.run.engine import Admit, Failure
from server.run.rounds import RoundLoop
from server.run.schema import read_lines
from strategies.core.federation import Federation, Reply
from strategies.core.method import ClientContext, ServerContext, Update, Upload, UploadSpec
from strategies.fedavg import FedAvg


def failing_in(*rounds: int, clients: Sequence[str] = ("dark-0", "noisy-0")) -> Any:
    return lambda request: request.train and request.round in rounds and request.client in clients


def kinds(done: Any) -> list[str]:
    return [name for name, _ in done.events if name in ("round done", "round skipped", "stopped", "finish")]


def test_a_round_without_quorum_leaves_the_state_as_it_was(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path, train={"rounds": 3})
    done = run(settings, TouchedEngine(settings, failing=failing_in(2)))
    assert kinds(done) == ["round done", "round skipped", "round done", "finish"]
    skipped = next(entry for name, entry in done.events if name == "round skipped")
    assert (skipped["round"], skipped["answered"], skipped["needed"]) == (2, 1, 2)
    losses = {row["round"]: row["loss"] for row in done.history() if row["domain"] == "bright"}
    assert losses["1"] == losses["2"] != losses["3"]


def test_a_quorum_of_all_needs_all(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path, rounds={"quorum": 1.0}, train={"rounds": 2})
    done = run(settings, TouchedEngine(settings, failing=failing_in(1, clients=["dark-0"])))
    assert kinds(done) == ["round skipped", "round done", "finish"]


@pytest.mark.parametrize(
    ("quorum", "asked", "needed"), [(0.55, 100, 55), (0.28, 25, 7), (0.5, 3, 2), (1e-12, 4, 1), (1.0, 7, 7)]
)
def test_a_quorum_is_a_share_and_no_rounding_error_of_it(
    quorum: float, asked: int, needed: int, tmp_path: Path
) -> None:
    federation = Federation(toy_settings("fedavg", tmp_path, rounds={"quorum": quorum}))
    assert federation.needed(asked) == (needed, "rounds.quorum")


def test_a_round_whose_answers_are_too_few_for_a_bound_does_not_count(tmp_path: Path) -> None:
    """Two of three answers were averaged as they were, in a run whose record says ``rounds=guarded``."""
    few = toy_settings("fedavg", tmp_path / "guarded", rounds={"outliers": "clip", "quorum": 0.25}, train={"rounds": 2})
    done = run(few, TouchedEngine(few, failing=failing_in(1, clients=["dark-0"])))
    assert kinds(done) == ["round skipped", "round done", "finish"]
    skipped = next(entry for name, entry in done.events if name == "round skipped")
    assert (skipped["answered"], skipped["needed"], skipped["by"]) == (2, 3, "rounds.outliers")
    free = toy_settings("fedavg", tmp_path / "free", rounds={"quorum": 0.25}, train={"rounds": 2})
    done = run(free, TouchedEngine(free, failing=failing_in(1, clients=["dark-0"])))
    assert kinds(done) == ["round done", "round done", "finish"]


def test_too_many_rounds_without_quorum_end_the_run_and_it_can_go_on(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path, rounds={"failures": 2}, train={"rounds": 4})
    with pytest.raises(EngineError, match=r"rounds in a row that missed their quorum: 2.*round 3 is kept: resume=true"):
        run(settings, TouchedEngine(settings, failing=failing_in(2, 3)))
    again = run(replace(settings, resume=True))
    assert again.summary["rounds"] == 4
    assert kinds(again) == ["round done", "finish"]


def test_one_failed_round_between_good_ones_is_no_row(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path, rounds={"failures": 2}, train={"rounds": 6})
    done = run(settings, TouchedEngine(settings, failing=failing_in(1, 3, 5)))
    assert kinds(done).count("round skipped") == 3


class Silent(TouchedEngine):
    """Two of three clients never register."""

    def register(self, expected: Sequence[str], admit: Admit, seconds: float) -> list[Failure]:
        super().register(["dark-0"], admit, seconds)
        return [Failure("node 7", "refused", "DataError: no data here")]


def test_too_few_registrations_end_the_run_with_every_reason(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path)
    with pytest.raises(EngineError) as caught:
        run(settings, Silent(settings))
    text = str(caught.value)
    assert "only 1 of 3 clients registered" in text
    assert "missing: bright-0, noisy-0" in text
    assert "node 7: DataError: no data here" in text


class Late(TouchedEngine):
    """The noisy client registers only in the second round."""

    calls = 0

    def register(self, expected: Sequence[str], admit: Admit, seconds: float) -> list[Failure]:
        self.calls += 1
        return super().register([item for item in expected if item != "noisy-0" or self.calls > 2], admit, seconds)


def test_a_late_client_joins(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path, train={"rounds": 3})
    done = run(settings, Late(settings))
    rounds = {row["round"] for row in done.replies() if row["client"] == "noisy-0" and row["steps"] != "0"}
    assert rounds == {"2", "3"}
    missing = [entry["clients"] for name, entry in done.events if name == "missing"]
    assert missing == [["noisy-0"]]


class Stranger(TouchedEngine):
    """A node claims to be somebody else's client, and answers for it."""

    def exchange(
        self, message: Payload, requests: Mapping[str, Request], seconds: float, **more: Any
    ) -> tuple[list[Reply], list[Failure]]:
        replies, failures = super().exchange(message, requests, seconds, **more)
        forged = replace(replies[0], client="moon-0")
        return [*replies, forged, replies[0]], failures


def test_strangers_and_doubles_are_refused(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path / "strange", train={"rounds": 1})
    done = run(settings, Stranger(settings))
    refused = [(row["client"], row["reason"]) for row in done.replies() if row["status"] == "refused"]
    assert ("moon-0", "moon-0 was not asked in round 1") in refused
    assert ("bright-0", "bright-0 has answered already in round 1") in refused
    plain = run(toy_settings("fedavg", tmp_path / "plain", train={"rounds": 1}))
    assert done.sha256 == plain.sha256


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An undisturbed run of four rounds."""
    return run(toy_settings("fpl", tmp_path_factory.mktemp("whole"), train={"rounds": 4}))


def test_a_stopped_run_is_kept_and_continued_to_the_same_end(whole: Run, tmp_path: Path) -> None:
    stopped = run(toy_settings("fpl", tmp_path / "parts", train={"rounds": 4}), stop_after=2)
    assert kinds(stopped) == ["round done", "round done", "stopped"]
    assert stopped.summary["rounds"] == 2
    again = run(toy_settings("fpl", tmp_path / "parts", train={"rounds": 4}, resume=True))
    assert again.sha256 == whole.sha256
    assert again.history() == whole.history()
    assert again.summary["scores"] == whole.summary["scores"]
    assert again.summary["bytes"]["up"] == pytest.approx(whole.summary["bytes"]["up"], rel=1e-3)


def test_a_finished_run_resumed_stays_as_it_is_and_can_be_lengthened(whole: Run, tmp_path: Path) -> None:
    settings = toy_settings("fpl", tmp_path)
    first = run(settings)
    again = run(replace(settings, resume=True))
    assert (again.sha256, again.history()) == (first.sha256, first.history())
    scored = [entry["round"] for entry in read_lines(tmp_path / "events.jsonl") if entry["event"] == "score"]
    assert scored == [0, 1, 2]
    log, seconds = tmp_path / "events.jsonl", f'"seconds": {again.summary["wall_seconds"]}'
    assert log.read_text().count(seconds) == 1
    log.write_text(log.read_text().replace(seconds, '"seconds": 1000.0'))
    longer = run(toy_settings("fpl", tmp_path, train={"rounds": 4}, resume=True))
    assert (longer.sha256, longer.history()) == (whole.sha256, whole.history())
    assert longer.summary["wall_seconds"] > 1000, "those after the last checkpoint count, too"


def test_going_on_and_replacing_are_not_asked_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose one"):
        run(toy_settings("fpl", tmp_path, resume=True, overwrite=True))


@pytest.mark.parametrize(("method", "schedule"), [("fedproc", "constant"), ("fedavg", "cosine")])
def test_a_run_on_a_schedule_is_not_lengthened(method: str, schedule: str, tmp_path: Path) -> None:
    """FedProc weighs its terms by round / rounds: more rounds would be neither the short run nor the long one."""
    short = run(toy_settings(method, tmp_path, train={"schedule": schedule}), stop_after=1)
    with pytest.raises(CheckpointError, match=r"resume with train\.rounds=2"):
        run(toy_settings(method, tmp_path, train={"rounds": 4, "schedule": schedule}, resume=True))
    again = run(toy_settings(method, tmp_path, train={"schedule": schedule}, resume=True))
    assert (short.summary["rounds"], again.summary["rounds"]) == (1, 2)


def test_another_run_s_folder_is_not_touched(tmp_path: Path) -> None:
    run(toy_settings("fpl", tmp_path))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"already holds a run; add resume=true.*overwrite=true"):
        run(toy_settings("fpl", tmp_path))
    with pytest.raises(CheckpointError, match="method=fedavg, which was fpl"):
        run(toy_settings("fedavg", tmp_path, resume=True))
    with pytest.raises(CheckpointError, match=r"done: seed=1, which was 0\."):
        run(toy_settings("fpl", tmp_path, resume=True, seed=1))
    with pytest.raises(CheckpointError, match=r"train\.learning_rate=0\.5, which was 0\.\d+\."):
        run(toy_settings("fpl", tmp_path, resume=True, train={"learning_rate": 0.5}))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_overwriting_leaves_nothing_of_the_old_run(tmp_path: Path) -> None:
    run(toy_settings("feddyn", tmp_path, overrides=("protocol.validation=0.2",)))
    assert (tmp_path / "clients").is_dir()
    assert Checkpoints(tmp_path / "checkpoint", kind=BEST).series.numbers()
    done = run(toy_settings("fedavg", tmp_path, train={"rounds": 1}, overwrite=True))
    assert len(done.replies()) == 6
    assert Checkpoints(tmp_path / "checkpoint").series.numbers() == [1]
    assert not Checkpoints(tmp_path / "checkpoint", kind=BEST).series.numbers()
    assert "validation" not in done.summary
    assert not (tmp_path / "clients").exists()
    assert RunRecord.open(tmp_path).summary["method"] == "fedavg"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write to .*choose another output="):
        prepare_output(toy_settings("fpl", tmp_path / "file" / "run"))


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no run: config\.yaml is missing"):
        RunRecord.open(tmp_path)
    prepare_output(toy_settings("fedavg", tmp_path))
    with pytest.raises(ConfigError, match=r"holds no finished run: .*goldfinch resume"):
        RunRecord.open(tmp_path)


def test_scores_are_taken_every_given_number_of_rounds_and_at_the_end(tmp_path: Path) -> None:
    done = run(toy_settings("fedavg", tmp_path, train={"rounds": 5}, rounds={"evaluate_every": 3}))
    assert sorted({int(row["round"]) for row in done.history()}) == [0, 3, 5]


@dataclass(frozen=True)
class Twice(FedAvg):
    """Two exchanges: the second only asks whether the first arrived."""

    exchanges = ("train", "again")

    def respond(self, local: ClientContext) -> Upload:
        return Upload(weights={}, extra={"seen": local.extra["seen"] + 1})

    def download(self, state: GlobalState, server: ServerContext) -> Any:
        base = super().download(state, server)
        return base if server.exchange == "train" else replace(base, extra=state.extra)

    def expects(self, server: ServerContext) -> UploadSpec:
        if server.exchange == "train":
            return super().expects(server)
        return UploadSpec(weights=False, extra={"seen": (torch.int64, (1,))})

    def aggregate(self, state: GlobalState, updates: Sequence[Update], server: ServerContext) -> GlobalState:
        if server.exchange == "train":
            return replace(super().aggregate(state, updates, server), extra={"seen": torch.tensor([server.round])})
        return replace(state, extra={"seen": sum(update.extra["seen"] for update in updates)})


def test_a_round_that_fails_in_its_second_exchange_is_undone_whole(tmp_path: Path) -> None:
    settings = with_method(toy_settings("fedavg", tmp_path / "failing", train={"rounds": 3}), Twice())
    engine = TouchedEngine(
        settings,
        failing=lambda request: request.round == 2 and request.exchange == "again" and request.client != "dark-0",
    )
    rounds = RoundLoop(settings, engine)
    prepare_output(settings)
    state = rounds.run()
    assert state.extra["seen"].tolist() == [3 * (3 + 1)]
    plain = run(toy_settings("fedavg", tmp_path / "plain", train={"rounds": 1}))
    scores = read_lines(settings.output_folder / "scores.jsonl")
    losses = {row["round"]: row["loss"] for row in scores if row["domain"] == "dark"}
    assert losses[1] == losses[2] != losses[3]
    assert str(losses[1]) == [row["loss"] for row in plain.history() if row["domain"] == "dark"][-1]


def test_a_round_that_fails_in_the_exchange_that_scores_it_has_no_score(tmp_path: Path) -> None:
    """The state that its clients scored is discarded."""
    settings = toy_settings("rucr", tmp_path, train={"rounds": 3})
    assert settings.method.scored_at == "rebalance"
    engine = TouchedEngine(
        settings,
        failing=lambda request: request.round == 2 and request.exchange == "rebalance" and request.client != "dark-0",
    )
    done = run(settings, engine)
    assert kinds(done) == ["round done", "round skipped", "round done", "finish"]
    assert {row["round"] for row in done.history()} == {"1", "3"}


def test_who_fails_in_the_first_exchange_is_not_asked_in_the_second(tmp_path: Path) -> None:
    settings = with_method(toy_settings("fedavg", tmp_path, train={"rounds": 1}), Twice())
    engine = TouchedEngine(settings, failing=lambda request: request.client == "dark-0" and request.exchange == "train")
    run(settings, engine)
    asked = [item.request.client for item in engine.messages if item.request.exchange == "again"]
    assert asked == ["bright-0", "noisy-0"]


class Narrow(FedAvg):
    """It expects a tensor that messages cannot contain."""

    def expects(self, server: ServerContext) -> UploadSpec:
        return UploadSpec(extra={"signs": (torch.int8, (server.feature_size,))})


def test_a_method_that_expects_what_messages_cannot_contain_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    settings = with_method(toy_settings("fedavg", tmp_path), Narrow())
    engine = TouchedEngine(settings)
    with pytest.raises(ConfigError, match=r"\.expects: signs is torch\.int8, not one of torch\.int64, "):
        RoundLoop(settings, engine).run()
    assert not engine.messages
