"""A resumed run names what has changed, keeps what it recorded, and no other process writes to its folder."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console
from support.runs import Run, TouchedEngine, run
from support.toy import CLASSES, ChangedToy, Toy, attacked_settings, toy_settings

from common.config import checked
from common.data.batches import Split
from common.data.domain import Domain, _load
from common.errors import CheckpointError, ConfigError, EngineError
from common.prototypes import PrototypeSet
from common.run_config import read_config
from common.settings import RunSettings, load_settings
from common.storage import GlobalState
from common.versions import code_files, package_versions
from common.wire.messages import Request
from common.wire.payload import Payload
from goldfinch.cli import main
from goldfinch.record import RunRecord
from goldfinch.trackers.live import LiveView
from server.engines.inline import InlineEngine
from server.flower.submit import _following
from server.run.checkpoint import Checkpoints
from server.run.conduct import prepare_output, run_federation
from server.run.events import Subject
from server.run.history import History
from server.run.resume import KILLED


def settings(folder: Path, rounds: int = 1, method: str = "fedavg", **more: Any) -> RunSettings:
    return toy_settings(method, folder, train={"rounds": rounds}, **more)


def events(folder: Path, name: str) -> list[Mapping[str, Any]]:
    return [entry for entry in RunRecord(folder).events if entry["event"] == name]


@pytest.fixture(scope="module")
def one_round(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    return run(settings(tmp_path_factory.mktemp("one round"))).folder


@pytest.fixture
def finished(one_round: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return shutil.copytree(one_round, tmp_path / "run")


# ---- a clock that was set back ---------------------------------------------------------------------------------------


def test_a_part_after_the_clock_was_set_back_is_later_than_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices know the killed part's number, and the checkpoint does not."""

    def at(seconds: int) -> None:
        monkeypatch.setattr("strategies.core.federation.time.time_ns", lambda: seconds * 10**9)

    class KilledError(RuntimeError):
        pass

    def kill(request: Request, payload: Payload) -> Payload:
        if request.round == 3 and request.client == "noisy-0":
            raise KilledError
        return payload

    at(1_800_000_000)
    run(settings(tmp_path / "killed", 2, "scaffold"))
    at(1_800_010_000)
    killed = settings(tmp_path / "killed", 4, "scaffold", resume=True)
    with pytest.raises(KilledError):
        run(killed, TouchedEngine(killed, edit=kill))
    at(1_800_000_005)
    done = run(settings(tmp_path / "killed", 4, "scaffold", resume=True))
    assert {row["status"] for row in done.replies() if row["round"] in ("3", "4")} == {"trained"}
    assert done.summary["state_sha256"] == run(settings(tmp_path / "at once", 4, "scaffold")).summary["state_sha256"]


@pytest.mark.parametrize("name", ["events.jsonl", "scores.jsonl", "replies.jsonl"])
def test_a_run_without_a_record_of_its_rounds_does_not_go_on(name: str, tmp_path: Path) -> None:
    run(settings(tmp_path))
    (tmp_path / name).unlink()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=rf"has a checkpoint and no {name}.*restore it.*overwrite=true"):
        run(settings(tmp_path, 2, resume=True))
    assert sorted(tmp_path.rglob("*")) == before
    assert run(settings(tmp_path, 2, overwrite=True)).summary["rounds"] == 2


# ---- one writer a folder ---------------------------------------------------------------------------------------------


def test_of_two_runs_started_in_one_folder_the_second_is_refused(tmp_path: Path) -> None:
    first, second = settings(tmp_path), settings(tmp_path, method="fpl")
    prepare_output(first)
    prepare_output(second)
    summary = run_federation(first, InlineEngine(first))
    assert read_config(tmp_path / "config.yaml")["method"]["_target_"] == "strategies.fedavg.FedAvg"
    with pytest.raises(ConfigError, match="already holds a run; add resume=true"):
        run_federation(second, InlineEngine(second))
    assert RunRecord.open(tmp_path).summary == summary
    assert run(settings(tmp_path, 2, resume=True)).summary["rounds"] == 2


def test_a_start_between_check_and_end_is_reported(tmp_path: Path) -> None:
    first, second = settings(tmp_path), settings(tmp_path, method="fpl")
    prepare_output(second)

    def start(name: str, entry: Mapping[str, Any]) -> None:
        with pytest.raises(ConfigError, match="another process is writing a run"):
            run_federation(second, InlineEngine(second))

    prepare_output(first)
    run_federation(first, InlineEngine(first), [start])
    assert RunRecord.open(tmp_path).summary["method"] == "fedavg"


