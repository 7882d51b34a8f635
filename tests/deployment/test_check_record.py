"""The check of the demonstration's record: what it accepts, and what it reports for wrong records."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest
from support.scripts import load_script

from common.settings import load_settings
from common.wire.messages import TRAINED_STATUSES
from server.engines.inline import InlineEngine
from server.run.conduct import prepare_output, run_federation
from tests.support.records import Line, change_events, rewrite

ROUNDS = 6
CLIENTS = 4
KILLED = "sketch-0"


@pytest.fixture(scope="module")
def check_record() -> ModuleType:
    return load_script("docker/check_record.py")


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of four clients in which nothing went wrong."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    tiny = ["protocol.samples=12", "train.local_steps=1", "rounds.test_samples=4", "rounds.evaluate_every=6"]
    settings = load_settings(["method=fedavg", f"train.rounds={ROUNDS}", *tiny, f"output={folder}"])
    prepare_output(settings)
    run_federation(settings, InlineEngine(settings))
    return folder


def recorded(whole: Path, folder: Path, lost: Iterable[int], status: str = "trained", client: str = KILLED) -> Path:
    """A copy of the run in which ``client`` was lost in some rounds and all others have ``status``."""
    shutil.copytree(whole, folder)

    def edit(line: Line) -> Line:
        if line["status"] in TRAINED_STATUSES:
            line["status"] = status
        if line["client"] == client and line["round"] in lost:
            line["status"], line["reason"] = "lost", "Node Unavailable"
        return line

    rewrite(folder / "replies.jsonl", edit)
    return folder


def arguments(folder: Path) -> list[str]:
    return [str(folder), "--rounds", str(ROUNDS), "--clients", str(CLIENTS), "--killed", KILLED]


@pytest.mark.parametrize("status", sorted(TRAINED_STATUSES))
def test_a_node_that_was_away_and_came_back_is_right(
    check_record: ModuleType, whole_run: Path, tmp_path: Path, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where updates of honest clients were scaled: they trained."""
    folder = recorded(whole_run, tmp_path / "run", lost=(2, 3), status=status)
    assert check_record.main(arguments(folder)) == 0
    lines = capsys.readouterr().out
    assert re.search(r"round 2: 3 of 4 nodes trained  \(sketch-0 lost: Node Unavailable\)", lines)
    assert len(re.findall(r"4 of 4 nodes trained", lines)) == 4
    assert "missed in rounds [2, 3] and trained again in rounds [4, 5, 6]" in lines


def test_a_node_that_was_back_before_its_round_was_closed_is_right(
    check_record: ModuleType, whole_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was killed before it had fetched its request, and the server waited for it."""
    assert check_record.main(arguments(whole_run)) == 0
    assert "was back before its round was closed and was missed in none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lost", "other", "rounds", "word"),
    [
        ((2, 3, 4, 5, 6), (), ROUNDS, "not back"),
        ((2, 3, 4, 5), (), ROUNDS, "at most 3"),
        ((2,), (4,), ROUNDS, "in round 4 only"),
        ((2,), (), 5, "5 rounds"),
    ],
    ids=["never back", "back too late", "another node was lost", "too few rounds"],
)
def test_a_record_that_is_not_right_is_named(
    check_record: ModuleType,
    whole_run: Path,
    tmp_path: Path,
    lost: tuple[int, ...],
    other: tuple[int, ...],
    rounds: int,
    word: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = recorded(whole_run, tmp_path / "one", lost)
    folder = recorded(folder, tmp_path / "two", other, client="signs-0")
    change_events(folder, "finish", round=rounds)
    assert check_record.main(arguments(folder)) == 1
    assert word in capsys.readouterr().err


def test_a_folder_without_a_run_is_named(
    check_record: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_record.main(arguments(tmp_path)) == 1
    assert str(tmp_path) in capsys.readouterr().err
