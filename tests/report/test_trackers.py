from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from support.runs import TouchedEngine, run
from support.toy import toy_settings

from common.choices import CONF, trust
from common.composition import compose_config
from common.config import build, checked
from common.errors import ConfigError, some_of, summarised
from common.metrics import COUNTED
from common.scores import score_row
from common.settings import RunSettings
from goldfinch.trackers.base import ScalarTracker
from goldfinch.trackers.mlflow import MLflowTracker, metric_name
from goldfinch.trackers.scalars import Scalar
from goldfinch.trackers.wandb import WandbTracker
from server.run.events import plain_lines
from server.run.schema import read_lines
from server.run.trackers import Tracker, TrackerSettings

OPTIONS = sorted(path.stem for path in (CONF / "tracker").glob("*.yaml"))
Point = tuple[str, int, float]


def tracked(method: str, folder: Path, target: str, **more: Any) -> RunSettings:
    """Settings of a run with a tracker, from the path of the tracker's class."""
    return replace(toy_settings(method, folder, **more), tracker={"_target_": target})


def expected_points(folder: Path) -> set[Point]:
    """Every row of the run's own files as the points that a tracker must have."""
    points: set[Point] = set()
    for row in map(score_row, read_lines(folder / "scores.jsonl")):
        number = row["round"]
        points.add((f"accuracy/{row['domain']}/{row['client']}", number, row["accuracy"]))
        for metric in COUNTED:
            points.add((f"{metric}/{row['domain']}/{row['client']}", number, row[metric]))
            points.add((f"summary/{metric}/{row['domain']}", number, row[metric]))  # one client a domain
        points.add((f"test_loss/{row['domain']}/{row['client']}", number, row["loss"]))
    for line in read_lines(folder / "replies.jsonl"):
        if line["status"] in ("trained", "scaled", "scored"):
            points.add((f"bytes/up/{line['client']}", line["round"], line["bytes_up"]))
            points.add((f"seconds/train/{line['client']}", line["round"], line["seconds_train"]))
            for term, value in line["losses"].items():
                points.add((f"train_loss/{term}/{line['client']}", line["round"], value))
    assert len({number for _, number, _ in points}) == 4  # rounds 0 to 2, and the last trip, which only scores
    return points


def missing(expected: set[Point], found: set[Point]) -> set[Point]:
    """Expected points that are not among ``found`` to single precision."""
    near = {(tag, number, f"{value:.5g}") for tag, number, value in found}
    return {point for point in expected if (point[0], point[1], f"{point[2]:.5g}") not in near}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_tracker_option_is_a_checked_dataclass(name: str) -> None:
    raw = compose_config([f"tracker={name}"])
    assert isinstance(build(raw["tracker"], "tracker"), TrackerSettings)


def test_a_missing_library_is_an_error_before_the_run_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    settings = tracked("fedavg", tmp_path / "run", "goldfinch.trackers.wandb.WeightsAndBiases")
    with pytest.raises(ConfigError, match=r"pip install .*\[wandb\]"):
        run(settings)
    assert not (tmp_path / "run").exists()


def in_two_parts(folder: Path, target: str) -> None:
    """A tracked run that is stopped after its first round and resumed; in its second a client fails."""
    run(tracked("fpl", folder, target), stop_after=1)
    resumed = tracked("fpl", folder, target, resume=True)
    run(resumed, TouchedEngine(resumed, failing=lambda request: request.client == "dark-0" and request.round == 2))


def test_tensorboard_has_every_row_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    in_two_parts(tmp_path / "run", "goldfinch.trackers.tensorboard.TensorBoard")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    found = {(tag, event.step, event.value) for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}
    assert missing(expected_points(tmp_path / "run"), found) == set()
    assert [event.step for event in events.Scalars("round/seconds")] == [1, 2], "each round once"
    assert "settings/text_summary" in events.Tags()["tensors"]