def test_what_got_nowhere_is_replaced_whole(tmp_path: Path) -> None:
    prepare_output(settings(tmp_path, method="fpl"))
    (tmp_path / "summary.json").write_text("{}")
    run(settings(tmp_path, resume=True))
    assert read_config(tmp_path / "config.yaml")["method"]["_target_"] == "strategies.fedavg.FedAvg"
    assert RunRecord.open(tmp_path).summary["method"] == "fedavg"


# ---- what it keeps and prints ----------------------------------------------------------------------------------------


def test_more_rounds_are_recorded_and_a_run_that_is_continued_is_not_finished(tmp_path: Path) -> None:
    run(settings(tmp_path, 2))
    assert RunRecord(tmp_path).status == "finished"

    class Crash(BaseException):
        pass

    def crash(name: str, entry: Mapping[str, Any]) -> None:
        assert RunRecord(tmp_path).status == ("finished" if name == "registered" else "unfinished")
        if name == "round done":
            raise Crash

    again = settings(tmp_path, 4, resume=True)
    with pytest.raises(Crash):
        run_federation(again, InlineEngine(again), [crash])
    assert read_config(tmp_path / "config.yaml")["train"]["rounds"] == 4
    assert RunRecord(tmp_path).status == "unfinished"
    with pytest.raises(ConfigError, match=r"no finished run"):
        RunRecord.open(tmp_path)
    assert run(again).summary["rounds"] == 4
    assert RunRecord(tmp_path).status == "finished"


def test_what_flower_s_server_writes_again_is_not_shown_again(tmp_path: Path) -> None:
    before = History(tmp_path)
    started = {"clients": [], "rounds": 1, "method": "a", "data": "b", "scored": "global model", "processor": {}}
    before.event("start", round=0, **started)
    before.event("round done", round=1, seconds=1.0)
    shown: list[str] = []
    path, listeners = tmp_path / "events.jsonl", [lambda name, _: shown.append(name)]
    with _following(path, listeners) as spoke:
        after = History(tmp_path, last=1, last_scored=0)
    assert not spoke.is_set()
    with _following(path, listeners) as spoke:
        after.event("resume", round=1, **started)
        after.event("round done", round=2, seconds=1.0)
    assert spoke.is_set()
    assert shown == ["resume", "round done"]


def test_the_best_so_far_is_that_of_all_parts(tmp_path: Path) -> None:
    run(settings(tmp_path, 2))
    before = RunRecord(tmp_path).round_scores[:2]  # the last one is scored again
    run(settings(tmp_path, 3, resume=True))
    assert not events(tmp_path, "interrupted")
    (told,) = [entry for entry in RunRecord(tmp_path).told_events() if entry["event"] == "resume"]
    assert told["best"]["average"] == max(score.average for score in before)
    assert set(told["best"]) == {"bright", "dark", "noisy", "average", "worst"}
    screen = StringIO()
    view = LiveView(Subject.of(settings(tmp_path)), console := Console(file=screen, width=100, force_terminal=False))
    view("resume", {**told, "best": {"bright": 88.8}})
    view("score", {"round": 3, "accuracy": {"bright": 50.0}, "average": 50.0, "worst": 50.0})
    console.print(view)
    assert "88.8" in screen.getvalue()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"strategies/fedavg.py": "0" * 16}, "strategies/fedavg.py"),
        ({f"gone/{number}.py": "0" for number in range(8)}, "gone/4.py, 3 more"),
    ],
    ids=["a file", "many"],
)
def test_changed_code_is_named(changes: dict[str, str], named: str, finished: Path) -> None:
    record = json.loads((finished / "code.json").read_text())
    assert record == {**code_files(settings(finished).own_packages), **package_versions()}
    (finished / "code.json").write_text(json.dumps(record | changes))
    done = run(settings(finished, 2, resume=True))
    (told,) = events(finished, "code changed")
    assert told["reason"].endswith(named)
    assert [name for name, _ in done.events].count("code changed") == 1
    assert json.loads((finished / "code.json").read_text()) == record


def test_a_damaged_record_of_the_code_is_a_change(finished: Path) -> None:
    (finished / "code.json").write_text("[")
    run(settings(finished, 2, resume=True))
    assert "code.json" in events(finished, "code changed")[0]["reason"]


