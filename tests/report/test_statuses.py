"""Scaled, left out and refused are statuses of their own, with counts of their own, wherever a run is shown."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support.runs import Edit, TouchedEngine, run
from support.toy import toy_settings

from common.settings import RunSettings
from common.wire.messages import COUNTED_STATUSES, Request
from common.wire.payload import Payload
from server.cli import main
from server.results.groups import group_runs
from server.results.report.page import write_report
from server.results.report.results import client_rows
from server.results.run import RunFolder
from server.run.conduct import run_federation
from server.run.history import answers
from server.trackers.events import Subject, counts_text, plain_lines
from server.trackers.live import LiveView
from server.trackers.scalars import scalars

EARLIER = "longer than the bound, scaled: parameters by 0.5"
REASONS = {"scaled": "longer than the bound", "refused": "values that are not finite"}
OPPOSED = "left out: its update works against the other clients'"


def ten_times_too_far(request: Request, payload: Payload) -> Payload:
    """From round 2 on, dark-0 sends an update that is much longer than the others."""
    if request.client != "dark-0" or request.round < 2 or not request.train:
        return payload
    weights = {name: tensor * 100 if tensor.is_floating_point() else tensor for name, tensor in payload.weights.items()}
    return replace(payload, weights=weights)


def not_finite(request: Request, payload: Payload) -> Payload:
    """From round 2 on, dark-0 sends numbers that are none."""
    if request.client != "dark-0" or request.round < 2 or not request.train:
        return payload
    weights = dict(payload.weights)
    name = next(iter(weights))
    weights[name] = weights[name] * float("nan")
    return replace(payload, weights=weights)


def guarded(folder: Path, outliers: str, **more: object) -> RunSettings:
    rounds = {"outliers": outliers, "outlier_factor": 4.0, **more}
    return toy_settings("fedavg", folder, train={"rounds": 3}, rounds=rounds)


def shown(view: LiveView, width: int = 80) -> list[str]:
    """The lines of the live view in a terminal of that width."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False, color_system=None)
    console.print(view)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("edit", "status"), [(ten_times_too_far, "scaled"), (not_finite, "refused")])
def test_each_status_has_its_own_count_everywhere(
    edit: Edit, status: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = guarded(tmp_path / "run", "clip")
    view = LiveView(Subject.of(settings), Console(width=80))
    engine = TouchedEngine(settings, edit=edit)
    logged: dict[str, float] = {}

    def track(name: str, entry: object) -> None:
        logged.update({scalar.tag: scalar.value for scalar in scalars(name, entry)})  # type: ignore[arg-type]

    summary = run_federation(settings, engine, [view, plain_lines(settings), track])
    others = {"scaled", "refused"} - {status}
    done = RunFolder.open(tmp_path / "run")
    mine = [row for row in done.replies if row["client"] == "dark-0" and row["round"] in (2, 3)]
    assert [row["status"] for row in mine] == [status, status]
    assert all(REASONS[status] in row["reason"] for row in mine)
    assert summary["answers"][status] == 2
    assert summary["answers"] == done.answers == answers(done.replies)
    assert list(summary["answers"]) == ["admitted", *COUNTED_STATUSES]
    assert all(summary["answers"][other] == 0 for other in others)
    assert [entry["client"] for entry in done.events if entry["event"] == f"client {status}"] == ["dark-0", "dark-0"]
    assert logged[f"round/clients_{status}"] == 1
    assert not [tag for tag in logged if any(tag.endswith(f"clients_{other}") for other in others)]

    told = counts_text(summary["answers"])
    assert told == ("2 of 9 updates scaled" if status == "scaled" else "2 refused")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].endswith(f"; {told}")
    about = [line for line in lines if REASONS[status] in line]
    assert len(about) == (1 if status == "scaled" else 2)
    if status == "scaled":
        assert "round 2: longer than the bound, scaled: 1 update, such as dark-0." in about[0]

    drawn = shown(view)
    text = "1 now, 2 in all"
    if status == "scaled":
        text = f"longer than the bound: {text}"
    assert [line for line in drawn if re.fullmatch(rf"{status} +{text}", line.strip())]
    assert ("none failed" in "\n".join(drawn)) == (status == "scaled")
    assert not [line for line in drawn if line.startswith(tuple(others))]

    (board,) = group_runs([done])
    assert f"Replies: {board.groups[0].label}: {told}." in board.notes()
    assert main(["table", str(tmp_path)]) == 0
    assert told in " ".join(capsys.readouterr().out.split())
    assert sum(row[status] for row in client_rows(done)) == 2
    page = write_report([str(tmp_path)]).read_text()
    assert f'<th scope="col">{status}</th>' in page
    assert not [other for other in others if f'<th scope="col">{other}</th>' in page]


def test_a_plain_run_tells_nothing_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "method=fpl", "data=glyphs", "train.rounds=2", "train.local_steps=1", "protocol.samples=24"]
    assert main([*words, "rounds.test_samples=8", f"output={tmp_path / 'run'}"]) == 0
    assert main(["table", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for word in ("scaled", "left out", "refused", "bound", "counts less", "Replies"):
        assert word not in printed
    assert RunFolder.open(tmp_path / "run").answers == {"admitted": 8, **dict.fromkeys(COUNTED_STATUSES, 0)}


@pytest.mark.parametrize("width", [44, 60, 80])
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
    assert "scaled longer than the bound: 1,234 now, 2,468 in all" in text
    for status in COUNTED_STATUSES[1:]:
        assert f"{status} 1,234 now, 2,468 in all" in text
    assert "none failed" not in text
    assert "fewer than registered count: 20 clients" in text
    assert not view.notes, "twenty notes of one kind would hide all others"


def test_clients_that_count_less_are_in_summary_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    summary = run(guarded(folder, "off", largest_share=0.34)).summary
    assert list(summary["counts_less"]) == ["bright-0", "dark-0"]
    entry = summary["counts_less"]["dark-0"]
    assert entry["registered"] == summary["clients"]["dark-0"]
    assert 0 < entry["counted"] < entry["registered"]
    assert entry["round"] == 1
    (board,) = group_runs([RunFolder.open(folder)])
    (note,) = [note for note in board.notes() if note.startswith("Clients count")]
    assert note.startswith("Clients count for fewer samples than they registered (rounds.largest_client, rounds.larg")
    assert f"dark-0 as {entry['counted']} of {entry['registered']}" in note
    assert main(["table", str(folder)]) == 0
    assert "Clients count for fewer samples" in " ".join(capsys.readouterr().out.split())
    assert "Clients count for fewer samples" in write_report([str(folder)]).read_text()
    longer = toy_settings(
        "fedavg",
        folder,
        train={"rounds": 4},
        rounds={"outliers": "off", "outlier_factor": 4.0, "largest_share": 0.34},
        resume=True,
    )
    again = run(longer)
    assert "client counts less" not in [name for name, _ in again.events], "they were told before"
    assert again.summary["counts_less"] == summary["counts_less"]
