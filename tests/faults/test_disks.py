"""Disks that are full, small, torn or read-only: messages that name what to do, and a resume that loses nothing."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from support.faults import PATIENCE, forked, small_disk, trials
from support.killable import go_on, with_small_files
from support.runs import Run, run
from support.toy import toy_settings

from common.client_state import ClientStore, Version
from common.errors import ConfigError, DataError, EngineError
from common.settings import RunSettings
from goldfinch.cli import main
from goldfinch.record import RunRecord as FinishedRun
from goldfinch.study.storage import JOURNAL, storage_of
from server.engines.inline import InlineEngine
from server.run.checkpoint import Checkpoints
from server.run.conduct import prepare_output, run_federation, run_lock
from server.run.events import plain_lines

ROUNDS = 4


def settings(output: Path, **more: Any) -> RunSettings:
    return toy_settings("fpl", output, train={"rounds": ROUNDS}, **more)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(settings(tmp_path_factory.mktemp("undisturbed")))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was stopped before its last round."""
    return run(settings(tmp_path_factory.mktemp("stopped")), stop_after=ROUNDS - 1).folder


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("share", [0.05, 0.4, 0.8])
def test_a_full_disk_is_named_and_the_run_goes_on_when_there_is_space(
    share: float, undisturbed: Run, tmp_path: Path
) -> None:
    """Real ENOSPC: in the beginning, at a first checkpoint, at a later one."""
    kib = max(8, int(share * size_of(undisturbed.folder) / 1024))
    with small_disk(tmp_path / "disk", f"{kib}k") as change:
        output = tmp_path / "disk" / "run"
        with pytest.raises((EngineError, ConfigError), match="No space left on device") as caught:
            run(settings(output))
        assert str(output) in str(caught.value)
        assert "resume=true" in str(caught.value) or "choose another output=" in str(caught.value)
        assert not (output / "summary.json").exists()
        assert not list(output.rglob(".*")), "a half-written file was left"
        change("size=64m")
        again = run(settings(output, resume=True))
        assert again.sha256 == undisturbed.sha256
        assert again.summary["scores"] == undisturbed.summary["scores"]