def changed(folder: Path, resume: bool | str) -> RunSettings:
    """A run of the same settings on files that have changed."""
    chosen = settings(folder, 2, resume=resume)
    object.__setattr__(chosen, "data", ChangedToy(changed_domain="dark"))
    return chosen


def test_changed_data_are_refused_and_nothing_is_lost(finished: Path) -> None:
    names = ("scores.jsonl", "replies.jsonl", "config.yaml", "summary.json")
    before = [(finished / name).read_bytes() for name in names]
    for _ in range(2):  # it does not get used to them
        with pytest.raises(CheckpointError, match=r"other data of dark-0 \(content\): .*resume=anyway"):
            run(changed(finished, resume=True))
    assert [(finished / name).read_bytes() for name in names] == before
    assert [entry["round"] for entry in events(finished, "score")] == [0, 1]
    assert [entry["client"] for entry in events(finished, "registration refused")] == ["dark-0"] * 2
    again = run(changed(finished, resume="anyway"))
    assert again.summary["rounds"] == 2
    assert "dark-0 (content)" in dict(again.events)["data changed"]["reason"]
    run(changed(finished, resume=True))  # they are its own now


@checked
class OtherTestImages(Toy):
    """The toy data with other test images of one domain, as many as before."""

    def _read(self, domain: str) -> Domain:
        found = super()._read(domain)
        if domain != "dark":
            return found
        return replace(found, test=Split(255 - found.test.images, found.test.labels))


@pytest.mark.parametrize("part", ["validation", "test"])
def test_changed_images_that_are_only_scored_are_refused(part: str, tmp_path: Path) -> None:
    chosen = settings(tmp_path, overrides=("protocol.validation=0.2",))
    run(chosen)
    (dark,) = (spec for spec in chosen.clients if spec.domain == "dark")
    _, validated = chosen.protocol.parts(Toy().load("dark"), dark, chosen.seed)
    data: Toy = OtherTestImages()
    if part == "validation":
        data = ChangedToy(changed=tuple(validated.tolist()), changed_domain="dark")
    again = settings(tmp_path, 2, overrides=("protocol.validation=0.2",), resume=True)
    object.__setattr__(again, "data", data)
    with pytest.raises(CheckpointError, match=r"other data of dark-0 \(content\)"):
        run(again)


def test_a_resumed_run_knows_how_many_test_images_a_domain_had(finished: Path) -> None:
    def fewer(request: Request, payload: Payload) -> Payload:
        scores = [{**score, "count": 4, "correct": 1, "confusion": []} for score in payload.header["scores"]]
        return replace(payload, header={**payload.header, "scores": scores})

    again = settings(finished, 2, resume=True)
    with pytest.raises(EngineError, match=r"over 4 test images; earlier ones were over 16: restore .*resume=anyway"):
        run(again, TouchedEngine(again, edit=fewer))
    anyway = settings(finished, 3, resume="anyway")
    assert run(anyway, TouchedEngine(anyway, edit=fewer)).summary["rounds"] == 3


def test_a_resumed_run_asks_another_client_for_the_score_of_one_that_was_lost(tmp_path: Path) -> None:
    def absent(folder: str, **more: Any) -> Run:
        chosen = attacked_settings("absent", "fedavg", tmp_path / folder, train={"rounds": 3}, **more)
        return run(chosen, stop_after=None if more or folder == "at once" else 1)

    absent("in two")
    assert absent("in two", resume=True).history() == absent("at once").history()


def test_a_relative_root_is_found_from_everywhere_and_changed_images_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for domain in ("left", "right"):
        for number in range(8):
            path = tmp_path / "images" / domain / f"class{number % 2}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), (number * 30, 100 * (domain == "left"), 0)).save(path)
    monkeypatch.chdir(tmp_path)
    words = ["data=folder", "data.root=images", "method=fedavg", "train.rounds=1", "train.batch_size=4", "output=run"]
    assert load_settings(words).identity == load_settings([*words, f"data.root={tmp_path}/images"]).identity
    assert main(["run", "--quiet", *words]) == 0
    assert read_config(tmp_path / "run" / "config.yaml")["data"]["root"] == str(tmp_path / "images")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["resume", str(tmp_path / "run"), "train.rounds=2", "--quiet"]) == 0
    for path in tmp_path.glob("images/left/class0/*.png"):
        Image.new("RGB", (32, 32), (9, 9, 9)).save(path)
    _load.cache_clear()
    assert main(["resume", str(tmp_path / "run"), "train.rounds=3", "--quiet"]) == 1
    assert "other data of left-0 (content)" in capsys.readouterr().err
    assert main(["resume", str(tmp_path / "run"), "train.rounds=3", "resume=anyway", "--quiet"]) == 0