def test_runs_that_share_a_folder_of_tensorboard_keep_their_own_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = {"_target_": "goldfinch.trackers.tensorboard.TensorBoard", "folder": str(tmp_path / "board")}
    done: dict[str, list[float]] = {}
    for seed in (0, 1):
        settings = toy_settings("fedavg", tmp_path / f"seed-{seed}", train={"rounds": 1}, seed=seed)
        made = run(replace(settings, tracker=tracker))
        (run_id,) = [entry["run"] for name, entry in made.events if name == "start"]
        done[run_id] = made.averages()
    for run_id, averages in done.items():
        events = EventAccumulator(str(tmp_path / "board" / run_id))
        events.Reload()
        assert [event.value for event in events.Scalars("summary/average")] == pytest.approx(averages)


def test_mlflow_has_every_row_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: make setup EXTRAS=mlflow")
    in_two_parts(tmp_path / "run", "goldfinch.trackers.mlflow.MLflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'run' / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("goldfinch").experiment_id])
    points = {
        (tag, metric.step, metric.value)
        for tag in found.data.metrics
        for metric in client.get_metric_history(found.info.run_id, tag)
    }
    assert missing(expected_points(tmp_path / "run"), points) == set()
    assert found.info.status == "FINISHED"
    assert found.data.params["train.batch_size"] == "8"


def test_wandb_writes_every_row_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: make setup EXTRAS=wandb")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    run(tracked("fpl", tmp_path / "run", "goldfinch.trackers.wandb.WeightsAndBiases"))
    (log,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    content = log.read_bytes()
    tags = {tag for tag, _, _ in expected_points(tmp_path / "run")}
    assert {tag for tag in tags if tag.encode() not in content} == set()


@dataclass
class Spy:
    """A tracker that keeps what it is told, and breaks at an event of a given name."""

    breaks_at: str = ""

    def __post_init__(self) -> None:
        self.told: list[str] = []
        self.closed = 0

    def __call__(self, name: str, entry: Mapping[str, Any]) -> None:
        self.told.append(name)
        if name == self.breaks_at:
            raise RuntimeError("the network is gone")

    def close(self) -> None:
        self.closed += 1


SPIES: list[Spy] = []


@checked
class SpySettings(TrackerSettings):
    """A tracker with a spy."""

    breaks_at: str = ""

    def trackers(self, settings: RunSettings) -> list[Tracker]:
        SPIES.append(Spy(self.breaks_at))
        return [SPIES[-1]]


def spied(settings: RunSettings, breaks_at: str = "") -> RunSettings:
    trust([f"{__name__}.SpySettings"])
    return replace(settings, tracker={"_target_": f"{__name__}.SpySettings", "breaks_at": breaks_at})


def test_a_tracker_that_breaks_does_not_break_the_run(tmp_path: Path) -> None:
    plain = run(toy_settings("fedavg", tmp_path / "plain"))
    broken = run(spied(toy_settings("fedavg", tmp_path / "broken"), "round done"))
    assert broken.sha256 == plain.sha256
    assert SPIES[-1].told.count("round done") == 1, "not asked again"
    (failure,) = [entry for name, entry in broken.events if name == "tracker failed"]
    assert failure == {"tracker": "Spy", "reason": "RuntimeError: the network is gone"}


def test_trackers_are_closed_when_the_run_fails(tmp_path: Path) -> None:
    settings = spied(toy_settings("fedavg", tmp_path / "run", rounds={"failures": 1}))
    with pytest.raises(Exception, match="BrokenError"):
        run(settings, TouchedEngine(settings, failing=lambda request: True))
    assert SPIES[-1].closed == 1


class Recorder(ScalarTracker):
    """A tracker that records how it is called."""

    def __init__(self, settings: RunSettings) -> None:
        super().__init__(settings)
        self.calls: list[tuple[object, ...]] = []

    def open(self, run: str, completed: int) -> None:
        self.calls.append(("open", run, completed))

    def log(self, found: Sequence[Scalar]) -> None:
        self.calls.append(("log", *found))

    def close(self) -> None:
        self.calls.append(("close", self.status))


@pytest.mark.parametrize(("name", "status"), [("stopped", "stopped"), ("round", "failed")])
def test_a_tracker_logs_from_its_opening_on_and_knows_how_the_run_ended(name: str, status: str, tmp_path: Path) -> None:
    tracker = Recorder(toy_settings("fedavg", tmp_path))
    tracker("validation", {"round": 0, "average": 9.0})  # nothing is logged before the run is open
    tracker("resume", {"run": "r1", "round": 1})
    tracker("validation", {"round": 1, "average": 10.0})
    tracker(name, {"round": 2})
    tracker.close()
    assert tracker.calls == [("open", "r1", 1), ("log", Scalar("summary/validation", 1, 10.0)), ("close", status)]


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        ("train_loss/cross_entropy/dark-0", "train_loss/cross_entropy/dark-0"),
        ("accuracy/Ward B é/ward-0", "accuracy/Ward B é/ward-0"),
        ("train_loss/a!/dark-0", "train_loss/a_/dark-0"),
        ("train_loss/../x", "train_loss/.._/x"),
        ("train_loss//x", "train_loss/_/x"),
    ],
)
def test_what_a_device_names_is_a_name_that_mlflow_accepts(tag: str, name: str) -> None:
    """MLflow refuses other characters, and names that are no plain path; then the tracker would log no more."""
    assert metric_name(tag) == name
    assert re.fullmatch(r"[/\w.\- :]*", name)
    assert posixpath.normpath(name) == name


