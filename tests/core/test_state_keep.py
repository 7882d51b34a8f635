"""A node removes the state of runs that have been idle for ``state-keep`` days, and nothing else."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest
import torch
from support.nodes import OVERRIDES

from client.idle_runs import forget_runs
from client.node import answer_question
from client.resident.messages import Question
from common.client_state import Version, client_stores

DAY = 86_400.0


def aged(folder: Path, days: float) -> None:
    """Set the time at which everything in a folder was written."""
    written = time.time() - days * DAY
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (written, written))


@pytest.fixture
def states(tmp_path: Path) -> Path:
    """The states of three runs, and the device's own files."""
    for run in ("old", "late", "new"):
        store = client_stores(tmp_path, "sketch-0", 3)(run)
        store.save(Version(1, 1), {"head": torch.ones(2)})
    (tmp_path / ".privacy" / "sketch").mkdir(parents=True)
    (tmp_path / ".privacy" / "sketch" / "ledger.json").write_text("{}")
    for run, days in {"old": 40, "late": 40, "new": 1, ".privacy": 400}.items():
        aged(tmp_path / run, days)
    newest = max((tmp_path / "late").rglob("*.safetensors"))
    os.utime(newest)  # the run is resumed today
    return tmp_path


def test_idle_runs_go_and_the_device_s_own_files_stay(states: Path) -> None:
    assert forget_runs(states, 30) == ["old"]
    assert sorted(path.name for path in states.iterdir()) == [".privacy", "late", "new"]
    assert (states / ".privacy" / "sketch" / "ledger.json").exists()
    assert forget_runs(states / "none", 30) == []


def test_a_folder_that_holds_anything_else_is_no_run_s(states: Path) -> None:
    """``state-dir`` may name a folder that has more in it, such as the home of the device's user."""
    for name in ("Documents/thesis.txt", "images/dog/1.png", "flower/config.toml", "top.txt"):
        (states / name).parent.mkdir(parents=True, exist_ok=True)
        (states / name).write_text("mine")
    store = client_stores(states, "sketch-0", 3)("noted")
    store.save(Version(1, 1), {"head": torch.ones(2)})
    (store.folder / "note.txt").write_text("mine")
    (states / "empty").mkdir()
    unfinished = states / "old" / "sketch-0" / ".state-1-000002.safetensors.0a1b2c3d"
    unfinished.write_bytes(b"")  # of a process that was killed while it wrote
    aged(states / "old", 40)
    for name in ("Documents", "images", "flower", "noted", "empty"):
        aged(states / name, 400)
    before = sorted(path for path in states.rglob("*") if "old" not in path.parts)
    assert forget_runs(states, 30) == ["old"]
    assert sorted(states.rglob("*")) == before


def test_a_link_to_another_folder_is_not_followed(states: Path, tmp_path: Path) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "image.png").write_text("")
    aged(outside, 99)
    (states / "linked").symlink_to(outside)
    forget_runs(states, 0.5)
    assert (outside / "image.png").exists()


@pytest.mark.parametrize(("keep", "left"), [(None, True), (30, False), (50.5, True)])
def test_a_node_forgets_when_it_registers_and_says_so(
    keep: float | None, left: bool, states: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a configuration of logging, as in a device's processes, warnings alone are printed."""
    configuration = {"domain": "sketch", "state-dir": str(states)}
    if keep is not None:
        configuration["state-keep"] = keep
    reply = answer_question(Question("register", 7, {"overrides": " ".join(OVERRIDES)}, configuration))
    assert reply.ok, reply.text
    assert (states / "old").exists() == left
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any("the state of run old was idle" in line for line in said) != left


@pytest.mark.parametrize("keep", [0, -1, "a week", True, float("nan")])
def test_a_wrong_number_of_days_is_refused(keep: object, states: Path) -> None:
    configuration = {"domain": "sketch", "state-dir": str(states), "state-keep": keep}
    reply = answer_question(Question("register", 7, {"overrides": " ".join(OVERRIDES)}, configuration))
    assert not reply.ok
    assert "state-keep must be a number of days" in reply.text
    assert (states / "old").exists()


@pytest.mark.parametrize("folder", ["", "~/state", "state"])
def test_a_state_folder_that_depends_on_where_the_node_was_started_is_refused(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    configuration = {"domain": "sketch", "state-dir": folder}
    reply = answer_question(Question("register", 7, {"overrides": " ".join(OVERRIDES)}, configuration))
    assert f"state-dir must be a whole path, from / on; got {folder!r}" in reply.text
    assert not list(tmp_path.iterdir())