# ---- a checkpoint of something else ----------------------------------------------------------------------------------


def other_class(state: GlobalState) -> GlobalState:
    prototypes = state.prototypes
    labels = prototypes.labels.clone()
    labels[-1] = CLASSES
    return replace(state, prototypes=PrototypeSet(prototypes.vectors, labels, prototypes.weights))


def fewer_columns(state: GlobalState) -> GlobalState:
    prototypes = state.prototypes
    return replace(state, prototypes=PrototypeSet(prototypes.vectors[:, 1:], prototypes.labels, prototypes.weights))


def shorter_control(state: GlobalState) -> GlobalState:
    name = max(state.extra, key=lambda each: state.extra[each].ndim)
    return replace(state, extra={**state.extra, name: state.extra[name][1:]})


@pytest.mark.parametrize(
    ("method", "change", "said"),
    [
        ("fpl", other_class, "prototypes are of classes"),
        ("fpl", fewer_columns, "prototypes have"),
        ("scaffold", shorter_control, "is missing or has another shape"),
    ],
)
def test_a_checkpoint_is_checked_like_a_reply(
    method: str, change: Callable[[GlobalState], GlobalState], said: str, tmp_path: Path
) -> None:
    """Its hash fits: whoever wrote it may have made it so."""
    run(settings(tmp_path / "run", method=method))
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoint")
    checkpoint = checkpoints.load()
    assert checkpoint is not None
    checkpoints.replace(replace(checkpoint, state=change(checkpoint.state)))
    before = (tmp_path / "run" / "scores.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=said):
        run(replace(settings(tmp_path / "run", 2, method=method), resume=True))
    assert (tmp_path / "run" / "scores.jsonl").read_bytes() == before


# ---- why a part of a run ended ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "reason"),
    [(KeyboardInterrupt(), "Ctrl-C"), (RuntimeError("odd"), "RuntimeError: odd")],
    ids=["Ctrl-C", "another error"],
)
def test_a_part_that_is_interrupted_says_why(error: BaseException, reason: str, tmp_path: Path) -> None:
    chosen = settings(tmp_path, 2)

    def strike(name: str, entry: Mapping[str, Any]) -> None:
        if name == "round" and entry["round"] == 2:
            raise error

    with pytest.raises(type(error)):
        run_federation(chosen, InlineEngine(chosen), [strike])
    assert [entry["reason"] for entry in events(tmp_path, "interrupted")] == [reason]
    run(replace(chosen, resume=True))
    assert [entry["reason"] for entry in events(tmp_path, "interrupted")] == [reason], "said once"


SIGNALLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
from support.toy import toy_settings
from server.engines.inline import InlineEngine
from server.run.conduct import run_federation
from server.run.signals import terminable
settings = toy_settings("fedavg", Path(sys.argv[2]), train={"rounds": 3})
def strike(name, entry):
    if name == "round" and entry["round"] == 2:
        os.kill(os.getpid(), int(sys.argv[3]))
with terminable():
    run_federation(settings, InlineEngine(settings), [strike])
"""


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGTERM, "a signal to its process, or flwr stop"), (signal.SIGKILL, KILLED)],
    ids=["SIGTERM", "SIGKILL"],
)
@pytest.mark.long
def test_a_resumed_run_says_how_the_part_before_ended(number: int, reason: str, tmp_path: Path) -> None:
    tests, struck = Path(__file__).parent.parent, tmp_path / "struck"
    words = [sys.executable, "-c", SIGNALLED, str(tests), str(struck), str(int(number))]
    done = subprocess.run(words, cwd=tests.parent, check=False, capture_output=True, timeout=120)
    assert done.returncode != 0, done.stderr.decode()
    whole = run(settings(tmp_path / "whole", 3))
    resumed = run(replace(settings(struck, 3), resume=True))
    assert [entry["reason"] for entry in events(struck, "interrupted")] == [reason]
    assert resumed.sha256 == whole.sha256
