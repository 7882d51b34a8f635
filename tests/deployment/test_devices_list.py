"""``goldfinch devices list``: from records that a test writes, and of real devices."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from support.faults import wait_until
from support.gauges import read_gauges
from support.records import change_events, rewrite
from support.toy import toy_settings

from common.errors import EngineError
from common.settings import load_settings
from goldfinch.cli import main
from goldfinch.commands.deployment import METRICS, LocalDeployment
from goldfinch.commands.device_list import ListedDevice, _cells, devices
from goldfinch.record import RunRecord
from goldfinch.results.contributions import Contribution, contributions
from server.admission.enrolment import Enrolment
from server.engines.inline import InlineEngine
from server.run.conduct import prepare_output, run_federation


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("devices") / "first"
    settings = toy_settings("fedavg", folder, train={"rounds": 3, "local_steps": 1})
    prepare_output(settings)
    run_federation(settings, InlineEngine(settings))
    return folder


def test_its_help_explains_each_column_and_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "list", "--help"]) == 0
    help_text = capsys.readouterr().out
    for column in _cells(ListedDevice("ward-a", "ward-a-0", "online")):
        assert re.search(rf"^  (.*, )?{column}(, .*)?  ", help_text, re.MULTILINE), column
    assert "exit status" in help_text


def test_a_silent_superlink_does_not_make_devices_offline_for_a_monitor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not known is left out; a device that the SuperLink answers not to know is not online."""
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "ward-a.pub").write_text("a key\n")
    (tmp_path / "nodes" / "ward-a.number").write_text("7 ward-a-0\n")
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    words = ["devices", "list", str(tmp_path), "--metrics", str(tmp_path / "server.prom")]
    umask = os.umask(0o077)
    for answer, online in ((EngineError("no answer"), None), ({}, 0.0), ({"7": {"status": "online"}}, 1.0)):
        monkeypatch.setattr(Enrolment, "nodes", mock.Mock(side_effect=[answer]))
        assert main(words) == 0
        assert read_gauges(tmp_path / "server.prom").get('device_online{device="ward-a"}') == online
    os.umask(umask)
    assert (tmp_path / "server.prom").stat().st_mode & 0o777 == 0o644, "an exporter is another user"


def test_each_reply_has_the_time_at_which_it_arrived(run: Path) -> None:
    record = RunRecord(run)
    times = [line["time"] for line in record.replies]
    began, *_, ended = [entry["time"] for entry in record.events]
    assert times == sorted(times)
    assert began <= times[0] < times[-1] <= ended


def test_missed_rounds_count_from_the_last_reply_that_counted_over_runs(run: Path, tmp_path: Path) -> None:
    record = RunRecord(run)
    client = str(record.replies[0]["client"])
    last = max(line["time"] for line in record.replies if line["client"] == client)
    found = contributions([record])[client]
    assert found == replace(Contribution(), last_reply=last, last_run="first", version=found.version)
    assert found.version

    second = tmp_path / "second"
    second.mkdir()
    for path in run.iterdir():
        if path.is_file():
            (second / path.name).write_bytes(path.read_bytes())
    rewrite(second / "events.jsonl", lambda line: {**line, "time": line["time"] + 1e6})
    rewrite(
        second / "replies.jsonl",
        lambda line: {**line, "time": line["time"] + 1e6} | ({"status": "lost"} if line["client"] == client else {}),
    )
    both = contributions([RunRecord(second), record])
    rounds = {line["round"] for line in record.replies if line["client"] == client}
    assert both[client].missed == len(rounds)
    assert both[client].last_run == "first"
    assert both[client].last_reply == last
    others = [each for name, each in both.items() if name != client]
    assert {(each.missed, each.last_run) for each in others} == {(0, "second")}


def test_a_rehearsal_in_a_simulation_is_no_contact_with_a_device(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = RunRecord(run)
    client = str(record.replies[0]["client"])
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "ward-a.pub").write_text("a key\n")
    (tmp_path / "nodes" / "ward-a.number").write_text(f"7 {client}\n")
    monkeypatch.setattr(Enrolment, "nodes", mock.Mock(return_value={}))
    (device,), _ = devices(Enrolment(tmp_path, None, {}), [record], 0.0)
    assert device.contribution == Contribution()


@pytest.mark.long
def test_the_report_shows_when_each_client_was_last_there(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = run.parent / "report.html"
    assert main(["report", str(run), "--output", str(page)]) == 0
    assert "Devices of" not in page.read_text(), "a simulation has none"
    change_events(run, "registered", clock_ahead=-2.4)
    assert main(["report", str(run), "--output", str(page)]) == 0
    capsys.readouterr()
    text = page.read_text()
    assert "last reply" in text
    assert "-2 s" in text


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalDeployment, Path]]:
    """Two devices, one of them dismissed after a run, and a key that was never enrolled."""
    folder = tmp_path_factory.mktemp("deployed")
    output = folder / "runs" / "one"
    words = ["method=fedavg", "data=glyphs", "data.domains=[sketch,printed]", "protocol.samples=24", "model=small"]
    words += ["train.device=cpu", "train.rounds=1", "train.local_steps=1", "rounds.test_samples=8", f"output={output}"]
    nodes = {"sketch-0": {"domain": "sketch"}, "printed-0": {"domain": "printed"}}
    with LocalDeployment(folder / "deployment", nodes) as deployment:
        deployment.run(load_settings(words))
        deployment.enrolment.dismiss("printed-0")
        yield deployment, output


@pytest.mark.processes
@pytest.mark.long
def test_real_devices_are_listed_with_contact_runs_and_dismissal(
    deployed: tuple[LocalDeployment, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    deployment, output = deployed
    monkeypatch.setenv("FLWR_HOME", str(deployment.home))
    words = ["devices", "list", str(deployment.certificates.folder), str(output.parent), "--connection", "deployment"]
    metrics = tmp_path / "server.prom"
    assert main([*words, "--metrics", str(metrics)]) == 0
    table = capsys.readouterr().out
    names = "device client status online since last contact last reply of run missed version clock epsilon"
    assert names in " ".join(table.split())
    assert "the server's certificate ends in 364 days" in table
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in found["devices"]}
    assert found["certificate_days"] == 364
    sketch, printed = rows["sketch-0"], rows["printed-0"]
    assert sketch["status"] == "online"
    assert sketch["online_since"] < sketch["last_reply"] < sketch["last_contact"]
    assert sketch["last_run"] == printed["last_run"] == "one"
    assert sketch["missed"] == 0
    assert abs(sketch["clock_ahead"]) < 60
    assert printed["status"] == "dismissed"
    assert printed["dismissed"] == pytest.approx(time.time(), abs=600)
    assert 'goldfinch_device_online{device="sketch-0"} 1' in metrics.read_text()
    assert "printed-0" not in metrics.read_text(), "a dismissed device raises no alarm"
    assert read_gauges(metrics)["certificate_days"] == 364


@pytest.mark.processes
@pytest.mark.long
def test_a_real_device_writes_its_own_numbers(deployed: tuple[LocalDeployment, Path]) -> None:
    deployment, _ = deployed
    path = deployment.folder / "nodes" / "sketch-0" / METRICS
    found = wait_until(lambda: _with_reply(path), "a reply in the file")
    assert found["last_heartbeat_timestamp_seconds"] == pytest.approx(time.time(), abs=60)
    assert found["certificate_days"] == pytest.approx(365, abs=1)
    assert found["replies"] >= 2
    assert found["slowest_start_seconds"] < 600


def _with_reply(path: Path) -> dict[str, float]:
    found = read_gauges(path)
    return found if found.get("replies", 0) >= 2 else {}
