from __future__ import annotations

import io
import logging
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from support.toy import toy_settings

from common.text import warn_once
from goldfinch.cli import main
from goldfinch.commands.watch import watch
from goldfinch.trackers.live import LiveView, sparkline, watching
from server.run.events import Subject, count_lines, plain_lines

LONG = "RuntimeError: the camera fell off and this message is a good deal longer than any terminal is wide" * 3


def feed(show: Any, rounds: int = 5) -> None:
    """A run's events, with a failure and a refusal."""
    show("registered", {"client": "dark-0"})
    show("start", {"round": 0, "rounds": rounds, "method": "fpl", "data": "toy", "clients": ["dark-0", "bright-0"]})
    for number in range(1, rounds + 1):
        show("round", {"round": number, "clients": ["dark-0", "bright-0"]})
        values = {"a domain with quite a long name": 10.0 * number, "dark": 80.0 - number}
        score = {"accuracy": values, "average": sum(values.values()) / 2, "worst": min(values.values())}
        show("score", {"round": number - 1, **score})
        outcomes = {"trained": 2}
        if number == 3:
            show("client failed", {"round": 3, "client": "dark-0", "reason": LONG})
            outcomes = {"trained": 1, "failed": 1}
        show(
            "round done",
            {
                "round": number,
                "seconds": 2.0,
                "outcomes": outcomes,
                "losses": {"cross_entropy": 1 / number, "contrast": 0.5},
                "bytes_up": 1500,
                "bytes_down": 2_500_000,
            },
        )


@pytest.mark.parametrize("width", [44, 80, 120])
def test_no_line_is_wider_than_the_terminal(tmp_path: Path, width: int) -> None:
    view = LiveView(Subject.of(toy_settings("fpl", tmp_path / "run")), Console(width=width))
    empty = shown_by(view, width)
    feed(view)
    drawn = shown_by(view, width)
    assert max(cell_len(line.rstrip()) for line in [*empty.splitlines(), *drawn.splitlines()]) <= width
    assert "the camera fell off" in drawn or width < 60
    words = " ".join(drawn.split())
    for told in ("round 5 of 5", "cross_entropy 0.200 ↓", "2 of 2 trained", "failed 0 now, 1 in all"):
        assert told in words
    assert "none failed" not in words


def test_the_time_left_follows_the_rounds(tmp_path: Path) -> None:
    now = [0.0]
    view = LiveView(Subject.of(toy_settings("fpl", tmp_path / "run")), Console(width=80), clock=lambda: now[0])
    view("start", {"round": 0, "rounds": 10, "method": "fpl", "data": "toy", "clients": ["a"]})
    view("round", {"round": 1, "clients": ["a"]})
    assert " left" not in shown_by(view)
    view("round done", {"round": 1, "seconds": 60.0})
    assert "540\u00a0s left" in shown_by(view)
    view("round", {"round": 2, "clients": ["a"]})
    now[0] += 30.0
    assert "510\u00a0s left" in shown_by(view)
    now[0] += 300.0  # a slow round: what is left does not fall below the rounds after it
    assert "480\u00a0s left" in shown_by(view)


@pytest.mark.parametrize(
    ("values", "width", "drawn"),
    [
        ([], 5, ""),
        ([2.0, 2.0], 5, "▄▄"),
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([0, 9, 0, 9, 0, 9, 7], 4, "▁▁▁█"),
        ([3.0, 4.0], 0, ""),
    ],
    ids=["none", "all equal", "every height", "the last that fit", "no room"],
)
def test_sparklines(values: list[float], width: int, drawn: str) -> None:
    assert sparkline(values, width) == drawn


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with watching(toy_settings("fpl", tmp_path / "run"), console=Console(file=io.StringIO())) as show:
        feed(show)
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "fpl on toy starts: 2 clients, 5 rounds" in printed
    assert "round 3: dark-0 failed: RuntimeError" in printed
    assert printed.count("average") == 5


def test_what_the_user_must_know_is_told_on_the_terminal_and_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = toy_settings("fpl", tmp_path / "run")
    told = "folder: a/.owl is not read (3 images in a system's folder)"
    with watching(settings, console=Console(file=io.StringIO())):
        warn_once(told)
    assert told in capsys.readouterr().err
    assert told in (settings.output_folder / "logs" / "goldfinch.log").read_text(encoding="utf-8")


def test_a_run_says_at_its_start_what_each_site_trains_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = toy_settings("fpl", tmp_path / "run")
    names = settings.data.class_names
    show = plain_lines(settings)
    for client, first in (("dark-0", 0), ("bright-0", 7)):
        show("registered", {"client": client, "class_counts": [first, *[2] * (len(names) - 1)]})
    show("start", {"round": 0, "rounds": 5, "method": "fpl", "data": "toy", "clients": ["bright-0", "dark-0"]})
    lines = capsys.readouterr().out.splitlines()[-4:]
    assert re.split(" {2,}", lines[0]) == ["training images", "all", *[name[:8].strip() for name in names]]
    assert lines[1].split() == ["bright-0", str(7 + 2 * (len(names) - 1)), "7", *["2"] * (len(names) - 1)]
    assert lines[3] == f"  only one client trains on {names[0]} (bright-0)"