@pytest.mark.long
def test_a_limit_on_file_sizes_is_named(undisturbed: Run, tmp_path: Path) -> None:
    largest = max(path.stat().st_size for path in undisturbed.folder.rglob("*") if path.is_file())
    process = forked(with_small_files, str(tmp_path / "run"), "fpl", ROUNDS, largest // 2, str(tmp_path / "error"))
    process.join(PATIENCE)
    assert process.exitcode == 0
    assert "File too large; raise the limit on the size of files (ulimit -f)" in (tmp_path / "error").read_text()
    process = forked(go_on, str(tmp_path / "run"), "fpl", ROUNDS)
    process.join(PATIENCE)
    assert FinishedRun.open(tmp_path / "run").summary["state_sha256"] == undisturbed.sha256


def test_a_read_only_folder_is_named_before_anything_runs(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "8m") as change:
        change("ro")
        for output in (tmp_path / "disk", tmp_path / "disk" / "new"):
            with pytest.raises(ConfigError, match=r"cannot write to .*Read-only file system; choose another output="):
                prepare_output(settings(output))


def test_a_disk_that_becomes_read_only_ends_the_run_with_a_way_on(undisturbed: Run, tmp_path: Path) -> None:
    """As Linux does with a disk that has errors."""
    with small_disk(tmp_path / "disk", "64m") as change:
        output = tmp_path / "disk" / "run"
        with pytest.raises(EngineError, match=r"Read-only file system; make it writable, then .*resume=true"):
            listening(settings(output), lambda: change("ro"))
        change("rw")
        assert run(settings(output, resume=True)).sha256 == undisturbed.sha256


def listening(chosen: RunSettings, act: Callable[[], None]) -> None:
    """A run in which something happens after its second round."""

    def listen(name: str, entry: Mapping[str, Any]) -> None:
        if name == "round done" and entry["round"] == 2:
            act()

    prepare_output(chosen)
    run_federation(chosen, InlineEngine(chosen), [listen])


def test_a_client_s_full_disk_is_named(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k"):
        store = ClientStore(tmp_path / "disk" / "client")
        first, second = Version(0, 1), Version(0, 2)
        store.save(first, {"a": torch.ones(1000)})
        with pytest.raises(DataError, match=r"own state cannot be written to .*No space left.*\.privacy.*in state-dir"):
            store.save(second, {"a": torch.ones(100_000)}, first)
        assert store.load(first).tensors["a"].tolist() == [1.0] * 1000


@pytest.mark.parametrize("trial", range(trials(5)))
@pytest.mark.long
def test_a_checkpoint_torn_anywhere_costs_a_round_and_nothing_else(
    trial: int, undisturbed: Run, stopped: Path, tmp_path: Path
) -> None:
    """From its first byte to its last."""
    output = shutil.copytree(stopped, tmp_path / "run")
    newest = max((output / "checkpoint").iterdir())
    whole = newest.read_bytes()
    newest.write_bytes(whole[: trial * len(whole) // trials(5)])
    assert run(settings(output, resume=True)).sha256 == undisturbed.sha256


def test_two_processes_cannot_write_one_run(stopped: Path, tmp_path: Path) -> None:
    """A submitted run goes on without a terminal; it must not be resumed meanwhile."""
    output = shutil.copytree(stopped, tmp_path / "run")
    with run_lock(output):
        for more in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(ConfigError, match=r"another process is writing a run to .*flwr stop"):
                run(replace(settings(output), **more))
    assert run(settings(output, resume=True)).summary["rounds"] == ROUNDS


def test_seconds_of_a_crashed_part_count(tmp_path: Path) -> None:
    """Up to its last complete round."""

    class Crash(BaseException):
        pass

    def crash() -> None:
        raise Crash

    with pytest.raises(Crash):
        listening(settings(tmp_path), crash)
    found = Checkpoints(tmp_path / "checkpoint").load()
    assert found is not None
    assert (found.state.round, found.rounds) == (1, ROUNDS)
    again = run(settings(tmp_path, resume=True))
    finished = Checkpoints(tmp_path / "checkpoint").load()
    assert finished is not None
    assert again.summary["wall_seconds"] >= finished.seconds > found.seconds > 0


def test_a_full_disk_for_a_figure_is_named_and_an_earlier_figure_stays(
    undisturbed: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", "8k") as change:
        picture = tmp_path / "disk" / "accuracy.png"
        picture.write_bytes(b"the earlier figure")
        arguments = ["figure", "bars", str(undisturbed.folder), "--output", str(picture)]
        assert main(arguments) == 1
        error = capsys.readouterr().err
        assert f"error: {picture}: No space left on device; free space on that disk" in error
        assert "Traceback" not in error
        assert [path.name for path in picture.parent.iterdir()] == [picture.name]
        assert picture.read_bytes() == b"the earlier figure"
        change("size=8m")
        assert main(arguments) == 0
        assert picture.stat().st_size > 8192


@pytest.mark.parametrize("command", ["resume", "sweep"])
def test_a_summary_for_which_the_disk_had_no_room_is_written_later(command: str, tmp_path: Path) -> None:
    """The run itself has ended and is not repeated."""
    folder = tmp_path / "runs"
    chosen = ["data=glyphs", "data.domains=[handwritten,printed]", "train.rounds=1", "train.local_steps=1"]
    repeated = {"resume": ["resume", str(folder)], "sweep": ["sweep", *chosen, "seed=0", "--output", str(folder)]}
    if command == "resume":
        assert main(["run", *chosen, "seed=0", "engine=inline", f"output={folder}"]) == 0
    else:
        assert main(repeated["sweep"]) == 0
    written = (folder / "summary.json").read_bytes()
    events = (folder / "events.jsonl").read_bytes()
    (folder / "summary.json").unlink()
    assert main(repeated[command]) == 0
    assert (folder / "summary.json").read_bytes() == written
    assert (folder / "events.jsonl").read_bytes() == events


def test_a_full_disk_of_a_sweep_s_log_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run's own message is lost with its log."""
    with small_disk(tmp_path / "disk", "4k"):
        output = tmp_path / "disk" / "runs"
        assert main(["sweep", "data=glyphs", "seed=0,1", "--output", str(output)]) == 1
    assert f"exit code 1: no space left on the disk of {output / 'seed-0' / 'run.log'}" in capsys.readouterr().err


def test_a_full_disk_of_what_a_run_prints_is_not_said_to_be_its_folder_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings(tmp_path / "run")
    prepare_output(chosen)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("builtins.print", full)
    with pytest.raises(EngineError, match=r"^standard output: No space left on device; free .* resume=true"):
        run_federation(chosen, InlineEngine(chosen), [plain_lines(chosen)])


def test_a_journal_that_a_full_disk_cut_short_loses_nothing_that_was_written(tmp_path: Path) -> None:
    """The next entry used to stand on the torn line, which made the whole search unreadable."""
    with small_disk(tmp_path / "disk", "16k") as change:
        output = tmp_path / "disk"
        study = optuna.create_study(storage=storage_of(output), study_name="a")
        with pytest.raises(OSError, match=rf"No space left on device: '{output / JOURNAL}'"):  # noqa: PT012
            while True:
                study.ask().set_user_attr("text", "x" * 100)
        assert (output / JOURNAL).read_bytes()[-1:] != b"\n", "no line was cut short"
        change("size=1m")
        found = optuna.load_study(storage=storage_of(output), study_name="a")
        before = len(found.trials)
        assert before > 20
        for each in (study, found, optuna.load_study(storage=storage_of(output), study_name="a")):
            each.tell(each.ask(), 1.0)
        again = optuna.load_study(storage=storage_of(output), study_name="a")
        assert len(again.trials) == before + 3


def test_a_journal_s_torn_line_may_be_longer_than_what_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("goldfinch.study.storage.BLOCK", 7)
    study = optuna.create_study(storage=storage_of(tmp_path), study_name="a")
    whole = (tmp_path / JOURNAL).read_bytes()
    with (tmp_path / JOURNAL).open("ab") as stream:
        stream.write(b'{"op_code":8,"worker_id":"30266b6')
    study.ask()
    assert (tmp_path / JOURNAL).read_bytes().startswith(whole + b'{"op_code":4,')