def test_mlflow_and_wandb_get_batches_within_their_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both libraries are replaced by stand-ins, so that the calls are checked where neither is installed."""
    mlflow = MagicMock()
    mlflow.MlflowClient.return_value.search_runs.return_value = []
    wandb = MagicMock()
    for name, module in {"mlflow": mlflow, "mlflow.entities": mlflow.entities, "wandb": wandb}.items():
        monkeypatch.setitem(sys.modules, name, module)
    rows = [
        {"round": index % 2, "domain": "d", "client": f"c{index}", "accuracy": 1, "loss": 1} for index in range(501)
    ]
    settings = toy_settings("fedavg", tmp_path)
    for tracker in (MLflowTracker("uri", "experiment", settings), WandbTracker("project", "offline", settings)):
        tracker("start", {"run": "r1", "round": 0})
        tracker("scores", {"rows": rows})
        tracker("finish", {"round": 1, "sha256": "ab"})
        tracker.close()
    client = mlflow.MlflowClient.return_value
    sizes = [len(call.kwargs["metrics"]) for call in client.log_batch.call_args_list if "metrics" in call.kwargs]
    assert sizes == [1000, 2]
    assert client.set_terminated.call_args.args[1] == "FINISHED"
    logged = [call.args[0] for call in wandb.init.return_value.log.call_args_list]
    assert [(values["round"], len(values)) for values in logged] == [(0, 2 * 251 + 1), (1, 2 * 250 + 1)]
    assert wandb.init.return_value.finish.call_args.kwargs == {"exit_code": 0}


def test_equal_lines_of_many_clients_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show = plain_lines(toy_settings("fedavg", tmp_path))
    for number in range(40):
        reason = f"DataError: client left-{number} has {number} images"
        show("client failed", {"round": 1, "client": f"left-{number}", "reason": reason})
    show("client failed", {"round": 1, "client": "left-40", "reason": "killed"})
    for number in range(6):
        show("client lost", {"round": 2, "client": f"left-{number}", "reason": "its node is offline"})
    show("client lost", {"round": 3, "client": "left-1", "reason": "its node is offline"})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == (5 + 1 + 1) + (5 + 1) + 1
    assert "killed" in lines[5]
    assert "35 more clients" in lines[6]
    assert "1 more client: " in lines[12]


def test_reasons_of_many_nodes_are_summarised() -> None:
    reasons = [f"node {number}: DataError: client left-{number} has 1 image" for number in range(1000)]
    assert summarised(["node 7: out of memory", *reasons]) == [
        f"{reasons[0]} (and 999 like it)",
        "node 7: out of memory",
    ]
    assert some_of([str(number) for number in range(1500)], most=2) == "0, 1 and 1,498 more"
    assert some_of(["a", "b"]) == "a, b"
