"""Scaled, left out and refused are statuses of their own, with counts of their own, wherever a run is shown."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support.runs import Edit, TouchedEngine, run
from support.toy import toy_settings

from common.settings import RunSettings
from common.wire.messages import COUNTED_STATUSES, Request
from common.wire.payload import Payload
from goldfinch.cli import main
from goldfinch.record import RunRecord
from goldfinch.results.groups import group_runs
from goldfinch.results.report.page import write_report
from goldfinch.results.report.results import client_rows
from goldfinch.trackers.live import LiveView
from goldfinch.trackers.scalars import scalars
from server.run.conduct import run_federation
from server.run.events import Subject, counts_text, plain_lines
from server.run.files import ReplyTotals

REASONS = {"scaled": "longer than the bound", "refused": "values that are not finite"}


def multiplied(factor: float) -> Edit:
    """From round 2 on, dark-0 multiplies what it sends."""

    def edit(request: Request, payload: Payload) -> Payload:
        if request.client != "dark-0" or request.round < 2 or not request.train:
            return payload
        sent = payload.weights.items()
        weights = {name: tensor * factor if tensor.is_floating_point() else tensor for name, tensor in sent}
        return replace(payload, weights=weights)

    return edit


def guarded(folder: Path, outliers: str, **more: object) -> RunSettings:
    rounds = {"outliers": outliers, "outlier_factor": 4.0, **more}
    return toy_settings("fedavg", folder, train={"rounds": 3}, rounds=rounds)


def shown(view: LiveView, width: int = 80) -> list[str]:
    """The lines of the live view in a terminal of that width."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False, color_system=None)
    console.print(view)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("factor", "outliers", "status", "told", "times"),
    [(100.0, "clip", "scaled", "2 of 9 updates scaled", 1), (math.nan, "off", "refused", "2 refused", 2)],
)
def test_each_status_has_its_own_count_everywhere(
    factor: float,
    outliers: str,
    status: str,
    told: str,
    times: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = guarded(tmp_path / "run", outliers)
    view = LiveView(Subject.of(settings), Console(width=80))
    engine = TouchedEngine(settings, edit=multiplied(factor))
    logged: dict[str, float] = {}

    def track(name: str, entry: object) -> None:
        logged.update({scalar.tag: scalar.value for scalar in scalars(name, entry)})  # type: ignore[arg-type]

    summary = run_federation(settings, engine, [view, plain_lines(settings), track])
    others = {"scaled", "refused"} - {status}
    done = RunRecord.open(tmp_path / "run")
    mine = [row for row in done.replies if row["client"] == "dark-0" and row["round"] in (2, 3)]
    assert [row["status"] for row in mine] == [status, status]
    assert all(REASONS[status] in row["reason"] for row in mine)
    assert summary["answers"][status] == 2
    assert summary["answers"] == done.answers == ReplyTotals.of(done.replies).answers
    assert list(summary["answers"]) == ["admitted", *COUNTED_STATUSES]
    assert all(summary["answers"][other] == 0 for other in others)
    assert [entry["client"] for entry in done.events if entry["event"] == f"client {status}"] == ["dark-0", "dark-0"]
    assert logged[f"round/clients_{status}"] == 1
    assert not [tag for tag in logged if any(tag.endswith(f"clients_{other}") for other in others)]

    assert counts_text(summary["answers"]) == told
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].endswith(f"; {told}")
    about = [line for line in lines if REASONS[status] in line]
    assert ["dark-0" in line for line in about] == [True] * times, "a bound is told once, a refusal every time"

    drawn = shown(view)
    assert [line for line in drawn if line.strip().startswith(status) and line.endswith("1 now, 2 in all")]
    assert ("none failed" in "\n".join(drawn)) == (status == "scaled")
    assert not [line for line in drawn if line.startswith(tuple(others))]

    (board,) = group_runs([done])
    assert f"Replies: {board.rows[0].label}: {told}." in board.notes()
    assert main(["table", str(tmp_path)]) == 0
    assert told in " ".join(capsys.readouterr().out.split())
    assert sum(row[status] for row in client_rows(done)) == 2
    page = write_report([str(tmp_path)]).read_text()
    assert f'<th scope="col">{status}</th>' in page
    assert not [other for other in others if f'<th scope="col">{other}</th>' in page]


def test_a_plain_run_tells_nothing_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "method=fpl", "data=glyphs", "train.rounds=1", "train.local_steps=1", "protocol.samples=24"]
    assert main([*words, "rounds.test_samples=8", f"output={tmp_path / 'run'}"]) == 0
    assert main(["table", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for word in ("scaled", "refused", "bound", "counts less", "Replies"):
        assert word not in printed
    assert RunRecord.open(tmp_path / "run").answers == {"admitted": 4, **dict.fromkeys(COUNTED_STATUSES, 0)}


@pytest.mark.parametrize("width", [44, 80])
def test_every_status_fits_a_narrow_view_with_the_reason_first(width: int, tmp_path: Path) -> None:
    view = LiveView(Subject.of(guarded(tmp_path, "clip")), Console(width=width))
    outcomes = {"trained": 4321, **dict.fromkeys(COUNTED_STATUSES, 1234)}
    for number in (1, 2):
        view("round done", {"round": number, "seconds": 1.0, "outcomes": outcomes})
    for number in range(20):
        reason = f"as {number} of 50 samples (rounds.largest_client, rounds.largest_share)"
        view("client counts less", {"round": 1, "client": f"a-{number}", "reason": reason})
    drawn = shown(view, width)
    assert max(map(len, drawn)) <= width
    text = " ".join(" ".join(drawn).split())
    for status in COUNTED_STATUSES:
        assert f"{status} 1,234 now, 2,468 in all" in text
    assert "none failed" not in text
    assert "fewer than registered count: 20 clients" in text
    assert not view.notes, "twenty notes of one kind would hide all others"


@pytest.mark.usefixtures("undrawn")
def test_clients_that_count_less_are_in_summary_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    summary = run(guarded(folder, "off", largest_share=0.34)).summary
    assert list(summary["counts_less"]) == ["bright-0", "dark-0"]
    entry = summary["counts_less"]["dark-0"]
    assert entry["registered"] == summary["clients"]["dark-0"]
    assert 0 < entry["counted"] < entry["registered"]
    assert entry["round"] == 1
    (board,) = group_runs([RunRecord.open(folder)])
    (note,) = [note for note in board.notes() if note.startswith("Clients count for fewer samples")]
    assert f"dark-0 as {entry['counted']} of {entry['registered']}" in note
    assert main(["table", str(folder)]) == 0
    assert "Clients count for fewer samples" in " ".join(capsys.readouterr().out.split())
    assert "Clients count for fewer samples" in write_report([str(folder)]).read_text()
    settings = guarded(folder, "off", largest_share=0.34)
    again = run(replace(settings, train=replace(settings.train, rounds=4), resume=True))
    assert "client counts less" not in [name for name, _ in again.events], "they were told before"
    assert again.summary["counts_less"] == summary["counts_less"]