def test_many_classes_and_clients_are_summed_up() -> None:
    counts = {f"site-{number}": [0, *[number + 1] * 39] for number in range(30)}
    lines = count_lines([f"class {number}" for number in range(40)], counts)
    assert len(lines) == 1 + 12 + 2
    assert lines[1].split() == ["site-0", "39", "39", "classes,", "1", "to", "1", "images", "each"]
    assert "and 18 more clients" in lines[-2]
    assert lines[-1] == "  no client trains on class 0"


def test_a_terminal_gets_the_live_view_and_ends_with_it(tmp_path: Path) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, height=40)
    with watching(toy_settings("fpl", tmp_path / "run"), console=console) as show:
        assert isinstance(show, LiveView)
        feed(show)
        show("finish", {"round": 5, "sha256": "0" * 64})
    assert "finished" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[?25h")  # the terminal's own cursor is back


def test_quiet_shows_nothing_and_libraries_speak_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = toy_settings("fpl", tmp_path / "run")
    handlers = list(logging.getLogger().handlers)
    with watching(settings, quiet=True) as show:
        feed(show)
        logging.getLogger("flwr").warning("noise of a library")
        warnings.warn("a deprecation", stacklevel=1)
        silent = capsys.readouterr()
        show("tracker failed", {"tracker": "Spy", "reason": "the network is gone"})
        show("metric failed", {"round": 2, "reason": "no pixel"})
    assert (silent.out, silent.err) == ("", "")
    assert capsys.readouterr().err.splitlines() == [
        "Spy is left out from here on: the network is gone",
        "round 2: your own metric has no value: no pixel",
    ]
    log = (tmp_path / "run" / "logs" / "goldfinch.log").read_text()
    assert "noise of a library" in log
    assert "a deprecation" in log
    assert logging.getLogger().handlers == handlers


def test_the_view_names_whom_a_round_waits_for_and_since_when(tmp_path: Path) -> None:
    now = [0.0]
    view = LiveView(Subject.of(toy_settings("fpl", tmp_path / "run")), Console(width=100), clock=lambda: now[0])
    clients = ["dark-0", "bright-0", "grey-0"]
    view("start", {"round": 0, "rounds": 5, "method": "fpl", "data": "toy", "clients": clients})
    view("round", {"round": 1, "clients": clients})
    view("round done", {"round": 1, "seconds": 6.0, "outcomes": {"trained": 3}, "losses": {}})
    view("round", {"round": 2, "clients": clients})
    now[0] += 8.0
    view("waiting", {"round": 2, "clients": ["dark-0"], "seconds": 8.0})
    now[0] += 24.0  # the node was killed 30 s ago
    drawn = shown_by(view)
    assert "waiting  for dark-0, 32" in drawn
    assert "2 of 3 have answered" in drawn
    assert "3 of 3 trained" not in drawn
    assert " left" not in drawn
    view("round done", {"round": 2, "seconds": 60.0, "outcomes": {"trained": 2, "lost": 1}, "losses": {}})
    drawn = shown_by(view)
    assert "2 of 3 trained" in drawn
    assert "waiting" not in drawn
    now[0] += 45.0
    assert "silent   no event for 45" in shown_by(view)


def shown_by(view: LiveView, width: int = 100) -> str:
    """What the view draws, without colours."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False, color_system=None)
    console.print(view)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]  # the file is the StringIO above


@pytest.fixture
def place(finished_runs: Path, tmp_path: Path) -> Path:
    """A copy of a run, which a test changes."""
    return Path(shutil.copytree(finished_runs / "fedavg-0", tmp_path / "run"))


def test_a_run_that_another_process_trains_is_watched_to_its_end(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    events = (place / "events.jsonl").read_text().splitlines(keepends=True)
    (place / "events.jsonl").write_text("".join(events[:-2]) + events[-2][:10])  # the run writes while it is read

    def go_on(seconds: float) -> None:
        (place / "events.jsonl").write_text("".join(events))

    with monkeypatch.context() as patch:
        patch.setattr("goldfinch.commands.watch.time.sleep", go_on)
        assert main(["report", str(place), "--watch"]) == 0
    printed = capsys.readouterr().out
    assert "fedavg on toy starts: 3 clients, 4 rounds" in printed
    assert "finished after round 4" in printed
    assert not (place / "report.html").exists()
    screen = io.StringIO()
    watch(place, Console(file=screen, width=100, force_terminal=True, color_system=None))
    assert "finished" in screen.getvalue()
    for line in (place / "events.jsonl", place / "config.yaml"):
        line.unlink()
        assert main(["report", str(place), "--watch"]) == 1
    assert main(["report", str(place), str(place), "--watch"]) == 1


def test_ctrl_c_ends_the_watching_alone(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events = (place / "events.jsonl").read_text().splitlines(keepends=True)
    (place / "events.jsonl").write_text("".join(events[:-1]))

    def press(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("goldfinch.commands.watch.time.sleep", press)
    assert main(["report", str(place), "--watch"]) == 130
    assert "no longer watching; the run is untouched" in capsys.readouterr().err
