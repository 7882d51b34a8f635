"""SIGTERM, which service managers and containers send, ends a run as Ctrl-C does and leaves nothing running."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.faults import PATIENCE, events, wait_until
from support.federation import ROOT

from goldfinch import cli
from server.run.signals import Terminated, terminable, uninterrupted

SMALL = ("method=fedavg", "protocol.samples=24", "train.batch_size=8", "train.device=cpu", "train.rounds=500")


COMMAND_LINE = ("-m", "goldfinch.cli")
FROM_PYTHON = ("-c", "import sys, goldfinch as gf; gf.run(*sys.argv[1:], quiet=True)")


def started(output: Path, *words: str, program: tuple[str, str] = COMMAND_LINE) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *program, *words],
        cwd=output.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GOLDFINCH_TEST": str(output)},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def descendants(mark: str) -> list[str]:
    """Command lines of processes, alive, that were started by the one that was given ``mark``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"GOLDFINCH_TEST={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found


@pytest.mark.parametrize("engine", ["inline", pytest.param("ray", marks=[pytest.mark.slow, pytest.mark.processes])])
@pytest.mark.long
def test_a_terminated_run_leaves_its_checkpoint_and_no_process(engine: str, tmp_path: Path) -> None:
    output = tmp_path / "run"
    process = started(output, "run", f"engine={engine}", *SMALL, f"output={output}")
    saved = output / "checkpoint"
    wait_until(lambda: list(saved.glob("*.safetensors")) or process.poll() is not None, "the first round")
    assert len(descendants(str(output))) >= (1 if engine == "inline" else 5)
    process.terminate()
    _, printed = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143, printed
    assert re.search(rf"stopped; round \d is kept: goldfinch resume {re.escape(str(output))} goes on", printed)
    assert "Traceback" not in printed
    assert list(saved.glob("*.safetensors"))
    wait_until(lambda: not descendants(str(output)), "the end of all that was started", 60)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["inline", pytest.param("ray", marks=[pytest.mark.slow, pytest.mark.processes])])
def test_a_terminated_program_that_calls_a_run_leaves_no_process(engine: str, tmp_path: Path) -> None:
    output = tmp_path / "run"
    process = started(output, f"engine={engine}", *SMALL, f"output={output}", program=FROM_PYTHON)
    saved = output / "checkpoint"
    wait_until(lambda: list(saved.glob("*.safetensors")) or process.poll() is not None, "the first round")
    process.terminate()
    _, printed = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0, printed
    wait_until(lambda: not descendants(str(output)), "the end of all that was started", 60)
    if engine == "inline":
        assert [entry["reason"] for entry in events(output, "interrupted")] == ["a signal to its process, or flwr stop"]


@pytest.mark.slow
def test_a_terminated_sweep_stops_its_runs_and_starts_no_other(tmp_path: Path) -> None:
    output = tmp_path / "sweep"
    process = started(output, "sweep", "seed=0,1", *SMALL, "engine=inline", "--output", str(output))
    first = output / "seed-0"
    saved = first / "checkpoint"
    wait_until(lambda: list(saved.glob("*.safetensors")) or process.poll() is not None, "the first round")
    begun = len(events(first, "start", "resume"))
    process.terminate()
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 143
    assert not descendants(str(output))
    assert len(events(first, "start", "resume")) == begun
    assert not (output / "seed-1" / "events.jsonl").exists()
    assert list(saved.glob("*.safetensors"))


def test_only_the_first_signal_counts_and_the_handler_is_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    cleaned: list[bool] = []

    def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # an impatient second one, while what was started is stopped
            time.sleep(0.05)
            cleaned.append(True)

    with pytest.raises(Terminated), terminable():
        work()
    assert cleaned
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "stopped"),
        (Terminated(), 143, "stopped"),
        (Terminated("no longer watching; the run goes on"), 143, "no longer watching"),
    ],
    ids=["interrupted", "terminated", "no longer watching"],
)
def test_exit_codes(
    error: BaseException, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        raise error

    monkeypatch.setattr("goldfinch.commands.doctor.examine", interrupted)
    assert cli.main(["doctor"]) == code
    assert words in capsys.readouterr().err


def test_a_signal_waits_where_a_lock_is_shared_with_other_threads() -> None:
    steps: list[str] = []

    def work() -> None:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
            steps.append("the lock is given back")
        steps.append("not reached")

    with pytest.raises(Terminated), terminable():
        work()
    assert steps == ["the lock is given back"]


def test_ctrl_c_waits_too_and_other_threads_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(_enter).result()


def _enter() -> bool:
    with uninterrupted():
        return True


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(20))
def test_a_signal_at_any_moment_ends_a_run_on_several_threads(trial: int, tmp_path: Path) -> None:
    output = tmp_path / "run"
    process = started(output, "engine=inline", "engine.workers=3", *SMALL, f"output={output}", program=FROM_PYTHON)
    saved = output / "checkpoint"
    wait_until(lambda: list(saved.glob("*.safetensors")) or process.poll() is not None, "the first round")
    time.sleep(0.013 * trial)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode != 0
